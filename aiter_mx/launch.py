"""From a kernel of the registry to a launch: build, load once a process, bind once a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiter_mx.errors import CaptureError
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.kernels.spec import Config, KernelSpec, Module, Problem
from aiter_mx.runtimes.base import PackedArgs, Region, Runtime
from aiter_mx.target import Target

if TYPE_CHECKING:
    import torch

_functions: dict[tuple[BuildRequest, str, int, int], Any] = {}
_functions_lock = threading.Lock()


@cache
def runtime_of(name: str) -> Runtime:
    """The runtime ``hip``, ``cuda`` or ``sim``; its bindings are imported here, on first use."""
    runtime: Runtime = import_module(f"aiter_mx.runtimes.{name}")
    return runtime


def build_request(
    spec: KernelSpec, target: Target, problem: Problem, config: Config
) -> BuildRequest:
    """What to compile for a problem and a configuration on a target."""
    module = _module_of(spec)
    defines = module.defines(target, problem, config)
    return BuildRequest(
        source=module.sources[target.arch],
        arch=target.arch,
        defines=tuple(sorted(defines.items())),
    )


def load_function(
    spec: KernelSpec, target: Target, problem: Problem, config: Config, device: int
) -> Any:
    """The runtime's function for a kernel variant, built and loaded if this is its first use.

    Raises:
        CaptureError: the variant is not loaded yet and the current stream is being captured.
    """
    module = _module_of(spec)
    request = build_request(spec, target, problem, config)
    shared_bytes = module.geometry(target, problem, config).shared_bytes
    key = (request, target.runtime, device, shared_bytes)
    function = _functions.get(key)
    if function is not None:
        return function
    runtime = runtime_of(target.runtime)
    if runtime.is_capturing(device):
        raise not_warm(spec, problem)
    image = build(request).image  # outside the lock: others may be building something else
    with _functions_lock:
        if key not in _functions:
            loaded = runtime.load(image, device)
            _functions[key] = runtime.get_function(loaded, module.symbol, shared_bytes)
        return _functions[key]


def not_warm(spec: KernelSpec, problem: Problem) -> CaptureError:
    """The error for a first use under stream capture; it names the call to make before."""
    shape = ", ".join(f"{name}={value!r}" for name, value in vars(problem).items())
    return CaptureError(
        f"{spec.backend}/{spec.name} is not loaded for this shape, and nothing can be built while "
        f"a stream is being captured; before the capture call "
        f"aiter_mx.warmup({spec.op!r}, {shape})"
    )


class Launch:
    """A kernel variant bound to one problem on one device, for the thread that made it.

    Args:
        spec: the kernel; its backend is ``hip``.
        target: what it runs on.
        problem: the shape and dtypes.
        config: the kernel's compile-time parameters.
        device: torch's number of the GPU; 0 for the simulator.
    """

    __slots__ = ("_args", "_current_stream", "_device", "_pointers", "_simulated", "_start")

    def __init__(
        self, spec: KernelSpec, target: Target, problem: Problem, config: Config, device: int
    ) -> None:
        module = _module_of(spec)
        function = load_function(spec, target, problem, config, device)
        runtime = runtime_of(target.runtime)
        self._pointers = tuple(arg for arg in module.args if arg.kind == "pointer")
        self._args = PackedArgs(module.args, module.scalars(target, problem, config))
        geometry = module.geometry(target, problem, config)
        self._start = runtime.bind(function, geometry, self._args)
        self._current_stream = runtime.current_stream
        self._device = device
        self._simulated = target.runtime == "sim"

    def __call__(self, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> None:
        """Launch on torch's current stream.

        Args:
            tensors: the pointer arguments, in the kernel's order; None is a null pointer.
            addresses: their ``data_ptr()``, 0 for None.
        """
        self._args.set_pointers(*addresses)
        if self._simulated:
            self._args.regions = tuple(
                Region(arg.name, tensor.data_ptr(), tensor.nbytes, arg.access)
                for arg, tensor in zip(self._pointers, tensors, strict=True)
                if tensor is not None
            )
        self._start(self._current_stream(self._device))


def _module_of(spec: KernelSpec) -> Module:
    if spec.module is None:
        raise ValueError(f"{spec.backend}/{spec.name} is not a kernel that this package builds")
    return spec.module
