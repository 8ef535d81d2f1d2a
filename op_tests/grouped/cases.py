"""Groups of rows of every size and place, and launches of a kernel of ``grouped_gemm`` on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import aiter_mx
from aiter_mx.codec import FLOAT8_NAMES
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.problem import LAYOUT_CODES, room_for_runs
from aiter_mx.kernels.spec import Config, KernelSpec
from op_tests.conformance import INDICES, NAMES
from op_tests.launches import Out, is_poison, launch, poisoned
from op_tests.mx_reference import assert_close_to_reference

Range = tuple[int, int]
Operands = tuple[Tensor, Tensor, Tensor, Tensor]
ROW_MAJOR = ("row_major", "row_major")


@dataclass(frozen=True)
class Groups:
    """Which rows groups have, and how a kernel is told.

    Attributes:
        ranges: first row of each group, and the row after its last.
        told: ``offsets`` [G + 1], ``ends`` [G], ``ranges`` (starts and ends), ``masked``,
            ``unpadded``: starts, and offsets of results that follow one another, or ``runs``:
            ranges of rows, of which a group may have several.
        index: dtype of these.
        M: rows of a.
        owners: where told as ``runs``, the group of each range.
        run_rows: likewise, rows at multiples of which they begin.
    """

    ranges: Sequence[Range]
    told: str
    index: str
    M: int
    owners: Sequence[int] = ()
    run_rows: int = 0

    def bounds(self) -> tuple[Tensor | None, Tensor]:
        """starts and ends."""
        dtype = INDICES[self.index]
        starts = torch.tensor([start for start, _ in self.ranges], dtype=dtype)
        ends = torch.tensor([end for _, end in self.ranges], dtype=dtype)
        if self.told == "offsets":
            both = torch.cat([starts[:1], ends])
            return both[:-1], both[1:]
        if self.told == "ranges":
            return starts, ends
        if self.told == "masked":
            return None, ends - starts
        if self.told == "unpadded":
            return starts, torch.tensor(self.out_offs, dtype=dtype)
        if self.told == "runs":
            count = len(self.ranges)
            left = room_for_runs(self.M, max(self.owners) + 1, self.run_rows) - count
            owners = torch.tensor([count, *self.owners, *[1 << 30] * left], dtype=dtype)
            starts = torch.nn.functional.pad(starts, (0, left), value=self.M)
            return starts, torch.cat([torch.nn.functional.pad(ends, (0, left)), owners])
        return None, ends

    @property
    def as_groups(self) -> Groups:
        """Each range as a group of its own."""
        return Groups(self.ranges, "ranges", self.index, self.M)

    @property
    def out_offs(self) -> list[int]:
        """Where results of groups begin if they follow one another, and where the last ends."""
        return [0, *accumulate(end - start for start, end in self.ranges)]

    @property
    def out_rows(self) -> int:
        """Rows of the result, some of them after its groups."""
        return self.out_offs[-1] + 3 if self.told == "unpadded" else self.M


class Case(NamedTuple):
    """Groups, the other sizes, and a configuration; None is the kernel's own choice.

    ``cu_num`` is what work is divided for where it is not the GPU there is, ``layouts`` those of
    the scales of a and b.
    """

    groups: Groups
    N: int
    K: int
    config: Config | None = None
    dtype: str | None = None
    bias: str = "none"
    cu_num: int | None = None
    layouts: tuple[str, str] = ROW_MAJOR


def one_group(M: int) -> Groups:
    """All rows in one group."""
    return Groups([(0, M)], "ends", "i32", M)


def ending_at(ends: Sequence[int], M: int, told: str = "ends", index: str = "i32") -> Groups:
    """Groups one after the other from row 0 on."""
    return Groups([*zip([0, *ends], ends, strict=False)], told, index, M)


def of_every_size(most: int) -> Groups:
    """Groups of 0, 1, 2, ... rows, so that every size has a group, and most start unaligned."""
    ends = [*accumulate(range(most + 1))]
    return ending_at(ends, ends[-1], "offsets", "i64")


def draw_runs(draw: random.Random, groups: int, blocks: int, run_rows: int) -> Groups:
    """Ranges of whole blocks but for some last rows, dealt to groups; some blocks are nobody's."""
    ranges: list[Range] = []
    owners: list[int] = []
    for block in range(blocks):
        owner, row = draw.randrange(-1, groups), block * run_rows
        if owner < 0:
            continue
        end = row + max(1, run_rows - draw.choice([0, 0, 1, run_rows // 2]))
        if owners and owner == owners[-1] and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((row, end))
            owners.append(owner)
    owners[-1] = groups - 1
    return Groups(ranges, "runs", "i32", blocks * run_rows, owners, run_rows)


def draw_groups(draw: random.Random, tile_m: int) -> Groups:
    """Groups of sizes around every tile's edge; seldom more than a wave has lanes."""
    edges = [0, 0, 1, 1, 2, 15, 16, 17, tile_m - 1, tile_m, tile_m + 1, tile_m + tile_m // 2]
    if draw.random() < 0.1:
        sizes = [draw.choice([0, 0, 0, 1, 2]) for _ in range(draw.randint(65, 140))]
    else:
        sizes = [draw.choice(edges) for _ in range(draw.randint(1, 6))]
    told, index = draw.choice(["offsets", "ends", "ranges", "masked"]), draw.choice([*INDICES])
    ranges: list[Range] = []
    if told == "masked":
        rows = max(*sizes, 1) + draw.randint(0, 5) if len(sizes) > 1 else sizes[0] + 2
        ranges = [(g * rows, g * rows + size) for g, size in enumerate(sizes)]
        return Groups(ranges, told, index, rows * len(sizes))
    row = 0 if told == "ends" else draw.choice([0, 1, 7])
    for size in sizes:
        ranges.append((row, row + size))
        row += size + (draw.choice([0, 0, 3]) if told == "ranges" else 0)
    if told == "ranges":
        draw.shuffle(ranges)
    return Groups(ranges, told, index, row + draw.choice([0, 1, 9]) or 1)


def launch_grouped(
    kernel: KernelSpec,
    device: torch.device,
    config: Config | None,
    drawn: Operands,
    groups: Groups,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cu_num: int | None = None,
    layouts: tuple[str, str] = ROW_MAJOR,
) -> Tensor:
    """The kernel's result on the CPU; scales are row-major here, and brought into ``layouts``."""
    a, a_scale, b, b_scale = drawn
    (M, K), (G, N, _) = a.shape, b.shape
    bias_name = "none" if bias is None else NAMES[bias.dtype]
    layout = groups.told if groups.told in LAYOUT_CODES else "jagged"
    problem = GroupedGemmProblem(
        M, N, K, G, NAMES[dtype], bias_name, layout, groups.index, 0, *layouts,
        FLOAT8_NAMES[a.dtype],
        groups.out_rows if layout == "unpadded" else 0, groups.run_rows,
    )  # fmt: skip
    if layouts != ROW_MAJOR:
        if layout == "masked":
            a_scale = a_scale.view(G, M // G, K // 32)
        a_scale, b_scale = map(aiter_mx.shuffle_scales, (a_scale, b_scale), layouts)
    tensors = (a, a_scale, b, b_scale, bias, Out((groups.out_rows, N), dtype), *groups.bounds())
    (out,) = launch(kernel, device, problem, config, tensors, cu_num)
    return out


def assert_group_rows(
    out: Tensor,
    drawn: Operands,
    ranges: Sequence[Range],
    bias: Tensor | None = None,
    multiplied: Callable[[Operands], Operands] | None = None,
    **errors: float | None,
) -> None:
    """Every group's rows are right.

    Args:
        out, drawn, bias: the result, and what it is of.
        ranges: of each group.
        multiplied: what the kernel multiplies in place of a group's operands, where it rounds them.
        errors: as of ``assert_close_to_reference``.
    """
    a, a_scale, b, b_scale = drawn
    others = {name: error for name, error in errors.items() if name != "rescaling_error"}
    for g, (start, end) in enumerate(ranges):
        if start < end:
            rows, own = slice(start, end), None if bias is None else bias[g]
            operands = (a[rows], a_scale[rows], b[g], b_scale[g])
            if multiplied is not None:
                assert_close_to_reference(out[rows], *multiplied(operands), own, **others)
            assert_close_to_reference(out[rows], *operands, own, **errors)


def assert_groups(
    out: Tensor,
    drawn: Operands,
    groups: Groups,
    bias: Tensor | None = None,
    multiplied: Callable[[Operands], Operands] | None = None,
    **errors: float | None,
) -> None:
    """Every group's rows are right, and all others as they were; see ``assert_group_rows``."""
    if groups.told == "unpadded":
        found, out = out, poisoned((groups.M, out.shape[1]), out.dtype)
        for to, (start, end) in zip(groups.out_offs, groups.ranges, strict=False):
            out[start:end] = found[to : to + end - start]
        assert is_poison(found[groups.out_offs[-1] :]), "wrote after the groups"
    assert_group_rows(out, drawn, groups.ranges, bias, multiplied, **errors)
    untouched = torch.ones(len(out), dtype=torch.bool)
    for start, end in groups.ranges:
        untouched[start:end] = False
    assert is_poison(out[untouched]), "wrote between groups"
