"""What the compilers made of the kernels: no register of any variant in use lives in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter

import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.tables import read_table, table_files
from aiter_mx.jit.build import BuildRequest, build, build_all
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.linear import KERNELS, LinearProblem
from aiter_mx.kernels.linear.gemv import MAX_M as GEMV_MAX_M
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.grouped import GATHER, SCATTER
from aiter_mx.kernels.registry import find_kernel, kernels_of, ops
from aiter_mx.kernels.spec import OUT_DTYPES
from aiter_mx.launch import build_request, load_function, module_request
from aiter_mx.sim.disasm import disassemble
from aiter_mx.target import Target, hardware
from op_tests.spills import assert_no_spills, kernels_without_spills

GEMV = KERNELS[0]
NAMES_ITS_SUMS = "grouped/persistent_gfx950.cu"
MAY_HAVE_A_SIMD = ("linear/mfma_gfx950.cu", "moe/mfma_gfx950.cu")
ACCUMULATOR_MOVES = {"v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"}
# (N, K) of ``wide-6144`` at TP4 and TP8, and of a sentence-embedding model.
DECODE_SHAPES = [(2304, 6144), (6144, 2048), (9216, 6144), (6144, 384), (384, 1536)]


def configured(target: Target) -> dict[BuildRequest, tuple[LinearProblem, dict[str, int]]]:
    """One problem for each variant that ``configure`` picks for decode, dtypes taking turns."""
    found = {}
    for M in range(1, GEMV_MAX_M + 1):
        for N, K in DECODE_SHAPES:
            problem = LinearProblem(M, N, K, OUT_DTYPES[M % len(OUT_DTYPES)])
            config = GEMV.configure(target, problem)
            found[build_request(GEMV, target, problem, config)] = (problem, dict(config))
    return found


def tabled(target: Target) -> dict[BuildRequest, None]:
    """Every variant of a kernel of ours that a shipped table names."""
    found = {}
    for op in ops():
        for path in table_files(target.arch, op):
            for row_op, row in read_table(path):
                spec = find_kernel(row_op, row.gfx, row.backend, row.kernel)
                if spec.module is not None and row.gfx == target.arch:
                    here = replace(target, cu_num=row.cu_num or target.cu_num)
                    found[build_request(spec, here, row.problem, row.config)] = None
    return found


def heaviest(requests: Iterable[BuildRequest]) -> list[BuildRequest]:
    """Of those that differ in steps of loads and parts of K alone the one of the most: the others
    have its registers."""
    found: dict[tuple[object, ...], tuple[tuple[int, ...], BuildRequest]] = {}
    for request in requests:
        others = dict(request.defines)
        size = tuple(others.pop(name, 0) for name in ("MX_UNROLL", "MX_SPLITS"))
        key = (request.source, *others.items())
        found[key] = max(found.get(key, (size, request)), (size, request), key=itemgetter(0))
    return [request for _, request in found.values()]


def test_no_gfx950_variant_in_use_spills_or_has_scratch() -> None:
    target = hardware("gfx950")
    requests = heaviest((*configured(target), *tabled(target)))
    for request, kernel in kernels_without_spills(requests, accumulators=True):
        # Accumulation registers that a source names hold sums: op_tests/grouped/test_isa.py counts
        # them. Of a wave that has a SIMD to itself they are the other half of its 512 registers.
        if request.source == NAMES_ITS_SUMS or not kernel.agprs:
            continue
        assert request.source in MAY_HAVE_A_SIMD, f"{request}: {kernel}"
        assert kernel.max_workgroup <= 256, f"{request}: {kernel}"
        if request.source != "linear/mfma_gfx950.cu":
            used = {instruction.mnemonic for instruction in disassemble(build(request).image)}
            assert not used & ACCUMULATOR_MOVES, f"{request}: {kernel}"


def test_no_other_launch_of_a_gfx950_expert_layer_spills_or_has_scratch() -> None:
    """Routing, combining, gathering and scattering, which no table names."""
    target, requests = hardware("gfx950"), []
    for layer in (
        FusedMoeProblem(8, 6144, 768, 32, 4, num_experts=128, has_map=1),
        FusedMoeProblem(8, 7168, 2048, 1024, 8, shared=1, dtype="fp32", id_dtype="i64"),
        FusedMoeProblem(1, 6144, 768, 32, 4),
        FusedMoeProblem(4, 7168, 2048, 32, 8, 256, 1, 1, "swiglu_oai", "interleaved", "fp32"),
        FusedMoeProblem(2, 2880, 736, 32, 4, bias1="bf16", bias2="bf16", quantised=1),
    ):
        for op, part in layer.parts("gfx950"):
            chosen = route(op, target, part)
            kernel = find_kernel(op, "gfx950", chosen.backend, chosen.kernel)
            if op != "moe_gemm":
                requests.append(build_request(kernel, target, part, chosen.config))
    sorting = MoeAlignProblem(8, 4, 256, 32, ids="aiter", expert_map="mask", drop_absent=1)
    for align in (kernel for kernel in kernels_of("moe_align") if kernel.backend == "hip"):
        config = align.configure(target, sorting)
        requests += [module_request(each, target, sorting, config) for each in align.modules]
    many = MoeGemmProblem(8192, 1536, 6144, 128, 4, 128, weights="by_t")
    swiglu = replace(many, out_dtype="mxfp8", activation="swiglu_oai", weights="none")
    requests.append(build_request(GATHER, target, many, {}))
    requests += [build_request(SCATTER, target, problem, {}) for problem in (many, swiglu)]
    assert_no_spills(requests)


@pytest.mark.gpu
def test_no_sm_90a_variant_in_use_has_local_memory() -> None:
    import torch

    if torch.version.hip:
        pytest.skip("this is an AMD GPU; the test above reads its code objects")
    from cuda.bindings import driver

    target = hardware("sm_90a")
    build_all([*configured(target)])
    for request, (problem, config) in configured(target).items():
        function = load_function(GEMV, target, problem, config, 0)
        local = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        status, size_bytes = driver.cuFuncGetAttribute(local, function)
        assert (status, size_bytes) == (driver.CUresult.CUDA_SUCCESS, 0), request
