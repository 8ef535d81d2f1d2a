"""A language model loses next to nothing in MX-FP8."""

from __future__ import annotations

import pytest

from op_tests.bench import perplexity


@pytest.mark.slow
def test_perplexity_in_mxfp8_is_within_a_hundredth_of_that_in_bf16() -> None:
    row = perplexity.compare("llama", steps=24, sequences=6, batch=8)
    assert row["bf16"] < 40, "it has learned nothing; 256 is chance"
    assert 0.99 < row["ratio"] < 1.01
    assert row["layers_in_mxfp8"] >= 10
