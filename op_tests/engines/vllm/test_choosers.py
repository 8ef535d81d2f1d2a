"""What vLLM's choosers take on each GPU, with our plug-in loaded as vLLM loads it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from vllm import logger
from vllm.model_executor.kernels import linear as kernels
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum

import aiter_mx
from aiter_mx import invariance
from aiter_mx.integrations import engine
from aiter_mx.integrations import vllm as plugin
from op_tests.engines.vllm.layers import experts_layer


@pytest.fixture(params=["CUDA", "ROCM"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """vLLM's platform as on a Hopper, or on a gfx950."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "_enum", PlatformEnum[request.param])
    capability = DeviceCapability(9, 0) if request.param == "CUDA" else DeviceCapability(9, 5)
    monkeypatch.setattr(platform, "get_device_capability", lambda *_, **__: capability)
    monkeypatch.setattr(platform, "supports_mx", lambda *_: request.param == "ROCM")
    return str(request.param)


def test_choosers_take_ours_on_both_gpus_and_say_so(
    gpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    logger._print_info_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="vllm"):
        kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(2304, 6144))
        _, experts = experts_layer(f"layers.{gpu}.experts")
    assert type(kernel).__name__ == "AiterMxLinearKernel"
    assert experts.quant_method.experts_cls.__name__ == "AiterMxExperts"
    for line in (
        "Using AiterMxLinearKernel for MXFP8 GEMM",
        "Using AiterMxExperts for MXFP8 MoE",
    ):
        assert line in caplog.messages


def test_plug_in_says_that_it_is_active(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"):
        plugin.register()
    line = "aiter_mx computes MX-FP8 layers: AiterMxLinearKernel and AiterMxExperts"
    assert line in caplog.messages


def test_the_user_s_choice_of_experts_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import mxfp8

    monkeypatch.setattr(mxfp8, "_select_kernel_cls", lambda backend, config: backend.name)
    chosen = mxfp8.select_mxfp8_moe_backend(SimpleNamespace(moe_backend="marlin"))
    assert (chosen[0].name, chosen[1]) == ("MARLIN", "MARLIN")


def test_vllm_s_batch_invariance_is_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_BATCH_INVARIANT", "0")  # so that it is put back
    monkeypatch.delenv("AITER_MX_BATCH_INVARIANT")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    plugin.register()
    assert not invariance.is_on()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    plugin.register()
    assert invariance.is_on()


@pytest.mark.parametrize("changed", ["parameter", "version"])
def test_another_vllm_is_left_as_it_is_unless_ours_is_required(
    changed: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine.version("vllm")
    if changed == "version":
        found, reason = "9.1.0", "it was tested with 0.32.x, 0.33.x"
        monkeypatch.setattr(engine, "version", lambda _: found)
    else:
        reason = "apply_weights has no parameter bias, it has self, layer, x"
        changed_base = kernels.Mxfp8LinearKernel
        monkeypatch.setattr(changed_base, "apply_weights", lambda self, layer, x: x)
        monkeypatch.setattr(changed_base.apply_weights, "__qualname__", "apply_weights")
    theirs = {
        platform: [each for each in of if each.__name__ != "AiterMxLinearKernel"]
        for platform, of in kernels._POSSIBLE_MXFP8_KERNELS.items()
    }
    monkeypatch.setattr(kernels, "_POSSIBLE_MXFP8_KERNELS", theirs)
    before = {platform: list(of) for platform, of in theirs.items()}
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"):
        plugin.register()
    (line,) = caplog.messages
    assert line.startswith(f"aiter_mx {aiter_mx.__version__} leaves vllm {found} as it is: ")
    assert reason in line and theirs == before
    monkeypatch.setenv("AITER_MX_VLLM", "require")
    with pytest.raises(engine.Incompatible, match="leaves vllm"):
        plugin.register()
    monkeypatch.setenv("AITER_MX_VLLM", "0")
    plugin.register()
    assert len(caplog.messages) == 1 and theirs == before


def test_choosers_take_another_where_ours_declines(
    gpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    from aiter_mx.integrations import vllm_layers

    logging.getLogger("vllm").propagate = True
    logger._print_info_once.cache_clear()
    N, activation = {"CUDA": (64, "swiglustep"), "ROCM": (72, "situ")}[gpu]
    with caplog.at_level(logging.INFO, logger="vllm.plugins.aiter_mx"):
        kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(N, 4304))
        assert type(kernel).__name__ != "AiterMxLinearKernel"
        _, experts = experts_layer(f"layers.declined.{gpu}.experts", activation=activation)
        assert experts.quant_method.experts_cls is not vllm_layers.AiterMxExperts
    assert f"declines a linear layer [{N}, 4304]: K=4304 is no multiple of 32" in caplog.text
    name = f"MoEActivation.{activation.upper()} activation"
    assert f"declines an expert layer: kernel does not support {name}" in caplog.text


def test_other_gpus_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiter_mx.integrations.vllm_layers import AiterMxLinearKernel

    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(
            type(current_platform),
            "get_device_capability",
            lambda *_, of=capability, **__: DeviceCapability(*of),
        )
        assert not AiterMxLinearKernel.is_supported()[0]
    assert AiterMxLinearKernel.is_supported(90)[0]


def test_loading_twice_changes_nothing() -> None:
    before = [list(each) for each in kernels._POSSIBLE_MXFP8_KERNELS.values()]
    plugin.register()
    assert [list(each) for each in kernels._POSSIBLE_MXFP8_KERNELS.values()] == before
