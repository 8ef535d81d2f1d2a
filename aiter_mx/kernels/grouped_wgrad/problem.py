"""What the gradient of a grouped GEMM's weights asks for, and what its kernels are told.

    out[g] = grad[:, rows of g] @ x[:, rows of g].T   for each group g, or is added to out[g]

Both operands are transposed: rows of a group are columns here, and the reduction runs along them. A
kernel must keep to this:

- Group g begins at column ``starts[g]``, a multiple of 128, and has ``through[g] - before[g]``
  columns, or ``through[g]`` where ``before`` is null. What lies between its last column and the
  next group is padding, whose payload and scales may be anything: no result depends on it.
- The arrays are on the device, of 4 or 8 bytes an index, and no one reads them on the host. A
  kernel cuts every begin to 0 .. M and to a multiple of 128, and every count to what is left of M.
- All of out is written: a group without columns gives zeros, or adds nothing.
- An element is added up in an order that depends on the shape and the group's count alone.

Where results are few tiles of many columns, a kernel multiplies each group's columns in pieces,
and ``joined.added_up`` adds up their sums. A problem of pieces has G of them, of G / pieces groups:
from ``g * pieces`` on they are group g's columns in order, an even share each, rounded up to a
multiple of 128, and the last ones fewer or none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiter_mx.kernels.grouped_gemm.problem import A_FORMATS
from aiter_mx.kernels.spec import (
    OUT_DTYPES,
    Arg,
    Key,
    Parts,
    require,
    require_blocks,
)

ARGS = (
    Arg("grad", "pointer", "r"),  # e4m3 or e5m2 [N, M]
    Arg("grad_scale", "pointer", "r"),  # e8m0 [N, M / 32]
    Arg("x", "pointer", "r"),  # e4m3 [K, M]
    Arg("x_scale", "pointer", "r"),  # e8m0 [K, M / 32]
    Arg("before", "pointer", "r"),  # [G], or null
    Arg("out", "pointer", "rw"),  # [G, N, K]
    Arg("starts", "pointer", "r"),  # [G]
    Arg("through", "pointer", "r"),  # [G]
)
"""The pointers of every kernel, in the order of a grouped GEMM's, with ``before`` for its bias."""

START_COLUMNS = 128  # groups begin at multiples of this
INDEX_BYTES = {"i32": 4, "i64": 8}


@dataclass(frozen=True)
class GroupedWgradProblem:
    """The gradient of a grouped GEMM's weights, as this module's docstring defines it.

    Attributes:
        M: columns of both operands, a multiple of 128: rows of all groups, with their padding.
        N: rows of grad, output features of the forward product.
        K: rows of x, its input features.
        G: groups.
        out_dtype: ``bf16``, ``fp16`` or ``fp32``.
        accumulate: 1: products are added to what ``out`` holds, and rounded once with it.
        index: dtype of the groups' bounds, ``i32`` or ``i64``.
        grad_format: of grad's payload, ``e4m3`` or ``e5m2``; x is e4m3.
        pieces: of a group, which G counts.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    K: int
    G: int
    out_dtype: str = "bf16"
    accumulate: int = 0
    index: str = "i32"
    grad_format: str = "e4m3"
    pieces: int = 1

    def __post_init__(self) -> None:
        known = {"out_dtype": OUT_DTYPES, "accumulate": (0, 1), "index": tuple(INDEX_BYTES)}
        known |= {"grad_format": A_FORMATS}
        require(self, {"M": 0, "N": 1, "K": 1, "G": 1, "pieces": 1}, known)
        if self.G % self.pieces:
            raise ValueError(f"G={self.G} must be a multiple of pieces={self.pieces}")
        if self.M % START_COLUMNS:
            raise ValueError(f"M must be a multiple of {START_COLUMNS}, got M={self.M}")
        for name in ("N", "K"):
            require_blocks(name, getattr(self, name))


def in_pieces(problem: GroupedWgradProblem, tiles: int, at_once: int, least_columns: int) -> Parts:
    """The problem of a group's columns in pieces, where its tiles leave the GPU mostly idle.

    Args:
        problem: the whole.
        tiles: of all its results.
        at_once: tiles that the GPU works on at a time.
        least_columns: of a piece, on average; fewer take less time than adding pieces up.
    """
    pieces = min(at_once // tiles, problem.M // problem.G // least_columns)
    if pieces < 2 or problem.pieces > 1:
        return ()
    G = problem.G * pieces
    inner = replace(problem, G=G, out_dtype="fp32", accumulate=0, pieces=pieces)
    return (("grouped_wgrad", inner),)


KEY = ("M", "N", "K", "G", "out_dtype", "accumulate")


def stand_ins(key: Key) -> tuple[Key, ...]:
    """The next power of two columns, and bf16 that is not added to."""
    M, N, K, G, *_ = key
    rounded = 1 << (M - 1).bit_length() if M else 0
    return (
        (rounded, N, K, G, *key[4:]),
        (M, N, K, G, "bf16", 0),
        (rounded, N, K, G, "bf16", 0),
    )
