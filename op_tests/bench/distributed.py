"""An expert layer divided among ranks by ``aiter_mx.distributed``, beside the same layer on one.

    python -m op_tests.bench.distributed [--save] [--backend nccl|gloo] [--ranks 2] [--M 8 128]

Each rank is a process: on a GPU of its own for ``nccl``, on the CPU for ``gloo``, which is saved
without times. M is a rank's tokens. A time is the slowest rank's, in us, between two moments at
which all of them have finished; the host's share counts, as it reads how many rows come. Medians of
the rounds. ``dispatch`` is ``prepare``, which quantises; ``experts`` is ``fused_moe`` of what came;
``combine`` is ``finalize``; ``layer`` is the three without a stop between them. ``bf16_`` is the
same exchange of tokens as they are, which the experts quantise. ``one_rank_us`` is ``fused_moe`` of
all ranks' tokens by one that has all experts. ``bytes`` are those of a token on its way to another
rank, and ``back_bytes`` of what comes back. ``difference`` is that of the result from ``fused_moe``
on one rank, relative.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import aiter_mx
from aiter_mx import distributed
from aiter_mx.tuning.origin import commit
from op_tests.bench.common import (
    MEASURED,
    cpu_name,
    folder_name,
    gpu_name,
    normal_mx,
    refuse_no_gpu,
    show,
)

ROUNDS = {"nccl": 30, "gloo": 3}
TOKENS = {"nccl": (8, 128, 1024, 4096), "gloo": (8, 32)}
FORMATS = ("", "bf16_")
STAGES = ("dispatch", "experts", "combine", "layer")
MOST_DIFFERENCE = 0.02
"""A value between two steps of e4m3 may go either way between the products."""


@dataclass(frozen=True)
class Shape:
    """An expert layer over all ranks."""

    E: int
    top_k: int
    H: int
    intermediate: int


SHAPES = {
    "nccl": (Shape(128, 8, 2048, 768), Shape(128, 4, 6144, 768)),
    "gloo": (Shape(16, 8, 2048, 64), Shape(16, 4, 6144, 64)),
}
"""For a CPU fewer and smaller experts: bytes are those of H and top_k."""


@dataclass(frozen=True)
class Run:
    """What the ranks are told."""

    backend: str
    ranks: int
    shapes: Sequence[Shape]
    tokens: Sequence[int]
    rounds: int
    folder: str


def tokens_of(shape: Shape, M: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    """A rank's tokens, their experts, each a different one, and weights."""
    g = torch.Generator().manual_seed(1000 * rank + M)
    x = torch.randn(M, shape.H, generator=g).bfloat16()
    ids = torch.rand(M, shape.E, generator=g).topk(shape.top_k).indices.int()
    return tuple(each.to(device) for each in (x, ids, torch.rand(M, shape.top_k, generator=g)))


def weights_of(shape: Shape, device: torch.device) -> list[Tensor]:
    """Of all experts, the same ones on each rank."""
    torch.manual_seed(0)
    found: list[Tensor] = []
    for rows, K in ((2 * shape.intermediate, shape.H), (shape.H, shape.intermediate)):
        _, mx = normal_mx(shape.E, rows, K, device=device, deviation=K**-0.5)
        found += mx
    return found


def warm(run: Run, device: torch.device) -> None:
    """Build what all ranks will launch; a shape's kernels are built at once."""
    for shape in run.shapes:
        of_rank, come = shape.E // run.ranks, set()
        for M in run.tokens:
            ids = [tokens_of(shape, M, rank, torch.device("cpu"))[1] for rank in range(run.ranks)]
            owners = torch.cat(ids) // of_rank
            come |= {int((owners == to).any(1).sum()) for to in range(run.ranks)}
        whole = {"hidden": shape.H, "intermediate": shape.intermediate, "top_k": shape.top_k}
        warmup = partial(aiter_mx.warmup, "fused_moe", device=device, **whole)
        warmup(M=sorted(come), E=of_rank, quantised=[0, 1])
        warmup(M=sorted({*run.tokens, *(run.ranks * M for M in run.tokens)}), E=shape.E)
        aiter_mx.warmup("quantize", device=device, M=run.tokens, N=shape.H)


