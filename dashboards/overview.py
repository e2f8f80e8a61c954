"""Headline numbers: what stands first of each diagnostic, beside what to hold it against and what the paper reports."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xarray as xr

from smeltscope.probes.paper import MODELS, NORMS, Reported, reported_by

TITLES = {
    "attention-sink": "Attention sink",
    "router-overlap": "Router overlap",
    "residual-updates": "Residual updates",
    "qkv-similarity": "Stages of attention",
    "attended-tokens": "Attended tokens",
    "swap": "Places or content",
    "loss": "Loss",
    "dyck-scores": "Dyck: answers",
    "dyck-heads": "Dyck: heads",
    "dyck-map": "Dyck: map",
    "dyck-state": "Dyck: state",
}


# Beneath the numbers, on pages and in reports.
NOTE = (
    f"The paper: arXiv 2609.01343, {MODELS}; context, not a target. Intervals are 95 %, from drawing documents "
    "again within each category; they cover the choice of text, not the training seed."
)


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A number that stands first.

    `quantity` is of the probe's summary, at the labels `at`; `by_layer` the same number of each layer, where there is
    one; `beside` quantities to hold it against, {quantity: what it is}.
    """

    what: str
    quantity: str
    at: Mapping[str, str | int] = field(default_factory=dict)
    by_layer: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    percent: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A headline number of one run, in words."""

    what: str
    here: str  # value and interval
    layers: str = ""  # from the least to the greatest layer
    beside: str = ""
    paper: str = ""


HEADLINES: dict[str, tuple[Headline, ...]] = {
    "attention-sink": (
        Headline(
            what="sink mass at visit 2 minus visit 1", quantity="change_overall", by_layer="change"
        ),
        Headline(
            what="sink mass, mean over all layers",
            quantity="sink_mass_overall",
            beside={"uniform_overall": "uniform"},
        ),
    ),
    "router-overlap": (
        Headline(
            what="experts shared by two visits",
            quantity="overlap_overall",
            by_layer="overlap",
            beside={
                "chance": "chance",
                "marginal_overlap_overall": "by popularity",
                "other_token_overlap_overall": "other token",
            },
        ),
    ),
    "residual-updates": (
        *(
            Headline(
                what=f"norm at visit 2 / at visit 1, {what}",
                quantity="norm_ratio_overall",
                at={"vector": vector},
                by_layer="norm_ratio",
            )
            for vector, what in NORMS.items()
        ),
        Headline(
            what="relative update at visit 2 / at visit 1",
            quantity="relative_update_ratio_overall",
            by_layer="relative_update_ratio",
        ),
        Headline(
            what="cosine of a layer's two updates",
            quantity="matched_overall",
            at={"write": "update"},
            by_layer="matched_cosine",
            beside={"nearby_overall": "nearby layer"},
        ),
        Headline(
            what="cosine of updates of different layers",
            quantity="nonmatching_overall",
            at={"write": "update"},
        ),
    ),
    "qkv-similarity": tuple(
        Headline(
            what=f"cosine of {stage} at two visits",
            quantity="cosine_overall",
            at={"stage": stage},
            by_layer="cosine",
            beside={"floor_overall": "floor"},
        )
        for stage in ("X", "Q", "K", "V", "PV", "O")
    ),
    "attended-tokens": (
        Headline(
            what="the 8 most attended tokens at both visits",
            quantity="top8_overall",
            by_layer="top8",
            beside={"top8_chance_overall": "chance"},
        ),
        Headline(
            what="the same for two heads of one visit",
            quantity="top8_control_overall",
            by_layer="top8_control",
        ),
    ),
    "swap": (
        Headline(
            what="of what changes: attention that moved",
            quantity="moved_share_overall",
            by_layer="moved_share",
            percent=True,
        ),
        Headline(
            what="of what changes: values that changed",
            quantity="values_share_overall",
            by_layer="values_share",
            percent=True,
        ),
        Headline(
            what="change of mass on the first token",
            quantity="first_change_overall",
            by_layer="first_change",
            beside={
                "first_change_by_queries_overall": "by queries",
                "first_change_by_keys_overall": "by keys",
            },
        ),
    ),
    "loss": (
        Headline(what="loss, nats per token", quantity="loss", beside={"uniform": "uniform guess"}),
    ),
    "dyck-scores": (
        Headline(
            what="prompts answered right by generation",
            quantity="exact",
            beside={"guess": "guess", "bayes_answers": "best from the prompt alone"},
            percent=True,
        ),
        Headline(
            what="symbols right, each given those before",
            quantity="symbol_accuracy",
            beside={
                "symbol_accuracy_guess": "guess",
                "symbol_accuracy_bayes_answers": "best from the prompt alone",
            },
            percent=True,
        ),
    ),
    "dyck-heads": (
        Headline(
            what="rise of perplexity without the Dyck head",
            quantity="dyck_head_rise",
            at={"ablated_visits": "all"},
            beside={"mean_head_rise": "mean head"},
        ),
        Headline(
            what="interaction of its visits",
            quantity="dyck_head_interaction",
        ),
    ),
    "dyck-map": tuple(
        headline
        for region, words in (("bos", "the start token"), ("demo_answer", "shown answers"))
        for headline in (
            Headline(
                what=f"mass on {words} at visit 2 minus visit 1",
                quantity="change_overall",
                at={"map_region": region},
                by_layer="change",
                beside={"release_overall": "release", "retarget_overall": "retarget"},
            ),
            Headline(
                what=f"mass on {words} at visit 2 minus visit 1, the Dyck head",
                quantity="dyck_head_change",
                at={"map_region": region},
                beside={"dyck_head_release": "release", "dyck_head_retarget": "retarget"},
            ),
        )
    ),
    "dyck-state": (
        Headline(
            what="state read right, mean over executions",
            quantity="accuracy_mean",
            beside={"control_mean": "control", "majority": "most common", "token": "by the token"},
            percent=True,
        ),
        Headline(
            what="the same at visit 2 minus visit 1",
            quantity="change_overall",
            by_layer="change",
            beside={"control_change_overall": "control"},
            percent=True,
        ),
    ),
}

FIRST_PAIR = ", visits 1-2"
_SIGNED = ("change", "rise", "interaction", "release", "retarget")


def headlines(summary: xr.Dataset, probe: str) -> list[Found]:
    """The headline numbers of a summary; those that it has no value for are left out."""
    found = []
    for listed in HEADLINES.get(probe, ()):
        headline = _by_pair(listed, summary)
        for what, at in _places(summary, headline):
            value = _at(summary, headline.quantity, at)
            if value is None or not np.isfinite(float(value)):
                continue
            beside = {
                words: _said(summary, name, at, percent=headline.percent)
                for name, words in headline.beside.items()
            }
            found.append(
                Found(
                    what=what,
                    here=_said(summary, headline.quantity, at, percent=headline.percent),
                    layers=_range(summary, headline, at),
                    beside=", ".join(f"{k} {v}" for k, v in beside.items() if v),
                    paper=_paper(listed, at, probe),
                )
            )
    return found


def headline_rows(
    names: Sequence[str], found: Sequence[Sequence[Found]]
) -> tuple[list[str], list[list[str]]]:
    """Headline numbers of several runs as a table: a column for each run, then what the paper reports."""
    # Runs of two visits have no other pair, and do not say which theirs is; beside one of three they must.
    named = {f.what for of_run in found for f in of_run}
    first_pair = {what.removesuffix(FIRST_PAIR) for what in named if what.endswith(FIRST_PAIR)}
    found = [
        [replace(f, what=f.what + FIRST_PAIR * (f.what in first_pair)) for f in of_run]
        for of_run in found
    ]
    by_run = [{f.what: f for f in of_run} for of_run in found]
    what = list(dict.fromkeys(f.what for of_run in found for f in of_run))
    rows = []
    for name in what:
        cells = []
        for of_run in by_run:
            f = of_run.get(name)
            lines = [] if f is None else [f.here, f.layers and f"layers {f.layers}", f.beside]
            cells.append("\n".join(filter(None, lines)) or "-")
        paper = next(of_run[name].paper for of_run in by_run if name in of_run)
        rows.append([name, *cells, paper or "not reported"])
    columns = ["here"] if len(names) == 1 else list(names)
    return ["", *columns, "the paper"], rows


def number(value: float, *, decimals: int | None = None, signed: bool = False) -> str:
    """A number to read: three digits unless `decimals` are given; a dash for no value."""
    value = float(value)
    if not np.isfinite(value):
        return "-"
    if decimals is None:
        size = abs(value)
        decimals = 3 if size < 1e-9 else int(np.clip(2 - np.floor(np.log10(size)), 0, 6))
        decimals = min(decimals, 3) if size >= 0.01 else decimals
    text = f"{value:{'+' if signed else ''},.{decimals}f}"
    return re.sub(r"^[+-](0[.0]*)$", r"\1", text)  # a zero has no sign


def with_interval(
    value: float, low: float, high: float, *, signed: bool = False, percent: bool = False
) -> str:
    """`0.123 [0.101, 0.145]` with as many digits as the interval has to say, or the value alone where there is none."""
    unit = " %" * percent
    value, low, high = (float(v) * (100 if percent else 1) for v in (value, low, high))
    width = high - low
    if not np.isfinite(width) or width <= 1e-6 * abs(value):  # none, or what rounding leaves of it
        return number(value, decimals=1 if percent else None, signed=signed) + unit
    decimals = int(np.clip(1 - np.floor(np.log10(width)), 0, 6))
    shown = [number(v, decimals=decimals, signed=signed) for v in (value, low, high)]
    return f"{shown[0]}{unit} [{shown[1]}, {shown[2]}]"


def is_signed(quantity: str) -> bool:
    """Whether a quantity is a difference, to be shown with its sign."""
    return any(word in quantity for word in _SIGNED) or "minus" in quantity


def _by_pair(headline: Headline, summary: xr.Dataset) -> Headline:
    """The same of each pair of visits, where layers have more than two visits: `X_overall` would mix them."""
    if summary.sizes.get("visit_pair", 1) == 1:
        return headline

    def renamed(name: str, other: str) -> str:
        return other if other in summary else name

    return replace(
        headline,
        quantity=renamed(headline.quantity, headline.quantity.replace("_overall", "_by_pair")),
        by_layer=renamed(headline.by_layer, f"pair_{headline.by_layer}"),
        beside={
            renamed(name, name.replace("_overall", "_by_pair")): words
            for name, words in headline.beside.items()
        },
    )


def _places(summary: xr.Dataset, headline: Headline) -> list[tuple[str, dict[str, str | int]]]:
    """A headline's labels, once for each entry of what it leaves open: shots, pairs of visits, states."""
    if headline.quantity not in summary:
        return []
    array = summary[headline.quantity]
    places: list[tuple[str, dict[str, str | int]]] = [(headline.what, dict(headline.at))]
    for dim in (str(d) for d in array.dims if d not in headline.at):
        if dim not in ("shots", "visit_pair", "state"):
            continue
        labels = array[dim].values.tolist()
        places = [
            (_named(what, dim, label, len(labels)), at | {dim: label})
            for what, at in places
            for label in labels
        ]
    return places


