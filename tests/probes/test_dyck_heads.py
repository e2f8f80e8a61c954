"""dyck-heads against plain hooks on one prompt at a time, TransformerLens, and a model whose head is known."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import spearmanr

from smeltscope.activations import open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.model import (
    Checkpoint,
    checkpoint_of,
    decoder_stack,
    executions_of,
    load_checkpoint,
    tiny,
)
from smeltscope.probes import RunOptions, dyck_heads, run_probes, summarize
from smeltscope.probes.dyck_heads import DyckHeads, dyck_head_of
from smeltscope.probes.dyck_scores import GUESSES
from smeltscope.tasks import DocumentInfo, HeldOut, Prompts

Segment = dict[str, Any]  # ids, targets and labels of a prompt


def made_prompts(segments: Sequence[Segment]) -> HeldOut:
    """Segments as `nested` prompts; `scored` where a segment says so."""
    ids = [np.asarray(s["ids"], dtype=np.int32) for s in segments]
    targets = [np.asarray(s["targets"], dtype=np.int64) for s in segments]
    defaults = {"kind": "nested", "prompt_seed": 0}
    defaults |= {name: 2.0**-i for i, name in enumerate(GUESSES)}  # chances of the whole answer
    names = (*defaults, "shots", "item", "half")
    return HeldOut(
        tokens=np.concatenate(ids),
        offsets=np.cumsum([0, *map(len, ids)]).astype(np.int64),
        document=np.arange(len(ids), dtype=np.int32),
        documents=[
            DocumentInfo(id=f"{i}", category=f"{s['shots']} shots", source="made", file="made")
            for i, s in enumerate(segments)
        ],
        start_token=0,
        dropped={},
        notes=[],
        digest=str([i.tolist() for i in ids]),
        prompts=Prompts(
            region_names=("bos", "rest"),
            regions=[np.minimum(np.arange(len(i)), 1).astype(np.int8) for i in ids],
            answers=targets,
            targets=targets,
            marks={},
            states={},
            labels={name: np.array([{**defaults, **s}[name] for s in segments]) for name in names},
            vocabulary=[chr(i) for i in range(256)],
            stop="\n",
        ),
    )


def random_prompts(items: int = 4, shots: Sequence[int] = (1, 2), seed: int = 0) -> HeldOut:
    """Prompts of about ten tokens a shot; the last three are the targets."""
    rng = np.random.default_rng(seed)
    return made_prompts(
        [
            {
                "ids": [0, *rng.integers(1, 256, 9 * k + 5 + i % 3)],
                "targets": np.arange(-3, 0) + 9 * k + 6 + i % 3,
                "shots": k,
                "item": f"item {i}",
                "half": i % 2,
            }
            for k in shots
            for i in range(items)
        ]
    )


@pytest.fixture
def search(tmp_path) -> Callable[..., xr.DataTree]:
    def run(
        model: Any, prompts: HeldOut, ablation: str = "resample", tokens: int = 300
    ) -> xr.DataTree:
        checkpoint = model if isinstance(model, Checkpoint) else checkpoint_of(model)
        sampled = {"sampled_queries": 1, "sampled_tokens": 1}
        options = RunOptions(max_length=256, batch_tokens=tokens, **sampled)
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        probe = DyckHeads(ablation=ablation, donors=prompts)
        return open_run(run_probes(checkpoint, prompts, [probe], out, options))

    return run


def by_item(run: xr.DataTree) -> xr.Dataset:
    """The rows of a run, in the order of shots and items."""
    labels = run["segments"].dataset
    order = np.lexsort((labels["label_item"].values, labels["label_shots"].values))
    return run["dyck_heads"].dataset.isel(segment=order)


@contextmanager
def hooked(model: Any, change: Callable[[int, torch.Tensor], torch.Tensor]):
    """`change(execution, x)` is what the output projection gets for x, (1, T, head, size); one forward."""
    executions, layers = executions_of(model.config), decoder_stack(model)[1]
    runs, handles = Counter(), []
    for layer in dict.fromkeys(layers):
        mine = [e.index for e, o in zip(executions, layers, strict=True) if o is layer]

        def hook(module, args, mine=mine, size=layer.self_attn.head_dim):
            index = mine[runs[module]]
            runs[module] += 1
            changed = change(index, args[0].clone().unflatten(-1, (-1, size)))
            return (changed.flatten(2), *args[1:])

        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_of(model: Any, ids: np.ndarray, targets: np.ndarray) -> float:
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0].double()
    log_p = logits.log_softmax(-1)
    return -sum(float(log_p[t - 1, ids[t]]) for t in targets)


def read_in(model: Any, ids: np.ndarray) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    with hooked(model, lambda index, x: found.setdefault(index, x)):
        loss_of(model, ids, np.array([], dtype=int))
    return found


def slow_loss(
    model: Any, ids, targets, given, ablation: str, executions: Sequence[int], heads
) -> float:
    """One prompt, one ablation, position by position; `given` is what heads read in the donor, or in all prompts of the half."""

    def change(index, x):
        if index not in executions:
            return x
        for t in range(1, len(ids)):
            for head in heads:
                if ablation == "zero":
                    x[0, t, head] = 0
                elif ablation == "mean":
                    x[0, t, head] = torch.cat([of[index][0, 1:, head] for of in given]).mean(0)
                else:
                    x[0, t, head] = given[index][
                        0, max(t - len(ids) + given[index].shape[1], 1), head
                    ]
        return x

    with hooked(model, change):
        return loss_of(model, ids, targets)


SMALL = {"num_physical_layers": 3, "loop_start": 1, "loop_stop": 2}
TWO = {"num_physical_layers": 4, "loop_start": 1, "loop_stop": 3}
MODELS = {
    "smelt, two layers looped": TWO,
    "smelt, three visits": {**SMALL, "num_visits": 3},
    "smelt, one key head": {**SMALL, "num_key_value_heads": 1},
    "smelt, a key head each": {**SMALL, "num_key_value_heads": 4},
    "smelt, one head": {**SMALL, "num_attention_heads": 1, "num_key_value_heads": 1},
    "dory": {},
    "inkling2_loop": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "loop_num_passes": 2,
    },
}


@pytest.mark.parametrize(
    ("name", "ablation"),
    [
        (name, ablation)
        for name in MODELS
        for ablation in ("resample", "mean", "zero")
        # Dory's gates stand between what heads read and the projection.
        if name != "dory" or ablation == "zero"
    ],
)
def test_like_plain_hooks(search, name, ablation):
    model = tiny(name.partition(",")[0], **MODELS[name])
    prompts = random_prompts(items=4, shots=(1,))
    data = by_item(search(model, prompts, ablation))
    executions = executions_of(model.config)
    config = model.config.get_text_config()
    size = config.num_attention_heads // config.num_key_value_heads
    for row in (0, 3):  # donors are the next but one, of the same half, or the first
        ids, targets = prompts.segment(row), prompts.prompts.targets[row]
        donor = (row + 2) % 4
        given: Any = read_in(model, prompts.segment(donor))
        if ablation == "mean":
            given = [given, read_in(model, prompts.segment(row))]
        np.testing.assert_allclose(data["loss_sum"][row], loss_of(model, ids, targets), rtol=1e-5)
        assert data["targets"][row].values.tolist() == [[0, 3] if row % 2 else [3, 0]]
        for i, layer in enumerate(data["looped_layer"].values):
            visits = [e.index for e in executions if e.layer == layer]
            for v, chosen in enumerate([visits, *([index] for index in visits)]):
                for head in range(config.num_attention_heads):
                    expected = slow_loss(model, ids, targets, given, ablation, chosen, [head])
                    found = data["head_loss_sum"][row, v, i, head]
                    np.testing.assert_allclose(found, expected, rtol=2e-5)
                for group in range(config.num_key_value_heads):
                    heads = range(group * size, (group + 1) * size)
                    expected = slow_loss(model, ids, targets, given, ablation, chosen, heads)
                    found = data["group_loss_sum"][row, v, i, group]
                    np.testing.assert_allclose(found, expected, rtol=2e-5)
    if size == 1:
        assert (data["head_loss_sum"].values == data["group_loss_sum"].values).all()


def test_like_transformer_lens(search, tiny_checkpoint):
    """`hook_z` of the second visit's block, zeroed by TransformerLens."""
    from transformer_lens.model_bridge import TransformerBridge

    prompts = random_prompts(items=4, shots=(2,))
    data = by_item(search(load_checkpoint(tiny_checkpoint), prompts, "zero"))
    bridge = TransformerBridge.boot_transformers(str(tiny_checkpoint), device="cpu")
    ids, targets = prompts.segment(0), prompts.prompts.targets[0]
    for i, block in enumerate((4, 5, 6)):  # visit 2 of the three looped layers
        for head in range(4):

            def zero(z, hook, head=head):
                z[:, 1:, head] = 0
                return z

            with torch.no_grad():
                logits = bridge.run_with_hooks(
                    torch.from_numpy(ids).long()[None],
                    fwd_hooks=[(f"blocks.{block}.attn.hook_z", zero)],
                )
            log_p = logits[0].double().log_softmax(-1)
            expected = -sum(float(log_p[t - 1, ids[t]]) for t in targets)
            found = data["head_loss_sum"].sel(ablated_visits="2")[0, i, head]
            np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_means_are_of_all_prompts_however_many_run_at_once(search, monkeypatch):
    model, prompts = tiny("smelt", **SMALL), random_prompts()
    together = by_item(search(model, prompts, "mean"))
    monkeypatch.setattr(dyck_heads, "AT_ONCE", 1)
    apart = by_item(search(model, prompts, "mean"))
    for name in ("loss_sum", "head_loss_sum", "group_loss_sum"):
        np.testing.assert_allclose(apart[name], together[name], rtol=1e-5)


