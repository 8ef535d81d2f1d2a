"""What an op's workload says, and the checks that workloads share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from aiter_mx.kernels.spec import Problem

if TYPE_CHECKING:
    import torch

    from aiter_mx.launch import Tensors

Operands: TypeAlias = "list[torch.Tensor | None]"
"""In the order of the pointers of the op's kernels, results among them; None is a null pointer."""
Judge: TypeAlias = "Callable[[Tensors], Verdict]"
"""Compares the results among the tensors with what they must be."""
ACCUMULATION = 1e-4
"""How far sums may be off, relative to the product of the norms of the two rows whose product an
element is. By Cauchy and Schwarz that is no less than the sum of magnitudes, and mostly some 30
times as much for what is drawn here. Sums of K products are accurate to (8 + sqrt(K)) * 2^-23 of
that sum in fp32, and in the fp8 matrix unit of Hopper to 2^-10 where it adds 32 of them
(docs/kernels/wgmma_fp8.md) and 2^-9 where 128 (docs/kernels/wgmma_fp8_rescaled.md)."""
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20}
"""Of one rounding to an output's dtype, relative to the value."""

_FP16_MAX, _FP16_STEP = 65504.0, 2.0**-24
_ROWS_AT_ONCE = 1 << 15  # that are drawn


def normal_mx(rows: int, K: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What normal values are quantised to: payload ``[rows, K]`` and scales ``[rows, K // 32]``.

    On a GPU, for kernels that take longer where neighbouring scales are far apart, as those of
    ``random_mx`` are and those of trained weights are not.
    """
    import torch

    from aiter_mx.ops.quantize import quantize

    payload = torch.empty((rows, K), device=device, dtype=torch.float8_e4m3fn)
    scale = torch.empty((rows, K // 32), device=device, dtype=torch.uint8)
    for first in range(0, rows, _ROWS_AT_ONCE):
        own = slice(first, first + _ROWS_AT_ONCE)
        payload[own], of_rows = quantize(torch.randn_like(payload[own], dtype=torch.bfloat16))
        scale[own] = of_rows.view(torch.uint8)
    return payload, scale


@dataclass(frozen=True)
class Verdict:
    """What a comparison with the reference found.

    Attributes:
        rel_err: norm of the error over the norm of the reference; not finite where a result is not.
        worst: the largest error of an element over what rounding may make of it; above 1 is wrong.
    """

    rel_err: float
    worst: float

    @property
    def right(self) -> bool:
        """Whether the results are the reference's but for rounding; NaN is not."""
        return self.worst <= 1.0


@dataclass(frozen=True)
class Workload:
    """How an op is tried out.

    Attributes:
        op: name of the op.
        draw: random operands of a problem on a device, and results that hold anything.
        redraw: the same operands, but for what an engine reads from memory at each call (weights,
            or which of them are used) and the results. The rest is in the caches then, as whatever
            was computed just before.
        read_bytes: of the weights that a call with these operands reads, or, without operands, that
            one reads on average.
        results: positions of what a kernel writes.
        judge: what the results of these operands must be, worked out once in float64.
        sample: a problem with about this share of the weights' rows, for which every kernel is
            compiled as for the whole; the simulator runs it in place of the whole.
        problems: the problems that serving a model of the catalogue poses, on so many GPUs
            of an architecture; none where no table has rows for the op.
        optional: positions of operands that a caller may leave out, whatever the problem says.
        touched: the experts that a call with these operands reads, for an op that has some.
        indices: operands that say which rows or experts a call works on, by position; those of
            fewer rows of x are part of those of more, for the same number.
    """

    op: str
    draw: Callable[[Problem, torch.device], Operands]
    redraw: Callable[[Problem, Operands], Operands]
    read_bytes: Callable[[Problem, Operands | None], float]
    results: tuple[int, ...]
    judge: Callable[[Problem, Tensors], Judge]
    sample: Callable[[Problem, float], Problem]
    problems: Callable[[Any, int, str], list[Problem]] = lambda model, gpus, arch: []
    touched: Callable[[Problem, Operands], int] | None = None
    optional: tuple[int, ...] = ()
    indices: Callable[[Problem, int], dict[int, torch.Tensor | None]] | None = None

    def hollow(self, problem: Problem, number: int = 0) -> Operands:
        """Operands on a CPU that are zero but for the indices: for a launch's time alone.

        They take no memory until somebody writes them, so that any problem fits.
        """
        import numpy as np
        import torch

        given = self.indices(problem, number) if self.indices else {}
        operands: Operands = [
            None
            if like is None  # torch.zeros would write them
            else torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)
            for like in self.draw(problem, torch.device("meta"))
        ]
        for position, tensor in given.items():
            operands[position] = tensor
        return operands

    def operands(self, problem: Problem, device: torch.device, number: int = 0) -> Operands:
        """Operands of a problem, the same in every process for the same number."""
        with seeded(f"{problem} {number}", device):
            return self.draw(problem, device)

    def calls(self, problem: Problem, device: torch.device) -> Iterator[Operands]:
        """Operands of calls that pose a problem, for each choice of what a caller may leave out.

        Nothing is drawn: their memory holds anything, but for indices, which are zero, so that a
        launch has next to nothing to do. There are none where a tensor is empty, which nobody
        launches for.
        """
        import torch

        drawn = self.draw(problem, torch.device("meta"))
        if any(tensor is not None and tensor.numel() == 0 for tensor in drawn):
            return
        for kept in product((True, False), repeat=len(self.optional)):
            is_kept = dict(zip(self.optional, kept, strict=True))
            operands: Operands = []
            for at, like in enumerate(drawn):
                if like is None or not is_kept.get(at, True):
                    operands.append(None)
                    continue
                is_index = like.dtype in (torch.int32, torch.int64)
                new = torch.zeros if is_index else torch.empty
                operands.append(new(like.shape, dtype=like.dtype, device=device))
            yield operands

    def another(self, problem: Problem, operands: Operands, number: int) -> Operands:
        """Operands of which only what a call reads from memory is drawn anew, by a number."""
        device = next(tensor.device for tensor in operands if tensor is not None)
        with seeded(f"{problem} again {number}", device):
            return self.redraw(problem, operands)


@contextmanager
def seeded(by: str, device: torch.device) -> Iterator[None]:
    """Have torch's generators draw by a text here, and go on as before afterwards."""
    import torch

    seed = int.from_bytes(hashlib.sha256(by.encode()).digest()[:7], "big")
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def workload_of(op: str) -> Workload:
    """The workload of an op.

    Raises:
        ValueError: there is no such op, or nobody has said how to try it out.
    """
    from aiter_mx.kernels.registry import problem_type

    problem_type(op)  # an unknown op raises
    name = f"aiter_mx.workloads.{op}"
    try:
        found: Workload = import_module(name).WORKLOAD
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"nothing says how to try out {op!r}: there is no {name}") from None
    return found


