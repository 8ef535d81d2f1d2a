"""Hopper's linear on an emulator, where there is no GPU; a kernel is added to ``SUBJECTS``."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_rescaled_sm90 import (
    RESCALING_ERROR,
    WGMMA_FP8_RESCALED,
    slices,
)
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.paths import csrc_dir
from op_tests.conformance import NAMES
from op_tests.emulated_sm90.build import unsupported
from op_tests.emulated_sm90.launch import TARGET, EmulatedError, Schedule, launch
from op_tests.launches import Out
from op_tests.linear.rescaled import ROWS, in_slices_of, rescaled
from op_tests.linear.test_rescaling import (
    Draw,
    Memory,
    Operand,
    of_normal,
    of_random,
    of_rows_of_sizes,
    single_values,
    with_outliers,
    with_zeros,
)
from op_tests.mistakes import MISTAKES
from op_tests.mx_reference import assert_close_to_reference, random_mx

pytestmark = pytest.mark.skipif(bool(unsupported()), reason=unsupported())

CASES = 26
FP32_ERROR = 2.0**-20
"""Of the magnitudes' sum: wgmma is emulated in fp32, and K is at most 640."""
KINDS: dict[str, Draw] = {
    "near": partial(random_mx, scale_exponents=(-1, 1)),
    "normal": of_normal,
    "equal": partial(random_mx, scale_exponents=(0, 0)),
    "wide": partial(random_mx, scale_exponents=(-45, 45)),
    "far": partial(random_mx, scale_exponents=(-126, 126)),
    "nan": partial(random_mx, scale_exponents=(-1, 1), nan_payload=1e-4, nan_scale=1e-2),
    "zeros": with_zeros,
    "outliers": with_outliers,
    "rows": of_rows_of_sizes,
    "small": partial(random_mx, scale_exponents=(-61, -59)),
    "large": partial(random_mx, scale_exponents=(48, 61)),
    "single": single_values,
    "random": of_random,
}


@dataclass(frozen=True)
class Case:
    """A call, and how it is scheduled.

    Attributes:
        kinds: of x and of w, among ``KINDS``.
        blocks: of w for which the workspace has room, where it is not for all.
        ctas: most that share the tiles.
    """

    M: int
    N: int
    K: int
    kinds: tuple[str, str]
    schedule: Schedule
    ctas: int = 1
    out_dtype: str = "bf16"
    bias: torch.dtype | None = None
    blocks: int | None = None
    pdl: bool = False

    @property
    def problem(self) -> LinearProblem:
        bias = "none" if self.bias is None else NAMES[self.bias]
        options = {"out_dtype": self.out_dtype, "bias": bias, "pdl": self.pdl}
        return LinearProblem(self.M, self.N, self.K, **options)

    def __str__(self) -> str:
        return f"{self.schedule.seed}: {self.M}x{self.N}x{self.K} {'-'.join(self.kinds)}"