@pytest.mark.parametrize("ablation", ["resample", "mean", "zero"])
def test_batches_change_nothing(search, ablation):
    """Donors are fixed by the run, not by the batch; prompts that are not nested are left alone."""
    model, prompts = tiny("smelt", **SMALL), random_prompts()
    one, many = (by_item(search(model, prompts, ablation, tokens=tokens)) for tokens in (80, 1000))
    assert one["head_loss_sum"].shape == (8, 3, 1, 4) and one["group_loss_sum"].shape[3] == 2
    for name, values in one.data_vars.items():
        np.testing.assert_allclose(values, many[name], rtol=1e-5)


def test_prompts_of_other_kinds(search):
    segments = [
        {"ids": range(10), "targets": [8, 9], "shots": k, "item": i, "half": i % 2, "kind": kind}
        for k, kind in ((1, "nested"), (4, "scored"))
        for i in range(4)
    ]
    run = search(tiny("smelt", **SMALL), made_prompts(segments), tokens=1000)
    scored = run["segments"]["label_kind"].values == "scored"
    data = run["dyck_heads"].dataset
    for values in data.data_vars.values():
        assert np.isnan(values[scored]).all() and np.isfinite(values[~scored]).all()
    summary = summarize(run, DyckHeads(), draws=20)
    assert summary["shots"].values.tolist() == [1, 4]
    assert np.isfinite(summary["head_rise_by_shots"].sel(shots=1)).all()
    assert np.isnan(summary["head_rise_by_shots"].sel(shots=4)).all()
    # The same prompt is every prompt's donor: what is exchanged is the same.
    np.testing.assert_allclose(summary["head_rise"], 0, atol=1e-3)
    none = made_prompts([{**segment, "kind": "scored"} for segment in segments])
    run = search(tiny("smelt", **SMALL), none)
    assert "no prompt is nested" in DyckHeads().sentence(summarize(run, DyckHeads(), draws=0))


