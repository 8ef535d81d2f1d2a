"""``aiter-mx isa``: what the compiler made of a kernel."""

from __future__ import annotations

from dataclasses import MISSING
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aiter_mx.cli.explain import describe_config
from aiter_mx.cli.fields import Axis, parse_fields, problems
from aiter_mx.cli.screen import heading, make_console, make_table, print_fields

if TYPE_CHECKING:
    from aiter_mx.kernels.spec import KernelSpec

_SHAPE: dict[str, Axis] = {"M": [1], "N": [2304], "K": [6144]}


def isa(
    context: typer.Context,
    kernel: Annotated[str, typer.Argument(help="Name of the kernel, such as gemv.")],
    arch: Annotated[str, typer.Option(help="gfx950 or sm_90a.")] = "gfx950",
    run: Annotated[bool, typer.Option(help="Also simulate it on random operands.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of a compute unit's timeline; implies --run.")
    ] = None,
    text: Annotated[bool, typer.Option(help="Print the whole disassembly too.")] = False,
) -> None:
    """Show a kernel's registers, occupancy and instructions.

    The shape and the kernel's parameters may be given as options: isa gemv --M 4 --rows 2; what
    is left out is what dispatch would choose. --run shows what a launch of it does (on gfx950), the
    time that an MI355X is predicted to take, and the source lines that waves wait at for longest.
    """
    from aiter_mx.cli.disassembly import disassemble
    from aiter_mx.dispatch.dispatcher import route
    from aiter_mx.jit.build import build
    from aiter_mx.kernels.registry import problem_type
    from aiter_mx.launch import build_request
    from aiter_mx.target import SIMULATED_ARCHS, hardware

    run = run or plot is not None
    if plot is not None and not plot.suffix:
        plot = plot.with_suffix(".png")
    if run and arch not in SIMULATED_ARCHS:
        raise ValueError(f"--run simulates {' and '.join(SIMULATED_ARCHS)}, not {arch}")
    target = hardware(arch)
    spec = _find(kernel, arch)
    fields = parse_fields(context.args)
    known = {param.name for param in spec.params}
    chosen = {name: fields.pop(name) for name in list(fields) if name in known}
    asked_for = {f.name for f in fields_of(problem_type(spec.op)) if f.default is MISSING}
    shape = {name: value for name, value in _SHAPE.items() if name in asked_for}
    problem, *others = problems(spec.op, {**shape, **fields})
    if others:
        raise ValueError(f"isa shows one shape at a time, got {len(others) + 1}")
    if getattr(problem, "is_empty", False):
        raise ValueError(
            f"the result of {describe_config(vars(problem))} is empty, so no kernel is compiled"
        )
    refusal = spec.refusal(target, problem)
    if refusal is not None:
        raise ValueError(f"{spec.op}/{spec.name} does not cover this shape: {refusal}")
    tuned = route(spec.op, target, problem)
    is_chosen = (tuned.backend, tuned.kernel) == (spec.backend, spec.name)
    config = dict(tuned.config if is_chosen else spec.configure(target, problem))
    for name, (value, *_) in chosen.items():
        if not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        config[name] = value
    spec.check_config(config)
    assert spec.module is not None  # _find looks for no other
    built = build(build_request(spec, target, problem, config))
    geometry = spec.module.geometry(target, problem, config)
    found = disassemble(built.path, built.image, arch, spec.module.symbol, geometry)

    console = make_console()
    launch = f"{geometry.grid} workgroups of {geometry.block}, {geometry.shared_bytes} bytes of LDS"
    shown = {
        "kernel": f"{spec.op}/{spec.name} for {arch}",
        "problem": describe_config(vars(problem)),
        "config": describe_config(config),
        "launch": launch,
        **found.usage,
    }
    print_fields(console, dict(shown))
    heading(console, "Parameters")
    table = make_table("name", "value", "may be", "meaning", numbers=("value",))
    for param in spec.params:
        values = " ".join(map(str, param.values))
        table.add_row(param.name, str(config[param.name]), values, param.doc)
    console.print(table)
    heading(console, "Instructions, as they stand in the code")
    table = make_table("class", "count", "share", numbers=("count", "share"))
    total = sum(found.mix.values())
    for name, count in found.mix.most_common():
        table.add_row(name, str(count), f"{count / total:.0%}")
    table.add_row("all", str(total), "")
    console.print(table)
    if run:
        from aiter_mx.cli.trial import print_trial

        print_trial(console, spec, problem, config, plot)
    if text:
        heading(console, "Disassembly")
        print(found.text)


def _find(name: str, arch: str) -> KernelSpec:
    from aiter_mx.kernels.registry import kernels_of, ops

    every = [spec for op in ops() for spec in kernels_of(op)]
    ours = [spec for spec in every if spec.module is not None and arch in spec.module.sources]
    for spec in ours:
        if name in (spec.name, f"{spec.op}/{spec.name}"):
            return spec
    known = ", ".join(f"{spec.op}/{spec.name}" for spec in ours)
    raise ValueError(f"no kernel {name!r} for {arch}; there are {known or 'none'}")