def after_rescaled(case: Case, x: Operand, w: Operand, index: int, workspace: Tensor) -> None:
    """A launch ahead leaves in the workspace what torch's casts do, bit for bit."""
    if index % 2:
        return
    every = slices(case.M, case.N, case.K)
    held, one = Memory(workspace, every[0].blocks(case.M), case.K), every[index // 2]
    held.assert_holds(rescaled(*x, False), 0, False)
    of_slice = slice(one.first, one.first + one.features)
    payload, scale = w[0].view(torch.uint8)[of_slice].view(w[0].dtype), w[1][of_slice]
    held.assert_holds(rescaled(payload, scale, True), -(-case.M // ROWS) * ROWS, True)
    assert not held.ended.any()


def drawn_cases(seed: int = 0) -> Iterator[Case]:
    """Some that no draw may miss, and others: each kind of operands beside near ones and its own
    like, on either side."""
    drawn, kinds = random.Random(seed), list(KINDS)
    fixed = [
        {"M": 1, "N": 1, "K": 32},
        {"M": 129, "N": 136, "K": 160},
        {"M": 300, "N": 264, "K": 384, "ctas": 2},
        {"M": 200, "N": 130, "K": 608, "ctas": 1, "bias": torch.float32},
        {"M": 257, "N": 72, "K": 256, "ctas": 2, "out_dtype": "fp16"},
        {"M": 70, "N": 400, "K": 640, "ctas": 13},
        {"M": 130, "N": 257, "K": 512, "blocks": 1, "bias": torch.bfloat16},
        {"M": 128, "N": 128, "K": 128, "pdl": True},
    ]
    for i in range(CASES):
        kind = kinds[i % len(kinds)]
        of_both = [("near", kind), (kind, kind), (kind, "near")]
        sizes = {
            "M": drawn.choice([drawn.randrange(1, 300), drawn.randrange(100, 260)]),
            "N": drawn.choice([drawn.randrange(1, 300), 8 * drawn.randrange(1, 40)]),
            "K": 32 * drawn.randrange(1, 21),
            "ctas": drawn.choice([1, 2, 3, drawn.randrange(1, 20)]),
            "bias": drawn.choice([None, None, torch.bfloat16, torch.float32]),
        }
        schedule = Schedule(seed * 1000 + i, drawn.randrange(1, 4), bool(drawn.randrange(2)))
        options = {"kinds": of_both[(i // len(kinds) + i) % 3], "schedule": schedule, "ctas": 3}
        yield Case(**options | (fixed[i] if i < len(fixed) else sizes))


def cases_of(*sizes: tuple[int, int, int]) -> Iterator[Case]:
    """Of M, N and K: near scales and wide ones, zeros, and NaN."""
    for i, (size, kind) in enumerate(product(sizes, ("near", "wide", "zeros", "nan"))):
        bias = (None, torch.float32, torch.bfloat16)[i % 3]
        yield Case(*size, (kind, kind), Schedule(i, 1 + i % 3, i % 2 == 0), bias=bias)


def most_ctas(kernel: KernelSpec, case: Case) -> Config:
    """As many CTAs as the case says, or as have something to do."""
    configs = ({"ctas": ctas} for ctas in range(case.ctas, 0, -1))
    return next(each for each in configs if kernel.misfit(TARGET, case.problem, each) is None)


@dataclass(frozen=True)
class Subject:
    """A kernel that the emulator runs.

    Attributes:
        cases: those that it is tried with.
        errors: what ``assert_close_to_reference`` grants its results.
        after: called after each launch with its number and the workspace.
        config: of a case.
    """

    kernel: KernelSpec
    cases: Sequence[Case]
    errors: Mapping[str, float] = field(default_factory=dict)
    after: Callable[[Case, Operand, Operand, int, Tensor], None] = lambda *of: None
    config: Callable[[KernelSpec, Case], Config] = lambda kernel, case: kernel.configure(
        TARGET, case.problem
    )


RESCALED = Subject(
    WGMMA_FP8_RESCALED,
    [*drawn_cases()],
    {"accumulation_error": FP32_ERROR, "rescaling_error": RESCALING_ERROR},
    after_rescaled,
    most_ctas,
)
OTHERS = {
    "gemv": cases_of((1, 33, 96), (5, 64, 544), (16, 7, 256)),
    "wgmma_fp8": cases_of((1, 33, 96), (3, 40, 256)),
    "wgmma_fp8_tiled": cases_of((300, 72, 160)),
    "wgmma_bf16_few": cases_of((3, 40, 256)),
    "wgmma_bf16": cases_of((70, 66, 320), (129, 72, 96)),
    "wgmma_f16_tiled": cases_of((70, 66, 320)),
}
SUBJECTS = (
    RESCALED,
    *(Subject(k, [*OTHERS[k.name]]) for k in kernels_of("linear") if k.name in OTHERS),
)


def check(subject: Subject, case: Case, csrc: Path | None = None) -> None:
    """Emulate a case.

    Raises:
        EmulatedError: the kernel did what hardware would punish.
        AssertionError: a result or the workspace is wrong.
    """
    generator = torch.Generator().manual_seed(case.schedule.seed)
    rows = zip(case.kinds, (case.M, case.N), strict=True)
    x, w = (KINDS[kind](count, case.K, generator) for kind, count in rows)
    bias = None if case.bias is None else torch.randn(case.N, generator=generator).to(case.bias)
    dtype = torch.float16 if case.out_dtype == "fp16" else torch.bfloat16
    tensors = [*x, *w, bias, Out((case.M, case.N), dtype)]
    with in_slices_of(case.blocks) if case.blocks else nullcontext():
        config, after = subject.config(subject.kernel, case), partial(subject.after, case, x, w)
        given = subject.kernel, case.problem, config, tensors, case.schedule
        (out,) = launch(*given, after=after, csrc=csrc)
    assert_close_to_reference(out, *x, *w, bias, **subject.errors)


TRIALS = [(subject, case) for subject in SUBJECTS for case in subject.cases]


@pytest.mark.parametrize(
    ("subject", "case"), TRIALS, ids=[f"{subject.kernel.name} {case}" for subject, case in TRIALS]
)
def test_any_operands_and_schedule_give_the_reference(subject: Subject, case: Case) -> None:
    check(subject, case)


PLANTED = {  # in sources of the linear: text that is there once, and what stands in its place
    "a stage released before its wgmmas are over": (
        """
        wgmma_wait<Behind>();
        keep_in_order(products);
        release(step.stage);
""",
        """
        release(step.stage);
        wgmma_wait<Behind>();
        keep_in_order(products);
""",
    ),
    "operands not waited for": (
        """
        barrier_wait(full + 8 * ring.at, ring.parity);
        return ring.at;
""",
        """
        return ring.at;
""",
    ),
    "more registers than a launch has": ("kConsumerRegisters = 232;", "kConsumerRegisters = 240;"),
    "products read before they have come": ("wgmma_wait<Behind>();", "wgmma_wait<Behind + 1>();"),
    "a part that is not added": (
        "for (int cluster = first + ManyBefore; cluster <= last; ++cluster)",
        "for (int cluster = first + ManyBefore; cluster < last; ++cluster)",
    ),
    "a row beyond the last written": (
        "if (8 * i < rows && column < columns)",
        "if (8 * i <= rows && column < columns)",
    ),
    "a barrier that some lanes pass by": (
        "rows_apart = OfW && __syncthreads_or(rows_apart);",
        "rows_apart = OfW && lane != 7 && __syncthreads_or(rows_apart);",
    ),
    **{
        mistake.what: (mistake.right, mistake.wrong)
        for mistake in MISTAKES
        if (mistake.kernel, mistake.what) == ("wgmma_fp8_rescaled", "scales of the step after")
    },
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_found(what: str, tmp_path: Path) -> None:
    right, wrong = PLANTED[what]
    csrc = tmp_path / "csrc"
    shutil.copytree(csrc_dir(), csrc)
    texts = {path: path.read_text() for path in (csrc / "linear").iterdir()}
    (path,) = (path for path, text in texts.items() if text.count(right) == 1)
    path.write_text(texts[path].replace(right, wrong))
    with pytest.raises((EmulatedError, AssertionError)):
        for case in RESCALED.cases:
            check(RESCALED, case, csrc)