SYMBOLS = range(1, 8)  # tokens 1..6 may be answers, 7 asks for one
LAYER, HEAD = 2, 1


def copying_model() -> Any:
    """One head averages over all it sees and writes it; nothing else writes. So the most frequent token is predicted.

    Tokens are axes of the stream, which the heads' eight dimensions hold.
    """
    model = tiny("smelt", tie_word_embeddings=False)
    decoder, embeddings = model.get_decoder(), torch.zeros(256, 32)
    embeddings[list(SYMBOLS), list(SYMBOLS)] = 1
    with torch.no_grad():
        decoder.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(20 * embeddings)
        model.lm_head.weight[7] = 0
        for execution, layer in zip(executions_of(model.config), decoder.layers, strict=True):
            for name, parameter in layer.mlp.named_parameters():
                if "down" in name:
                    parameter.zero_()
            attention = layer.self_attn
            attention.o_proj.weight.zero_()
            if execution.layer == LAYER:
                attention.q_proj.weight.zero_()
                attention.v_proj.weight.zero_()
                attention.v_proj.weight[:8, :8] = torch.eye(
                    8
                )  # of key head 0, that heads 0 and 1 read
                attention.o_proj.weight[:8, 8 * HEAD : 8 * HEAD + 8] = 4 * torch.eye(8)
    return model


