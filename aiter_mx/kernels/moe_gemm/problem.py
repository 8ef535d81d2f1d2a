"""What a grouped GEMM over routed tokens asks for, and what its kernels are told.

A row of the result is a *routed row* ``t = token * top_k + slot``. The routing (``moe_align``,
``moe_sort``) lists routed rows expert by expert, each expert's list padded to whole blocks of
``block_m`` ids, and names the expert of each block. For every block and every id ``t`` in it that
is valid

    out[t] = epilogue(x[t // a_div] @ w[expert].T + bias[expert]) * weight of t

A kernel must keep to this:

- There are ``min(ceil(num_tokens_post_padded[0] / block_m), max_blocks)`` blocks, read on the
  device; what the buffers hold beyond them is not looked at.
- An id is invalid, and its row is left alone, where ``t < 0`` or ``t >= num_valid_tokens`` (vLLM's
  ids), or ``token >= num_valid_tokens / top_k`` or ``slot >= top_k`` (aiter's, ``slot << 24 |
  token``). Valid ids may stand anywhere in a block, and a block may have none.
- An expert outside ``0 .. num_experts - 1``, such as -1 for one that is not local, makes its
  block's valid rows zero: payload 0 with scale byte 0 where the result is MX-FP8.
- With an activation, w has gate and up rows, and the result is MX-FP8: ``out[t]`` e4m3
  ``[N / 2]`` and ``out_scales[t]`` e8m0 ``[N / 64]``, quantised as ``quantize(mode="rceil")`` does
  from the fp32 activation. ``halves``: feature n is made of w's rows n (gate) and N / 2 + n (up);
  ``interleaved``: of rows 2 n and 2 n + 1. Weights are not multiplied in then.
- With ``sorted_out`` the result is ``[max_blocks * block_m, N]`` and has the row of an id in the
  id's place; ``out_scales`` gets the place of each valid row, int32 ``[num_valid_tokens]``, or -1
  for one whose block's expert is outside. Rows of no id, and of such a block, hold anything.
- Nothing is accumulated in ``out``, and results are the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.spec import (
    BIAS_DTYPES,
    DTYPE_CODES,
    OUT_DTYPES,
    Arg,
    Config,
    KernelSpec,
    Key,
    require,
    require_blocks,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

ARGS = (
    Arg("xq", "pointer", "r"),  # e4m3 [rows, K]
    Arg("xs", "pointer", "r"),  # e8m0 [rows, K / 32]
    Arg("wq", "pointer", "r"),  # e4m3 [E, N, K]
    Arg("ws", "pointer", "r"),  # e8m0 [E, N, K / 32]
    Arg("sorted_token_ids", "pointer", "r"),  # i32 [at least max_blocks * block_m]
    Arg("expert_ids", "pointer", "r"),  # i32 [at least max_blocks]
    Arg("num_tokens_post_padded", "pointer", "r"),  # i32 [1]
    Arg("topk_weights", "pointer", "r"),  # f32, by t or by place in sorted_token_ids; or null
    Arg("bias", "pointer", "r"),  # [E, N] of dtype bias_kind, or null
    Arg("out", "pointer", "w"),  # [num_valid_tokens, N], with an activation e4m3 [.., N / 2]
    Arg("out_scales", "pointer", "w"),  # e8m0 [num_valid_tokens, N / 64], places, or null
    Arg("N", "i64"),
    Arg("K", "i64"),
    Arg("num_experts", "i32"),
    Arg("num_valid_tokens", "i32"),
    Arg("a_div", "i32"),
    Arg("packed_top_k", "i32"),  # 0: vLLM's ids; else aiter's, and top_k
    Arg("weights_by_place", "i32"),  # 1: topk_weights lies as sorted_token_ids does
    Arg("max_blocks", "i32"),
    Arg("block_m", "i32"),
    Arg("bias_kind", "i32"),  # code of the bias's dtype
    Arg("alpha", "f32"),  # of swiglu_oai, as the two after it
    Arg("beta", "f32"),
    Arg("limit", "f32"),
)
"""The arguments of every kernel of ``moe_gemm``, on every target."""

_OUT_DTYPES = (*OUT_DTYPES, "mxfp8")
IDS = ("vllm", "aiter")
LAYOUTS = ("halves", "interleaved")
WEIGHTS = ("none", "by_t", "by_place")
ACTIVATION_CODES = {  # csrc/moe/moe.h
    "none": 0,
    "silu": 1,
    "swiglu_oai": 2,
    "gelu": 3,
    "gelu_tanh": 4,
    "relu2": 5,
}
MAX_ROUTED = 1 << 31
MAX_PACKED_TOKENS = 1 << 24
MAX_PACKED_TOP_K = 1 << 7


@dataclass(frozen=True)
class MoeGemmProblem:
    """A grouped GEMM over routed tokens, as this module's docstring defines it.

    Attributes:
        M: tokens that are routed.
        N: rows of an expert's w: output features, or gate and up rows with an activation.
        K: elements of the reduction, a multiple of 32.
        E: experts whose weights are here.
        top_k: routed rows of a token.
        block_m: ids of a block, a multiple of 4.
        out_dtype: ``bf16``, ``fp16`` or ``fp32``; with an activation ``mxfp8``.
        activation: ``none``; ``silu`` (silu(gate) * up), ``gelu``, ``gelu_tanh`` or ``relu2``
            (relu(gate)^2 * up); or ``swiglu_oai`` ((up' + beta) * gate' *
            sigmoid(alpha * gate'), gate' = min(gate, limit), up' within -limit to limit).
        layout: where gate and up rows stand, ``halves`` or ``interleaved``.
        bias: dtype of the bias, or ``none``.
        weights: index of ``topk_weights``: ``by_t``, ``by_place`` in the sorted ids, or ``none``.
        ids: encoding of the sorted ids, ``vllm`` or ``aiter``.
        a_div: routed rows that share a row of x.
        max_blocks: blocks that the routing's buffers have room for; -1 for the most that
            ``moe_align`` makes.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai.
        num_experts: experts that tokens choose among, on all ranks; 0 for those here. The routing
            leaves out rows of the others.
        early_routing: whether the routing was complete before the kernel ahead in the stream began,
            so that a launch that overlaps with that one may use it already.
        expected: tokens of the M that are expected to be routed, for which a configuration is
            chosen; 0 for all of them.
        sorted_out: whether the result lies as the sorted ids do, without an activation or weights.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    K: int
    E: int
    top_k: int
    block_m: int = 64
    out_dtype: str = "bf16"
    activation: str = "none"
    layout: str = "halves"
    bias: str = "none"
    weights: str = "none"
    ids: str = "vllm"
    a_div: int = 1
    max_blocks: int = -1
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0
    num_experts: int = 0
    early_routing: bool = False
    expected: int = 0
    sorted_out: bool = False

    def __post_init__(self) -> None:
        known = {
            "out_dtype": _OUT_DTYPES,
            "activation": tuple(ACTIVATION_CODES),
            "layout": LAYOUTS,
            "bias": BIAS_DTYPES,
            "weights": WEIGHTS,
            "ids": IDS,
        }
        require(self, {"M": 0, "N": 0, "E": 1, "top_k": 1, "a_div": 1}, known)
        require_blocks("K", self.K)
        if self.block_m <= 0 or self.block_m % 4:
            raise ValueError(f"block_m must be a multiple of 4, got {self.block_m}")
        if (self.activation != "none") != (self.out_dtype == "mxfp8"):
            raise ValueError(
                f"an activation and out_dtype='mxfp8' go together, got {self.activation!r} and "
                f"{self.out_dtype!r}"
            )
        if self.activation != "none" and self.N % (2 * BLOCK):
            raise ValueError(
                f"N must be a multiple of {2 * BLOCK} with an activation, got N={self.N}"
            )
        if self.activation != "none" and self.weights != "none":
            raise ValueError("routing weights cannot be multiplied in where there is an activation")
        if self.sorted_out and (self.activation, self.weights) != ("none", "none"):
            raise ValueError("sorted_out goes with neither an activation nor routing weights")
        for name in ("top_k", "a_div", "block_m"):  # which kernels take as 32 bits
            if getattr(self, name) >= MAX_ROUTED:
                raise ValueError(f"{name} must be below 2^31, got {getattr(self, name)}")
        if self.routed >= MAX_ROUTED:
            raise ValueError(f"M * top_k must be below 2^31, got {self.routed}")
        if self.ids == "aiter" and (self.M >= MAX_PACKED_TOKENS or self.top_k > MAX_PACKED_TOP_K):
            raise ValueError(
                f"aiter's ids hold fewer than 2^24 tokens and at most {MAX_PACKED_TOP_K} slots, "
                f"got M={self.M} and top_k={self.top_k}"
            )

    def as_expected(self) -> MoeGemmProblem:
        """The problem of the tokens that are expected."""
        return replace(self, M=self.expected, expected=0, max_blocks=-1)

    @property
    def routed(self) -> int:
        """Rows of the result."""
        return self.M * self.top_k

    @property
    def touched(self) -> float:
        """Experts here that have routed rows, where tokens choose at random."""
        return self.E * (1 - (1 - 1 / (self.num_experts or self.E)) ** self.routed)

    @property
    def rows_of_expert(self) -> float:
        """Routed rows of such an expert."""
        here = self.routed * self.E / (self.num_experts or self.E)
        return here / self.touched if self.routed else 0.0

    @property
    def blocks(self) -> int:
        """The most blocks there can be."""
        if self.max_blocks >= 0:
            return self.max_blocks
        experts = self.num_experts or self.E
        return most_padded(self.routed, experts, self.block_m) // self.block_m

    @property
    def out_features(self) -> int:
        """Elements of a row of the result."""
        return self.N // 2 if self.activation != "none" else self.N


def most_padded(routed: int, num_experts: int, block_m: int) -> int:
    """Ids, padding included, that a routing can make of so many routed rows."""
    touched = min(routed, num_experts)
    return (routed + touched * (block_m - 1)) // block_m * block_m


def packed_padding(tokens: int, slots: int) -> int:
    """aiter's id of no routed row, as an int32: of 128 slots it has the sign bit."""
    padding = slots << 24 | tokens
    return padding - (padding >> 31 << 32)


def scalars(problem: MoeGemmProblem) -> tuple[int | float, ...]:
    """The values of the arguments that are not pointers, in order."""
    return (
        problem.N,
        problem.K,
        problem.E,
        problem.routed,
        problem.a_div,
        problem.top_k if problem.ids == "aiter" else 0,
        int(problem.weights == "by_place"),
        problem.blocks,
        problem.block_m,
        DTYPE_CODES[problem.bias],
        problem.alpha,
        problem.beta,
        problem.limit,
    )


def declare_gemm(
    name: str,
    sources: Mapping[str, str],
    refusal: Callable[[Target, MoeGemmProblem], str | None],
    args: tuple[Arg, ...] = (),
    values: Callable[[Target, MoeGemmProblem, Config], tuple[int, ...]] = lambda *_: (),
    **more: Any,
) -> KernelSpec:
    """The kernel of that name, which takes ``ARGS``, ``args`` with these values after them, and
    tensor maps at last."""

    def refuses(target: Target, problem: MoeGemmProblem) -> str | None:
        if problem.sorted_out:
            return "its results are by routed rows, not by sorted ids"
        return refusal(target, problem)

    return declare(
        *("moe_gemm", name, sources),
        args=(*ARGS, *args),
        scalars=lambda target, problem, config: (
            *scalars(problem),
            *values(target, problem, config),
        ),
        refusal=refuses,
        **more,
    )


def sm90_defines(problem: MoeGemmProblem) -> dict[str, int]:
    """What all of Hopper's kernels are compiled for: results, and what they may read early."""
    return {
        "MX_EARLY_ROUTING": int(problem.early_routing),
        "MX_OUT": DTYPE_CODES.get(problem.out_dtype, 0),
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(problem.layout == "interleaved"),
    }


KEY = ("M", "N", "K", "E", "num_experts", "top_k", "block_m", "out_dtype", "activation")


def stand_ins(key: Key) -> tuple[Key, ...]:
    """The next power of two tokens, and bf16 for other plain outputs, as tables have them; of
    activations silu, which costs the same."""
    M, N, K, E, num_experts, top_k, block_m, out_dtype, activation = key
    rows = (M, 1 << (M - 1).bit_length() if M else 0)
    if activation != "none":
        kinds = ((out_dtype, activation), (out_dtype, "silu"))
    else:
        kinds = ((out_dtype, activation), ("bf16", activation))
    found = (
        (m, N, K, E, num_experts, top_k, block_m, out, activated)
        for out, activated in dict.fromkeys(kinds)
        for m in dict.fromkeys(rows)
    )
    return tuple(other for other in found if other != key)
