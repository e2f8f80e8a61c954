"""`probe dyck` and `probe dyck-state` through the command line: tables, run files, a typed prompt, what is refused."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import smeltscope
from smeltscope.commands.dyck import item_sets
from smeltscope.errors import SmeltscopeError
from smeltscope.tasks import dyck

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
BIGBENCH = SHARED / "dyck" / "bigbench_dyck_languages.jsonl"
ARGUMENTS = ("dyck", "--ckpt", "smelt-tiny", "--device", "cpu", "--items", 4, "--seeds", 2)
PROMPT = "Input: ( [ { }\\nOutput: ] )\\n\\nInput: < ( [ ]\\nOutput:"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of everything, with a Baseline beside."""
    from smeltscope.cli import probe, run

    out = tmp_path_factory.mktemp("dyck") / "run.h5"
    more = ("--shots", "0,2", "--nested", 4, "--examples", 2, "--baseline", "baseline-tiny")
    assert run(probe, [str(a) for a in (*ARGUMENTS, *more, "--out", out, "-q")]) == 0
    return out


def test_what_it_leaves(finished: Path) -> None:
    run = smeltscope.open(finished)
    assert {"dyck_scores", "dyck_heads", "dyck_map", "dyck_patterns", "segments"} == set(
        run.children
    )
    segments = run["segments"].dataset
    assert set(segments["label_kind"].values) == {"scored", "nested"}
    scored = segments["label_kind"].values == "scored"
    assert scored.sum() == 2 * 2 * 4  # seeds, numbers of shots, items
    summary = smeltscope.summarize(run, "dyck-scores")
    assert summary["prompts"].sel(shots=[0, 2]).values.tolist() == [8, 8]
    at = scored & (segments["label_shots"].values == 2)  # types are guessed among four
    nats = segments["label_symbols"].values[at].mean() * np.log(4)
    np.testing.assert_allclose(summary["answer_loss_guess"].sel(shots=2), nats, rtol=1e-6)
    np.testing.assert_allclose(summary["symbol_accuracy_guess"].sel(shots=2), 1 / 4)
    assert np.isfinite(smeltscope.summarize(run, "dyck-heads")["dyck_head"])
    assert not (finished.parent / "run.h5.partial").exists()


def test_whole_attention_of_examples(finished: Path) -> None:
    """Rows sum to 1, agree with the complete patterns and with the map's masses, and what they show is named."""
    run = smeltscope.open(finished)
    patterns = run["dyck_patterns"].dataset
    row, pattern = patterns["row"].values, patterns["pattern"].values
    assert row.shape[:3] == (2, 12, 4)
    np.testing.assert_allclose(np.nansum(row, -1), 1, atol=1e-5)
    target = patterns["target"].values  # (example, target_number)
    for example in range(2):
        for number, position in enumerate(target[example]):
            np.testing.assert_array_equal(
                row[example, :, :, number], pattern[example, :, :, position - 1]
            )
    segments = run["segments"].dataset
    names = run["region_name"].values.tolist()
    for example, name in enumerate(patterns["example_id"].values):
        (place,) = np.flatnonzero(segments["document_id"].values == name)
        region = patterns["key_region"].values[example]
        for i, of_map in enumerate(names):
            mass = np.nansum(row[example][..., region == i], axis=(2, 3))  # over targets and keys
            kept = run["dyck_map"]["region_mass_sum"].sel(map_region=of_map).values[place]
            np.testing.assert_allclose(mass, kept, atol=1e-5)
    text = "".join(patterns["token"].values[0])
    assert "Input:" in text and "Output:" in text
    for gold, position in zip(patterns["gold"].values[0], target[0], strict=True):
        assert patterns["token"].values[0][position] == gold


