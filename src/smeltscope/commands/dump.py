"""`probe dump`: the activations themselves, of every token, in one HDF5 file."""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands import terminal
from smeltscope.commands.options import data_options, load_data, load_model, model_options
from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    import numpy as np

    from smeltscope.model import Checkpoint
    from smeltscope.tasks import HeldOut


class Executions(click.ParamType):
    """Executions by index: all, 6, 2-5, 0,6-8."""

    name = "executions"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int] | None:
        if value == "all":
            return None
        indices: list[int] = []
        for part in str(value).split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
            if match is None or int(match[1]) > int(match[2] or match[1]):
                self.fail(f"{value!r} names no executions; write all, 6, 2-5 or 0,6-8.", param, ctx)
            indices += range(int(match[1]), int(match[2] or match[1]) + 1)
        return indices


@click.command("dump", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--sites",
    default="resid_post",
    show_default=True,
    metavar="SITE,...",
    help="What to write: resid_post,router or any other site but attention.",
)
@click.option(
    "--executions",
    type=Executions(),
    default="all",
    show_default=True,
    metavar="all|2-5|6,8",
    help="At which executions, by index.",
)
@model_options
@data_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write. [default: named after the checkpoint]",
)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no notes.")
def dump(
    *,
    sites: str,
    executions: list[int] | None,
    out: Path | None,
    force: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Write activations of chosen sites, of every token, to HDF5.

    One array for each site and execution, written batch by batch: a dump may be larger than the memory.
    smeltscope.activations.open_dump reads parts of it. Interrupted, nothing is left, and the same
    command starts anew.
    """  # fmt: skip
    from rich.filesize import decimal

    from smeltscope.activations import check_out
    from smeltscope.activations.dump import arrays_of, dump_sites

    if given["tensor_parallel"] or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SmeltscopeError(
            "A dump is written by one process; instead of torchrun and --tensor-parallel use --device-map auto."
        )
    out = out or Path(f"dump-{Path(given['ckpt']).name}.h5")
    check_out(out, force=force)
    log = terminal.make_log(quiet=quiet)
    checkpoint = load_model(**given)
    heldout, _ = load_data(checkpoint, **given)
    terminal.data(log, heldout)
    names = list(dict.fromkeys(name.strip() for name in sites.split(",")))
    arrays = arrays_of(checkpoint.model, names, executions)
    size = sum(array.bytes_per_token for array in arrays) * len(heldout.tokens)
    free = shutil.disk_usage(out.resolve().parent).free
    log.print(f"{terminal.counted(len(arrays), 'array')}, {decimal(size)} before packing.")
    if size > free:
        log.print(f"Only {decimal(free)} are free there: the dump may not fit.", soft_wrap=True)
    try:
        with terminal.progress(log) as on_progress:
            dump_sites(
                checkpoint.model,
                heldout.tokens,
                heldout.offsets,
                names,
                out,
                executions=executions,
                segments=_labels(heldout),
                attributes=_origin(checkpoint, heldout),
                batch_tokens=given["batch_tokens"],
                force=force,
                on_progress=lambda done, total: on_progress(done, total, {}),
            )
    except KeyboardInterrupt:
        click.echo(f"Interrupted: there is no {out}, and the same command starts anew.", err=True)
        raise click.exceptions.Exit(130) from None
    log.print(f"Dump: {out}, {decimal(out.stat().st_size)}", soft_wrap=True)


def _labels(heldout: "HeldOut") -> dict[str, "np.ndarray"]:
    """What is known of each segment, named as in a run file."""
    import numpy as np

    infos = [heldout.documents[d] for d in heldout.document]
    return {
        "document": heldout.document,
        "document_id": np.array([info.id for info in infos]),
        "category": np.array([info.category for info in infos]),
        "source": np.array([info.source for info in infos]),
    }


def _origin(checkpoint: "Checkpoint", heldout: "HeldOut") -> dict[str, Any]:
    """What made the numbers, named as in a run file."""
    import torch
    import transformers

    from smeltscope import __version__

    versions = {"smeltscope": __version__, "torch": torch.__version__}
    return {
        "checkpoint": checkpoint.name,
        "checkpoint_digest": checkpoint.digest,
        "model_type": checkpoint.model.config.model_type,
        "model_config": checkpoint.model.config.to_dict(),
        "data_digest": heldout.digest,
        "packages": {**versions, "transformers": transformers.__version__},
    }
