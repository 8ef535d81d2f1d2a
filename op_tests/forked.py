"""Processes that begin with torch and the package imported, as forks of one that has done that."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch.multiprocessing as mp

PRELOADED = (
    "aiter_mx.tuning.check",
    "aiter_mx.distributed",
    "aiter_mx.sharding",
    "op_tests.tune.fakes",
    "pytest",
)
"""Import what takes two seconds in every process that is started otherwise."""
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
FORKED = get_context("forkserver")
FORKED.set_forkserver_preload([*PRELOADED])


def start_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """As ``torch.multiprocessing.spawn`` does; all have the environment of the first such call."""
    mp.start_processes(work, arguments, ranks, start_method="forkserver")
