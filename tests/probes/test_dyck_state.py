"""dyck-state: planted directions, controls, counts by hand, and models in which nothing can change."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from smeltscope.activations import open_run
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Checkpoint
from smeltscope.probes import RunOptions, dyck_state, run_probes, summarize
from smeltscope.probes.compare import compare
from smeltscope.probes.dyck_state import (
    DEEPEST,
    STATES,
    DyckState,
    control_labels,
    linear,
    measure_state,
    most_common,
    read_symbols,
    rights,
)
from smeltscope.tasks import DocumentInfo, HeldOut, Prompts
from smeltscope.tasks.dyck import REGIONS
from smeltscope.tasks.dyck.segments import STATES as OF_PROMPTS

PROBE = DyckState()
NONE = (-1,) * len(OF_PROMPTS)
OPTIONS = RunOptions(max_length=200, batch_tokens=600)
SPACE, BREAK, OPENER, CLOSER = 1, 2, 10, 20
Word = list[int]  # t opens a bracket of type t, -1 - t closes it


def stack_after(word: Sequence[int]) -> list[int]:
    """Where the open brackets of a word stand in it."""
    stack: list[int] = []
    for i, symbol in enumerate(word):
        stack.append(i) if symbol >= 0 else stack.pop()
    return stack


def random_word(rng: np.random.Generator, types: int = 4, most: int = 14) -> Word:
    word: Word = []
    for _ in range(rng.integers(1, most)):
        stack = stack_after(word)
        closes = stack and rng.random() < 0.5
        word.append(-1 - word[stack[-1]] if closes else int(rng.integers(types)))
    return word if stack_after(word) else [*word, 0]


def make_prompts(
    words: Sequence[Sequence[Word]],
    *,
    items: Sequence[str] | None = None,
    closers: Callable[[int], Sequence[int]] = lambda prompt: range(4),
) -> HeldOut:
    """Prompts of token 0, demonstrations and a query, with a space before each symbol; closers differ by prompt."""
    tokens, regions = [], []
    answers = []
    states: dict[str, list[list[int]]] = {name: [] for name in OF_PROMPTS}
    for number, prompt in enumerate(words):
        rows: list[Any] = [(0, "bos", *NONE)]
        closed: set[int] = set()  # types, so far in the prompt
        for i, word in enumerate(prompt):
            role = "query" if i == len(prompt) - 1 else "demo"
            first = len(rows)
            for n, symbol in enumerate(word):
                open_at = stack_after(word[: n + 1])
                if symbol < 0:
                    closed.add(-1 - symbol)
                state = (len(open_at), -1, -1, -1, -1)
                if open_at:
                    top = word[open_at[-1]]
                    place, closer = first + 2 * open_at[-1] + 1, closers(number)[top]
                    state = (len(open_at), top, place, closer, int(top in closed))
                symbol = OPENER + symbol if symbol >= 0 else CLOSER + closers(number)[-1 - symbol]
                rows += [(SPACE, "separator", *NONE), (symbol, f"{role}_input", *state)]
            rows.append((BREAK, "separator", *NONE))
            start = len(rows)
            for at in reversed(stack_after(word)):
                closer = CLOSER + closers(number)[word[at]]
                rows.append((closer, f"{role}_answer", *NONE))
                closed.add(word[at])
        tokens.append([row[0] for row in rows])
        regions.append(np.array([REGIONS.index(row[1]) for row in rows], dtype=np.int8))
        answers.append(np.arange(start, len(rows)))
        for name, values in zip(OF_PROMPTS, list(zip(*rows, strict=True))[2:], strict=True):
            states[name].append(list(values))
    names = list(items or [f"item {i}" for i in range(len(words))])
    return HeldOut(
        tokens=np.concatenate(tokens).astype(np.int32),
        offsets=np.cumsum([0, *map(len, tokens)]).astype(np.int64),
        document=np.arange(len(words), dtype=np.int32),
        documents=[
            DocumentInfo(id=f"{name}, {i}", category="prompts", source="made", file="made")
            for i, name in enumerate(names)
        ],
        start_token=0,
        dropped={},
        notes=[],
        digest=repr((words, names)),
        prompts=Prompts(
            region_names=REGIONS,
            regions=regions,
            answers=answers,
            targets=answers,
            marks={},
            states={name: [np.array(v) for v in values] for name, values in states.items()},
            labels={
                "kind": np.array(["scored"] * len(words)),
                "item": np.array(names),
                "half": np.unique(names, return_inverse=True)[1] % 2,
                "shots": np.array([len(prompt) - 1 for prompt in words]),
                "prompt_seed": np.zeros(len(words), dtype=np.int64),
            },
            vocabulary=[""] * 256,
            stop="\n",
        ),
    )


def some_prompts(
    number: int = 24, shots: int = 2, seed: int = 0, types: int = 4, **kwargs: Any
) -> HeldOut:
    rng = np.random.default_rng(seed)
    words = [[random_word(rng, types) for _ in range(shots + 1)] for _ in range(number)]
    return make_prompts(words, **kwargs)


@pytest.fixture(scope="module")
def small(make_checkpoint) -> Callable[..., Checkpoint]:
    """One layer, visited twice."""

    def make(name: str = "smelt", **overrides: Any) -> Checkpoint:
        size = {"num_physical_layers": 1, "loop_start": 0, "loop_stop": 1}
        return make_checkpoint(name, **{**size, **overrides})

    return make


@pytest.fixture(scope="module")
def plain_run(small, tmp_path_factory) -> xr.DataTree:
    """A random model over `some_prompts()`."""
    out = tmp_path_factory.mktemp("plain") / "run.h5"
    return open_run(measure_state(small(), some_prompts(), out, OPTIONS))


@pytest.fixture
def run_of(tmp_path) -> Callable[..., xr.DataTree]:
    def run(
        checkpoint: Checkpoint,
        heldout: HeldOut,
        probe: DyckState = PROBE,
        options: RunOptions = OPTIONS,
        **kwargs: Any,
    ) -> xr.DataTree:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        return open_run(measure_state(checkpoint, heldout, out, options, probe, **kwargs))

    return run


def plant(model: Any, execution: int, heldout: HeldOut, state: str) -> None:
    """Adds a direction for each class of a state to the residual stream after one execution."""
    assert heldout.prompts is not None
    classes = {
        heldout.segment(i).tobytes(): values
        for i, values in enumerate(heldout.prompts.states[state])
    }
    ids: list[torch.Tensor] = []

    def add(module: Any, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden.clone()
        for row, tokens in zip(hidden, ids[-1], strict=True):
            for length in range(1, len(tokens) + 1):
                found = classes.get(tokens[:length].numpy().astype(np.int32).tobytes())
                if found is not None:
                    for position in np.flatnonzero(found >= 0):
                        row[position, found[position]] += 30.0
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    model.get_input_embeddings().register_forward_pre_hook(lambda m, given: ids.append(given[0]))
    model.model.layers[execution].register_forward_hook(add)


def test_a_planted_direction_is_found_from_its_execution_on(run_of, plain_run, small):
    checkpoint, heldout = small(), some_prompts()
    visits = plain_run["visit"].values
    second = int(np.flatnonzero(visits == 2)[0])
    plant(checkpoint.model, second, heldout, "stack_top")
    planted = summarize(run_of(checkpoint, heldout), PROBE)
    without = summarize(plain_run, PROBE)

    top = planted["accuracy"].sel(state="stack_top").values
    assert top[second:].min() > 0.99 and top[:second].max() < 0.9
    np.testing.assert_array_equal(planted["accuracy"][:second], without["accuracy"][:second])
    first_looped = planted.sel(state="stack_top").isel(looped_layer=0, visit_pair=0)
    assert first_looped["change_low"] > 0.1
    assert first_looped["gained"] - first_looped["lost"] == pytest.approx(
        float(first_looped["change"])
    )
    # The closers of the usual pairing are the types under another name; the control has nothing of it.
    assert planted["selectivity"].sel(state="stack_top")[second] > 0.4
    assert "stack_top" in PROBE.sentence(planted)


def test_the_probe_sees_what_the_model_left_in_the_stream(make_checkpoint, monkeypatch, tmp_path):
    checkpoint, heldout = make_checkpoint(), some_prompts(7, shots=1)
    seen: list[np.ndarray] = []
    given: list[Any] = []

    def reading(features: np.ndarray, symbols: Any, controls: Any) -> Any:
        seen.append(features.copy())
        given.append(symbols)
        nothing = np.full((len(STATES), len(symbols)), np.nan)
        return {"right": nothing, "control_right": nothing}

    monkeypatch.setattr(dyck_state, "read_states", reading)
    out = measure_state(checkpoint, heldout, tmp_path / "run.h5", OPTIONS)
    symbols, run = given[0], open_run(out)
    outputs: list[torch.Tensor] = []
    for layer in checkpoint.model.model.layers:
        layer.register_forward_hook(
            lambda *a: outputs.append(a[2] if torch.is_tensor(a[2]) else a[2][0])
        )
    names = [info.id for info in heldout.documents]
    for row, name in enumerate(run["segments"]["document_id"].values):
        i = names.index(name)
        outputs.clear()
        with torch.no_grad():
            checkpoint.model(torch.from_numpy(heldout.segment(i)).long()[None])
        mine = symbols.row == row
        assert mine.sum() == (heldout.prompts.states["depth"][i] >= 0).sum()
        for execution, output in enumerate(outputs):
            expected = output[0, symbols.position[mine]].numpy()
            np.testing.assert_allclose(seen[execution][mine], expected, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.h5"]


def test_symbols_against_their_words():
    rng = np.random.default_rng(3)
    words = [[random_word(rng, most=40) for _ in range(shots + 1)] for shots in (0, 1, 3, 2)]
    symbols = read_symbols(make_prompts(words), 10**6, seed=0)
    expected: dict[str, list[int]] = {name: [] for name in STATES}
    beginnings: list[tuple[int, ...]] = []
    rows: list[int] = []
    for row, prompt in enumerate(words):
        read: list[int] = []  # symbols so far, of answers too
        for word in prompt:
            for n in range(len(word)):
                read.append(word[n])
                stack = stack_after(word[: n + 1])
                back = n - stack[-1] if stack else 0
                log = next(k for k in range(20) if back < 2 ** (k + 1)) if back else -1
                expected["depth"].append(min(len(stack), DEEPEST))
                expected["stack_top"].append(word[stack[-1]] if back else -1)
                expected["match"].append(log)
                closer = word[stack[-1]] if stack else -1
                expected["closer"].append(closer)
                expected["shown_closer"].append(closer if -1 - closer in read and stack else -1)
                beginnings.append(tuple(word[: n + 1]))
                rows.append(row)
            read += [-1 - word[at] for at in stack_after(word)]
    assert symbols.row.tolist() == rows
    for name in STATES:
        assert symbols.labels[name].tolist() == expected[name], name
    assert max(expected["match"]) >= 3 and max(expected["depth"]) > 4
    number = dict(zip(beginnings, symbols.beginning.tolist(), strict=True))
    assert [number[b] for b in beginnings] == symbols.beginning.tolist()
    assert len(set(number.values())) == len(number)


def test_no_half_has_seen_a_query_of_the_other():
    """Demonstrations are other prompts' queries, as those of a file are."""
    rng = np.random.default_rng(5)
    queries = [random_word(rng, most=30) for _ in range(12)]
    words = [
        [queries[j] for j in rng.choice(np.setdiff1d(range(12), i), 4, replace=False)] + [query]
        for i, query in enumerate(queries)
    ]
    symbols = read_symbols(make_prompts(words), 10**6, seed=2)
    half = {row: int(symbols.half[symbols.row == row][0]) for row in range(12)}
    assert sorted(half.values()) == [0] * 6 + [1] * 6
    expected = []
    for row, prompt in enumerate(words):
        for word in prompt:
            if half[queries.index(word)] == half[row]:
                expected += [row] * len(word)
    assert symbols.row.tolist() == expected
    assert len(expected) < sum(len(word) for prompt in words for word in prompt)
    # a sample is of what is left
    few = read_symbols(make_prompts(words), 50, seed=2)
    kept = {*zip(symbols.row, symbols.position, strict=True)}
    assert len(few) == 50 and kept >= {*zip(few.row, few.position, strict=True)}


