"""Prompts run live on a checkpoint, as they are and with heads or whole visits zeroed.

Only queries, keys and log-sum-exps of a prompt are kept: a head's pattern is made when a page asks for it, so that long prompts
of many heads fit into memory.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from smeltscope.activations import Attention, capture, decode, head_of
from smeltscope.dashboards.examples import Example
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Checkpoint, Execution, executions_of
from smeltscope.probes.prompts import layout_of
from smeltscope.tasks import HeldOut, dyck
from smeltscope.tasks.dyck.generate import REVEALS
from smeltscope.tasks.dyck.spans import reader_of

MOST_KEPT = 4  # prompts whose attention is kept; older ones run again
MOST_SHOTS = 64


@dataclass(frozen=True, kw_only=True)
class Zeroed:
    """Heads whose output is 0 at every position; None stands for all there are.

    Without a layer: every layer that runs more than once.
    """

    layer: int | None = None
    visit: int | None = None
    head: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """The tokens of a prompt and its gold answer, and what is known of them; arrays as in `Example`."""

    title: str
    ids: np.ndarray  # (T,)
    tokens: Sequence[str]
    regions: np.ndarray
    region_names: Sequence[str]
    targets: np.ndarray
    marks: dict[str, np.ndarray]
    vocabulary: Sequence[str]


class Live:
    """One checkpoint in memory, and the prompts that ran on it last. One prompt runs at a time.

    `load` gives the checkpoint of a run by the run's number, `template` the layout of its prompts; asked for another run's
    checkpoint, the one in memory is let go first.
    """

    def __init__(
        self,
        load: Callable[[int], Checkpoint],
        template: Callable[[int], dyck.Template] = lambda _: dyck.TEMPLATES["bigbench"],
    ) -> None:
        self._load = load
        self._template = template
        self._lock = threading.Lock()
        self._loaded: tuple[int, Checkpoint] | None = None
        self._kept: OrderedDict[str, Example] = OrderedDict()

    def draw(
        self, run: int, shots: int, seed: int, types: int, pairs: str = "usual"
    ) -> tuple[str, int]:
        """The text of a prompt of so many demonstrations, drawn by `seed` from so many bracket types, and how many of them
        fit into the context: as in `probe dyck` the others are left out.

        `pairs` are "usual", or drawn too and revealed by "answers", "inputs" or "both".
        """
        if not 0 <= shots <= MOST_SHOTS:
            raise SmeltscopeError(f"A prompt has 0 to {MOST_SHOTS} shots, not {shots}.")
        if seed < 0:
            raise SmeltscopeError(f"A seed is 0 or more, not {seed}.")
        if pairs != "usual" and pairs not in REVEALS:
            raise SmeltscopeError(
                f"Pairs are usual, or revealed by {', '.join(REVEALS)}, not {pairs!r}."
            )
        usual = pairs == "usual"
        sets = dyck.generate_sets(
            1,
            shots,
            seed,
            types=types,
            pairing="usual" if usual else "in-context",
            reveal="both" if usual else pairs,
        )
        with self._lock:
            layout = layout_of(self._checkpoint(run), self._template(run))
        made = dyck.make_prompts(sets, shots=[shots], seed=seed, **layout)
        assert made.prompts is not None
        first = int(made.start_token is not None)
        ids = made.segment(0)[first : made.prompts.answers[0][0]]
        text = "".join(made.prompts.vocabulary[i] for i in ids)
        return text, int(made.prompts.labels["kept_shots"][0])

    def run_text(self, run: int, text: str, zeroed: Sequence[Zeroed] = ()) -> tuple[str, Example]:
        """A typed prompt, and the name under which `example` finds it again."""
        with self._lock:
            checkpoint = self._checkpoint(run)
            heldout = dyck.parse_prompt(text, **layout_of(checkpoint, self._template(run)))
            return self._run(run, checkpoint, _prompt_of(heldout), zeroed)

    def run_again(
        self, run: int, example: Example, zeroed: Sequence[Zeroed] = ()
    ) -> tuple[str, Example]:
        """A stored example. Raises `SmeltscopeError` where the checkpoint reads its text as other tokens."""
        with self._lock:
            checkpoint = self._checkpoint(run)
            layout = layout_of(checkpoint, self._template(run))
            prompt = _prompt_again(example, layout["tokenizer"], layout["vocab_size"])
            return self._run(run, checkpoint, prompt, zeroed)

    def example(self, name: str) -> Example | None:
        """What ran under this name, None where it is no longer kept."""
        with self._lock:
            return self._kept.get(name)

    def digest(self, run: int) -> str:
        with self._lock:
            return self._checkpoint(run).digest

    def _checkpoint(self, run: int) -> Checkpoint:
        if self._loaded is None or self._loaded[0] != run:
            self._loaded = None
            self._kept.clear()
            self._loaded = run, self._load(run)
        return self._loaded[1]

    def _run(
        self, run: int, checkpoint: Checkpoint, prompt: Prompt, zeroed: Sequence[Zeroed]
    ) -> tuple[str, Example]:
        off = zeroed_heads(checkpoint, zeroed)
        told = [run, prompt.ids.tolist(), {e: heads and sorted(heads) for e, heads in off.items()}]
        name = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
        if name not in self._kept:
            while len(self._kept) >= MOST_KEPT:
                self._kept.popitem(last=False)
            self._kept[name] = run_prompt(checkpoint, prompt, off)
        self._kept.move_to_end(name)
        return name, self._kept[name]


def zeroed_heads(checkpoint: Checkpoint, zeroed: Sequence[Zeroed]) -> dict[int, set[int] | None]:
    """Which heads are zeroed at which executions, None for all of one's."""
    executions = executions_of(checkpoint.model.config)
    looped = {e.layer for e in executions if e.visit > 1}
    off: dict[int, set[int] | None] = {}
    for asked in zeroed:
        here = [
            e.index
            for e in executions
            if (e.layer in looped if asked.layer is None else e.layer == asked.layer)
            and asked.visit in (None, e.visit)
        ]
        if not here:
            raise SmeltscopeError(
                f"Nothing can be zeroed at {'any looped layer' if asked.layer is None else f'layer {asked.layer}'}, "
                f"{'any visit' if asked.visit is None else f'visit {asked.visit}'}: {checkpoint.name} does not run it."
            )
        for index in here:
            before = off.setdefault(index, set())
            off[index] = None if asked.head is None or before is None else before | {asked.head}
    return off


