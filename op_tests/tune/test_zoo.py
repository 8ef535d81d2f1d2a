"""What the race against having fewer kernels takes for a problem, and what it keeps of others."""

from __future__ import annotations

from pathlib import Path

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.target import hardware
from tune import zoo

SM90 = hardware("sm_90a")
SHAPES = Path(zoo.__file__).with_name("zoo_linear.csv")


def test_what_dispatch_takes_is_raced_against_the_other_kernels() -> None:
    races = [*zoo._of_shapes(SM90, SHAPES, {"linear": {"wgmma_f16"}}, 1, {})]
    assert len({(each.why, each.problem) for each in races}) == len(races)
    for each in races:
        assert each.now.kernel == route("linear", SM90, each.problem).kernel
        others = [other.kernel for other in each.others]
        assert others and not {each.now.kernel, "wgmma_f16"} & set(others)
    taken = {each.now.kernel for each in races}
    assert taken >= {"wgmma_fp8", "wgmma_fp8_tiled", "wgmma_bf16", "wgmma_fp8_rescaled"}


def test_a_race_that_another_kernel_has_now_takes_the_place_of_the_old_one() -> None:
    def row(shape: str, kernel: str, us: float) -> dict[str, object]:
        return {"why": "24 to 64 rows", "op": "linear", "shape": shape, "kernel": kernel, "us": us}

    kept = [row("M=24", "wgmma_fp8", 6.0), row("M=32", "wgmma_fp8", 7.0)]
    again = [row("M=32", "mma_ring", 5.0), row("M=48", "mma_ring", 8.0)]
    assert zoo._joined(kept, again) == [kept[0], *again]
