"""The simulator as a program: ``python -m aiter_mx.sim run kernel.hsaco --kernel NAME ...``."""

from __future__ import annotations

import argparse
import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aiter_mx.code_object import occupancy
from aiter_mx.errors import AiterMxError
from aiter_mx.region import Region
from aiter_mx.sim.program import SCHEDULES, Dim3, Program, SimOptions
from aiter_mx.sim.report import LaunchReport

_SCALARS = {"i32": "<i", "u32": "<I", "i64": "<q", "f32": "<f"}
_TYPES = {
    "u8": np.uint8,
    "i8": np.int8,
    "u16": np.uint16,
    "i32": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
}
_ARGS_HELP = """\
the kernel's arguments in order, each one of
  i32=N u32=N i64=N f32=X      a number
  r=FILE.npy                   an array to read
  rw=FILE.npy                  an array to read and write; the file is rewritten afterwards
  w=FILE.npy:TYPE[SHAPE]       an array to write, saved afterwards, as in w=c.npy:f32[64,128]
  r=random:TYPE[SHAPE]         random bytes
"""


@dataclass
class _Array:
    values: np.ndarray[Any, Any]
    access: str
    save_to: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        program = Program.from_image(options.code_object.read_bytes())
        if options.command == "info":
            _info(program)
        else:
            _run(program, options)
    except (AiterMxError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aiter_mx.sim", description="Runs gfx950 code objects on the CPU."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="list a code object's kernels and what they use")
    info.add_argument("code_object", type=Path)
    run = commands.add_parser(
        "run", help="launch a kernel", formatter_class=argparse.RawTextHelpFormatter
    )
    run.add_argument("code_object", type=Path)
    run.add_argument("--kernel", help="its name; may be left out when there is one")
    run.add_argument("--grid", type=_dim3, default=(1, 1, 1), help="workgroups: X[,Y[,Z]]")
    run.add_argument("--block", type=_dim3, default=(64, 1, 1), help="lanes of a workgroup")
    run.add_argument("--shared", type=int, default=0, help="bytes of dynamic LDS")
    run.add_argument("--args", nargs="*", default=[], metavar="ARG", help=_ARGS_HELP)
    run.add_argument("--seed", type=int, help="of the schedule and of random arrays")
    run.add_argument("--schedule", choices=SCHEDULES)
    run.add_argument("--delay", action="store_true", help="let memory be as late as waits allow")
    run.add_argument("--lax", action="store_true", help="check addresses only")
    return parser


def _dim3(text: str) -> Dim3:
    numbers = [int(part) for part in text.split(",")]
    if not 1 <= len(numbers) <= 3:
        raise argparse.ArgumentTypeError(f"one to three numbers expected, got {text!r}")
    x, y, z = numbers + [1] * (3 - len(numbers))
    return x, y, z


def _info(program: Program) -> None:
    print(f"target {program.code_object.target}")
    for kernel in program.code_object.kernels.values():
        arguments = [a for a in kernel.args if not a.value_kind.startswith("hidden_")]
        listed = ", ".join(f"{a.value_kind}:{a.size}" for a in arguments)
        print(
            f"{kernel.name}({listed})\n  {kernel.vgprs} VGPRs ({kernel.agprs} AGPRs), "
            f"{kernel.sgprs} SGPRs, spills {kernel.vgpr_spills}+{kernel.sgpr_spills}, "
            f"scratch {kernel.scratch_bytes} B, LDS {kernel.lds_bytes} B, workgroups of up to "
            f"{kernel.max_workgroup} lanes, {occupancy(kernel)} waves a SIMD"
        )


def _run(program: Program, options: argparse.Namespace) -> None:
    kernels = list(program.code_object.kernels)
    if not options.kernel and len(kernels) != 1:
        raise ValueError(f"name one of the kernels with --kernel: {', '.join(kernels)}")
    rng = np.random.default_rng(options.seed or 0)
    packed, arrays = b"", []
    for text in options.args:
        value = _argument(text, rng)
        if isinstance(value, _Array):
            arrays.append((text, value))
            value = struct.pack("<Q", value.values.ctypes.data)
        packed += bytes(-len(packed) % len(value)) + value
    report = program.launch(
        options.kernel or kernels[0],
        options.grid,
        options.block,
        packed,
        options.shared,
        [Region(text, a.values.ctypes.data, a.values.nbytes, a.access) for text, a in arrays],
        _options(options),
    )
    for _, array in arrays:
        if array.save_to:
            np.save(array.save_to, array.values)
    print(describe(report))


def _options(given: argparse.Namespace) -> SimOptions:
    """The environment's options, but for what is given."""
    options = SimOptions.from_environment()
    return replace(
        options,
        strict=options.strict and not given.lax,
        schedule=given.schedule or options.schedule,
        seed=options.seed if given.seed is None else given.seed,
        delay=(options.delay or given.delay) and not given.lax,
        count_unique=True,
        count_conflicts=True,
    )


def _argument(text: str, rng: np.random.Generator) -> bytes | _Array:
    """One of ``--args``. Raises ValueError when it is none of the forms."""
    kind, _, value = text.partition("=")
    if kind in _SCALARS:
        number = float(value) if kind == "f32" else int(value, 0)
        return struct.pack(_SCALARS[kind], number)
    match = re.fullmatch(r"(.+):(\w+)\[([\d,]+)\]", value)
    if kind in ("r", "rw") and not match:
        path = Path(value)
        return _Array(np.ascontiguousarray(np.load(path)), kind, path if kind == "rw" else None)
    if kind not in ("r", "w") or not match or match[2] not in _TYPES:
        raise ValueError(f"cannot use argument {text!r}; it must be\n{_ARGS_HELP}")
    shape = tuple(int(part) for part in match[3].split(","))
    array = np.zeros(shape, _TYPES[match[2]])
    if kind == "w":
        return _Array(array, "w", Path(match[1]))
    array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, dtype=np.uint8)
    return _Array(array, "r", None)


def describe(report: LaunchReport) -> str:
    """A report as lines for people."""
    rate = report.instructions / max(report.seconds, 1e-9) / 1e6
    lines = [
        f"{report.kernel}: {report.waves} waves, {report.instructions} wave instructions in "
        f"{report.seconds:.3f} s ({rate:.1f} million a second)",
        "by class: " + ", ".join(f"{n} {c}" for n, c in sorted(report.by_class.items())),
        f"memory: {report.bytes_read} B read, {report.bytes_written} B written, "
        f"{report.scalar_bytes_read} B by scalar loads, {report.scratch_bytes} B scratch",
        f"distinct: {report.unique_bytes_read} B read, {report.unique_bytes_written} B written",
        f"LDS: {report.lds_bytes_read} B read, {report.lds_bytes_written} B written, "
        f"{report.lds_conflicts} bank conflicts",
        f"address units: {report.address_cycles} cycles",
    ]
    if report.waits:
        mean = report.in_flight_bytes / report.waits
        lines.append(f"waits for memory: {report.waits}, with {mean:.0f} B on their way each")
    lines += [f"{name}: {count}" for name, count in report.mfma.items()]
    lines += [f"matrix passes, {name}: {count}" for name, count in report.mfma_passes.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
