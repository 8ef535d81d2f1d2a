"""What can compute ``aiter_mx.moe_align`` and ``moe_sort``: csrc/moe/align.cu, Triton, torch.

``align`` has one workgroup that sorts; ``align_split`` has several, and two launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiter_mx.kernels.moe_gemm.problem import MAX_PACKED_TOKENS, MAX_PACKED_TOP_K, most_padded
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    numbers,
    pointers,
    reference,
    require,
)
from aiter_mx.kernels.triton import without_tiles
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

MAP_CODES = {"none": 0, "numbers": 1, "mask": 2}  # csrc/moe/align.cu
IDS = ("vllm", "aiter")
ID_DTYPES = ("i32", "i64")
X_DTYPES = ("none", "bf16", "fp16", "fp32")
MAX_EXPERTS = 1024  # whose counts fit into LDS
MAX_ROUTED = 1 << 30
MOST_EXPERTS = 1 << 16  # of any kernel
MAX_IDS = 1 << 31  # places in the lists are int32
MAX_TRITON_EXPERTS = 1 << 13  # whose counts a program holds
MAX_TRITON_IDS = 1 << 30  # so that programs' steps beyond them are int32 too
_IDS_OF_FEW_WAVES = 1024
_MOST_OF_ONE = {"gfx950": 8192, "sm_90a": 1024}
"""Ids that one workgroup sorts as fast as several, in a launch more."""
_WAVES_OF_MANY = {"gfx950": 16, "sm_90a": 8}
_MANY_PIECES = 4
_HELD = 4  # chunks of a wave whose experts stay in registers
_THREADS_OF_UNIT = 2048  # that a compute unit holds


@dataclass(frozen=True)
class MoeAlignProblem:
    """The routing of M tokens to top_k of E experts each, listed in blocks for a grouped GEMM.

    Attributes:
        M: tokens.
        top_k: slots of a token that are routed.
        E: experts that are routed to, on all ranks.
        block_m: ids of a block, a multiple of 4.
        ids: encoding of the sorted ids, ``vllm`` or ``aiter``.
        id_dtype: of the experts' ids, ``i32`` or ``i64``.
        expert_map: what tells which experts are here: ``none``, their ``numbers``, or a ``mask``.
        drop_absent: 1: rows of experts that are not here are left out, 0: listed under expert -1.
        shared: further slots of every token, for experts after the E.
        first_shared: number of the first of these among the experts here.
        x_dtype: dtype of the tokens' activations, to be quantised by the same launch, or ``none``.
        K: elements of a token's activations, a multiple of 32; 0 where none are quantised.
        masked: 1: rows are with their experts already, M / E of each, and in place of experts' ids
            there is how many of them count.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    top_k: int
    E: int
    block_m: int = 64
    ids: str = "vllm"
    id_dtype: str = "i32"
    expert_map: str = "none"
    drop_absent: int = 0
    shared: int = 0
    first_shared: int = 0
    x_dtype: str = "none"
    K: int = 0
    masked: int = 0

    def __post_init__(self) -> None:
        known = {
            "ids": IDS,
            "id_dtype": ID_DTYPES,
            "expert_map": tuple(MAP_CODES),
            "x_dtype": X_DTYPES,
        }
        require(
            self,
            {"M": 0, "E": 1, "top_k": 1, "shared": 0, "first_shared": 0},
            known,
        )
        if self.E > MOST_EXPERTS:
            raise ValueError(
                f"E must be at most {MOST_EXPERTS}, as each expert's rows are counted, got {self.E}"
            )
        if self.block_m <= 0 or self.block_m % 4:
            raise ValueError(f"block_m must be a multiple of 4, got {self.block_m}")
        if self.K < 0 or self.K % BLOCK or (self.K > 0) != (self.x_dtype != "none"):
            raise ValueError(
                f"K must be a multiple of {BLOCK} where activations are quantised, else 0, got "
                f"K={self.K} and x_dtype={self.x_dtype!r}"
            )
        if self.masked and (self.top_k, self.shared, self.M % self.E) != (1, 0, 0):
            raise ValueError(
                f"rows that are with their experts are as many of each, got {self.M} of {self.E}"
            )
        if self.routed >= MAX_ROUTED:
            raise ValueError(f"M * top_k must be below 2^30, got {self.routed}")
        if self.max_ids >= MAX_IDS:
            raise ValueError(
                f"blocks of block_m={self.block_m} may hold {self.max_ids} ids, padding included, "
                "which must be below 2^31"
            )
        if self.ids == "aiter" and (self.M >= MAX_PACKED_TOKENS or self.slots > MAX_PACKED_TOP_K):
            raise ValueError(
                f"aiter's ids hold fewer than 2^24 tokens and at most {MAX_PACKED_TOP_K} slots, "
                f"got M={self.M} and top_k={self.slots}"
            )

    @property
    def slots(self) -> int:
        """Routed rows of a token."""
        return self.top_k + self.shared

    @property
    def routed(self) -> int:
        """Routed rows of all tokens."""
        return self.M * self.slots

    @property
    def max_ids(self) -> int:
        """Sorted ids, padding included, that there is room for."""
        return most_padded(self.routed, self.E + self.shared, self.block_m)