def test_show_and_compare(finished: Path, probe: Callable[..., Any]) -> None:
    shown = probe("show", finished)
    assert shown.code == 0, shown.err
    for name in ("dyck-scores: smelt-tiny", "dyck-heads", "dyck-map", "retarget"):
        assert name in shown.out
    summary = smeltscope.summarize(smeltscope.open(finished), "dyck-heads", draws=0)
    head, layer = int(summary["dyck_head"]), int(summary["dyck_head_layer"])
    assert f"Head {head} of layer {layer} (the Dyck head, chosen on other prompts)" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    baseline = finished.with_name("run-baseline.h5")
    compared = probe("compare", baseline, finished)
    assert compared.code == 0, compared.err
    scores, found = compared.out.split("dyck-map, B - A")
    assert "dyck-scores, B - A" in scores and "token loss" in scores
    # Regions at the visit that both have; the other visit is the SMELT's alone.
    run, other = (
        smeltscope.summarize(smeltscope.open(f), "dyck-map") for f in (finished, baseline)
    )
    for region in ("bos", "demo_answer", "query_input"):
        row = next(line.split() for line in found.splitlines() if line.split()[:1] == [region])
        for part, shown in zip((other, run), row[1:], strict=False):
            value = float(part["mass_visit_1_overall"].sel(map_region=region))
            assert float(shown) == pytest.approx(value, abs=6e-4)
    assert "Only B has" in found and "mass visit 2 overall" in found


def test_heads_of_two_runs_are_named_and_not_subtracted(
    finished: Path, probe: Callable[..., Any]
) -> None:
    found = smeltscope.summarize(smeltscope.open(finished), "dyck-heads", draws=0)
    head = f"head {int(found['dyck_head'])} of layer {int(found['dyck_head_layer'])}"
    assert f"The Dyck head: A {head}, B {head}." in probe("compare", finished, finished).out
    rows = probe("compare", "--csv", finished, finished).out.splitlines()
    named = [row for row in rows if row.startswith("dyck-heads,dyck_head_layer")]
    assert [row.split(",")[1] for row in named] == ["dyck_head_layer_a", "dyck_head_layer_b"]


def test_the_same_numbers_as_json(
    finished: Path, probe: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "again.h5"
    result = probe(*ARGUMENTS, "--shots", "0,2", "--nested", 0, "--out", out, "--json", "-q")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert set(found) == {"dyck-scores"}
    run = smeltscope.open(finished)
    summary = smeltscope.summarize(run, "dyck-scores").sel(shots=[0, 2])
    values = found["dyck-scores"]["values"]
    np.testing.assert_allclose(values["token_loss"]["data"], summary["token_loss"], rtol=1e-5)
    with h5py.File(out) as file:
        assert "dyck_heads" not in file


def test_one_prompt(probe: Callable[..., Any]) -> None:
    result = probe("dyck", "--device", "cpu", "--prompt", PROMPT, "--head", "3.1")
    assert result.code == 0, result.err
    for text in ("Answer:    ) >", "Head 1 of layer 3 (as asked)", "Visit 1", "Visit 2"):
        assert text in result.out
    for region in ("demo_input", "demo_answer", "query_input", "separator", "bos"):
        assert region in result.out
    found = json.loads(
        probe("dyck", "--device", "cpu", "--prompt", PROMPT, "--head", "3.1", "--json").out
    )
    attention = np.array(found["attention"])  # (visit, target, key)
    np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-5)
    for of_visit, masses in zip(attention, found["mass_by_region"], strict=True):
        for name, share in masses.items():
            inside = np.array(found["regions"]) == name
            assert share == pytest.approx(of_visit.mean(0)[inside].sum(), abs=1e-6)
        assert sum(masses.values()) == pytest.approx(1, abs=1e-5)
    assert found["notes"] == []
    assert found["visits"] == [1, 2] and [t.strip() for t in found["gold"]] == [")", ">"]
    assert found["pairs"] == "usual" and "Pairs as" not in result.out
    # The prompt again, the name of each region before what is of it.
    parted = result.out.split("Regions\n")[1].split("\n\nVisit 1")[0]
    assert parted.endswith("Output:<query_answer> ) >") and "<demo_answer> ] )<separator>" in parted
    python = smeltscope.dyck_prompt("smelt-tiny", PROMPT, device="cpu")
    at = [e for e in range(12) if python["layer"][e] == 3]
    rows = python["row"].isel(execution=at, head=1)
    np.testing.assert_allclose(rows, attention, atol=1e-6)
    assert python["token"].values.tolist() == found["tokens"]


