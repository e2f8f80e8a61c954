"""Figures of attention sinks say what they show, at every size of model; what all figures share."""

import warnings
from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest
import xarray as xr

from smeltscope.dashboards.figures import (
    sink_by_position,
    sink_depth_profile,
    sink_heatmaps,
    themed,
)
from smeltscope.dashboards.figures.attention_sink import sink_against_baseline
from smeltscope.dashboards.figures.common import errors, label, log_axis, reported_range, said
from smeltscope.dashboards.figures.dyck_map import visible
from smeltscope.errors import SmeltscopeError

Summaries = Callable[..., xr.Dataset]
FIGURES = (sink_heatmaps, sink_depth_profile, sink_by_position)


def titles(figure: go.Figure) -> list[str]:
    return [annotation.text.replace("<br>", " ") for annotation in figure.layout.annotations]


@pytest.mark.parametrize("make", FIGURES)
@pytest.mark.parametrize("visits", [1, 2, 3])
def test_titles_and_axes(make: Callable, visits: int, make_summary: Summaries) -> None:
    figure = make(make_summary(6, 4, visits))
    assert "Attention on the first token" in figure.layout.title.text
    x = [axis.title.text for axis in figure.select_xaxes()]
    assert all(x), "every x axis is named"
    y = [axis.title.text for axis in figure.select_yaxes()]
    assert y[0] in ("layer", "mass on the first token")


def test_heat_maps_by_visit(make_summary: Summaries) -> None:
    figure = sink_heatmaps(make_summary(6, 4, 2))
    assert titles(figure) == ["Visit 1", "Visit 2", "Visit 2 minus visit 1"]
    assert [trace.z.shape for trace in figure.data] == [(6, 4)] * 3
    assert np.isfinite(figure.data[0].z).all()
    for trace in figure.data[1:]:  # three of the six layers are looped
        assert np.isfinite(trace.z).all(1).tolist() == [False, True, True, True, False, False]
    np.testing.assert_allclose(figure.data[2].z[1:4], figure.data[1].z[1:4] - figure.data[0].z[1:4])
    mass, change = figure.layout.coloraxis, figure.layout.coloraxis2
    assert mass.cmin == 0 and mass.colorbar.title.text == "mass"
    assert change.cmin == -change.cmax and change.colorbar.title.text == "change"
    assert change.showscale
    assert figure.layout.yaxis.autorange == "reversed"  # layer 0 on top


def test_one_visit_shows_no_change(make_summary: Summaries) -> None:
    figure = sink_heatmaps(make_summary(6, 4, 1))
    assert titles(figure) == ["Visit 1"]
    assert figure.layout.coloraxis2.showscale is False
    assert "all layers" in sink_by_position(make_summary(6, 4, 1)).layout.title.text
    assert not sink_depth_profile(make_summary(6, 4, 1)).layout.shapes  # nothing is shaded


def test_three_visits(make_summary: Summaries) -> None:
    summary = make_summary(6, 4, 3)
    assert titles(sink_heatmaps(summary)) == [
        *("Visit 1", "Visit 2", "Visit 3"),
        *("Visit 2 minus visit 1", "Visit 3 minus visit 1"),
    ]
    assert len(sink_depth_profile(summary).layout.shapes) == 2
    names = {trace.name for trace in sink_by_position(summary).data}
    assert names == {"visit 1", "visit 2", "visit 3", "uniform attention"}
    colours = {t.marker.color for t in sink_by_position(summary).data if "visit" in t.name}
    assert len(colours) == 3


def test_hovering_gives_value_interval_and_number(make_summary: Summaries) -> None:
    summary = make_summary(6, 4, 2)
    figure = sink_heatmaps(summary)
    value = float(summary["sink_mass"][0, 0])
    expected = f"{value:.4f} [{value - 0.01:.4f}, {value + 0.01:.4f}]<br>12 documents"
    assert figure.data[0].text[0][0] == f"layer 0, head 0<br>{expected}"
    points = next(t for t in sink_depth_profile(summary).data if t.name == "visit 1, heads")
    assert points.text[0] == f"visit 1, heads, layer 0, visit 1, head 0<br>{expected}"
    single = sink_heatmaps(make_summary(6, 4, 2, intervals=False))  # of a single document
    assert single.data[0].text[0][0] == f"layer 0, head 0<br>{value:.4f}<br>12 documents"


def test_means_and_intervals_over_depth(make_summary: Summaries) -> None:
    summary = make_summary(6, 4, 2)
    traces = {trace.name: trace for trace in sink_depth_profile(summary).data}
    second = traces["visit 2, mean over heads"]
    assert second.x.tolist() == [4, 5, 6]
    np.testing.assert_allclose(second.y, summary["sink_mass_mean"].values[4:7])
    np.testing.assert_allclose(second.error_y.array, 0.01)
    assert traces["visit 2, heads"].legendgroup == second.legendgroup
    assert len(traces["visit 1, heads"].x) == 6 * 4
    assert set(traces["uniform attention"].y) == {0.05}


def test_positions(make_summary: Summaries) -> None:
    figure = sink_by_position(make_summary(6, 4, 2))
    assert figure.layout.xaxis.ticktext[:4] == ("1", "2-3", "4-7", "8-15")  # query 0 is left out
    assert figure.data[0].x.tolist() == list(range(8))
    assert figure.layout.yaxis.type == "log"
    assert figure.data[-1].line.dash == "dot"


@pytest.mark.parametrize("make", FIGURES)
@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_without_values(make: Callable, value: float, make_summary: Summaries) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = make(make_summary(6, 4, 2, value=value, intervals=False))
    scale = figure.layout.coloraxis
    assert scale.cmax is None or scale.cmax > 0
    assert '"NaN"' not in figure.to_json()


