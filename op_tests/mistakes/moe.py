"""Mistakes in the sources of expert layers."""

from __future__ import annotations

from op_tests.mistakes.mistake import MOE, ROUTED, of_source

MISTAKES = [
    *of_source(
        *(MOE, "rescaled", "grouped/group_results_sm90.h"),
        (
            "activated eights of two lanes exchanged",
            "low |= other < 2 ? got << 16 * other : 0;",
            "low |= other < 2 ? got << 16 * (other ^ 1) : 0;",
            "test_activated",
        ),
    ),
    *of_source(
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
    *of_source(
        *(MOE, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "rows of absent experts left as they were",
            "const bool absent = routed >= 0 &&",
            "const bool absent = routed < 0 &&",
            "test_activated",
        ),
    ),
    *of_source(
        *(ROUTED, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "places of routed rows counted from the workgroup's",
            "absent ? -1 : static_cast<int>(place);",
            "absent ? -1 : static_cast<int>(threadIdx.x);",
            "test_sorted",
        ),
    ),
    *of_source(
        *(MOE, "rescaled_in_place", "grouped/in_place_sm90.cu"),
        (
            "rows of gate for those of up",
            "row + i / kRunRows * a.of.features(), came);",
            "row, came);",
            "test_activated",
        ),
        (
            "scales of gate for those of up",
            "own < rows ? own + lane + i * kLanes / kRunRows * a.of.features() : 0;",
            "own < rows ? own + lane : 0;",
            "test_activated",
        ),
    ),
    *of_source(
        *(ROUTED, "rescaled_in_place", "grouped/in_place_rescaler_sm90.h"),
        (
            "rows of gate for those of up where scales are apart",
            "place.row + row % kRunRows + row / kRunRows * of.features();",
            "place.row + row % kRunRows;",
            "test_activated_rows",
        ),
    ),
    *of_source(
        *(MOE, "mma_ring", "moe/mma_ring_sm90.cu"),
        ("bias of the first expert", "entry.expert * a.N + n + v);", "n + v);"),
    ),
    *of_source(
        *(MOE, "wgmma_fp8", "moe/wgmma_fp8_sm90.cu"),
        (
            "scales of x of other blocks",
            "{e8m0x2_to_bf16(scales, 0), e8m0x2_to_bf16(scales, 1),",
            "{e8m0x2_to_bf16(scales, 0), e8m0x2_to_bf16(scales, 0),",
        ),
    ),
]
