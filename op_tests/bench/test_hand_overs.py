"""Where the linear is timed on both sides, and what a step is held to."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.target import hardware
from op_tests.bench import common, every_m, hand_overs

SM90 = hardware("sm_90a")
SHAPE = (2560, 2048)


def test_both_sides_of_every_change_of_what_is_launched_are_timed() -> None:
    most = 300
    found = hand_overs.hand_overs(SM90, SHAPE, most)
    launched = [hand_overs.launched(SM90, LinearProblem(M, *SHAPE)) for M in range(1, most + 1)]
    changed = {M for M in range(1, most) if launched[M - 1] != launched[M]}
    assert changed | {64, 128, 192, 256} == set(found)
    kernels = [each[0] for each in launched]
    assert len(set(kernels)) > 2
    assert all(M in found for M in range(1, most) if kernels[M - 1] != kernels[M])
    one_kernel = {M for M in changed if kernels[M - 1] == kernels[M]}
    assert one_kernel, "a kernel's own tiles change too"


@pytest.mark.parametrize(
    ("ours", "bf16", "over_bar"),
    [
        ((10.0, 11.0), (20.0, 20.0), 1.0),
        ((10.0, 12.6), (20.0, 24.0), 1.0),
        ((8.0, 11.0), (9, 9), 1.25),
    ],
)
def test_a_step_is_held_to_a_tenth_or_to_that_of_bf16(
    ours: tuple[float, float], bf16: tuple[float, float], over_bar: float
) -> None:
    times = dict(
        zip(("ours_us", "ours_next_us", "bf16_us", "bf16_next_us"), (*ours, *bf16), strict=True)
    )
    names = [hand_overs.launched(SM90, LinearProblem(M, *SHAPE))[0] for M in range(1, 301)]
    before = max(M for M in range(1, 301) if names[M - 1] == "wgmma_fp8")
    row = hand_overs.row_of(SM90, before, SHAPE, times)
    assert row["over_bar"] == pytest.approx(over_bar)
    assert row["step"] == ours[1] / ours[0] and row["bf16_step"] == bf16[1] / bf16[0]
    assert str(row["kernel"]).startswith("wgmma_fp8/")
    assert str(row["next_kernel"]).startswith(f"{names[before]}/")
    assert names[before] != "wgmma_fp8"


def test_cells_where_nothing_is_handed_over_any_more_are_left_out(tmp_path: Path) -> None:
    path, facts = tmp_path / "linear_hand_overs.csv", {"commit": "0123456"}
    saved = common.Saved(path, every_m.CELL, facts)
    for M, N, K in ((80, *SHAPE), (96, *SHAPE), (80, 64, 96)):
        saved.add({"M": M, "N": N, "K": K})
    again = common.Saved(path, every_m.CELL, facts | {"commit": "7654321"})
    again.forget(partial(hand_overs.is_gone, SHAPE, [64, 96]))
    again.add({"M": 64, "N": SHAPE[0], "K": SHAPE[1]})
    table = pd.read_csv(path, dtype={"commit": str})
    left = list(zip(table["N"], table["M"], table["commit"], strict=True))
    old, new = "0123456", "7654321"
    assert left == [(64, 80, old), (SHAPE[0], 64, new), (SHAPE[0], 96, old)]


def test_what_takes_turns_is_one_product_with_one_row_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (every_m, hand_overs):
        monkeypatch.setattr(module, "copies_to_stay_cold", lambda size: 3)
    weights = every_m.Weights(64, 96, torch.device("cpu"), with_peers=False)
    calls = hand_overs.calls_of(weights, 5)
    rows = {name: [call().shape[0] for call in of] for name, of in calls.items()}
    assert rows == {
        "ours_us": [5] * 3,
        "bf16_us": [5] * 3,
        "ours_next_us": [6] * 3,
        "bf16_next_us": [6] * 3,
    }
    for name in ("ours_us", "ours_next_us"):
        assert len({call.args[2].data_ptr() for call in calls[name]}) == 3
        last = calls[name][2]
        assert torch.equal(last(), aiter_mx.linear(*last.args))