def test_an_item_lies_in_one_half_whatever_its_shots():
    items = [f"item {i % 9}" for i in range(27)]
    symbols = read_symbols(some_prompts(27, items=items), 10**6, seed=1)
    halves = {
        item: {*symbols.half[np.isin(symbols.row, np.flatnonzero(np.array(items) == item))]}
        for item in items
    }
    assert all(len(half) == 1 for half in halves.values())
    assert sorted(Counter(half.pop() for half in halves.values()).values()) == [4, 5]


def test_a_sample_is_of_its_size_and_the_same_in_any_batch(run_of, small):
    heldout = some_prompts(20)
    runs = [
        run_of(small(), heldout, DyckState(most_tokens=150), options)
        for options in (OPTIONS, RunOptions(max_length=200, batch_tokens=200))
    ]
    for run in runs:
        assert run["dyck_state"]["tokens"].sel(state="depth").sum() == 150
    one, other = (summarize(run, PROBE, draws=0) for run in runs)
    np.testing.assert_allclose(one["accuracy"], other["accuracy"], atol=0.03)
    for name in ("tokens", "majority", "token"):
        np.testing.assert_array_equal(one[name], other[name])


def test_the_control_gives_every_beginning_one_class_of_the_tokens():
    symbols = read_symbols(some_prompts(60), 10**6, seed=0)
    controls = control_labels(symbols, seed=0)
    for state in STATES:
        has = symbols.labels[state] >= 0
        assert np.array_equal(controls[state] >= 0, has)
        assert {*controls[state][has]} <= {*symbols.labels[state][has]}
        by_beginning: dict[int, set[int]] = {}
        for beginning, label in zip(symbols.beginning[has], controls[state][has], strict=True):
            by_beginning.setdefault(int(beginning), set()).add(int(label))
        assert all(len(labels) == 1 for labels in by_beginning.values())
        assert (controls[state] != control_labels(symbols, seed=1)[state]).any()


