"""``python -m op_tests.peers SUITE CHECKOUT``: a peer's own tests, through ``aiter_mx.compat``.

    git clone https://github.com/deepseek-ai/DeepGEMM && python -m op_tests.peers deep_gemm DeepGEMM

The tests are run as they are, over their own helpers; only what they import from the peer's
compiled parts comes from this package. A case is *passed*, *failed*, or *not there*: this package
has no such name, or refuses the option with an error that says so. ``--save`` keeps the counts in
``docs/measured/<gpu>/peers_<suite>.csv``; ``--cpu`` has tensors for a GPU lie on the CPU, and
``--jobs=JOBS`` shares the cases among processes. Other options go to pytest; suites that are none
take ``--most=SIZE``, which leaves larger cases out, and ``--seconds=SECONDS``, after which they
leave out the rest. ``vllm_align`` takes ``--ours-on-gpu`` beside ``--cpu``: its own arithmetic is
many small steps, each of which a GPU would be waited for.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import aiter_mx
from aiter_mx.layouts import shuffle_scales
from op_tests.shards import Shard

OURS = str(Path(aiter_mx.__file__).parent)
Counts = Counter[tuple[str, str]]
"""How many cases of a test ended how."""
Run = Callable[[Path, list[str], Shard], Counts]
"""Runs the cases of a shard from a checkout, with options."""


class NotThere(NotImplementedError):
    """A name of the peer's that this package does not have."""


def stand_in(name: str, folder: Path | None = None, **names: object) -> ModuleType:
    """A module in place of the peer's, which looks for others in a folder of the checkout.

    What it lacks is there, and says so when it is called.
    """
    module = ModuleType(name)
    module.__dict__.update(names, __path__=[str(folder)] if folder else [])

    def lacking(missing: str) -> object:
        if missing.startswith("__"):
            raise AttributeError(missing)

        def call(*_: object, **__: object) -> object:
            raise NotThere(f"{name}.{missing}")

        return call

    module.__getattr__ = lacking  # type: ignore[method-assign]
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def names_of(*modules: str) -> dict[str, object]:
    """The public names of modules of ``aiter_mx.compat``."""
    found: dict[str, object] = {}
    for module in modules:
        named = vars(importlib.import_module(f"aiter_mx.compat.{module}"))
        found |= {name: value for name, value in named.items() if not name.startswith("_")}
    return found


def over_copies(function: object) -> object:
    """What calls a function with its tensors on a GPU, and brings back its results."""

    def call(*positional: object, **named: object) -> object:
        with torch._C.DisableTorchFunction():  # and so what has tensors lie on the CPU
            of_gpu = tree_map_only(Tensor, Tensor.cuda, (positional, named))
            return tree_map_only(Tensor, Tensor.cpu, function(*of_gpu[0], **of_gpu[1]))

    return call if isinstance(function, FunctionType) else function


def how(error: BaseException | None) -> str:
    """How a case ended: this package refuses what it does not have by these errors."""
    if error is None:
        return "passed"
    if isinstance(error, NotThere):
        return "not there"
    frames = traceback.extract_tb(error.__traceback__)
    refused = isinstance(error, ValueError | TypeError | NotImplementedError)
    return "not there" if refused and frames and frames[-1].filename.startswith(OURS) else "failed"


class Counting:
    """A plugin of pytest that runs the tests of a shard, and counts them."""

    def __init__(self, shard: Shard) -> None:
        self.counts: Counts = Counter()
        self.shard = shard

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self.shard.has(item.name)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        report = yield
        test = item.originalname or item.name
        if report.skipped:
            self.counts[test, "skipped"] += 1
        elif report.when == "call" or report.failed:
            self.counts[test, how(call.excinfo.value if call.excinfo else None)] += 1
        return report

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            print(report.longreprtext[-600:])
            self.counts[report.nodeid, "not there"] += 1


def by_pytest(*files: str) -> Run:
    """Runs files of tests."""

    def run(checkout: Path, options: list[str], shard: Shard) -> Counts:
        plugin = Counting(shard)
        paths = [str(checkout / file) for file in files]
        usual = ["-q", "-p", "no:cacheprovider", f"--rootdir={checkout}", "--tb=line"]
        # That plugin ends a run with five collections of garbage, two seconds where torch is.
        usual += ["-c", os.devnull, "-p", "no:unraisableexception"]
        pytest.main([*usual, *options, *paths], plugins=[plugin])
        return plugin.counts

    return run


