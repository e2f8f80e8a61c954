"""A trained model: stories260K, from the development data folder."""

import contextlib
import copy
import importlib.util
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from smeltscope.activations import capture, open_run
from smeltscope.model import SmeltConfig, SmeltForCausalLM, load_checkpoint, with_visits
from smeltscope.probes import AttentionSink, RunOptions, run_probes, summarize
from smeltscope.probes.loss import Loss
from smeltscope.probes.regions import TEXT_REGIONS
from smeltscope.registry import PROBES, make_probe
from smeltscope.tasks import DocumentInfo, HeldOut

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models" / "stories260K"
pytestmark = [
    pytest.mark.shared_data,
    pytest.mark.skipif(
        not (FOLDER / "load_stories260k.py").exists(), reason="stories260K is not at hand"
    ),
]


@pytest.fixture(scope="module")
def stories():
    """The loader's module, by path."""
    spec = importlib.util.spec_from_file_location("stories", FOLDER / "load_stories260k.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(stories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories260K")
    with contextlib.redirect_stdout(io.StringIO()):
        stories.load_model().save_pretrained(folder)
    return load_checkpoint(folder, device="cpu")


@pytest.fixture(scope="module")
def sample(stories) -> list[torch.Tensor]:
    text = (FOLDER / "tinystories_sample_5stories.txt").read_text(encoding="utf-8")
    tokenizer = stories.Tok()
    parts = [part.strip() for part in text.split("<|endoftext|>")]
    return [torch.tensor([tokenizer.encode(part)[:512]]) for part in parts if part]


def test_attention_logits_and_loss(checkpoint, sample):
    model, worst, losses, counts = checkpoint.model, 0.0, [], []
    assert len(sample) == 5
    for tokens in sample:
        keys = torch.arange(tokens.shape[1])[None]
        with torch.no_grad():
            bare = model(tokens, labels=tokens)
            with capture(model) as run:
                watched = model(tokens).logits
                mass = [run[e.index, "attention"].mass_on(keys) for e in run.executions]
            assert torch.equal(watched, bare.logits)
            model.set_attn_implementation("eager")
            eager = model(tokens, output_attentions=True).attentions
            model.set_attn_implementation("sdpa")
        assert len(mass) == len(eager) == 5
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(mass, eager, strict=True)))
        losses.append(bare.loss.item() * (tokens.shape[1] - 1))
        counts.append(tokens.shape[1] - 1)
    assert worst < 1e-5
    assert sum(losses) / sum(counts) == pytest.approx(1.266, abs=6e-4)


@pytest.fixture(scope="module")
def heldout(sample) -> HeldOut:
    """The five stories, one document each."""
    lengths = [tokens.shape[1] for tokens in sample]
    return HeldOut(
        tokens=torch.cat(sample, dim=1)[0].numpy().astype(np.int32),
        offsets=np.cumsum([0, *lengths]),
        document=np.arange(len(sample), dtype=np.int32),
        documents=[
            DocumentInfo(id=str(i), category="stories", source="", file="") for i in range(5)
        ],
        start_token=1,
        dropped={},
        notes=[],
        digest="stories",
    )


@pytest.fixture(scope="module")
def run(checkpoint, heldout, tmp_path_factory):
    """The stories through two probes; every query sampled."""
    options = RunOptions(max_length=512, batch_tokens=1024, sampled_queries=512)
    out = tmp_path_factory.mktemp("run") / "run.h5"
    return open_run(run_probes(checkpoint, heldout, [AttentionSink(), Loss()], out, options))


def test_the_probe_finds_the_known_loss(run):
    summary = summarize(run, Loss(), draws=200)
    assert float(summary["loss"]) == pytest.approx(1.266, abs=6e-4)
    assert summary["loss_low"] < summary["loss"] < summary["loss_high"]
    assert float(summary["uniform"]) == pytest.approx(np.log(512), rel=1e-6)


