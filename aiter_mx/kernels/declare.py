"""Declares a kernel of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiter_mx.kernels.search import Search
from aiter_mx.kernels.spec import (
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    Problem,
    TensorMap,
)
from aiter_mx.target import Target


def declare(
    op: str,
    name: str,
    sources: Mapping[str, str],
    *,
    args: tuple[Arg, ...],
    defines: Callable[[Target, Problem, Config], Mapping[str, int]],
    geometry: Callable[[Target, Problem, Config], Geometry],
    scalars: Callable[[Target, Problem, Config], tuple[int | float, ...]],
    tensor_maps: tuple[Callable[[Target, Problem, Config], TensorMap], ...] = (),
    refusal: Callable[[Target, Problem], str | None] = lambda target, problem: None,
    params: tuple[Param, ...] = (),
    search: Search | None = None,
    configure: Callable[[Target, Problem], Config] = lambda target, problem: {},
    candidates: Callable[[Target, Problem], Sequence[Config]] | None = None,
    symbol: str = "",
    before: tuple[Module, ...] = (),
    **more: Any,
) -> KernelSpec:
    """A kernel of ours, whose symbol is ``aiter_mx_<op>_<name>`` unless told otherwise.

    Args:
        op, name, params: as of ``KernelSpec``.
        sources, symbol, args, defines, geometry, scalars, tensor_maps: as of ``Module``.
        refusal: as of ``KernelSpec``, for architectures with a source.
        search: what configures it and finds its candidates, or
        configure, candidates: do; by default the candidate is the configuration.
        before: what is launched ahead of it.
        more: other fields of ``KernelSpec``.
    """

    def refuses(target: Target, problem: Problem) -> str | None:
        if target.arch not in sources:
            return f"no {name} kernel for {target.arch}, only for {' and '.join(sources)}"
        return refusal(target, problem)

    if search is not None:
        configure, candidates = search.best, search.candidates
    symbol = symbol or f"aiter_mx_{op}_{name}"
    module = Module(sources, symbol, args, defines, geometry, scalars, tensor_maps)
    return KernelSpec(
        op=op,
        backend="hip",
        name=name,
        params=search.params if search is not None else params,
        refusal=refuses,
        configure=configure,
        candidates=candidates or (lambda target, problem: (configure(target, problem),)),
        modules=(*before, module),
        **more,
    )
