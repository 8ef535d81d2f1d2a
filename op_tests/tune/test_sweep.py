"""A sweep of many shapes: what survives a kill, goes on later, and that workers agree."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from aiter_mx.dispatch.tables import read_table
from aiter_mx.tuning import sweep as sweeps
from aiter_mx.tuning.candidates import ContextLost
from aiter_mx.tuning.forked import aside
from aiter_mx.tuning.journal import Journal, folder_of, merge, read_folder
from aiter_mx.tuning.share import Alone, Shared
from aiter_mx.tuning.table import read_rows
from op_tests.forked import FORKED
from op_tests.threads import in_threads
from op_tests.tune import fakes
from op_tests.tune.fakes import (
    AXES,
    ENVIRONMENT,
    PROBLEMS,
    FakeMeter,
    draw,
    plan_for,
    starters,
    sweep,
)

FILES = {"linear.csv", "linear.provenance.csv", "runs.csv"}


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_table(tmp_path: Path) -> None:
    expected = tmp_path / "undisturbed" / "linear.csv"
    sweep(expected, FakeMeter())
    dice = random.Random(8)
    kills, ends, table = 0, 0, tmp_path / "0" / "linear.csv"
    while kills < 20:
        process = FORKED.Process(target=fakes.tune_into, args=(table, 0.0015))
        process.start()
        if kills % 4:  # the others while it starts
            wait_for_growth(process, folder_of(table))
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        process.join()
        code = process.exitcode
        assert code in (0, -signal.SIGKILL)
        if table.exists():
            assert list(read_table(table))
        assert {path.suffix for path in table.parent.glob("*")} <= {".csv", ".journal", ".draft"}
        if code == 0:  # it was done before the kill
            assert table.read_text() == expected.read_text()
            ends += 1
            table = tmp_path / str(ends) / "linear.csv"
        else:
            kills += 1
    script = [sys.executable, "-m", fakes.__name__, str(table)]
    subprocess.run(script, env=ENVIRONMENT, check=True)
    assert table.read_text() == expected.read_text()
    assert {path.name for path in table.parent.iterdir()} == FILES


def wait_for_growth(process: BaseProcess, folder: Path) -> None:
    def size() -> int:
        return sum(path.stat().st_size for path in folder.glob("*.jsonl"))

    before = size()
    while process.is_alive() and size() <= before:
        time.sleep(0.005)


def test_a_budget_takes_the_first_shapes_and_the_same_command_goes_on(tmp_path: Path) -> None:
    expected, table = tmp_path / "whole.csv", tmp_path / "linear.csv"
    sweep(expected, FakeMeter())
    first = FakeMeter(pause_s=0.01)
    done = sweeps.run(plan_for(table), first.meter(), Alone(), budget_s=0.1)
    names = [sweeps.name_of("linear", problem) for problem in PROBLEMS]
    assert 0 < len(done) < len(PROBLEMS)
    assert [record["problem"] for record in done] == names[: len(done)]
    assert len(read_rows(table, "linear")) == len(done)
    second = FakeMeter()
    assert len(sweeps.run(plan_for(table), second.meter(), Alone(), budget_s=60)) == len(PROBLEMS)
    assert not {p for p, _ in first.tried} & {p for p, _ in second.tried}
    assert table.read_text() == expected.read_text()
    assert not folder_of(table).exists()


def test_without_a_budget_the_largest_come_first(tmp_path: Path) -> None:
    fake = FakeMeter()
    sweep(tmp_path / "linear.csv", fake)
    sizes = [p.M * p.N for p in dict.fromkeys(problem for problem, _ in fake.tried)]
    assert sizes == sorted(sizes, reverse=True)


def test_candidates_that_are_worked_out_aside_make_the_same_table(tmp_path: Path) -> None:
    expected, table = tmp_path / "here.csv", tmp_path / "aside.csv"
    sweep(expected, FakeMeter())
    meter = replace(FakeMeter().meter(), aside=aside)
    sweeps.run(plan_for(table), meter, Alone())
    assert table.read_text() == expected.read_text()
    held_up = FakeMeter(pause_s=0.01)
    begun = time.monotonic()
    sweeps.run(plan_for(table), replace(held_up.meter(), aside=aside), Alone(), budget_s=0.1)
    assert time.monotonic() - begun < 5  # what is not wanted any more is not waited for


def test_a_race_that_compilers_held_up_is_run_again_without_them(tmp_path: Path) -> None:
    expected, table = tmp_path / "steady.csv", tmp_path / "linear.csv"
    sweep(expected, FakeMeter())
    fake = FakeMeter()
    fake.noise = lambda candidate, turn: 1.0 if fake.settled else 1 + draw(candidate, turn)
    sweep(table, fake)
    assert fake.settled == 1
    assert table.read_text() == expected.read_text()
    fake = FakeMeter()
    fake.noise = lambda candidate, turn: 1.0 + turn % 2  # whatever is compiled
    sweep(table, fake)
    assert fake.settled == len(PROBLEMS)
    assert len(read_rows(table, "linear")) == len(PROBLEMS)


def test_few_problems_are_given_to_the_compilers_before_a_race_that_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMeter()
    given: list[int] = []

    def note(problem: object, candidates: object, *of: object) -> bool:
        given.append(len({problem for problem, _ in fake.prepared}))
        return True

    monkeypatch.setattr(fakes.FakeAhead, "is_ready", note)
    sweep(tmp_path / "linear.csv", fake)
    assert given[0] == 3
    assert {after - before for before, after in pairwise(given)} <= {0, 3}
    assert len({problem for problem, _ in fake.prepared}) == len(PROBLEMS)


@pytest.mark.parametrize("line", ['{"kind": "prob', "[]", "{}"])
def test_a_damaged_journal_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    Journal(tmp_path, "w", "f1").close()
    with (tmp_path / "w.jsonl").open("a") as file:
        file.write(f"{line}\n")
    for read in (lambda: Journal(tmp_path, "w", "f1"), lambda: read_folder(tmp_path, "f1")):
        with pytest.raises(ValueError, match=r"w\.jsonl:2 is damaged .* --fresh"):
            read()
    (tmp_path / "w.jsonl").write_text("")
    Journal(tmp_path, "w", "f1").close()  # the file was let go of


def test_journal_drops_a_torn_line_and_refuses_another_sweep(tmp_path: Path) -> None:
    record = {"kind": "problem", "problem": "a", "at": 1.0, "worker": "w", "row": None}
    journal = Journal(tmp_path, "w", "f1")
    with pytest.raises(ValueError, match="already runs"):
        Journal(tmp_path, "w", "f1")
    journal.append(record)
    journal.close()
    path = tmp_path / "w.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "prob')
    assert read_folder(tmp_path, "f1") == [record]
    again = Journal(tmp_path, "w", "f1")
    again.append({**record, "problem": "b"})
    again.close()
    assert [r["problem"] for r in read_folder(tmp_path, "f1")] == ["a", "b"]
    for refused in (lambda: Journal(tmp_path, "w", "f2"), lambda: read_folder(tmp_path, "f2")):
        with pytest.raises(ValueError, match="another sweep"):
            refused()


def test_merge_does_not_depend_on_the_order() -> None:
    records = [
        {"kind": "problem", "problem": name, "at": at, "worker": worker, "row": {"us": us}}
        for name, at, worker, us in [
            ("a", 1.0, "w0", "5"),
            ("a", 2.0, "w1", "6"),
            ("b", 2.0, "w1", "7"),
            ("b", 2.0, "w0", "8"),
        ]
    ] + [{"kind": "lost", "problem": "a", "candidate": "x", "why": "y"}]
    expected = merge(records)
    assert {name: r["row"]["us"] for name, r in expected.items()} == {"a": "6", "b": "7"}
    for seed in range(10):
        random.Random(seed).shuffle(records)
        assert merge(records) == expected


def test_a_candidate_that_takes_the_gpu_with_it_is_passed_over_next_time(tmp_path: Path) -> None:
    table = tmp_path / "linear.csv"
    victim = PROBLEMS[5]
    culprit = starters(victim)[2]
    fake = FakeMeter()
    fake.loses = lambda problem, candidate: problem == victim and candidate == culprit
    with pytest.raises(ContextLost):
        sweep(table, fake)
    raced = len({problem for problem, _ in fake.tried}) - 1
    again = FakeMeter()
    again.loses = fake.loses
    records = sweeps.run(plan_for(table), again.meter(), Alone())
    assert len({problem for problem, _ in again.tried}) == len(PROBLEMS) - raced
    assert (victim, culprit) not in again.tried
    (record,) = (r for r in records if r["problem"] == sweeps.name_of("linear", victim))
    assert {"candidate": str(culprit), "why": "an illegal memory access"} in record["failures"]
    assert "an illegal memory access" in sweeps.timings_text(records)
    assert len(read_rows(table, "linear")) == len(PROBLEMS)


class DictStore:
    """As much of a torch.distributed store as workers use."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.values[key] = str(int(self.values.get(key, "0")) + amount)
            return int(self.values[key])


