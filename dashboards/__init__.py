"""Dashboards: from a run to Plotly figures and pages."""

from smeltscope.dashboards.figures import sink_by_position, sink_depth_profile, sink_heatmaps
from smeltscope.dashboards.page import render_page, write_sink_page

__all__ = [
    "render_page",
    "sink_by_position",
    "sink_depth_profile",
    "sink_heatmaps",
    "write_sink_page",
]
