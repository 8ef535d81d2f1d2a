"""What the registry says of a kernel: parameters, envelope, and how a compiled one is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ParamSpec, TypeVar

from aiter_mx.kernels import gfx950, sm90
from aiter_mx.numerics import BLOCK, DTYPE_BYTES
from aiter_mx.target import Target

OUT_DTYPES = tuple(DTYPE_BYTES)
BIAS_DTYPES = ("none", *OUT_DTYPES)
DTYPE_CODES = {"none": 0, "fp32": 1, "bf16": 2, "fp16": 3}  # csrc/include/common/target.h
MOST_SHARED_BYTES = {"gfx950": gfx950.LDS_BYTES, "sm_90a": sm90.SHARED_BYTES}
"""Of a workgroup."""
MOST_THREADS = 1024
"""Of a workgroup, on either."""
MAX_GRID_X = 1 << 20
"""Workgroups of a grid's x; more continue in y. HIP counts threads of a grid in 32 bits."""
MAX_INT = (1 << 31) - 1
Config = Mapping[str, int]
Problem = Any
"""A frozen dataclass of the op, in its kernels module: the shape and dtypes of one call."""
Key = tuple[Any, ...]
"""The values of those fields of a problem by which tables choose, ``KEY`` of its op."""
Parts = tuple[tuple[str, Problem], ...]
"""Ops and their problems that together are another problem, in the order of their launches."""
_Args = ParamSpec("_Args")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Param:
    """A compile-time parameter that a tuned table may choose."""

    name: str
    values: tuple[int, ...]
    doc: str


def require(
    problem: Problem, least: Mapping[str, int], known: Mapping[str, Iterable[object]]
) -> None:
    """Raise ValueError unless fields of a problem are at least, or one of, what is said here."""
    for name, smallest in least.items():
        if getattr(problem, name) < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {getattr(problem, name)}")
    for name, values in known.items():
        if getattr(problem, name) not in values:
            choices = ", ".join(map(str, values))
            raise ValueError(f"{name} must be one of {choices}, got {getattr(problem, name)!r}")


def require_blocks(name: str, value: int) -> None:
    """Raise ValueError unless a reduction's length is a positive multiple of a block's."""
    if value <= 0 or value % BLOCK:
        raise ValueError(f"{name} must be a multiple of {BLOCK}, got {name}={value}")


def as_defines(config: Config) -> dict[str, int]:
    """The definition of each parameter that is told to the compiler as it is."""
    return {f"MX_{name.upper()}": value for name, value in config.items()}


def combinations(params: Sequence[Param]) -> list[Config]:
    """Every configuration that the parameters' legal values allow."""
    names = [param.name for param in params]
    values = product(*(param.values for param in params))
    return [dict(zip(names, chosen, strict=True)) for chosen in values]


def first_of(
    candidates: Callable[[Target, Problem], Iterable[Config]],
) -> Callable[[Target, Problem], Config]:
    """What configures a kernel whose candidates are in the order in which they are preferred.

    Where an iterator gives them, no more than the first one is looked for.
    """

    def first(target: Target, problem: Problem) -> Config:
        for config in candidates(target, problem):
            return config
        raise ValueError(f"no configuration is known to fit {problem}")

    return first


def where_it_fits(layout: Callable[_Args, _Found | None]) -> Callable[_Args, _Found]:
    """``layout``, whose last arguments are a problem and a configuration, for those that fit.

    Raises:
        ValueError: when it is called, where ``layout`` finds none.
    """

    def found(*args: _Args.args, **kwargs: _Args.kwargs) -> _Found:
        one = layout(*args, **kwargs)
        if one is None:
            raise ValueError(f"{args[-1]} does not fit {args[-2]}")
        return one

    return found


@dataclass(frozen=True)
class Arg:
    """A kernel argument.

    Attributes:
        name: as in the source.
        kind: ``pointer``, ``i32``, ``i64`` or ``f32``.
        access: for a pointer, ``r``, ``w`` or ``rw``, which the simulator enforces, or ``null`` for
            one that is null in every call, behind those of the op's tensors.
        align: for a pointer, what its address is a multiple of; a call copies what begins
            elsewhere.
    """

    name: str
    kind: str
    access: str = ""
    align: int = 1


def pointers(access: str, *names: str) -> tuple[Arg, ...]:
    """Pointers of these names, which a kernel reads (``r``), writes (``w``) or both (``rw``)."""
    return tuple(Arg(name, "pointer", access) for name in names)


