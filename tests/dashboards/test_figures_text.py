"""Figures of diagnostics over text, drawn of small runs: the numbers are the summary's, and what has none is left out."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io
import pytest
import xarray as xr

import smeltscope
from smeltscope.dashboards.figures import (
    FIGURES,
    PLOTLY_CONFIG,
    FigureKind,
    choices_of,
    figures_of,
    themed,
)
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.paper import reported_by
from smeltscope.registry import ALL_PROBES, PROBES

EVIL = "<b>x</b><script>"
CONTEXT = {
    *("baseline", "by_category", "by_length", "baseline_by_category", "baseline_by_length"),
    *("patterns", "layer", "head", "pair", "write", "centred", "region", "example"),
}
SWEPT = (0, 1, 2)


@pytest.fixture(scope="module")
def run_of(byte_tokenizer: Callable[..., Any]) -> Callable[..., xr.DataTree]:
    """All diagnostics over nine documents, one of their categories named like HTML."""
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    text = "The second visit reads what the first one wrote; it writes again.\n"
    data = {name: [f"{i}. {text * (1 + i % 2)}" for i in range(3)] for name in (EVIL, "2024", "c")}

    def make(kind: str = "smelt", **overrides: Any) -> xr.DataTree:
        model = smeltscope.tiny(kind, vocab_size=258, **overrides)
        options = {"tokenizer": tokenizer, "max_length": 80, "quiet": True}
        return smeltscope.probe(model, data, list(PROBES), **options)

    return make


@pytest.fixture(scope="module")
def three(run_of: Callable[..., xr.DataTree]) -> xr.DataTree:
    return run_of(num_visits=3)


@pytest.fixture(scope="module")
def dense(run_of: Callable[..., xr.DataTree]) -> xr.DataTree:
    """A Llama: no router, each layer once."""
    return run_of("llama")


@pytest.fixture(scope="module")
def one_head(run_of: Callable[..., xr.DataTree]) -> xr.DataTree:
    return run_of(num_attention_heads=1, num_key_value_heads=1)


@pytest.fixture(scope="module")
def summaries(three: xr.DataTree) -> dict[str, xr.Dataset]:
    return {name: smeltscope.summarize(three, name, draws=20) for name in PROBES}


def trace(figure: go.Figure, name: str) -> Any:
    (found,) = [t for t in figure.data if t.name == name]
    return found


def named(probe: str, name: str) -> FigureKind:
    (found,) = [kind for kind in FIGURES[probe] if kind.name == name]
    return found


def strings(part: Any) -> list[str]:
    """Every text anywhere in a figure."""
    if isinstance(part, str):
        return [part]
    if isinstance(part, dict):
        return [s for key, value in part.items() if key != "template" for s in strings(value)]
    if isinstance(part, np.ndarray):
        return strings(part.tolist()) if part.dtype == object else []
    return [s for value in part for s in strings(value)] if isinstance(part, list | tuple) else []


def check_is_whole(figure: go.Figure) -> None:
    """It says what it shows, its axes have names, no text is markup but ours, something can be hovered over."""
    assert figure.layout.title.text
    assert any(axis.title.text for axis in figure.select_xaxes())
    assert any(axis.title.text for axis in figure.select_yaxes())
    ours = ("<br>", "<extra></extra>")
    for text in strings(figure.to_dict()):
        for mark in ours:
            text = text.replace(mark, "")
        assert "<" not in text, text
        assert "nan" not in text.lower().split()
    assert any(t.text is not None or t.hovertemplate for t in figure.data)
    go.Figure(figure.to_dict())  # every property is one that Plotly knows


def test_every_probe_has_figures() -> None:
    assert list(FIGURES) == list(ALL_PROBES)
    for kinds in FIGURES.values():
        assert kinds
        for of in (lambda kind: kind.name, lambda kind: kind.title):
            assert len({of(kind) for kind in kinds}) == len(kinds)
        for kind in kinds:
            assert set(kind.given) <= set(kind.takes) <= CONTEXT
            assert kind.needs


@pytest.mark.parametrize("probe", PROBES)
def test_three_visits(probe: str, summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries[probe]
    figures = figures_of(summary, baseline=summary, groups={"category": as_groups(summary)})
    left_out = {"lengths", "visits"} if probe == "loss" else set()
    assert set(figures) == {kind.name for kind in FIGURES[probe]} - left_out
    for figure in figures.values():
        check_is_whole(figure)


def as_groups(summary: xr.Dataset) -> xr.Dataset:
    """The summary as that of two groups."""
    names = [EVIL, "2024"]
    parts = xr.concat([summary, summary], xr.DataArray(names, dims="group", name="group"))
    return parts.assign_coords(documents=("group", [3, 0]))


@pytest.mark.parametrize("probe", PROBES)
def test_every_choice(probe: str, summaries: dict[str, xr.Dataset]) -> None:
    """Each choice that is offered can be made."""
    summary = summaries[probe]
    for kind in FIGURES[probe]:
        if not kind.applies(summary):
            continue
        choices = choices_of(kind, summary)
        assert set(choices) == set(kind.takes) & {"layer", "head", "pair", "write", "centred"}
        context = {name: values[-1] for name, values in choices.items()}
        check_is_whole(kind.draw(summary, **context))
    if "pair" in {name for kind in FIGURES[probe] for name in kind.takes}:
        kind = next(kind for kind in FIGURES[probe] if "pair" in kind.takes)
        assert choices_of(kind, summary)["pair"] == ["1-2", "1-3", "2-3"]
        with pytest.raises(SmeltscopeError, match=r"no pair of visits 2-9 .* 1-2, 1-3, 2-3"):
            kind.draw(summary, pair="2-9")


@pytest.mark.parametrize("probe", PROBES)
def test_a_model_whose_layers_run_once(probe: str, dense: xr.DataTree) -> None:
    figures = figures_of(smeltscope.summarize(dense, probe, draws=5))
    expected = {
        "attention-sink": {"heads", "depth", "positions", "regions"},
        "residual-updates": {"flow", "cosines"},
        "loss": {"positions"},
    }
    assert set(figures) == expected.get(probe, set())
    for figure in figures.values():
        check_is_whole(figure)
        assert "visit 2" not in figure.to_json()


@pytest.mark.parametrize("probe", PROBES)
def test_one_head(probe: str, one_head: xr.DataTree) -> None:
    figures = figures_of(smeltscope.summarize(one_head, probe, draws=5))
    for figure in figures.values():
        check_is_whole(figure)
    if probe == "attended-tokens" and "top8" in figures:
        assert "control" not in {t.name for t in figures["top8"].data}  # there is no other head


@pytest.mark.parametrize("probe", PROBES)
def test_nothing_but_nan(probe: str, summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries[probe]
    empty = xr.full_like(summary, np.nan, dtype=float).assign_attrs(summary.attrs)
    assert figures_of(empty, baseline=empty) == {}


def test_numbers_of_attention_sink(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["attention-sink"]
    figures = figures_of(summary)
    executions = list(zip(summary["layer"].values, summary["visit"].values, strict=True))
    heads = figures["heads"]
    for number, (name, visit) in enumerate(
        [("sink_mass", 1), ("sink_mass", 2), ("sink_mass", 3), ("change", 2), ("change", 3)]
    ):
        for layer, head in product(range(6), range(4)):
            shown = heads.data[number].z[layer][head]
            if (layer, visit) in executions:
                e = executions.index((layer, visit))
                assert shown == float(summary[name][e, head])
            else:
                assert np.isnan(shown)
    freed = trace(figures["freed"], "all layers and later visits")
    kept = np.isfinite(summary["region_change_overall"].values)
    np.testing.assert_array_equal(freed.y, summary["region_change_overall"].values[kept])
    low = summary["region_change_overall_low"].values[kept]
    np.testing.assert_allclose(freed.y - freed.error_y.arrayminus, low)
    second = trace(figures["freed"], "visit 2 minus visit 1, each layer")
    rows = [e for e, (_, visit) in enumerate(executions) if visit == 2]
    expected = [
        float(summary["region_change_mean"][e, r]) for r in np.flatnonzero(kept) for e in rows
    ]
    np.testing.assert_array_equal(second.y, expected)
    stacked = np.zeros(len(executions))
    for bar in figures["regions"].data:
        stacked += bar.y if len(bar.y) == len(executions) else 0
    np.testing.assert_allclose(stacked, 1, rtol=1e-5)


def test_the_papers_range_of_kept_experts_where_as_many_are_chosen(
    summaries: dict[str, xr.Dataset],
) -> None:
    summary = summaries["router-overlap"]
    kind = named("router-overlap", "nulls")

    def bands(drawn: go.Figure) -> list[Any]:
        return [s for s in drawn.layout.shapes if "the paper" in (s.name or "")]

    chosen = summary.sizes["shared_experts"] - 1
    assert chosen != 8 and bands(kind.draw(summary)) == []
    eight = summary.isel(shared_experts=[0] * 9)
    [band] = bands(kind.draw(eight))
    assert (band.y0, band.y1) == (2, 3) and "504 experts" in band.name
    assert reported_by("router-overlap")[0].says.startswith("2 to 3 of 8 at S ~ 97 %")


def test_numbers_of_router_overlap(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["router-overlap"]
    first = named("router-overlap", "overlap").draw(summary, pair="1-3", layer=3)
    bars = first.data[0]
    layer = summary["looped_layer"].values.tolist().index(3)
    pair = summary["visit_pair"].values.tolist().index("1-3")
    np.testing.assert_array_equal(bars.y, summary["overlap_share"].values[layer, pair])
    np.testing.assert_allclose(
        bars.y + bars.error_y.array, summary["overlap_share_high"].values[layer, pair]
    )
    np.testing.assert_allclose(float(np.sum(bars.y)), 1)
    chance = trace(first, "independent uniform sets (hypergeometric)")
    np.testing.assert_array_equal(chance.y, summary["chance_share"].values)
    marks = {shape.name.rpartition(":")[0]: shape.x0 for shape in first.layout.shapes}
    assert marks["mean"] == float(summary["overlap"][layer, pair])
    mean = float(np.dot(bars.x, bars.y))
    assert mean == pytest.approx(marks["mean"], abs=1e-6)  # the mean of what is drawn
    nulls = figures_of(summary)["nulls"]
    for name, column in (
        ("the same token", "overlap"),
        ("sets drawn by use of the experts", "marginal_overlap"),
        ("another token of the segment", "other_token_overlap"),
        ("last occurrence of the same token", "previous_overlap"),
    ):
        np.testing.assert_array_equal(trace(nulls, name).y, summary[column].values[:, 0])
    assert set(trace(nulls, "independent uniform sets (k²/E)").y) == {float(summary["chance"])}
    load = figures_of(summary)["load"].data[0].z
    np.testing.assert_allclose(load.sum(1), summary.sizes["shared_experts"] - 1, rtol=1e-5)


def test_numbers_of_residual_updates(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["residual-updates"]
    figures = figures_of(summary)
    third = [t for t in figures["flow"].data if t.name == "visit 3"]
    rows = np.flatnonzero(summary["visit"].values == 3)
    for t, name in zip(third, ("residual_rms", "update_rms", "relative_update"), strict=True):
        np.testing.assert_array_equal(t.x, rows)
        np.testing.assert_array_equal(t.y, summary[name].values[rows])
    matrix = figures["cosines"]
    np.testing.assert_array_equal(matrix.data[0].z, summary["cosine"].sel(write="update").values)
    layers = summary["layer"].values
    marked = set(zip(matrix.data[1].y.tolist(), matrix.data[1].x.tolist(), strict=True))
    pairs = product(range(len(layers)), repeat=2)
    assert marked == {(i, j) for i, j in pairs if i != j and layers[i] == layers[j]}
    assert len(matrix.layout.shapes) == 9  # three visits of the span against three
    apart = named("residual-updates", "distance").draw(summary, pair="2-3")
    alike = trace(apart, "the same layer, each")
    assert np.round(alike.x).tolist() == [3, 3, 3]  # the span has three layers
    column = summary["matched_cosine"].sel(write="update", visit_pair="2-3").values
    np.testing.assert_array_equal(alike.y, column)
    ratios = trace(figures["ratios"], "attention's write")
    column = summary["norm_ratio"].sel(vector="attn_out", visit_pair="1-2").values
    np.testing.assert_array_equal(ratios.y, column)
    (band,) = [s for s in figures["ratios"].layout.shapes if s.type == "rect"]
    assert (band.y0, band.y1) == (1.2, 3.5)


def test_numbers_of_qkv_similarity(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["qkv-similarity"]
    figure = named("qkv-similarity", "stages").draw(summary, pair="1-3")
    for what, name in (
        ("same token", "cosine_overall"),
        ("same token, centred", "cosine_centred_overall"),
        ("other token (floor)", "floor_overall"),
        ("other token, centred", "floor_centred_overall"),
    ):
        (large,) = [t for t in figure.data if t.name == what and t.showlegend is None]
        np.testing.assert_array_equal(large.y, summary[name].sel(visit_pair="1-3").values)
        (small,) = [t for t in figure.data if t.name == what and t.showlegend is False]
        column = summary[name.removesuffix("_overall")].sel(visit_pair="1-3")
        np.testing.assert_array_equal(small.y, column.values.ravel())
    bands = [s for s in figure.layout.shapes if s.type == "rect"]
    stages = summary["stage"].values.tolist()
    assert [stages[round((s.x0 + s.x1) / 2)] for s in bands] == ["X", "Q", "K", "V", "PV", "O"]
    assert sum(bool(s.showlegend) for s in bands) == 1


def test_numbers_of_attended_tokens_and_swap(summaries: dict[str, xr.Dataset]) -> None:
    summary = summaries["attended-tokens"]
    figure = figures_of(summary)["top8"]
    for name, column in (
        ("two visits of a head (visits 1 and 2)", "top8"),
        ("control: two heads of one visit", "top8_control"),
    ):
        np.testing.assert_array_equal(trace(figure, name).y, summary[column].values[:, 0].ravel())
    np.testing.assert_array_equal(trace(figure, "chance").y, summary["top8_chance"].values[:, 0])
    summary = summaries["swap"]
    figure = named("swap", "attention").draw(summary, layer=3, head=2, pair="1-3")
    masses, changes = (t.z for t in figure.data)
    at = {"looped_layer": 3, "head": 2, "visit_pair": "1-3"}
    regions = [
        r
        for r in summary["region"].values
        if np.isfinite(summary["mass_earlier"].sel(at | {"region": r}))
    ]
    for row, region in enumerate(regions):
        column = summary.sel(at | {"region": region})
        names = ("mass_earlier", "mass_later_queries", "mass_later_keys", "mass_later")
        assert masses[row].tolist() == [float(column[name]) for name in names]
        assert changes[row][0] == pytest.approx(masses[row][3] - masses[row][0], abs=1e-6)
        assert changes[row][1] + changes[row][2] == pytest.approx(changes[row][0], abs=1e-6)
    content = figures_of(summary)["content"]
    ends = [t.y[0] for t in content.data if t.type == "bar"]
    assert sum(ends) == pytest.approx(1, abs=1e-5)


def test_loss_with_other_numbers_of_visits(byte_tokenizer: Callable[..., Any]) -> None:
    from smeltscope.probes.loss import Loss

    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    data = {"a": ["Some words. " * 4, "Other words. " * 4]}
    model = smeltscope.tiny(vocab_size=258)
    run = smeltscope.probe(model, data, Loss(visits=SWEPT), tokenizer=tokenizer, quiet=True)
    figure = smeltscope.plot(run, "loss", "visits", draws=5)
    check_is_whole(figure)
    summary = smeltscope.summarize(run, "loss", draws=5)
    loss = trace(figure, "loss")
    assert loss.x.tolist() == list(SWEPT)
    np.testing.assert_array_equal(loss.y, summary["swept_loss"].values)
    assert figure.data[1].y[2] == pytest.approx(0, abs=1e-6)  # its own number of visits
    line = next(s for s in figure.layout.shapes if s.type == "line")
    assert line.x0 == 2


def test_plot(three: xr.DataTree, one_head: xr.DataTree) -> None:
    assert "by head" in smeltscope.plot(three, "attention-sink", draws=5).layout.title.text
    figure = smeltscope.plot(three, "attention-sink", "positions", layer=3, draws=5)
    assert "layer 3" in figure.layout.title.text
    figure = smeltscope.plot(three, "loss", "categories", draws=5)
    escaped = "&lt;b&gt;x&lt;/b&gt;&lt;script&gt;"
    assert figure.layout.xaxis.ticktext == ("2024", escaped, "c")
    loss = smeltscope.summarize(three, "loss", draws=5)
    segments, data = three["segments"].dataset, three["loss"].dataset
    for place, (category, shown) in enumerate(
        zip(["2024", EVIL, "c"], figure.data[0].y, strict=True)
    ):
        of = segments["category"].values == category
        mean = data["loss_sum"].values[of].sum() / data["tokens"].values[of].sum()
        assert shown == pytest.approx(mean), place
    assert set(figure.data[1].y) == {float(loss["loss"])}
    together = smeltscope.plot(three, "loss", "categories", baseline=one_head, draws=5)
    assert [t.name for t in together.data][:2] == ["this model", "Baseline"]
    assert smeltscope.plot(three, "attention-sink", "baseline", baseline=one_head, draws=5)


def test_what_cannot_be_plotted(three: xr.DataTree, dense: xr.DataTree) -> None:
    with pytest.raises(SmeltscopeError, match="no figure 'haeds'; there is: heads, depth"):
        smeltscope.plot(three, "attention-sink", "haeds")
    with pytest.raises(SmeltscopeError, match="does not take colour; it takes layer"):
        smeltscope.plot(three, "attention-sink", "positions", draws=2, colour="red")
    with pytest.raises(SmeltscopeError, match=r"nothing to show in baseline .* it needs baseline"):
        smeltscope.plot(three, "attention-sink", "baseline", draws=2)
    with pytest.raises(SmeltscopeError, match="nothing to show in any figure of swap"):
        smeltscope.plot(dense, "swap", draws=2)
    with pytest.raises(SmeltscopeError, match="No probe is called"):
        smeltscope.plot(three, "attention-sinks")


OVERLAPS = """() => {
  // texts of one figure that lie on each other, or that its frame cuts off
  const found = [];
  for (const figure of document.querySelectorAll('figure')) {
    const frame = figure.querySelector('.main-svg').getBoundingClientRect();
    const texts = [...figure.querySelectorAll('svg text')].filter(t => t.textContent.trim());
    const boxes = texts.map(t => t.getBoundingClientRect());
    boxes.forEach((a, i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1
        || a.bottom > frame.bottom + 1) found.push([figure.id, texts[i].textContent]);
      boxes.slice(i + 1).forEach((b, j) => {
        const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (x > 1 && y > 3)
          found.push([figure.id, texts[i].textContent, texts[i + 1 + j].textContent]);
      });
    });
  }
  return found;
}"""


@pytest.mark.slow
def test_all_in_a_browser(
    summaries: dict[str, xr.Dataset],
    three: xr.DataTree,
    browser: Any,
    tmp_path: Path,
) -> None:
    """Nothing overlaps or is cut, nothing is fetched, and a category named like HTML shows as text."""
    figures = {
        f"{probe}-{name}": figure
        for probe, summary in summaries.items()
        for name, figure in figures_of(summary, baseline=summary).items()
    }
    figures["loss-categories"] = smeltscope.plot(three, "loss", "categories", draws=5)
    parts = [
        f'<figure id="{name}">'
        + plotly.io.to_html(
            themed(figure, "dark"),
            full_html=False,
            include_plotlyjs=i == 0,
            config=PLOTLY_CONFIG,
        )
        + "</figure>"
        for i, (name, figure) in enumerate(figures.items())
    ]
    path = tmp_path / "figures.html"
    path.write_text("<!doctype html><meta charset=utf-8>" + "".join(parts), encoding="utf-8")
    tab = browser.new_page()
    tab.set_viewport_size({"width": 1440, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("#loss-categories .main-svg")
    for width in (1440, 800):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.wait_for_timeout(1500)  # figures follow the width
        assert tab.evaluate(OVERLAPS) == []
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    for figure in ("loss-categories", "router-overlap-categories"):
        texts = tab.eval_on_selector_all(
            f"#{figure} .xtick text", "all => all.map(t => t.textContent)"
        )
        assert EVIL in texts
    assert tab.locator("#loss-categories .xtick tspan[style*=bold]").count() == 0
    tab.close()
