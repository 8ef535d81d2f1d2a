"""``aiter-mx build``: fills the cache ahead of time, for containers and for other machines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from aiter_mx.cli.fields import DECODE_LINEARS, Axis, parse_fields, parse_shape, problems
from aiter_mx.cli.screen import make_console, make_progress

if TYPE_CHECKING:
    from aiter_mx.jit.build import BuildRequest
    from aiter_mx.kernels.spec import Problem


def build(
    context: typer.Context,
    arch: Annotated[
        str | None,
        typer.Option(help="gfx950,sm_90a; by default each whose compiler is present."),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="MxNxK, as in 1-16x2304x6144; may be repeated.")
    ] = None,
    tables: Annotated[bool, typer.Option(help="The shapes of the tuned tables.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time.")] = None,
) -> None:
    """Compile the kernels of OP (linear) ahead of time.

    The shapes are those given by --shape or by the op's fields (--M 1-16 --N 2304 --K 6144), the
    tuned ones with --tables, and otherwise the decode shapes of a large model. No GPU is needed.
    """
    from aiter_mx.jit.build import build_all, is_cached

    console = make_console()
    # No argument of typer's: it would take an unknown option's value for the op.
    named = bool(context.args) and not context.args[0].startswith("-")
    op = context.args[0] if named else "linear"
    fields = parse_fields(context.args[named:])
    started = time.perf_counter()
    requests: list[BuildRequest] = []
    for name in _archs(arch):
        shapes = _shapes(op, name, fields, shape or [], tables)
        found = _requests(op, name, shapes)
        console.print(f"{name}: {len(shapes)} shapes, {len(found)} kernel variants")
        requests += found
    missing = [request for request in requests if not is_cached(request)]
    with make_progress() as progress:
        task = progress.add_task("compiling", total=len(missing))
        build_all(missing, jobs=jobs, on_done=lambda *_: progress.advance(task))
    seconds = time.perf_counter() - started
    console.print(
        f"{len(missing)} compiled in {seconds:.1f} s, {len(requests) - len(missing)} were cached"
    )


def _archs(text: str | None) -> list[str]:
    from aiter_mx.errors import ToolchainError
    from aiter_mx.jit.toolchain import find_toolchain
    from aiter_mx.target import ARCHS

    if text is not None:
        return text.split(",")
    found, refused = [], []
    for arch in ARCHS:
        try:
            find_toolchain(arch)
            found.append(arch)
        except ToolchainError as error:
            refused.append(str(error))
    if not found:
        raise ToolchainError("\n".join(refused))
    return found


def _shapes(
    op: str, arch: str, fields: dict[str, Axis], texts: list[str], tables: bool
) -> list[Problem]:
    from aiter_mx.dispatch.tables import load_rows

    axes = [{**fields, **parse_shape(text)} for text in texts]
    if fields and not texts:
        axes = [fields]
    if not axes and not tables:
        axes = [{"M": [*range(1, 17)], "N": [n], "K": [k]} for n, k in DECODE_LINEARS.values()]
    found = [problem for each in axes for problem in problems(op, each)]
    return [*found, *load_rows(arch, op).problems()] if tables else found


def _requests(op: str, arch: str, shapes: list[Problem]) -> list[BuildRequest]:
    from aiter_mx.dispatch.dispatcher import route
    from aiter_mx.kernels.registry import launches_of
    from aiter_mx.plan import build_requests
    from aiter_mx.target import hardware

    target = hardware(arch)
    launches = [launch for shape in shapes for launch in launches_of(op, shape, arch)]
    routes = [route(name, target, part) for name, part in launches]
    return build_requests(target, [part for _, part in launches], routes)
