"""One variant of each source that there is for Hopper."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

from aiter_mx.kernels.group_runs import GroupRunsProblem
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.in_place_sm90 import IN_PLACE
from aiter_mx.kernels.grouped_gemm.rescaled_sm90 import RESCALED
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_bf16_sm90 import WGMMA_BF16
from aiter_mx.kernels.linear.wgmma_f16_tiled_sm90 import EXPAND_X, WGMMA_F16_TILED
from aiter_mx.kernels.linear.wgmma_fp8_rescaled_sm90 import WGMMA_FP8_RESCALED
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import WGMMA_FP8
from aiter_mx.kernels.linear.wgmma_fp8_tiled_sm90 import WGMMA_FP8_TILED
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, LAYOUTS
from aiter_mx.kernels.moe_gemm.rescaled_sm90 import IN_PLACE as IN_PLACE_ROUTED
from aiter_mx.kernels.moe_gemm.rescaled_sm90 import RESCALED as RESCALED_ROUTED
from aiter_mx.kernels.promoted_gemm import PromotedGemmProblem
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.registry import kernels_of, ops
from aiter_mx.kernels.rmsnorm_quantize import RMSNormQuantizeProblem
from aiter_mx.kernels.spec import Config, Module, Problem
from aiter_mx.target import hardware

SM90 = hardware("sm_90a")
# What each kernel has of an op is tried with the first of these that it takes.
PROBLEMS: dict[str, list[Problem]] = {
    "group_runs": [GroupRunsProblem(8192, 4096, 8)],
    "grouped_gemm": [GroupedGemmProblem(8192, 4096, 2048, 8)],
    "grouped_wgrad": [GroupedWgradProblem(8192, 4096, 2048, 8)],
    "linear": [LinearProblem(M, 2304, 6144) for M in (1, 8, 64, 512, 4096)],
    "moe_align": [MoeAlignProblem(8, 4, 128, 16, x_dtype="bf16", K=6144)],
    "moe_combine": [MoeCombineProblem(8, 6144, 4, 128)],
    "moe_gemm": [MoeGemmProblem(M, 1536, 6144, 128, 4, 32, "mxfp8", "silu") for M in (16, 512)],
    "promoted_gemm": [PromotedGemmProblem(8192, 4096, 2048, 8)],
    "rmsnorm_quantize": [RMSNormQuantizeProblem(8, 6144, N2=512, residual=1)],
    "quantize": [QuantizeProblem(64, 64), QuantizeProblem(8192, 8192, "bf16", "both")],
}


def launches() -> dict[str, tuple[Module, Problem, Config]]:
    """One variant of each source that a kernel of ours has for Hopper."""
    found: dict[str, tuple[Module, Problem, Config]] = {}
    for op in ops():
        for kernel in kernels_of(op):
            if kernel.backend != "hip" or not kernel.is_for("sm_90a"):
                continue
            taken = [p for p in PROBLEMS[op] if kernel.refusal(SM90, p) is None]
            assert taken, f"say in PROBLEMS what {op}/{kernel.name} is tried with"
            config = kernel.configure(SM90, taken[0])
            around = kernel.composed.around(taken[0]) if kernel.composed else ()
            for module in (*kernel.modules, *around):
                name = module.sources["sm_90a"]
                defines = module.defines(SM90, taken[0], config)
                if name in found and {"MX_WGRAD", "MX_ROUTED"} & set(defines):
                    name += f" of {op}"
                found.setdefault(name, (module, taken[0], config))
    shared, module = LinearProblem(8, 1536, 6144, pdl=True), WGMMA_FP8.module
    assert module is not None
    config = WGMMA_FP8.configure(SM90, shared)
    assert config["per_sm"] > 1
    found["linear/wgmma_fp8_sm90.cu of several on an SM"] = (module, shared, config)
    tiled, module = LinearProblem(300, 2304, 3072), WGMMA_FP8_TILED.module
    assert module is not None
    for config in WGMMA_FP8_TILED.candidates(SM90, tiled):
        name = "linear/wgmma_fp8_sm90.cu in tiles " + "x".join(map(str, config.values()))
        found[name] = (module, tiled, config)
    # CTAs of which one warpgroup multiplies and stores what it comes to.
    narrow, module = LinearProblem(65, 2304, 6144), WGMMA_BF16.module
    assert module is not None
    for pairs in (0, 66):
        config = {"tile_m": 96, "tile_n": 64, "split": 1, "pairs": pairs}
        found[f"linear/wgmma_bf16_sm90.cu of {pairs} pairs"] = (module, narrow, config)
    over_f16 = WGMMA_F16_TILED.module
    assert over_f16 is not None
    for tile_m, pairs in product((96, 128), (0, 66)):
        config = {"tile_m": tile_m, "tile_n": 128, "split": 1, "pairs": pairs}
        name = f"linear/wgmma_bf16_sm90.cu over fp16, {tile_m} tokens and {pairs} pairs"
        found[name] = (over_f16, tiled, config)
    unquantised = replace(tiled, x_dtype="bf16")
    found["linear/wgmma_bf16_x_sm90.cu that quantises"] = (EXPAND_X, unquantised, config)
    rescale, rescaled = WGMMA_FP8_RESCALED.modules
    many = LinearProblem(2048, 4096, 4096)
    config = WGMMA_FP8_RESCALED.configure(SM90, many)
    found["linear/wgmma_bf16_x_sm90.cu that quantises fp16"] = (
        rescale,
        replace(many, x_dtype="fp16"),
        config,
    )
    of_fp16 = replace(many, out_dtype="fp16")
    found["linear/wgmma_fp8_rescaled_sm90.cu to fp16"] = (rescaled, of_fp16, config)
    return found | _rescaled_groups()


def _rescaled_groups() -> dict[str, tuple[Module, Problem, Config]]:
    """Grouped GEMMs over rescaled operands to fp16, and of routed rows with each activation."""
    groups, routed = (PROBLEMS[op][0] for op in ("grouped_gemm", "moe_gemm"))
    sorted_out = replace(routed, out_dtype="bf16", activation="none", sorted_out=True)
    tried = []
    for of_groups, of_routed in ((RESCALED, RESCALED_ROUTED), (IN_PLACE, IN_PLACE_ROUTED)):
        tried += [("fp16", of_groups, replace(groups, out_dtype="fp16"))]
        tried += [
            (f"routed {dtype}", of_routed, replace(sorted_out, out_dtype=dtype))
            for dtype in ("bf16", "fp16")
        ]
        tried += [
            (f"{kind} of {layout}", of_routed, replace(routed, activation=kind, layout=layout))
            for kind, layout in zip([*ACTIVATION_CODES][1:], cycle(LAYOUTS), strict=False)
        ]
    found = {}
    for what, kernel, problem in tried:
        config = kernel.configure(SM90, problem)
        module = kernel.modules[-1]  # those ahead are of the same object
        found[f"{module.sources['sm_90a']} to {what}"] = (module, problem, config)
    return found
