"""The second half of an expert layer of few tokens: csrc/moe/down_gfx950.cu, torch.

For each token, over the slots whose expert is here

    out[m] = sum of weight[m, slot] * (quantised(h[m, slot]) @ w[expert].T + bias[expert])

where a shared slot's weight is 1. The kernel has weights times parts of K, whose signs differ: what
an infinite weight makes infinite here is NaN there. h is fp32 and quantised as
``quantize(mode="rceil")`` does. Rows of tokens from ``num_tokens`` on are not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.moe_up import (
    ID_DTYPES,
    MAX_ROUTED,
    STEP,
    WAVES,
    defines,
    refuse_bytes,
    rows_a_group,
    split_of_k,
)
from aiter_mx.kernels.spec import (
    BIAS_DTYPES,
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
    require_blocks,
)
from aiter_mx.target import Target

_GROUP_BYTES = 24 << 10
MAX_SLOTS = 16  # each lane looks through them


@dataclass(frozen=True)
class MoeDownProblem:
    """The second GEMM of an expert layer and the sum over a token's slots.

    Attributes:
        M: tokens.
        N: features of the result.
        K: activated features, a multiple of 32.
        E: experts here, shared ones included.
        top_k: slots of a token that are routed.
        num_experts: experts that are routed to, on all ranks.
        shared: further slots of every token, for the last of the experts here.
        has_map: 1: an expert map says which experts are here.
        out_dtype: of the result.
        bias: dtype of the bias, or ``none``.
        id_dtype: of the experts' ids, ``i32`` or ``i64``.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    K: int
    E: int
    top_k: int
    num_experts: int
    shared: int = 0
    has_map: int = 0
    out_dtype: str = "bf16"
    bias: str = "none"
    id_dtype: str = "i32"

    def __post_init__(self) -> None:
        known = {"out_dtype": OUT_DTYPES, "bias": BIAS_DTYPES, "id_dtype": ID_DTYPES}
        least = {"M": 0, "N": 0, "E": 1, "top_k": 1, "num_experts": 1, "shared": 0}
        require(self, least, known)
        require_blocks("K", self.K)

    @property
    def slots(self) -> int:
        """Routed rows of a token."""
        return self.top_k + self.shared


KEY = ("M", "N", "K", "E", "top_k", "num_experts")


PARAMS = (
    Param("rows", (1, 2, 3, 4, 6, 8), "features that a workgroup computes"),
    Param("waves", WAVES, "waves of a workgroup, which split the k of all slots"),
    Param("halves", (1, 2), "halves of an operand, 1024 k each, that a wave takes in a step"),
)


def refusal(problem: MoeDownProblem) -> str | None:
    """Why the kernel does not cover a problem, or None."""
    if problem.slots > MAX_SLOTS:
        return f"{problem.slots} slots are above {MAX_SLOTS}, the most that a lane looks through"
    if problem.M > MAX_ROUTED:
        return f"M={problem.M} is above {MAX_ROUTED}, a grid's most"
    most_rows = problem.E * problem.N + PARAMS[0].values[-1]
    return refuse_bytes(most_rows * problem.K) or refuse_bytes(4 * problem.slots * problem.K)


def _configure(target: Target, problem: MoeDownProblem) -> Config:
    M, row_bytes = max(1, problem.M), problem.slots * problem.K
    rows = rows_a_group(target, problem.N, M, 1, row_bytes, _GROUP_BYTES, most=8)
    return {"rows": rows, **split_of_k(-(-problem.K // STEP), problem.slots)}


def _defines(target: Target, problem: MoeDownProblem, config: Config) -> Mapping[str, int]:
    return defines(problem, config) | {
        "MX_ROWS": config["rows"],
        "MX_STEPS": -(-problem.K // (STEP * config["halves"])),
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
    }


def _geometry(target: Target, problem: MoeDownProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(-(-problem.N // config["rows"]), problem.M, 1),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _scalars(target: Target, problem: MoeDownProblem, config: Config) -> tuple[int | float, ...]:
    return (problem.N, problem.K, problem.num_experts, problem.E, DTYPE_CODES[problem.bias])


_ARGS = (
    *pointers("r", "h", "topk_ids", "topk_weights", "expert_map", "num_tokens", "wq", "ws", "bias"),
    Arg("out", "pointer", "w"),
    *numbers("i32", "N", "K", "num_experts", "E", "bias_kind"),
)

PROBLEM = MoeDownProblem

KERNELS = (
    declare(
        "moe_down",
        "gemv",
        {"gfx950": "moe/down_gfx950.cu"},
        symbol="aiter_mx_moe_down",
        args=_ARGS,
        defines=_defines,
        geometry=_geometry,
        scalars=_scalars,
        refusal=lambda target, problem: refusal(problem),
        params=PARAMS,
        configure=_configure,
    ),
    reference("moe_down"),
)
