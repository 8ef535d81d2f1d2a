"""What every kernel of ``grouped_wgrad`` must do: in the simulator, without a GPU, on a GPU.

``op_tests/conformance.py`` says how to add a kernel or a property.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aiter_mx.codec import FLOAT8_NAMES
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.target import target_of
from op_tests import conformance
from op_tests.conformance import DTYPES, INDICES, bench_of, each, in_drawn_orders
from op_tests.launches import Out, assert_repeats_on_two_streams, bound, launch, moved, same_bytes
from op_tests.mx_reference import in_e5m2
from op_tests.operands import NANS, SPREADS, scale_zeros, zero_blocks
from op_tests.training.cases import Case, check, draw_case
from op_tests.training.subjects import PERSISTENT_GFX950, PERSISTENT_SM90, SUBJECTS, Shape, Subject


class Bench(conformance.Bench):
    """A subject where it is tried."""

    subject: Subject

    def draw(
        self,
        shape: Shape,
        seed: int,
        of_grad: tuple[int, int] = (-6, 6),
        of_x: tuple[int, int] | None = None,
        **nans: float,
    ) -> Case:
        index = INDICES[shape.index]
        drawn = (shape.N, shape.K, shape.lens, seed, of_grad, index, shape.room)
        return draw_case(*drawn, of_x or of_grad, **nans)

    def tensors(self, shape: Shape, case: Case, out: Tensor | Out) -> list[Tensor | Out | None]:
        return [case.grad, case.grad_scale, case.x, case.x_scale, None, out, case.offs, case.lens]

    def problem(self, shape: Shape, case: Case) -> GroupedWgradProblem:
        (G, N, K), P = case.shape, case.grad.shape[1]
        format = FLOAT8_NAMES[case.grad.dtype]
        return GroupedWgradProblem(P, N, K, G, shape.dtype, int(shape.adds), shape.index, format)

    def launch(self, shape: Shape, case: Case, old: Tensor | None = None) -> Tensor:
        """The result on the CPU, written over poison or over ``old``."""
        problem, more = self.problem(shape, case), (shape.config,)
        if old is None:
            out = Out(case.shape, DTYPES[shape.dtype])
            tensors = self.tensors(shape, case, out)
            return launch(self.kernel, self.device, problem, *more, tensors, shape.cu_num)[0]
        main = old.to(self.device, copy=True)
        run = bound(self.kernel, self.device, problem, *more, shape.cu_num)
        run([t if t is None else t.to(self.device) for t in self.tensors(shape, case, main)])  # type: ignore[union-attr]
        return main.cpu()

    def assert_right(self, shape: Shape, case: Case, seed: int = 0) -> Tensor:
        """The result, once it is compared with float64."""
        old = None
        if shape.adds:
            generator = torch.Generator().manual_seed(seed)
            old = (torch.randn(case.shape, generator=generator) * 30).to(DTYPES[shape.dtype])
        out = self.launch(shape, case, old)
        check(out, case, old, self.subject.underflow)
        return out


bench = bench_of(Bench)


@each(SUBJECTS, swept=lambda subject: range(len(subject.swept)))
def test_any_groups_and_shape_match_float64(
    bench: Bench, swept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, shape, draw in in_drawn_orders(monkeypatch, swept, bench.subject.swept[swept]):
        exponents = (-12, -6) if shape.dtype == "fp16" else draw.choice([(-20, 20), (-6, 6)])
        case = bench.draw(shape, seed, exponents)
        if case.grad.shape[1]:
            bench.assert_right(shape, case, seed)


@each(SUBJECTS, dtype=DTYPES)
def test_results_of_every_dtype_are_stored_and_added_to(bench: Bench, dtype: str) -> None:
    for adds in (False, True):
        shape = replace(bench.subject.few[0], dtype=dtype, adds=adds, lens=(0, 33, 200))
        bench.assert_right(shape, bench.draw(shape, 2, (-10, -6)))


@each(SUBJECTS, spread=SPREADS)
def test_scales_over_their_whole_range_are_exact(bench: Bench, spread: str) -> None:
    for seed, shape in enumerate(bench.subject.few):
        case = bench.draw(shape, seed, SPREADS[spread][0], SPREADS[spread][1])
        bench.assert_right(shape, case)


@each(SUBJECTS, spread=("usual", *SPREADS))
def test_gradients_in_e5m2_match_float64(bench: Bench, spread: str) -> None:
    of_grad, of_x = SPREADS.get(spread, ((-6, 6), (-6, 6)))
    for seed, few in enumerate(bench.subject.few):
        shape = replace(few, adds=seed % 2 == 1)
        case = bench.draw(shape, seed, of_grad, of_x, nan_payload=1e-5)
        infinite = seed == 0 and spread == "usual"
        bench.assert_right(shape, replace(case, grad=in_e5m2(case.grad, infinite)))


@each(SUBJECTS)
def test_zeros_under_small_scales_are_multiplied_as_others_are(bench: Bench) -> None:
    """Quantisation makes such blocks of zeros: what bf16 does not cover is another sum."""
    generator = torch.Generator().manual_seed(9)
    for few in bench.subject.few:
        shape = replace(few, adds=False, lens=(33, 0, 217))
        case = bench.draw(shape, 5)
        zero_blocks(case.grad, case.grad_scale, generator)
        zero_blocks(case.x, case.x_scale, generator)
        old = torch.randn(case.shape, generator=generator)
        for adds in (False, True):
            found = []
            for scale in (0, 127):
                scale_zeros(case.grad, case.grad_scale, scale)
                scale_zeros(case.x, case.x_scale, scale)
                found.append(bench.launch(replace(shape, adds=adds), case, old if adds else None))
            assert torch.equal(*found)
            check(found[0], case, old if adds else None, bench.subject.underflow)


@each(SUBJECTS)
def test_scales_far_from_the_others_leave_these_alone(bench: Bench) -> None:
    for few in bench.subject.few:
        for shape in (few, replace(few, adds=True)):
            case = bench.draw(shape, 3)
            case.grad_scale[5, 0], case.grad_scale[7] = 240, 200
            case.x_scale[9, 1], case.x_scale[11] = 250, 1
            bench.assert_right(shape, case)


@each(SUBJECTS)
def test_padding_and_other_groups_take_no_part(bench: Bench) -> None:
    for few in bench.subject.few:
        shape = replace(few, lens=(1, 33, 128, 217, 40), room=128)
        case = bench.draw(shape, 0)
        expected = bench.launch(shape, case)
        for payload, scale in ((0x7E, 187), (0, 0)):
            assert torch.equal(
                bench.launch(shape, case.with_other_padding(payload, scale)), expected
            )
        others = torch.arange(5) != 2
        for payload, scale in ((0x7E, 187), (0x7F, 255)):  # 448 times 2^60, and NaN
            case.grad.view(torch.uint8)[:, case.columns(2)] = payload
            case.x_scale[:, case.columns(2).start // 32] = scale
            found = bench.launch(shape, case)
            assert torch.equal(found[others], expected[others])
            assert not torch.equal(found[2], expected[2])
        assert found[2].isnan().all()


@each(SUBJECTS, nans=range(len(NANS)))
def test_nan_reaches_its_outputs_alone(
    bench: Bench, nans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    shares = []
    for seed, few in enumerate(bench.subject.few):
        shape = replace(few, adds=seed % 2 == 1)
        case = bench.draw(shape, seed, **NANS[nans])
        shares.append(bench.assert_right(shape, case).isnan().float().mean())
    assert any(0 < share < 1 for share in shares), "the draw must show both outcomes"


@each(SUBJECTS)
def test_scales_and_results_may_be_at_any_address(bench: Bench) -> None:
    for shape in bench.subject.few:
        shape = replace(shape, dtype="bf16", lens=(0, *shape.lens))
        case = bench.draw(shape, 0, (-6, 6))
        expected = bench.launch(shape, case)
        for shift in (1, 2, 3):
            views = [moved(t.to(bench.device), shift) for t in (case.grad_scale, case.x_scale)]
            other = replace(case, grad_scale=views[0], x_scale=views[1])
            assert same_bytes(bench.launch(shape, other), expected)
            out = moved(torch.zeros(case.shape, dtype=torch.bfloat16, device=bench.device), shift)
            run = bound(bench.kernel, bench.device, bench.problem(shape, case), shape.config)
            tensors = bench.tensors(shape, case, out)
            run([t if t is None else t.to(bench.device) for t in tensors])  # type: ignore[union-attr]
            assert same_bytes(out.cpu(), expected)


@each(SUBJECTS)
def test_bounds_that_lead_outside_harm_no_memory(bench: Bench) -> None:
    shape = replace(bench.subject.few[0], lens=(100, 128, 128))
    case = bench.draw(shape, 0)
    wrong = torch.tensor([-5, 10**6, 70, 200], dtype=torch.int32)
    for offs in (wrong, torch.zeros_like(wrong)):
        for lens in ([10**9, -3, 10**6], [0, 0, 0], [384, 384, 384]):
            counts = torch.tensor(lens, dtype=torch.int32)
            bench.launch(shape, replace(case, offs=offs, lens=counts))


@each([PERSISTENT_GFX950, PERSISTENT_SM90], lens=((20_000,), (300, 0, 75_000, 1)))
def test_few_tiles_of_many_columns_are_added_up_in_pieces(
    bench: Bench, lens: tuple[int, ...]
) -> None:
    shape = Shape(96, 64, lens, bench.subject.few[0].config, index="i64")
    for dtype, adds in (("bf16", False), ("fp32", True)):
        shape = replace(shape, dtype=dtype, adds=adds)
        case = bench.draw(shape, 0, (-8, 8))
        target, problem = target_of(bench.device), bench.problem(shape, case)
        config = shape.config or bench.kernel.configure(target, problem)
        ((_, inner),) = bench.kernel.parts(target, problem, config)
        assert inner.pieces > 1 and len(lens) * inner.pieces == inner.G
        assert not bench.kernel.parts(target, inner, config)
        bench.assert_right(shape, case)


@each(SUBJECTS)
def test_lengths_may_be_offsets_before_padding(bench: Bench) -> None:
    shape = replace(bench.subject.few[0], lens=(5, 0, 129))
    case = bench.draw(shape, 0)
    before = torch.nn.functional.pad(case.lens.cumsum(0), (1, 0)).int()
    out = Out(case.shape, DTYPES[shape.dtype])
    tensors = bench.tensors(shape, case, out)
    tensors[4], tensors[7] = before, before[1:]
    found = launch(bench.kernel, bench.device, bench.problem(shape, case), shape.config, tensors)
    assert same_bytes(found[0], bench.launch(shape, case))


@each([PERSISTENT_SM90])
def test_launches_on_two_streams_repeat_bitwise(bench: Bench) -> None:
    shapes = [Shape(608, 416, (300, 0, 1000)), Shape(96, 2880, (640, 33))]
    for shape in shapes:
        run = bound(bench.kernel, bench.device, bench.problem(shape, bench.draw(shape, 0)))
        calls = []
        for seed in range(2):
            case = bench.draw(shape, seed)
            calls.append(bench.tensors(shape, case, Out(case.shape, torch.bfloat16)))
        on_gpu = [
            [t.to(bench.device) if isinstance(t, Tensor) else t for t in call] for call in calls
        ]
        assert_repeats_on_two_streams(run, on_gpu, 500)
