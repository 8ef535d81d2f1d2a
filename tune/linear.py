"""Regenerates ``configs/<arch>/linear.csv``: measured on the GPU at hand, else modelled.

    python tune/linear.py                # on a GPU: configs/<its arch>/linear.csv, measured
    python tune/linear.py --arch gfx950  # without one: configs/gfx950/linear.csv, by the model

Whatever else ``aiter-mx tune linear`` takes may follow, such as ``--table FILE``.
"""

from __future__ import annotations

import sys

from aiter_mx.cli.main import main

MODELS = ("wide-6144", "minilm-l6")
"""Whose shapes the package ships rows for."""

if __name__ == "__main__":
    shapes = [argument for model in MODELS for argument in ("--model", model)]
    sys.argv = ["aiter-mx", "tune", "linear", *shapes, *sys.argv[1:]]
    main()
