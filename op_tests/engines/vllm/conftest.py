"""A process of vLLM's, as its tests here find it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import plugins
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from op_tests.engines.vllm.layers import FORMATS, experts_layer


@pytest.fixture(scope="package", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """A process of vLLM's with plug-ins loaded and groups of one rank."""
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    config = VllmConfig()
    with set_current_vllm_config(config):
        where = tmp_path_factory.mktemp("vllm") / "store"
        init_distributed_environment(1, 0, f"file://{where}", 0, backend="gloo")
        initialize_model_parallel()
        experts_layer("layers.first.experts")  # imports what asks the platform what it has
        yield config


@pytest.fixture(params=FORMATS)
def quantisation(request: pytest.FixtureRequest) -> Any:
    return FORMATS[request.param]()