KEY = ("M", "top_k", "E", "block_m", "ids")


PARAMS = (Param("waves", (2, 4, 8, 16, 32), "waves of the workgroup"),)


def _room(problem: MoeAlignProblem) -> int:
    """Experts that LDS has room for: a power of two."""
    return max(64, 1 << (problem.E + problem.shared - 1).bit_length())


def _refusal(target: Target, problem: MoeAlignProblem) -> str | None:
    if problem.E + problem.shared > MAX_EXPERTS:
        return f"E={problem.E + problem.shared} is above {MAX_EXPERTS}, the most align counts"
    return None


def _split_refusal(target: Target, problem: MoeAlignProblem) -> str | None:
    if problem.masked:
        return "rows are with their experts already"
    return _refusal(target, problem)


def _yields_to_split(target: Target, problem: MoeAlignProblem) -> str | None:
    if problem.masked or problem.routed <= _MOST_OF_ONE[target.arch]:
        return None
    return f"{problem.routed} ids are sorted faster by several workgroups"


def _split_yields(target: Target, problem: MoeAlignProblem) -> str | None:
    if problem.routed > _MOST_OF_ONE[target.arch]:
        return None
    return f"{problem.routed} ids are sorted by one workgroup as fast"


def _triton_refusal(problem: MoeAlignProblem) -> str | None:
    if (experts := problem.E + problem.shared) > MAX_TRITON_EXPERTS:
        return f"E={experts} is above {MAX_TRITON_EXPERTS}, the most the Triton align counts"
    if problem.max_ids > MAX_TRITON_IDS:
        return f"{problem.max_ids} ids are above {MAX_TRITON_IDS}, the most of the Triton align"
    return None


