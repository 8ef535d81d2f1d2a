"""What an expert layer asks for, and the launches that it is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiter_mx import invariance
from aiter_mx.kernels import moe_down, moe_up
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.moe_down import MoeDownProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem, grouped
from aiter_mx.kernels.moe_gemm.blocks import block_for
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.kernels.spec import Problem
from aiter_mx.numerics import BLOCK

ACTIVATIONS = ("silu", "swiglu_oai", "gelu", "gelu_tanh", "relu2")
"""What a first GEMM can end in."""
FEW_TOKENS_ARCHS = ("gfx950",)
"""Architectures whose layers of few tokens are two launches."""
_MOST_FEW_TOKENS = 4
_MOST_SLOTS_OF_AN_EXPERT = 2
"""On average: each slot reads its expert's weights, from a cache where another one has."""


@dataclass(frozen=True)
class FusedMoeProblem:
    """An expert layer.

    Attributes:
        M: tokens.
        hidden: their elements, H.
        intermediate: activated features, I.
        E: experts here, shared ones included.
        top_k: slots of a token that are routed.
        num_experts: experts that are routed to, on all ranks; 0 for those here.
        shared: further slots of every token, for the last of the experts here.
        has_map: 1: an expert map says which experts are here.
        activation: one of ``ACTIVATIONS``.
        layout: of gate and up rows, ``halves`` or ``interleaved``.
        dtype: of the result, and of the tokens unless these are quantised.
        bias1: dtype of the first GEMM's bias, or ``none``.
        bias2: of the second's.
        id_dtype: of the experts' ids, ``i32`` or ``i64``.
        block_m: rows of an expert that make a block; 0 for what suits the shape.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai.
        quantised: 1: tokens come as MX-FP8.
        reduce: 0: the rows of a token's slots stay apart, and no weights are applied.
        expected: tokens of the M for which configurations are chosen; 0 for all of them.
        masked: 1: a token has one expert, and the M / E of each are together; how many of them
            count takes the place of the experts' ids.
    """

    M: int
    hidden: int
    intermediate: int
    E: int
    top_k: int
    num_experts: int = 0
    shared: int = 0
    has_map: int = 0
    activation: str = "silu"
    layout: str = "halves"
    dtype: str = "bf16"
    bias1: str = "none"
    bias2: str = "none"
    id_dtype: str = "i32"
    block_m: int = 0
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0
    quantised: int = 0
    reduce: int = 1
    expected: int = 0
    masked: int = 0

    def __post_init__(self) -> None:
        for name, least in (("M", 0), ("E", 1), ("top_k", 1), ("intermediate", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        refuse_unknown_activation(self.activation)
        if not 0 <= self.shared < self.E:
            raise ValueError(
                f"shared experts must be fewer than the experts here, got {self.shared} of {self.E}"
            )
        if self.num_experts == 0:
            object.__setattr__(self, "num_experts", self.E - self.shared)
        if self.block_m == 0:
            object.__setattr__(self, "block_m", _block_m(self))
        if not self.has_map and self.num_experts != self.E - self.shared:
            raise ValueError(
                f"num_experts={self.num_experts} but {self.E - self.shared} routed experts are "
                "here, and no expert_map says which"
            )
        if self.intermediate % BLOCK or self.hidden % BLOCK:
            raise ValueError(
                f"H and I must be multiples of {BLOCK}, got H={self.hidden} and "
                f"I={self.intermediate}"
            )

    @property
    def routed(self) -> int:
        """Routed rows of all tokens."""
        return self.M * (self.top_k + self.shared)

    def parts(self, arch: str = "") -> tuple[tuple[str, Problem], ...]:
        """The ops and the problems of the launches on an architecture.

        They are four, or three without a reduction; where tokens are few and the architecture has
        the kernels, two. Where the second GEMM gathers its rows, the sum over a token's slots finds
        its results as the ids are sorted, and of many rows in bf16 where that is the layer's dtype:
        with few intermediate features fp32's bytes would take about as long as the products. In
        fp16 they might overflow where the weighted sum does not.
        """
        if arch in FEW_TOKENS_ARCHS and (few := self._of_few_tokens()):
            return few
        align = MoeAlignProblem(
            M=self.M,
            top_k=self.top_k,
            E=self.num_experts,
            block_m=self.block_m,
            id_dtype=self.id_dtype,
            expert_map="numbers" if self.has_map else "none",
            drop_absent=self.has_map,
            shared=self.shared,
            first_shared=self.E - self.shared,
            x_dtype="none" if self.quantised else self.dtype,
            K=0 if self.quantised else self.hidden,
            masked=self.masked,
        )
        first = MoeGemmProblem(
            M=self.M,
            N=2 * self.intermediate,
            K=self.hidden,
            E=self.E,
            top_k=align.slots,
            block_m=self.block_m,
            out_dtype="mxfp8",
            activation=self.activation,
            layout=self.layout,
            bias=self.bias1,
            a_div=align.slots,
            max_blocks=align.max_ids // self.block_m,
            num_experts=self.num_experts if self.has_map else 0,
            alpha=self.alpha,
            beta=self.beta,
            limit=self.limit,
            expected=min(self.expected, self.M),
        )
        second = replace(
            first,
            N=self.hidden,
            K=self.intermediate,
            out_dtype="fp32" if self.reduce else self.dtype,
            activation="none",
            layout="halves",
            bias=self.bias2,
            a_div=1,
            early_routing=True,
        )
        if self.reduce and not invariance.is_on() and grouped.is_first(arch, second):
            narrow = self.dtype == "bf16" and grouped.has_many_rows(arch, second)
            second = replace(second, sorted_out=True, out_dtype="bf16" if narrow else "fp32")
        combine = MoeCombineProblem(
            M=self.M,
            N=self.hidden,
            top_k=self.top_k,
            E=self.num_experts,
            shared=self.shared,
            y_dtype=second.out_dtype if self.reduce else "fp32",
            out_dtype=self.dtype,
            id_dtype=self.id_dtype,
            sorted_y=second.sorted_out,
        )
        launches = (
            ("moe_align", align),
            ("moe_gemm", first),
            ("moe_gemm", second),
            ("moe_combine", combine),
        )
        return launches if self.reduce else launches[:3]

    def _of_few_tokens(self) -> tuple[tuple[str, Problem], ...]:
        """Both halves of the layer by slots, where each reads weights of its own, or nothing."""
        if self.M > _MOST_FEW_TOKENS or not self.reduce or self.masked or invariance.is_on():
            return ()
        slots, chosen = self.M * self.top_k, self.num_experts
        touched = chosen * (1 - (1 - 1 / chosen) ** slots)
        if slots > _MOST_SLOTS_OF_AN_EXPERT * touched:
            return ()
        up = MoeUpProblem(
            M=self.M,
            N=2 * self.intermediate,
            K=self.hidden,
            E=self.E,
            top_k=self.top_k,
            num_experts=self.num_experts,
            shared=self.shared,
            has_map=self.has_map,
            activation=self.activation,
            layout=self.layout,
            x_dtype="mxfp8" if self.quantised else self.dtype,
            bias=self.bias1,
            id_dtype=self.id_dtype,
            alpha=self.alpha,
            beta=self.beta,
            limit=self.limit,
        )
        down = MoeDownProblem(
            M=self.M,
            N=self.hidden,
            K=self.intermediate,
            E=self.E,
            top_k=self.top_k,
            num_experts=self.num_experts,
            shared=self.shared,
            has_map=self.has_map,
            out_dtype=self.dtype,
            bias=self.bias2,
            id_dtype=self.id_dtype,
        )
        if moe_up.refusal(up) or moe_down.refusal(down):
            return ()
        return (("moe_up", up), ("moe_down", down))


def refuse_unknown_activation(activation: str) -> None:
    """Raise ValueError unless a first GEMM can have it."""
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}, got {activation!r}")


def _block_m(problem: FusedMoeProblem) -> int:
    tokens = problem.expected or problem.M
    routed = tokens * problem.top_k
    touched = problem.num_experts * (1 - (1 - 1 / problem.num_experts) ** routed)
    mean = routed / touched if touched else 0
    return block_for(mean, problem.intermediate, tokens if problem.shared else 0)


PROBLEM = FusedMoeProblem
