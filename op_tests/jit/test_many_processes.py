"""The cache under many processes: killed while they build, forked meanwhile, all cold at once.

Each test is a program of its own, which imports the cache alone and forks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMON = """
import os, random, signal, sys, threading, time
from pathlib import Path
from aiter_mx.jit import cache, contents

log = Path(sys.argv[1])
DATA = random.Random(0).randbytes(100_000)

def build(out):
    with log.open("a") as file:
        file.write("built\\n")
    with out.open("wb") as file:
        for at in range(0, len(DATA), 10_000):
            file.write(DATA[at : at + 10_000])
            file.flush()
            time.sleep(0.001)

def ask(name):
    return cache.get_or_build("thing", name, "so", build).data == DATA

def child(work):
    number = os.fork()
    if number == 0:
        signal.alarm(60)
        os._exit(0 if work() else 1)
    return number

def ends(number):
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
"""
KILLS = """
draw = random.Random(1)
for turn in range(50):
    number = child(lambda: ask(str(turn % 5)))
    time.sleep(draw.uniform(0, 0.03))
    os.kill(number, signal.SIGKILL)
    assert ends(number) in (0, -signal.SIGKILL)
found = [cache.lookup("thing", str(name), "so") for name in range(5)]
assert all(each is None or each.data == DATA for each in found)
assert all(ask(str(name)) for name in range(5))
contents.clear()
assert contents.entries() == []
"""
FORKS = """
going = True
def work():
    turn = 0
    while going:
        assert ask(str(turn))
        turn += 1
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
numbers = []
for turn in range(20):
    time.sleep(0.005)
    numbers.append(child(lambda: ask(f"of a child {turn}") and ask("0")))
assert [ends(number) for number in numbers] == [0] * 20
going = False
for thread in threads:
    thread.join()
"""
RANKS = """
begin = time.monotonic() + 0.3
def rank():
    time.sleep(max(0.0, begin - time.monotonic()))
    return all(ask(name) for name in "abc")
numbers = [child(rank) for _ in range(16)]
assert [ends(number) for number in numbers] == [0] * 16
assert log.read_text().count("built") == 3
"""
ORPHAN = """
def fork_and_wait(out):
    orphan = child(lambda: time.sleep(60))
    log.write_text(str(orphan))
    time.sleep(60)
number = child(lambda: cache.get_or_build("thing", "a", "so", fork_and_wait))
while not (log.exists() and log.read_text()):
    time.sleep(0.01)
os.kill(number, signal.SIGKILL)
assert ends(number) == -signal.SIGKILL
orphan = int(log.read_text())
os.environ["AITER_MX_LOCK_TIMEOUT"] = "5"
try:
    assert ask("a")
finally:
    os.kill(orphan, signal.SIGKILL)
"""


def run(program: str, log: Path) -> None:
    command = [sys.executable, "-c", COMMON + program, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fifty_killed_builders_leave_nothing_that_is_half_built(
    folder: Path,
    tmp_path: Path,
) -> None:
    run(KILLS, tmp_path / "log")


def test_twenty_children_forked_while_threads_build_come_to_their_ends(
    folder: Path,
    tmp_path: Path,
) -> None:
    run(FORKS, tmp_path / "log")


def test_sixteen_cold_ranks_build_each_artifact_once(
    folder: Path,
    tmp_path: Path,
) -> None:
    run(RANKS, tmp_path / "log")


def test_a_child_of_a_killed_builder_holds_no_lock(folder: Path, tmp_path: Path) -> None:
    run(ORPHAN, tmp_path / "log")
