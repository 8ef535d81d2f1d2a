"""``aiter-mx explain``: the route of a shape, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aiter_mx.cli.fields import parse_fields, problems
from aiter_mx.cli.screen import make_console, make_table, print_fields


def explain(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="Name of the op, such as linear.")],
    arch: Annotated[
        str | None, typer.Option(help="gfx950 or sm_90a; by default what this machine has.")
    ] = None,
    cu_num: Annotated[int | None, typer.Option(help="Compute units, if not the usual.")] = None,
) -> None:
    """Say which kernel computes a shape, and why.

    The shape is given by the op's fields: explain linear --M 1-16 --N 2304 --K 6144. A whole layer
    (fused_moe) has a line for each of its launches.
    """
    from aiter_mx.dispatch.explain import default_target
    from aiter_mx.dispatch.explain import explain as explain_shape
    from aiter_mx.kernels.registry import launches_of, problem_type

    problem_type(op)  # a mistyped op is told before what is wrong with its shape
    fields = parse_fields(context.args)
    routes = [
        (shape, explain_shape(name, arch=arch, cu_num=cu_num, **vars(part)))
        for shape in problems(op, fields)
        for name, part in launches_of(op, shape, arch or default_target().arch)
    ]
    console = make_console()
    if len(routes) == 1:
        ((_, route),) = routes
        shown = {
            "route": f"{route.backend}/{route.kernel}",
            "config": describe_config(route.config),
            "reason": route.reason,
            "source": route.source,
        }
        print_fields(console, {name: value for name, value in shown.items() if value})
        return
    is_layer = any(route.op != op for _, route in routes)
    table = make_table(*fields, *(["launch"] if is_layer else []), "route", "config", "reason")
    for shape, route in routes:
        values = [str(getattr(shape, name)) for name in fields]
        values += [route.op] if is_layer else []
        kernel = f"{route.backend}/{route.kernel}"
        table.add_row(*values, kernel, describe_config(route.config), route.reason)
    console.print(table)


def describe_config(config: Any) -> str:
    """A kernel's configuration as text: ``rows=4 waves=8``."""
    return " ".join(f"{name}={value}" for name, value in config.items())
