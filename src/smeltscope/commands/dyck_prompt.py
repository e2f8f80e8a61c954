"""`probe dyck --prompt`: one prompt on the terminal: its answer, its regions, where a head looks at each visit."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smeltscope.commands import terminal
from smeltscope.commands.options import load_model
from smeltscope.commands.terminal import number
from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from smeltscope.model import Checkpoint

STRONGEST = 5  # keys that are named
BAR = 30  # characters of a bar of mass 1


def show_prompt(
    text: str, head: str | None, *, out: Path | None, template: str, **given: Any
) -> None:
    """Run one prompt and print it; see `probe dyck --help` for which head is shown."""
    from smeltscope.probes.patterns import patterns_of
    from smeltscope.probes.prompts import layout_of
    from smeltscope.tasks import dyck

    checkpoint = load_model(**given)
    heldout = dyck.parse_prompt(text, **layout_of(checkpoint, template))
    found = patterns_of(checkpoint, heldout, [0])
    arrays = {name: array.values for name, array in found.arrays.items()}
    assert heldout.prompts is not None
    pairs = str(heldout.prompts.labels["item"][0]).partition(", ")[
        2
    ]  # where they are not the usual ones
    regions = [str(name) for name in found.dimensions["region_name"]]
    layers, visits = _executions(checkpoint)
    layer, chosen, why = _head(head, out, checkpoint, arrays["row"], layers, visits)
    shown = [e for e, of_layer in enumerate(layers) if of_layer == layer]
    mass = arrays["row"][0][shown, chosen]  # (visit, target, key)
    if given["as_json"]:
        terminal.print_json(
            {
                "tokens": arrays["token"][0].tolist(),
                "regions": [regions[i] for i in arrays["key_region"][0]],
                "targets": arrays["target"][0].tolist(),
                "gold": arrays["gold"][0].tolist(),
                "predicted": arrays["predicted"][0].tolist(),
                "notes": heldout.notes,
                "pairs": pairs or "usual",
                "layer": layer,
                "head": chosen,
                "why": why,
                "visits": [visits[e] for e in shown],
                "attention": mass.tolist(),
                "mass_by_region": [
                    _mass_by_region(of_visit.mean(0), arrays["key_region"][0], regions)
                    for of_visit in mass
                ],
            }
        )
        return
    console = terminal.make_output()
    for note in heldout.notes:
        console.print(note, soft_wrap=True)
    if pairs:
        console.print(f"Pairs as the prompt shows them: {pairs}.")
    _print_answer(console, arrays)
    console.print(f"Head {chosen} of layer {layer} ({why}).\n", soft_wrap=True)
    tokens, region = arrays["token"][0], arrays["key_region"][0]
    _print_regions(console, tokens, region, regions)
    for visit, at in enumerate(shown):
        console.print(f"Visit {visits[at]}, mean over targets", style="bold")
        _print_visit(console, mass[visit].mean(0), tokens, region, regions)


def _executions(checkpoint: "Checkpoint") -> tuple[list[int], list[int]]:
    from smeltscope.model import executions_of

    executions = executions_of(checkpoint.model.config)
    return [e.layer for e in executions], [e.visit for e in executions]


def _head(
    head: str | None,
    out: Path | None,
    checkpoint: "Checkpoint",
    row: "np.ndarray",
    layers: Sequence[int],
    visits: Sequence[int],
) -> tuple[int, int, str]:
    """Layer and head to show, and why these."""
    import numpy as np

    if head is not None:
        match = re.fullmatch(r"(\d+)\.(\d+)", head)
        if match is None:
            raise SmeltscopeError(f"--head {head} names no head; write LAYER.HEAD, as in 3.0.")
        place = int(match[1]), int(match[2])
        _check_exists(place, f"--head {head} does not exist", row, layers)
        return *place, "as asked"
    lacking = ""
    if out is not None:
        found, other = _head_of_run(out, checkpoint)
        if found is not None:
            _check_exists(found, f"The Dyck head of {out} does not exist here", row, layers)
            return *found, f"the Dyck head of {out}{other}"
        lacking = f"{out} has no Dyck head; "
    looped = [
        (first, later)
        for first in range(len(layers))
        for later in range(len(layers))
        if layers[first] == layers[later] and visits[first] == 1 and visits[later] == 2
    ]
    if not looped:
        return layers[-1], 0, f"{lacking}no layer is looped; --head names another"
    change = np.stack([np.abs(row[0, b] - row[0, a]).sum(-1).mean(-1) for a, b in looped])
    most = np.unravel_index(np.nanargmax(change), change.shape)  # (pair, head)
    return (
        layers[looped[int(most[0])][0]],
        int(most[1]),
        f"{lacking}its attention changes most between visits; --head names another",
    )


def _head_of_run(out: Path, checkpoint: "Checkpoint") -> tuple[tuple[int, int] | None, str]:
    """The head that the search of a run chose, if one did, and words on a run of another checkpoint."""
    from smeltscope.activations import attributes_of, open_run
    from smeltscope.probes.dyck_heads import dyck_head

    try:
        run = open_run(out, groups=["dyck_heads"])
    except SmeltscopeError:  # it lacks the search, or is no run at all, which is said then
        run = open_run(out, groups=[])
    attributes = attributes_of(run)
    same = attributes["identity"]["checkpoint_digest"] == checkpoint.digest
    other = "" if same else f", a run of another checkpoint: {attributes['checkpoint']}"
    return dyck_head(run), other


def _check_exists(
    place: tuple[int, int], what: str, row: "np.ndarray", layers: Sequence[int]
) -> None:
    """Refuse a (layer, head) that the model lacks; `row` (example, execution, head, target, key) is NaN for such heads."""
    import numpy as np

    layer, head = place
    heads = row.shape[2]
    if layer in layers and head < heads and np.isfinite(row[0, layers.index(layer), head]).any():
        return
    raise SmeltscopeError(
        f"{what}: layers go from 0 to {max(layers)}, heads from 0 to {heads - 1}; --head names another."
    )


def _print_answer(console: "Console", arrays: dict[str, Any]) -> None:
    gold, predicted = arrays["gold"][0], arrays["predicted"][0]
    right = [g == p for g, p in zip(gold, predicted, strict=True)]
    console.print(f"Answer:    {' '.join(text.strip() for text in gold)}")
    console.print(
        f"The model: {' '.join(text.strip() or repr(text) for text in predicted)}  "
        f"({sum(right)} of {len(right)} right, each after the right ones before it)"
    )


def _print_regions(
    console: "Console", tokens: "np.ndarray", region: "np.ndarray", regions: Sequence[str]
) -> None:
    """The prompt, the name of its region before each stretch of tokens."""
    from rich.text import Text

    console.print("Regions", style="bold")
    text, before = Text(), -1
    for token, here in zip(tokens, region, strict=True):
        if here != before:
            text.append(f"<{regions[here]}>", "dim")
        text.append(str(token).replace("\n", "\u23ce\n"))
        before = here
    console.print(text)
    console.print()


def _mass_by_region(
    mass: "np.ndarray", region: "np.ndarray", regions: Sequence[str]
) -> dict[str, float]:
    """The mass on the keys of each region that the prompt has."""
    inside = {name: region == index for index, name in enumerate(regions)}
    return {name: float(mass[keys].sum()) for name, keys in inside.items() if keys.any()}


def _print_visit(
    console: "Console",
    mass: "np.ndarray",
    tokens: "np.ndarray",
    region: "np.ndarray",
    regions: Sequence[str],
) -> None:
    """The prompt, each token the brighter the more attention it has; mass by region; the keys that have most."""
    from rich.text import Text

    strongest = sorted(range(len(mass)), key=lambda i: -mass[i])[:STRONGEST]
    picture = Text()
    for token, share in zip(tokens, mass, strict=True):
        level = 234 + round(21 * min(float(share), 1.0) ** 0.5)  # of 24 greys
        # Black on light, white on dark: legible at every level.
        style = f"{'black' if level > 246 else 'white'} on color({level})"
        head, *lines = str(token).split("\n")
        picture.append(head, style)
        for line in lines:
            picture.append("\u23ce", style).append("\n").append(line, style)
    console.print(picture)
    for name, share in _mass_by_region(mass, region, regions).items():
        bar = "\u2588" * round(BAR * share)
        console.print(f"  {name:14} {number(share):>6} {bar}")
    rest = 1 - float(mass.sum())
    if rest > 1e-4:
        console.print(f"  {'learned_sink':14} {number(rest):>6}")
    named = ", ".join(f"{tokens[i]!r} at {i}: {number(mass[i])}" for i in strongest)
    console.print(f"  Most on {named}\n", soft_wrap=True)
