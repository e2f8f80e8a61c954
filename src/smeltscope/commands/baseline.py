"""`probe attention-sink --baseline`: the sink over depth, beside a model whose layers run once."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smeltscope.commands import running
from smeltscope.commands.terminal import number, with_interval

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

    from smeltscope.probes import Probe
    from smeltscope.tasks import HeldOut

PAIR = ("smelt-tiny", "baseline-tiny")  # the matched pair that is shipped


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A run to compare with: made by this command, or given as a file."""

    name: str
    file: Path
    is_given: bool

    @classmethod
    def of_options(
        cls, run_file: Path, *, ckpt: str, baseline: str | None, **_: Any
    ) -> "Baseline | None":
        """The one that was named, or the shipped partner of the shipped checkpoint."""
        from smeltscope.model import shipped_checkpoints

        if baseline is None and ckpt == PAIR[0] and PAIR[1] in shipped_checkpoints():
            baseline = PAIR[1]
        if baseline is None:
            return None
        if Path(baseline).is_file():
            return cls(name=baseline, file=Path(baseline), is_given=True)
        file = run_file.with_name(f"{run_file.stem}-baseline.h5")
        return cls(name=baseline, file=file, is_given=False)

    def run(
        self, probe: "Probe", log: "Console", given: dict[str, Any], text: tuple["HeldOut", int]
    ) -> None:
        """Run it as it was trained over the same text, unless its run file was given."""
        if self.is_given:
            return
        log.print(f"Baseline: {self.name}")
        heldout, max_length = text
        as_trained = {"visits": None, "residual_scale": None, "untrained": False}
        given = given | as_trained | {"ckpt": self.name, "max_length": max_length}
        running.run([probe], self.file, log, given, same_data_as=heldout)

    def profile(self, run: "xr.DataTree", summary: "xr.Dataset", *, seed: int) -> "xr.Dataset":
        """Both over depth, see `depth_profile`; refused where the runs are over different data."""
        from smeltscope.activations import open_run
        from smeltscope.probes import summarize
        from smeltscope.probes.attention_sink import depth_profile
        from smeltscope.probes.compare import check_comparable
        from smeltscope.registry import recorded_probe

        other = open_run(self.file, lazy=True)
        check_comparable(run, other)
        probe = recorded_probe(other, "attention-sink")
        return depth_profile(summary, summarize(other, probe, seed=seed))


def print_profile(console: "Console", profile: "xr.Dataset", name: str) -> None:
    """Each execution of the model beside the Baseline's same layer, and the Baseline over its depth."""
    from rich.table import Table

    table = Table(title=f"Beside the Baseline, {name}", box=None, padding=(0, 1, 0, 0))
    for header in ("layer", "visit", "depth", "sink\nmass", "Baseline's\ndepth", "sink\nmass"):
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    model, other = (profile.isel(row=profile["run"] == run) for run in ("model", "baseline"))
    first = zip(other["layer"].values.tolist(), other["visit"].values.tolist(), strict=True)
    of_layer = {layer: row for row, (layer, visit) in enumerate(first) if visit == 1}

    def cells(part: "xr.Dataset", row: int) -> list[str]:
        values = [part[f"sink_mass_mean{end}"].values[row] for end in ("", "_low", "_high")]
        return [number(part["depth"].values[row]), with_interval(*values)]

    places = zip(model["layer"].values.tolist(), model["visit"].values.tolist(), strict=True)
    for row, (layer, visit) in enumerate(places):
        beside = cells(other, of_layer[layer]) if layer in of_layer else ["-", "-"]
        style = "bold" if visit > 1 else ""
        table.add_row(str(layer), str(visit), *cells(model, row), *beside, style=style)
    console.print(table)
    mass = other["sink_mass_mean"].values
    half = len(mass) // 2
    if half:
        console.print(
            f"Over depth, from 0 to 1, the Baseline's sink mass goes from {number(mass[0])} in its first layer to "
            f"{number(mass[-1])} in its last; mean of its first half of layers {number(mass[:half].mean())}, of its "
            f"second {number(mass[-half:].mean())}."
        )
