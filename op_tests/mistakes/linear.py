"""Mistakes in the sources of the linear."""

from __future__ import annotations

from op_tests.mistakes.mistake import (
    AHEAD,
    BIAS,
    BIASES,
    FAR,
    LINEAR,
    NOT_STORED,
    RESCALED,
    RESCALING,
    of_source,
)

MISTAKES = [
    *of_source(
        *(LINEAR, "gemv", "linear/gemv.h"),
        ("scales of one operand ignored", "e8m0_to_f32(b[j].scale)", "1.0f"),
    ),
    *of_source(
        *(LINEAR, "gemv", "linear/gemv_sm90.cu"),
        (
            "bias of the first row",
            "load_bias(bias, bias_kind, n)",
            "load_bias(bias, bias_kind, first_row)",
            BIASES,
        ),
        ("last row left out", "if (n < N) {", "if (n + 1 < N) {"),
    ),
    *of_source(
        *(LINEAR, "mma_registers", "linear/mma_registers_sm90.cu"),
        ("scales of x ignored", "return w + (x - kUnitScales);", "return w;"),
        (
            "scale of the next block",
            "usual_scale(multiply_scales(of_w, of_x), block)",
            "usual_scale(multiply_scales(of_w, of_x), block ^ 1)",
        ),
    ),
    *of_source(
        *(LINEAR, "mma_ring", "linear/mma_ring_sm90.cu"), ("bias of another row", *BIAS, BIASES)
    ),
    *of_source(
        *(LINEAR, "wgmma_fp8", "linear/wgmma_fp8_sm90.cu"),
        (
            "bias of the first row",
            "load_bias(bias, bias_kind, first + own_row)",
            "load_bias(bias, bias_kind, first)",
            BIASES,
        ),
        ("far scales not noticed", " " * 8 + "return far != 0;", " " * 8 + "return false;", FAR),
    ),
    *of_source(
        *(LINEAR, "wgmma_f16", "linear/wgmma_f16_sm90.cu"),
        ("bias of another row", *BIAS, BIASES),
        ("far scales not noticed", "return exponent > 60 || exponent < -60;", "return false;", FAR),
        (
            "scales of half their size",
            "static_cast<unsigned>(exponent + 127) << 23",
            "static_cast<unsigned>(exponent + 126) << 23",
        ),
    ),
    *of_source(
        *(LINEAR, "wgmma_f16_tiled", "linear/wgmma_bf16_sm90.cu"),
        ("large scales not noticed", "most = max_halves(most, halves);", "", FAR),
        (
            "factors of half their size",
            "f16_factors = F16Factors(reference, kOfSampled);",
            "f16_factors = F16Factors(reference, kOfSampled - 1);",
        ),
    ),
    *of_source(
        *(LINEAR, "wgmma_f16_tiled", "include/sm90/f16_relative.h"),
        (
            "every scale taken as covered",
            "return scale - reference + exponent - 1 < kF16Scales;",
            "return true;",
            FAR,
        ),
    ),
    *of_source(
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
    *of_source(
        *(LINEAR, "wgmma_fp8_rescaled", "linear/rescaling_sm90.h"),
        ("factors of half their size", "(15 - down << 10)", "(14 - down << 10)"),
        (
            "NaN scales not noticed",
            "if (own[i].scale == kNanScale)",
            "if (false)",
            "test_a_nan_scale",
        ),
    ),
    *of_source(
        *(RESCALED, "wgmma_fp8_rescaled", "linear/rescale_sm90.h"),
        ("payload of the first slice for all", "wq + first_feature * K", "wq", "test_slices"),
    ),
    *of_source(
        *(RESCALED, "wgmma_fp8_rescaled", "linear/rescaled_step_sm90.h"),
        (
            "scales of blocks taken for those of rows",
            "if (__any_sync(~0u, kind == kRowsApart))",
            "if (true)",
            "test_steps_of_each_form",
        ),
    ),
    *of_source(
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
    *of_source(
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
    ),
    *of_source(
        *(LINEAR, "wgmma_fp8_rescaled", "linear/rescaled_step_sm90.h"),
        ("scale of the next block", "lower >> 8 * k & 0xff", "lower >> 8 * (k ^ 1) & 0xff"),
        (
            "scale of the next block, nearer",
            "e8m0_to_normal(lower >> shift)",
            "e8m0_to_normal(lower >> (shift ^ 8))",
        ),
        (
            "far scales taken for near ones",
            "else if (__any_sync(~0u, kind == kBlocksApart))",
            "else if (true)",
            "test_extreme_scales",
        ),
    ),
    *of_source(*(LINEAR, "wgmma_fp8_rescaled", "linear/rescaled_results_sm90.h"), NOT_STORED),
    *of_source(
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
    *of_source(
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
]
