"""The plug-in for SGLang: MX-FP8 linear layers and experts of ``quant_method: mxfp8``.

SGLang calls ``register`` in each of its processes (entry point ``sglang.srt.plugins``).
``AITER_MX_SGLANG=0`` turns it off, ``AITER_MX_SGLANG=require`` stops where it cannot be active.
"""

from __future__ import annotations

import logging

KNOWN = ("0.5.22.", "0.5.23.")

_log = logging.getLogger("sglang.aiter_mx")


def register() -> None:
    """Hook the package's kernels into SGLang's MX-FP8 layers.

    SGLang calls it when it starts, as the package names it among its entry points. An engine that
    it does not fit is left as it is, with a warning.

    Raises:
        ValueError: ``AITER_MX_SGLANG`` is neither 0, 1 nor ``require``.
        Incompatible: it is ``require``, and the plug-in cannot be active.
    """
    from aiter_mx.integrations.engine import activate

    if activate("sglang", KNOWN, _patch, _log):
        _log.info("aiter_mx computes MX-FP8 layers: linear and fused_moe")


def _patch() -> None:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.quantization import fp8, fp8_utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from aiter_mx.integrations import sglang_layers as ours
    from aiter_mx.integrations.engine import expect, expect_names

    expect(fp8_utils.resolve_mxfp8_dense_gemm_backend)
    expect(fp8_utils.dispatch_w8a8_mxfp8_linear)
    expect_names(fp8_utils.Mxfp8DenseGemmBackend, "UNSUPPORTED")
    expect(fp8_utils.get_fp8_gemm_runner_backend)
    expect(MoeRunner.run, "dispatch_output", "quant_info")
    expect(fp8.Fp8MoEMethod._process_mxfp8_moe_weights, "layer", "quantize")
    expect(fp8.Fp8Config.get_min_capability, "self")
    expect_names(fp8.Fp8Config, "get_min_capability")
    expect(MoeRunnerConfig, *ours.CONFIG_FIELDS)

    utils, method = fp8_utils.__name__, f"{fp8.__name__}.Fp8MoEMethod"
    for target, hook in (
        (f"{utils}.resolve_mxfp8_dense_gemm_backend", ours.resolve_backend),
        (f"{utils}.dispatch_w8a8_mxfp8_linear", ours.dispatch_linear),
        (f"{fp8.__name__}.Fp8Config.get_min_capability", ours.min_capability),
        (f"{method}._process_mxfp8_moe_weights", ours.process_experts),
        (f"{MoeRunner.__module__}.MoeRunner.run", ours.run_experts),
    ):
        if target not in HookRegistry._patched:  # plug-ins may be loaded several times
            HookRegistry.register(target, hook, HookType.AROUND)
