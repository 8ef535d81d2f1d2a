"""wgmma_bf16 for few rows on Hopper, which makes bf16 of x itself: csrc/linear/wgmma_bf16_sm90.cu.

Its sums are those of ``wgmma_bf16``, bit for bit, where as many parts of K are added. That is what
it is for: other kernels are faster, where bits may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear import wgmma_bf16_sm90 as many
from aiter_mx.kernels.linear.clusters_sm90 import w_map
from aiter_mx.kernels.linear.problem import MATRIX_ARGS, LinearProblem, matrix_scalars
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, RESERVED_BYTES, SHARED_BYTES, up
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Config,
    Geometry,
    KernelSpec,
    Param,
    Problem,
    TensorMap,
    numbers,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("tile_m", (8, 16, 24, 32), "tokens of a tile"),
    Param("split", (1, 2, 3, 4, 6, 8), "CTAs of a cluster, which share K"),
    Param("k_groups", (1, 2, 3, 4), "warpgroups of a CTA, which share its part of K"),
    Param("ctas", (1, 2, 3), "CTAs that an SM has room for"),
)
MAX_M = PARAMS[0].values[-1]
UNIT = 64  # k that are multiplied at a time
_BARRIERS_BYTES, _FLAG_BYTES = 1024, 1024  # of a warpgroup's stages; of the CTA
_HELPERS = {8: 1, 16: 1, 24: 2, 32: 2}  # warpgroups that make bf16 of x, by the tokens of a tile
_REGISTERS = {8: 80, 16: 96, 24: 96, 32: 96}  # of a thread, without which some spill
_MOST_AHEAD = 6  # chunks of both operands


class Layout(NamedTuple):
    """Stages of each warpgroup that multiplies, and the shared memory of a CTA."""

    x_stages: int
    w_stages: int
    shared_bytes: int


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    tile_m, split, k_groups, ctas = (config[param.name] for param in PARAMS)
    if split * k_groups > -(-problem.K // CHUNK):
        return None
    if ctas * _threads(config) * _REGISTERS[tile_m] > 1 << 16:
        return None
    room = (SHARED_BYTES + RESERVED_BYTES) // ctas - RESERVED_BYTES - _FLAG_BYTES
    ring = room // k_groups // 1024 * 1024 - _BARRIERS_BYTES
    x, w = tile_m * UNIT * 2, GROUP_ROWS * CHUNK
    sums = tile_m * (GROUP_ROWS + 4) * 4
    ahead = min(ring // (2 * x + w), _MOST_AHEAD)
    if ahead < 2 or sums > ahead * (2 * x + w):
        return None
    w_stages = ahead + min((ring - ahead * (2 * x + w)) // w, 2)
    of_group = up(2 * ahead * x + w_stages * w, 1024) + _BARRIERS_BYTES
    return Layout(2 * ahead, w_stages, k_groups * of_group + _FLAG_BYTES)


_layout = where_it_fits(layout)


def _threads(config: Config) -> int:
    return 128 * (config["k_groups"] + _HELPERS[config["tile_m"]])


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, for which wgmma_bf16 has tiles"
    for name in ("N", "K"):
        if (value := getattr(problem, name)) > MAX_INT:
            return f"{name}={value}: wgmma_bf16 counts it in 31 bits"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILE_M": config["tile_m"],
        "MX_GROUPS": 1,
        "MX_K_GROUPS": config["k_groups"],
        "MX_SPLIT": config["split"],
        "MX_PAIRS": 0,
        "MX_OWN_X": 1,
        "MX_SWAPPED": 0,
        "MX_F16": 0,
        "MX_HELPERS": _HELPERS[config["tile_m"]],
        "MX_X_STAGES": found.x_stages,
        "MX_W_STAGES": found.w_stages,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    tiles = -(-problem.M // config["tile_m"]) * -(-problem.N // GROUP_ROWS)
    return Geometry(
        grid=(tiles * config["split"], 1, 1),
        block=(_threads(config), 1, 1),
        shared_bytes=_layout(target, problem, config).shared_bytes,
        overlaps=problem.pdl,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return *matrix_scalars(problem), 0, 0, 0


def _weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return w_map(problem, GROUP_ROWS)


def config(M: int, split: int, k_groups: int, ctas: int) -> Config:
    """With the least tile that holds so many rows."""
    tile_m = next(tokens for tokens in PARAMS[0].values if tokens >= M)
    return {"tile_m": tile_m, "split": split, "k_groups": k_groups, "ctas": ctas}


def declare_few(configure: Callable[[Target, Problem], Config]) -> KernelSpec:
    """The kernel, with what chooses its configuration, if it has one."""

    def refuses(target: Target, problem: LinearProblem) -> str | None:
        why = _refusal(target, problem)
        if why is None and not problem.is_empty and not configure(target, problem):
            return "its CTAs are more than SMs: wgmma_bf16 has smaller ones"
        return why

    return declare(
        "linear",
        "wgmma_bf16_few",
        {"sm_90a": "linear/wgmma_bf16_sm90.cu"},
        symbol="aiter_mx_linear_wgmma_bf16",
        args=(*MATRIX_ARGS, *numbers("i32", *many.SCHEDULE)),
        defines=_defines,
        geometry=_geometry,
        scalars=_scalars,
        tensor_maps=(_weights,),
        refusal=refuses,
        params=PARAMS,
        configure=configure,
        yields=lambda target, problem: "the others are faster, where bits may depend on M",
    )