def _named(what: str, dim: str, label: str | int, count: int) -> str:
    """One of `count` entries: `sink mass at visit 3 minus visit 1`, `experts shared by two visits, visits 1-3`."""
    if dim == "shots":
        return f"{what}, {label} shot{'s' * (label != 1)}"
    if dim != "visit_pair":
        return f"{what}, {label}"
    if count == 1:
        return what
    visits = str(label).split("-")
    if "visit 1" not in what:
        return f"{what}, visits {label}"
    return re.sub(r"visit ([12])", lambda visit: f"visit {visits[int(visit[1]) - 1]}", what)


def _at(summary: xr.Dataset, name: str, at: Mapping[str, str | int]) -> xr.DataArray | None:
    """A quantity at some labels, averaged over the dimensions that are left; None where it has no such label."""
    if name not in summary:
        return None
    array = summary[name]
    for dim, label in at.items():
        if dim not in array.dims:
            continue
        if label not in array[dim].values:
            return None
        array = array.sel({dim: label})
    return array.mean() if array.ndim else array


def _said(summary: xr.Dataset, name: str, at: Mapping[str, str | int], *, percent: bool) -> str:
    value = _at(summary, name, at)
    if value is None or not np.isfinite(float(value)):
        return ""
    ends = [float("nan")] * 2
    # The mean of several intervals is no interval.
    if not {str(d) for d in summary[name].dims} - set(at):
        ends = [
            float(e) for k in ("low", "high") if (e := _at(summary, f"{name}_{k}", at)) is not None
        ]
    return with_interval(float(value), *ends, signed=is_signed(name), percent=percent)


def _range(summary: xr.Dataset, headline: Headline, at: Mapping[str, str | int]) -> str:
    """The least and the greatest layer, heads averaged."""
    if headline.by_layer not in summary:
        return ""
    at = {dim: label for dim, label in at.items() if dim in summary[headline.by_layer].dims}
    ours = Reported(probe="", quantity=headline.by_layer, at=at, what="", says="").ours(summary)
    if ours is None:
        return ""
    scale, unit = (100, " %") if headline.percent else (1, "")
    shown = (number(scale * v, signed=is_signed(headline.by_layer)) for v in ours)
    return " to ".join(dict.fromkeys(shown)) + unit


def _paper(headline: Headline, at: Mapping[str, str | int], probe: str) -> str:
    """What the paper reports of the same number, of visits 1 and 2."""
    if at.get("visit_pair", "1-2") != "1-2":
        return ""
    for entry in reported_by(probe):
        same = entry.quantity in (headline.by_layer or headline.quantity, headline.quantity)
        if same and dict(entry.at) in (dict(headline.at), dict(at)):
            return entry.says
    return ""
