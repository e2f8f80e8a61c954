"""dyck-state: what linear probes read of a Dyck word's state in the residual stream, at each execution.

`DyckState` says what the rows of such a run are and what they amount to; `measure_state` makes the run. Probes are fitted
over many prompts at once, so this is no run of the ordinary runner, which lets go of every batch.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from smeltscope import activations
from smeltscope.activations import RunWriter, Variable
from smeltscope.activations.hdf5 import errors_named
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.labels import executions_of_pairs
from smeltscope.probes.probe import ModelShape, Probe, group_name
from smeltscope.probes.prompts import by_item, count_items
from smeltscope.probes.runner import OnProgress, RunOptions, model_shape, schema_of
from smeltscope.probes.statistics import Estimate, Quantities, Resampling, exact, quantities
from smeltscope.tasks import HeldOut, pad_batch, plan_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smeltscope.model import Checkpoint, Execution

STATES = ("depth", "stack_top", "match", "closer", "shown_closer")
DEEPEST = 8  # depths from here on are one class
PENALTY = 1.0  # scikit-learn's C, its default
STEPS = 1000  # of the solver at most; few fits need half of them


@dataclass(frozen=True, kw_only=True)
class DyckState(Probe):
    """What a linear probe reads of a Dyck word's state in the residual stream after each execution.

    Tokens: those that bear a symbol of an input, of demonstrations and query alike; up to `most_tokens` of
    all prompts, each as likely as another. Prompts are halved at random by their item; inputs that are a query of the
    other half are left out. What is read of a token, along `state`, is the state after it:

    - `depth`: brackets open, 0 to 7, and 8 or more as one class; of every token.
    - `stack_top`: the type of the innermost open bracket, and `match`: how far back it opened, n symbols
      in classes floor(log2 n); of tokens that did not open it themselves, where the token would say it.
    - `closer`: the symbol that closes the innermost open bracket; of every token with one. With the usual
      pairing it says no more than the type; with pairings drawn for each prompt it is the in-context map.
    - `shown_closer`: the same of tokens before which this symbol has closed such a bracket in the prompt, in an
      input or in a demonstration's answer: there the prompt tells it, at the others nothing does.

    Probes: logistic regression (scikit-learn, L2, C = 1, at most 1,000 steps) on `resid_post`, each of its
    directions brought to mean 0 and standard deviation 1 over the tokens that are fitted. A half is read by the
    probe that was fitted on the other, which has seen none of its queries. For each segment, over `tokens`:

    - `right`: tokens whose class the probe names.
    - `control_right`: the same for a control task (Hewitt & Liang, arXiv 1909.03368): every distinct
      beginning of an input is given one class, drawn from the classes of all tokens, wherever it occurs. A
      probe gets it right only by knowing again what it was fitted on: words are short, and the same
      beginnings occur in both halves.
    - `majority_right`: for the most common class of the other half.
    - `token_right`: for the class most common of the same token there: what the embedding tells.
    - `gained`, `lost`, of two visits a < b of a layer: tokens right at b and not at a, and the reverse.

    NaN where a half has a single class, so that nothing can be fitted. Every token counts alike. Source:
    ours.
    """

    most_tokens: int = 8192

    name = "dyck-state"
    resampled = "items"
    sites = ("resid_post",)

    def check(self, model: PreTrainedModel) -> None:
        raise SmeltscopeError(
            "dyck-state is fitted over a whole run of prompts, not beside other probes; use measure_state."
        )

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {"state": np.array(STATES)}

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        described = {
            ("segment", "state"): {
                "tokens": "tokens that have the state",
                "majority_right": "tokens of the most common class",
                "token_right": "tokens of the class most common of the same token",
            },
            ("segment", "execution", "state"): {
                "right": "tokens whose class the probe names",
                "control_right": "tokens whose class of the control task its probe names",
            },
            ("segment", "looped_layer", "visit_pair", "state"): {
                "gained": "tokens right at the later visit and not at the earlier one",
                "lost": "tokens right at the earlier visit and not at the later one",
            }
            if shape.visit_pairs
            else {},
        }
        return {
            name: Variable(dims=dims, description=text)
            for dims, descriptions in described.items()
            for name, text in descriptions.items()
        }

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Over (execution, state): `accuracy` and that of the control task `control`, `selectivity`, accuracy minus control.
        Over (state): `accuracy_mean` and `control_mean`, their means over executions; `majority`, `token`, what needs no
        probe, how many `tokens` there are, and of how many `items`.

        Over (looped_layer, visit_pair, state): `change`, accuracy at the later visit minus the earlier one, paired by
        token; `control_change`, the same of the control task; `gained`, `lost`, the shares of tokens that `change` is
        the difference of. Over (visit_pair, state): `..._overall`, their means over layers. Intervals from drawing items
        again, each with all its shots and seeds.
        """
        data = run["dyck_state"].dataset
        resampling = by_item(run, resampling)
        tokens = data["tokens"].values  # (segment, state)

        def share(name: str) -> Estimate:
            """Of the tokens, each axis but the first and the last before: (..., state)."""
            values = data[name].values
            between = tuple(range(1, values.ndim - 1))
            return resampling.ratio(
                values, np.broadcast_to(np.expand_dims(tokens, between), values.shape)
            )

        accuracy, control = share("right"), share("control_right")
        found = {
            **quantities(
                ("execution", "state"),
                {"accuracy": accuracy, "control": control, "selectivity": accuracy - control},
            ),
            **quantities(
                ("state",),
                {
                    "accuracy_mean": accuracy.mean(0),
                    "control_mean": control.mean(0),
                    "majority": share("majority_right"),
                    "token": share("token_right"),
                    "tokens": exact(np.nansum(tokens, axis=0)),
                    "items": count_items(run["segments"].dataset, tokens > 0),
                },
            ),
        }
        if "gained" not in data:
            return found
        pairs = executions_of_pairs(data)  # (looped_layer, visit_pair, 2)
        exists = np.all(pairs >= 0, axis=-1)[..., None]
        earlier, later = pairs[..., 0], pairs[..., 1]
        gained, lost = share("gained"), share("lost")
        by_layer = {
            "change": gained - lost,
            "control_change": (control[later] - control[earlier]).where(exists),
            "gained": gained,
            "lost": lost,
        }
        overall = {f"{name}_overall": estimate.mean(0) for name, estimate in by_layer.items()}
        return {
            **found,
            **quantities(("looped_layer", "visit_pair", "state"), by_layer, family=("change",)),
            **quantities(("visit_pair", "state"), overall),
        }

    def sentence(self, summary: xr.Dataset) -> str:
        return sentence(summary)


