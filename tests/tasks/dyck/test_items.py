"""Items against BIG-bench's file, broken files, and Bayes against all maps tried one by one."""

import json
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck import (
    USUAL,
    Item,
    ItemSet,
    Pairing,
    bayes,
    candidates,
    depths,
    guess,
    most_common_answer,
    read_items,
    readable,
    right_tokens,
    sample_prefix,
    sets_of_items,
)
from smeltscope.tasks.dyck.items import parse_item

disable_progress_bars()  # of the tests' own save_to_disk

SHARED = Path(__file__).parents[3].parent / "shared" / "data" / "dyck"
BIG_BENCH = SHARED / "bigbench_dyck_languages.jsonl"
HARD = SHARED / "bbh_dyck_languages.json"
shared_data = pytest.mark.skipif(not BIG_BENCH.exists(), reason=f"{BIG_BENCH} is missing")

TASK = "Complete the rest of the sequence. "
ROWS = [  # our own
    {"context": f"{TASK}\n\nInput: ( [ ] {{\nOutput:", "continuation": "} )"},
    {"input": f"{TASK}Input: < < >", "target": ">"},
    {"input": "[[]([", "answer": "])]"},
    {"input": " { ( ", "answer": " ) } ", "note": 3},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def item(brackets, name="item", pairing=USUAL):
    return Item(name=name, prefix=pairing.read(brackets), pairing=pairing)


# ---------------------------------------------------------------- BIG-bench


@pytest.fixture(scope="module")
def big_bench():
    return read_items(BIG_BENCH)


@pytest.mark.shared_data
@shared_data
def test_the_stack_solves_big_bench(big_bench):
    # read_items checks the answers too; here the file is read by itself
    rows = [json.loads(line) for line in BIG_BENCH.read_text().splitlines()]
    answers = [" ".join(item.answer_symbols) for item in big_bench]
    assert answers == [row["continuation"] for row in rows]
    inputs = [f"Input: {' '.join(item.input_symbols)}\nOutput:" for item in big_bench]
    assert all(row["context"].endswith(i) for row, i in zip(rows, inputs, strict=True))


@pytest.mark.shared_data
@shared_data
def test_figures_of_big_bench(big_bench):
    assert len(big_bench) == len({item.prefix for item in big_bench}) == 1000
    assert Counter(len(item.answer) for item in big_bench) == {1: 359, 2: 348, 3: 293}
    lengths = [len(item.prefix) for item in big_bench]
    assert (min(lengths), max(lengths), np.mean(lengths)) == (2, 99, 26.024)
    assert max(max(depths(item.prefix)) for item in big_bench) == 28
    firsts = Counter(item.answer_symbols[0] for item in big_bench)
    assert firsts == {")": 298, ">": 238, "]": 237, "}": 227}
    types = Counter(len({max(s, ~s) for s in item.prefix}) for item in big_bench)
    assert types == {1: 18, 2: 149, 3: 239, 4: 594}


@pytest.mark.shared_data
@shared_data
def test_baselines_of_big_bench(big_bench):
    common = most_common_answer(big_bench)
    assert common == (")",)
    assert np.mean([item.answer_symbols == common for item in big_bench]) == 0.104
    assert np.mean([guess(item) for item in big_bench]) == pytest.approx(0.116, abs=5e-4)
    assert sum(map(readable, big_bench)) == 664
    seen = [s in item.input_symbols for item in big_bench for s in item.answer_symbols]
    assert np.mean(seen) == pytest.approx(0.73, abs=5e-3)


@pytest.mark.shared_data
@shared_data
def test_the_hard_items_are_among_them(big_bench):
    hard = read_items(HARD)
    assert len(hard) == 250
    assert {item.prefix for item in hard} < {item.prefix for item in big_bench}


@pytest.mark.shared_data
@shared_data
def test_demonstrations_from_big_bench(big_bench):
    sets = sets_of_items(big_bench, 10, seed=0)
    assert [s.query for s in sets] == big_bench
    for s in sets:
        assert len({item.prefix for item in (s.query, *s.demonstrations)}) == 11
    shown = Counter(item.name for s in sets for item in s.demonstrations)
    assert len(shown) == 1000 and max(shown.values()) < 30  # 10 on average, all take part
    # ten shots reveal every pair, and with all four known nothing is left to guess
    assert {bayes(s, 10)["answers"] for s in sets} == {1.0}


# ---------------------------------------------------------------- files


def test_every_kind_of_row(tmp_path):
    items = read_items(write(tmp_path / "rows.jsonl", ROWS))
    assert ["".join(item.input_symbols) for item in items] == ["([]{", "<<>", "[[]([", "{("]
    assert ["".join(item.answer_symbols) for item in items] == ["})", ">", "])]", ")}"]
    assert [item.name for item in items] == [f"rows.jsonl:{row}" for row in (1, 2, 3, 4)]
    assert {item.pairing for item in items} == {USUAL}


def test_every_kind_of_file(tmp_path):
    prefixes = [item.prefix for item in read_items(write(tmp_path / "rows.jsonl", ROWS))]
    for name, content in {
        "list.json": ROWS,
        "hard.json": {"canary": "x", "examples": ROWS},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
        assert [item.prefix for item in read_items(tmp_path / name)] == prefixes
    windows = "\ufeff" + "\r\n\r\n".join(map(json.dumps, ROWS))
    (tmp_path / "windows.jsonl").write_text(windows, newline="")
    items = read_items(tmp_path / "windows.jsonl")
    assert [item.prefix for item in items] == prefixes
    assert items[1].name == "windows.jsonl:3"  # the line


def test_a_folder_of_datasets(tmp_path):
    rows = [{"input": "([", "answer": "] )"}, {"input": "{", "answer": "}"}]
    data = Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "split")
    assert [i.name for i in read_items(tmp_path / "one")] == ["one:1", "one:2"]
    split = read_items(str(tmp_path / "split"))
    assert [i.name for i in split] == ["split:train:1", "split:train:2", "split:test:1"]
    assert [len(i.prefix) for i in split] == [2, 1, 1]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"input": "( ]", "answer": ")"}, "row 2 is broken: Symbol 2 closes another type"),
        ({"input": "( ) )", "answer": ")"}, "row 2 is broken: Symbol 3 closes a bracket but none"),
        ({"input": "( a", "answer": ")"}, "row 2 is broken: Symbol 2 is 'a', no bracket of"),
        ({"input": "( )", "answer": ""}, "row 2 is broken: No bracket is left open"),
        ({"input": "", "answer": ")"}, "row 2 is broken: No bracket is left open"),
        ({"input": "( [", "answer": ") ]"}, r"row 2 has the answer '\) \]' but .* '\] \)'"),
        ({"input": "( [", "answer": "] ) )"}, r"row 2 has the answer '\] \) \)' but"),
        ({"input": "( [", "answer": ""}, "row 2 has the answer '' but"),
        ({"input": "( ["}, "row 2 has no text under continuation or target or answer"),
        ({"answer": "]"}, "row 2 has no text under context or input"),
        ({"input": 3, "answer": "]"}, "row 2 has no text under context or input"),
        (["( [", "] )"], "row 2 has no text under context or input"),
    ],
)
def test_a_broken_row(tmp_path, row, fault):
    with pytest.raises(SmeltscopeError, match=rf"rows\.jsonl, {fault}"):
        read_items(write(tmp_path / "rows.jsonl", [ROWS[0], row, ROWS[1]]))


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.json", '{"examples": []}', "a.json is empty"),
        ("a.json", '{"rows": []}', "a.json has no list of rows"),
        ("a.json", "[", r"a.json is broken JSON \("),
        ("a.jsonl", '{"input": "(", "answer": ")"}\n{', r"a.jsonl, row 2 is broken JSON \("),
        ("a.csv", "(,)", "a.csv has an unknown ending"),
        ("a.jsonl", "\udcff", "a.jsonl cannot be read"),
    ],
)
def test_a_broken_file(tmp_path, name, content, fault):
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(SmeltscopeError, match=fault):
        read_items(tmp_path / name)


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(SmeltscopeError, match="nowhere does not exist"):
        read_items(tmp_path / "nowhere")
    with pytest.raises(SmeltscopeError, match="cannot be read as a dataset"):
        read_items(tmp_path)