def test_sink_and_regions_like_eager_attention(checkpoint, sample, run):
    summary = summarize(run, AttentionSink(), draws=0)
    model, queries = checkpoint.model, 0
    mass, entropy = np.zeros((5, 8, 6)), np.zeros((5, 8))
    for tokens in sample:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            eager = model(tokens, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        length = tokens.shape[1]
        q, k = np.arange(length)[1:, None], np.arange(length)[None]
        parts = [k == 0, k == q, k == q - 1, (q - k >= 2) & (q - k < 8)]
        parts = [part & (k > 0) if i else part | (q < 0) for i, part in enumerate(parts)]
        rest = (k <= q) & ~np.logical_or.reduce(parts)
        queries += length - 1
        for layer, weights in enumerate(eager):
            rows = weights[0, :, 1:].double().numpy()  # (8, T - 1, T)
            for region, part in zip((0, 1, 2, 3, 5), [*parts, rest], strict=True):
                mass[layer, :, region] += (rows * part).sum((1, 2))
            entropy[layer] -= np.where(rows > 0, rows * np.log(np.maximum(rows, 1e-300)), 0).sum(
                (1, 2)
            )
    found = summary["region_mass"].fillna(0)
    assert found["region"].values.tolist() == list(TEXT_REGIONS)
    np.testing.assert_allclose(found, mass / queries, atol=1e-5)
    np.testing.assert_allclose(summary["sink_mass"], mass[..., 0] / queries, atol=1e-5)
    np.testing.assert_allclose(summary["entropy"], entropy / queries, atol=1e-4)


EXPERTS, CHOSEN = 4, 2


@pytest.fixture(scope="module")
def upcycled(checkpoint) -> SmeltForCausalLM:
    """stories260K as a Baseline: every expert of a layer is its MLP, so that the router's random choice changes nothing."""
    llama = checkpoint.model
    taken = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    taken += ("max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    model = SmeltForCausalLM(
        SmeltConfig(
            **{name: getattr(llama.config, name) for name in taken},
            num_physical_layers=llama.config.num_hidden_layers,
            num_visits=1,
            qk_norm=False,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,  # their weights add up to 1
            moe_intermediate_size=llama.config.intermediate_size,
        )
    ).eval()
    weights = llama.state_dict()
    generator = torch.Generator().manual_seed(0)
    for layer in range(llama.config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        gate, up, down = (weights.pop(f"{mlp}.{n}_proj.weight") for n in ("gate", "up", "down"))
        weights[f"{mlp}.experts.gate_up_proj"] = torch.cat([gate, up]).repeat(EXPERTS, 1, 1)
        weights[f"{mlp}.experts.down_proj"] = down.repeat(EXPERTS, 1, 1)
        router = torch.randn(EXPERTS, llama.config.hidden_size, generator=generator)
        weights[f"{mlp}.gate.weight"] = router
    model.load_state_dict(weights)
    return model


def test_a_baseline_made_of_it_gives_its_logits(checkpoint, upcycled, sample):
    with torch.no_grad():
        for tokens in sample:
            ours, expected = upcycled(tokens).logits, checkpoint.model(tokens).logits
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


def test_looped_with_a_span_that_writes_nothing(checkpoint, upcycled, heldout, tmp_path):
    """Both visits then read the same residual stream: every probe says how it looks when nothing changes."""
    looped = with_visits(copy.deepcopy(upcycled), 2)
    span = looped.config.span
    assert list(span) == [1, 2]
    for layer in looped.model.layers[span.start : span.stop]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.experts.down_proj.data.zero_()
    probes = [make_probe(n, **({"visits": (0, 1, 3)} if n == "loss" else {})) for n in PROBES]
    options = RunOptions(max_length=512, batch_tokens=1024)
    made = replace(checkpoint, model=looped)
    run = open_run(run_probes(made, heldout, probes, tmp_path / "run.h5", options))
    assert run["attention_sink"]["layer"].values.tolist() == [0, 1, 2, 1, 2, 3, 4]
    found = {probe.name: summarize(run, probe, draws=50) for probe in probes}

    overlap = found["router-overlap"]
    for end in ("", "_overall", "_overall_low", "_overall_high"):
        assert (overlap[f"overlap{end}"] == CHOSEN).all()
    assert (overlap["marginal_overlap"] < CHOSEN).all()  # the router does choose
    assert (overlap["lexical_overlap"] < CHOSEN).all()

    stages = found["qkv-similarity"]
    assert stages["stage"].values.tolist() == ["X", "Q", "K", "V", "V random", "PV", "O"]
    for name in ("cosine", "cosine_centred", "query_head_cosine", "key_head_cosine"):
        stage = next(dim for dim in stages[name].dims if dim.endswith("stage"))
        read = stages[name].sel({stage: stages[stage] != "O"})
        np.testing.assert_allclose(read, 1, atol=1e-6, err_msg=name)
    for name in ("floor", "floor_centred"):
        read = stages[name].sel(stage=stages["stage"] != "O")
        assert (read.values < 0.99).all(), name
    written = stages["cosine"].sel(stage="O")
    assert written.size and written.isnull().all()

    sink = found["attention-sink"]
    assert (sink["change"][sink["visit"] == 2] == 0).all() and sink["change_overall"] == 0
    assert (sink["sink_mass"] > 0).all()

    ratio = found["residual-updates"]["norm_ratio"]
    assert ratio.sel(vector=["update", "attn_out", "mlp_out"]).isnull().all()
    np.testing.assert_array_equal(ratio.sel(vector=["attn_in", "mlp_in"]), 1)

    attended = found["attended-tokens"]
    for name in ("top8", "top1", "overlap", "top8_without_first", "top1_any"):
        np.testing.assert_allclose(attended[name], 1, atol=1e-6, err_msg=name)
    assert (attended["top8_control"] < 1).all()

    swap = found["swap"]
    assert (swap["mass_change"].fillna(0) == 0).all() and (swap["change_square"] == 0).all()
    assert swap["moved_share"].isnull().all()

    loss = found["loss"]
    assert (loss["swept_change"] == 0).all() and loss["num_visits"].values.tolist() == [0, 1, 3]
