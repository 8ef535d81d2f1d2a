"""What Triton's tile kernels share: one step of K."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_step(
    acc,
    x_ptrs,
    w_ptrs,
    xs_ptrs,
    ws_ptrs,
    k,
    s,
    left,
    X_FORMAT: tl.constexpr,
    SWAP: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
):
    """``acc`` and the product of a step, of whose k and scales only ``left`` are there."""
    if WHOLE_STEPS:
        x = tl.load(x_ptrs)
        w = tl.load(w_ptrs)
        xs = tl.load(xs_ptrs)
        ws = tl.load(ws_ptrs)
    else:
        x = tl.load(x_ptrs, mask=k[None, :] < left, other=0.0)
        w = tl.load(w_ptrs, mask=k[None, :] < left, other=0.0)
        xs = tl.load(xs_ptrs, mask=s[None, :] < left // 32, other=127)
        ws = tl.load(ws_ptrs, mask=s[None, :] < left // 32, other=127)
    if SWAP:
        acc = tl.dot_scaled(w, ws, "e4m3", x.T, xs, X_FORMAT, acc)
    else:
        acc = tl.dot_scaled(x, xs, X_FORMAT, w.T, ws, "e4m3", acc)
    return acc
