"""What the Hopper kernels of the linear share: clusters over K, and tensor maps of operands."""

from __future__ import annotations

from collections.abc import Callable

from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    W_POINTER,
    X_POINTER,
    LinearProblem,
    matrix_scalars,
)
from aiter_mx.kernels.sm90 import CHUNK
from aiter_mx.kernels.spec import Arg, Config, TensorMap
from aiter_mx.target import Target

PART_ARGS = (
    Arg("part_chunks", "i32"),  # of every workgroup of a cluster,
    Arg("parts_with_one_more", "i32"),  # and the first ones have one more
    Arg("overlaps", "i32"),
)
"""What the arguments of every kernel end with whose clusters share K."""
ARGS = (*MATRIX_ARGS, *PART_ARGS)
"""All that such a kernel is told where it needs no more."""


def part_scalars(problem: LinearProblem, split: int) -> tuple[int, int, int]:
    """The values of ``PART_ARGS`` for clusters of ``split``."""
    part, parts_with_one_more = divmod(-(-problem.K // CHUNK), split)
    return part, parts_with_one_more, int(problem.pdl)


def scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int, ...]:
    """The values of those of ``ARGS`` that are no pointers."""
    return (*matrix_scalars(problem), *part_scalars(problem, config["split"]))


def x_map(problem: LinearProblem, rows: int) -> TensorMap:
    """x, of which so many rows of 128 k are copied at a time."""
    return TensorMap(X_POINTER, problem.M, problem.K, rows, CHUNK)


def w_map(problem: LinearProblem, rows: int) -> TensorMap:
    """The weights, likewise; they are read once, in pieces of 128 bytes."""
    return TensorMap(W_POINTER, problem.N, problem.K, rows, CHUNK, fetch_bytes=128)


def operand_maps(
    box_rows: Callable[[Target, LinearProblem, Config], tuple[int, int]],
) -> tuple[Callable[[Target, LinearProblem, Config], TensorMap], ...]:
    """The maps of both operands, given how many rows of w and of x their boxes have."""
    return (
        lambda target, problem, config: w_map(problem, box_rows(target, problem, config)[0]),
        lambda target, problem, config: x_map(problem, box_rows(target, problem, config)[1]),
    )