def _most_waves(target: Target, problem: MoeAlignProblem) -> int:
    """Of many ids; their counts and five more words of each expert are within 48 KiB."""
    room = _room(problem)
    return min(_WAVES_OF_MANY[target.arch], 8192 // room if room < MAX_EXPERTS else 4)


def _configure(target: Target, problem: MoeAlignProblem) -> Config:
    most = _most_waves(target, problem)
    return {"waves": 8 if problem.routed <= _IDS_OF_FEW_WAVES else most}


def _split_configure(target: Target, problem: MoeAlignProblem) -> Config:
    return {"waves": _most_waves(target, problem)}


def _held_ids(target: Target, config: Config) -> int:
    return _threads(target, config) * _HELD


def _sorters(target: Target, problem: MoeAlignProblem, config: Config) -> int:
    """Workgroups of ``align_split`` that sort: so many that they hold the ids, if there is room."""
    return max(1, min(-(-problem.routed // _held_ids(target, config)), target.cu_num))


def _defines(target: Target, problem: MoeAlignProblem, config: Config) -> Mapping[str, int]:
    most = min(_IDS_OF_FEW_WAVES, _held_ids(target, config))
    return {
        "MX_WAVES": config["waves"],
        "MX_HELD": _HELD,
        "MX_PIECES": _pieces(problem),
        "MX_MANY": int(not problem.masked and problem.routed > most),
        "MX_EXPERTS": _room(problem),
        "MX_PACKED": int(problem.ids == "aiter"),
        "MX_WIDE_IDS": int(problem.id_dtype == "i64"),
        "MX_MASKED": problem.masked,
        "MX_X": DTYPE_CODES[problem.x_dtype],
    }


def _threads(target: Target, config: Config) -> int:
    waves: int = config["waves"]
    return waves * target.wave_size


def _pieces(problem: MoeAlignProblem) -> int:
    """Eight elements each that a thread quantises: several, whose loads are under way together,
    where it is the memory that takes the time."""
    return _MANY_PIECES if problem.routed > _IDS_OF_FEW_WAVES and not problem.masked else 1


def _quantising(target: Target, problem: MoeAlignProblem, config: Config) -> int:
    """Workgroups that quantise."""
    threads = _threads(target, config)
    groups = -(-problem.M * problem.K // (8 * threads * _pieces(problem)))
    if problem.masked:  # few of the rows count
        return min(groups, target.cu_num * _THREADS_OF_UNIT // threads)
    return groups


_SCALARS = (
    *("M", "top_k", "E", "shared", "first_shared", "map_kind", "drop_absent", "block_m"),
    *("max_ids", "max_blocks", "groups"),
)
_POINTERS = (
    *pointers("r", "topk_ids", "topk_weights", "expert_map", "num_tokens", "x"),
    *pointers("w", "sorted_ids", "sorted_weights", "expert_ids", "post_padded", "xq", "xs"),
)
_COUNTS, _PLACES, _WHOLE = range(3)  # what a launch does, csrc/moe/align.cu


def _scalars(target: Target, problem: MoeAlignProblem, config: Config) -> tuple[int | float, ...]:
    return (
        problem.M * problem.K,
        problem.M,
        problem.top_k,
        problem.E,
        problem.shared,
        problem.first_shared,
        MAP_CODES[problem.expert_map],
        problem.drop_absent,
        problem.block_m,
        problem.max_ids,
        problem.max_ids // problem.block_m,
        _quantising(target, problem, config),
    )


def _module(step: int) -> Module:
    """A launch: of many ids all three are of one code object, in which one of one workgroup has a
    number in place of the address of counts."""
    is_whole = step == _WHOLE
    counts = (
        Arg("counts_of_groups", "i64") if is_whole else Arg("counts_of_groups", "pointer", "rw")
    )

    def sorters(target: Target, problem: MoeAlignProblem, config: Config) -> int:
        return 1 if is_whole else _sorters(target, problem, config)

    def geometry(target: Target, problem: MoeAlignProblem, config: Config) -> Geometry:
        quantising = 0 if step == _PLACES else _quantising(target, problem, config)
        groups, threads = sorters(target, problem, config) + quantising, _threads(target, config)
        return Geometry((groups, 1, 1), (threads, 1, 1), overlaps=target.arch == "sm_90a")

    return Module(
        sources={"gfx950": "moe/align.cu", "sm_90a": "moe/align.cu"},
        symbol="aiter_mx_moe_align",
        args=(
            *(*_POINTERS, counts),
            *numbers("i64", "sorters", "step", "elements"),
            *numbers("i32", *_SCALARS),
        ),
        defines=lambda target, problem, config: {
            **_defines(target, problem, config),
            **({} if is_whole else {"MX_MANY": 1}),
        },
        geometry=geometry,
        scalars=lambda target, problem, config: (
            *((0,) if is_whole else ()),
            *(sorters(target, problem, config), step),
            *_scalars(target, problem, config),
        ),
    )


PROBLEM = MoeAlignProblem

ALIGN = KernelSpec(
    op="moe_align",
    backend="hip",
    name="align",
    params=PARAMS,
    refusal=_refusal,
    configure=_configure,
    candidates=lambda target, problem: (_configure(target, problem),),
    modules=(_module(_WHOLE),),
    yields=_yields_to_split,
)
ALIGN_SPLIT = replace(
    ALIGN,
    name="align_split",
    refusal=_split_refusal,
    configure=_split_configure,
    candidates=lambda target, problem: (_split_configure(target, problem),),
    modules=(_module(_COUNTS), _module(_PLACES)),
    workspace_bytes=lambda target, problem, config: (
        4 * _sorters(target, problem, config) * _room(problem)
    ),
    yields=_split_yields,
)

KERNELS = (
    ALIGN,
    ALIGN_SPLIT,
    without_tiles("moe_align", "align", _triton_refusal),
    reference("moe_align"),
)
