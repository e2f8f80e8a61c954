"""One model whose head is known, on real nested prompts: the search finds it, the map shows it, the scores agree.

At the position that predicts a target, what stands in the stream is the symbol to look for: the parsing of brackets is done
for the model. All else is its own: one head of one looped layer looks for the tokens of that symbol, which `--reveal answers`
shows in demonstration answers alone, and writes what it finds, which is what is said. What it wrote at visit 1 sharpens its
query at visit 2. All other heads and layers write nothing.
"""

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from smeltscope.activations import open_run
from smeltscope.model import checkpoint_of, executions_of, tiny
from smeltscope.probes import RunOptions, run_probes, summarize
from smeltscope.probes.dyck_heads import DyckHeads
from smeltscope.probes.dyck_map import DyckMap
from smeltscope.probes.dyck_scores import DyckScores
from smeltscope.tasks import HeldOut
from smeltscope.tasks.dyck import ItemSet, Template, make_prompts, nested_sets

LAYER, HEAD = 2, 1  # head 1 reads key/value head 0
CLOSERS = ")]}>"
SHOTS = (1, 2, 4)
VOCABULARY = 261
# Axes of the stream: a token's own symbol, the start token, any token, the symbol asked for, what the head found.
OWN, START, ANY, ASKED, FOUND = 0, 4, 5, 8, 16
AXES = (1, 2, 3, 5)  # of the head, for the four symbols; turning by position leaves them alone
START_AXIS = 6
ASKS, FINDS, STARTS, WRITES, SAYS = 0.49, 0.8, 0.74, 2.0, 1.5  # weights


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a token for each closer with its space: every token of an answer bears one symbol."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [f"Ġ{closer}" for closer in CLOSERS]
    vocabulary = {word: i for i, word in enumerate([*alphabet, *merged, "<s>"])}
    merges = [("Ġ", closer) for closer in CLOSERS]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def make_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    rope = {"rope_theta": 1e24, "rope_type": "default"}
    model = tiny(
        "smelt",
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        qk_norm=False,
        rope_parameters=rope,
    )
    decoder = model.get_decoder()
    closers = tokenizer.convert_tokens_to_ids([f"Ġ{closer}" for closer in CLOSERS])
    embeddings, says = torch.zeros(VOCABULARY, 32), torch.zeros(VOCABULARY, 32)
    embeddings[:, ANY] = 1
    embeddings[tokenizer.bos_token_id, START] = 1
    for i, token in enumerate(closers):
        embeddings[token, OWN + i] = 1
        says[token, FOUND + i] = SAYS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
        decoder.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(says)
        for execution, layer in zip(executions_of(model.config), decoder.layers, strict=True):
            for name, parameter in layer.mlp.named_parameters():
                if "down" in name:
                    parameter.zero_()
            attention = layer.self_attn
            attention.o_proj.weight.zero_()
            if execution.layer == LAYER:
                query = torch.zeros(8, 32)
                query[START_AXIS, ANY] = (
                    12  # what is no target's row looks at the start, and nowhere else
                )
                key, value, out = torch.zeros(8, 32), torch.zeros(8, 32), torch.zeros(32, 8)
                key[START_AXIS, START] = 1
                for i, axis in enumerate(AXES):
                    query[axis, [ASKED + i, FOUND + i]] = torch.tensor([ASKS, FINDS])
                    query[START_AXIS, ASKED + i] = STARTS
                    key[axis, OWN + i] = value[axis, OWN + i] = 1
                    out[FOUND + i, axis] = WRITES
                attention.q_proj.weight[8 * HEAD : 8 * HEAD + 8] = query
                attention.k_proj.weight[:8] = key
                attention.v_proj.weight[:8] = value
                attention.o_proj.weight[:, 8 * HEAD : 8 * HEAD + 8] = out
    return model