def test_parse_item():
    assert parse_item("Input: ( [ \nOutput:", "prompt") == item("([", "prompt")
    shots = "Input: (\nOutput: )\nInput: { <\nOutput:"
    assert parse_item(shots, "prompt").input_symbols == ("{", "<")


# ---------------------------------------------------------------- sets


def test_demonstrations_are_drawn_by_the_seed():
    words = [sample_prefix(np.random.default_rng(i), 7, 1, 4) for i in range(30)]
    items = [Item(name=str(i), prefix=word, pairing=USUAL) for i, word in enumerate(words)]
    one, two, other = (sets_of_items(items, 8, seed) for seed in (0, 0, 1))
    assert one == two != other
    assert [s.demonstrations[:3] for s in one] == [
        s.demonstrations for s in sets_of_items(items, 3, 0)
    ]
    assert len({s.demonstrations[0].name for s in one}) > 10


def test_no_item_shows_the_query():
    items = [item("(", "a"), item("(", "b"), item("[", "c"), item("{", "d")]
    for s in sets_of_items(items, 2, seed=3):
        assert all(shown.prefix != s.query.prefix for shown in s.demonstrations)
    with pytest.raises(SmeltscopeError, match="3 shots need 3 items with another input than a, "):
        sets_of_items(items, 3, seed=3)


