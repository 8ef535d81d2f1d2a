"""What each workgroup of a launch read, and what stands ahead of a launch's first load."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from aiter_mx.region import Region

Piece = tuple[int, int, bool, bool]


@dataclass(frozen=True)
class FirstLoad:
    """What a wave executes ahead of its first vector load of 16 bytes a lane.

    Attributes:
        instructions: of all kinds.
        waits: those of them that are ``s_waitcnt``.
    """

    instructions: int
    waits: int


class GroupCounts:
    """Buffers that a launch fills in; ``aiter_mx/sim/csrc/core.h`` says how."""

    def __init__(self, groups: int, regions: int, blocks: int) -> None:
        self._groups, self._regions = groups, regions
        self._bytes = (ctypes.c_uint64 * (groups * regions))()
        self._first = (ctypes.c_uint64 * (blocks + 1))()

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the bytes by workgroup and region, and of the first load."""
        return ctypes.addressof(self._bytes), ctypes.addressof(self._first)

    def by_region(
        self, pieces: Sequence[Piece], regions: Sequence[Region]
    ) -> dict[str, tuple[int, ...]]:
        """The bytes that each workgroup read, by the region's name."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0] * self._groups)
        for at, (begin, *_) in enumerate(pieces):
            name = next(
                r.name for r in regions if r.address <= begin < r.address + max(r.size_bytes, 1)
            )
            for group, count in enumerate(self._bytes[at :: self._regions]):
                sums[name][group] += count
        return {name: tuple(counts) for name, counts in sums.items()}

    def ahead_of_first_load(self, texts: Sequence[str], leaders: Sequence[int]) -> FirstLoad | None:
        """None where no lane ever loads 16 bytes.

        Counted is whatever ran until then: one wave alone, if the launch has one thread and runs
        each wave to its barrier.
        """
        if not self._first[0]:
            return None
        load = self._first[0] - 1
        instructions = waits = 0
        for leader, end, times in zip(
            leaders, [*leaders[1:], len(texts)], self._first[1:], strict=True
        ):
            found = sum(text.startswith("s_waitcnt") for text in texts[leader:end])
            instructions += times * (end - leader)
            waits += times * found
            if leader <= load < end:  # its last time through has come as far as the load
                instructions -= end - load
                waits -= sum(text.startswith("s_waitcnt") for text in texts[load:end])
        return FirstLoad(instructions, waits)
