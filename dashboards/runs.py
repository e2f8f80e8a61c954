"""Run files as pages read them: group by group, summarised once, read anew when they change."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numpy as np
import xarray as xr

from smeltscope.activations import attributes_of, open_run
from smeltscope.activations.hdf5 import opened
from smeltscope.dashboards.figures import FIGURES, FigureKind
from smeltscope.errors import SmeltscopeError
from smeltscope.probes import Probe, group_name, summarize
from smeltscope.probes.compare import HEADS, check_comparable, compare
from smeltscope.probes.grouping import By, groups_of, restricted, summarize_groups

ProbeOf = Callable[[xr.DataTree, str], Probe]  # the probe of this name as the run was made with it
GROUPED_BY: tuple[By, ...] = ("category", "length")
_Value = TypeVar("_Value")
_MISSING = object()
_WORKING = RLock()  # one summary at a time: several would keep a page that only opens waiting


class RunFile:
    """A run file, finished or still being written, of which a page loads no more than it shows.

    Whatever was read or summarised is kept until the file changes. Unfinished, it is what its segments so far amount
    to. `name` is what pages call it, by default the file's. Methods raise `SmeltscopeError` for a file that is missing,
    damaged, no run file or empty so far.
    """

    def __init__(self, path: str | Path, probe_of: ProbeOf, name: str | None = None) -> None:
        self.given = Path(path)
        self.name = (name or self.given.name).removesuffix(".partial")
        self._probe_of = probe_of
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._kept_of = ""
        self._lock = RLock()  # pages ask from several threads
        self._making: dict[tuple[Any, ...], Any] = {}  # each number is worked out once

    @property
    def path(self) -> Path:
        """Where the run is now: the finished file, else the one being written."""
        finished = self.given.with_name(self.given.name.removesuffix(".partial"))
        written = finished.with_name(f"{finished.name}.partial")
        if self.given.is_file():
            return self.given
        return finished if finished.is_file() or not written.is_file() else written

    @property
    def label(self) -> str:
        """Name and checkpoint, or the name alone where it cannot be read."""
        try:
            return f"{self.name} ({self.attributes()['checkpoint']})"
        except SmeltscopeError:
            return self.name

    def version(self) -> str:
        """Changes whenever the file does."""
        try:
            stat = self.path.stat()
        except OSError:
            return "missing"
        return f"{self.path.name} {stat.st_ino} {stat.st_mtime_ns} {stat.st_size}"

    def trouble(self) -> str | None:
        """Why the run cannot be shown, in words; None if it can."""
        try:
            self.root()
        except SmeltscopeError as error:
            return str(error)
        return None

    def attributes(self) -> dict[str, Any]:
        """The root attributes, decoded."""
        return self._once(("attributes",), lambda: attributes_of(self.root()))

    def root(self) -> xr.DataTree:
        """The run's labels and segments, no probe's arrays."""
        return self._once(("root",), lambda: self._open(()))

    def progress(self) -> tuple[int, int]:
        """How many segments are done, and how many there will be."""
        done = self.root()["segments"].dataset["done"].values == 1
        return int(done.sum()), len(done)

    def is_finished(self) -> bool:
        """Whether no segment is missing."""
        done, all_ = self.progress()
        return done == all_

    def state(self) -> str:
        """How far the run is, and of an unfinished one when it was last written."""
        done, all_ = self.progress()
        if done == all_:
            return "finished"
        written = datetime.fromtimestamp(self.path.stat().st_mtime).astimezone()
        return f"{done:,} of {all_:,} segments, the last at {written:%H:%M:%S on %d %B %Y}"

    def probes(self) -> list[str]:
        """The diagnostics that it holds, those with figures first, in the order of the figures."""
        names = list(self.attributes()["identity"]["probes"])
        order = list(FIGURES)
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def categories(self) -> list[str]:
        """The categories of its documents."""
        return np.unique(self.root()["segments"].dataset["category"].values).tolist()

    def probe(self, name: str) -> Probe:
        """A probe as the run was made with it; refused where this smeltscope does not know it."""
        return self._once(("probe", name), lambda: self._probe_of(self.tree(name), name))

    def definition(self, name: str) -> str:
        """What the file says of a probe's numbers."""

        def make() -> str:
            with opened(self.path, "r") as file:
                return str(file[group_name(name)].attrs.get("definition", ""))

        return self._once(("definition", name), make)

    def tree(self, name: str) -> xr.DataTree:
        """The run with the arrays of one probe, of the segments that are done; the last one asked for is kept.

        With `dyck-map` come those of `dyck-heads`, where there are any: they say which head is the Dyck head.
        """
        groups = [group_name(name)]
        if name == "dyck-map" and "dyck-heads" in self.probes():
            groups.append("dyck_heads")
        tree = self._once(("tree", name), lambda: self._only_done(self._open(groups)))
        with self._lock:
            for key in [k for k in self._kept if k[0] == "tree" and k[1] != name]:
                del self._kept[key]
        return tree

    def summary(self, name: str, category: str | None = None) -> xr.Dataset:
        """What a probe found, in all documents or in those of one category."""

        def make() -> xr.Dataset:
            tree = self.tree(name)
            if category not in (None, *self.categories()):
                raise SmeltscopeError(f"{self.name} has no document of the category {category}.")
            if category is not None:
                tree = restricted(tree, groups_of(tree, "category")[category])
            with _WORKING:
                return summarize(tree, self.probe(name), seed=self._seed)

        return self._once(("summary", name, category), make)

    def grouped(self, name: str, by: By) -> xr.Dataset:
        """What a probe found in each group of documents by itself, along `group`."""

        def make() -> xr.Dataset:
            tree = self.tree(name)
            with _WORKING:
                return summarize_groups(
                    tree, self.probe(name), groups_of(tree, by), seed=self._seed
                )

        return self._once(("grouped", name, by), make)

    def patterns(self) -> xr.Dataset | None:
        """The prompts whose attention the run holds whole; None where it holds none."""
        tree = self.prompts()
        return tree["dyck_patterns"].to_dataset() if "dyck_patterns" in tree.children else None

    def prompts(self) -> xr.DataTree:
        """What the viewer shows of the run: prompts kept whole, and heads ablated; nothing of a run that cannot be read."""

        def make() -> xr.DataTree:
            groups = []
            for group in ("dyck_patterns", "dyck_heads"):
                with suppress(SmeltscopeError):  # it has none
                    groups.append((group, self._open((group,))))
            if not groups:
                return self.root()
            tree = groups[0][1]
            return tree.assign({name: part[name] for name, part in groups[1:]})

        if self.trouble() is not None:
            return xr.DataTree()
        return self._once(("prompts",), make)

    def compared(self, other: "RunFile", name: str, category: str | None = None) -> xr.Dataset:
        """This run minus another one, paired by document, means over heads; refused where their data differ."""

        def make() -> xr.Dataset:
            trees = other.tree(name), self.tree(name)
            if category is not None:
                inside = groups_of(self.root(), "category")[category]
                trees = restricted(trees[0], inside), restricted(trees[1], inside)
            probes = other.probe(name), self.probe(name)
            with _WORKING:
                return compare(*trees, *probes, mean_over=HEADS, seed=self._seed)

        return self._once(("compared", other.given, other.version(), name, category), make)

    def sentence(self, name: str) -> str:
        """What a probe found, in a few sentences."""
        return self._once(("sentence", name), lambda: self.probe(name).sentence(self.summary(name)))

    def is_looped(self) -> bool:
        """Whether some layer runs more than once."""
        return bool((self.root().dataset["visit"] > 1).any())

    def facts(self) -> dict[str, str]:
        """What was run over what, and how."""
        attributes, root = self.attributes(), self.root()
        identity, config = attributes["identity"], attributes["model_config"]
        segments = root["segments"].dataset
        runs = f"{root.sizes['execution']} executions of {len(np.unique(root.dataset['layer']))} layers"
        found = {
            "state": self.state(),
            "checkpoint": f"{attributes['checkpoint']}, sha256 {identity['checkpoint_digest'][:16]}",
            "model": f"{attributes['model_type']}, {runs}, {attributes['heads']['query']} heads",
            "data": f"{int(segments['tokens'].sum()):,} tokens, {len(segments['tokens']):,} segments of "
            f"{len(np.unique(segments['document'])):,} documents, sha256 {identity['data_digest'][:16]}",
            "notes on the data": " ".join(attributes["data_notes"]) or "none",
            "number type, device": f"{identity['dtype']}, {identity['device']}",
            "options": ", ".join(
                f"{name.replace('_', ' ')} {identity[name]}"
                for name in ("max_length", "sampled_queries", "sampled_tokens", "seed")
            ),
            "packages": ", ".join(f"{k} {v}" for k, v in attributes["packages"].items()),
        }
        if "residual_scale" in config:
            visits, first, last = (config[k] for k in ("num_visits", "loop_start", "loop_stop"))
            found["loop"] = (
                f"layers {first} to {last - 1} run {visits} times, residual scale {config['residual_scale']:g}"
                if visits > 1
                else "none"
            )
        return found

    @property
    def _seed(self) -> int:
        return int(self.attributes()["identity"]["seed"])

    def _once(self, key: tuple[Any, ...], make: Callable[[], _Value]) -> _Value:
        """What `make` gives, worked out anew when the file has changed."""
        with self._lock:
            version = self.version()
            if version != self._kept_of:
                self._kept, self._kept_of = {}, version
            kept = self._kept
            making = self._making.setdefault(key, RLock())
        with (
            making
        ):  # one value at a time: what is there does not wait for what is being worked out
            value: Any = kept.get(key, _MISSING)  # a tree may be let go of meanwhile
            if value is _MISSING:
                value = kept[key] = make()
            return value

    def _open(self, groups: Sequence[str]) -> xr.DataTree:
        with suppress(SmeltscopeError):
            return self._read(groups)
        return self._read(groups)  # it may just have been finished, and moved

    def _read(self, groups: Sequence[str]) -> xr.DataTree:
        """The run with the arrays of some groups; damage of any kind is said with the file's name."""
        try:
            tree = open_run(self.path, groups=groups)
            attributes = attributes_of(tree)
            objects = ("identity", "model_config", "heads", "packages")
            lacking = {name for name in objects if not isinstance(attributes.get(name), dict)}
            lacking |= {"checkpoint", "model_type"} - set(attributes)
            lacking |= {"layer", "visit"} - set(tree.dataset.coords)
            lacking |= {"done", "document", "category", "tokens"} - set(tree["segments"].data_vars)
            if lacking:
                raise KeyError(", ".join(sorted(lacking)))
        except SmeltscopeError:
            raise
        except Exception as error:  # h5py stumbles over damaged bytes in many ways
            raise SmeltscopeError(
                f"{self.path} is damaged ({type(error).__name__}: {error}); make the run again."
            ) from error
        return tree

    def _only_done(self, tree: xr.DataTree) -> xr.DataTree:
        done = tree["segments"].dataset["done"].values == 1
        if not done.any():
            raise SmeltscopeError(f"{self.path.name} has no segment yet; look again in a while.")
        return tree if done.all() else tree.isel(segment=np.flatnonzero(done))


