"""``aiter-mx info``: what the package finds on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from aiter_mx._version import __version__
from aiter_mx.cli.screen import format_bytes, heading, make_console, print_fields
from aiter_mx.errors import AiterMxError

_PACKAGES = ("torch", "triton", "hip-python", "cuda-bindings")


def info() -> None:
    """Show GPUs, compilers, the cache, tuned tables and versions."""
    console = make_console()
    _section(console, "GPUs", _gpus)
    _section(console, "Compilers", _compilers)
    _section(console, "Cache", _cache)
    _section(console, "Tuned tables", _tables)
    _section(console, "Versions", _versions)


def _section(console: Console, title: str, fields: Callable[[], dict[str, object]]) -> None:
    heading(console, title)
    print_fields(console, fields())


def _gpus() -> dict[str, object]:
    import torch

    from aiter_mx.target import ARCHS, gpu_target

    if not torch.cuda.is_available():
        return {"none": "CPU tensors run on the torch reference, or on the simulated gfx950"}
    found: dict[str, object] = {}
    for index in range(torch.cuda.device_count()):
        target = gpu_target(index)
        known = "" if target.arch in ARCHS else f"; no kernels of ours, only for {', '.join(ARCHS)}"
        found[f"GPU {index}"] = f"{target.name}, {target.arch}, {target.cu_num} CUs{known}"
    return found


def _compilers() -> dict[str, object]:
    from aiter_mx.jit.toolchain import find_toolchain
    from aiter_mx.target import ARCHS

    found: dict[str, object] = {}
    for arch in ARCHS:
        try:
            toolchain = find_toolchain(arch)
            found[arch] = f"{toolchain.compiler} ({toolchain.kind}): {toolchain.reason}"
        except AiterMxError as error:
            found[arch] = f"none: {error}"
    return found


def _cache() -> dict[str, object]:
    from aiter_mx.jit.contents import entries
    from aiter_mx.jit.folder import cache_dir

    found = list(entries())
    size = sum(entry.size_bytes for entry in found)
    return {"folder": cache_dir(), "holds": f"{len(found)} artifacts, {format_bytes(size)}"}


def _tables() -> dict[str, object]:
    from aiter_mx.dispatch.tables import read_table, table_files
    from aiter_mx.kernels.registry import ops
    from aiter_mx.target import ARCHS

    found: dict[str, object] = {}
    for arch in ARCHS:
        for op in ops():
            for path in table_files(arch, op):
                try:
                    found[str(path)] = f"{sum(1 for _ in read_table(path))} rows"
                except AiterMxError as error:
                    found[str(path)] = f"refused: {error}"
    return found or {"none": "routes follow the kernels' envelopes"}


def _versions() -> dict[str, object]:
    found: dict[str, object] = {"aiter-mx": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
