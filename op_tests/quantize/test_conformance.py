"""What every kernel of ``quantize`` must do: write the reference's bytes, simulated or on a GPU.

The reference is ``quantize_torch``, which test_quantize.py holds against plain definitions.
``op_tests/conformance.py`` says how to add a kernel or a property.
"""

from __future__ import annotations

import pytest
import torch

from aiter_mx.codec import FORMATS
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import Config
from op_tests import conformance
from op_tests.conformance import DTYPES, bench_of, each, every_order
from op_tests.launches import bound, same_bytes
from op_tests.quantize.cases import (
    OFFSETS,
    assert_as_reference,
    draw,
    offsets_of,
    output_shapes,
    resized,
)
from op_tests.quantize.subjects import SUBJECTS, Subject


class Bench(conformance.Bench):
    """A subject where it is tried."""

    subject: Subject

    def check(
        self,
        variant: QuantizeProblem,
        shape: tuple[int, int, int],
        generator: torch.Generator,
        config: Config | None = None,
    ) -> None:
        matrices, M, N = shape
        finite = M in (288, 256, 1056)  # whole tiles without NaN have a path of their own
        x = draw((matrices, M, N), DTYPES[variant.dtype], generator, finite)
        problem = resized(variant, matrices=matrices, M=M, N=N)
        assert_as_reference(self.kernel, problem, x, None, self.device, config)

    def check_groups(
        self, variant: QuantizeProblem, x: torch.Tensor, offsets: torch.Tensor, kind: str = "int64"
    ) -> None:
        (M, N), groups = x.shape, len(offsets) - 1
        problem = resized(variant, M=M, N=N, groups=groups, offsets=kind)
        assert_as_reference(self.kernel, problem, x, offsets, self.device)


bench = bench_of(Bench)


@each(SUBJECTS, variant=lambda subject: range(len(subject.variants)))
def test_any_shape_is_as_the_reference(bench: Bench, variant: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in bench.subject.shapes:
        bench.check(bench.subject.variants[variant], shape, generator)


@each(SUBJECTS, variant=lambda subject: range(len(subject.configured)))
def test_other_configurations_are_as_the_reference(bench: Bench, variant: int) -> None:
    generator = torch.Generator().manual_seed(4)
    configs = [*bench.subject.configs, *(bench.subject.on_gpu * bench.device.type.count("cuda"))]
    for config in configs:
        for shape in bench.subject.wide:
            bench.check(bench.subject.configured[variant], shape, generator, config)


@each(SUBJECTS)
def test_every_number_of_rows_is_as_the_reference(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(14)
    variant = bench.subject.variants[0]
    step = 1 if variant.to == "rows" else 32  # blocks along columns are whole
    for M in range(step, 34 if step == 1 else 32 * 9, step):
        bench.check(variant, (1, M, 96), generator)


@each(SUBJECTS)
def test_groups_of_any_sizes_are_padded(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(5)
    cases = [[0, 3], [1], [128], [129, 127], [0, 0, 5, 128, 0, 131, 36, 0], [256, 0, 0]]
    cases += [torch.randint(0, 3, (700,), generator=generator).tolist()]  # rounds of the scan
    cases += [[900, 0, 1, 300]]  # strips of several tiles, and some of padding alone
    for variant in bench.subject.grouped:
        for number, sizes in enumerate(cases):
            kind = "int32" if number % 2 else "int64"
            first, after = (number % 3) * 7, number % 4  # rows of no group before and after
            N = (32, 96, 160)[number % 3] if len(sizes) < 99 else 32
            x = draw((first + sum(sizes) + after, N), torch.bfloat16, generator)
            bench.check_groups(variant, x, offsets_of(sizes, first, OFFSETS[kind]), kind)


@each(SUBJECTS)
def test_wrong_offsets_read_and_write_nothing_outside(bench: Bench) -> None:
    # Groups that overlap have workgroups write the same rows, side by side.
    x = draw((150, 64), torch.bfloat16, torch.Generator().manual_seed(6))
    for variant in bench.subject.grouped:
        for wrong in ([0, 100, 50, 150], [-5, 20, 2**40, 150], [2**40, -(2**40), 150, 3]):
            bench.check_groups(variant, x, torch.tensor(wrong))


@each(SUBJECTS, mode=("rceil", "floor", "even"))
def test_every_bf16_value_is_as_the_reference(bench: Bench, mode: str) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    by_magnitude = every[every.isfinite()].sort().values
    generator = torch.Generator().manual_seed(7)
    to = bench.subject.variants[0].to
    for format in FORMATS:
        for x in (by_magnitude.view(-1, 32), every[torch.randperm(2**16, generator=generator)]):
            x = x.reshape(-1, 32)
            x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 32))  # to whole tiles
            problem = QuantizeProblem(*x.shape, "bf16", to, format=format, mode=mode)
            assert_as_reference(bench.kernel, problem, x[None], None, bench.device)


@each(SUBJECTS, "sim")
def test_no_interleaving_of_waves_changes_a_result(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(8)
    offsets = offsets_of([100, 0, 200], 0, torch.int64)
    for variant in bench.subject.grouped:
        x = draw((300, 160), torch.bfloat16, generator)
        for _ in every_order(monkeypatch):
            bench.check_groups(variant, x, offsets)


@each(SUBJECTS, "gpu")
def test_calls_behind_each_other_do_not_mix(bench: Bench) -> None:
    """They may share a workspace, and the next one begins before the last one ends."""
    problem = resized(bench.subject.variants[0], M=1024, N=1024)
    run, generator = bound(bench.kernel, bench.device, problem), torch.Generator().manual_seed(13)
    calls = []
    for _ in range(8):
        x = draw((1, 1024, 1024), DTYPES[problem.dtype], generator)
        outs = [None if s is None else torch.empty(s, dtype=d) for s, d in output_shapes(problem)]
        quantize_torch.run(problem, (x, None, *outs), {})
        here = [None if t is None else torch.zeros_like(t, device=bench.device) for t in outs]
        calls.append(((x.to(bench.device), None, *here), outs))
    for tensors, _ in calls:
        run(tensors)
    for tensors, outs in calls:
        for got, want in zip(tensors[2:], outs, strict=True):
            assert want is None or (got is not None and same_bytes(got.cpu(), want))
