"""How a benchmark's items are spread over GPUs, here over processes that have none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from op_tests.bench.gpus import Row, spread


def in_parts(item: int) -> Iterator[Row]:
    """Two rows of an item, which say on what they were measured."""
    for part in "ab":
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield {"item": item, "part": part, "gpu": gpu, "process": os.getpid()}


def in_parts_or_dead(item: tuple[int, Path]) -> Iterator[Row]:
    """Whoever takes item 0 dies in the midst of it, once the other has measured one."""
    index, other_is_done = item
    yield {"item": index}
    while index == 0:
        if other_is_done.exists():
            os._exit(1)
    other_is_done.touch()


def without_end(item: int) -> Iterator[Row]:
    while True:
        yield {"item": item}


@pytest.mark.parametrize("gpus", [["3"], ["0", "GPU-4ef1"]])
def test_each_item_is_measured_once_by_one_process(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    rows: list[Row] = []
    spread(in_parts, iter(range(7)), rows.append, gpus=gpus)
    assert sorted((row["item"], row["part"]) for row in rows) == [
        (item, part) for item in range(7) for part in "ab"
    ]
    for item in range(7):
        assert len({row["process"] for row in rows if row["item"] == item}) == 1
    assert {row["gpu"] for row in rows} <= set(gpus)
    assert {row["process"] == os.getpid() for row in rows} == {len(gpus) == 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)


def test_what_a_dead_process_leaves_is_measured_by_the_others_and_the_run_fails(
    tmp_path: Path,
) -> None:
    rows: list[Row] = []
    with pytest.raises(SystemExit, match=r"items failed on GPUs [01];"):
        spread(
            in_parts_or_dead,
            [(item, tmp_path / "done") for item in range(5)],
            rows.append,
            gpus=["0", "1"],
        )
    assert len(rows) == 5 and {row["item"] for row in rows} == set(range(5))


@pytest.mark.parametrize("gpus", [["0"], ["0", "1"]])
def test_a_run_ends_in_time_and_says_so(
    gpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = []
    spread(without_end, iter(range(3)), rows.append, seconds=1.5, gpus=gpus)
    assert "ended after 1.5 s" in capsys.readouterr().out
    assert all(row["item"] in range(2) for row in rows)
