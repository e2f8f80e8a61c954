"""Figures of Dyck diagnostics, drawn of small runs: the numbers are the summary's and the run's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import xarray as xr

import smeltscope
from smeltscope.activations import open_run
from smeltscope.commands.dyck import item_sets, make_heldout
from smeltscope.dashboards.figures import FIGURES, choices_of, figures_of, head_of_map
from smeltscope.dashboards.figures.dyck_map import PAPER_HEAD
from smeltscope.dashboards.overview import headlines
from smeltscope.errors import SmeltscopeError
from smeltscope.model import checkpoint_of
from smeltscope.probes import RunOptions
from smeltscope.probes.dyck_state import DyckState, measure_state
from smeltscope.probes.paper import reported_by

SMALL = {"vocab_size": 258, "num_physical_layers": 2, "loop_start": 0, "loop_stop": 1}
DYCK = ("dyck-scores", "dyck-heads", "dyck-map")


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Callable[..., Any]) -> Any:
    return byte_tokenizer(bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def run(tokenizer: Any) -> xr.DataTree:
    """Two layers, the first visited twice; a prompt's attention is kept."""
    size = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 400}
    model = smeltscope.tiny(**SMALL, **size)
    asked = {"items": 2, "shots": (0, 1), "seeds": 2, "nested": 4, "examples": 1}
    return smeltscope.dyck(model, tokenizer=tokenizer, quiet=True, **asked)


@pytest.fixture(scope="module")
def summaries(run: xr.DataTree) -> dict[str, xr.Dataset]:
    return {name: smeltscope.summarize(run, name, draws=20) for name in DYCK}


@pytest.fixture(scope="module")
def patterns(run: xr.DataTree) -> xr.Dataset:
    return run["dyck_patterns"].to_dataset()


