"""What each gfx950 kernel asks of a compute unit, counted in the simulator.

    python -m op_tests.bench.counters [--only gemv,mfma] [--save]

Workgroups are dealt to compute units in turn. Each launch is that of the op's default arguments, in
the configuration that dispatch would choose, or the kernel's own where it would choose another
kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pandas as pd
import torch

from aiter_mx.cli.explain import describe_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.timing.constants import shipped
from aiter_mx.sim.timing.cu import SplitTrace
from aiter_mx.sim.timing.model import Traced, predict
from aiter_mx.target import hardware
from aiter_mx.trial import Trial, prepare, tried
from aiter_mx.tuning.traces import held_by_unit, sampled
from aiter_mx.workloads import workload_of
from op_tests.bench.common import MEASURED

COUNTED = SimOptions(
    count_unique=True,
    count_conflicts=True,
    count_groups=True,
    trace=True,
    schedule="run-to-barrier",
    threads=1,  # so that the first wave runs alone ahead of its first load
)
TARGET = hardware("gfx950")
CUS = TARGET.cu_num
HBM_BYTES_A_CYCLE = 6.5e6 / 2400  # of the GPU, at 2.4 GHz
LDS_BYTES_A_CYCLE = 128
LINE_BYTES = 128
GROUPED_TILE, GROUPED_STEP = 256, 128
STEPS = (
    (4096, "16x4", "16x4"),
    (4096, "row_major", "16x4"),
    (4096, "row_major", "row_major"),
    (2880, "row_major", "row_major"),
)
LAST_ROUNDS = ((256, 2048), (384, 2880))  # tiles, and N
WIDE = 6144  # of the model class whose decode shapes these are

GEMV = [LinearProblem(M, 2304, WIDE) for M in (1, 2, 4, 8)]
GEMV += [LinearProblem(M, WIDE, K) for K in (1536, 2880) for M in (1, 2, 4, 8)]
MFMA = [LinearProblem(M, 2304, WIDE) for M in (16, 32, 64)]
MOE = [
    MoeGemmProblem(M, 2 * width, WIDE, 16, 4, 16, "mxfp8", "silu", a_div=4)
    for width in (768, 384)
    for M in (1, 2, 4)
]
FEW_TOKENS = [
    [part for _, part in FusedMoeProblem(M, WIDE, width, 16, 4).parts(TARGET.arch)]
    for width in (768, 384)
    for M in (1, 2, 4)
]
# A step of training: two groups of gpt-oss's first expert linear.
GROUPS, ROWS, N, K = 2, 512, 5760, 2880
OF_ROWS = [
    QuantizeProblem(ROWS, width, to="both", groups=GROUPS, offsets="int32", padded="columns")
    for width in (K, N)
]
OF_WEIGHTS = [QuantizeProblem(N, K, to="both", matrices=GROUPS)]
QUANTIZE = {
    to: [QuantizeProblem(rows, 7168, to=to) for rows in (1024, 8192)] for to in ("rows", "both")
}
SHAPES: dict[str, tuple[str, Sequence[Problem]]] = {
    "gemv": ("linear", GEMV),
    "mfma": ("linear", MFMA),
    "mfma_split": ("linear", MFMA),
    "moe mfma": ("moe_gemm", MOE),
    "moe_up gemv": ("moe_up", [up for up, _ in FEW_TOKENS]),
    "moe_down gemv": ("moe_down", [down for _, down in FEW_TOKENS]),
    "unequal moe_up gemv": ("moe_up", [up for up, _ in FEW_TOKENS]),
    "unequal moe_down gemv": ("moe_down", [down for _, down in FEW_TOKENS]),
    "rows": ("quantize", QUANTIZE["rows"]),
    "tiles": ("quantize", QUANTIZE["both"]),
    "step's rows tiles": ("quantize", OF_ROWS),
    "step's weights tiles": ("quantize", OF_WEIGHTS),
    "forward persistent": ("grouped_gemm", [GroupedGemmProblem(ROWS, N, K, GROUPS)]),
    "dgrad persistent": ("grouped_gemm", [GroupedGemmProblem(ROWS, K, N, GROUPS)]),
    "wgrad persistent": ("grouped_wgrad", [GroupedWgradProblem(ROWS, N, K, GROUPS)]),
}


def chosen(op: str, kernel: str, problem: Problem) -> tuple[KernelSpec, Config]:
    """The kernel and the configuration that is counted."""
    spec = find_kernel(op, TARGET.arch, "hip", kernel)
    found = route(op, TARGET, problem)
    if (found.backend, found.kernel) == ("hip", kernel):
        return spec, dict(found.config)
    return spec, dict(spec.configure(TARGET, problem))


def run(spec: KernelSpec, problem: Problem, config: Config, is_unequal: bool = False) -> Trial:
    """Its launch, whose operands begin at lines, as what a GPU allocates does.

    Where its load is unequal, all tokens choose the same experts.
    """
    operands = drawn(spec, problem)
    if is_unequal:
        assert spec.module is not None
        names = [arg.name for arg in spec.module.args]
        ids = operands[names.index("topk_ids")]
        assert ids is not None
        ids.copy_(ids[0].clone())
    return tried(prepare(spec, problem, config, CUS, operands), COUNTED)


def drawn(spec: KernelSpec, problem: Problem) -> list[torch.Tensor | None]:
    """Operands that begin at lines."""
    operands = workload_of(spec.op).operands(problem, torch.device("cpu"))
    return [None if tensor is None else at_line(tensor) for tensor in operands]


def at_line(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins at a line of 128 bytes."""
    memory = torch.empty(tensor.nbytes + LINE_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % LINE_BYTES
    view = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return view.copy_(tensor)


def on_cus(groups: Sequence[int]) -> list[int]:
    """Sums over the workgroups of each compute unit."""
    return [sum(groups[cu::CUS]) for cu in range(CUS)]


def counters(trial: Trial) -> dict[str, object]:
    """The columns of a launch."""
    report = trial.report
    assert report.group_bytes is not None
    by_cu = on_cus([sum(of_group) for of_group in zip(*report.group_bytes.values(), strict=True)])
    weights = on_cus(report.group_bytes.get("wq", (0,)))
    asked = report.bytes_read + report.scalar_bytes_read + report.bytes_written
    lds_bytes = report.lds_bytes_read + report.lds_bytes_written
    groups = len(next(iter(report.group_bytes.values())))
    first = report.first_load
    operands = (report.unique_bytes_read or 0) + (report.unique_bytes_written or 0)
    assert trial.prediction is not None
    return {
        "predicted_us": trial.prediction.us,
        "workgroups": groups,
        "address_cycles": report.address_cycles,
        "address_cycles_a_cu": report.address_cycles / CUS,
        "lds_cycles_a_cu": (lds_bytes / LDS_BYTES_A_CYCLE + report.lds_conflicts) / CUS,
        "hbm_cycles": operands / HBM_BYTES_A_CYCLE,
        "asked_over_operands": asked / operands,
        "instructions_ahead_of_load": first.instructions if first else None,
        "waits_ahead_of_load": first.waits if first else None,
        "dependent_waits": report.latencies / groups,
        "busiest_cu_over_mean": max(by_cu) * CUS / max(1, sum(by_cu)),
        "cus_with_weights": sum(count > 0 for count in weights),
        "valu": report.by_class.get("valu", 0),
        "mfma": report.by_class.get("mfma", 0),
        "vmem": report.by_class.get("vmem", 0),
        "lds": report.by_class.get("lds", 0),
        "scratch_bytes": report.scratch_bytes,
    }


def grouped_step(K: int, a_layout: str, b_layout: str) -> dict[str, object]:
    """Of a step of the main loop of the largest tile: what four steps more add, over four."""
    cycles = []
    for steps in (0, 4):
        problem = GroupedGemmProblem(
            *(GROUPS * GROUPED_TILE, GROUPED_TILE, K + steps * GROUPED_STEP, GROUPS),
            a_scale_layout=a_layout,
            b_scale_layout=b_layout,
        )
        spec = find_kernel("grouped_gemm", TARGET.arch, "hip", "persistent")
        config = dict(spec.configure(TARGET, problem))
        config.update(tile_m=GROUPED_TILE, tile_n=GROUPED_TILE)
        operands = drawn(spec, problem)
        operands[-1] = torch.arange(1, GROUPS + 1, dtype=torch.int32) * GROUPED_TILE
        # One workgroup takes a whole tile of each group.
        trial = tried(prepare(spec, problem, config, 1, operands), COUNTED)
        cycles.append(trial.report.address_cycles / GROUPS)
    return {
        "kernel": "grouped step",
        "problem": f"K={K}, scales {a_layout} and {b_layout}",
        "address_cycles": (cycles[1] - cycles[0]) / 4,
    }


def last_round(tiles: int, N: int) -> dict[str, object]:
    """Time of so many tiles of groups of one size, of which the GPU holds 256 at once."""
    problem = GroupedGemmProblem(8192, N, 2880, 4)
    found = route("grouped_gemm", TARGET, problem)
    operands = workload_of("grouped_gemm").hollow(problem)
    operands[-1] = torch.arange(1, problem.G + 1, dtype=torch.int32) * (problem.M // problem.G)
    launch = prepare(found.spec, problem, found.config, operands=operands)
    trace = sampled(launch, 1, launch.groups).trace
    traced = Traced(SplitTrace(trace), launch.groups, held_by_unit(launch))
    return {
        "kernel": "grouped last round",
        "problem": f"{name_of(problem)}: {tiles} tiles",
        "config": describe_config(found.config),
        "predicted_us": predict(traced, shipped()).us,
    }


def rows_of(kernel: str) -> list[dict[str, object]]:
    """The rows of a kernel."""
    if kernel == "grouped step":
        return [grouped_step(*step) for step in STEPS]
    if kernel == "grouped last round":
        return [last_round(*round_of) for round_of in LAST_ROUNDS]
    op, problems = SHAPES[kernel]
    found = []
    for problem in problems:
        spec, config = chosen(op, kernel.split()[-1], problem)
        trial = run(spec, problem, config, kernel.startswith("unequal"))
        row = {"kernel": kernel, "problem": name_of(problem), "config": describe_config(config)}
        print(row, flush=True)
        found.append(row | counters(trial))
    return found


def name_of(problem: Problem) -> str:
    """Its shape in a few words."""
    fields = {name: vars(problem)[name] for name in ("M", "N", "K", "to") if name in vars(problem)}
    return " ".join(f"{name}={value}" for name, value in fields.items())


def main() -> None:
    kernels = [*SHAPES, "grouped step", "grouped last round"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(kernels), help="kernels, with commas between")
    parser.add_argument("--save", action="store_true", help="write gfx950_simulated/counters.csv")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    frame = pd.DataFrame([row for kernel in wanted for row in rows_of(kernel)])
    print(frame.drop(columns="config", errors="ignore").T.to_string())
    if arguments.save:
        path = MEASURED / "gfx950_simulated" / "counters.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # kernels that were not asked for stay as they are
            saved = pd.read_csv(path)
            frame = pd.concat([saved[~saved["kernel"].isin(wanted)], frame])
        frame["kernel"] = pd.Categorical(frame["kernel"], kernels)
        frame.sort_values("kernel", kind="stable").to_csv(path, index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
