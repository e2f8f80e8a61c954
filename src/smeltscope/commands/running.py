"""What commands that run probes have in common: from the options given to an opened run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smeltscope.commands import terminal
from smeltscope.commands.options import load_data, load_model, run_options
from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console

    from smeltscope.probes import Probe
    from smeltscope.tasks import HeldOut


def out_file(stem: str, *, ckpt: str, out: Path | None, **_: Any) -> Path:
    """The run file: the one that was named, or one named after what is run."""
    return out or Path(f"{stem}-{Path(ckpt).name}.h5")


def run(
    probes: Sequence["Probe"],
    out: Path,
    log: "Console",
    given: Mapping[str, Any],
    same_data_as: "HeldOut | None" = None,
    *,
    reuse: bool = False,
) -> tuple["HeldOut", int]:
    """Run probes as the options of a command say; `out` is their run file. Returns the text and the longest segment.

    Raises `SmeltscopeError` when the text is not token for token that of `same_data_as`.
    """
    from smeltscope.probes import run_probes

    checkpoint = load_model(**given)
    heldout, max_length = load_data(checkpoint, **given)
    if same_data_as is None:
        terminal.data(log, heldout)
    elif heldout.digest != same_data_as.digest:
        raise SmeltscopeError(
            f"{checkpoint.name} does not see the same tokens in this data ({heldout.lengths.sum():,} tokens, not "
            f"{same_data_as.lengths.sum():,}, or other ids): a comparison needs a checkpoint with the same tokenizer."
        )
    with terminal.progress(log) as on_progress:
        run_probes(
            checkpoint,
            heldout,
            probes,
            out,
            run_options(**{**given, "max_length": max_length}),
            force=given["force"],
            reuse=reuse,
            on_progress=on_progress,
            on_note=lambda note: log.print(note, soft_wrap=True),
        )
    return heldout, max_length


def open_result(out: Path, probe: "Probe") -> "xr.DataTree":
    """What one probe left in the run that was made, read as it is used."""
    from smeltscope.activations import open_run
    from smeltscope.probes import group_name

    return open_run(out, groups=[group_name(probe.name)], lazy=True)