def sentence(summary: xr.Dataset) -> str:
    """The result in a few sentences, with numbers, levels to hold them against, and intervals."""
    unread = [
        str(state)
        for state in summary["state"].values
        if not np.isfinite(summary["accuracy"].sel(state=state)).any()
    ]
    none = ""
    if unread:
        none = (
            f" Nothing could be fitted for {', '.join(unread)}: each half of the prompts needs tokens of two classes; "
            "give more prompts."
        )
    read = [state for state in summary["state"].values if state not in unread]
    if not read:
        return none.strip()
    visits, layers = summary["visit"].values, summary["layer"].values
    looped = [layer for layer, visit in zip(layers, visits, strict=True) if visit == 2]
    last = visits.max()

    def percent(array: xr.DataArray, form: str = ".1f") -> str:
        return format(100 * float(array), form)

    def told(state: str) -> str:
        of = summary.sel(state=state)
        levels = f"most common class {percent(of['majority'])}, by the token {percent(of['token'])}"
        if not looped:
            accuracy, low, high = (
                percent(of[f"accuracy{end}"][-1]) for end in ("", "_low", "_high")
            )
            drawn = f" [{low}, {high}]" if low != "nan" else ""
            return f"{state} {accuracy} %{drawn} (control {percent(of['control'][-1])}, {levels})"

        def at(name: str, visit: int) -> str:
            """Mean over the looped layers that have this visit."""
            return percent(of[name][(visits == visit) & np.isin(layers, looped)].mean())

        pair = of.sel(visit_pair=f"1-{last}")
        low, high = (percent(pair[f"change_overall_{end}"], "+.1f") for end in ("low", "high"))
        drawn = f" [{low}, {high}]" if np.isfinite(pair["change_overall_low"]) else ""
        return (
            f"{state} {at('accuracy', 1)} to {at('accuracy', last)} %, {percent(pair['change_overall'], '+.1f')}{drawn} "
            f"(control {at('control', 1)} to {at('control', last)}, {levels})"
        )

    where = (
        f"mean over looped layers, visit 1 to visit {last}"
        if looped
        else "after the last execution; no layer is visited twice, so there are no visits to compare"
    )
    items = int(summary["items"].max())
    over = f"over {items} item{'s' * (items != 1)} that they were not fitted on"
    return f"Read by linear probes, {over}, {where}: {'; '.join(map(told, read))}.{none}"