def test_the_control_is_at_chance_for_new_inputs_and_learned_for_repeated_ones():
    rng = np.random.default_rng(0)
    tokens, classes = 4000, 4
    half = rng.permutation(tokens) % 2
    label = rng.integers(classes, size=tokens)
    features = rng.normal(size=(tokens, 16)).astype(np.float32)
    features[np.arange(tokens), label] += 8
    assert rights(linear, features, label, half).mean() > 0.99
    shuffled = rng.permutation(label)
    # 4 standard deviations of a share among 4,000
    assert abs(rights(linear, features, shuffled, half).mean() - 1 / classes) < 4 * 0.0069

    repeated = rng.integers(12, size=tokens)  # distinct inputs that the features tell apart
    features[:, 4:] = 0
    features[np.arange(tokens), 4 + repeated] = 8
    of_inputs = rng.integers(classes, size=12)
    assert rights(linear, features, of_inputs[repeated], half).mean() > 0.99


def test_levels_without_a_probe_against_counting():
    symbols = read_symbols(some_prompts(15), 10**6, seed=0)
    for inputs in (symbols.token, np.zeros_like(symbols.token)):
        for state in STATES:
            label = symbols.labels[state]
            right = rights(most_common, inputs, label, symbols.half)
            for i in range(len(symbols)):
                if label[i] < 0:
                    assert np.isnan(right[i])
                    continue
                other = (symbols.half != symbols.half[i]) & (label >= 0)
                same = label[other & (inputs == inputs[i])]
                overall = Counter(label[other].tolist())
                counts = Counter(same.tolist()) or overall
                # Of classes that are equally common, the one that is more so among all tokens.
                best = max(counts, key=lambda c: (counts[c], overall[c], -c))
                assert right[i] == (label[i] == best)