@dataclass(frozen=True)
class Limits:
    """Which cases are run: those of a shard, but for larger ones, and those after a time."""

    most: float
    end: float
    shard: Shard

    @staticmethod
    def of(options: list[str], shard: Shard) -> Limits:
        given = {name: float(value) for name, value in (o.split("=") for o in options)}
        seconds = given.get("--seconds", float("inf"))
        return Limits(given.get("--most", float("inf")), time.monotonic() + seconds, shard)

    def leave_out(self, size: float) -> bool:
        return size > self.most or time.monotonic() > self.end


def ended(what: str, case: Callable[[], object]) -> str:
    """How a case ends, which is told where it does not pass."""
    try:
        case()
    except Exception as error:
        print(what, f"{type(error).__name__}: {error}"[:300], flush=True)
        return how(error)
    return how(None)


def each_case(file: ModuleType, test: str, draw: str, limits: Limits) -> Counts:
    """Runs a test that draws its cases itself with one case at a time."""
    counts: Counts = Counter()
    for number, case in enumerate(list(getattr(file, draw)(torch.float8_e4m3fn))):
        if not limits.shard.has(f"{test} {number}"):
            continue
        if limits.leave_out(prod(v for v in case if isinstance(v, int) and v > 1)):
            counts[test, "skipped"] += 1
            continue
        random.seed(0)
        torch.manual_seed(0)
        with mock.patch.object(file, draw, lambda *_, case=case, **__: iter([case])):
            counts[test, ended(f"{test} {case}", getattr(file, test))] += 1
    return counts


def run_deep_gemm(checkout: Path, options: list[str], shard: Shard) -> Counts:
    os.environ["DG_USE_NVIDIA_TOOLS"] = "1"  # DeepGEMM's way not to take times
    ours = names_of("deep_gemm", "k_grouped")
    package = stand_in("deep_gemm", checkout / "deep_gemm", **ours)
    stand_in("deep_gemm._C", **ours)
    for name in ("utils", "testing"):
        setattr(package, name, importlib.import_module(f"deep_gemm.{name}"))
    package.cublaslt_gemm_nt = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.path.insert(0, str(checkout / "tests"))
    file = importlib.import_module("test_fp8_fp4")
    limits = Limits.of(options, shard)
    counts: Counts = Counter()
    for test, draw in (
        ("test_gemm", "enumerate_normal"),
        ("test_m_grouped_gemm_contiguous", "enumerate_m_grouped_contiguous"),
        ("test_m_grouped_gemm_masked", "enumerate_m_grouped_masked"),
        ("test_k_grouped_gemm_contiguous", "enumerate_k_grouped_contiguous"),
    ):
        counts += each_case(file, test, draw, limits)
    layouts = importlib.import_module("test_layout")
    for test, draw in (
        ("test_sf_layout_kernels", "enumerate_sf_layout"),
        ("test_k_grouped_sf_layout_kernels", "enumerate_k_grouped_sf_layout"),
    ):
        given = getattr(layouts, draw)
        with mock.patch.object(layouts, draw, lambda *_, given=given: given()):
            counts += each_case(layouts, test, draw, limits)
    return counts


OF_PRIMUS_TURBO = ("quantization", "grouped_gemm_fp8", "gemm_fp8")


