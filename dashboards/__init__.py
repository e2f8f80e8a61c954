"""Dashboards: from a run to Plotly figures, pages and a report."""

from smeltscope.dashboards.figures import (
    FIGURES,
    PLOTLY_CONFIG,
    FigureKind,
    figures_of,
    sink_by_position,
    sink_depth_profile,
    sink_heatmaps,
    themed,
)
from smeltscope.dashboards.report import render_report, write_report
from smeltscope.dashboards.runs import RunFile

__all__ = [
    "FIGURES",
    "PLOTLY_CONFIG",
    "FigureKind",
    "RunFile",
    "figures_of",
    "render_report",
    "sink_by_position",
    "sink_depth_profile",
    "sink_heatmaps",
    "themed",
    "write_report",
]
