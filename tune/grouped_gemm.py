"""Regenerates ``configs/<arch>/grouped_gemm.csv``: measured on the GPU at hand, else modelled.

    python tune/grouped_gemm.py                # on a GPU: configs/<its arch>/grouped_gemm.csv, measured
    python tune/grouped_gemm.py --arch gfx950  # without one: configs/gfx950/grouped_gemm.csv, by the model

Whatever else ``aiter-mx tune grouped_gemm`` takes may follow, such as ``--tp 4,8``.
"""

from __future__ import annotations

import sys

from aiter_mx.cli.main import main

MODELS = ("deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "wide-6144")
"""Whose shapes the package ships rows for."""

if __name__ == "__main__":
    shapes = [argument for model in MODELS for argument in ("--model", model)]
    sys.argv = ["aiter-mx", "tune", "grouped_gemm", *shapes, *sys.argv[1:]]
    main()