def measure_state(
    checkpoint: Checkpoint,
    heldout: HeldOut,
    out: str | Path,
    options: RunOptions,
    probe: DyckState | None = None,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> Path:
    """Run all prompts once, fit the probes execution by execution, and leave a finished run file at `out`.

    The residual streams of the tokens that are read lie in a temporary file beside `out`, 4 bytes x `most_tokens` x
    width x executions; those of one execution are in memory at a time. `on_progress` counts the tokens of the prompts, and
    once more for each execution those that its probes were fitted on. Raises `SmeltscopeError` when the model cannot be captured, the
    data are no prompts, or `out` cannot be written.
    """
    out, probe = Path(out), probe or DyckState()
    plan = plan_batches(heldout.lengths, options.batch_tokens)
    order = np.concatenate(plan)  # of the rows of the run file
    symbols = read_symbols(heldout, probe.most_tokens, options.seed).in_order(order)
    shape = model_shape(checkpoint, heldout, options.max_length)
    writer = RunWriter(
        out, schema_of(checkpoint, heldout, [probe], options, shape, order), force=force
    )
    steps = np.cumsum(
        [*(heldout.lengths[batch].sum() for batch in plan)] + [len(symbols)] * len(shape.executions)
    )
    done = iter(steps.tolist())

    def advance(headlines: Mapping[str, float]) -> None:
        if on_progress is not None:
            on_progress(next(done), int(steps[-1]), headlines)

    controls = control_labels(symbols, options.seed)
    found = []
    with errors_named(out), tempfile.TemporaryFile(dir=out.parent) as file:
        features = Features(file, len(symbols))
        first = 0  # row of the run file
        for batch in plan:
            place = slice(*np.searchsorted(symbols.row, (first, first + len(batch))).tolist())
            if place.start < place.stop:
                rows, positions = symbols.row[place] - first, symbols.position[place]
                ids, _ = pad_batch(heldout, batch, pad_token=0)
                watch(checkpoint.model, ids, rows, positions, partial(features.write, place))
            first += len(batch)
            advance({})
        for execution in shape.executions:
            found.append(read_states(features[execution.index], symbols, controls))
            shares = zip(STATES, found[-1]["right"], strict=True)
            advance({s: float(np.nanmean(r)) for s, r in shares if np.isfinite(r).any()})
    writer.write(
        0, len(heldout), {group_name(probe.name): arrays_of(found, symbols, shape, len(heldout))}
    )
    return writer.finish()


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """Tokens that bear a symbol of an input, in the order of the rows they stand in."""

    row: np.ndarray  # (n,), of the run file
    position: np.ndarray  # (n,), in the segment
    half: np.ndarray  # (n,), 0 or 1: of the prompt's item
    token: np.ndarray  # (n,), id
    beginning: np.ndarray  # (n,), number of the word up to here among all distinct ones
    labels: Mapping[str, np.ndarray]  # state -> (n,), -1 where the token has none

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: np.ndarray) -> Symbols:
        arrays = {n: values[index] for n, values in vars(self).items() if n != "labels"}
        labels = {state: values[index] for state, values in self.labels.items()}
        return replace(self, **arrays, labels=labels)

    def in_order(self, order: np.ndarray) -> Symbols:
        """The same tokens when segment `order[i]` is row i."""
        moved = replace(self, row=np.argsort(order)[self.row])
        return moved.take(np.argsort(moved.row, kind="stable"))


