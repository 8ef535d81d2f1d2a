"""From a kernel of the registry to a launch: build, load once a process, bind once a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import torch

from aiter_mx import counters
from aiter_mx.errors import CaptureError
from aiter_mx.forks import Lock
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.kernels.spec import Arg, Config, KernelSpec, Module, Problem, TensorMap
from aiter_mx.region import Region
from aiter_mx.runtimes.base import PackedArgs, Runtime
from aiter_mx.target import Target

Tensors: TypeAlias = Sequence[Any]
"""A kernel's pointer arguments in order: tensors, or None for a null pointer."""
Run: TypeAlias = Callable[[Tensors, Sequence[int]], None]
"""Computes an op over its tensors (outputs among them), given also their addresses."""

_functions: dict[tuple[BuildRequest, str, str, int, int], Any] = {}
_functions_lock = Lock()
_MOST_MAPS = 4096  # that a bound problem keeps: more than the layers of a model


@cache
def runtime_of(name: str) -> Runtime:
    """The runtime ``hip``, ``cuda`` or ``sim``; its bindings are imported here, on first use."""
    runtime: Runtime = import_module(f"aiter_mx.runtimes.{name}")
    return runtime


def build_request(
    spec: KernelSpec, target: Target, problem: Problem, config: Config
) -> BuildRequest:
    """What to compile for a problem and a configuration on a target, earlier launches apart."""
    return module_request(_module_of(spec), target, problem, config)


def module_request(
    module: Module, target: Target, problem: Problem, config: Config
) -> BuildRequest:
    """What to compile for one launch."""
    defines = module.defines(target, problem, config)
    return BuildRequest(
        source=module.sources[target.arch],
        arch=target.arch,
        defines=tuple(sorted(defines.items())),
    )


def load_function(
    spec: KernelSpec,
    target: Target,
    problem: Problem,
    config: Config,
    device: int,
    module: Module | None = None,
) -> Any:
    """The runtime's function for a kernel variant, built and loaded if this is its first use.

    Args:
        spec: the kernel.
        target: what it runs on.
        problem: the shape and dtypes.
        config: the kernel's compile-time parameters.
        device: torch's number of the GPU; 0 for the simulator.
        module: which of its launches; by default the last.

    Raises:
        CaptureError: the variant is not loaded yet and the current stream is being captured.
    """
    module = module or _module_of(spec)
    request = module_request(module, target, problem, config)
    shared_bytes = module.geometry(target, problem, config).shared_bytes
    key = (request, module.symbol, target.runtime, device, shared_bytes)
    function = _functions.get(key)
    if function is not None:
        return function
    runtime = runtime_of(target.runtime)
    if runtime.is_capturing(device):
        raise not_warm(f"{spec.backend}/{spec.name}", spec.op, problem, target)
    image = build(request).image  # outside the lock: others may be building something else
    with _functions_lock:
        if key not in _functions:
            loaded = runtime.load(image, device)
            _functions[key] = runtime.get_function(loaded, module.symbol, shared_bytes)
        return _functions[key]


def not_warm(what: str, op: str, problem: Problem, target: Target) -> CaptureError:
    """The error for a first use under stream capture; it names the call to make before.

    Args:
        what: is not loaded.
        op: that is to be called with ``problem``.
        problem: shape and dtypes.
        target: that it was to run on.
    """
    given = {f.name: getattr(problem, f.name) for f in fields(problem)}
    usual = {f.name: f.default for f in fields(problem)}
    asked = [f"{name}={v!r}" for name, v in given.items() if v != usual[name]]
    shape = ", ".join(asked + ["exact_sums=True"] * target.exact_sums)
    return CaptureError(
        f"{what} is not loaded for this shape, and nothing can be built while "
        f"a stream is being captured; before the capture call "
        f"aiter_mx.warmup({op!r}, {shape})"
    )


