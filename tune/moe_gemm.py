"""Regenerates ``configs/<arch>/moe_gemm.csv``: measured on the GPU at hand, else modelled.

    python tune/moe_gemm.py                # on a GPU: configs/<its arch>/moe_gemm.csv, measured
    python tune/moe_gemm.py --arch gfx950  # without one: configs/gfx950/moe_gemm.csv, by the model

Whatever else ``aiter-mx tune moe_gemm`` takes may follow, such as ``--tp 4,8``.
"""

from __future__ import annotations

import sys

from aiter_mx.cli.main import main

MODELS = ("wide-6144", "gpt-oss-120b")
"""Whose shapes the package ships rows for."""

if __name__ == "__main__":
    shapes = [argument for model in MODELS for argument in ("--model", model)]
    sys.argv = ["aiter-mx", "tune", "moe_gemm", *shapes, *sys.argv[1:]]
    main()
