"""The script that judges and fits the numbers of the cost models, over rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from aiter_mx.dispatch.tables import Row
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.search import Least
from aiter_mx.paths import configs_dir
from aiter_mx.target import hardware
from tune.fit_costs import (
    KERNELS,
    fit,
    judge,
    main,
    module_of,
    numbers_of,
    place_of,
    rows_of,
    scaled,
    set_fitted,
    value_of,
)

TABLE = configs_dir() / "sm_90a" / "linear.csv"
TARGET = hardware("sm_90a")
PROBLEMS = [
    LinearProblem(M, N, K, pdl=pdl)
    for M, N, K, pdl in (
        *((1, 9216, 4096, False), (5, 2304, 6144, True), (16, 1152, 8192, False)),
        *((64, 17408, 5120, True), (64, 8192, 512, False)),
        *((200, 4096, 4096, False), (900, 1024, 512, False)),
    )
] + [LinearProblem(M, 2304, 6144, x_dtype="bf16") for M in (4, 8)]


@pytest.fixture(params=KERNELS)
def module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A kernel's declaration, which has its own numbers again afterwards."""
    found = module_of(request.param)
    shipped = found.FITTED
    yield found
    set_fitted(found, shipped)


def _row(kernel: str, problem: LinearProblem) -> Row:
    spec = find_kernel("linear", "sm_90a", "hip", kernel)
    config = spec.configure(TARGET, problem)
    return Row("here:1", "sm_90a", TARGET.cu_num, problem, spec, config, None, "")


def _costs(module: ModuleType) -> list[object]:
    return [
        sorted(module._search.costs(TARGET, problem, Least()))
        for problem in PROBLEMS
        if module._refusal(TARGET, problem) is None
    ]


def test_every_number_counts_and_bounds_hold_with_others(module: ModuleType) -> None:
    """Each changes some cost, and with each the choice is still the best of all candidates."""
    shipped, before = module.FITTED, _costs(module)
    numbers = numbers_of(shipped)
    assert len(numbers) >= 8
    assert min(value_of(shipped, number) for number in numbers) > 0
    for number in numbers:
        for factor in (0.5, 2.0):
            set_fitted(module, scaled(shipped, number, factor))
            after = _costs(module)
            for problem in PROBLEMS:
                if module._refusal(TARGET, problem) is None:
                    chosen = module._search.best(TARGET, problem)
                    assert chosen == module._search.candidates(TARGET, problem)[0], number
            if after != before:
                break
        assert after != before, f"{number} changes nothing"


def test_what_a_model_would_choose_is_in_the_first_place() -> None:
    row = _row("wgmma_f16", LinearProblem(64, 4096, 4096))
    assert place_of(module_of("wgmma_f16"), row) == 1
    assert judge(module_of("wgmma_f16"), [row, row]).first == 1.0
    assert judge(module_of("wgmma_f16"), []).rows == 0


def test_a_fit_finds_a_spoilt_number_and_leaves_the_module_alone() -> None:
    module, rows = module_of("mma_ring"), rows_of(TABLE, "mma_ring", 6)
    shipped = module.FITTED
    spoilt = scaled(shipped, ("warp", None), 20.0)
    try:
        set_fitted(module, spoilt)
        before = judge(module, rows).place
        found = fit(module, rows, rounds=1)
        assert module.FITTED is spoilt
        set_fitted(module, found)
        assert judge(module, rows).place < before
    finally:
        set_fitted(module, shipped)


def test_the_command_judges_what_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["wgmma_f16", "--rows", "8", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split()[-1] for line in lines[:2]] == ["fitted", "others"]
    assert lines[2].endswith("with new numbers")
    with pytest.raises(SystemExit):
        main(["gemv"])
    assert "gemv: the kernels with fitted numbers are" in capsys.readouterr().err
