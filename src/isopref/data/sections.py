"""A file of sections, each with a digest, so that no damaged byte is ever used.

    section | section | ... | index | magic, 8 bytes | size of the index, 8 | digest of the index and these two, 16

(little-endian). The index is JSON: the size and digest of every section, and a note. The index is checked when the file
is opened, a section each time it is read. So every bit of the file is covered, and only what is used is read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import accumulate
from typing import Any

import pyarrow as pa

MAGIC = b"isoprefT"
TAIL = struct.Struct("<8sQ")
DIGEST_BYTES = 16


class DamageError(Exception):
    """What is wrong with a file of sections, worded to follow the file's name."""


class SectionWriter:
    """Writes sections to a sink; the file is valid only after `close`."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._index: list[tuple[int, str]] = []

    def write(self, section: pa.Buffer) -> None:
        self._sink.write(section)
        self._index.append((section.size, _digest(section).hex()))

    def close(self, note: str) -> None:
        index = json.dumps({"sections": self._index, "note": note}).encode()
        covered = index + TAIL.pack(MAGIC, len(index))
        self._sink.write(covered + _digest(covered))


class Sections:
    """The sections of a file that is in memory or mapped. Raises DamageError if the index is damaged."""

    def __init__(self, content: Any) -> None:
        self._content = pa.py_buffer(content)
        index = self._read_index()
        self.note: str = index["note"]
        self._sizes = [size for size, _ in index["sections"]]
        self._digests = [bytes.fromhex(digest) for _, digest in index["sections"]]
        self._starts = list(accumulate(self._sizes, initial=0))

    def __len__(self) -> int:
        return len(self._sizes)

    def read(self, number: int) -> pa.Buffer:
        """A section, without a copy. Raises DamageError if its digest does not match."""
        section = self._content.slice(self._starts[number], self._sizes[number])
        if _digest(section) != self._digests[number]:
            raise DamageError(f"damaged: the digest of section {number + 1} of {len(self)} does not match")
        return section

    def _read_index(self) -> dict[str, Any]:
        size = self._content.size
        tail = size - TAIL.size - DIGEST_BYTES
        if tail < 0:
            raise DamageError(f"damaged: only {size} bytes long")
        magic, index_size = TAIL.unpack(self._content.slice(tail, TAIL.size))
        if magic != MAGIC:
            raise DamageError("damaged: truncated, or not a table of this version")
        start = max(0, tail - index_size)
        covered = self._content.slice(start, tail + TAIL.size - start)
        if _digest(covered) != self._content.slice(size - DIGEST_BYTES).to_pybytes():
            raise DamageError("damaged: the digest of its index does not match")
        index: dict[str, Any] = json.loads(covered.slice(0, index_size).to_pybytes())
        expected = sum(section_size for section_size, _ in index["sections"]) + size - start
        if size != expected:
            raise DamageError(f"damaged: {size} bytes long, not {expected}")
        return index


def _digest(content: Any) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
