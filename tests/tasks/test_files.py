"""Every format gives the same data, and what cannot be read gives one clear sentence."""

import bz2
import gzip
import json
import locale
import lzma
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict, disable_progress_bars

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks import load_heldout
from smeltscope.tasks.files import documents, find_files
from smeltscope.tasks.zst import is_whole_zst

disable_progress_bars()  # of the tests' own save_to_disk

ROWS = [
    {"text": "Hello world.\n", "category": "prose", "source": "me", "id": "one"},
    {"text": "x = 'é🙂\u2028'\n" * 3, "category": "code", "source": "you", "id": "two"},
    {"text": "2020-01-01", "category": "prose", "source": "me", "id": "3"},
]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def load(path, tokenizer, **options):
    return load_heldout([path], tokenizer, max_length=12, **options)


def same(a, b):
    for name in ("tokens", "offsets", "document"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    return a.digest == b.digest


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_jsonl(tmp_path, tokenizer, suffix):
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(COMPRESS[suffix](jsonl(ROWS)))
    expected = load(tmp_path / "a.jsonl", tokenizer)
    assert [d.id for d in expected.documents] == ["one", "two", "3"]
    assert [d.category for d in expected.documents] == ["prose", "code", "prose"]
    assert [d.source for d in expected.documents] == ["me", "you", "me"]
    assert same(load(tmp_path / f"b.jsonl{suffix}", tokenizer), expected)


@pytest.mark.parametrize("budget", [None, 40])
def test_tables(tmp_path, tokenizer, budget):
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    expected = load(tmp_path / "a.jsonl", tokenizer, tokens=budget)
    dataset = Dataset.from_list(ROWS).with_format("numpy")
    dataset.save_to_disk(tmp_path / "plain")
    DatasetDict(test=dataset).save_to_disk(tmp_path / "splits")
    assert same(load(parquet(tmp_path / "a.parquet", ROWS), tokenizer, tokens=budget), expected)
    assert same(load(tmp_path / "plain", tokenizer, tokens=budget), expected)
    found = load(tmp_path / "splits", tokenizer, tokens=budget)
    assert same(found, expected)
    assert any("has the splits test" in note for note in found.notes)
    assert {d.file for d in found.documents} == {"test"}
    assert same(load(tmp_path / "splits" / "test", tokenizer, tokens=budget), expected)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_text_file_is_one_document(tmp_path, tokenizer, suffix):
    path = tmp_path / f"my [1]::tale.old.TXT{suffix.upper()}"
    path.write_bytes(COMPRESS[suffix](b"\xef\xbb\xbfOnce.\r\n\r\nTwice."))
    found = load(path, tokenizer)
    assert tokenizer.decode(found.tokens, skip_special_tokens=True) == "Once.\n\nTwice."
    [info] = found.documents
    assert (info.id, info.category, info.file) == (f"{path.name}:1", "my [1]::tale", path.name)


def test_text_is_utf8_wherever_it_is_read(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é".encode()))
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: "cp1252")
    for name in ("a.txt", "a.txt.gz"):
        assert load(tmp_path / name, tokenizer).lengths.tolist() == [3]


def test_broken_lines_are_noted_and_passed_over(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n{"text": \n{"text": "b"}\n')
    noted: list[str] = []
    found = list(documents(find_files([path])[0][0], broken=noted))
    assert [(d.content, d.row) for d in found] == [("a", 1), ("b", 4)]
    assert "line 2 is not UTF-8 text (" in noted[0] and "line 3 is broken JSON (" in noted[1]
    path.write_bytes(b"[]\n{\n")
    with pytest.raises(
        SmeltscopeError, match=r"no whole line: all 2 are broken, the first: .*line 1"
    ):
        list(documents(find_files([path])[0][0], broken=noted))


def test_missing_fields_and_blank_lines(tmp_path):
    (tmp_path / "web.v2.jsonl").write_text(
        '{"text": "ab"}\n\n{"text": "cd", "id": 0, "source": 1}\n'
    )
    first, second = documents(find_files([tmp_path / "web.v2.jsonl"])[0][0])
    assert (first.id, first.category, first.source) == ("web.v2.jsonl:1", "web", "")
    assert (second.id, second.category, second.source, second.row) == ("0", "web", "1", 3)


def test_a_folder_is_its_readable_files(tmp_path, tokenizer):
    for name in ("b.txt", "a.txt", ".hidden.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "more").mkdir()
    found = load(tmp_path, tokenizer)
    assert [d.file for d in found.documents] == ["a.txt", "b.txt"]
    assert any("passed over more, notes.md" in note for note in found.notes)


START, END = 256, 257


@pytest.mark.parametrize("form", ["start", "end", "both", "npy"])
def test_token_arrays_give_what_their_text_gives(tmp_path, tokenizer, form):
    texts = ["Hello there, you.", "Not again", "Bye"]
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": t} for t in texts]))
    expected = load(tmp_path / "a.jsonl", tokenizer)
    before, after = {"start": ([START], []), "end": ([], [END])}.get(form, ([START], [END]))
    ids = [i for t in texts for i in (*before, *tokenizer(t)["input_ids"], *after)]
    if form == "npy":
        path, options = tmp_path / "a.npy", {}
        np.save(path, np.array(ids, dtype=np.int64))
    else:
        path, options = tmp_path / "a.bin", {"token_dtype": "uint16"}
        np.array(ids, dtype=np.uint16).tofile(path)
    found = load(path, tokenizer, **options)
    same(found, expected)
    assert [d.id for d in found.documents] == [f"{path.name}:{i}" for i in (1, 2, 3)]


def test_a_split_token_of_ones_own(tmp_path, tokenizer):
    np.save(tmp_path / "a.npy", np.array([7, 8, 9, 0, 0, 5, 6], dtype=np.int32))
    found = load(tmp_path / "a.npy", tokenizer, split_token=0)
    assert [found.segment(i).tolist() for i in range(2)] == [[START, 7, 8, 9], [START, 5, 6]]


BAD = {
    "missing.txt": (None, r"missing\.txt does not exist: check --data"),
    "a.csv": (b"text\n", r"a\.csv has an unknown ending: --data takes \.txt"),
    "a.parquet.gz": (b"x", r"a\.parquet\.gz has an unknown ending"),
    "empty.txt": (b"", r"empty\.txt is empty"),
    "empty.jsonl": (b"", r"empty\.jsonl is empty"),
    "blank.jsonl": (b"\n \n", r"blank\.jsonl is empty: it holds no documents"),
    "empty.jsonl.gz": (gzip.compress(b""), r"empty\.jsonl\.gz is empty"),
    "empty.npy": (b"", r"empty\.npy is not a readable \.npy file"),
    "empty.bin": (b"", r"empty\.bin is empty"),
    "nul.txt": (b"a\0b", r"nul\.txt is a binary file"),
    "latin.txt": (b"caf\xe9 noir", r"latin\.txt is not UTF-8 text"),
    "latin.jsonl": (
        b'{"text": "\xe9"}\n',
        r"latin\.jsonl, line 1 is not UTF-8 text \(invalid continuation byte",
    ),
    "line.jsonl": (b'{"text": "a b"}\n\n{"text": "a\n', r"line\.jsonl, line 3 is broken JSON"),
    "list.jsonl": (b"[1]\n", r"list\.jsonl, line 1 is broken JSON \(no object"),
    "half.jsonl": (b'{"text": "\\ud800 abc"}\n', r"half\.jsonl, line 1 is broken JSON"),
    "none.jsonl": (b'{"text": "ab"}\n{"body": "b"}\n', r"none\.jsonl, row 2 has no `text`"),
    "int.jsonl": (b'{"text": 7}\n', r"int\.jsonl, row 1 has a `text` of type int"),
    "cut.txt.gz": (gzip.compress(b"abc" * 99)[:-9], r"cut\.txt\.gz cannot be read as txt, it may"),
    "cut.jsonl.xz": (lzma.compress(b"{}" * 99)[:-9], r"cut\.jsonl\.xz cannot be read as jsonl"),
    "cut.txt.bz2": (bz2.compress(b"abc" * 99)[:-9], r"cut\.txt\.bz2 cannot be read"),
    "cut.txt.zst": (COMPRESS[".zst"](b"abc" * 99)[:-3], r"cut\.txt\.zst is damaged"),
    "no.txt.gz": (b"plain text", r"no\.txt\.gz cannot be read as txt"),
    "no.parquet": (b"plain text", r"no\.parquet cannot be read as parquet"),
    "no.npy": (b"plain text", r"no\.npy is not a readable \.npy file"),
    "short.txt": (b"a", r"Nothing is left of .*short\.txt \(one_token_document 1\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read(tmp_path, tokenizer, name, capfd):
    content, sentence = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    options = {"token_dtype": "uint16"} if name.endswith(".bin") else {}
    with pytest.raises(SmeltscopeError, match=sentence):
        load(tmp_path / name, tokenizer, **options)
    assert capfd.readouterr() == ("", "")


def test_damaged_tables(tmp_path, tokenizer):
    path = parquet(tmp_path / "a.parquet", ROWS * 50)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 200 + content[204:])
    with pytest.raises(SmeltscopeError, match=r"a\.parquet cannot be read as parquet"):
        load(path, tokenizer)
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "d")
    arrow = tmp_path / "d" / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(SmeltscopeError, match=r"d cannot be read as dataset"):
        load(tmp_path / "d", tokenizer)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"body": "a"}], r"a\.parquet has no column `text`, its columns are body"),
        ([{"text": 5}], r"a\.parquet, row 1 has a `text` of type int"),
        ([{"text": "abc"}, {"text": None}], r"a\.parquet, row 2 has no `text`"),
    ],
)
def test_tables_without_text(tmp_path, tokenizer, rows, sentence):
    with pytest.raises(SmeltscopeError, match=sentence):
        load(parquet(tmp_path / "a.parquet", rows), tokenizer)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros(4), r"holds float64 numbers of shape \(4,\)"),
        (np.zeros((2, 2), dtype=np.int32), r"holds int32 numbers of shape \(2, 2\)"),
        (np.array([1, -3]), r"a\.npy: its token ids reach -3"),
        (np.array([1, 2**40]), r"a\.npy: its token ids reach 1099511627776"),
    ],
)
def test_arrays_that_are_no_tokens(tmp_path, tokenizer, array, sentence):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(SmeltscopeError, match=sentence):
        load(tmp_path / "a.npy", tokenizer)


