"""Whether a .zst file is whole: reading one whose end is missing gives less text and no error."""

from pathlib import Path

MAGIC = 0xFD2FB528
SKIPPABLE = range(0x184D2A50, 0x184D2A60)
LAST, KIND, RLE = 1, 3, 1  # a block's header: its last bit, the two above, a run of one byte


def is_whole_zst(path: Path) -> bool:
    """True if every frame of `path` has all its blocks, by their headers alone (RFC 8878, 3.1)."""
    size = path.stat().st_size
    with path.open("rb") as file:

        def number(count: int) -> int:
            return int.from_bytes(file.read(count), "little")

        while file.tell() < size:
            magic = number(4)
            if magic in SKIPPABLE:
                file.seek(number(4), 1)
                continue
            if magic != MAGIC:
                return False
            flags = number(1)
            single, checksum = flags >> 5 & 1, flags >> 2 & 1
            window, dictionary = 1 - single, (0, 1, 2, 4)[flags & 3]
            content = (single, 2, 4, 8)[flags >> 6]
            file.seek(window + dictionary + content, 1)
            last = 0
            while not last:
                if file.tell() + 3 > size:
                    return False
                block = number(3)
                last = block & LAST
                file.seek(1 if block >> 1 & KIND == RLE else block >> 3, 1)
            file.seek(4 * checksum, 1)
        return file.tell() == size
