"""What tables, routes and lists must keep whatever they are given: drawn by hypothesis."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiter_mx
from aiter_mx.dispatch.cells import format_config, parse_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.tables import read_table
from aiter_mx.errors import TableError
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.kernels.spec import Problem
from aiter_mx.layouts import LAYOUTS, padded_shape
from aiter_mx.target import ARCHS, hardware

COLUMNS = ("gfx", "cu_num", "op", "M", "N", "K", "out_dtype", "backend", "kernel", "config")
property_test = settings(max_examples=60, deadline=None)
dtypes = st.sampled_from(("bf16", "fp16", "fp32"))
blocks = st.integers(1, 300).map(lambda n: 32 * n)

linears = st.builds(
    LinearProblem,
    M=st.integers(1, 3000),
    N=st.integers(1, 20000),
    K=blocks,
    out_dtype=dtypes,
    bias=st.sampled_from(("none", "bf16", "fp32")),
    pdl=st.booleans(),
)
problems = st.one_of(
    st.tuples(st.just("linear"), linears),
    st.tuples(
        st.just("grouped_gemm"),
        st.builds(
            GroupedGemmProblem,
            M=st.integers(1, 70000),
            N=blocks,
            K=blocks,
            G=st.integers(1, 300),
            out_dtype=dtypes,
        ),
    ),
    st.tuples(
        st.just("moe_gemm"),
        st.builds(
            MoeGemmProblem,
            M=st.integers(1, 5000),
            N=st.integers(1, 9000),
            K=blocks,
            E=st.integers(1, 512),
            top_k=st.integers(1, 9),
            block_m=st.integers(1, 32).map(lambda n: 4 * n),
            out_dtype=dtypes,
        ),
    ),
    st.tuples(
        st.just("quantize"),
        st.builds(
            QuantizeProblem,
            M=blocks,
            N=blocks,
            dtype=dtypes,
            to=st.sampled_from(("rows", "columns", "both")),
        ),
    ),
)


@contextmanager
def table(*rows: dict[str, Any]) -> Iterator[Path]:
    """A table of a name of its own, as each is read once a process."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "rows.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        patch.setenv("AITER_MX_CONFIG", str(path))
        yield path


@property_test
@given(arch=st.sampled_from(ARCHS), posed=problems)
def test_every_problem_has_a_route_that_covers_it(arch: str, posed: tuple[str, Problem]) -> None:
    op, problem = posed
    target, chosen = hardware(arch), route(op, hardware(arch), problem)
    assert chosen.spec.refusal(target, problem) is None
    chosen.spec.check_config(chosen.config)
    assert chosen.reason and route(op, target, problem) == chosen
    if module := chosen.spec.module:
        geometry = module.geometry(target, problem, chosen.config)
        assert min(*geometry.grid, *geometry.block) >= 1


@settings(max_examples=25, deadline=None)
@given(arch=st.sampled_from(ARCHS), posed=problems)
def test_candidates_are_legal_and_distinct_and_begin_with_the_choice(
    arch: str, posed: tuple[str, Problem]
) -> None:
    op, problem = posed
    target = hardware(arch)
    for kernel in kernels_of(op):
        is_ours = kernel.backend == "hip" and kernel.is_for(arch)
        if not is_ours or kernel.refusal(target, problem) is not None:
            continue
        candidates = kernel.candidates(target, problem)[:64]
        assert kernel.configure(target, problem) in candidates
        assert len({format_config(config) for config in candidates}) == len(candidates)
        for config in candidates:
            kernel.check_config(config)
            assert parse_config(format_config(config)) == config


@property_test
@given(data=st.data(), problem=linears, cu_num=st.sampled_from((None, 256, 304)))
def test_the_last_row_of_a_shape_decides(
    data: st.DataObject, problem: LinearProblem, cu_num: int | None
) -> None:
    target = hardware("gfx950")
    taken = [k for k in kernels_of("linear") if k.backend == "hip" and k.is_for("gfx950")]
    taken = [kernel for kernel in taken if kernel.refusal(target, problem) is None]
    named = ("M", "N", "K", "out_dtype")
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        kernel = data.draw(st.sampled_from(taken)) if taken else None
        if kernel is None or kernel.module is None:
            return
        config = data.draw(st.sampled_from(kernel.candidates(target, problem)[:8]))
        row = {"gfx": "gfx950", "cu_num": cu_num or "", "op": "linear", "backend": "hip"}
        row |= {name: getattr(problem, name) for name in named}
        rows.append({**row, "kernel": kernel.name, "config": format_config(config)})
    other = {**rows[0], "M": problem.M + 7, "backend": "torch", "kernel": "reference", "config": ""}
    with table(other, *rows, other) as path:
        chosen = route("linear", target, problem)
        assert len([*read_table(path)]) == len(rows) + 2
        if cu_num in (None, target.cu_num):
            assert chosen.source == f"{path}:{len(rows) + 2}"
            last = (rows[-1]["kernel"], parse_config(rows[-1]["config"]))
            assert (chosen.kernel, dict(chosen.config)) == last
        else:
            assert chosen.source != f"{path}:{len(rows) + 2}"


@property_test
@given(column=st.sampled_from(COLUMNS), text=st.text(max_size=12))
def test_a_cell_of_any_text_is_read_or_refused_by_file_and_line(column: str, text: str) -> None:
    row = {"gfx": "gfx950", "cu_num": 256, "op": "linear", "M": 2, "N": 96, "K": 64}
    row |= {"out_dtype": "bf16", "backend": "torch", "kernel": "reference", "config": ""}
    with table({**row, column: text}) as path:
        try:
            found = [*read_table(path)]
        except TableError as error:
            assert str(path) in str(error)
        else:
            assert len(found) <= 1


@property_test
@given(
    layout=st.sampled_from(tuple(LAYOUTS)),
    leading=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(1, 300),
    columns=st.integers(1, 40),
)
def test_shuffling_moves_every_scale_to_a_place_of_its_own(
    layout: str, leading: list[int], rows: int, columns: int
) -> None:
    scales = torch.randint(1, 256, (*leading, rows, columns)).to(torch.uint8)
    shuffled = aiter_mx.shuffle_scales(scales, layout)
    assert shuffled.shape == (*leading, *padded_shape(rows, columns, layout))
    assert torch.equal(aiter_mx.unshuffle_scales(shuffled, layout, rows, columns), scales)
    assert int((shuffled != 0).sum()) == scales.numel()


@property_test
@given(data=st.data(), E=st.integers(1, 40), block_m=st.sampled_from((4, 12, 16, 64)))
def test_every_routed_row_is_listed_once_in_a_block_of_its_expert(
    data: st.DataObject, E: int, block_m: int
) -> None:
    M, top_k = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    ids = data.draw(st.lists(st.integers(-1, E), min_size=M * top_k, max_size=M * top_k))
    topk_ids = torch.tensor(ids, dtype=torch.int32).view(M, top_k)
    sorted_ids, experts, padded = aiter_mx.moe_align(topk_ids, block_m, E)
    used = int(padded)
    assert used % block_m == 0 and used <= len(sorted_ids)
    listed = sorted_ids[:used].tolist()
    rows = [t for t in listed if t != M * top_k]
    assert sorted(rows) == [t for t, expert in enumerate(ids) if 0 <= expert < E]
    owners = experts[: used // block_m].tolist()
    assert owners == sorted(owners)
    for block, owner in enumerate(owners):
        own = [t for t in listed[block * block_m :][:block_m] if t != M * top_k]
        assert own and {ids[t] for t in own} == {owner} and own == sorted(own)