@pytest.fixture(scope="module")
def state(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    checkpoint = checkpoint_of(smeltscope.tiny(**SMALL), tokenizer=tokenizer)
    asked = {"data": None, "items": 8, "shots": (1,), "seeds": 1, "reveal": None}
    heldout = make_heldout(checkpoint, item_sets(pairing="usual", seed=0, **asked), "bigbench")
    options = RunOptions(max_length=int(heldout.lengths.max()), batch_tokens=2000)
    out = tmp_path_factory.mktemp("state") / "run.h5"
    measured = measure_state(checkpoint, heldout, out, options, DyckState(most_tokens=200))
    return smeltscope.summarize(open_run(measured), "dyck-state", draws=20)


def trace(figure: go.Figure, name: str, number: int = 0) -> Any:
    return [t for t in figure.data if t.name == name][number]


def check_is_whole(figure: go.Figure) -> None:
    assert figure.layout.title.text
    assert any(axis.title.text for axis in figure.select_xaxes())
    assert any(axis.title.text for axis in figure.select_yaxes())
    go.Figure(figure.to_dict())


@pytest.mark.parametrize("probe", DYCK)
def test_all_are_drawn(probe: str, summaries: dict[str, xr.Dataset], patterns: xr.Dataset) -> None:
    summary = summaries[probe]
    figures = figures_of(summary, patterns=patterns)
    assert set(figures) == {kind.name for kind in FIGURES[probe]}
    for figure in figures.values():
        check_is_whole(figure)
    assert "map" not in figures_of(summary)  # without patterns
    empty = xr.full_like(summary, np.nan, dtype=float).assign_attrs(summary.attrs)
    assert figures_of(empty, patterns=patterns) == {}


@pytest.mark.parametrize("probe", DYCK)
def test_every_choice(probe: str, summaries: dict[str, xr.Dataset], patterns: xr.Dataset) -> None:
    for kind in FIGURES[probe]:
        choices = choices_of(kind, summaries[probe], patterns)
        assert all(choices.values())
        if kind.name == "split":
            choices["region"].remove("bos")  # by which the others are split
        context = {name: values[-1] for name, values in choices.items()}
        check_is_whole(kind.draw(summaries[probe], **context, patterns=patterns))
    assert choices_of(FIGURES["dyck-map"][0], summaries["dyck-map"], patterns) == {
        "layer": [0],
        "head": [0, 1],
        "pair": ["1-2"],
        "example": [0],
    }


def test_numbers_of_scores(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["dyck-scores"]
    figure = figures_of(summary)["shots"]
    scored = np.isfinite(summary["exact"].values)
    assert figure.layout.xaxis.ticktext == tuple(str(k) for k in summary["shots"].values[scored])
    for name, column in (
        ("all tokens right", "all_right"),
        ("symbols right", "symbol_accuracy"),
        ("Bayes: query", "bayes_query"),
        ("types guessed", "guess"),
    ):
        np.testing.assert_array_equal(trace(figure, name).y, summary[column].values[scored])
    symbols = trace(figure, "Bayes: query", 1)  # beside the share of symbols
    np.testing.assert_array_equal(symbols.y, summary["symbol_accuracy_bayes_query"].values[scored])
    named = [t.name for t in figure.data if t.showlegend is not False]
    assert len(named) == len(set(named))
    losses = figures_of(summary)["losses"]
    for i, column in enumerate(
        f"{kind}{of}_loss" for kind in ("", "nested_") for of in ("token", "answer")
    ):
        there = np.isfinite(summary[column].values)
        own = trace(losses, "nested prompts" if i > 1 else "scored prompts", i % 2)
        for line, name in ((own, column), (trace(losses, "types guessed", i), f"{column}_guess")):
            np.testing.assert_array_equal(line.y, summary[name].values[there])
            np.testing.assert_array_equal(line.x, np.flatnonzero(there))
    seeds = trace(figure, "all tokens right", 1)
    np.testing.assert_array_equal(seeds.y, summary["all_right_by_seed"].values[scored].ravel())


def test_what_the_paper_reports_stands_at_its_shots(summaries: dict[str, xr.Dataset]) -> None:
    """As the table of its numbers has them; where exact text was not measured, nothing."""
    (kind,) = (kind for kind in FIGURES["dyck-scores"] if kind.name == "shots")
    says = {entry.at["shots"]: entry.says for entry in reported_by("dyck-scores")}
    assert says[0].startswith("about 0 %") and says[32].startswith("29.8 % (its Baseline 26.4 %)")
    summary = summaries["dyck-scores"]  # 0 and 1 shots
    at = trace(kind.draw(summary), "the paper's exact text")
    assert (list(at.x), list(at.y)) == ([0], [0.0]) and "BIG-bench" in at.text[0]
    many = summary.isel(shots=summary["all_right"].notnull().values)
    many = many.assign_coords(shots=[8, 32])
    at = trace(kind.draw(many), "the paper's exact text")
    assert (list(at.x), list(at.y)) == ([1], [0.298]) and "Baseline 0.264" in at.text[0]
    for other in (many.assign_coords(shots=[2, 4]), many.assign(exact=many["exact"] * np.nan)):
        names = [t.name for t in kind.draw(other).data]
        assert "the paper's exact text" not in names


def test_numbers_of_ablations(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["dyck-heads"]
    figure = figures_of(summary)["maps"]
    maps = [t for t in figure.data if t.type == "heatmap"]
    for number, visits in enumerate(("all", "1", "2")):
        rise = summary["head_rise"].sel(half=1, ablated_visits=visits)
        np.testing.assert_array_equal(maps[number].z, rise.values)
    np.testing.assert_array_equal(maps[3].z, summary["head_interaction"].sel(half=1).values)
    np.testing.assert_allclose(maps[3].z, maps[0].z - maps[1].z - maps[2].z, atol=1e-5)
    rings = [t for t in figure.data if t.type == "scatter"]
    found = (float(summary["dyck_head_layer"]), float(summary["dyck_head"]))
    assert [(t.y[0], t.x[0]) for t in rings] == [found] * 4
    chosen = summary["head_rise"].sel(half=0, ablated_visits="all").values
    assert chosen.argmax() == found[1]  # one looped layer
    halves = figures_of(summary)["halves"]
    head = trace(halves, "the Dyck head")
    assert head.x[0] == chosen.max()
    assert head.y[0] == float(summary["dyck_head_rise"].sel(ablated_visits="all"))
    targets = f"{int(summary['targets'].sel(half=1))} targets of all shots together"
    for line in figures_of(summary)["shots"].data:
        assert all(text.endswith(targets) for text in line.text)


def test_numbers_of_regions(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["dyck-map"]
    kinds = {kind.name: kind for kind in FIGURES["dyck-map"]}
    figure = kinds["head"].draw(summary, layer=0, head=1)
    regions = list(figure.layout.xaxis2.ticktext)
    for visit in (1, 2):
        (execution,) = np.flatnonzero(
            (summary["layer"].values == 0) & (summary["visit"].values == visit)
        )
        mass = [float(summary["mass"].sel(map_region=r)[execution, 1]) for r in regions]
        bar = trace(figure, f"visit {visit}")
        assert bar.y.tolist() == mass
        assert sum(mass) == pytest.approx(1, abs=1e-5)
    change, release, retarget = (
        np.array(trace(figure, name).y) for name in ("change", "release", "retarget")
    )
    np.testing.assert_allclose(
        change, trace(figure, "visit 2").y - trace(figure, "visit 1").y, atol=1e-6
    )
    np.testing.assert_allclose((release + retarget)[1:], change[1:], atol=1e-6)
    overall = kinds["regions"].draw(summary)
    np.testing.assert_array_equal(
        trace(overall, "retarget").y,
        summary["retarget_overall"].sel(map_region=list(overall.layout.xaxis2.ticktext)).values,
    )
    for visit in (1, 2):  # the mean has its own interval, which is drawn and said
        bar = trace(overall, f"visit {visit}")
        there = list(overall.layout.xaxis2.ticktext)
        value, low, high = (
            summary[f"mass_visit_{visit}_overall{end}"].sel(map_region=there).values
            for end in ("", "_low", "_high")
        )
        np.testing.assert_allclose(
            value, summary["mass"].isel(execution=visit - 1).sel(map_region=there).mean("head")
        )
        np.testing.assert_array_equal(bar.y, value)
        np.testing.assert_allclose(bar.y + bar.error_y.array, high)
        np.testing.assert_allclose(bar.y - bar.error_y.arrayminus, low)
        assert f"[{low[0]:.4f}, {high[0]:.4f}]" in bar.text[0]
    known = int(summary["dyck_head"])  # one looped layer, two heads
    assert head_of_map(summary) == head_of_map(summary, 0) == (0, known)
    assert f"Attention of head {known} of layer 0" in kinds["head"].draw(summary).layout.title.text
    assert "the Dyck head" in kinds["head"].draw(summary).layout.title.subtitle.text
    assert head_of_map(summary, head=1 - known) == (0, 1 - known)
    other = kinds["head"].draw(summary, head=1 - known).layout.title.subtitle.text
    assert "the Dyck head" not in other
    answers = summary["retarget"].sel(map_region="demo_answer").values[0, 0]
    unknown = summary.drop_vars(["dyck_head", "dyck_head_layer"])
    assert head_of_map(unknown) == (0, int(answers.argmax()))
    with pytest.raises(SmeltscopeError, match="no head 7 in this figure; it has 0, 1"):
        kinds["head"].draw(summary, head=7)


def test_what_is_released_and_retargeted(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["dyck-map"]
    (kind,) = (kind for kind in FIGURES["dyck-map"] if kind.name == "split")
    figure = kind.draw(summary)
    answers = summary.sel(map_region="demo_answer", visit_pair="1-2").isel(looped_layer=0)
    heads = trace(figure, "layer 0")
    np.testing.assert_array_equal(heads.x, answers["release"])
    np.testing.assert_array_equal(heads.y, answers["retarget"])
    np.testing.assert_allclose(np.add(heads.x, heads.y), answers["change"], atol=1e-6)
    for end in ("low", "high"):
        assert f"{float(answers[f'release_{end}'][1]):+.4f}" in heads.text[1]
        assert f"{float(answers[f'retarget_{end}'][1]):+.4f}" in heads.text[1]
    for bars, name in ((heads.error_x, "release"), (heads.error_y, "retarget")):
        np.testing.assert_allclose(answers[name] + bars.array, answers[f"{name}_high"])
        np.testing.assert_allclose(answers[name] - bars.arrayminus, answers[f"{name}_low"])
    assert "whiskers" in figure.layout.title.subtitle.text
    crowded = xr.concat([summary] * 50, "looped_layer", data_vars="minimal", coords="minimal")
    crowded = crowded.assign_coords(looped_layer=np.arange(50))
    crowded = crowded.drop_vars(["dyck_head", "dyck_head_layer"])
    many = kind.draw(crowded)
    assert len(many.data) == 51 and all(t.error_y.array is None for t in many.data)
    assert "hover" in many.layout.title.subtitle.text
    known, ring = int(summary["dyck_head"]), trace(figure, "the Dyck head")
    assert (ring.x[0], ring.y[0]) == (heads.x[known], heads.y[known])
    paper = trace(figure, "the paper's head")
    assert (paper.x[0], paper.y[0]) == (0.35, 0.26)
    assert sum(PAPER_HEAD) == pytest.approx(0.61)
    names = {t.name for t in kind.draw(summary, region="separator").data}
    assert names == {"layer 0", "the Dyck head"}  # the paper says nothing of other regions
    with pytest.raises(SmeltscopeError, match="no region bos in this figure"):
        kind.draw(summary, region="bos")  # which is what the others are split by
    unknown = summary.drop_vars(["dyck_head", "dyck_head_layer"])
    assert "the Dyck head" not in {t.name for t in kind.draw(unknown).data}


def test_the_map_of_a_prompt(summaries: dict[str, xr.Dataset], run: xr.DataTree) -> None:
    summary = summaries["dyck-map"]
    patterns = run["dyck_patterns"].to_dataset()
    kind = FIGURES["dyck-map"][0]
    figure = kind.draw(summary, patterns=patterns, layer=0, head=1, example=0)
    strip, first, second, difference = (t for t in figure.data if t.type == "heatmap")
    keys = int((patterns["key_region"].values[0] >= 0).sum())
    assert first.z.shape == (3, keys)
    rows = run["dyck_patterns"]["row"].values  # (example, execution, head, target, key)
    np.testing.assert_array_equal(first.z, rows[0, 0, 1, :, :keys])
    np.testing.assert_array_equal(second.z, rows[0, 1, 1, :, :keys])
    np.testing.assert_array_equal(difference.z, second.z - first.z)
    np.testing.assert_allclose(first.z.sum(1), 1, atol=1e-5)
    names = patterns["region_name"].values[patterns["key_region"].values[0, :keys]]
    shown = [text.rpartition("(")[2][:-1] for text in strip.text[0]]
    assert shown == names.tolist()
    legend = [t.name for t in figure.data if t.type == "scatter"]
    assert [legend[int(number)] for number in strip.z[0]] == names.tolist()
    # the last layer runs once: one map, no difference
    once = kind.draw(summary, patterns=patterns, layer=1, head=0)
    assert len([t for t in once.data if t.type == "heatmap"]) == 2
    check_is_whole(once)


def test_tokens_and_names_are_text(summaries: dict[str, xr.Dataset], patterns: xr.Dataset) -> None:
    evil = "<script>x</script>"
    changed = patterns.copy(deep=True)
    changed["token"][:] = "<b>"
    changed["gold"][:] = evil
    changed["example_id"][:] = evil
    figure = FIGURES["dyck-map"][0].draw(summaries["dyck-map"], patterns=changed)
    drawn = str(figure.to_dict())
    assert "<script>" not in drawn and "<b>" not in drawn
    assert "&lt;script&gt;" in drawn and "&lt;b&gt;" in drawn


def test_one_visit(summaries: dict[str, xr.Dataset], patterns: xr.Dataset) -> None:
    """What a model without a loop has: no pair of visits, and of ablations nothing."""
    summary = summaries["dyck-map"]
    first = np.flatnonzero(summary["visit"].values == 1)
    pairs = [n for n in summary.variables if "visit_pair" in summary[n].dims]
    overall = [
        str(n)
        for n in summary.data_vars
        if "_overall" in str(n) and not str(n).startswith("mass_visit_1_")
    ]
    once = summary.isel(execution=first).drop_vars([*pairs, *overall])
    rows = np.flatnonzero(patterns["visit"].values == 1)
    figures = figures_of(once, patterns=patterns.isel(execution=rows))
    assert set(figures) == {"map", "head", "regions", "heads"}
    for figure in figures.values():
        check_is_whole(figure)
        assert "visit 2" not in figure.to_json()


def test_what_stands_first_of_states_has_intervals(state: xr.Dataset) -> None:
    read = [
        found for found in headlines(state, "dyck-state") if "mean over executions" in found.what
    ]
    assert len(read) == state.sizes["state"]
    for found, name in zip(read, state["state"].values, strict=True):
        value = 100 * float(state["accuracy"].sel(state=name).mean())
        assert float(found.here.split(" ")[0]) == pytest.approx(value, abs=0.6)
        assert "[" in found.here and found.beside.startswith("control ")
        assert found.beside.count("[") == 3  # the control's, the commonest class's, the token's


def test_numbers_of_states(state: xr.Dataset) -> None:
    figures = figures_of(state, baseline=state)
    assert set(figures) == {"accuracy", "changes"}
    for figure in figures.values():
        check_is_whole(figure)
    for number, name in enumerate(state["state"].values):
        first = trace(figures["accuracy"], "visit 1", number)
        rows = np.flatnonzero(state["visit"].values == 1)
        np.testing.assert_array_equal(first.y, state["accuracy"].sel(state=name).values[rows])
        control = trace(figures["accuracy"], "control task", number)
        np.testing.assert_array_equal(control.y, state["control"].sel(state=name).values)
        gained = trace(figures["changes"], "gained", number).y
        lost = trace(figures["changes"], "lost", number).y
        change = trace(figures["changes"], "change = gained - lost", number).y
        assert (np.array(lost)[np.isfinite(lost)] <= 0).all()
        np.testing.assert_allclose(gained + lost, change, atol=1e-6)


def test_plot(run: xr.DataTree) -> None:
    figure = smeltscope.plot(run, "dyck-map", draws=5, head=1)
    assert "Head 1 of layer 0" in figure.layout.title.text