def run_primus_turbo(checkout: Path, options: list[str], shard: Shard) -> Counts:
    inner = checkout / "primus_turbo" / "pytorch"
    stand_in("primus_turbo", checkout / "primus_turbo")
    turbo = stand_in("primus_turbo.pytorch", inner)
    stand_in("primus_turbo.pytorch.core", inner / "core")
    stand_in("primus_turbo.pytorch.core.utils", get_device_compute_capability=lambda: (9, 5))
    importlib.import_module("primus_turbo.pytorch.core.low_precision")
    turbo.float8_e4m3, turbo.float8_e5m2 = (  # type: ignore[attr-defined]
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    stand_in("primus_turbo.pytorch.kernels")
    stand_in("primus_turbo.pytorch.kernels.attention")
    stand_in("primus_turbo.pytorch.kernels.attention.attention_impl")
    ours = names_of("primus_turbo")
    stand_in("primus_turbo.pytorch.ops", **ours)
    stand_in("primus_turbo.pytorch.ops.quantization", **ours)
    stand_in("primus_turbo.common", checkout / "primus_turbo" / "common")
    stand_in("primus_turbo.triton")
    stand_in("primus_turbo.triton.utils")
    stand_in("primus_turbo.triton.utils.origami", origami_clear_caches=lambda: None)
    sys.path.insert(0, str(checkout))
    extension = SimpleNamespace(shuffle_scale=lambda scale, _: shuffle_scales(scale, "16x4"))
    with mock.patch.object(torch.ops, "primus_turbo_cpp_extension", extension, create=True):
        files = (f"tests/pytorch/ops/test_{of}.py" for of in OF_PRIMUS_TURBO)
        options = ["-k", "mxfp8 or mx_blockwise or mx_fused", *options]
        return by_pytest(*files)(checkout, options, shard)


def run_aiter_sorting(checkout: Path, options: list[str], shard: Shard) -> Counts:
    from aiter_mx.compat import aiter as ours

    def topk(x: torch.Tensor, score: torch.Tensor, count: int, renormalised: bool) -> Any:
        weights, ids = score.float().softmax(-1).topk(count)
        return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)

    def close(a: torch.Tensor, b: torch.Tensor, **_: object) -> float:
        return float((a != b).float().mean()) if a.numel() else 0.0

    types = {"i32": torch.int32, "fp32": torch.float32, "bf16": torch.bfloat16}
    stand_in("aiter", dtypes=stand_in("aiter.dtypes", **types))
    stand_in("aiter.fused_moe", fused_topk=topk, moe_sorting=ours.moe_sorting)
    stand_in("aiter.jit")
    stand_in("aiter.jit.utils")
    stand_in("aiter.jit.utils.chip_info", get_gfx=lambda: "gfx950")
    stand_in("aiter.ops")
    stand_in("aiter.ops.flydsl")
    stand_in("aiter.ops.flydsl.utils", is_flydsl_available=lambda: False)
    stand_in(
        "aiter.test_common",
        benchmark=lambda: lambda test: test,
        checkAllclose=close,
        run_perftest=lambda call, **_: (call(), 1.0),
    )
    sys.path.insert(0, str(checkout / "op_tests"))
    with mock.patch.object(torch, "set_default_device"):
        file = importlib.import_module("test_moe_sorting")
    limits = Limits.of(options, shard)
    sizes = (1, 7, 31, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    routings = ((32, 5), (256, 8), (40, 6), (385, 7))
    counts: Counts = Counter()
    for padding, masked, tokens, routing in product((0, 1000), (True, False), sizes, routings):
        if limits.leave_out(tokens):
            counts["test_moe_sorting", "skipped"] += 1
            continue
        shape = (tokens, 4096, 4096, *routing, masked, padding)
        if not shard.has(str(shape)):
            continue
        call = partial(file.test_moe_sorting, torch.bfloat16, *shape)
        counts["test_moe_sorting", ended(f"test_moe_sorting {shape}", call)] += 1
    return counts


def run_aiter_small_m(checkout: Path, options: list[str], shard: Shard) -> Counts:
    def run_gemv(*_: object) -> None:  # it says which rows a template has; here any may be
        raise NotThere("_run_gemv")

    stand_in("aiter")
    stand_in("aiter.ops")
    ours = names_of("aiter") | {"_tuned_cfg": dict, "_run_gemv": run_gemv}
    stand_in("aiter.ops.smallm_gemm_mxfp8", **ours)
    given = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda *device: As950(given, device)  # type: ignore
    return by_pytest("op_tests/test_smallm_gemm_mxfp8.py")(checkout, options, shard)


def run_vllm_align(checkout: Path, options: list[str], shard: Shard) -> Counts:
    stand_in("vllm")
    for name in ("model_executor", "model_executor.layers", "model_executor.layers.fused_moe"):
        stand_in(f"vllm.{name}")
    ours = names_of("vllm")
    if "--ours-on-gpu" in options:
        options.remove("--ours-on-gpu")
        ours = {name: over_copies(each) for name, each in ours.items()}
    stand_in("vllm.model_executor.layers.fused_moe.moe_align_block_size", **ours)
    platform = mock.Mock(is_rocm=lambda: False, seed_everything=torch.manual_seed)
    stand_in("vllm.platforms", current_platform=platform)
    arithmetic = {"round_up": lambda x, y: -(-x // y) * y, "cdiv": lambda x, y: -(-x // y)}
    stand_in("vllm.utils", **arithmetic)
    stand_in("vllm.utils.math_utils", **arithmetic)
    stand_in("vllm.utils.torch_utils", set_random_seed=torch.manual_seed)
    return by_pytest("tests/kernels/moe/test_moe_align_block_size.py")(checkout, options, shard)


class As950:
    """A device's properties, under the name of the GPU that the tests are for."""

    gcnArchName = "gfx950"

    def __init__(self, properties: Callable[..., object], device: tuple[object, ...]) -> None:
        self._of = lambda: properties(*device)

    def __getattr__(self, name: str) -> object:
        return getattr(self._of(), name)


@dataclass(frozen=True)
class Suite:
    """A peer's tests, and what runs those of a checkout."""

    repository: str
    run: Run


SUITES: Mapping[str, Suite] = {
    "deep_gemm": Suite("deepseek-ai/DeepGEMM", run_deep_gemm),
    "primus_turbo": Suite("AMD-AGI/Primus-Turbo", run_primus_turbo),
    "aiter_sorting": Suite("ROCm/aiter", run_aiter_sorting),
    "aiter_small_m": Suite("ROCm/aiter, pull request 3783", run_aiter_small_m),
    "vllm_align": Suite("vllm-project/vllm", run_vllm_align),
}


class OnCpu(TorchFunctionMode):
    """Has tensors that are asked for on a GPU lie on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]

        def cpu(value: Any) -> Any:
            named = isinstance(value, str | torch.device)
            return "cpu" if named and str(value).partition(":")[0] == "cuda" else value

        kwargs = {name: cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(cpu, args), **kwargs)


def on_cpu() -> AbstractContextManager[object]:
    """Also has Hopper be there, to tests that ask for it."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[method-assign]
    torch.cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)  # type: ignore[method-assign]
    return OnCpu()


def rows_of(suite: str, counts: Counts) -> list[dict[str, object]]:
    """A row for each test."""
    ends = ("passed", "failed", "not there", "skipped")
    tests = sorted({test for test, _ in counts})
    return [
        {"suite": suite, "test": test, **{end.replace(" ", "_"): counts[test, end] for end in ends}}
        for test in tests
    ]


def save(suite: str, rows: list[dict[str, object]]) -> None:
    """Keep the rows of a suite."""
    import datetime

    import pandas as pd

    from aiter_mx.tuning import origin
    from op_tests.bench.common import MEASURED, gpu_name

    facts = {"commit": origin.commit(), "date": datetime.date.today().isoformat()}
    path = MEASURED / gpu_name() / f"peers_{suite}.csv"
    pd.DataFrame(rows).assign(**facts).to_csv(path, index=False)


def counts_of(asked: argparse.Namespace, options: list[str], shard: Shard) -> Counts:
    """Runs the cases of a shard."""
    with on_cpu() if asked.cpu else nullcontext():
        return SUITES[asked.suite].run(asked.checkout.resolve(), options, shard)


def main() -> int:
    parser = argparse.ArgumentParser("python -m op_tests.peers", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--cpu", action="store_true", help="on the CPU")
    parser.add_argument("--save", action="store_true", help="keep the counts in docs/measured")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked, options = parser.parse_known_args()
    if asked.jobs > 1:  # which share the GPU's memory, so none may keep what it has freed
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    counts: Counts = Counter()
    with multiprocessing.get_context("fork").Pool(asked.jobs, maxtasksperchild=1) as pool:
        shards = Shard(1, 1).parts(asked.jobs)
        for of_shard in pool.imap_unordered(
            partial(counts_of, asked, options), shards, chunksize=1
        ):
            counts += of_shard
    rows = rows_of(asked.suite, counts)
    for row in rows:
        print(*row.values())
    total = Counter[str]()
    for (_, end), count in counts.items():
        total[end] += count
    print(asked.suite, dict(total))
    if asked.save:
        save(asked.suite, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
