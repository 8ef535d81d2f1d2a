"""Modules that train over MX-FP8 operands: a linear, linears of groups, and a layer of experts.

Parameters are bf16, fp16 or fp32 and are what an optimiser steps; state dicts are those of the
modules that these stand for.
"""

from __future__ import annotations

from aiter_mx.nn.experts import MxExperts
from aiter_mx.nn.linear import MxGroupedLinear, MxLinear

__all__ = ["MxExperts", "MxGroupedLinear", "MxLinear"]
