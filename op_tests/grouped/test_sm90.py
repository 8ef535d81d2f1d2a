"""What the host does for ``aiter_mx.grouped_gemm`` on Hopper: routes, tensor maps, workspaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aiter_mx import launch
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.persistent_sm90 import PERSISTENT
from aiter_mx.kernels.grouped_gemm.problem import ARGS
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware

SM90 = hardware("sm_90a")


def test_routes_there_on_hopper_and_refuses_what_it_cannot() -> None:
    problem = GroupedGemmProblem(M=300, N=96, K=64, G=3)
    found = find_kernel("grouped_gemm", "sm_90a", "hip", "persistent")
    assert found.modules == PERSISTENT.modules
    assert PERSISTENT.refusal(SM90, problem) is None
    assert "gfx950" in (PERSISTENT.refusal(hardware("gfx950"), problem) or "")
    assert "N=40" in (PERSISTENT.refusal(SM90, GroupedGemmProblem(M=3, N=40, K=64, G=1)) or "")


def test_weights_are_one_matrix_of_all_groups_to_the_copies() -> None:
    assert PERSISTENT.module is not None and PERSISTENT.modules[0].tensor_maps == ()
    describe, _ = PERSISTENT.module.tensor_maps
    problem = GroupedGemmProblem(M=100, N=160, K=96, G=7)
    described = describe(SM90, problem, PERSISTENT.configure(SM90, problem))
    assert ARGS[described.pointer].name == "wq"
    assert (described.rows, described.row_bytes) == (7 * 160, 96)
    linear = find_kernel("linear", "sm_90a", "hip", "persistent").module
    assert linear is not None
    described = linear.tensor_maps[0](SM90, LinearProblem(M=100, N=160, K=96), {"order": 8})
    assert (described.rows, described.row_bytes) == (160, 96)
    for N, G in ((1 << 16, 1 << 15), (32, (1 << 26) - 7)):
        many = GroupedGemmProblem(M=1, N=N, K=32, G=G)
        assert "31 bits" in (PERSISTENT.refusal(SM90, many) or "")
    assert PERSISTENT.refusal(SM90, replace(many, G=(1 << 26) - 8)) is None


@pytest.mark.parametrize(("dtype", "bytes_each"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_results_are_one_matrix_to_the_stores(dtype: str, bytes_each: int) -> None:
    assert PERSISTENT.module is not None
    _, describe = PERSISTENT.module.tensor_maps
    problem = GroupedGemmProblem(M=100, N=160, K=96, G=7, out_dtype=dtype)
    described = describe(SM90, problem, PERSISTENT.configure(SM90, problem))
    assert ARGS[described.pointer].name == "y" and described.only_aligned
    wide = GroupedGemmProblem(M=100, N=(1 << 31) // bytes_each, K=32, G=1, out_dtype=dtype)
    assert "in bytes" in (PERSISTENT.refusal(SM90, wide) or "")
    assert PERSISTENT.refusal(SM90, replace(wide, N=wide.N - 32)) is None
    assert (described.rows, described.row_bytes) == (100, 160 * bytes_each)
    linear = find_kernel("linear", "sm_90a", "hip", "persistent").module
    assert linear is not None
    of_linear = linear.tensor_maps[1](SM90, LinearProblem(M=100, N=160, K=96), {"order": 8})
    assert (of_linear.rows, of_linear.box_rows, of_linear.box_bytes) == (100, 32, 128)


def test_launches_of_a_call_share_a_workspace_and_calls_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(
        launch, "bind_module", lambda *_: lambda tensors, addresses: given.append(tensors[-1])
    )
    problem = GroupedGemmProblem(M=100, N=64, K=96, G=3)
    config = PERSISTENT.configure(SM90, problem)
    run = launch.bind(PERSISTENT, SM90, problem, config, 0)
    for _ in range(2):
        run([torch.empty(0)] * 8, [0] * 8)
    first, second = given[:2], given[2:]
    assert first[0] is first[1] and second[0] is second[1]
    assert first[0].data_ptr() != second[0].data_ptr()
    assert first[0].numel() == PERSISTENT.workspace_bytes(SM90, problem, config)


@pytest.mark.parametrize("op", ["grouped_gemm", "linear"])
def test_scales_of_w_at_an_odd_address_are_copied_to_an_even_one(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """The product loads two of them at once."""
    given: list[list[int]] = []
    copies: list[torch.Tensor] = []

    def launched(tensors: list[torch.Tensor], addresses: list[int]) -> None:
        given.append(list(addresses))
        copies.append(tensors[place].clone())

    monkeypatch.setattr(launch, "bind_module", lambda *_: launched)
    spec, place = find_kernel(op, "sm_90a", "hip", "persistent"), 3
    problem = GroupedGemmProblem(100, 64, 128, 1) if op != "linear" else LinearProblem(100, 64, 128)
    run = launch.bind(spec, SM90, problem, spec.configure(SM90, problem), 0)
    scales = torch.arange(257, dtype=torch.uint8)
    for ws in (scales[1:], scales[:-1]):
        tensors = [torch.empty(2) for _ in range(6 if op == "linear" else 8)]
        tensors[place] = ws
        addresses = [tensor.data_ptr() for tensor in tensors]
        run(tensors, addresses)
        for got, copied in zip(given[-2:], copies[-2:], strict=True):
            kept = [at for at in range(len(addresses)) if got[at] == addresses[at]]
            assert len(kept) == len(addresses) - addresses[place] % 2
            assert got[place] % 2 == 0 and torch.equal(copied, ws)


def test_the_workspace_holds_every_group_in_slabs_of_its_own() -> None:
    config = PERSISTENT.configure(SM90, GroupedGemmProblem(M=1, N=32, K=32, G=1))
    for M, G, K in ((1, 1, 32), (1000, 7, 96), (5, 300, 2880), (65536, 32, 7168)):
        problem = GroupedGemmProblem(M=M, N=64, K=K, G=G)
        slabs = min(M, G) + (M - min(M, G)) // 64
        expanded = slabs * 64 * -(-K // 64) * 64 * 2
        size = PERSISTENT.workspace_bytes(SM90, problem, config)
        of_tiles = (slabs + 16) * (24 + 8 * -(-K // 2048))
        of_rows = G * 64 // 8
        assert expanded + of_rows < size <= expanded + of_tiles + of_rows + 2048