def bind(spec: KernelSpec, target: Target, problem: Problem, config: Config, device: int) -> Run:
    """What launches a kernel variant on one problem, on torch's current stream.

    It belongs to the calling thread: its arguments are patched in place, and its launch needs the
    thread's context.

    Args:
        spec: the kernel; its backend is ``hip``.
        target: what it runs on.
        problem: the shape and dtypes.
        config: the kernel's compile-time parameters.
        device: torch's number of the GPU; 0 for the simulator.
    """
    workspace_bytes = spec.workspace_bytes(target, problem, config)
    launches = spec.launches(target, problem, config)
    runs = [bind_module(spec, module, target, problem, config, device) for module in launches]
    words = spec.counters(target, problem, config)
    pointers = _module_of(spec).pointers
    nulls = [None] * sum(arg.access == "null" for arg in pointers)
    no_addresses = [0] * len(nulls)
    aligned = [(at, arg.align) for at, arg in enumerate(pointers) if arg.align > 1]
    if len(runs) == 1 and not (workspace_bytes or words or nulls or aligned):
        return runs[0]

    def run(tensors: Tensors, addresses: Sequence[int]) -> None:
        where = tensors[0].device  # of an operand that no call leaves out
        tensors, addresses = [*tensors, *nulls], [*addresses, *no_addresses]
        if workspace_bytes:
            # The allocator hands it out again only to what this stream does later.
            own = torch.empty_strided((workspace_bytes,), (1,), dtype=torch.uint8, device=where)
            tensors.append(own)
            addresses.append(own.data_ptr())
        if words:
            runtime = runtime_of(target.runtime)
            stream, capturing = runtime.current_stream(device), runtime.is_capturing(device)
            own = counters.counters(words, where, stream, capturing)
            tensors.append(own)
            addresses.append(own.data_ptr())
        for at, align in aligned:
            if addresses[at] % align:
                tensors[at] = tensors[at].clone()
                addresses[at] = tensors[at].data_ptr()
        for each in runs:
            each(tensors, addresses)

    return run


def call(run: Run, *tensors: torch.Tensor | None) -> None:
    """Run over these tensors from their first bytes on."""
    run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def bind_module(
    spec: KernelSpec,
    module: Module,
    target: Target,
    problem: Problem,
    config: Config,
    device: int,
) -> Run:
    """``bind`` of one launch of a kernel's."""
    function = load_function(spec, target, problem, config, device, module)
    runtime = runtime_of(target.runtime)
    described = [describe(target, problem, config) for describe in module.tensor_maps]
    first_map = len(module.args)
    maps_at = [runtime.map_offset(function, first_map + i) for i in range(len(described))]
    args = PackedArgs(module.args, module.scalars(target, problem, config), maps_at)
    start = runtime.bind(function, module.geometry(target, problem, config), args)
    if target.runtime == "sim":
        return _simulated(start, args, module.pointers)
    set_pointers = _setting_maps(args, described, runtime) if described else args.set_pointers
    current_stream, current_device = runtime.current_stream, torch._C._cuda_getDevice

    def run(tensors: Tensors, addresses: Sequence[int]) -> None:
        set_pointers(*addresses)
        if current_device() == device:
            start(current_stream(device))
        else:
            with torch.cuda.device(device):
                start(current_stream(device))

    return run


def _setting_maps(
    args: PackedArgs, described: Sequence[TensorMap], runtime: Runtime
) -> Callable[..., None]:
    """What writes the pointers and the tensor maps of the matrices at some of them.

    A map depends on the address alone, so that one that was made stays right.
    """
    set_pointers = args.set_pointers
    setting = [
        (each.pointer, _setting_map(set_map, each, runtime))
        for set_map, each in zip(args.set_maps, described, strict=True)
    ]

    def set_all(*addresses: int) -> None:
        for pointer, set_map in setting:
            set_map(addresses[pointer])
        set_pointers(*addresses)

    return set_all


def _setting_map(
    set_map: Callable[[bytes], None], described: TensorMap, runtime: Runtime
) -> Callable[[int], None]:
    maps: dict[int, bytes] = {}

    def set_map_of(address: int) -> None:
        encoded = maps.get(address)
        if encoded is None:
            if len(maps) == _MOST_MAPS:
                maps.clear()
            encoded = maps[address] = runtime.encode_map(described, address)
        set_map(encoded)

    return set_map_of


def _simulated(start: Callable[[int], None], args: PackedArgs, pointers: Sequence[Arg]) -> Run:
    def run(tensors: Tensors, addresses: Sequence[int]) -> None:
        args.set_pointers(*addresses)
        args.regions = tuple(
            Region(pointer.name, tensor.data_ptr(), tensor.nbytes, pointer.access)
            for pointer, tensor in zip(pointers, tensors, strict=True)
            if tensor is not None
        )
        start(0)

    return run


def _module_of(spec: KernelSpec) -> Module:
    if spec.module is None:
        raise ValueError(f"{spec.backend}/{spec.name} is not a kernel that this package builds")
    return spec.module