def tell(model: Any, heldout: HeldOut, sets: list[ItemSet]) -> None:
    """Put the symbol to look for where a target is predicted, in the place of the token there."""
    prompts = heldout.prompts
    assert prompts is not None
    asked = {}
    for i, targets in enumerate(prompts.targets):
        symbols = sets[i % len(sets)].query.answer_symbols
        prompt = heldout.segment(i)[: prompts.answers[i][0]]
        axes = [ASKED + CLOSERS.index(symbol) for symbol in symbols]
        asked[prompt.tobytes()] = list(zip(targets - 1, axes, strict=True))
    lengths = {len(prompt) // 4 for prompt in asked}  # of 4 bytes each

    def put(module: Any, given: Any, stream: torch.Tensor) -> torch.Tensor:
        stream = stream.clone()
        for ids, row in zip(given[0].numpy().astype(np.int32), stream, strict=True):
            for position, axis in next(
                (asked[ids[:n].tobytes()] for n in lengths if ids[:n].tobytes() in asked), ()
            ):
                if position < len(row):
                    row[position] = 0
                    row[position, axis] = 1
        return stream

    model.get_input_embeddings().register_forward_hook(put)


def planted(position: int, symbol: str, inputs: str, answers: str) -> list[dict[str, float]]:
    """The head's masses at both visits, of a row that sees keys up to `position`, by plain arithmetic.

    `inputs` are all symbols of inputs, `answers` those of demonstrations' answers.
    """
    answer = np.array([answers.count(closer) for closer in CLOSERS])
    count = answer + [inputs.count(closer) for closer in CLOSERS]
    asked = np.array([float(closer == symbol) for closer in CLOSERS])
    found, visits = np.zeros(4), []
    key = 1 / np.sqrt(2 / 32)  # of a token with a symbol, and of the start token
    for _ in range(2):
        norm = np.sqrt((1 + (found**2).sum()) / 32)
        on_each = np.exp((ASKS * asked + FINDS * found) / norm * key / np.sqrt(8))
        on_start = np.exp(STARTS / norm * key / np.sqrt(8))
        total = count @ on_each + on_start + position - count.sum()
        visits.append(
            {
                "bos": on_start / total,
                "right": asked @ (count * on_each) / total,
                "demo_answer": answer @ on_each / total,
            }
        )
        found += 0.5 * WRITES * key * count * on_each / total  # writes are scaled by 1 / visits
    return visits


@pytest.fixture(scope="module", params=["zero", "resample"])
def made(request, tmp_path_factory) -> tuple[xr.DataTree, HeldOut, list[ItemSet]]:
    tokenizer = make_tokenizer()
    model, sets = make_model(tokenizer), nested_sets(6, max(SHOTS), 0, reveal="answers")
    layout = {"template": Template(name="plain"), "context": 512, "seed": 0, "kind": "nested"}
    heldout = make_prompts(sets, tokenizer, shots=SHOTS, **layout)
    tell(model, heldout, sets)
    probes = [DyckScores(), DyckHeads(ablation=request.param, donors=heldout), DyckMap()]
    options = RunOptions(max_length=int(heldout.lengths.max()), batch_tokens=4000)
    out = tmp_path_factory.mktemp("constructed") / "run.h5"
    checkpoint = checkpoint_of(model, tokenizer=tokenizer)
    return open_run(run_probes(checkpoint, heldout, probes, out, options)), heldout, sets


def test_the_search_finds_it(made):
    run, _, _ = made
    probe = DyckHeads(ablation="zero")
    summary = summarize(run, probe, draws=100)
    assert (summary["dyck_head_layer"], summary["dyck_head"]) == (LAYER, HEAD)
    assert (summary["dyck_group_layer"], summary["dyck_group"]) == (LAYER, 0)
    assert summary["dyck_head_rank"] == summary["dyck_head_rank_high"] == 1
    assert (
        summary["head_rise_low"].sel(looped_layer=LAYER, head=HEAD, ablated_visits="all") > 1
    ).all()
    others = (summary["looped_layer"] != LAYER) | (summary["head"] != HEAD)
    np.testing.assert_allclose(summary["head_rise"].where(others, 0), 0, atol=1e-4)
    assert f"Of 6 K/V groups, group 0 of layer {LAYER} matters most: +" in probe.sentence(summary)


def test_its_ablation_is_what_the_score_says(made):
    """The search's perplexity is exp of the scores' loss; without the head every token is as likely as another."""
    run, _, _ = made
    heads, scores = (summarize(run, probe, draws=0) for probe in (DyckHeads(), DyckScores()))
    of_halves = np.log(heads["perplexity_by_shots"]).mean("half")  # with as many targets each
    np.testing.assert_allclose(of_halves, scores["nested_token_loss"], rtol=1e-5)
    assert 0.05 < scores["nested_token_loss"].min() < scores["nested_token_loss"].max() < 3
    options = run["dyck_heads"].attrs["options"]
    if "zero" in options:
        without = heads["perplexity"].sel(half=1) + heads["dyck_head_rise"].sel(
            ablated_visits="all"
        )
        np.testing.assert_allclose(without, VOCABULARY, rtol=1e-4)


def test_the_map_shows_it(made):
    run, heldout, sets = made
    prompts = heldout.prompts
    names = [heldout.documents[d].id for d in heldout.document]
    executions = np.flatnonzero(run["layer"].values == LAYER)
    data = run["dyck_map"].dataset.isel(execution=executions, head=HEAD)
    totals = []
    for place, name in enumerate(run["segments"]["document_id"].values):
        i = names.index(name)
        query = sets[i % len(sets)].query
        shown = sets[i % len(sets)].demonstrations[: SHOTS[i // len(sets)]]
        answers = "".join("".join(item.answer_symbols) for item in shown)
        inputs = "".join("".join(item.input_symbols) for item in (*shown, query))
        assert not set(query.answer_symbols) & set(inputs)
        sums = [dict.fromkeys(("bos", "right", "demo_answer"), 0.0) for _ in range(2)]
        for target, symbol in zip(prompts.targets[i], query.answer_symbols, strict=True):
            for visit, masses in enumerate(planted(target - 1, symbol, inputs, answers)):
                for key, mass in masses.items():
                    sums[visit][key] += mass
        for visit in range(2):
            found = data.isel(segment=place, execution=visit)
            for region in ("bos", "demo_answer"):
                mass = float(found["region_mass_sum"].sel(map_region=region))
                assert mass == pytest.approx(sums[visit][region], abs=1e-4)
            right = float(found["mark_mass_sum"].sel(mark="right_demo_answer"))
            assert right == pytest.approx(sums[visit]["right"], abs=1e-4)
        if prompts.labels["half"][i] == 1:
            totals.append([[s["bos"], s["demo_answer"]] for s in sums])
    probe = DyckMap()
    summary = summarize(run, probe, draws=50)
    (b1, a1), (b2, a2) = np.mean(totals, axis=0) / 3
    assert b1 > 0.5 and a1 < 0.3 and b2 < 0.1 and a2 > 0.8  # as the paper's head
    assert (summary["dyck_head_layer"], summary["dyck_head"]) == (LAYER, HEAD)
    of = summary.sel(looped_layer=LAYER, head=HEAD, visit_pair="1-2", map_region="demo_answer")
    assert float(of["change"]) == pytest.approx(a2 - a1, abs=1e-4)
    assert float(of["release"]) == pytest.approx(a1 * ((1 - b2) / (1 - b1) - 1), abs=1e-4)
    assert float(of["retarget"]) == pytest.approx(a2 - a1 * (1 - b2) / (1 - b1), abs=1e-4)
    alone = summary.sel(visit_pair="1-2", map_region="demo_answer")
    for name in ("change", "release", "retarget"):
        for end in ("", "_low", "_high"):
            assert alone[f"dyck_head_{name}{end}"] == of[f"{name}{end}"]
    text = probe.sentence(summary)
    assert f"The Dyck head, chosen on other prompts: head {HEAD} of layer {LAYER}" in text
