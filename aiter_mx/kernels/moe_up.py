"""The first half of an expert layer of few tokens: csrc/moe/up_gfx950.cu, torch.

For each slot of each token whose expert is here

    h[m * slots + slot] = activation(quantised(x[m]) @ w[expert].T + bias[expert])

in fp32, where x is quantised as ``quantize(mode="rceil")`` does unless it comes quantised. Rows of
other slots, and of tokens from ``num_tokens`` on, are not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.gfx950 import PRELOADED
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, LAYOUTS
from aiter_mx.kernels.spec import (
    BIAS_DTYPES,
    DTYPE_CODES,
    MAX_INT,
    OUT_DTYPES,
    Arg,
    Config,
    Geometry,
    Param,
    Problem,
    numbers,
    pointers,
    reference,
    require,
    require_blocks,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

ID_DTYPES = ("i32", "i64")
X_DTYPES = (*OUT_DTYPES, "mxfp8")
MAX_ROUTED = 65535  # the grid's y
STEP = 1024  # k of half an operand of the matrix unit, as a wave is given it
WAVES = (1, 2, 3, 4, 5, 6, 8, 9, 12)
_GROUP_BYTES = 48 << 10
_WORTH_A_CODE = 1.03  # of what the busiest compute unit reads


@dataclass(frozen=True)
class MoeUpProblem:
    """The first GEMM of an expert layer, without a list of routed rows.

    Attributes:
        M: tokens.
        N: gate and up rows of an expert's w, a multiple of 64.
        K: elements of the reduction, a multiple of 32.
        E: experts here, shared ones included.
        top_k: slots of a token that are routed.
        num_experts: experts that are routed to, on all ranks.
        shared: further slots of every token, for the last of the experts here.
        has_map: 1: an expert map says which experts are here.
        activation: as of ``MoeGemmProblem``, never ``none``.
        layout: where gate and up rows stand, ``halves`` or ``interleaved``.
        x_dtype: of the tokens; ``mxfp8`` where they come quantised.
        bias: dtype of the bias, or ``none``.
        id_dtype: of the experts' ids, ``i32`` or ``i64``.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai.

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
    activation: str = "silu"
    layout: str = "halves"
    x_dtype: str = "bf16"
    bias: str = "none"
    id_dtype: str = "i32"
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0

    def __post_init__(self) -> None:
        known = {
            "activation": tuple(ACTIVATION_CODES)[1:],
            "layout": LAYOUTS,
            "x_dtype": X_DTYPES,
            "bias": BIAS_DTYPES,
            "id_dtype": ID_DTYPES,
        }
        least = {"M": 0, "N": 0, "E": 1, "top_k": 1, "num_experts": 1, "shared": 0}
        require(self, least, known)
        require_blocks("K", self.K)
        if self.N % (2 * BLOCK):
            raise ValueError(f"N must be a multiple of {2 * BLOCK}, got N={self.N}")

    @property
    def slots(self) -> int:
        """Routed rows of a token."""
        return self.top_k + self.shared


KEY = ("M", "N", "K", "E", "top_k", "num_experts")


PARAMS = (
    Param("features", (1, 2, 3, 4, 6, 8), "activated features that a workgroup computes"),
    Param("waves", WAVES, "waves of a workgroup, which split K"),
    Param("halves", (1, 2), "halves of an operand, 1024 k each, that a wave takes in a step"),
)


def refuse_bytes(expert_bytes: int) -> str | None:
    """Why weights that one descriptor is to cover are too many, or None."""
    if expert_bytes > MAX_INT:
        return f"{expert_bytes} bytes of weights are above {MAX_INT}, as 32-bit offsets demand"
    return None


def refusal(problem: MoeUpProblem) -> str | None:
    """Why the kernel does not cover a problem, or None."""
    if problem.M * problem.slots > MAX_ROUTED:
        return f"{problem.M * problem.slots} routed rows are above {MAX_ROUTED}, a grid's most"
    return refuse_bytes(max(problem.N, 4) * problem.K)