def frequent_prompts(items: int = 8) -> HeldOut:
    """Each answer stands in the prompt 3 times for each shot, two others once."""
    rng = np.random.default_rng(0)
    segments = []
    for k in (1, 2):
        for i in range(items):
            answer, *others = rng.permutation(6)[:3] + 1
            shot = rng.permutation([answer] * 3 + others)
            ids = [0, *np.tile(shot, k), 7, answer]
            segment = {"ids": ids, "targets": [len(ids) - 1], "item": i, "half": i % 2}
            segments.append({**segment, "shots": k})
    return made_prompts(segments)


@pytest.mark.parametrize("ablation", ["resample", "mean", "zero"])
def test_a_known_head_is_found(search, ablation):
    """And its ablation is what the score says; the heads that write nothing can be ablated for nothing."""
    run = search(copying_model(), frequent_prompts(), ablation)
    summary = summarize(run, DyckHeads(), draws=100)
    assert summary["dyck_head_layer"] == LAYER and summary["dyck_head"] == HEAD
    assert summary["dyck_group_layer"] == LAYER and summary["dyck_group"] == 0
    assert summary["head_number"] == 12 and summary["group_number"] == 6
    assert summary["dyck_head_rank"] == summary["dyck_head_rank_high"] == 1
    place = {"looped_layer": LAYER, "head": HEAD}
    assert (summary["head_rise_low"].sel(place | {"ablated_visits": "all"}) > 1).all()
    if ablation == "zero":  # nothing is known without it, and what it writes once is enough
        np.testing.assert_allclose(summary["perplexity"], 1, atol=1e-3)
        np.testing.assert_allclose(summary["dyck_head_rise"], [255, 0, 0], atol=1e-3)
    others = summary["head_rise"].where(
        (summary["looped_layer"] != LAYER) | (summary["head"] != HEAD)
    )
    np.testing.assert_allclose(others.max(), 0, atol=1e-5)
    np.testing.assert_allclose(others.min(), 0, atol=1e-5)
    for name in ("rise", "rise_low", "interaction", "rise_by_shots"):
        np.testing.assert_allclose(summary[f"dyck_head_{name}"], summary[f"dyck_group_{name}"])
    text = DyckHeads().sentence(summary)
    assert f"Head {HEAD} of layer {LAYER} matters most" in text and "ranks 1 [1, 1] of 12" in text
    assert "at visit 1 alone" in text and "at visit 2 alone" in text


def test_no_head_where_none_matters(search):
    """Heads that write nothing: no ablation changes a number, and no head is called the Dyck head."""
    model = tiny("smelt", **TWO)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    summary = summarize(search(model, random_prompts()), DyckHeads(), draws=20)
    assert (summary["head_rise"] == 0).all() and "dyck_head" not in summary
    assert DyckHeads().sentence(summary).startswith("No head matters: ")
    assert dyck_head_of(summary) is None


def test_a_choice_that_the_other_half_does_not_confirm_is_told(search):
    summary = summarize(search(tiny("smelt", **TWO), random_prompts()), DyckHeads(), draws=20)
    for low, told in ((-0.1, True), (0.1, False), (np.nan, False)):
        found = summary.assign(dyck_head_rise_low=summary["dyck_head_rise_low"] * 0 + low)
        assert ("does not confirm the choice" in DyckHeads().sentence(found)) == told


def test_visits_that_write_nothing(search):
    run = search(tiny("smelt", **SMALL, residual_scale=0.0), random_prompts())
    data = run["dyck_heads"].dataset
    for name in ("head_loss_sum", "group_loss_sum"):
        off = data[name] - data["loss_sum"]
        np.testing.assert_allclose(off, 0, atol=1e-4)