def read_symbols(heldout: HeldOut, most: int, seed: int) -> Symbols:
    """Up to `most` of the tokens that bear a symbol of an input, each as likely as another; rows are segments.

    Inputs that are a query of the other half are left out.
    """
    prompts = heldout.prompts
    if prompts is None:
        raise SmeltscopeError(
            "dyck-state reads the state of Dyck words, and this data are no Dyck prompts."
        )
    states = {name: np.concatenate(values) for name, values in prompts.states.items()}
    bears = states["depth"] >= 0
    place = np.flatnonzero(bears)
    if not len(place):
        raise SmeltscopeError(
            "No token of the prompts bears a symbol of an input; give prompts whose inputs have symbols."
        )
    row = np.searchsorted(heldout.offsets, place, side="right") - 1
    rank = np.cumsum(bears)
    # How many symbols further back the innermost open bracket opened.
    opened = states["match"][place]
    back = rank[place] - rank[heldout.offsets[row] + np.maximum(opened, 0)]
    elsewhere = (opened >= 0) & (back > 0)
    labels = {
        "depth": np.minimum(states["depth"][place], DEEPEST),
        "stack_top": np.where(elsewhere, states["stack_top"][place], -1),
        "match": np.where(elsewhere, np.log2(np.maximum(back, 1)).astype(np.int64), -1),
        "closer": states["closer"][place],
        "shown_closer": np.where(states["shown"][place] > 0, states["closer"][place], -1),
    }
    items, item = np.unique(prompts.labels["item"], return_inverse=True)
    rng = np.random.default_rng(seed)
    half = (rng.permutation(len(items)) % 2)[item][row]
    region = np.concatenate(prompts.regions)
    # Between the words of a prompt stands an answer.
    answers = np.cumsum(region == prompts.region_names.index("demo_answer"))[place]
    beginning, word = _beginnings(row, answers, heldout.tokens[place])
    asked = region[place] == prompts.region_names.index("query_input")
    elsewhere_asked = [np.unique(word[asked & (half == 1 - side)]) for side in (0, 1)]
    kept = np.flatnonzero(
        np.where(half == 0, *(~np.isin(word, words) for words in elsewhere_asked))
    )
    if not len(kept):
        raise SmeltscopeError(
            "Every input of the prompts is also a query of the other half; give more prompts, or longer ones."
        )
    symbols = Symbols(
        row=row,
        position=place - heldout.offsets[row],
        half=half,
        token=heldout.tokens[place],
        beginning=beginning,
        labels=labels,
    )
    return symbols.take(np.sort(rng.choice(kept, min(most, len(kept)), replace=False)))