def split_of_k(steps: int, parts: int = 1) -> Config:
    """Waves and halves of a step, such that few have nothing to do.

    Args:
        steps: of half an operand each.
        parts: whose steps no wave shares: slots, each with as many.
    """
    halves = 1 if steps == 1 else 2
    every = -(-steps // halves) * parts
    rounds = -(-every // WAVES[-1])
    waves = next(waves for waves in WAVES if waves * rounds >= every)
    return {"waves": waves, "halves": halves}


def rows_a_group(
    target: Target,
    rows: int,
    tokens: int,
    of_token: int,
    row_bytes: int,
    group_bytes: int,
    most: int,
) -> int:
    """Of those that give the busiest compute unit the least to read, what has a workgroup read
    about ``group_bytes``: workgroups start one after the other, and large ones end late. What suits
    one token serves more of them, so that few code objects do, unless another reads much less."""
    widths = [width for width in PARAMS[0].values if width <= most]

    def of_busiest(width: int, tokens: int) -> int:
        return -(-(-(-rows // width) * of_token * tokens) // target.cu_num) * width

    def best(tokens: int) -> int:
        return min(widths, key=lambda w: (of_busiest(w, tokens), abs(w * row_bytes - group_bytes)))

    first, own = best(1), best(tokens)
    return first if of_busiest(first, tokens) <= _WORTH_A_CODE * of_busiest(own, tokens) else own


def _configure(target: Target, problem: MoeUpProblem) -> Config:
    M, row_bytes = max(1, problem.M), 2 * problem.K
    features = rows_a_group(
        target, problem.N // 2, M, problem.slots, row_bytes, _GROUP_BYTES, most=4
    )
    return {"features": features, **split_of_k(-(-problem.K // STEP))}


def defines(problem: Problem, config: Config) -> dict[str, int]:
    """What the kernels of both halves of a layer are told."""
    return {
        "MX_PRELOAD": PRELOADED,
        "MX_WAVES": config["waves"],
        "MX_HALVES": config["halves"],
        "MX_TOP_K": problem.top_k,
        "MX_SHARED": problem.shared,
        "MX_SCALE_DWORDS": int(problem.K % (4 * BLOCK) == 0),
        "MX_HAS_MAP": problem.has_map,
        "MX_WIDE_IDS": int(problem.id_dtype == "i64"),
    }


def _defines(target: Target, problem: MoeUpProblem, config: Config) -> Mapping[str, int]:
    return defines(problem, config) | {
        "MX_ROWS": 2 * config["features"],
        "MX_ONCE": int(config["waves"] * config["halves"] * STEP >= problem.K),
        "MX_X": DTYPE_CODES.get(problem.x_dtype, 0),
        "MX_OUT": DTYPE_CODES["fp32"],
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(problem.layout == "interleaved"),
    }


def _geometry(target: Target, problem: MoeUpProblem, config: Config) -> Geometry:
    groups = -(-problem.N // 2 // config["features"])
    return Geometry(
        grid=(groups, problem.slots, problem.M),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _scalars(target: Target, problem: MoeUpProblem, config: Config) -> tuple[int | float, ...]:
    return (
        *(problem.N, problem.K, problem.num_experts, problem.E),
        *(DTYPE_CODES[problem.bias], problem.alpha, problem.beta, problem.limit),
    )


_ARGS = (
    *pointers("r", "topk_ids", "expert_map", "num_tokens", "x", "xs", "wq", "ws", "bias"),
    Arg("h", "pointer", "w"),
    *numbers("i32", "N", "K", "num_experts", "E", "bias_kind"),
    *numbers("f32", "alpha", "beta", "limit"),
)

PROBLEM = MoeUpProblem

KERNELS = (
    declare(
        "moe_up",
        "gemv",
        {"gfx950": "moe/up_gfx950.cu"},
        symbol="aiter_mx_moe_up",
        args=_ARGS,
        defines=_defines,
        geometry=_geometry,
        scalars=_scalars,
        refusal=lambda target, problem: refusal(problem),
        params=PARAMS,
        configure=_configure,
    ),
    reference("moe_up"),
)
