"""DeepGEMM's layouts of scales and of rows, against what they are said to be."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.compat import deep_gemm
from op_tests.compat.deep_gemm_operands import quantize_coarse, to_uint8


@pytest.mark.parametrize("alignment", [1, 48, 128])
def test_groups_begin_at_multiples_of_what_was_set(alignment: int) -> None:
    usual = deep_gemm.get_mk_alignment_for_contiguous_layout()
    sizes, N, K, row, ends = [5, 0, 60, 1], 64, 96, 0, []
    for size in sizes:
        ends.append(row + size)
        row = -(-ends[-1] // alignment) * alignment
    x, w = torch.randn(row, K), torch.randn(4, N, K)
    d = torch.full((row, N), 7.0)
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            aiter_mx.quantize(x),
            aiter_mx.quantize(w),
            d,
            torch.tensor(ends, dtype=torch.int32),
            use_psum_layout=True,
        )
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(usual)
    values, weights = (aiter_mx.dequantize(*aiter_mx.quantize(t)).double() for t in (x, w))
    expected = torch.zeros(row, N, dtype=torch.float64)
    for g, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        expected[end - size : end] = values[end - size : end] @ weights[g].T
    torch.testing.assert_close(d.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="multiples of 1 row or more, got 0"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(0)


@pytest.mark.parametrize("K", [256, 640])
def test_packed_scales_and_turned_weights_give_the_same_bits(K: int) -> None:
    torch.manual_seed(1)
    x, w = quantize_coarse(torch.randn(70, K), 1), quantize_coarse(torch.randn(2, 96, K), 128)
    layout = torch.tensor([0] * 33 + [1] * 37, dtype=torch.int32)
    expected, found = torch.empty(70, 96), torch.empty(70, 96)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(to_uint8(x), to_uint8(w), expected, layout)
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(x[1])
    assert packed.dtype == torch.int32 and packed.shape == (70, -(-K // 512))
    assert packed.stride() == (1, 72)
    turned = w[0].mT.contiguous(), to_uint8(w)[1].mT
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous((x[0], packed), turned, found, layout)
    assert torch.equal(found, expected)


def test_scales_lie_by_columns() -> None:
    scale = torch.exp2(torch.randint(-20, 20, (3, 37, 11)).float())
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scale)
    assert torch.equal(aligned, scale) and aligned.stride() == (40 * 11, 1, 40)
    assert [deep_gemm.get_tma_aligned_size(37, size) for size in (1, 2, 4)] == [48, 40, 40]
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scale)
    byte = packed.contiguous().view(torch.uint8)
    assert torch.equal(torch.exp2(byte[..., :11].float() - 127), scale) and not byte[..., 11:].any()
    sf = deep_gemm.transform_sf_into_required_layout
    assert sf(scale, 37, 1400, (1, 128), 3).stride() == aligned.stride()
    assert sf(scale[0], 37, 1400, (1, 128, 128), is_sfa=True).stride() == (1, 40)
    tiles = sf(scale, 37 * 128, 11 * 128, (1, 128, 128), 3, is_sfa=False)
    assert tiles is scale
    with pytest.raises(ValueError, match=r"sf must be \[3, 37, 12\], as the recipe says, got \[3,"):
        sf(scale, 37, 1500, (1, 128), 3)
    with pytest.raises(TypeError, match=r"sf must be torch\.float32, got"):
        deep_gemm.get_mn_major_tma_aligned_tensor(scale.to(torch.uint8))


def test_groups_of_k_are_packed_apart() -> None:
    ks, mn = [256, 640, 0, 128], 20
    scale = torch.exp2(torch.randint(-20, 20, (sum(ks) // 128, mn)).float())
    packed = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        scale, torch.tensor(ks, dtype=torch.int32), ks, 128, 128
    )
    assert packed.shape == (1 + 2 + 1, mn)
    begin = at = 0
    for k in filter(None, ks):
        count = k // 128
        words = packed[at : at + -(-count // 4)].t().clone(memory_format=torch.contiguous_format)
        byte = words.view(torch.uint8)
        of_group = scale[begin : begin + count].t()
        assert torch.equal(torch.exp2(byte[:, :count].float() - 127), of_group)
        begin, at = begin + count, at + -(-count // 4)
    with pytest.raises(ValueError, match=r"sf must be \[8, mn\], as ks_cpu says, got \[7, 20\]"):
        deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
            scale[:7], torch.tensor(ks), ks, 128, 128
        )
