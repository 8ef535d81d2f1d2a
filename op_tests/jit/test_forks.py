"""A child that is forked while other threads of its parent hold the package's locks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

import aiter_mx
from aiter_mx import launch, plan
from aiter_mx.dispatch import dispatcher
from aiter_mx.errors import LaunchError
from aiter_mx.forks import Lock
from aiter_mx.jit import cache, toolchain
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.launch import load_function
from aiter_mx.sim.program import Program
from aiter_mx.target import SIMULATED_GFX950, hardware
from op_tests.mx_reference import assert_close_to_reference, random_mx

PATIENCE_S = 30


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that runs ``work``; that of a kill where it hangs."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def random_operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [*random_mx(1, 96, generator), *random_mx(40, 96, generator)]


def call_linear() -> None:
    operands = random_operands()
    with aiter_mx.simulate("gfx950"):
        out = aiter_mx.linear(*operands, out_dtype=torch.float32)
    assert_close_to_reference(out, *operands)


def program() -> Program:
    problem = LinearProblem(1, 40, 96, "fp32")
    chosen = dispatcher.route("linear", SIMULATED_GFX950, problem)
    function = load_function(chosen.spec, SIMULATED_GFX950, problem, chosen.config, 0)
    found: Program = function.program
    return found


LOCKS = {
    "the search for a compiler": lambda: [toolchain._search_lock],
    "a library being loaded": lambda: [launch._functions_lock],
    "the simulator translating": lambda: [program()._lock],
    "a miss being logged": lambda: [dispatcher._logged_lock],
    "artifacts being built": lambda: list(cache._thread_locks.values()),
}


@pytest.mark.parametrize("what", LOCKS)
def test_a_child_does_not_wait_for_what_a_thread_of_its_parent_holds(what: str) -> None:
    call_linear()
    locks = LOCKS[what]()
    assert locks
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    toolchain._find.cache_clear()
    launch._functions.clear()

    def work() -> None:
        torch.set_num_threads(1)
        for lock in locks:
            with lock:
                pass
        call_linear()

    try:
        assert in_child(work) == 0
    finally:
        done.set()
        thread.join()
    call_linear()


def test_a_lock_that_its_own_thread_holds_is_left_in_parent_and_child() -> None:
    lock = Lock()
    with lock:
        child = os.fork()
    with lock:
        pass
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_forgets_what_its_parent_has_bound() -> None:
    plans: plan.Plans[str] = plan.Plans()
    plans.keep("call", "bound to the parent's GPU")

    def work() -> None:
        assert not plans.by_call

    assert in_child(work) == 0
    assert plans.by_call


def test_a_child_of_a_process_that_used_a_gpu_is_told_to_spawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(LaunchError, match=r"forked from one that had used its GPUs.*'spawn'"):
        plan.bind("linear", hardware("sm_90a"), LinearProblem(1, 64, 64), torch.device("cuda:0"))


@pytest.mark.gpu
def test_a_child_of_a_process_that_used_the_gpu_raises() -> None:
    operands = [tensor.cuda() for tensor in random_operands()]
    out = torch.empty(1, 40, dtype=torch.bfloat16, device="cuda")
    aiter_mx.linear(*operands, out=out)

    def work() -> None:
        with pytest.raises(LaunchError, match="forked from one that had used its GPUs"):
            aiter_mx.linear(*operands, out=out)

    assert in_child(work) == 0