@pytest.mark.parametrize(
    ("dtype", "sentence"),
    [
        (None, r"a\.bin holds bare numbers: name their type with --token-dtype"),
        ("spam", r"--token-dtype spam is no type"),
        ("float32", r"--token-dtype float32 is no integer type"),
        ("uint32", r"a\.bin has 6 bytes, no multiple of the 4 of uint32"),
    ],
)
def test_bin_needs_its_type(tmp_path, tokenizer, dtype, sentence):
    np.arange(3, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(SmeltscopeError, match=sentence):
        load(tmp_path / "a.bin", tokenizer, token_dtype=dtype)


def test_folders_and_doubles(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SmeltscopeError, match="empty holds no file to read"):
        find_files([tmp_path / "empty"])
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(SmeltscopeError, match=r"a\.txt is given twice"):
        find_files([tmp_path, tmp_path / "a.txt"])


def test_zst_frames(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, 300_000, dtype=np.uint8).tobytes()
    frames = [
        zstandard.ZstdCompressor(write_checksum=sum_, write_content_size=size).compress(data)
        for data in (b"", b"ab", b"a" * 400_000, noise)
        for sum_ in (True, False)
        for size in (True, False)
    ]
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    path = tmp_path / "a.zst"
    for content in (*frames, b"".join(frames), frames[0] + skippable + frames[5]):
        path.write_bytes(content)
        assert is_whole_zst(path)
        for cut in (1, 2, 5):
            path.write_bytes(content[:-cut])
            assert not is_whole_zst(path)


def test_every_frame_of_a_zst_file_is_read(tmp_path):
    compress = zstandard.ZstdCompressor().compress
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    path = tmp_path / "a.jsonl.zst"
    lines = [b'{"text": "a"}\n{"text": ', b'"b"}\n', b'{"text": "c"}']
    path.write_bytes(compress(lines[0]) + skippable + compress(lines[1]) + compress(lines[2]))
    assert [d.content for d in documents(find_files([path])[0][0])] == ["a", "b", "c"]


def test_nothing_goes_over_the_network(tmp_path, tokenizer, monkeypatch):
    calls = []
    monkeypatch.setattr(socket.socket, "connect", lambda *a: calls.append(a))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: calls.append(a) or [])
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    parquet(tmp_path / "b.parquet", ROWS)
    load_heldout([tmp_path], tokenizer, max_length=12)
    assert not calls
