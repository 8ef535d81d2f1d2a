"""Tuning without a GPU: who is chosen, and what the table says of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from aiter_mx.dispatch.cells import SIDE_FILES
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.registry import key_columns
from aiter_mx.kernels.spec import Problem
from aiter_mx.paths import configs_dir
from aiter_mx.target import hardware
from aiter_mx.tuning import sweep as sweeps
from aiter_mx.tuning.candidates import Candidate, candidates_of
from aiter_mx.tuning.race import Outcome, race
from aiter_mx.tuning.share import Alone
from aiter_mx.tuning.table import (
    columns_of,
    incumbent_of,
    read_frame,
    read_origins,
    read_rows,
    row_of,
    side_files,
)
from aiter_mx.tuning.triton_ahead import TritonAhead
from aiter_mx.tuning.verify import Check, verify
from op_tests.tune.fakes import (
    ENVIRONMENT,
    PROBLEMS,
    RULES,
    TARGET,
    FakeBench,
    FakeMeter,
    draw,
    plan_for,
    starters,
    sweep,
)

PROBLEM = PROBLEMS[0]
SHIPPED = [
    path for path in sorted(configs_dir().glob("*/*.csv")) if not path.name.endswith(SIDE_FILES)
]


def run_race(fake: FakeMeter, incumbent: Candidate | None = None) -> Outcome:
    return race(FakeBench(PROBLEM, fake), starters(), incumbent, RULES)


def by_time(problem: LinearProblem = PROBLEM) -> list[Candidate]:
    """The candidates, those that the fake finds fastest first."""
    name = sweeps.name_of("linear", problem)
    return sorted(starters(problem), key=lambda c: draw(name, str(c)))


def test_the_fastest_is_chosen_through_noise() -> None:
    fake = FakeMeter()
    fake.noise = lambda candidate, turn: 1 + 0.004 * draw(str(candidate), turn)
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert outcome.chosen.candidate == by_time()[0]
    assert 0 < outcome.chosen.spread < 0.005
    assert {t.candidate for t in outcome.timings} == set(starters())
    # Times of an earlier heat, when the GPU was cooler, are not what a table lists.
    fake.noise = lambda candidate, turn: 1.0 + 0.1 * turn
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert min(timing.us for timing in outcome.timings) < outcome.chosen.us
    row = row_of(TARGET, "linear", PROBLEM, outcome.chosen, outcome.timings, {})
    assert row["us"] == f"{outcome.chosen.us:.3f}"
    assert "hip_us" not in row


def test_one_slow_round_does_not_decide() -> None:
    first = by_time()[0]
    fake = FakeMeter()
    fake.noise = lambda candidate, turn: 3.0 if candidate == first and turn == 4 else 1.0
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert outcome.chosen.candidate == first
    assert outcome.chosen.spread == 0.0  # the final was run again
    fake.noise = lambda candidate, turn: 1.0 + 2.0 * (candidate == first and turn > 3 and turn % 2)
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert outcome.chosen.rounds == RULES.final_rounds


def test_one_that_was_held_up_through_a_final_has_another() -> None:
    first = by_time()[0]
    fake = FakeMeter()
    fake.noise = lambda candidate, turn: 3.0 if candidate == first and 4 <= turn <= 9 else 1.0
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert (outcome.chosen.candidate, outcome.chosen.spread) == (first, 0.0)


def verified(fake: FakeMeter, chosen: Candidate) -> Check:
    (check,) = verify([(PROBLEM, chosen)], "linear", TARGET, fake.meter(), RULES, lambda _: None)
    return check


def test_a_row_that_was_held_up_is_verified_once_more() -> None:
    first, second, *_ = by_time()
    fake = FakeMeter()
    fake.noise = lambda candidate, turn: 3.0 if candidate == first and 4 <= turn <= 9 else 1.0
    check = verified(fake, first)
    assert (check.best, check.slower, check.spread) == (first, 0.0, 0.0)
    # Held up all the time, it is slow, whatever it was in a first look.
    fake.noise = lambda candidate, turn: 3.0 if candidate == first and turn >= 4 else 1.0
    check = verified(fake, first)
    assert check.best == second
    assert check.slower > 1
    fake.poisoned = {(PROBLEM, first)}
    check = verified(fake, first)
    assert (check.best, check.chosen_us, check.slower) == (second, None, float("inf"))


@pytest.mark.parametrize("kind", ["poisoned", "late", "flaky"])
def test_what_is_fast_and_wrong_is_never_chosen(kind: str, tmp_path: Path) -> None:
    fake = FakeMeter()
    wrong = {(problem, by_time(problem)[i]) for problem in PROBLEMS for i in (0, 2)}
    getattr(fake, kind).update(wrong)
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert outcome.chosen.candidate == by_time()[1]
    assert {(PROBLEM, f.candidate) for f in outcome.failures} == {
        pair for pair in wrong if pair[0] == PROBLEM
    }
    why = "LaunchError" if kind == "flaky" else "wrong"
    assert all(f.why.startswith(why) for f in outcome.failures)
    sweep(tmp_path / "linear.csv", fake)
    rows = read_rows(tmp_path / "linear.csv", "linear")
    for problem in PROBLEMS:
        assert incumbent_of(rows, "linear", TARGET, problem) == by_time(problem)[1]


def test_where_no_finalist_is_right_in_the_end_the_others_have_their_turn() -> None:
    fake = FakeMeter()
    fake.late = {(PROBLEM, candidate) for candidate in by_time()[:-2]}
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert outcome.chosen.candidate == by_time()[-2]
    fake.late = {(PROBLEM, candidate) for candidate in by_time()}
    assert run_race(fake).chosen is None


def test_incumbent_stays_unless_it_is_clearly_beaten() -> None:
    first, second, *_ = by_time()
    for ahead, noise, stays in [
        (0.02, 0.0, True),
        (0.04, 0.0, False),
        (0.04, 0.1, True),  # within the spread
        (0.20, 0.1, False),
    ]:
        fake = FakeMeter()
        name = sweeps.name_of("linear", PROBLEM)
        ratio = (2 + draw(name, str(first))) / (2 + draw(name, str(second)))

        def times(
            candidate: Candidate,
            turn: int,
            ahead: float = ahead,
            noise: float = noise,
            ratio: float = ratio,
        ) -> float:
            wave = 1 + noise * ((turn % 3) - 1) / 2
            return wave * (ratio / (1 - ahead) if candidate == second else 1.0)

        fake.noise = times
        outcome = run_race(fake, incumbent=second)
        assert outcome.chosen is not None
        assert (outcome.chosen.candidate == second) == stays, (ahead, noise)


def test_wrong_incumbent_is_replaced_and_leaves_the_table(tmp_path: Path) -> None:
    table = tmp_path / "linear.csv"
    sweep(table, FakeMeter())
    fake = FakeMeter()
    fake.poisoned = {(problem, by_time(problem)[0]) for problem in PROBLEMS}
    sweep(table, fake)
    rows = read_rows(table, "linear")
    for problem in PROBLEMS:
        assert incumbent_of(rows, "linear", TARGET, problem) == by_time(problem)[1]
    fake.poisoned = {(PROBLEM, candidate) for candidate in starters()}
    sweep(table, fake)  # nothing computes the first problem now
    rows = read_rows(table, "linear")
    assert incumbent_of(rows, "linear", TARGET, PROBLEM) is None
    assert len(rows) == len(PROBLEMS) - 1


def test_table_is_what_dispatch_and_pandas_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "linear.csv"
    sweep(table, FakeMeter())
    frame = pd.read_csv(table)
    assert list(frame.columns) == columns_of("linear", peers=())
    assert len(frame) == len(PROBLEMS)
    assert set(frame.source) == {"measured"}
    assert frame[["N", "K", "M"]].values.tolist() == sorted(frame[["N", "K", "M"]].values.tolist())
    assert frame[["us", "rel_err", "config"]].notna().all().all()
    provenance, runs = (pd.read_csv(path) for path in side_files(table))
    keys = ["gfx", "cu_num", "op", *key_columns("linear")]
    assert provenance[keys].equals(frame[keys])
    assert provenance[["spread", "build", "code"]].notna().all().all()
    assert len(runs) == 1
    assert set(provenance.run) == set(runs.run)
    assert runs[["date", "commit", "versions"]].notna().all().all()
    monkeypatch.setenv("AITER_MX_CONFIG", str(table))
    chosen = route("linear", TARGET, PROBLEM)
    assert chosen.source.startswith(str(table))
    assert "measured" in chosen.reason
    assert not list(tmp_path.glob("*.journal"))


@pytest.mark.parametrize("table", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_row_says_where_it_comes_from(table: Path) -> None:
    rows = read_frame(table, table.stem)
    assert len(rows) == len(read_rows(table, table.stem)) == len(read_origins(table, table.stem))
    for name in ("spread", "date", "commit", "versions"):
        assert rows[name].str.len().all(), name


def test_rows_of_other_shapes_are_kept(tmp_path: Path) -> None:
    table = tmp_path / "linear.csv"
    sweeps.run(plan_for(table, PROBLEMS[:3]), FakeMeter().meter(), Alone())
    before = read_rows(table, "linear")
    sweeps.run(plan_for(table, PROBLEMS[2:]), FakeMeter().meter(), Alone())
    after = read_rows(table, "linear")
    assert len(after) == len(PROBLEMS)
    assert before.items() <= after.items()


def test_a_model_never_replaces_what_was_measured(tmp_path: Path) -> None:
    table = tmp_path / "linear.csv"
    sweeps.run(plan_for(table, PROBLEMS[:2]), FakeMeter().meter(), Alone())
    measured = read_rows(table, "linear")
    modelled = replace(FakeMeter().meter(), source="model")
    sweeps.run(replace(plan_for(table, PROBLEMS[:4]), source="model"), modelled, Alone())
    rows = read_rows(table, "linear")
    assert measured.items() <= rows.items()
    assert sorted(row["source"] for row in rows.values()) == ["measured"] * 2 + ["model"] * 2
    # Nor does a modelled row hold its place against a measured one, but against a modelled one.
    assert incumbent_of(rows, "linear", TARGET, PROBLEMS[3]) is None
    held = incumbent_of(rows, "linear", TARGET, PROBLEMS[3], "model")
    assert held == by_time(PROBLEMS[3])[0]


def test_a_kernel_far_behind_is_given_up_unless_one_looks_closely() -> None:
    other = [
        replace(c, kernel="slow", values=(*c.values[:-1], ("x", i)))
        for i, c in enumerate(starters() * 2)
    ]
    last = other[-1]  # which is the fastest of all

    def times(candidate: Candidate, turn: int) -> float:
        return 0.1 if candidate == last else 9.0 if candidate.kernel == "slow" else 1.0

    for rules, best in ((RULES, by_time()[0]), (RULES.thorough, last)):
        fake = FakeMeter()
        fake.noise = times
        outcome = race(FakeBench(PROBLEM, fake), [*starters(), *other], None, rules)
        assert outcome.chosen is not None
        assert outcome.chosen.candidate == best
        tried = [c for _, c in fake.tried if c.kernel == "slow"]
        assert tried == (other[: RULES.tries] if rules is RULES else other)


def test_kernels_further_back_in_line_begin_with_fewer() -> None:
    target = hardware("sm_90a")
    for M, N, K, order in (
        (1, 320, 6112, ["gemv", "mma_ring"]),
        (16, 2304, 6144, ["mma_registers", "mma_ring"]),
    ):
        problem = LinearProblem(M, N, K)
        found = candidates_of("linear", target, problem, ("hip", "triton"), 6, (4, 2))
        count = Counter(candidate.kernel for candidate in found)
        assert [count[name] for name in order] == [6, 4]
        assert count.pop("wgmma_bf16_few") == 1  # which has no other
        assert count.pop("wgmma_fp8_rescaled") in (1, 2)  # nor has that
        assert set(count.values()) == {6, 4, 2}  # Triton's is the first of its backend
        every = candidates_of("linear", target, problem, ("hip", "triton"), 6)
        assert set(found) < set(every)
        assert [c for c in found if c.kernel == order[1]] == [
            c for c in every if c.kernel == order[1]
        ][:4]


def test_only_named_kernels_of_a_backend_begin() -> None:
    target, problem = hardware("sm_90a"), LinearProblem(16, 2304, 6144)
    arguments = "linear", target, problem, ("hip", "triton"), 6, (4, 2)
    every = candidates_of(*arguments)
    found = candidates_of(*arguments, only=("mma_ring", "wgmma_fp8"))
    ours = Counter(candidate.kernel for candidate in found if candidate.backend == "hip")
    assert ours == {
        "mma_ring": 6,
        "wgmma_fp8": 4,
    }  # as many of each as of the first and second in line
    others = [candidate for candidate in every if candidate.backend != "hip"]
    assert others  # no kernel of theirs is named, so all of them begin
    assert [candidate for candidate in found if candidate.backend != "hip"] == others
    assert candidates_of(*arguments, only=()) == every


def test_those_clearly_behind_are_not_timed_to_the_end() -> None:
    first = by_time()[0]
    fake = FakeMeter()
    fake.noise = lambda candidate, turn: 0.95 if candidate == first else 1.0
    outcome = run_race(fake)
    assert outcome.chosen is not None
    assert (outcome.chosen.candidate, outcome.chosen.rounds) == (first, 3)
    assert max(timing.rounds for timing in outcome.timings[1:]) < 3
    # As long as their rounds overlap, they are.
    fake.noise = lambda candidate, turn: (1 + 0.5 * (turn % 2)) * (1 - 0.05 * (candidate == first))
    outcome = run_race(fake)
    assert [timing.rounds for timing in outcome.timings[:2]] == [7, 7]


@pytest.mark.parametrize("problem", [PROBLEM, MoeGemmProblem(3, 128, 96, 5, 2, 16)])
def test_tritons_candidates_are_compiled_without_a_gpu(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    op = "linear" if problem is PROBLEM else "moe_gemm"
    target = replace(hardware("sm_90a"), runtime="cuda")
    (candidate,) = candidates_of(op, target, problem, ("triton",), 1)
    ahead = TritonAhead(target, jobs=1)
    ahead.wait(problem, [candidate])
    ahead.close()
    assert list(tmp_path.rglob("*tile_kernel.cubin"))


def test_tritons_compilers_die_with_the_process_that_has_them() -> None:
    script = (
        "import time\n"
        "from aiter_mx.target import hardware\n"
        "from aiter_mx.tuning.triton_ahead import TritonAhead\n"
        "ahead = TritonAhead(hardware('sm_90a'), jobs=4)\n"
        "ahead._pool.submit(int).result()\n"
        "print(*ahead._pool._processes, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        assert len(children) == 2
        process.kill()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