def run_prompt(checkpoint: Checkpoint, prompt: Prompt, off: dict[int, set[int] | None]) -> Example:
    """One forward over the prompt and its gold answer, with the heads of `off` zeroed.

    A zeroed head's P V is 0 at every position, the first included, as if its columns of the output projection were 0.
    """
    model = checkpoint.model
    device = next(model.parameters()).device
    kept: dict[int, Attention] = {}

    def on_site(execution: Execution, site: str, value: Any) -> None:
        if site == "attention":
            kept[execution.index] = replace(value, value=value.value[:, :, :0])  # not needed
        elif execution.index in off:
            heads = off[execution.index]
            chosen = range(value.shape[2]) if heads is None else sorted(heads)
            if chosen[-1] >= value.shape[2]:
                raise SmeltscopeError(
                    f"Layer {execution.layer} has no head {chosen[-1]}: they go from 0 to {value.shape[2] - 1}."
                )
            value[:, :, list(chosen)] = 0  # the model's own tensor

    sites = ("attention", "pv") if off else ("attention",)
    ids = torch.from_numpy(prompt.ids).long()[None].to(device)
    asked = torch.from_numpy(np.maximum(prompt.targets - 1, 0))[None].to(device)  # (1, N)
    with torch.no_grad():
        with capture(model, sites, on_site):
            decoded = decode(model, ids)
        logits = head_of(model, decoded)(decoded.last_hidden_state[:, asked[0]]).float()[
            0
        ]  # (N, V)
    likeliest = logits.argmax(-1).cpu().numpy()
    gold = prompt.ids[prompt.targets]
    right = logits.log_softmax(-1).cpu().numpy()[np.arange(len(gold)), gold]
    executions = executions_of(model.config)
    heads = max(attention.query.shape[1] for attention in kept.values())
    rows = np.full((len(executions), heads, len(gold), len(prompt.ids)), np.nan, dtype=np.float32)
    for index, attention in kept.items():
        found = attention.rows(asked.to(attention.query.device))[0]
        rows[index, : len(found)] = found.cpu().numpy()

    def pattern(execution: int, head: int, queries: np.ndarray) -> np.ndarray:
        attention = _of_head(kept[execution], head)
        asked = torch.from_numpy(queries)[None].to(attention.query.device)
        found: np.ndarray = attention.rows(asked)[0, 0].cpu().numpy()
        return found

    last = len(prompt.vocabulary) - 1
    return Example(
        title=prompt.title,
        tokens=prompt.tokens,
        regions=prompt.regions,
        region_names=prompt.region_names,
        targets=prompt.targets,
        gold=[prompt.vocabulary[i] for i in gold],
        predicted=[prompt.vocabulary[min(i, last)] for i in likeliest],
        probability=np.exp(right),
        marks=prompt.marks,
        layer=[e.layer for e in executions],
        visit=[e.visit for e in executions],
        rows=rows,
        pattern=pattern,
    )


def _of_head(attention: Attention, head: int) -> Attention:
    """The attention of one query head."""
    one, bias = slice(head, head + 1), attention.bias
    group = head * attention.key.shape[1] // attention.query.shape[1]
    return replace(
        attention,
        query=attention.query[:, one],
        key=attention.key[:, group : group + 1],
        lse=attention.lse[:, one],
        bias=bias[:, one] if bias is not None and bias.shape[1] > 1 else bias,
    )


def _prompt_of(heldout: HeldOut) -> Prompt:
    prompts, ids = heldout.prompts, heldout.segment(0)
    assert prompts is not None
    return Prompt(
        title=heldout.documents[0].id,
        ids=ids,
        tokens=[prompts.vocabulary[i] for i in ids],
        regions=prompts.regions[0],
        region_names=prompts.region_names,
        targets=prompts.targets[0],
        marks={name: of[0] for name, of in prompts.marks.items()},
        vocabulary=prompts.vocabulary,
    )


def _prompt_again(example: Example, tokenizer: Any, vocab_size: int) -> Prompt:
    """A stored example's tokens, from its text."""
    reader = reader_of(tokenizer, bos=True, vocab_size=vocab_size)
    tokens = list(example.tokens)
    first = int(example.regions[0] == 0)
    asked = len("".join(tokens[first : example.targets[0]]).rstrip())
    ids = reader.read("".join(tokens[first:]), asked).ids
    if first and reader.start is not None:
        ids = np.append(reader.start, ids)
    if [reader.vocabulary[i] for i in ids] != tokens:
        raise SmeltscopeError(
            "The loaded checkpoint reads this example as other tokens than the run holds; load the checkpoint that "
            "the run was made with."
        )
    return Prompt(
        title=example.title,
        ids=ids,
        tokens=tokens,
        regions=example.regions,
        region_names=example.region_names,
        targets=example.targets,
        marks=dict(example.marks),
        vocabulary=reader.vocabulary,
    )