def fewer_rows(problem: Problem, share: float) -> Problem:
    """A share of a problem's M."""
    return replace(problem, M=max(1, round(problem.M * share)))


def poison(tensors: Tensors, results: tuple[int, ...]) -> None:
    """Fill results with what no kernel writes: NaN, in every dtype that results have."""
    import torch

    for position in results:
        if (tensor := tensors[position]) is not None:
            tensor.view(torch.uint8).fill_(0xFF)


def compare(
    out: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, out_dtype: str
) -> Verdict:
    """Compare a product with its reference, all elements of it.

    Args:
        out: what a kernel computed.
        reference: float64, of the same shape.
        bound: the product of the norms of the rows that each element comes from.
        out_dtype: ``bf16``, ``fp16`` or ``fp32``.
    """
    values = out.double()
    if out_dtype == "fp16":  # what does not fit becomes infinite
        values, reference = (
            values.clamp(-_FP16_MAX, _FP16_MAX),
            reference.clamp(-_FP16_MAX, _FP16_MAX),
        )
    error = (values - reference).abs_()
    norm = reference.norm()
    rel_err = float(error.norm() / norm) if float(norm) else float(error.norm())
    allowed = reference.abs().mul_(ROUNDING[out_dtype]).add_(bound, alpha=ACCUMULATION)
    if out_dtype == "fp16":
        allowed += _FP16_STEP / 2  # to which its least numbers are rounded
    # An element whose whole row is zero must be zero, which a division would make NaN.
    worst = float((error / allowed.clamp_(min=2.0**-140)).max()) if error.numel() else 0.0
    return Verdict(rel_err, worst)


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    """What groups' verdicts together say. Each NaN shows, which ``max`` might hide."""
    import torch

    if not verdicts:
        return Verdict(0.0, 0.0)
    errors = torch.tensor([(v.rel_err, v.worst) for v in verdicts], dtype=torch.float64)
    return Verdict(*errors.amax(0).tolist())


def judge_bytes(expected: Sequence[torch.Tensor | None], first: int) -> Judge:
    """A judge of results that must be these to the last bit, from position ``first`` on."""
    import torch

    def judge(tensors: Tensors) -> Verdict:
        wrong = sum(
            int((got.view(torch.uint8) != want.view(torch.uint8)).sum())
            for got, want in zip(tensors[first:], expected, strict=True)
            if want is not None
        )
        return Verdict(rel_err=float(wrong), worst=2.0 if wrong else 0.0)

    return judge