def test_pairs_that_the_prompt_shows_are_told(probe: Callable[..., Any]) -> None:
    prompt = "Input: ( [\\nOutput: # )\\nInput: { ! ( [\\nOutput:"
    result = probe("dyck", "--device", "cpu", "--prompt", prompt, "--head", "3.1")
    assert "Pairs as the prompt shows them: ( by ), [ by #, { by !." in result.out
    assert "Answer:    # )" in result.out


def test_the_head_of_a_run(finished: Path, probe: Callable[..., Any]) -> None:
    summary = smeltscope.summarize(smeltscope.open(finished), "dyck-heads")
    head, layer = int(summary["dyck_head"]), int(summary["dyck_head_layer"])
    result = probe("dyck", "--device", "cpu", "--prompt", PROMPT, "--out", finished)
    assert f"Head {head} of layer {layer} (the Dyck head of {finished})" in result.out
    given = ("--device", "cpu", "--prompt", PROMPT, "--out", finished)
    other = probe("dyck", "--visits", 3, *given)  # of the same weights
    assert f"(the Dyck head of {finished})" in other.out
    other = probe("dyck", "--untrained", *given)
    assert f"(the Dyck head of {finished}, a run of another checkpoint: smelt-tiny)" in other.out


def test_a_run_that_chose_no_head(
    finished: Path, probe: Callable[..., Any], tiny_checkpoint: Path
) -> None:
    """It lends none; and a head that the model lacks is refused."""
    baseline = finished.with_name("run-baseline.h5")
    given = ("--device", "cpu", "--prompt", PROMPT, "--out")
    result = probe("dyck", *given, baseline)
    assert result.code == 0, result.err
    assert f"({baseline} has no Dyck head; its attention changes most between visits" in result.out
    layer = int(
        smeltscope.summarize(smeltscope.open(finished), "dyck-heads", draws=0)["dyck_head_layer"]
    )
    result = probe("dyck", "--ckpt", tiny_checkpoint, *given, finished)
    if layer > 5:  # it has six layers
        assert result.code == 2 and f"The Dyck head of {finished} does not exist here" in result.err
    else:
        assert "a run of another checkpoint: smelt-tiny" in result.out
    missing = finished.with_name("missing.h5")
    result = probe("dyck", *given, missing)
    assert result.code == 2 and f"There is no run file {missing}" in result.err


