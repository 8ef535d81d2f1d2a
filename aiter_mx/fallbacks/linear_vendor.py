"""The MX-FP8 linear of the vendor's library: ``torch._scaled_mm``."""

from __future__ import annotations

import torch

from aiter_mx.errors import LaunchError
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors


def run(problem: LinearProblem, tensors: Tensors, config: Config) -> None:
    """Compute a linear without a bias.

    Raises:
        LaunchError: this build of torch cannot.
    """
    xq, xs, wq, ws, _, out = tensors
    e8m0 = torch.float8_e8m0fnu
    try:
        torch._scaled_mm(
            xq, wq.t(), scale_a=xs.view(e8m0), scale_b=ws.view(e8m0), out_dtype=out.dtype, out=out
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise LaunchError(f"torch._scaled_mm refuses MX-FP8 here: {error}") from error
