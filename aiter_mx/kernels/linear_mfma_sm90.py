"""The Hopper kernel of the linear for up to 64 rows of x, csrc/linear_mfma_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    combinations,
)
from aiter_mx.target import Target


class Shape(Protocol):
    """What of a linear's problem the kernel depends on."""

    @property
    def M(self) -> int: ...

    @property
    def N(self) -> int: ...

    @property
    def K(self) -> int: ...

    @property
    def out_dtype(self) -> str: ...

    @property
    def bias(self) -> str: ...


PARAMS = (
    Param("split", (1, 2, 3, 4, 5, 6, 7, 8), "workgroups of a cluster, which share K"),
    Param("groups", (1, 2, 3), "consumer warpgroups of a workgroup, which share its K"),
    Param("units", (2, 3, 4, 6, 8), "at most so many times 64 k in one stage of the ring"),
    Param("per_cu", (1, 2, 3), "workgroups that an SM is to hold"),
)

MAX_M = 64
_TILES_M = (8, 16, 32, 64)
_UNIT = 64  # k of the four wgmmas that a 16-byte load of each lane feeds
_ROWS = 64  # of w in a tile
_GROUP_THREADS = 128
_PRODUCER_THREADS = 128
_SM_SHARED_BYTES = 228 * 1024  # CUDA C++ programming guide, compute capability 9.0
_RESERVED_BYTES = 1024 + 512  # a workgroup's own of the driver, and the kernel's barriers
_MOST_STAGES = 12
_FEWEST_STAGES = 2


@dataclass(frozen=True)
class Layout:
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        tile_m: rows of x with padding.
        units: most units of a chunk, chunks being as equal as the slice of K allows.
        stages: chunks of weights that fit shared memory.
        x_slots: chunks of x that fit beside them, for each group; all of its K, or else 1.
        shared_bytes: of a workgroup, dynamic.
    """

    tile_m: int
    units: int
    stages: int
    x_slots: int
    shared_bytes: int


def layout(problem: Shape, config: Config) -> Layout | None:
    """The layout of shared memory, or None where a configuration does not fit."""
    split, groups = config["split"], config["groups"]
    tile_m = next(tile for tile in _TILES_M if tile >= problem.M)
    slice_units = -(-problem.K // (_UNIT * split))
    chunks = -(-slice_units // (groups * config["units"]))  # of a group
    units = -(-slice_units // (groups * chunks))
    odd = units % 2  # else rows are padded, so that lanes meet in no bank
    stage = _ROWS * (units * _UNIT + (0 if odd else 64)) + _ROWS * 4 * (2 * units + 2 - 2 * odd)
    x_slot = groups * units * _UNIT * tile_m * 2
    partials = -(-(tile_m // 4) // split) * split * groups * _GROUP_THREADS * 8
    budget = _SM_SHARED_BYTES // config["per_cu"] - _RESERVED_BYTES - partials
    for x_slots in (chunks, 1):
        stages = min(_MOST_STAGES, (budget - x_slots * x_slot) // stage) // groups * groups
        if stages >= _FEWEST_STAGES:
            shared = stages * stage + x_slots * x_slot + partials
            return Layout(tile_m, units, stages, x_slots, shared)
    return None


def _layout(problem: Shape, config: Config) -> Layout:
    found = layout(problem, config)
    if found is None:
        raise ValueError(f"{dict(config)} needs more shared memory than there is for {problem}")
    return found


def _refusal(target: Target, problem: Shape) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no wgmma kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of mfma"
    return None


def _fits(problem: Shape, config: Config) -> bool:
    threads = config["groups"] * _GROUP_THREADS + _PRODUCER_THREADS
    # 64 outputs take most of the 168 registers that 384 threads can have.
    most_threads = 768 if problem.M <= 32 else 512
    return threads * config["per_cu"] <= most_threads and layout(problem, config) is not None


def _candidates(target: Target, problem: Shape) -> list[Config]:
    return [config for config in combinations(PARAMS) if _fits(problem, config)]


def _configure(target: Target, problem: Shape) -> Config:
    return {"split": 4, "groups": 2, "units": 4, "per_cu": 1}


def _defines(target: Target, problem: Shape, config: Config) -> Mapping[str, int]:
    found = _layout(problem, config)
    return {
        "MX_TILE_M": found.tile_m,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SPLIT": config["split"],
        "MX_GROUPS": config["groups"],
        "MX_PER_CU": config["per_cu"],
        "MX_UNITS": found.units,
        "MX_STAGES": found.stages,
        "MX_X_SLOTS": found.x_slots,
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _clusters(target: Target, problem: Shape, config: Config) -> int:
    """As many as the GPU holds at once, or fewer that take no more rounds."""
    tiles = -(-problem.N // _ROWS)
    most = max(1, target.cu_num * config["per_cu"] // config["split"])
    rounds = -(-tiles // most)
    return -(-tiles // rounds)


def _geometry(target: Target, problem: Shape, config: Config) -> Geometry:
    return Geometry(
        grid=(_clusters(target, problem, config) * config["split"], 1, 1),
        block=(config["groups"] * _GROUP_THREADS + _PRODUCER_THREADS, 1, 1),
        shared_bytes=_layout(problem, config).shared_bytes,
    )


def _scalars(target: Target, problem: Shape, config: Config) -> tuple[int | float, ...]:
    return (problem.M, problem.N, problem.K, DTYPE_CODES[problem.bias])


MODULE = Module(
    sources={"sm_90a": "linear_mfma_sm90.cu"},
    symbol="aiter_mx_linear_mfma",
    args=(
        Arg("xq", "pointer", "r"),
        Arg("xs", "pointer", "r"),
        Arg("wq", "pointer", "r"),
        Arg("ws", "pointer", "r"),
        Arg("bias", "pointer", "r"),
        Arg("y", "pointer", "w"),
        Arg("M", "i64"),
        Arg("N", "i64"),
        Arg("K", "i64"),
        Arg("bias_kind", "i32"),
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
)

MFMA = KernelSpec(
    op="linear",
    backend="hip",
    name="mfma",
    params=PARAMS,
    refusal=_refusal,
    configure=_configure,
    candidates=_candidates,
    module=MODULE,
)
