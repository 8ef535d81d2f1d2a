"""``python -m op_tests.planted``: mistakes in Hopper's sources, each of which tests must find.

Each mistake is planted in a copy of ``csrc``, over which the conformance suite of its op is run on
the GPU of this machine until a test fails: first the tests that should find it, then all. The tests
that failed are then run over the sources as they are. ``build/planted`` gets the outputs;
``--save`` keeps what found each in ``docs/measured/<gpu>/planted.csv``. ``--resume`` tries no
mistake again that a test found before in the same sources. ``--compile`` needs no GPU: it says
whether every mistake compiles. The exit status is 1 where one is not found, or the sources as they
are fail.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiter_mx.jit import build as jit
from op_tests import gpu

BUILD = gpu.ROOT / "build" / "planted"
VARIABLE = "AITER_MX_PLANTED_CSRC"
_FAILED = re.compile(r"^FAILED \S+?::(\w+(?:\[.*?\](?=[\s:]|$))?)", re.MULTILINE)
_ENDED = "ended with "
_NO_FINDING = ("BuildError", "OUT_OF_MEMORY", "CUDA out of memory")
"""What fails a test whatever the sources are."""


@dataclass(frozen=True)
class Mistake:
    """Text of a source under ``csrc`` that is there once, and what stands in its place.

    Attributes:
        what: is wrong.
        source, right, wrong: where, and the two texts.
        suite: the file of tests.
        kernel: the subject of that suite.
        sought: part of the names of the tests that are run first, as they should find it.
    """

    what: str
    source: str
    right: str
    wrong: str
    suite: str
    kernel: str
    sought: str = "test_any"

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "_", f"{self.kernel} {self.what}")

    def plant(self, csrc: Path) -> None:
        """Make the mistake in a copy of the sources."""
        path = csrc / self.source
        text = path.read_text()
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.source} has {self.right!r} {text.count(self.right)} times, not once"
            )
        path.write_text(text.replace(self.right, self.wrong))


def _of(suite: str, kernel: str, source: str, *mistakes: tuple[str, ...]) -> list[Mistake]:
    return [
        Mistake(what, source, right, wrong, suite, kernel, *sought)
        for what, right, wrong, *sought in mistakes
    ]


LINEAR, RESCALING, RESCALED, MOE, ROUTED, GROUPED, RESCALED_GROUPS, PROMOTED = (
    "op_tests/linear/test_conformance.py",
    "op_tests/linear/test_rescaling.py",
    "op_tests/linear/test_wgmma_fp8_rescaled_gpu.py",
    "op_tests/moe/test_conformance.py",
    "op_tests/moe/test_rescaled.py",
    "op_tests/grouped/test_conformance.py",
    "op_tests/grouped/test_rescaled_gpu.py",
    "op_tests/grouped/test_promoted.py",
)
_NOT_STORED = (
    "last eight features not stored",
    "if (8 * i < rows && column < columns)",
    "if (8 * i < rows && column + 8 < columns)",
)
BIAS = "load_bias(bias, bias_kind, n + 8 * i)", "load_bias(bias, bias_kind, n)"
FAR, BIASES = "test_scales_over_their_whole_range", "test_outputs_and_biases"
AHEAD, OF_GROUPS = "test_the_launch_ahead", "test_results_and_biases"
NAN, ANY_ROOM, PANELS = (
    "test_a_nan_scale",
    "test_bits_are_the_same_with",
    "test_bits_are_the_same_where",
)
MISTAKES = [
    *_of(
        *(LINEAR, "gemv", "linear/gemv.h"),
        ("scales of one operand ignored", "e8m0_to_f32(b[j].scale)", "1.0f"),
    ),
    *_of(
        *(LINEAR, "gemv", "linear/gemv_sm90.cu"),
        (
            "bias of the first row",
            "load_bias(bias, bias_kind, n)",
            "load_bias(bias, bias_kind, first_row)",
            BIASES,
        ),
        ("last row left out", "if (n < N) {", "if (n + 1 < N) {"),
    ),
    *_of(
        *(LINEAR, "mma_registers", "linear/mma_registers_sm90.cu"),
        ("scales of x ignored", "return w + (x - kUnitScales);", "return w;"),
        (
            "scale of the next block",
            "usual_scale(multiply_scales(of_w, of_x), block)",
            "usual_scale(multiply_scales(of_w, of_x), block ^ 1)",
        ),
    ),
    *_of(*(LINEAR, "mma_ring", "linear/mma_ring_sm90.cu"), ("bias of another row", *BIAS, BIASES)),
    *_of(
        *(LINEAR, "wgmma_fp8", "linear/wgmma_fp8_sm90.cu"),
        (
            "bias of the first row",
            "load_bias(bias, bias_kind, first + own_row)",
            "load_bias(bias, bias_kind, first)",
            BIASES,
        ),
        ("far scales not noticed", " " * 8 + "return far != 0;", " " * 8 + "return false;", FAR),
    ),
    *_of(
        *(LINEAR, "wgmma_f16", "linear/wgmma_f16_sm90.cu"),
        ("bias of another row", *BIAS, BIASES),
        ("far scales not noticed", "return exponent > 60 || exponent < -60;", "return false;", FAR),
        (
            "scales of half their size",
            "static_cast<unsigned>(exponent + 127) << 23",
            "static_cast<unsigned>(exponent + 126) << 23",
        ),
    ),
    *_of(
        *(LINEAR, "wgmma_f16_tiled", "linear/wgmma_bf16_sm90.cu"),
        ("large scales not noticed", "most = max_halves(most, halves);", "", FAR),
        (
            "factors of half their size",
            "f16_factors = F16Factors(reference, kOfSampled);",
            "f16_factors = F16Factors(reference, kOfSampled - 1);",
        ),
    ),
    *_of(
        *(LINEAR, "wgmma_f16_tiled", "include/sm90/f16_relative.h"),
        (
            "every scale taken as covered",
            "return scale - reference + exponent - 1 < kF16Scales;",
            "return true;",
            FAR,
        ),
    ),
    *_of(
        *(RESCALING, "wgmma_fp8_rescaled", "linear/rescaling_sm90.h"),
        ("blocks below 2 rescaled", "kTwo = 8;", "kTwo = 7;", AHEAD),
        (
            "scales at the ends of fp32 rescaled",
            "return is_far(scale) ||",
            "return",
            AHEAD,
        ),
        ("scale of other rows", "max(top_of_all, tops[i])", "max(top_of_all, tops[0])", AHEAD),
        (
            "rows of w always together",
            "rows_apart |= OfW && top_of_all != 0 &&",
            "rows_apart |= false &&",
            AHEAD,
        ),
        ("k past the end counted", "if (row >= 0 && k < to.K)", "if (row >= 0)", AHEAD),
    ),
    *_of(
        *(LINEAR, "wgmma_fp8_rescaled", "linear/rescaling_sm90.h"),
        ("factors of half their size", "(15 - down << 10)", "(14 - down << 10)"),
        (
            "NaN scales not noticed",
            "if (own[i].scale == kNanScale)",
            "if (false)",
            "test_a_nan_scale",
        ),
    ),
    *_of(
        *(RESCALED, "wgmma_fp8_rescaled", "linear/rescale_sm90.h"),
        ("payload of the first slice for all", "wq + first_feature * K", "wq", "test_slices"),
    ),
    *_of(
        *(RESCALED, "wgmma_fp8_rescaled", "linear/rescaled_product_sm90.h"),
        (
            "scales of blocks taken for those of rows",
            "if (__any_sync(~0u, kind == kRowsApart))",
            "if (true)",
            "test_steps_of_each_form",
        ),
    ),
    *_of(
        *(RESCALED, "wgmma_fp8_rescaled", "linear/wgmma_fp8_rescaled_sm90.cu"),
        (
            "bias of the first slice for all",
            "load_bias(a.bias, a.bias_kind, a.first_feature + column)",
            "load_bias(a.bias, a.bias_kind, column)",
            "test_slices",
        ),
        (
            "parts before the own one added one by one",
            "if (of.cluster - first <= 1)",
            "if (of.cluster - first <= 200)",
            "test_shared_tiles",
        ),
    ),
    *_of(
        *(LINEAR, "wgmma_fp8_rescaled", "linear/rescaled_product_sm90.h"),
        (
            "scales of steps that have none in common ignored",
            "if (__builtin_expect(scales.apart, false)) {",
            "if (false) {",
        ),
        (
            "scale of the upper row for the lower one",
            "lower = common * of_lane(1);",
            "lower = common * of_lane(0);",
        ),
        (
            "scales of the step after",
            "set(Second ? later : ahead[0]);",
            "set(Second ? later : ahead[1]);",
        ),
        (
            "scales behind a step that has none in common not asked for anew",
            "scales.ask(step + 1, left);",
            "scales.ask(step, left);",
        ),
        ("scale of the next block", "of.lower >> 8 * k & 0xff", "of.lower >> 8 * (k ^ 1) & 0xff"),
        (
            "scale of the next block, nearer",
            "e8m0_to_normal(of.lower >> shift)",
            "e8m0_to_normal(of.lower >> (shift ^ 8))",
        ),
        (
            "far scales taken for near ones",
            "else if (__any_sync(~0u, kind == kBlocksApart))",
            "else if (true)",
            "test_extreme_scales",
        ),
    ),
    *_of(*(LINEAR, "wgmma_fp8_rescaled", "linear/rescaled_results_sm90.h"), _NOT_STORED),
    *_of(
        *(LINEAR, "wgmma_fp8_rescaled", "linear/wgmma_fp8_rescaled_sm90.cu"),
        (
            "parts of both warpgroups counted together",
            "of.shared_tile(s) * kConsumers + index;",
            "of.shared_tile(s) * kConsumers;",
        ),
        (
            "bias of another column",
            "const long column = min(n + 8 * piece + lane % 4 * 2 + i, a.N - 1);",
            "const long column = min(n + 8 * piece + lane % 4 * 2, a.N - 1);",
            BIASES,
        ),
    ),
    *_of(
        *(GROUPED, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "last tile of x of a group left out where it is not whole",
            "(range.end - range.begin + kTileRows - 1) / kTileRows",
            "(range.end - range.begin) / kTileRows",
            "test_a_group_of_every_size",
        ),
    ),
    *_of(
        *(RESCALED_GROUPS, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "rows of the next group in a tile",
            "return i < tile.rows ? tile.row + i : -1;",
            "return min(tile.row + i, static_cast<int>(M) - 1);",
            "test_what_other_groups",
        ),
    ),
    *_of(
        *(GROUPED, "rescaled", "grouped/rescaler_sm90.h"),
        ("w of the first group for all", "row = group * of.N + first;", "row = first;"),
        ("scales of the first step for all", "before = step * (kStepBytes / 32);", "before = 0;"),
        (
            "groups without rows not passed over",
            "const int group = of.busy()[1 + tile / of.across()], first",
            "const int group = tile / of.across(), first",
        ),
        (
            "words of the first step for all",
            "to.words() + step * static_cast<long>(to.words_of_step());",
            "to.words();",
        ),
        ("scale of other rows", "top = max(top, of_warps[i]);", "top = max(top, of_warps[0]);"),
        (
            "scales of the block before where the next one's are not known",
            """                    if (!known)
                        row = load_row(block);