@pytest.mark.parametrize(("layers", "heads", "visits"), [(48, 64, 1), (32, 32, 2), (12, 16, 3)])
def test_many_heads_and_layers_stay_legible(
    layers: int, heads: int, visits: int, make_summary: Summaries
) -> None:
    summary = make_summary(layers, heads, visits)
    figure = sink_heatmaps(summary)
    panels = 2 * visits - 1
    for axis in figure.select_xaxes():
        assert heads / axis.dtick <= max(4, 24 / panels)
        assert axis.tickangle == 0
    for axis in figure.select_yaxes():
        assert layers / axis.dtick <= 20
    assert figure.layout.height / layers >= 26  # a row stays high enough to point at
    assert len(sink_depth_profile(summary).layout.xaxis.tickvals) <= 20


def test_positions_have_intervals(make_summary: Summaries) -> None:
    summary = make_summary(6, 4, 2)
    of_all = sink_by_position(summary).data[1]
    mean = summary["sink_mass_by_position"].values[5:8, 1:].mean(0)  # visit 2 of layers 2 to 4
    np.testing.assert_allclose(of_all.y, mean)
    np.testing.assert_allclose(of_all.error_y.array, 0.01)
    trace = sink_by_position(summary, layer=3).data[1]  # its visit 2 is execution 6
    np.testing.assert_allclose(trace.y, summary["sink_mass_by_position"].values[6, 1:])
    np.testing.assert_allclose(trace.error_y.array, 0.01)
    with pytest.raises(SmeltscopeError, match="no layer 6 in this figure; it has 0, 1, 2, 3, 4, 5"):
        sink_by_position(summary, layer=6)


def test_beside_the_baseline(make_summary: Summaries) -> None:
    summary, baseline = make_summary(6, 4, 2), make_summary(6, 2, 1)
    figure = sink_against_baseline(summary, baseline=baseline)
    by_depth = [t for t in figure.data if t.xaxis == "x" and t.mode == "markers"]
    assert [t.name for t in by_depth] == ["visit 1", "visit 2", "Baseline"]
    np.testing.assert_allclose(by_depth[1].x, [4 / 8, 5 / 8, 6 / 8])
    np.testing.assert_allclose(by_depth[2].x, [0, 0.2, 0.4, 0.6, 0.8, 1])
    np.testing.assert_allclose(by_depth[2].y, baseline["sink_mass_mean"].values)
    by_layer = {t.name: t for t in figure.data if t.xaxis == "x2"}
    assert by_layer["visit 2"].x.tolist() == [1, 2, 3]
    np.testing.assert_allclose(by_layer["visit 2"].y, summary["sink_mass_mean"].values[4:7])


def test_text_stays_text() -> None:
    assert label("<b>x</b> & <script>") == "&lt;b&gt;x&lt;/b&gt; &amp; &lt;script&gt;"
    assert label("a" * 60) == "a" * 45 + "..."
    assert visible(" a\n") == "␣a\\n"


def test_intervals_as_error_bars() -> None:
    part = xr.Dataset(
        {"value": ("x", [0.5, 0.7]), "low": ("x", [0.4, np.nan]), "high": ("x", [0.8, np.nan])}
    )
    bars = errors(part)
    np.testing.assert_allclose(bars["array"][0], 0.3)
    np.testing.assert_allclose(bars["arrayminus"][0], 0.1)
    assert said(part, "3 documents").tolist() == [
        "0.5000 [0.4000, 0.8000]<br>3 documents",
        "0.7000<br>3 documents",
    ]
    assert said(part * -1, "", signed=True)[1] == "-0.7000"
    assert said(part * np.nan, "3 documents")[0] == "no value"
    assert errors(part * np.nan) is None


def test_ranges_of_the_paper() -> None:
    assert reported_range("qkv-similarity", "cosine", stage="PV") == (0.56, 0.69)
    assert reported_range("residual-updates", "norm_ratio", vector="update") == (1.2, 3.5)
    assert reported_range("attended-tokens", "top8_control") == (0.28, 0.34)
    assert reported_range("qkv-similarity", "cosine", stage="V random") is None
    assert reported_range("attention-sink", "change") is None  # words, no range


def test_themes(make_summary: Summaries) -> None:
    figure = sink_depth_profile(make_summary(6, 4, 2))
    before = figure.to_json()
    dark, light = themed(figure, "dark"), themed(figure, "light")
    assert figure.to_json() == before, "the figure itself stays as it was"
    assert dark.layout.paper_bgcolor != light.layout.paper_bgcolor
    assert dark.layout.template != light.layout.template
    colours = [
        {t.marker.color for t in f.data if t.marker.color is not None} for f in (dark, light)
    ]
    assert colours[0].isdisjoint(colours[1])
    assert len(colours[0]) == len(colours[1])
    text = go.Figure(go.Scatter(x=[0], y=[0], text=["#0072B2"], name="#0072B2"))
    assert themed(text, "dark").data[0].name == "#0072B2"


@pytest.mark.parametrize("ends", [(0.3, 4), (1e-3, 900), (1.0, 1.1), (1e-9, 1e3)])
def test_logarithmic_axes_are_labelled(ends: tuple[float, float]) -> None:
    axis = log_axis([*ends, np.nan, 0.0])
    inside = [t for t in axis["tickvals"] if ends[0] * 0.7 <= t <= ends[1] * 1.5]
    assert 1 <= len(inside) <= 15
    assert [float(text) for text in axis["ticktext"]] == pytest.approx(axis["tickvals"])
    assert log_axis([np.nan])["type"] == "log"