def test_rows_are_sums_over_the_tokens_of_a_prompt(run_of, small):
    heldout = some_prompts(8, shots=1)
    run = run_of(small(num_visits=3, num_physical_layers=2, loop_stop=2), heldout)
    data = run["dyck_state"].dataset
    names = [info.id for info in heldout.documents]
    for row, name in enumerate(run["segments"]["document_id"].values):
        depth = heldout.prompts.states["depth"][names.index(name)]
        assert data["tokens"].sel(state="depth")[row] == (depth >= 0).sum()
    for name in ("right", "control_right", "majority_right", "token_right", "gained", "lost"):
        most = data["tokens"].values
        values = np.moveaxis(data[name].values.reshape(len(most), -1, len(STATES)), 1, 0)
        assert (values >= 0).all() and (values <= most).all(), name
        assert (values == np.round(values)).all()
    summary = summarize(run, PROBE, draws=50)
    places = {
        place: i
        for i, place in enumerate(zip(run["layer"].values, run["visit"].values, strict=True))
    }
    for layer in summary["looped_layer"].values:
        for a, b in ((1, 2), (1, 3), (2, 3)):
            for change, level in (("change", "accuracy"), ("control_change", "control")):
                found = summary[change].sel(looped_layer=layer, visit_pair=f"{a}-{b}")
                levels = summary[level]
                expected = levels[places[layer, b]] - levels[places[layer, a]]
                np.testing.assert_allclose(found, expected, atol=1e-9)
    for name in ("change", "control_change", "gained", "lost"):
        mean = summary[name].mean("looped_layer")
        np.testing.assert_allclose(summary[f"{name}_overall"], mean, atol=1e-9)
    for name in ("accuracy", "control"):
        np.testing.assert_allclose(summary[f"{name}_mean"], summary[name].mean("execution"))
        low, high = (summary[f"{name}_mean_{end}"] for end in ("low", "high"))
        assert ((low < summary[f"{name}_mean"]) & (summary[f"{name}_mean"] < high)).all()
    assert "visit 1 to visit 3" in PROBE.sentence(summary)
    assert (summary["change_low_all"] <= summary["change_low"] + 0.2).all()


