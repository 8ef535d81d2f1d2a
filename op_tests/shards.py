"""A part of the tests, for machines that are lent for less time than all of them take."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Shard:
    """The ``index``-th, from 1, of ``count`` parts of the tests."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        index, _, count = text.partition("/")
        shard = cls(int(index), int(count))
        if not 1 <= shard.index <= shard.count:
            raise ValueError(f"a shard is i/n with i from 1 to n, got {text!r}")
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, test: str) -> bool:
        """Whether the test of this id is one of them."""
        return crc32(test.encode()) % self.count == self.index - 1

    def parts(self, count: int) -> list[Shard]:
        """So many shards that have, between them, what this one has."""
        first, every = self.index, self.count * count
        return [Shard(first + self.count * part, every) for part in range(count)]