def _beginnings(
    row: np.ndarray, answers: np.ndarray, token: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each token, what of its word has been read up to it, and the whole word: equal numbers for equal symbols.

    A word is the tokens with one `row` and one number of `answers` before them.
    """
    known: dict[tuple[int, int], int] = {}
    numbers = np.empty(len(token), dtype=np.int64)
    word, number = None, -1
    for i, (*own, symbol) in enumerate(
        zip(row.tolist(), answers.tolist(), token.tolist(), strict=True)
    ):
        if own != word:
            word, number = own, -1
        number = numbers[i] = known.setdefault((number, symbol), len(known))
    ends = np.append((np.diff(row) != 0) | (np.diff(answers) != 0), True)
    end_of = np.searchsorted(np.flatnonzero(ends), np.arange(len(token)))
    return numbers, numbers[ends][end_of]


class Features:
    """Vectors of `rows` tokens at every execution, on disk."""

    def __init__(self, file: IO[bytes], rows: int) -> None:
        self._file, self._rows, self._width = file, rows, 0

    def write(self, place: slice, execution: Execution, vectors: Tensor) -> None:
        """`vectors` (n, width), float32, are those of the tokens `place`."""
        self._width = vectors.shape[1]
        self._file.seek((execution.index * self._rows + place.start) * self._width * 4)
        self._file.write(vectors.numpy().tobytes())

    def __getitem__(self, execution: int) -> np.ndarray:
        """(rows, width), float32."""
        self._file.seek(execution * self._rows * self._width * 4)
        data = self._file.read(self._rows * self._width * 4)
        return np.frombuffer(data, dtype=np.float32).reshape(self._rows, self._width)


def watch(
    model: PreTrainedModel,
    ids: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray,
    on_vectors: Callable[[Execution, Tensor], None],
) -> None:
    """Run a batch, and hand over what stands at some of its tokens after each execution: (n, width)."""
    row, position = torch.from_numpy(rows), torch.from_numpy(positions)

    def on_site(execution: Execution, site: str, value: Tensor) -> None:
        vectors = value[row.to(value.device), position.to(value.device)].float().cpu()
        if not vectors.isfinite().all():
            raise SmeltscopeError(
                f"The residual stream after layer {execution.layer} at visit {execution.visit} is not a number; check "
                "the model's weights, or run it with --dtype float32."
            )
        on_vectors(execution, vectors)

    try:
        with torch.no_grad(), activations.capture(model, ["resid_post"], on_site):
            activations.decode(model, torch.from_numpy(ids).to(next(model.parameters()).device))
    except torch.OutOfMemoryError as error:
        raise SmeltscopeError(
            f"A batch of {ids.size} tokens does not fit into the GPU's memory; lower --batch-tokens."
        ) from error


def control_labels(symbols: Symbols, seed: int) -> dict[str, np.ndarray]:
    """One class for every distinct beginning of an input, drawn from the classes of all tokens: state -> (n,)."""
    controls = {}
    for number, (state, labels) in enumerate(symbols.labels.items()):
        controls[state] = np.full(len(labels), -1)
        has = labels >= 0
        if has.any():
            beginnings, index = np.unique(symbols.beginning[has], return_inverse=True)
            rng = np.random.default_rng([seed, number])
            controls[state][has] = rng.choice(labels[has], len(beginnings))[index]
    return controls


# Inputs and labels that are fitted, inputs that are to be labelled -> their labels.
Guesser = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def read_states(
    features: np.ndarray, symbols: Symbols, controls: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Which tokens the probes of one execution get right, 1 or 0: {"right", "control_right"}, (state, n)."""
    return {
        name: np.stack([rights(linear, features, labels[state], symbols.half) for state in STATES])
        for name, labels in (("right", symbols.labels), ("control_right", controls))
    }


def rights(
    guesser: Guesser, inputs: np.ndarray, labels: np.ndarray, half: np.ndarray
) -> np.ndarray:
    """Whether each token's label is guessed from what the other half of the prompts shows: (n,), 1 or 0.

    NaN for tokens without a label, and for a half where nothing can be learned: the other has a single class.
    """
    right = np.full(len(labels), np.nan)
    for part in (0, 1):
        shown, asked = ((labels >= 0) & (half == side) for side in (1 - part, part))
        if asked.any() and len(np.unique(labels[shown])) > 1:
            guesses = guesser(inputs[shown], labels[shown], inputs[asked])
            right[asked] = guesses == labels[asked]
    return right


def linear(inputs: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """What a logistic regression on standardised inputs says."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=PENALTY, max_iter=STEPS))
    with warnings.catch_warnings():
        # It has learned by then what it can; the control is stopped as early.
        warnings.simplefilter("ignore", ConvergenceWarning)
        probe.fit(inputs, labels)
    guesses: np.ndarray = probe.predict(asked)
    return guesses


def most_common(inputs: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The label most common of the same input, a number; of all where there is no such input."""
    counts = np.zeros((max(inputs.max(), asked.max()) + 1, labels.max() + 1))
    np.add.at(counts, (inputs, labels), 1)
    overall = counts.sum(0)
    guesses: np.ndarray = (counts + overall / (overall.sum() + 1)).argmax(1)[asked]
    return guesses


def arrays_of(
    found: Sequence[Mapping[str, np.ndarray]], symbols: Symbols, shape: ModelShape, segments: int
) -> dict[str, np.ndarray]:
    """The arrays of `DyckState`, from what `read_states` found at each execution."""
    has = np.stack([symbols.labels[state] >= 0 for state in STATES])  # (state, n)

    def by_segment(right: np.ndarray) -> np.ndarray:
        """(state, n) summed over the tokens that have the state: (segment, state)."""
        sums = [
            np.bincount(symbols.row[mask], values[mask], minlength=segments)
            for values, mask in zip(right, has, strict=True)
        ]
        return np.stack(sums, axis=1)

    def common(inputs: np.ndarray) -> np.ndarray:
        of_states = [
            rights(most_common, inputs, symbols.labels[state], symbols.half) for state in STATES
        ]
        return by_segment(np.stack(of_states))

    arrays = {
        "tokens": by_segment(has),
        "majority_right": common(np.zeros_like(symbols.token)),
        "token_right": common(symbols.token),
        **{n: np.stack([by_segment(of[n]) for of in found], axis=1) for n in found[0]},
    }
    if not shape.visit_pairs:
        return arrays
    sizes = (segments, len(shape.looped_layers), len(shape.visit_pairs), len(STATES))
    arrays |= {name: np.full(sizes, np.nan) for name in ("gained", "lost")}
    for execution in shape.executions:
        later = found[execution.index]["right"]
        for pair in shape.pairs_of(execution):
            earlier = found[pair.earlier]["right"]
            place = (slice(None), pair.layer, pair.pair)
            arrays["gained"][place] = by_segment(later * (1 - earlier))
            arrays["lost"][place] = by_segment(earlier * (1 - later))
    return arrays