def test_identical_visits_show_no_change(run_of, small):
    checkpoint = small()
    with torch.no_grad():
        for name, weight in checkpoint.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    summary = summarize(run_of(checkpoint, some_prompts(12)), PROBE, draws=50)
    for name in ("change", "change_low", "change_high", "control_change", "gained", "lost"):
        assert (summary[name] == 0).all(), name
    assert np.ptp(summary["accuracy"].values, axis=0).max() == 0
    assert "+0.0 [+0.0, +0.0]" in PROBE.sentence(summary)


def test_one_visit_has_nothing_to_compare(run_of, small):
    summary = summarize(run_of(small("baseline"), some_prompts(20)), PROBE, draws=50)
    assert "change" not in summary and np.isfinite(summary["accuracy"]).all()
    text = PROBE.sentence(summary)
    assert "no layer is visited twice" in text and "over 20 items" in text and "nan" not in text


def test_another_family_is_read_too(run_of, make_checkpoint):
    summary = summarize(
        run_of(make_checkpoint("inkling2_loop"), some_prompts(8, shots=1)), PROBE, draws=20
    )
    assert summary.sizes["visit_pair"] == 3 and np.isfinite(summary["change"]).all()


def test_in_context_pairings_are_no_types(run_of, small):
    maps = np.random.default_rng(0).permuted(np.tile(np.arange(16), (30, 1)), axis=1)[:, :4]
    heldout = some_prompts(30, closers=lambda prompt: maps[prompt].tolist())
    checkpoint = small()
    plant(checkpoint.model, 0, heldout, "closer")
    summary = summarize(run_of(checkpoint, heldout), PROBE, draws=20)
    closer, top = (summary.sel(state=state) for state in ("closer", "stack_top"))
    assert closer["accuracy"][0] > 0.95 and closer["token"] < 0.4
    assert top["accuracy"][0] < 0.6


def test_too_few_prompts_have_no_value(run_of, small):
    run = run_of(small(), some_prompts(1, shots=0))
    summary = summarize(run, PROBE)
    for name in ("accuracy", "control", "majority", "change"):
        assert np.isnan(summary[name]).all(), name
    text = PROBE.sentence(summary)
    assert "Nothing could be fitted for depth, stack_top, match, closer, shown_closer" in text
    assert "nan" not in text


def test_a_single_class_has_no_value_and_leaves_the_others(run_of, small):
    summary = summarize(run_of(small(), some_prompts(16, types=1)), PROBE, draws=50)
    assert np.isnan(summary["accuracy"].sel(state=["stack_top", "closer", "shown_closer"])).all()
    assert np.isfinite(summary["accuracy"].sel(state=["depth", "match"])).all()
    text = PROBE.sentence(summary)
    assert "Nothing could be fitted for stack_top, closer, shown_closer" in text and "depth" in text
    assert "nan" not in text