def test_summary_like_slow_averages(search):
    run = search(tiny("smelt", **TWO, num_visits=3), random_prompts(items=8))
    summary = summarize(run, DyckHeads(), draws=50)
    data, labels = run["dyck_heads"].dataset, run["segments"].dataset
    rises = {}
    for half in (0, 1):
        for shots in (None, 1, 2):
            mine = (labels["label_half"].values == half) & (
                True if shots is None else labels["label_shots"].values == shots
            )
            targets = 3 * mine.sum()
            before = np.exp(data["loss_sum"].values[mine].sum() / targets)
            after = np.exp(data["head_loss_sum"].values[mine].sum(0) / targets)
            rises[half, shots] = after - before
            found = summary.sel(half=half)
            if shots is None:
                assert found["targets"] == targets
                np.testing.assert_allclose(found["perplexity"], before, rtol=1e-5)
                np.testing.assert_allclose(found["head_rise"], after - before, rtol=1e-3, atol=1e-3)
            else:
                found = found.sel(shots=shots)
                np.testing.assert_allclose(found["perplexity_by_shots"], before, rtol=1e-5)
                np.testing.assert_allclose(
                    found["head_rise_by_shots"], after - before, rtol=1e-3, atol=1e-3
                )
    np.testing.assert_allclose(
        summary["head_interaction"].sel(half=1),
        rises[1, None][0] - rises[1, None][1:].sum(0),
        atol=1e-3,
    )
    layer, head = np.unravel_index(rises[0, None][0].argmax(), (2, 4))
    assert summary["dyck_head_layer"] == summary["looped_layer"][layer]
    assert summary["dyck_head"] == head
    judged = rises[1, None]
    np.testing.assert_allclose(summary["dyck_head_rise"], judged[:, layer, head], atol=1e-3)
    np.testing.assert_allclose(summary["mean_head_rise"], judged.mean((1, 2)), atol=1e-3)
    assert summary["dyck_head_rank"] == 1 + (judged[0] > judged[0, layer, head]).sum()
    for v in range(4):
        rho = spearmanr(rises[0, None][v].ravel(), judged[v].ravel()).statistic
        np.testing.assert_allclose(summary["head_rank_stability"][v], rho, atol=1e-6)
    assert summary["ablated_visits"].values.tolist() == ["all", "1", "2", "3"]
    low, high = (summary[f"dyck_head_rise_{end}"] for end in ("low", "high"))
    assert (low <= high).all() and np.isfinite(low).all()
    for i, name in enumerate(GUESSES):  # i bits for the three targets
        np.testing.assert_allclose(summary[f"perplexity_{name}"], 2 ** (i / 3))
    text = DyckHeads().sentence(summary)
    assert "at visit 3 alone" in text and "types guessed 2.52" in text


def test_in_bfloat16(search):
    exact, rough = (
        by_item(search(model, random_prompts()))
        for model in (tiny("smelt", **SMALL), tiny("smelt", **SMALL).bfloat16())
    )
    np.testing.assert_allclose(rough["head_loss_sum"], exact["head_loss_sum"], rtol=0.02)


@pytest.mark.parametrize("name", ["baseline", "llama"])
def test_nothing_is_looped(search, name):
    run = search(tiny(name), random_prompts())
    assert not run["dyck_heads"].data_vars
    assert "No layer is visited twice" in DyckHeads().sentence(summarize(run, DyckHeads(), draws=0))


def test_refusals(search, make_run):
    with pytest.raises(SmeltscopeError, match="No ablation is called 'nought'"):
        DyckHeads(ablation="nought")
    with pytest.raises(SmeltscopeError, match="give dyck-heads the prompts"):
        make_run([DyckHeads()])
    with pytest.raises(SmeltscopeError, match="alone with 1 shot in half 0"):
        search(tiny("smelt", **SMALL), random_prompts(items=2))
    run = search(tiny("smelt", **SMALL), random_prompts(items=2), "zero")
    summary = summarize(run, DyckHeads(), draws=20)  # one prompt a half: a choice, no more
    assert np.isfinite(summary["dyck_head_rise"]).all()
    run = search(tiny("smelt", **SMALL), random_prompts(items=1), "zero")
    summary = summarize(run, DyckHeads(), draws=20)
    assert "Both halves need prompts" in DyckHeads().sentence(summary)


def test_text_is_left_alone(make_run):
    run = make_run([DyckHeads(ablation="zero")])
    assert not run["dyck_heads"].data_vars


def test_options_and_progress(search):
    probe = DyckHeads(ablation="mean", donors=random_prompts())
    assert probe.options() == {"ablation": "mean"}
    assert probe == DyckHeads(ablation="mean") and "donors" not in repr(probe)
    arrays = {
        "loss_sum": np.array([3.0, np.nan]),
        "targets": np.array([[[2.0, 0]], [[np.nan] * 2]]),
    }
    assert probe.progress(arrays, None) == {"loss of targets": (3.0, 2.0)}
    assert probe.progress({}, None) == {}