""",
            "",
        ),
        (
            "scale of the block before where the next one's is not known",
            "known ? top_of(next) : kUnknown",
            "top_of(known ? next : row)",
        ),
        ("scales of both blocks in one place", "tops[turn ^ 1]);", "tops[turn]);"),
        ("scales past the end of k", "Row row{0, min(block.blocks, kBlocks)};", "Row row{0, 4};"),
        (
            "values that become subnormal subtracted from",
            "(down + 1) * 8 * kEach);",
            "down * 8 * kEach);",
        ),
        (
            "subtracted from and multiplied as well",
            "            words[w] += down * 8 * kEach;\n",
            "",
        ),
        ("blocks below 2 accepted", "down == 0 ? kMagnitudes : kTwos", "kMagnitudes"),
        (
            "scale of all rows told where each has its own",
            "             : rows_apart ? own * kEach\n",
            "             : rows_apart ? common * kEach\n",
        ),
        (
            "rows put under the scale of all where each has its own",
            "multiply(words, (rows_apart ? own : common) - row.scale(i));",
            "multiply(words, common - row.scale(i));",
        ),
        (
            "far scales told as near ones",
            "             : far  ? kFarApart\n",
            "             : far  ? kBlocksApart\n",
            FAR,
        ),
        (
            "scales put in common at the ends of fp32",
            "bool right = !rescaling::is_far(common) && common != kNanScale;",
            "bool right = true;",
            FAR,
        ),
        ("payload under NaN scales kept", "if (row.scale(i) != kNanScale) {", "if (true) {", NAN),
    ),
    *_of(
        *(RESCALED_GROUPS, "rescaled", "grouped/rescaler_sm90.h"),
        (
            "tiles overwritten that products still read",
            """            while (!is_free(number / blocks.steps()))
                ;
