"""What the scripts here share: ``aiter-mx tune`` over the models whose rows the package ships."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aiter_mx.cli.main import main


def tune(op: str, models: Sequence[str], *options: str) -> None:
    """Tune ``op`` for these models; what the command line has besides goes to ``aiter-mx tune``."""
    shapes = [argument for model in models for argument in ("--model", model)]
    sys.argv = ["aiter-mx", "tune", op, *shapes, *options, *sys.argv[1:]]
    main()