def numbers(kind: str, *names: str) -> tuple[Arg, ...]:
    """Arguments of these names that are no pointers, all of one kind."""
    return tuple(Arg(name, kind) for name in names)


def place_of(args: Sequence[Arg], name: str) -> int:
    """Which of them is the argument of that name."""
    return [arg.name for arg in args].index(name)


@dataclass(frozen=True)
class Geometry:
    """A launch.

    Attributes:
        grid: workgroups.
        block: threads of one workgroup.
        shared_bytes: dynamic LDS.
        overlaps: whether it may begin before the kernel ahead of it in the stream ends, which the
            kernel itself then waits for (CUDA's programmatic dependent launch).
        carveout_bytes: of an SM's memory that are shared, not cache, while the kernel runs; 0 is
            the driver's choice. An SM changes it when empty: kernels that run on it side by side
            want it alike.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    overlaps: bool = False
    carveout_bytes: int = 0


@dataclass(frozen=True)
class TensorMap:
    """A matrix of bytes that a kernel copies in boxes by Hopper's TMA.

    Attributes:
        pointer: which of the kernel's pointers it starts at.
        rows: of the matrix.
        row_bytes: of the matrix, a multiple of 16; rows follow one another.
        box_rows: of a box.
        box_bytes: of a row of a box, a multiple of 16; 64 or 128 where ``swizzled``.
        only_aligned: whether the matrix may begin at an address that is no multiple of 16, for
            which there is no map: the kernel then gets zeros.
        fetch_bytes: what the L2 cache fetches from memory at a time, 64, 128 or 256.
        swizzled: whether the 16-byte pieces of a row of a box are permuted, in shared memory, by
            the number of their 128 bytes (CU_TENSOR_MAP_SWIZZLE_64B, _128B).
    """

    pointer: int
    rows: int
    row_bytes: int
    box_rows: int
    box_bytes: int
    only_aligned: bool = False
    fetch_bytes: int = 256
    swizzled: bool = True


@dataclass(frozen=True)
class Module:
    """How a kernel of ours is built and launched.

    Attributes:
        sources: architecture to source file, relative to ``csrc/``.
        symbol: the ``extern "C"`` name of the entry point.
        args: the kernel's arguments, in order.
        defines: preprocessor definitions for a target, a problem and a configuration.
        geometry: the launch for a target, a problem and a configuration.
        scalars: the values of the arguments that are not pointers, in order, likewise.
        tensor_maps: what the kernel's further arguments, after all others, describe, likewise:
            matrices that it reads or stores by boxes; only with the runtime ``cuda``.
    """

    sources: Mapping[str, str]
    symbol: str
    args: tuple[Arg, ...]
    defines: Callable[[Target, Problem, Config], Mapping[str, int]]
    geometry: Callable[[Target, Problem, Config], Geometry]
    scalars: Callable[[Target, Problem, Config], tuple[int | float, ...]]
    tensor_maps: tuple[Callable[[Target, Problem, Config], TensorMap], ...] = ()

    @property
    def pointers(self) -> tuple[Arg, ...]:
        """Those of its arguments, which follow each other."""
        return tuple(arg for arg in self.args if arg.kind == "pointer")


@dataclass(frozen=True)
class Composition:
    """How a kernel computes what it covers only together with other launches.

    Attributes:
        parts: the problems that are solved in place of one, for a configuration of the kernel's;
            none where it is alone. One of the kernel's own op is solved by this kernel in this
            configuration, another as dispatch has it.
        joined_by: where there are parts, ``module:function``, imported when a problem is bound:
            from the problem, its parts and what runs them, and then ``around``, it makes what runs
            the whole.
        around: what a problem has launched beside the parts.
    """

    parts: Callable[[Target, Problem, Config], Parts]
    joined_by: str
    around: Callable[[Problem], tuple[Module, ...]] = lambda problem: ()


@dataclass(frozen=True)
class KernelSpec:
    """One way to compute an op.

    Attributes:
        op: name of the op.
        backend: ``hip`` (ours, on either vendor's GPU), ``triton``, ``vendor`` or ``torch``.
        name: the kernel's name in tables.
        params: what a table row may set.
        refusal: why the kernel does not cover a problem on a target, or None when it does.
        configure: the configuration to use when no table row chooses one.
        candidates: the configurations that a tuner should time.
        modules: for backend ``hip``, what is built and launched on one stream, in order: the
            kernel is the last, passes that prepare its operands are ahead of it. All take the same
            pointers.
        in_turn: what is launched in place of ``modules`` where they are launched several times,
            with other arguments each time: the same code objects.
        workspace_bytes: memory that the launches share and that lasts for one call, or 0; where it
            is not, they have one more pointer, the last. It may hold anything at first.
        counters: words of 32 bits that are zero when a launch begins, and that it leaves zero;
            where there are any, they are one more pointer, after the workspace.
        runner: of the other backends, ``module:function``, imported when a problem is bound. It
            takes the problem, the tensors in the order of the op's pointers, and the configuration.
        composed: how it computes problems, if any, that take other launches too.
        yields: why the other kernels of its backend come before it where no table decides, or
            None.
        invariant: the configuration to use where a row's bits must not depend on the batch, if that
            is another one.
        archs: the architectures that it is for, where nothing of its own is built; none for all.
    """

    op: str
    backend: str
    name: str
    params: tuple[Param, ...]
    refusal: Callable[[Target, Problem], str | None]
    configure: Callable[[Target, Problem], Config]
    candidates: Callable[[Target, Problem], Sequence[Config]]
    modules: tuple[Module, ...] = ()
    in_turn: Callable[[Target, Problem, Config], tuple[Module, ...]] | None = None
    workspace_bytes: Callable[[Target, Problem, Config], int] = lambda target, problem, config: 0
    counters: Callable[[Target, Problem, Config], int] = lambda target, problem, config: 0
    runner: str = ""
    composed: Composition | None = None
    yields: Callable[[Target, Problem], str | None] = lambda target, problem: None
    invariant: Callable[[Target, Problem], Config] | None = None
    archs: tuple[str, ...] = ()

    @property
    def module(self) -> Module | None:
        """The kernel's own launch, without those ahead of it; None where others build it."""
        return self.modules[-1] if self.modules else None

    def launches(self, target: Target, problem: Problem, config: Config) -> tuple[Module, ...]:
        """All launches for a problem, in their order."""
        return self.modules if self.in_turn is None else self.in_turn(target, problem, config)

    def parts(self, target: Target, problem: Problem, config: Config) -> Parts:
        """What is solved in place of a problem, as ``Composition`` says; none where it is alone."""
        return () if self.composed is None else self.composed.parts(target, problem, config)

    def is_for(self, arch: str) -> bool:
        """Whether the kernel can be built for an architecture, or is built by someone else."""
        known = self.modules[-1].sources if self.modules else self.archs or (arch,)
        return arch in known

    def misfit(self, target: Target, problem: Problem, config: Config) -> str | None:
        """Why a configuration whose values are legal has no launch for a problem, or None."""
        parts = self.parts(target, problem, config)
        own = next((part for op, part in parts if op == self.op), problem)
        for module in self.modules:
            try:
                launch = module.geometry(target, own, config)
            except ValueError as error:
                return str(error)
            for needed, most, what in (
                (launch.shared_bytes, MOST_SHARED_BYTES[target.arch], "bytes of shared memory"),
                (prod(launch.block), MOST_THREADS, "threads"),
            ):
                if needed > most:
                    return (
                        f"{dict(config)} does not fit {own}: a workgroup would have {needed} "
                        f"{what}, and can have {most}"
                    )
        return None

    def check_config(self, config: Config) -> None:
        """Raise ValueError unless ``config`` sets every parameter to one of its legal values."""
        legal = {param.name: param.values for param in self.params}
        for name, value in config.items():
            if name not in legal:
                raise ValueError(
                    f"kernel {self.name!r} has no parameter {name!r}; it has "
                    f"{', '.join(legal) or 'none'}"
                )
            if value not in legal[name]:
                raise ValueError(
                    f"parameter {name!r} of kernel {self.name!r} must be one of "
                    f"{legal[name]}, got {value}"
                )
        missing = [name for name in legal if name not in config]
        if missing:
            raise ValueError(f"kernel {self.name!r} also needs {', '.join(missing)}")


def reference(op: str) -> KernelSpec:
    """What torch computes for an op, on any device and for any problem: last in its line."""
    return KernelSpec(
        op=op,
        backend="torch",
        name="reference",
        params=(),
        refusal=lambda target, problem: None,
        configure=lambda target, problem: {},
        candidates=lambda target, problem: ({},),
        runner=f"aiter_mx.fallbacks.{op}_torch:run",
    )
