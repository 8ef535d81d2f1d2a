"""Options that bound what silicon may do to a result: order of sums, an ulp of approximations."""

from __future__ import annotations

import numpy as np
import pytest

from aiter_mx.sim.program import SUM_ORDERS, SimOptions
from op_tests.sim.tools import Array, dequantise, launch, program, random_e4m3

EXPONENTS = """
KERNEL(64) exponents(const float* in, float* out) {
    float x = in[lane_id()], y[2];
    asm volatile("v_exp_f32 %0, %2\\n v_rcp_f32 %1, %2\\n s_nop 1" : "=&v"(y[0]), "=&v"(y[1])
                 : "v"(x));
    out[lane_id()] = y[0];
    out[lane_id() + 64] = y[1];
}
"""
DOUBLES = """
KERNEL(64) doubles(const double* in, double* out) {
    double x = in[lane_id()], y = in[64 + lane_id()], r[3];
    asm volatile("v_rcp_f64 %0, %3\\n v_rsq_f64 %1, %3\\n v_sqrt_f64 %2, %3\\n s_nop 1"
                 : "=&v"(r[0]), "=&v"(r[1]), "=&v"(r[2]) : "v"(x));
    for (int i = 0; i < 3; i++)
        out[64 * i + lane_id()] = r[i];
    out[192 + lane_id()] = x / y;
    out[256 + lane_id()] = __builtin_sqrt(x);
}
"""
BF16 = """
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
KERNEL(64) product(const bf16x8* in, f32x4* out) {
    f32x4 c = {};
    out[lane_id()] = __builtin_amdgcn_mfma_f32_16x16x32_bf16(in[lane_id()], in[lane_id() + 64], c,
                                                             0, 0, 0);
}
"""


def exponents(perturb: int) -> Array:
    x = np.linspace(-20, 20, 64, dtype=np.float32) + np.float32(0.01)
    out = np.zeros(128, np.float32)
    options = SimOptions(perturb=perturb)
    launch(program(EXPONENTS), "exponents", 1, 64, [x, out], access="rw", options=options)
    return out


def test_approximations_are_off_by_at_most_an_ulp_and_not_all_alike() -> None:
    exact = exponents(0)
    changes = set()
    for seed in (1, 2, 3):
        out = exponents(seed)
        off = out.view(np.int32) - exact.view(np.int32)
        assert set(off.tolist()) == {-1, 0, 1}
        np.testing.assert_array_equal(exponents(seed), out)
        changes.add(off.tobytes())
    assert len(changes) == 3


def test_those_of_f64_have_the_bits_that_are_promised_and_newton_steps_the_others() -> None:
    x, y = np.exp2(np.random.default_rng(3).uniform(-40, 40, (2, 64)))
    out = np.zeros((5, 64))
    launch(program(DOUBLES), "doubles", 1, 64, [np.stack([x, y]), out], access="rw")
    exact = np.stack([1 / x, 1 / np.sqrt(x), np.sqrt(x)])
    off = np.abs(out[:3] - exact) / np.spacing(exact)
    assert (off < 2.0**29).all() and (off > 2.0**20).mean() > 0.9
    np.testing.assert_array_equal(out[3:], [x / y, np.sqrt(x)])


def bf16_product(order: str) -> Array:
    rng = np.random.default_rng(1)
    data = rng.normal(size=1024).astype(np.float32).view(np.uint32) >> 16
    out = np.zeros((64, 4), np.float32)
    launch(program(BF16), "product", 1, 64, [data.astype(np.uint16), out], access="rw",
           options=SimOptions(sum_order=order))  # fmt: skip
    return out


def scaled_product(order: str) -> tuple[Array, Array]:
    rng = np.random.default_rng(2)
    M, N, K = 64, 64, 256
    a, b = random_e4m3(rng, M, K), random_e4m3(rng, N, K)
    scales = [rng.integers(120, 134, (rows, K // 32), dtype=np.uint8) for rows in (M, N)]
    out = np.zeros((M, N), np.float32)
    launch(program("matrix.cu"), "gemm", 1, 256, [a, scales[0], b, scales[1], out, M, N, K],
           options=SimOptions(sum_order=order))  # fmt: skip
    A, B = dequantise(a, scales[0]), dequantise(b, scales[1])
    return out, np.abs(out - A @ B.T) / (np.abs(A) @ np.abs(B).T)


def test_sums_inside_a_matrix_instruction_may_be_rounded_at_each_step_in_any_order() -> None:
    results = {order: bf16_product(order) for order in SUM_ORDERS}
    for order, out in results.items():
        np.testing.assert_allclose(out, results["exact"], rtol=1e-4, atol=1e-4)
        others = [name for name in SUM_ORDERS if name != order]
        assert all((out != results[name]).any() for name in others)
    scaled = {order: scaled_product(order) for order in SUM_ORDERS}
    for _, error in scaled.values():
        assert error.max() < 2.0**-18
    assert len({out.tobytes() for out, _ in scaled.values()}) == len(SUM_ORDERS)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sum_order must be one of exact, .* got 'random'"):
        SimOptions(sum_order="random")