""",
            "",
            ANY_ROOM,
        ),
        (
            "NaN subtracted from",
            "small |= ~(magnitudes + least) | magnitudes + kEach;",
            "small |= ~(magnitudes + least);",
            "test_a_nan_among",
        ),
        (
            "scales of blocks of zeros counted",
            "(any & (down == 0 ? kMagnitudes : kTwos)) != 0;",
            "(down == 0 || (any & kTwos) != 0);",
            "test_scales_of_zeros",
        ),
    ),
    *_of(*(GROUPED, "rescaled", "linear/rescaled_results_sm90.h"), _NOT_STORED),
    *_of(
        *(GROUPED, "rescaled", "grouped/rescaled_sm90.cu"),
        ("bias of the first group for all", "tile.group * a.of.N + row)", "row)", OF_GROUPS),
        (
            "second warpgroup's rows left out where the tile has a row more than 64",
            "index * kGroupRows >= tile.rows.rows",
            "index * (kGroupRows + 1) >= tile.rows.rows",
            "test_a_group_of_every_size",
        ),
        (
            "tiles of w read before they are there",
            """            while (load_acquire(a.of.ready() + of_w) != steps)
                tell_of_ended(ring); // whose place it may be that is waited for
""",
            "",
        ),
    ),
    *_of(
        *(RESCALED_GROUPS, "rescaled", "grouped/rescaled_sm90.cu"),
        (
            "scales of tiles of w as if each had a place of its own",
            "tile.of_w % of.room * static_cast<long>(kTile), 0",
            "tile.of_w * static_cast<long>(kTile), 0",
            ANY_ROOM,
        ),
        (
            "last tiles of x of a panel as many as of others",
            "const int height = min(kSwath, count_of_x - super), place",
            "const int height = kSwath, place",
            PANELS,
        ),
    ),
    *_of(
        *(MOE, "rescaled", "grouped/rescaled_sm90.cu"),
        (
            "activated eights of two lanes exchanged",
            "low |= other < 2 ? got << 16 * other : 0;",
            "low |= other < 2 ? got << 16 * (other ^ 1) : 0;",
            "test_activated",
        ),
    ),
    *_of(
        *(MOE, "rescaled", "grouped/rescaler_sm90.h"),
        (
            "rows of gate for those of up",
            "row + i / kRunRows * of.features(), barrier);",
            "row, barrier);",
            "test_activated",
        ),
        (
            "scales of gate for those of up",
            "of_run + thread / kRunRows * blocks.of.features();",
            "of_run;",
            "test_activated",
        ),
    ),
    *_of(
        *(MOE, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "rows of absent experts left as they were",
            "const bool absent = routed >= 0 &&",
            "const bool absent = routed < 0 &&",
            "test_activated",
        ),
    ),
    *_of(
        *(ROUTED, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "places of routed rows counted from the workgroup's",
            "absent ? -1 : static_cast<int>(place);",
            "absent ? -1 : static_cast<int>(threadIdx.x);",
            "test_sorted",
        ),
    ),
    *_of(
        *(LINEAR, "wgmma_fp8_rescaled", "linear/shares_sm90.h"),
        (
            "last chunks left out",
            "return cluster * part + min(cluster, parts_with_one_more);",
            "return cluster * part;",
        ),
        (
            "all parts of a CTA in one place",
            "return 2 * cluster + (share_begin(cluster) > tile_begin ? 0 : 1);",
            "return 2 * cluster;",
        ),
    ),
    *_of(
        *(MOE, "mma_ring", "moe/mma_ring_sm90.cu"),
        ("bias of the first expert", "entry.expert * a.N + n + v);", "n + v);"),
    ),
    *_of(
        *(MOE, "wgmma_fp8", "moe/wgmma_fp8_sm90.cu"),
        (
            "scales of x of other blocks",
            "{e8m0x2_to_bf16(scales, 0), e8m0x2_to_bf16(scales, 1),",
            "{e8m0x2_to_bf16(scales, 0), e8m0x2_to_bf16(scales, 0),",
        ),
    ),
    *_of(
        *(GROUPED, "persistent", "grouped/persistent_sm90.cu"),
        ("scales of x of twice their size", "(scale + 60) << 23", "(scale + 61) << 23"),
        (
            "NaN scales not noticed",
            "const bool is_nan = scale == kNanScale,",
            "const bool is_nan = false,",
            "test_a_nan_scale",
        ),
        (
            "scales of w ignored",
            "scales_left > 0 ? load_two(scales_at) : 127 * 0x0101",
            "127 * 0x0101",
        ),
    ),
    *_of(
        *(PROMOTED, "wgmma_fp8", "grouped/promoted_sm90.cu"),
        ("scale of another row", "__shfl_sync(~0u, own, i, 4);", "__shfl_sync(~0u, own, 0, 4);"),
        ("scales of the first step for all", "factor[i] = next[i];", "factor[i] = factor[i];"),
        ("last 32 k of a step left out", "k < kStepK / 32;", "k < kStepK / 32 - 1;"),
        (
            "last row of a group not stored",
            "if (own < rows && column < a.N)",
            "if (own + 1 < rows && column < a.N)",
        ),
        ("rows of the first group for all", "const int row = begin + (", "const int row = ("),
    ),
]


def pytest_load_initial_conftests() -> None:
    """As a plugin: have kernels be built of the sources that a variable names."""
    folder = Path(os.environ[VARIABLE])
    jit.csrc_dir = lambda: folder


def sources(name: str, mistake: Mistake | None) -> Path:
    """A copy of ``csrc``, with a mistake or without."""
    folder = BUILD / name / "csrc"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(gpu.ROOT / "csrc", folder)
    if mistake is not None:
        mistake.plant(folder)
    return folder


def tested(csrc: Path, output: Path, *tests: str) -> str:
    """The first test that fails over some sources, or how the run ended."""
    plugin = ("-p", "op_tests.planted", "-p", "no:cacheprovider", "-q", "-x", "-m", "gpu")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *tests],
        cwd=gpu.ROOT,
        env=gpu.environment() | {VARIABLE: str(csrc)},
        capture_output=True,
        text=True,
        check=False,
    )
    output.write_text(done.stdout + done.stderr)
    return ending(done.returncode, done.stdout)


def ending(status: int, output: str) -> str:
    """Of a run of pytest: the test that failed, nothing where none did, or words."""
    failed = _FAILED.search(output)
    if status == 1 and failed and not any(words in output for words in _NO_FINDING):
        return failed[1]
    return "" if status == 0 else f"{_ENDED}{status}"


def found_by(mistake: Mistake, resume: bool = False) -> str:
    """The first test that fails over the mistake."""
    digest, kept = gpu.digests()["csrc"], BUILD / mistake.name / "found"
    if resume and kept.is_file():
        of, test = kept.read_text().split(" ", 1)
        if of == digest and is_test(test):
            return test
    csrc, of = sources(mistake.name, mistake), f"{mistake.kernel}-gpu"
    for among in (f"{of} and {mistake.sought}", of):
        test = tested(csrc, csrc.parent / "output", "-k", among, mistake.suite)
        if test:
            break
    kept.write_text(f"{digest} {test}")
    return test


def controls(found: Mapping[Mistake, str]) -> list[str]:
    """The tests that found mistakes, as pytest names them, each once."""
    return sorted({f"{m.suite}::{test}" for m, test in found.items() if is_test(test)})


def is_test(found: str) -> bool:
    """Whether a mistake was found, by a test."""
    return bool(found) and not found.startswith(_ENDED)


def compiled(mistake: Mistake) -> str:
    """Why a mistake does not compile for Hopper, or nothing."""
    from aiter_mx.launch import module_request
    from op_tests.jit.launches_sm90 import SM90, launches

    csrc = sources(mistake.name, mistake)
    for module, problem, config in launches().values():
        source = module.sources["sm_90a"]
        text = (csrc / source).read_text()
        if source == mistake.source or Path(mistake.source).name in text:
            request = module_request(module, SM90, problem, config)
            command = ["-c", _BUILD, str(csrc), request.source, repr(request.defines)]
            done = subprocess.run(
                [sys.executable, *command],
                env=gpu.environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            return done.stderr[-500:] if done.returncode else ""
    return f"no launch uses {mistake.source}"


_BUILD = """
import ast, sys
from pathlib import Path
from aiter_mx.jit import build
build.csrc_dir = lambda: Path(sys.argv[1])
build.build(build.BuildRequest(sys.argv[2], "sm_90a", ast.literal_eval(sys.argv[3])))
"""


def main() -> int:
    parser = argparse.ArgumentParser("python -m op_tests.planted", description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile each, and run nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep what found each")
    parser.add_argument("--resume", action="store_true", help="keep what tests found before")
    asked = parser.parse_args()
    with ThreadPoolExecutor(asked.jobs) as pool:
        if asked.compile:
            reasons = list(pool.map(compiled, MISTAKES))
            for mistake, reason in zip(MISTAKES, reasons, strict=True):
                print(mistake.name, reason or "compiles")
            return int(any(reasons))
        tests = pool.map(partial(found_by, resume=asked.resume), MISTAKES)
        found = dict(zip(MISTAKES, tests, strict=True))
    plain, passing = sources("none", None), controls(found)
    failure = tested(plain, plain.parent / "output", *passing) if passing else ""
    rows = [
        {"kernel": m.kernel, "source": m.source, "mistake": m.what, "found_by": test}
        for m, test in found.items()
    ]
    for row in rows:
        print(f"{row['kernel']}, {row['mistake']}: {row['found_by'] or 'NOT FOUND'}")
    print(f"{len(passing)} tests over the sources as they are: {failure or 'all pass'}")
    if asked.save:
        import pandas as pd

        from op_tests.bench.common import MEASURED, gpu_name

        pd.DataFrame(rows).to_csv(MEASURED / gpu_name() / "planted.csv", index=False)
    return int(bool(failure) or not all(map(is_test, found.values())))


if __name__ == "__main__":
    sys.exit(main())