def test_one_pairing_in_a_set():
    other = Pairing(openers="([{<", closers="!#$%")
    with pytest.raises(SmeltscopeError, match="b can't demonstrate a"):
        ItemSet(query=item("(", "a"), demonstrations=(item("(", "b", other),))


# ---------------------------------------------------------------- evidence


def maps_by_evidence(item_set, k):
    """All maps that would have written what is seen, by what that is."""
    pairing = item_set.query.pairing
    maps = [
        Pairing(openers=pairing.openers, closers="".join(closers), choices=pairing.choices)
        for closers in permutations(pairing.choices, len(pairing.openers))
    ]
    seen = {
        "nothing": [],
        "query": [item_set.query.prefix],
        "inputs": [shown.prefix for shown in item_set.demonstrations[:k]],
        "answers": [shown.answer for shown in item_set.demonstrations[:k]],
    }
    for name, words in seen.items():
        for word in words:
            maps = that_write(maps, word, pairing)
        yield name, maps


def that_write(maps, word, pairing):
    return [m for m in maps if m.write(word) == pairing.write(word)]


def right_one_by_one(maps, query, bears):
    """How many tokens of the answer the likeliest symbols have right, the true ones before them known."""
    right, done = 0.0, 0
    for count in bears:
        token, done = query.answer[done : done + count], done + count
        right += of_most(maps, token)
        maps = that_write(maps, token, query.pairing)
    return right


def of_most(maps, word):
    """The chance of the symbols that most maps write."""
    return max(Counter(m.write(word) for m in maps).values()) / len(maps)


@pytest.mark.parametrize(
    "pairing",
    [
        USUAL,
        Pairing(openers="([{", closers="$!)", choices=")!#$%"),
        Pairing(openers="([", closers="#!", choices="!#$"),
        Pairing(openers="(", closers=")", choices=")"),
    ],
)
def test_bayes_against_all_maps(pairing):
    rng = np.random.default_rng(11)
    types = len(pairing.openers)

    def draw():
        depth = int(rng.integers(1, 4))
        prefix = sample_prefix(rng, depth + 2 * int(rng.integers(3)), depth, types)
        return Item(name="", prefix=prefix, pairing=pairing)

    found = set()
    for _ in range(60):
        item_set = ItemSet(query=draw(), demonstrations=tuple(draw() for _ in range(3)))
        for k in range(4):
            chances = bayes(item_set, k)
            answer = item_set.query.answer
            left = dict(maps_by_evidence(item_set, k))
            assert chances == pytest.approx({name: of_most(m, answer) for name, m in left.items()})
            for bears in ([1] * len(answer), [1, *[len(answer) - 1] * (len(answer) > 1)]):
                numbers = candidates(item_set, k)
                right = {name: right_tokens(n, bears) for name, n in numbers.items()}
                assert right == pytest.approx(
                    {name: right_one_by_one(m, item_set.query, bears) for name, m in left.items()}
                )
            assert list(chances.values()) == sorted(chances.values())  # more is never worse
            found |= set(chances.values())
    assert len(found) >= min(types, 3)


def test_bayes_by_hand():
    pairing = Pairing(openers="([{<", closers="!#$%")  # one of 16 * 15 * 14 * 13 maps
    query = item("([[#{", "query", pairing)  # ( [ { stay open, [ is read in the query
    shown = item("(!<", "shown", pairing), item("<{", "shown", pairing)
    chances = bayes(ItemSet(query=query, demonstrations=shown), 2)
    assert chances == pytest.approx(
        {"nothing": 1 / (16 * 15 * 14), "query": 1 / (15 * 14), "inputs": 1 / 14, "answers": 1}
    )
    chances = bayes(ItemSet(query=query, demonstrations=shown), 1)
    assert chances["answers"] == pytest.approx(1 / 13)  # < is known, { not
    # of the usual four, three are enough
    assert bayes(ItemSet(query=item("()[]{}<"), demonstrations=()), 0)["query"] == 1


def test_tokens_of_several_symbols_by_hand():
    assert right_tokens((4, 1, 3), [1, 1, 1]) == pytest.approx(1 / 4 + 1 + 1 / 3)
    assert right_tokens((4, 1, 3), [2, 1]) == pytest.approx(1 / 4 + 1 / 3)
    assert right_tokens((4, 4, 3), [3]) == pytest.approx(1 / 48)


def test_baselines_by_hand():
    pairing = Pairing(openers="([{<", closers="!#$%")
    assert guess(item("([")) == 1 / 16
    assert guess(item("([", pairing=pairing)) == 1 / 256
    assert readable(item("[]([(")) is False
    assert readable(item("[]()(["))
    items = [item("[("), item("["), item("("), item("[["), item("{["), item("()["), item("<()(")]
    assert most_common_answer(items) == ("]",)