def test_the_same_in_python(
    tiny_checkpoint: Path, short_template: Path, probe: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "run.h5"
    asked = ("--items", 2, "--seeds", 2, "--shots", "0,2", "--nested", 4)
    command = ("dyck", "--ckpt", tiny_checkpoint, *asked, "--template", short_template)
    assert probe(*command, "--device", "cpu", "--out", out, "-q").code == 0
    given: dict[str, Any] = {"template": short_template}
    given |= {"items": 2, "shots": (0, 2), "seeds": 2, "nested": 4, "device": "cpu", "quiet": True}
    run, other = smeltscope.dyck(tiny_checkpoint, **given), smeltscope.open(out)
    assert run.attrs["identity"] == other.attrs["identity"]
    for group in ("dyck_scores", "dyck_heads", "dyck_map"):
        assert run[group].dataset.equals(other[group].dataset)


def test_states_in_python(tmp_path: Path) -> None:
    given = {"items": 8, "shots": (1,), "most_tokens": 100, "device": "cpu", "quiet": True}
    out = tmp_path / "state.h5"
    run = smeltscope.dyck_state("smelt-tiny", out=out, **given)
    assert run["dyck_state"]["tokens"].sel(state="depth").sum() == 100
    summary = smeltscope.summarize(run, "dyck-state", draws=20)
    assert summary["accuracy"].dims == ("execution", "state")
    assert np.isfinite(summary["accuracy_low"]).any()
    assert smeltscope.open(out)["dyck_state"].dataset.equals(run["dyck_state"].dataset)
    with pytest.raises(SmeltscopeError, match="exists already"):
        smeltscope.dyck_state("smelt-tiny", out=out, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shots": ()}, "no number of shots"),
        ({"shots": (-1,)}, "from 0 to"),
        ({"seeds": 0}, "seeds must be 1 or more, not 0"),
        ({"items": 0}, "items must be 1 or more, not 0"),
        ({"nested": -1}, "nested must be 0 or more, not -1"),
    ],
)
def test_what_python_is_refused(given: dict[str, Any], words: str) -> None:
    asked = {"items": 2, "shots": (0,), "seeds": 1, "nested": 0, "device": "cpu", "quiet": True}
    with pytest.raises(SmeltscopeError, match=words):
        smeltscope.dyck("smelt-tiny", **asked | given)
    if "nested" not in given:
        del asked["nested"]
        with pytest.raises(SmeltscopeError, match=words):
            smeltscope.dyck_state("smelt-tiny", **asked | given)


def test_what_reveals_the_pairs_of_all_prompts() -> None:
    """In-context pairs stand in demonstrations' answers alone unless asked for otherwise, in nested prompts too."""
    asked = {"data": None, "items": 6, "shots": (2,), "seeds": 1, "nested": 6, "seed": 0}
    for reveal, closed in ((None, False), ("both", True)):
        shown = []
        for part in item_sets(pairing="in-context", reveal=reveal, **asked):
            for item_set in part.sets:
                inputs = [i.input_symbols for i in (item_set.query, *item_set.demonstrations)]
                shown.append(bool({*item_set.query.answer_symbols} & {*chain(*inputs)}))
        assert len(shown) == 12 and any(shown) == closed


