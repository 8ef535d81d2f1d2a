"""The plug-in for vLLM: MX-FP8 linear layers and experts, whatever format the checkpoint has.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``).
``AITER_MX_VLLM=0`` turns it off, ``AITER_MX_VLLM=require`` stops where it cannot be active.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

KNOWN = ("0.32.", "0.33.")


def register() -> None:
    """Put the package's kernels ahead of vLLM's own for MX-FP8 layers.

    vLLM calls it when it starts, as the package names it among its entry points. An engine that it
    does not fit is left as it is, with a warning.

    Raises:
        ValueError: ``AITER_MX_VLLM`` is neither 0, 1 nor ``require``.
        Incompatible: it is ``require``, and the plug-in cannot be active.
    """
    from vllm import envs
    from vllm.logger import init_logger

    from aiter_mx.integrations.engine import activate

    log = init_logger("vllm.plugins.aiter_mx")
    if activate("vllm", KNOWN, _patch, log):
        if envs.VLLM_BATCH_INVARIANT:
            os.environ.setdefault("AITER_MX_BATCH_INVARIANT", "1")
        log.info("aiter_mx computes MX-FP8 layers: AiterMxLinearKernel and AiterMxExperts")


def _patch() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
    from vllm.platforms.interface import PlatformEnum

    from aiter_mx.integrations.engine import expect, expect_names, replace_everywhere
    from aiter_mx.integrations.vllm_layers import AiterMxExperts, AiterMxLinearKernel, choice

    table = "_POSSIBLE_MXFP8_KERNELS"
    expect_names(linear, table, "init_mxfp8_linear_kernel")
    expect_names(fp8.Fp8MoeBackend, "TRITON_MXFP8")
    select = mxfp8.select_mxfp8_moe_backend
    expect(select, "config")
    AiterMxLinearKernel.check()
    AiterMxExperts.check()

    possible = getattr(linear, table)
    for platform in (PlatformEnum.CUDA, PlatformEnum.ROCM, PlatformEnum.CPU):
        kernels = possible.setdefault(platform, [])
        if AiterMxLinearKernel not in kernels:
            kernels.insert(0, AiterMxLinearKernel)

    if hasattr(select, "aiter_mx"):  # plug-ins may be loaded several times
        return

    @wraps(select)
    def select_mxfp8_moe_backend(config: Any) -> Any:
        if config.moe_backend == "auto" and choice(config):
            return fp8.Fp8MoeBackend.TRITON_MXFP8, AiterMxExperts
        return select(config)

    select_mxfp8_moe_backend.aiter_mx = True  # type: ignore[attr-defined]
    replace_everywhere("vllm", select.__name__, select, select_mxfp8_moe_backend)
