"""Inputs of quantisation that reveal mistakes, and launches that reveal writes outside outputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aiter_mx.fallbacks import quantize_torch
from aiter_mx.kernels.quantize import KERNELS, QuantizeProblem
from aiter_mx.kernels.quantize.problem import BLOCK
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.launch import bind
from aiter_mx.layouts import padded_shape
from aiter_mx.numerics import FORMATS
from aiter_mx.target import target_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OFFSETS = {"int32": torch.int32, "int64": torch.int64}
ROWS, STAGED, TILES = KERNELS[:3]

# Between them every dtype, format, mode, destination, block and layout, in few code objects.
ROWS_VARIANTS = (
    QuantizeProblem(1, 32, "bf16"),
    QuantizeProblem(1, 32, "fp16", mode="floor"),
    QuantizeProblem(1, 32, "fp32", mode="floor"),
    QuantizeProblem(1, 32, "fp32", format="e2m1"),
)
TILES_VARIANTS = (
    QuantizeProblem(32, 32, "bf16", "both"),
    QuantizeProblem(32, 32, "fp16", "both", mode="floor", layout="16x4"),
    QuantizeProblem(32, 32, "fp32", "both", mode="floor", format="e2m1", layout="32_4_4"),
    QuantizeProblem(32, 32, "fp32", "columns", layout="256x8"),
    QuantizeProblem(32, 32, "bf16", "both", block="32x32", layout="32_8"),
    QuantizeProblem(32, 32, "bf16", "both", format="e2m1"),
    QuantizeProblem(32, 32, "fp16", "both", mode="floor", format="e2m1"),
)
STAGED_VARIANTS = tuple(
    dict.fromkeys(replace(p, layout="row_major") for p in TILES_VARIANTS if p.to == "both")
)
GROUPED_VARIANTS = (
    (ROWS, QuantizeProblem(1, 32, "bf16", groups=1)),
    (TILES, QuantizeProblem(1, 32, "bf16", "both", groups=1)),
)


def name_of(problem: QuantizeProblem) -> str:
    """A test's name for a variant: what differs from the defaults."""
    defaults = QuantizeProblem(problem.M, problem.N)
    changed = [str(v) for k, v in vars(problem).items() if v != getattr(defaults, k)]
    return "-".join(changed) or "default"


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, finite: bool = False
) -> Tensor:
    """Of each run of some blocks, at random: any bits, also NaN; finite bits; like magnitudes."""
    count = 1
    for size in shape:
        count *= size
    kind = torch.randint(int(finite), 4, (-(-count // 96),), generator=generator)
    kind = kind.repeat_interleave(96)[:count]
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    else:
        bits = torch.randint(0, 2**16, (count,), generator=generator).to(torch.uint16)
    values = bits.view(dtype)
    exponents = torch.randint(-140, 120, (-(-count // 32),), generator=generator)
    if dtype == torch.float16:
        exponents = exponents // 9
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    like = (normal * 2.0 ** exponents.repeat_interleave(32)[:count]).to(dtype)
    finite = torch.where(values.isfinite(), values, torch.zeros((), dtype=dtype))
    return torch.where(kind == 0, values, torch.where(kind == 1, finite, like)).view(shape)


def guarded(shape: tuple[int, ...] | None, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """A poisoned output within poisoned memory: the output, and all of it."""
    if shape is None:
        return None, None
    guard, count = 256, 1
    for size in shape:
        count *= size
    size_bytes = count * dtype.itemsize
    memory = torch.full((size_bytes + 2 * guard,), 0x5A, dtype=torch.uint8)
    return memory[guard : guard + size_bytes].view(dtype).view(shape), memory


def output_shapes(problem: QuantizeProblem) -> list[tuple[tuple[int, ...] | None, torch.dtype]]:
    """Shapes and dtypes of a kernel's outputs, worked out apart from the package's own."""
    M, N, matrices = problem.out_rows, problem.N, problem.matrices
    payload = FORMATS[problem.format]
    found: list[tuple[tuple[int, ...] | None, torch.dtype]] = []
    for wanted, rows, columns in (
        (problem.to != "columns", M, N),
        (problem.to != "rows", N, M),
    ):
        scales = padded_shape(rows, columns // BLOCK, problem.layout)
        shapes = [(matrices, rows, columns // payload.per_byte), (matrices, *scales)]
        dtypes = (payload.dtype, torch.uint8)
        found += [(s if wanted else None, d) for s, d in zip(shapes, dtypes, strict=True)]
    offsets = (problem.groups + 1,) if problem.groups else None
    return [*found, (offsets, OFFSETS[problem.offsets])]


def assert_as_reference(
    kernel: KernelSpec,
    problem: QuantizeProblem,
    x: Tensor,
    offsets: Tensor | None,
    device: torch.device,
    config: Config | None = None,
) -> None:
    """Launch a kernel, and compare every byte that it wrote, and left alone, with the reference."""
    target = target_of(device)
    assert kernel.refusal(target, problem) is None
    config = config or kernel.configure(target, problem)
    kernel.check_config(config)
    shapes = output_shapes(problem)
    expected = [guarded(*each) for each in shapes]
    quantize_torch.run(problem, (x, offsets, *(out for out, _ in expected)), {})
    here = [None if t is None else t.to(device) for t in (x, offsets)]
    memory = [None if m is None else m.to(device) for _, m in (guarded(*each) for each in shapes)]
    outs = [
        None if m is None else m[256 : 256 + out.nbytes]
        for m, (out, _) in zip(memory, expected, strict=True)
    ]
    index = torch.cuda.current_device() if device.type == "cuda" else 0
    run = bind(kernel, target, problem, config, index)
    tensors = (*here, *outs)
    run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    names = ("rows", "row scales", "columns", "column scales", "padded offsets")
    for name, got, (_, want) in zip(names, memory, expected, strict=True):
        if want is not None:
            wrong = (got.cpu() != want).nonzero()
            assert not len(wrong), f"{name} of {problem}: {len(wrong)} bytes, {wrong[0]} first"


def resized(problem: QuantizeProblem, **sizes: object) -> QuantizeProblem:
    """The same variant for another shape."""
    return replace(problem, **sizes)
