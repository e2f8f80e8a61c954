"""`smeltscope.probe` and `smeltscope.summarize`: what the command does, from Python."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import smeltscope
from smeltscope import SmeltscopeError

DOCUMENTS = {
    "prose": ["The second visit reads. " * 5, "It writes again. " * 4],
    "sums": ["17 + 25 = 42; " * 6],
}


def same_sinks(a: xr.DataTree, b: xr.DataTree) -> None:
    for name in ("sink_mass_sum", "queries", "heaviest_key"):
        np.testing.assert_array_equal(a["attention_sink"][name], b["attention_sink"][name])


def test_the_run_of_the_command(
    probe: Callable[..., Any], tiny_checkpoint: Path, text_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.h5"
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--out", out, "--tokens", 900]
    assert probe("attention-sink", *given, "-q").code == 0
    run = smeltscope.probe(tiny_checkpoint, text_folder, tokens=900, quiet=True)
    xr.testing.assert_equal(run, smeltscope.open(out))
    assert run.attrs["identity"] == smeltscope.open(out).attrs["identity"]
    summary = smeltscope.summarize(run, "attention-sink")
    sink = run["attention_sink"]
    by_hand = sink["sink_mass_sum"].sum("segment") / sink["queries"].sum("segment")
    np.testing.assert_allclose(summary["sink_mass"], by_hand, rtol=1e-6)


def test_a_model_in_memory(byte_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = smeltscope.tiny("smelt", vocab_size=258)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    run = smeltscope.probe(model, DOCUMENTS, ["attention-sink", "loss"], tokenizer=tokenizer)
    assert set(run.children) == {"segments", "attention_sink", "loss"}
    assert run["segments"]["category"].values.tolist().count("prose") == 2
    shown = capsys.readouterr()
    assert shown.out == "" and re.match(r"\d+ tokens in 3 segments of 3 documents", shown.err)
    for name, value in model.state_dict().items():
        assert value.equal(before[name])


def test_texts_are_the_same_data_each_time(tiny_checkpoint: Path) -> None:
    """Also for `probe compare`: not a word of the temporary file they pass through."""
    one, two = (smeltscope.probe(tiny_checkpoint, DOCUMENTS, "loss", quiet=True) for _ in range(2))
    assert one.attrs["identity"] == two.attrs["identity"]
    assert "given" in one["segments"]["document_id"].values[0]


def test_what_load_heldout_made(tiny_checkpoint: Path, text_folder: Path) -> None:
    from smeltscope.tasks import load_heldout

    checkpoint = smeltscope.load_checkpoint(tiny_checkpoint)
    heldout = load_heldout([text_folder], checkpoint.tokenizer, max_length=100, tokens=700)
    run = smeltscope.probe(checkpoint, heldout, quiet=True)
    other = smeltscope.probe(tiny_checkpoint, text_folder, tokens=700, max_length=100, quiet=True)
    same_sinks(run, other)


def test_options_reach_the_model_and_the_run(tiny_checkpoint: Path) -> None:
    run = smeltscope.probe(
        tiny_checkpoint,
        DOCUMENTS,
        "loss",
        visits=3,
        seed=4,
        sampled_tokens=5,
        bos=False,
        quiet=True,
    )
    identity = smeltscope.activations.attributes_of(run)["identity"]
    assert (identity["visits"], identity["seed"], identity["sampled_tokens"]) == (3, 4, 5)
    with_start = smeltscope.probe(tiny_checkpoint, DOCUMENTS, "loss", quiet=True)
    difference = with_start["segments"]["tokens"].values - run["segments"]["tokens"].values
    assert (difference == 1).all()
    assert smeltscope.summarize(run, "loss").attrs["bootstrap_seed"] == 4
    assert smeltscope.summarize(run, "loss", seed=1, draws=7).attrs["bootstrap_draws"] == 7


def test_a_probe_with_options_and_the_file_kept(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from smeltscope.probes import AttentionSink

    out = tmp_path / "kept.h5"
    given = {"data": DOCUMENTS, "quiet": True}
    first = AttentionSink(include_first=True)
    run = smeltscope.probe(tiny_checkpoint, probes=[first], out=out, **given)
    same_sinks(run, smeltscope.open(out))
    default = smeltscope.probe(tiny_checkpoint, **given)
    more = run["attention_sink"]["queries"] - default["attention_sink"]["queries"]
    assert (more == 1).all()
    # by name it is the probe that the run was made with
    xr.testing.assert_equal(
        smeltscope.summarize(run, "attention-sink"), smeltscope.summarize(run, first)
    )
    with pytest.raises(SmeltscopeError, match="exists already"):
        smeltscope.probe(tiny_checkpoint, out=out, **given)
    smeltscope.probe(tiny_checkpoint, out=out, force=True, **given)


def test_what_is_refused(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"data": DOCUMENTS, "quiet": True}
    with pytest.raises(SmeltscopeError, match="Did you mean swap"):
        smeltscope.probe(tiny_checkpoint, probes="swop", **given)
    with pytest.raises(SmeltscopeError, match="visits would change how a checkpoint is loaded"):
        smeltscope.probe(smeltscope.tiny("smelt"), visits=2, **given)
    with pytest.raises(SmeltscopeError, match="tokenizer"):
        smeltscope.probe(smeltscope.tiny("smelt", vocab_size=258), **given)
    run = smeltscope.probe(tiny_checkpoint, probes="loss", **given)
    with pytest.raises(SmeltscopeError, match="holds no swap"):
        smeltscope.summarize(run, "swap")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SmeltscopeError, match="out="):
        smeltscope.probe(tiny_checkpoint, **given)


@pytest.mark.parametrize("page", ["commands.md", "compare.md"])
def test_the_examples_of_the_docs_run(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})  # noqa: S102