def test_workers_share_the_work_and_write_the_same_table(tmp_path: Path) -> None:
    expected = tmp_path / "alone" / "linear.csv"
    sweep(expected, FakeMeter())
    store, table = DictStore(), tmp_path / "linear.csv"
    fakes = [FakeMeter(pause_s=0.01) for _ in range(3)]

    def work(rank: int) -> None:
        sweep(table, fakes[rank], Shared(store, {"RANK": str(rank), "WORLD_SIZE": "3"}))

    in_threads(work, 3)
    assert table.read_text() == expected.read_text()
    raced = [{problem for problem, _ in fake.tried} for fake in fakes]
    assert sum(map(len, raced)) == len(set.union(*raced)) == len(PROBLEMS)
    assert all(raced)
    prepared = [{problem for problem, _ in fake.prepared} for fake in fakes]
    assert sum(map(len, prepared)) == len(PROBLEMS)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == FILES


def test_problems_that_need_the_same_kernels_go_to_one_worker(tmp_path: Path) -> None:
    plan = plan_for(tmp_path / "linear.csv")
    for workers in (1, 2):  # there are four widths
        parts = sweeps.parts_of(plan, PROBLEMS, workers)
        widths = [{name.split()[1] for name in part} for part in parts]
        assert sum(map(len, widths)) == len(set.union(*widths)) == len(AXES["N"])
        assert {len(part) for part in parts} == {len(PROBLEMS) // workers}
    names = [sweeps.name_of("linear", problem) for problem in PROBLEMS]
    assert sweeps.parts_of(plan, PROBLEMS, 3) == [names[0::3], names[1::3], names[2::3]]


def tune_as(environment: dict[str, str], table: Path) -> None:
    os.environ.update(environment)
    fakes.tune_into(table, 0.0)


def test_processes_share_the_work_through_torchs_store(tmp_path: Path) -> None:
    table = tmp_path / "linear.csv"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        FORKED.Process(target=tune_as, args=(environment | {"RANK": str(rank)}, table))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(read_rows(table, "linear")) == len(PROBLEMS)
    assert {path.name for path in tmp_path.iterdir()} == FILES
