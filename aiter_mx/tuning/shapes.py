"""Lists of shapes: files of a user's, what production missed, and a catalogue of models."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from aiter_mx.dispatch.cells import SCOPE, SHAPE
from aiter_mx.dispatch.explain import make_problem
from aiter_mx.kernels.registry import field_value, problem_type
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target
from aiter_mx.workloads.models import model_of
from aiter_mx.workloads.workload import workload_of


def read_shapes(path: Path, op: str, target: Target | None = None) -> list[Problem]:
    """The problems that a CSV lists, each once, in its order.

    Its columns are fields of the op's problem, such as ``M,N,K,out_dtype``; those with a default
    may be left out. Or it is what ``AITER_MX_LOG_UNTUNED`` writes: columns ``gfx``, ``cu_num`` and
    ``op`` say what a line is for, and ``shape`` has the fields. Lines for another op are passed
    over, and with a target those for another GPU.

    Raises:
        ValueError: the file cannot be read so; the message names file and line.
    """
    known = {field.name: field for field in fields(problem_type(op))}
    needed = [name for name, field in known.items() if field.default is MISSING]
    found: dict[Problem, None] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.DictReader(file, strict=True)
            columns = lines.fieldnames or []
            for name in columns:
                if name not in known and name not in (*SCOPE, SHAPE):
                    raise ValueError(f"column {name!r} is no field of {op}: {', '.join(known)}")
            for name in needed:
                if name not in columns and SHAPE not in columns:
                    raise ValueError(f"column {name!r} is missing")
            for cells in lines:
                if None in cells or None in cells.values():
                    raise ValueError(f"line {lines.line_num} does not have {len(columns)} fields")
                if not _is_for(cells, op, target):
                    continue
                try:
                    found[_problem(op, known, cells)] = None
                except (TypeError, ValueError) as error:
                    raise ValueError(f"line {lines.line_num}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a list of shapes: {error}") from None
    return list(found)


def _problem(op: str, known: Iterable[str], cells: dict[str, str]) -> Problem:
    texts = {name: text for name, text in cells.items() if name in known and text}
    for field in cells.get(SHAPE, "").split():
        name, _, text = field.partition("=")
        if name not in known:
            raise ValueError(f"{name!r} is no field of {op}: {', '.join(known)}")
        texts[name] = text
    of_type = problem_type(op)
    return make_problem(op, {n: field_value(of_type, n, text) for n, text in texts.items()})


def _is_for(cells: dict[str, str], op: str, target: Target | None) -> bool:
    if cells.get("op") not in (None, "", op):
        return False
    if target is None:
        return True
    return cells.get("gfx") in (None, "", target.arch) and cells.get("cu_num") in (
        *(None, ""),
        str(target.cu_num),
    )


def model_shapes(names: Sequence[str], op: str, gpus: Sequence[int], arch: str) -> list[Problem]:
    """The problems of serving these models, each on these numbers of GPUs of an architecture.

    Raises:
        ValueError: an unknown model, or an op that has no part in any of them.
    """
    models = [model_of(name) for name in names]
    workload = workload_of(op)
    every = [
        problem
        for model in models
        for count in gpus
        for problem in workload.problems(model, count, arch)
    ]
    if names and not every:
        raise ValueError(f"{', '.join(names)} poses no {op}")
    return list(dict.fromkeys(every))
