"""What the host does for Hopper's ``wgmma_bf16`` kernel of the linear."""

from __future__ import annotations

import pytest

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_bf16_sm90 import layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.subjects.wgmma_sm90 import WGMMA_BF16_CASES as CASES
from op_tests.linear.subjects.wgmma_sm90 import WGMMA_BF16_SMALL as SMALL

WGMMA_BF16 = find_kernel("linear", "sm_90a", "hip", "wgmma_bf16")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(tile_m: int, tile_n: int, split: int) -> dict[str, int]:
    return {"tile_m": tile_m, "tile_n": tile_n, "split": split}


def test_cases_fit_and_reach_what_differs_between_configurations() -> None:
    for M, N, K, chosen, *_ in [*CASES, *SMALL]:
        WGMMA_BF16.check_config(chosen)
        found = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert found is not None and found.shared_bytes <= 227 * 1024, (M, N, K, chosen)
    for name in ("tile_m", "tile_n", "split"):
        legal = next(param.values for param in WGMMA_BF16.params if param.name == name)
        assert {case.config[name] for case in CASES} == set(legal)


@pytest.mark.parametrize("M", [65, 80, 127, 129, 256, 257, 1000, 4096, 32768])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (301, 416), (2304, 6144), (6144, 2048)])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int) -> None:
    for pdl in (False, True):
        problem = LinearProblem(M, N, K, pdl=pdl)
        assert WGMMA_BF16.refusal(TARGET, problem) is None
        assert WGMMA_BF16.module is not None
        for chosen in (
            WGMMA_BF16.configure(TARGET, problem),
            *WGMMA_BF16.candidates(TARGET, problem),
        ):
            WGMMA_BF16.check_config(chosen)
            found = layout(TARGET, problem, chosen)
            assert found is not None and found.shared_bytes <= 227 * 1024
            geometry = WGMMA_BF16.module.geometry(TARGET, problem, chosen)
            assert geometry.grid[0] == found.clusters * chosen["split"]
            assert geometry.overlaps
            assert WGMMA_BF16.modules[0].geometry(TARGET, problem, chosen).overlaps is pdl


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (LinearProblem(64, 8, 128), "below 65"),
        (LinearProblem(1 << 31, 8, 128), "31 bits"),
        (LinearProblem(65, 1 << 31, 128), "31 bits"),
        (LinearProblem(1 << 30, 1 << 30, 4096), "CTAs"),
    ],
)
def test_what_it_does_not_cover_is_refused(problem: LinearProblem, why: str) -> None:
    assert why in (WGMMA_BF16.refusal(TARGET, problem) or "")
    assert "sm_90a" in (WGMMA_BF16.refusal(hardware("gfx950"), LinearProblem(80, 8, 128)) or "")


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    assert WGMMA_BF16.module is not None
    for problem, chosen in (
        (LinearProblem(65, 64, 256), config(96, 64, 3)),
        (LinearProblem(256, 640, 4096), config(256, 192, 1)),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            WGMMA_BF16.module.geometry(TARGET, problem, chosen)