class Ranks:
    """A rank among others: what it times is over when all of them have finished."""

    def __init__(self, rank: int, run: Run) -> None:
        self.rank, self.run = rank, run
        self.on_gpu = run.backend == "nccl"
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            run.backend,
            init_method=f"file://{run.folder}/store",
            rank=rank,
            world_size=run.ranks,
            timeout=datetime.timedelta(minutes=5),
            device_id=self.device if self.on_gpu else None,
        )

    def meet(self) -> float:
        """Wait for all; the time after it, in us."""
        dist.barrier()
        self.finish()
        return self.finish()

    def finish(self) -> float:
        """Wait for this rank's GPU; the time after it, in us."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e6

    def slowest_us(self, turns: Callable[[], list[float]]) -> list[float]:
        """Each of the times that a turn has: of the slowest rank, the median over rounds after two
        that are not timed."""
        times = [turns() for _ in range(self.run.rounds + 2)][2:]
        found = torch.tensor(times, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        medians: list[float] = found.median(0).values.tolist()
        return medians


def measure(ranks: Ranks, shape: Shape, weights: Sequence[Tensor], M: int) -> dict[str, object]:
    """One row of the table, the same on every rank."""
    run, device = ranks.run, ranks.device
    each = shape.E // run.ranks
    own = [w[ranks.rank * each : (ranks.rank + 1) * each] for w in weights]
    everyone = [tokens_of(shape, M, rank, device) for rank in range(run.ranks)]
    x, ids, topk = everyone[ranks.rank]
    own_bytes = {}

    def experts_of(at: distributed.Dispatched) -> Tensor:
        routing = (at.topk_ids, at.topk_weights)
        return aiter_mx.fused_moe(
            at.x, *own, *routing, x_scale=at.x_scale, out_dtype=torch.bfloat16
        )

    def turn(prefix: str) -> list[float]:
        prepare = partial(distributed.prepare, x, ids, topk, shape.E, quantise=not prefix)
        marks = [ranks.meet()]
        at = prepare()
        marks.append(ranks.finish())
        sums = experts_of(at)
        marks.append(ranks.finish())
        distributed.finalize(at, sums)
        marks.append(ranks.finish())
        own_bytes[prefix] = at.bytes_sent
        begun = ranks.meet()
        at = prepare()
        distributed.finalize(at, experts_of(at))
        whole = ranks.finish() - begun
        return [after - before for before, after in pairwise(marks)] + [whole]

    times = ranks.slowest_us(lambda: [us for prefix in FORMATS for us in turn(prefix)])
    names = [f"{prefix}{stage}_us" for prefix in FORMATS for stage in STAGES]
    hardware = torch.cuda.get_device_name() if ranks.on_gpu else cpu_name()
    row: dict[str, object] = {"backend": run.backend, "hardware": hardware, "ranks": run.ranks}
    row["M"] = M
    row |= {"E": shape.E, "top_k": shape.top_k, "H": shape.H, "I": shape.intermediate}
    row |= dict(zip(names, times, strict=True))

    together = [torch.cat(tensors) for tensors in zip(*everyone, strict=True)]

    def alone() -> list[float]:
        begun = ranks.meet()
        if ranks.rank == 0:
            aiter_mx.fused_moe(together[0], *weights, *together[1:])
        return [ranks.finish() - begun]

    (row["one_rank_us"],) = ranks.slowest_us(alone)
    owners = ids // each
    elsewhere = sum(int((owners == to).any(1).sum()) for to in range(run.ranks) if to != ranks.rank)
    sent = torch.tensor([elsewhere, *own_bytes.values()], device=device)
    dist.all_reduce(sent)
    copies, *totals = sent.tolist()
    row |= {
        f"{prefix}bytes": total / copies for prefix, total in zip(own_bytes, totals, strict=True)
    }
    row["back_bytes"] = 2 * shape.H
    found = distributed.fused_moe(x, *own, ids, topk, shape.E).double()
    expected = aiter_mx.fused_moe(x, *weights, ids, topk).double()
    off = torch.stack(((found - expected).norm() / expected.norm(),))
    dist.all_reduce(off, dist.ReduceOp.MAX)
    row["difference"] = off.item()
    if not off.item() <= MOST_DIFFERENCE:
        raise ArithmeticError(f"ranks and one rank disagree: {row}")
    return row


def work(rank: int, run: Run) -> None:
    """A process: all rows, which the first rank writes into the folder."""
    ranks = Ranks(rank, run)
    if ranks.on_gpu and rank == 0:
        warm(run, ranks.device)
    ranks.meet()
    rows = []
    for shape in run.shapes:
        weights = weights_of(shape, ranks.device)
        for M in run.tokens:
            rows.append(measure(ranks, shape, weights, M))
            if rank == 0:
                print(rows[-1], flush=True)
        del weights
    if rank == 0:
        pd.DataFrame(rows).to_csv(f"{run.folder}/rows.csv", index=False)
    dist.destroy_process_group()


def run_all(
    backend: str, ranks: int, shapes: Sequence[Shape], tokens: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """The rows of all shapes, by so many processes."""
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(backend, ranks, shapes, tokens, rounds, folder)
        mp.spawn(work, (run,), ranks)
        rows: list[dict[str, Any]] = pd.read_csv(Path(folder) / "rows.csv").to_dict("records")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", action="store_true", help="write docs/measured/<gpu or processor>/distributed.csv"
    )
    parser.add_argument("--backend", choices=ROUNDS, default="nccl")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--M", type=int, nargs="+", help="tokens of a rank")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    backend, ranks = arguments.backend, arguments.ranks
    if backend == "nccl":
        refuse_no_gpu()
        if torch.cuda.device_count() < ranks:
            raise SystemExit(
                f"{ranks} ranks need as many GPUs, here are {torch.cuda.device_count()}"
            )
    rounds = arguments.rounds or ROUNDS[backend]
    rows = run_all(backend, ranks, SHAPES[backend], arguments.M or TOKENS[backend], rounds)
    show(f"Experts on {ranks} ranks over {backend}", rows)
    if arguments.save:
        folder = MEASURED / (gpu_name() if backend == "nccl" else folder_name(cpu_name()))
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(rows).assign(commit=commit(), date=datetime.date.today().isoformat())
        if backend == "gloo":  # whose times are of processes that share a processor
            frame = frame.loc[:, ~frame.columns.str.endswith("_us")]
        frame.to_csv(folder / "distributed.csv", index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
