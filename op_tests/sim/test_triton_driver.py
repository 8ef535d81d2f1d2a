"""Triton's own launches, on CPU tensors, in the simulator."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import aiter_mx
from aiter_mx.errors import LaunchError
from aiter_mx.runtimes import sim
from aiter_mx.sim.faults import MemoryFault
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.triton_driver import triton_launches


@triton.jit
def add(x, y, z, n, factor, BLOCK: tl.constexpr, MASK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < (n if MASK else n + BLOCK)
    a = tl.load(x + at, mask=inside)
    b = tl.load(y + at, mask=inside)
    tl.store(z + at, a + b * factor, mask=inside)


@triton.autotune([triton.Config({"BM": m, "BN": 32}, num_warps=w) for m, w in ((32, 2), (64, 4))],
                 key=["K"])  # fmt: skip
@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + ks[None, :], mask=m[:, None] < M, other=0.0)
        y = tl.load(b + n[None, :] * K + ks[:, None], mask=n[None, :] < N, other=0.0)
        total = tl.dot(x, y, total)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None] * N + n[None, :], total, mask=inside)


@triton.jit
def doubled(source, target, BM: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0) * BM
    target.store([row, 0], source.load([row, 0]) * 2)


@triton.jit
def sums_of_groups(addresses, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0.0)))


def test_a_launch_on_cpu_tensors_runs_in_the_simulator() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 1000, generator=generator)
    z = torch.zeros(1000)
    reports: list[LaunchReport] = []
    with triton_launches(reports.append):
        add[(4,)](x, y, z, 1000, 0.5, BLOCK=256, MASK=True)
    torch.testing.assert_close(z, x + 0.5 * y)
    (report,) = reports
    assert report.kernel == "add" and report.bytes_written == 4000


def test_views_and_findings() -> None:
    whole = torch.arange(4096, dtype=torch.float32)
    x, z = whole[100:400], torch.zeros(300)
    with triton_launches():
        add[(2,)](x, x, z, 300, 1.0, BLOCK=256, MASK=True)
        torch.testing.assert_close(z, 2 * x)
        with pytest.raises(MemoryFault, match=r"writes .* beyond the end of"):
            add[(2,)](x, x, z, 300, 1.0, BLOCK=256, MASK=False)


def test_autotuned_kernels() -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(60, 64, generator=generator).bfloat16()
    b = torch.randn(40, 64, generator=generator).bfloat16()
    c = torch.zeros(60, 40)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(60, meta["BM"]), triton.cdiv(40, meta["BN"])

    with triton_launches(options=SimOptions(seed=3)):
        product[grid](a, b, c, 60, 40, 64, BK=32)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, atol=1e-4, rtol=1e-4)
    assert product.best_config.kwargs["BM"] in (32, 64)


def test_host_side_descriptors() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    y = torch.zeros_like(x)
    with triton_launches():
        doubled[(2,)](
            TensorDescriptor.from_tensor(x, [32, 32]),
            TensorDescriptor.from_tensor(y, [32, 32]), BM=32, BN=32,
        )  # fmt: skip
    torch.testing.assert_close(y, 2 * x)


def test_loads_ahead_of_a_product_are_copies_to_lds() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(64, 256, generator=generator).bfloat16() for _ in range(2))
    c = torch.zeros(64, 64)
    reports: list[LaunchReport] = []
    sizes = {"BM": 64, "BN": 64, "BK": 64}
    with triton_launches(reports.append):
        product.fn[(1, 1)](a, b, c, 64, 64, 256, **sizes, num_warps=4, num_stages=3)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, atol=1e-4, rtol=1e-4)
    (report,) = reports
    used = " ".join(report.mnemonics)
    assert "ds_read" in used and "ds_write" not in used  # memory is copied to LDS


def test_tensors_are_reached_by_addresses_in_a_tensor() -> None:
    generator = torch.Generator().manual_seed(4)
    groups = [torch.randn(100 + 7 * i, generator=generator) for i in range(3)]
    parts = [group[5:] for group in groups]
    addresses = torch.tensor([part.data_ptr() for part in parts])
    out = torch.zeros(3)
    with triton_launches():
        sums_of_groups[(3,)](addresses, out, 90, BLOCK=128)
        torch.testing.assert_close(out, torch.stack([part[:90].sum() for part in parts]))
        with pytest.raises(MemoryFault, match=r"beyond the end of what \*i64 points to"):
            sums_of_groups[(3,)](addresses, out, 127, BLOCK=128)


def test_a_compiled_kernel_takes_constexpr_arguments_too() -> None:
    x, z = torch.ones(256), torch.zeros(256)
    with triton_launches():
        compiled = add.warmup(x, x, z, 256, 1.0, BLOCK=256, MASK=True, grid=(1,))
        with pytest.raises(
            LaunchError, match="takes 7 arguments, constexpr ones among them, got 5"
        ):
            compiled[(1, 1, 1)](x, x, z, 256, 1.0)
        compiled[(1, 1, 1)](x, x, z, 256, 1.0, 256, True)
    torch.testing.assert_close(z, 2 * x)


def test_simulate_takes_triton_launches_too() -> None:
    x, z = torch.arange(1000, dtype=torch.float32), torch.zeros(1000)
    with aiter_mx.simulate("gfx950"):
        add[(4,)](x, x, z, 1000, 1.0, BLOCK=256, MASK=True)
    torch.testing.assert_close(z, 2 * x)
    report = sim.last_report()
    assert report is not None and report.kernel == "add"


def test_a_kernel_may_be_collected_after_its_driver_is_gone() -> None:
    x, z = torch.ones(256), torch.zeros(256)
    with triton_launches():
        compiled = add[(1,)](x, x, z, 256, 3.0, BLOCK=256, MASK=True)
    compiled.__del__()  # as the collector would, wherever it runs: it asked for a driver


def test_the_driver_before_is_there_again() -> None:
    from triton.runtime import driver

    before = driver._active
    with pytest.raises(ValueError, match="mine"), triton_launches():
        assert driver.active.get_current_target().arch == "gfx950"
        raise ValueError("mine")
    assert driver._active is before
    first, second = triton_launches(), triton_launches()
    first.__enter__()
    second.__enter__()
    inner = driver._active
    first.__exit__(None, None, None)
    assert driver._active is inner
    second.__exit__(None, None, None)
    assert driver._active is before