def test_examples_of_items_by_name(
    probe: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    given = ("--ckpt", tiny_checkpoint, "--device", "cpu", "--nested", 0, "--seeds", 1, "-q")
    prompts = ("--items", 3, "--shots", "0,1", "--out", tmp_path / "run.h5")
    asked = probe("dyck", *given, *prompts, "--examples", "usual:0:2,usual:0:0")
    assert asked.code == 0, asked.err
    kept = smeltscope.open(tmp_path / "run.h5")["dyck_patterns"]["example_id"].values.tolist()
    assert kept == ["usual:0:2, 1 shots", "usual:0:0, 1 shots"]  # with the most shots there are
    refused = probe("dyck", *given, *prompts, "--force", "--examples", "usual:9")
    assert refused.code == 2 and "--examples usual:9: no prompt is of this item;" in refused.err


def test_any_probe_runs_over_prompts() -> None:
    """Rows are the targets', regions the prompt's."""
    checkpoint = smeltscope.load_checkpoint("smelt-tiny", device="cpu")
    prompts = dyck.make_prompts(
        dyck.generate_sets(4, 2, 0),
        checkpoint.tokenizer,
        shots=[2],
        template=dyck.read_template("bigbench"),
        context=256,
        seed=0,
    )
    run = smeltscope.probe(checkpoint, prompts, ["dyck-map", "swap", "attention-sink"], quiet=True)
    assert run["region"].values.tolist() == list(dyck.REGIONS)
    masses = run["dyck_map"]["region_mass_sum"].sel(map_region=list(dyck.REGIONS)).values
    sampled = run["attention_sink"]["region_mass_sum"].values
    np.testing.assert_allclose(sampled, masses, atol=1e-5)
    swapped = run["swap"]["mass_sum"].sel(swapped="later").values  # (segment, layer, pair, ...)
    np.testing.assert_allclose(swapped[:, :, 0], masses[:, 6:10], atol=1e-5)


def test_a_second_tokenizer_is_refused(
    probe: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.h5"
    result = probe(*ARGUMENTS, "--shots", 0, "--baseline", tiny_checkpoint, "--out", out, "-q")
    assert result.code == 2 and "same tokenizer" in result.err
    assert list(tmp_path.iterdir()) == []


def test_state(probe: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "state.h5"
    given = ("--ckpt", "smelt-tiny", "--device", "cpu", "--items", 8, "--shots", 1, "--out", out)
    result = probe("dyck-state", *given, "-q")
    assert result.code == 0, result.err
    assert "stack" in result.out and out.is_file()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--prompt", "Input: ( ) \\nOutput:"), "No bracket"),
        (("--prompt", "Input: ( ] \\nOutput:"), "]"),
        (("--prompt", "Input: ( x \\nOutput:"), "x"),
        (("--prompt", "no brackets here"), "Input"),
        (("--prompt", PROMPT, "--head", "99.0"), "--head 99.0"),
        (("--prompt", PROMPT, "--head", "first"), "LAYER.HEAD"),
        (("--head", "3.1"), "--prompt"),
        (("--shots", "two"), "'two'"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--template", "nowhere.toml"), "nowhere.toml"),
        (("--pairing", "in-context", "--data", "nowhere.jsonl"), "--pairing"),
        (("--nested", 3), "nested must be 4 or more, not 3"),
        (("--examples", "nobody"), "--examples nobody: no prompt is of this item"),
        (("--shots", "0,9999"), "9,999 shots does not fit into the 512 tokens"),
        (("--prompt", PROMPT, "--data", "x.jsonl"), "no use for --data:"),
        (("--prompt", PROMPT, "--baseline", "smelt-tiny"), "no use for --baseline:"),
    ],
)
def test_what_is_refused(
    probe: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    names: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    few = () if "--prompt" in arguments else ("--items", 2, "--seeds", 1)
    result = probe("dyck", "--device", "cpu", *few, "-q", *arguments)
    assert result.code == 2, result.err
    assert "Traceback" not in result.err and names in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer(
    probe: Callable[..., Any], save_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "mute", with_tokenizer=False)
    for arguments in ((), ("--prompt", PROMPT)):
        result = probe("dyck", "--ckpt", folder, "--out", tmp_path / "x.h5", *arguments, "-q")
        assert result.code == 2 and "has no tokenizer" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["mute"]


def test_a_broken_row_is_named(probe: Callable[..., Any], tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text('{"input": "( [", "answer": "] )"}\n{"input": "( [", "answer": ") ]"}\n')
    result = probe("dyck", "--data", items, "--out", tmp_path / "x.h5", "-q")
    assert result.code == 2
    assert "items.jsonl" in result.err and "row 2" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["items.jsonl"]


def test_probes_of_prompts_over_text(probe: Callable[..., Any], tmp_path: Path) -> None:
    result = probe("batch", "--probes", "dyck-map", "--tokens", "1k", "--out", tmp_path / "x.h5")
    assert result.code == 2
    assert "dyck-map measures Dyck prompts, not text; probe dyck runs it." in result.err


@pytest.mark.shared_data
@pytest.mark.skipif(not BIGBENCH.is_file(), reason=f"needs {BIGBENCH.name} beside the checkout")
def test_bigbench_items(probe: Callable[..., Any], tmp_path: Path) -> None:
    """Real items, DCLM's form; the items are read where they lie."""
    given = ("--data", BIGBENCH, "--template", "dclm", "--shots", "0,1", "--items", 6)
    more = ("--seeds", 1, "--nested", 0, "--out", tmp_path / "x.h5", "-q")
    result = probe("dyck", "--device", "cpu", *given, *more)
    assert result.code == 0, result.err
    assert len(dyck.read_items(BIGBENCH)) == 1000
