"""What Hopper's kernels of the linear refuse, and what they are launched with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Config, KernelSpec, combinations
from aiter_mx.target import hardware
from op_tests.conformance import named

TARGET = hardware("sm_90a")
LARGE = LinearProblem(256, 640, 4096)

_mma_ring = named("split", "row_tiles", "row_warps", "k_warps", "depth", "per_sm")
_wide = named("split", "rows", "depth")
_wgmma_bf16 = named("tile_m", "tile_n", "split", "pairs")
_few = named("tile_m", "split", "k_groups", "ctas")


def kernel_of(name: str) -> KernelSpec:
    return find_kernel("linear", "sm_90a", "hip", name)


@pytest.mark.parametrize(
    ("name", "most", "refused"),
    [
        (
            "mma_registers",
            LinearProblem(16, 8, 64),
            [(LinearProblem(17, 8, 64), "above 16"), (LinearProblem(4, 1 << 28, 64), "31 bits")],
        ),
        ("mma_ring", LinearProblem(64, 8, 64), [(LinearProblem(65, 8, 64), "above 64")]),
        (
            "wgmma_f16",
            LinearProblem(64, 8, 64),
            [(LinearProblem(65, 8, 64), "above 64"), (LinearProblem(64, 8, 65536), "no room")],
        ),
        (
            "wgmma_fp8",
            LinearProblem(128, 8, 96),
            [
                (LinearProblem(129, 8, 128), "above 128"),
                (LinearProblem(8, 8, 128, "fp32"), "not for fp32"),
                (LinearProblem(8, 8, 1 << 20), "no room"),
            ],
        ),
        (
            "wgmma_fp8_tiled",
            LinearProblem(65, 8, 96),
            [
                (LinearProblem(64, 8, 128), "below 65"),
                (LinearProblem(1 << 22, 8, 128), "more than 65535 tiles"),
                (LinearProblem(129, 8, 128, "fp32"), "not for fp32"),
                (LinearProblem(129, 8, 1 << 17), "no room"),
            ],
        ),
        (
            "wgmma_bf16",
            LinearProblem(17, 8, 128),
            [
                (LinearProblem(16, 8, 128), "below 17"),
                (LinearProblem(1 << 31, 8, 128), "31 bits"),
                (LinearProblem(65, 1 << 31, 128), "31 bits"),
                (LinearProblem(1 << 30, 1 << 30, 4096), "tiles"),
            ],
        ),
        (
            "wgmma_f16_tiled",
            LinearProblem(65, 8, 32),
            [
                (LinearProblem(64, 8, 128), "not above 64"),
                (LinearProblem(1 << 24, 8, 32), "counts its threads in 32 bits"),
                (LinearProblem(65, 1 << 31, 128), "31 bits"),
            ],
        ),
        (
            "wgmma_bf16_few",
            LinearProblem(32, 8, 128),
            [
                (LinearProblem(33, 8, 128), "above 32"),
                (LinearProblem(17, 9216, 6144), "more than SMs"),
                (LinearProblem(1, 1 << 31, 128), "31 bits"),
            ],
        ),
        (
            "wgmma_bf16_swapped",
            LinearProblem(4096, 4096, 6144),
            [
                (LinearProblem(4096, 4097, 6144), "below N=4097"),
                (LinearProblem(4096, 16, 6144), "below 17"),
                (LinearProblem(4096, 2304, 6144, bias="bf16"), "no registers for a bias"),
                (LinearProblem(1 << 31, 64, 128), "31 bits"),
            ],
        ),
    ],
)
def test_what_a_kernel_does_not_cover_is_refused(
    name: str, most: LinearProblem, refused: list[tuple[LinearProblem, str]]
) -> None:
    kernel = kernel_of(name)
    assert kernel.refusal(TARGET, most) is None
    assert "sm_90a" in (kernel.refusal(hardware("gfx950"), most) or "")
    for problem, why in refused:
        assert why in (kernel.refusal(TARGET, problem) or "")


@pytest.mark.parametrize("name", ["mma_registers", "mma_ring", "wgmma_f16", "wgmma_fp8"])
def test_only_the_asked_for_launch_overlaps(name: str) -> None:
    kernel = kernel_of(name)
    module, alone = kernel.module, LinearProblem(8, 2304, 6144)
    assert module is not None
    for pdl in (False, True):
        problem = replace(alone, pdl=pdl)
        chosen = kernel.configure(TARGET, problem)
        assert module.geometry(TARGET, problem, chosen).overlaps is pdl
        defines = module.defines(TARGET, problem, chosen)
        if name == "mma_registers":
            assert defines["MX_OVERLAPS"] == pdl
        else:
            assert module.scalars(TARGET, problem, chosen)[-1] == pdl
            assert defines == module.defines(TARGET, alone, chosen)


@pytest.mark.parametrize("pdl", [False, True])
def test_wgmma_bf16_always_overlaps_its_own_launch_ahead(pdl: bool) -> None:
    kernel, problem = kernel_of("wgmma_bf16"), LinearProblem(256, 2304, 6144, pdl=pdl)
    ahead, own = kernel.modules
    chosen = kernel.configure(TARGET, problem)
    assert own.geometry(TARGET, problem, chosen).overlaps
    assert ahead.geometry(TARGET, problem, chosen).overlaps is pdl


@pytest.mark.parametrize("M", [257, 512])
def test_slices_of_w_find_x_where_the_first_launch_put_it(M: int) -> None:
    kernel, problem = kernel_of("wgmma_fp8_rescaled"), LinearProblem(M, 57300, 8192)
    launches = kernel.launches(TARGET, problem, kernel.configure(TARGET, problem))
    told = []
    for module in launches:
        names = [arg.name for arg in module.args if arg.kind != "pointer"]
        scalars = module.scalars(TARGET, problem, kernel.configure(TARGET, problem))
        told.append(dict(zip(names, scalars, strict=True)))
    firsts = [each["first_feature"] for each in told[::2]]
    room = firsts[1]
    assert 0 < problem.N - firsts[-1] < room  # the last is narrower
    for each in told:
        assert (each["M"], each["N"], each["K"], each["features"]) == (M, room, 8192, 57300)


def test_a_last_slice_with_less_to_share_has_fewer_ctas() -> None:
    kernel, problem = kernel_of("wgmma_fp8_rescaled"), LinearProblem(257, 4762 * 128, 5504)
    config = kernel.configure(TARGET, problem)
    assert config == {"ctas": 132} and kernel.misfit(TARGET, problem, config) is None
    products = kernel.launches(TARGET, problem, config)[1::2]
    grids = [module.geometry(TARGET, problem, config).grid for module in products]
    assert grids == [(132, 1, 1)] * 69 + [(3 * 43, 1, 1)]
    assert products[-1].scalars(TARGET, problem, config)[-3:] == (0, 1, 0)


@pytest.mark.parametrize(
    ("name", "problem", "config", "cu_num"),
    [
        ("wgmma_bf16", LinearProblem(65, 64, 256), _wgmma_bf16(96, 64, 3, 0), 132),
        ("wgmma_bf16", LARGE, _wgmma_bf16(256, 192, 1, 0), 132),
        ("wgmma_bf16", LARGE, _wgmma_bf16(256, 128, 2, 8), 132),
        ("wgmma_bf16", LARGE, _wgmma_bf16(128, 192, 1, 8), 132),
        ("wgmma_bf16", LinearProblem(65, 64, 256), _wgmma_bf16(96, 64, 1, 3), 132),
        ("wgmma_bf16", LinearProblem(65, 6400, 256), _wgmma_bf16(96, 64, 1, 5), 8),
        # more parts than chunks; more registers than there are
        ("wgmma_bf16_few", LinearProblem(1, 64, 384), _few(8, 4, 1, 1), 132),
        ("wgmma_bf16_few", LinearProblem(1, 64, 384), _few(32, 1, 1, 2), 132),
        ("wgmma_fp8_rescaled", LinearProblem(257, 64, 384), {"ctas": 10}, 132),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    name: str, problem: LinearProblem, config: Config, cu_num: int
) -> None:
    target = replace(TARGET, cu_num=cu_num)
    assert "does not fit" in (kernel_of(name).misfit(target, problem, config) or "")


def test_no_configuration_of_wgmma_fp8_holds_the_rows_of_a_very_long_k() -> None:
    kernel, problem = kernel_of("wgmma_fp8"), LinearProblem(64, 8, 1 << 20)
    for config in combinations(kernel.params):
        assert "does not fit" in (kernel.misfit(TARGET, problem, config) or "")


@pytest.mark.parametrize(
    ("M", "N", "K", "config"),
    [
        (32, 2304, 6144, _wide(8, 160, 4)),
        (64, 2304, 6144, _wide(8, 160, 4)),
        (64, 9216, 6144, _wide(8, 128, 5)),
        (32, 6144, 1536, _wide(2, 96, 4)),
        (64, 1536, 6144, _wide(8, 112, 4)),
        (64, 6144, 2048, _wide(2, 96, 3)),
        (64, 7168, 2048, _wide(2, 112, 3)),
    ],
)
def test_wgmma_f16_is_configured_as_won_on_an_h200(M: int, N: int, K: int, config: Config) -> None:
    assert kernel_of("wgmma_f16").configure(TARGET, LinearProblem(M, N, K)) == config


@pytest.mark.parametrize(
    ("N", "K", "alone", "overlapping"),
    [
        (2304, 6144, _mma_ring(4, 5, 1, 6, 2, 1), _mma_ring(4, 3, 1, 6, 2, 2)),
        (6144, 1536, _mma_ring(1, 3, 1, 6, 2, 1), _mma_ring(1, 3, 1, 6, 2, 1)),
        (6144, 2048, _mma_ring(1, 3, 1, 8, 2, 1), _mma_ring(1, 3, 1, 6, 2, 1)),
        (9216, 6144, _mma_ring(2, 3, 3, 4, 2, 1), _mma_ring(2, 3, 3, 4, 2, 1)),
    ],
)
def test_mma_ring_is_configured_as_won_on_an_h200(
    N: int, K: int, alone: Config, overlapping: Config
) -> None:
    kernel = kernel_of("mma_ring")
    for M in (2, 8):
        assert kernel.configure(TARGET, LinearProblem(M, N, K)) == alone
        assert kernel.configure(TARGET, LinearProblem(M, N, K, pdl=True)) == overlapping