def baseline_of(run: RunFile, runs: Sequence[RunFile], name: str) -> RunFile | None:
    """The Baseline of a run among others: over the same data, with this probe, no layer visited twice."""
    if run.trouble() or not run.is_looped():
        return None
    for other in runs:
        if other is run or other.trouble() or other.is_looped() or name not in other.probes():
            continue
        try:
            check_comparable(run.root(), other.root())
        except SmeltscopeError:
            continue
        return other
    return None


def facts_table(runs: Sequence[RunFile]) -> tuple[list[str], list[list[str]]]:
    """The facts of some runs side by side: the names of the columns, and the rows."""
    facts = [run.facts() for run in runs]
    names = dict.fromkeys(key for of_run in facts for key in of_run)
    rows = [[name, *(of_run.get(name, "") for of_run in facts)] for name in names]
    return ["", *(run.name for run in runs)], rows


def holds_both(kind: FigureKind) -> bool:
    """Whether a figure can show a run and its Baseline together."""
    return any(key.startswith("baseline") for key in kind.takes)


def context_for(
    kind: FigureKind, run: RunFile, name: str, *, against: RunFile | None, category: str | None
) -> dict[str, Any]:
    """What a figure of a probe can be given besides the summary: another run, groups of documents, kept patterns."""
    known: dict[str, Callable[[], Any]] = {}
    if category is None:
        known |= {f"by_{by}": partial(run.grouped, name, by) for by in GROUPED_BY}
    if against is not None and name in against.probes():
        known["baseline"] = partial(against.summary, name, category)
        if category is None:
            known |= {f"baseline_by_{by}": partial(against.grouped, name, by) for by in GROUPED_BY}
    known["patterns"] = run.patterns
    return {key: make() for key, make in known.items() if key in kind.takes}
