"""Many processes, one cold cache: the op itself, from its call to the right answer."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aiter_mx
from aiter_mx.jit import build
from op_tests.mx_reference import assert_close_to_reference, random_mx

PROCESSES = 16
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder after one call: the simulator's own C takes the compiler thirty times as long
    as the kernel does."""
    folder = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as here:
        here.setenv("AITER_MX_CACHE_DIR", str(folder))
        here.setattr("aiter_mx.launch._functions", {})
        assert aiter_mx.linear  # is imported now, so that forked children start quickly
        child = in_child(call_linear, 0)
        child.join()
    assert child.exitcode == 0
    return folder


@pytest.fixture
def cold_cache(warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without kernels, and beside it ``compiled``, which notes when each compilation
    begins."""
    kernels = shutil.ignore_patterns("gfx950")
    shutil.copytree(warm_cache, tmp_path / "cache", ignore=kernels)
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("aiter_mx.launch._functions", {})
    compile_one = build._compile

    def compile_and_note(*arguments: object) -> None:
        with (tmp_path / "compiled").open("a") as notes:
            notes.write(f"{time.monotonic()}\n")
        compile_one(*arguments)

    monkeypatch.setattr(build, "_compile", compile_and_note)
    return tmp_path


def call_linear(seed: int) -> None:
    """One call on the simulated gfx950, checked; raises if the answer is wrong."""
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    generator = torch.Generator().manual_seed(seed)
    operands = (*random_mx(1, 96, generator), *random_mx(40, 96, generator))
    with aiter_mx.simulate("gfx950"):
        out = aiter_mx.linear(*operands, out_dtype=torch.float32)
    assert_close_to_reference(out, *operands)


def in_child(work: Callable[[int], None], argument: int) -> multiprocessing.Process:
    child = FORK.Process(target=work, args=(argument,))
    child.start()
    return child


def compilations(folder: Path) -> list[float]:
    """When each began."""
    notes = folder / "compiled"
    return [float(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def test_sixteen_processes_build_once_and_all_answer_right(cold_cache: Path) -> None:
    children = [in_child(call_linear, seed) for seed in range(PROCESSES)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * PROCESSES
    assert len(compilations(cold_cache)) == 1


def test_builder_killed_midway_does_not_hold_up_the_next_caller(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one = build._compile

    def compile_and_hang(*arguments: object) -> None:
        compile_one(*arguments)
        time.sleep(600)

    with monkeypatch.context() as hanging:
        hanging.setattr(build, "_compile", compile_and_hang)
        victim = in_child(call_linear, 0)
    deadline = time.monotonic() + 30
    while not compilations(cold_cache) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # into the compilation
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(10)
    assert victim.exitcode == -signal.SIGKILL

    start = time.monotonic()
    successor = in_child(call_linear, 1)
    successor.join(60)
    assert successor.exitcode == 0
    _, begun = compilations(cold_cache)
    assert begun - start < 20


def test_garbled_artifact_is_built_again(cold_cache: Path) -> None:
    first = in_child(call_linear, 0)
    first.join(60)
    (artifact,) = (cold_cache / "cache" / "gfx950").glob("*.hsaco")
    image = bytearray(artifact.read_bytes())
    image[len(image) // 2] ^= 0x10
    artifact.write_bytes(image)
    second = in_child(call_linear, 1)
    second.join(60)
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert len(compilations(cold_cache)) == 2
