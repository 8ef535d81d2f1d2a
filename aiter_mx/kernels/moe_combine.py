"""What adds up the routed rows of a token: csrc/moe/combine_<arch>.cu, Triton, torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    OUT_DTYPES,
    Arg,
    Config,
    Geometry,
    Param,
    numbers,
    pointers,
    reference,
    require,
)
from aiter_mx.kernels.triton import without_tiles
from aiter_mx.target import Target

MAX_SLOTS = 32  # whose loads are all under way at once
MAX_GROUPS_Y = 65535
ID_DTYPES = ("i32", "i64")
_LEAST_WIDTH = 4  # features of a thread


@dataclass(frozen=True)
class MoeCombineProblem:
    """``out[m] = sum over slots of weight[m, slot] * y[m * slots + slot]``.

    Attributes:
        M: tokens.
        N: features, a multiple of 4.
        top_k: slots of a token that are routed.
        E: experts that are routed to, on all ranks.
        shared: further slots of every token, of weight 1.
        y_dtype: of the routed rows.
        out_dtype: of the result.
        id_dtype: of the experts' ids, ``i32`` or ``i64``.
        sorted_y: whether y lies as the sorted ids do, and ``places[m * slots + slot]`` is the row
            of y, or -1 for none.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    top_k: int
    E: int
    shared: int = 0
    y_dtype: str = "fp32"
    out_dtype: str = "bf16"
    id_dtype: str = "i32"
    sorted_y: bool = False

    def __post_init__(self) -> None:
        known = {"y_dtype": OUT_DTYPES, "out_dtype": OUT_DTYPES, "id_dtype": ID_DTYPES}
        require(self, {"M": 0, "N": 0, "top_k": 1, "E": 1, "shared": 0}, known)
        if self.N % _LEAST_WIDTH:
            raise ValueError(f"N must be a multiple of {_LEAST_WIDTH}, got N={self.N}")


KEY = ("M", "N", "top_k", "E")


PARAMS = (Param("threads", (64, 128, 256), "threads of a workgroup"),)


def _refusal(target: Target, problem: MoeCombineProblem) -> str | None:
    if problem.top_k + problem.shared > MAX_SLOTS:
        return f"{problem.top_k + problem.shared} slots are above {MAX_SLOTS}, the most of combine"
    return None


def _width(target: Target, problem: MoeCombineProblem) -> int:
    """Features of a thread: on Hopper 16 bytes of 16-bit rows where a row is whole pieces."""
    wide = target.arch == "sm_90a" and problem.y_dtype != "fp32" and problem.N % 8 == 0
    return 2 * _LEAST_WIDTH if wide else _LEAST_WIDTH


def _configure(target: Target, problem: MoeCombineProblem) -> Config:
    """Small workgroups while large ones would be fewer than two for each compute unit; of wide
    pieces those of 128 threads, which leave fewer idle."""
    width = _width(target, problem)
    if problem.N // width * problem.M < 2 * 256 * target.cu_num:
        return {"threads": 64}
    return {"threads": 128 if width > _LEAST_WIDTH else 256}


def _defines(target: Target, problem: MoeCombineProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_TOP_K": problem.top_k,
        "MX_SHARED": problem.shared,
        "MX_MAX_THREADS": PARAMS[0].values[-1],
        "MX_MAX_GROUPS_Y": MAX_GROUPS_Y,
        "MX_Y": DTYPE_CODES[problem.y_dtype],
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_WIDE_IDS": int(problem.id_dtype == "i64"),
        "MX_SORTED": int(problem.sorted_y),
        **({"MX_WIDTH": _width(target, problem)} if target.arch == "sm_90a" else {}),
    }


def _geometry(target: Target, problem: MoeCombineProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(
            -(-problem.N // (_width(target, problem) * config["threads"])),
            min(problem.M, MAX_GROUPS_Y),
            1,
        ),
        block=(config["threads"], 1, 1),
        overlaps=target.arch == "sm_90a",
    )


_ARGS = (
    Arg("y", "pointer", "r"),
    Arg("places", "pointer", "r"),  # i32 [M * slots], or null
    *pointers("r", "topk_ids", "topk_weights", "expert_map", "num_tokens"),
    Arg("out", "pointer", "w"),
    Arg("N", "i64"),
    *numbers("i32", "M", "E", "threads"),
)

PROBLEM = MoeCombineProblem

KERNELS = (
    declare(
        "moe_combine",
        "combine",
        {"gfx950": "moe/combine_gfx950.cu", "sm_90a": "moe/combine_sm90.cu"},
        symbol="aiter_mx_moe_combine",
        args=_ARGS,
        defines=_defines,
        geometry=_geometry,
        scalars=lambda target, problem, config: (
            *(problem.N, problem.M, problem.E),
            config["threads"],
        ),
        refusal=_refusal,
        params=PARAMS,
        configure=_configure,
    ),
    without_tiles("moe_combine", "combine"),
    reference("moe_combine"),
)
