"""Names and sizes of MX formats, as problems and kernels have them.

Nothing here needs torch, so that commands which run no kernel start without it; ``codec`` has the
formats in torch operations.
"""

from __future__ import annotations

BLOCK = 32
"""Elements of K that share a scale: OCP Microscaling Formats v1.0, section 5.2."""
NAN_SCALE = 255
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Dtypes of activations, results and biases."""
PAYLOADS = ("e4m3", "e2m1", "e5m2")
MODES = ("rceil", "floor", "even")
"""How a block's scale is chosen, as ``aiter_mx.quantize`` has it."""
