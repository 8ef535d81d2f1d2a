"""The CDNA4 grouped GEMM against float64: in the simulator, and with ``-m gpu`` on an MI350X."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import PERSISTENT
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.launch import bind
from aiter_mx.target import hardware, target_of
from op_tests.mx_reference import assert_close_to_reference, random_mx, random_mx_groups

GFX950 = hardware("gfx950")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INDICES = {"i32": torch.int32, "i64": torch.int64}
SCHEDULES = ("random", "round-robin", "run-to-barrier")
Range = tuple[int, int]
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
POISON = 0x5A


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        if target_of(torch.device("cuda")).arch != "gfx950":
            pytest.skip("the kernel is for another GPU")
        yield torch.device("cuda")
    else:
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")


def config_of(tile_m: int, tile_n: int, swath: int = 4, xcds: int = 8) -> Config:
    return {"tile_m": tile_m, "tile_n": tile_n, "swath": swath, "xcds": xcds}


@dataclass(frozen=True)
class Groups:
    """Which rows groups have, and how a kernel is told.

    Attributes:
        ranges: first row of each group, and the row after its last.
        told: ``offsets`` [G + 1], ``ends`` [G], ``ranges`` (starts and ends) or ``masked``.
        index: dtype of these.
        M: rows of a.
    """

    ranges: Sequence[Range]
    told: str
    index: str
    M: int

    def bounds(self) -> tuple[torch.Tensor | None, torch.Tensor]:
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
        return None, ends


def launch(
    device: torch.device,
    config: Config,
    arguments: Operands,
    groups: Groups,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cus: int = 256,
    kernel: KernelSpec = PERSISTENT,
    layouts: tuple[str, str] = ("row_major", "row_major"),
) -> torch.Tensor:
    """The kernel's result on the CPU; its output starts out poisoned, between guards.

    ``arguments`` have row-major scales, which are brought into ``layouts`` here.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    (M, K), (G, N, _) = arguments[0].shape, arguments[2].shape
    bias_name = "none" if bias is None else names[bias.dtype]
    layout = "masked" if groups.told == "masked" else "jagged"
    problem = GroupedGemmProblem(
        M, N, K, G, names[dtype], bias_name, layout, groups.index, 0, *layouts
    )
    target = replace(target_of(device), cu_num=cus)
    assert kernel.refusal(target, problem) is None
    kernel.check_config(config)
    guard = 64
    whole = torch.empty(2 * guard + M * N, dtype=dtype)
    whole.view(torch.uint8).fill_(POISON)
    whole = whole.to(device)
    out = whole[guard : guard + M * N]
    a, a_scale, b, b_scale = arguments
    if layout == "masked":
        a_scale = a_scale.view(G, M // G, K // 32)
    a_scale, b_scale = map(aiter_mx.shuffle_scales, (a_scale, b_scale), layouts)
    tensors = [None if t is None else t.to(device) for t in (a, a_scale, b, b_scale, bias)]
    tensors += [out, *(None if t is None else t.to(device) for t in groups.bounds())]
    run = bind(kernel, target, problem, config, torch.cuda.current_device() if out.is_cuda else 0)
    run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
    whole = whole.cpu()
    for outside in (whole[:guard], whole[guard + M * N :]):
        assert (outside.view(torch.uint8) == POISON).all(), "wrote outside the output"
    return whole[guard : guard + M * N].view(M, N)


def check(
    out: torch.Tensor, arguments: Operands, groups: Groups, bias: torch.Tensor | None = None
) -> None:
    """Every group's rows are right, and all others as they were."""
    a, a_scale, b, b_scale = arguments
    untouched = torch.ones(len(out), dtype=torch.bool)
    for g, (start, end) in enumerate(groups.ranges):
        untouched[start:end] = False
        if start < end:
            rows = slice(start, end)
            own = None if bias is None else bias[g]
            assert_close_to_reference(out[rows], a[rows], a_scale[rows], b[g], b_scale[g], own)
    assert (out[untouched].contiguous().view(torch.uint8) == POISON).all(), "wrote between groups"


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


LAYOUTS = [*itertools.product(("row_major", "16x4"), repeat=2)]  # of a's and b's scales

# (tile, blocks of 32 k a multiple of this, dtype): between them every way of copying scales, whole
# steps and others, and sums in either kind of register. Layouts of scales take turns, each with one
# kind of bias for a tile and with others for the next, as every pair of them compiles anew.
SWEPT = [
    ((256, 256), 4, "bf16", 24),
    ((256, 256), 2, "fp32", 8),
    ((128, 256), 1, "bf16", 24),
    ((128, 128), 4, "fp16", 48),
    ((64, 128), 2, "bf16", 48),
    ((32, 256), 1, "fp32", 48),
]


def swept_bias(swept: tuple[tuple[int, int], int, str, int], layout: int) -> str:
    """Which dtype of bias goes with a layout, counted round and round."""
    return ["none", *DTYPES][(layout + SWEPT.index(swept)) % 4]


def zero_bias(
    swept: tuple[tuple[int, int], int, str, int], layout: int, N: int
) -> torch.Tensor | None:
    """Of one group, zeros: with it a launch runs what the sweep has compiled already."""
    name = swept_bias(swept, layout)
    return None if name == "none" else torch.zeros(1, N, dtype=DTYPES[name])


@pytest.mark.parametrize("swept", SWEPT, ids=str)
def test_random_jagged_groups_match_float64(
    device: torch.device,
    swept: tuple[tuple[int, int], int, str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile, blocks, dtype, cases = swept
    draw = random.Random(f"{tile} {dtype}")
    whole_steps = blocks == 4
    for seed in range(cases):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", draw.choice(SCHEDULES))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        monkeypatch.setenv("AITER_MX_SIM_DELAY", draw.choice("01"))
        groups = draw_groups(draw, tile[0])
        N = 32 * draw.choice([1, 2, 3, tile[1] // 32, tile[1] // 32 + 1])
        K = 32 * blocks * (draw.randint(2, 5) if whole_steps else 2 * draw.randint(0, 4) + 1)
        exponents = (-12, -6) if dtype == "fp16" else draw.choice([(-20, 20), (-6, 6)])
        G = len(groups.ranges)
        drawn = random_mx_groups(groups.M, G, N, K, seed, exponents)
        bias = None
        if (bias_name := swept_bias(swept, seed)) != "none":
            generator = torch.Generator().manual_seed(seed)
            bias = (torch.randn(G, N, generator=generator) * 100).to(DTYPES[bias_name])
        cus, layouts = draw.choice([1, 2, 3, 8, 256]), LAYOUTS[seed % 4]
        out = launch(
            device, config_of(*tile), drawn, groups, bias, DTYPES[dtype], cus, layouts=layouts
        )
        check(out, drawn, groups, bias)


ONE_TILE = config_of(64, 128)


def one_group(M: int) -> Groups:
    return Groups([(0, M)], "ends", "i32", M)


@pytest.mark.parametrize(
    ("a_exponents", "b_exponents"),
    [
        ((-127, 127), (-127, 127)),
        ((90, 127), (-127, -90)),
        ((-80, -50), (-80, -50)),
        ((40, 70), (20, 40)),
    ],
    ids=["any", "huge a", "near underflow", "near overflow"],
)
def test_scales_over_their_whole_range_are_exact(
    device: torch.device, a_exponents: Range, b_exponents: Range
) -> None:
    generator = torch.Generator().manual_seed(1)
    M, N, K = 37, 160, 320
    a = random_mx(M, K, generator, scale_exponents=a_exponents)
    b, b_scale = random_mx(N, K, generator, scale_exponents=b_exponents)
    drawn = (*a, b[None], b_scale[None])
    out = launch(device, ONE_TILE, drawn, one_group(M), dtype=torch.float32)
    assert_close_to_reference(out, *a, b, b_scale, underflow=2.0**-149)


@pytest.mark.parametrize("tile", [(64, 128), (256, 256)], ids=str)
def test_nan_payloads_and_nan_scales_reach_their_outputs_alone(
    device: torch.device, tile: tuple[int, int]
) -> None:
    M, N, K = tile[0] + 5, 160, 576
    bias = zero_bias(SWEPT[1], 0, N) if tile == SWEPT[1][0] else None
    generator = torch.Generator().manual_seed(2)
    for options in ({"nan_payload": 1e-4}, {"nan_scale": 2e-3}):
        a = random_mx(M, K, generator, **options)
        b, b_scale = random_mx(N, K, generator, **options)
        drawn = (*a, b[None], b_scale[None])
        # Two tiles for one workgroup: the second must not inherit what the first noted.
        out = launch(device, config_of(*tile), drawn, one_group(M), bias, torch.float32, cus=1)
        assert 0 < out.isnan().float().mean() < 1, "the draw must show both outcomes"
        assert_close_to_reference(out, *a, b, b_scale)


def test_a_nan_scale_counts_even_where_the_payload_is_zero(device: torch.device) -> None:
    M, N, K = 40, 64, 576
    for block in range(K // 32):
        a, a_scale, b, b_scale = random_mx_groups(M, 1, N, K, block, (-6, 6))
        b.view(torch.uint8)[0, 18, 32 * block : 32 * block + 32] = 0
        b_scale[0, 18, block] = 255
        a.view(torch.uint8)[33, 32 * block : 32 * block + 32] = 0
        a_scale[33, K // 32 - 1 - block] = 255
        nans = launch(device, ONE_TILE, (a, a_scale, b, b_scale), one_group(M)).isnan()
        assert nans[:, 18].all() and nans[33].all() and nans.sum() == M + N - 1


def test_rows_beyond_a_group_do_not_reach_it(device: torch.device) -> None:
    """Its last tile also holds rows of others, and k past the end is the next row's beginning."""
    drawn = random_mx_groups(90, 2, 64, 96, 3, (-6, 6))
    drawn[0].view(torch.uint8)[41:] = 0x7F
    drawn[1][41:] = 255
    groups = Groups([(3, 41), (60, 60)], "ranges", "i64", 90)
    out = launch(device, ONE_TILE, drawn, groups)
    check(out, drawn, groups)


def test_bounds_that_make_no_sense_touch_nothing_else(device: torch.device) -> None:
    drawn = random_mx_groups(50, 5, 64, 64, 4, (-6, 6))
    wild = Groups(
        [(-7, 9), (9, 4), (30, 1 << 40), (1 << 33, 1 << 34), (60, -3)], "ranges", "i64", 50
    )
    out = launch(device, ONE_TILE, drawn, wild)
    cut = replace(wild, ranges=[(0, 9), (9, 9), (30, 50), (50, 50), (50, 50)])
    check(out, drawn, cut)


@pytest.mark.parametrize(("tile", "swath", "xcds"), [((64, 128), 1, 1), ((32, 128), 16, 8)])
def test_results_are_bitwise_the_same_whatever_the_order(
    device: torch.device,
    tile: tuple[int, int],
    swath: int,
    xcds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups([(0, 129), (129, 129), (129, 180)], "offsets", "i64", 180)
    drawn = random_mx_groups(180, 3, 288, 320, 5, (-6, 6))
    runs = []
    for seed, schedule in enumerate([*SCHEDULES, "random", "random"]):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        monkeypatch.setenv("AITER_MX_SIM_DELAY", str(int(seed > 2)))
        config, cus = config_of(*tile, swath, xcds), [1, 3, 8, 16, 256][seed]
        runs.append(launch(device, config, drawn, groups, cus=cus, dtype=torch.float32))
    check(runs[0], drawn, groups)
    assert all(torch.equal(runs[0].view(torch.int32), run.view(torch.int32)) for run in runs)


def test_operands_and_results_above_4_gib_match_float64() -> None:
    """The last rows of each, in memory of which the rest is never touched."""
    N, K, G = 96, 320, 1 << 18
    M = (1 << 32) // K + 300
    assert min(M * K, G * N * K, 4 * M * N) > 1 << 32
    a = torch.empty((M, K), dtype=torch.float8_e4m3fn)
    a_scale = torch.empty((M, K // 32), dtype=torch.uint8)
    b = torch.empty((G, N, K), dtype=torch.float8_e4m3fn)
    b_scale = torch.empty((G, N, K // 32), dtype=torch.uint8)
    rows, near = slice(M - 70, M), random_mx_groups(70, 1, N, K, 6, (-6, 6))
    a[rows], a_scale[rows], b[-1], b_scale[-1] = near[0], near[1], near[2][0], near[3][0]
    ends = torch.zeros(G, dtype=torch.int64)
    starts = torch.zeros(G, dtype=torch.int64)
    starts[-1], ends[-1] = M - 70, M
    out = torch.empty((M, N), dtype=torch.float32)
    problem = GroupedGemmProblem(M, N, K, G, "fp32", index="i64")
    tensors = (a, a_scale, b, b_scale, None, out, starts, ends)
    with aiter_mx.simulate("gfx950") as target:
        run = bind(PERSISTENT, replace(target, cu_num=1), problem, ONE_TILE, 0)
        run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
    assert_close_to_reference(out[rows], *near[:2], near[2][0], near[3][0])


def test_refusals_say_what_is_covered() -> None:
    def refusal(arch: str = "gfx950", **shape: int) -> str | None:
        problem = GroupedGemmProblem(**{"M": 64, "N": 64, "K": 64, "G": 2, **shape})
        return PERSISTENT.refusal(replace(GFX950, arch=arch), problem)

    assert refusal() is None
    assert refusal(N=70) == "N=70 is not a multiple of 32, the features that a lane stores"
    assert "K=4194304 is not below 4194304" in (refusal(K=1 << 22) or "")
    assert "M=2147483648 is not below 2147483648" in (refusal(M=1 << 31) or "")
    assert "tiles, and their numbers have 31 bits" in (refusal(M=1 << 30, N=1 << 20) or "")
    assert refusal("sm_90a") == "no persistent kernel for sm_90a, only for gfx950"