def test_a_state_that_no_token_has_gives_no_value(run_of, small):
    words = [
        [[t], [u, -1 - u, t]] for t in range(4) for u in range(4)
    ]  # nothing but back to the start
    words = [[[t], [t]] for t in range(4)] * 4
    items = [f"item {t}" for t in range(4)] * 4
    summary = summarize(run_of(small(), make_prompts(words, items=items)), PROBE, draws=20)
    assert summary["tokens"].sel(state="match") == 0
    assert np.isnan(summary["accuracy"].sel(state=["match", "stack_top", "depth"])).all()
    assert np.isfinite(summary["accuracy"].sel(state="closer")).all()


def test_the_same_seed_gives_the_same_bits(tmp_path, small, assert_same_bits):
    heldout, probe = some_prompts(10), DyckState(most_tokens=120)
    outs = [tmp_path / f"{i}.h5" for i in range(3)]
    for out, seed in zip(outs, (0, 0, 1), strict=True):
        options = RunOptions(max_length=200, batch_tokens=600, seed=seed)
        measure_state(small(), heldout, out, options, probe)
    assert_same_bits(*outs[:2])
    one, other = (open_run(out)["dyck_state"]["right"].values for out in outs[1:])
    assert not np.array_equal(one, other)


def test_bfloat16_is_near_float32(run_of, plain_run, small):
    half = summarize(run_of(small(dtype=torch.bfloat16), some_prompts()), PROBE, draws=0)
    full = summarize(plain_run, PROBE, draws=0)
    assert float(np.abs(full["accuracy"] - half["accuracy"]).max()) < 0.08


def test_two_models_are_compared_on_the_same_tokens(run_of, plain_run, small):
    a, b = plain_run, run_of(small(seed=1), some_prompts())
    np.testing.assert_array_equal(a["dyck_state"]["tokens"], b["dyck_state"]["tokens"])
    difference = compare(a, b, PROBE, PROBE, draws=20)
    assert np.isfinite(difference["accuracy_low"]).all()
    assert (difference["token"] == 0).all()


def test_fits_that_stop_early_warn_nobody(run_of, small, monkeypatch):
    monkeypatch.setattr(dyck_state, "STEPS", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summarize(run_of(small(), some_prompts(10)), PROBE, draws=20)


def test_progress_ends_at_its_total(run_of, small):
    calls: list[tuple[int, int, dict[str, float]]] = []
    run_of(small(), some_prompts(6), on_progress=lambda *given: calls.append(given))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1]
    assert {*calls[-1][2]} == {*STATES} and calls[0][2] == {}


def test_errors_are_sentences(tmp_path, small, make_heldout):
    checkpoint, heldout = small(), some_prompts(4)
    with pytest.raises(SmeltscopeError, match="no Dyck prompts"):
        measure_state(checkpoint, make_heldout([9, 8]), tmp_path / "a.h5", OPTIONS)
    with pytest.raises(SmeltscopeError, match="No token of the prompts bears a symbol"):
        measure_state(checkpoint, make_prompts([[[]], [[]]]), tmp_path / "a.h5", OPTIONS)
    with pytest.raises(SmeltscopeError, match="also a query of the other half"):
        measure_state(checkpoint, make_prompts([[[0]], [[0]]]), tmp_path / "a.h5", OPTIONS)
    with pytest.raises(SmeltscopeError, match="not beside other probes"):
        run_probes(checkpoint, heldout, [PROBE], tmp_path / "a.h5", OPTIONS)
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.h5").write_text("taken")
    with pytest.raises(SmeltscopeError, match="exists already"):
        measure_state(checkpoint, heldout, tmp_path / "a.h5", OPTIONS)
    with torch.no_grad():
        checkpoint.model.get_input_embeddings().weight[OPENER:] = torch.inf
    with pytest.raises(SmeltscopeError, match="after layer 0 at visit 1 is not a number"):
        measure_state(checkpoint, heldout, tmp_path / "b.h5", OPTIONS)
