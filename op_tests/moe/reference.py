"""What tests of the MoE ops compare with: each routed row on its own, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from op_tests.launches import is_poison
from op_tests.mx_reference import assert_rounded, dequantize64, lost_by_rescaling

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Layer:
    """Operands of one grouped GEMM.

    Attributes:
        xq, xs: rows of x.
        wq, ws: ``[E, N, K]`` and its scales.
        bias: ``[E, N]`` or None.
        experts: of each routed row t, or -1 where it has none: rows that must not be written.
        a_div: routed rows that share a row of x.
        weights: of each routed row, or None.
        accumulation_error: of the sum of magnitudes, beyond what fp32 sums may err by.
        rescaling_error: of the largest of its block, what an element of x and of w may change by.
    """

    xq: Tensor
    xs: Tensor
    wq: Tensor
    ws: Tensor
    bias: Tensor | None
    experts: list[int]
    a_div: int
    weights: Tensor | None = None
    accumulation_error: float = 0.0
    rescaling_error: float = 0.0

    def rows_of(self, expert: int) -> list[int]:
        """The routed rows of an expert."""
        return [t for t, e in enumerate(self.experts) if e == expert]

    def sums(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Its rows before rounding, what fp32 accumulation may change of them, and magnitudes."""
        rows = self.rows_of(expert)
        x_rows = [t // self.a_div for t in rows]
        x = dequantize64(self.xq.view(torch.uint8)[x_rows], self.xs[x_rows])
        w = dequantize64(self.wq[expert], self.ws[expert])
        K = x.shape[1]
        ref, total = x @ w.T, x.abs() @ w.abs().T
        if self.bias is not None:
            ref = ref + self.bias[expert].double()
            total = total + self.bias[expert].double().abs()
        relative = (8 + math.sqrt(K)) * 2.0**-23 + self.accumulation_error
        error = relative * total + 2.0**-126 * K / 32
        if self.rescaling_error:
            error = error + lost_by_rescaling(x, w, self.rescaling_error)
        if self.weights is not None:
            weight = self.weights[rows].double().unsqueeze(1)
            ref, total = ref * weight, total * weight.abs()
            error = error * weight.abs() + 2.0**-23 * ref.abs()
        return ref, error, total


def assert_rows(out: Tensor, layer: Layer) -> None:
    """Assert that every row of ``out`` is its expert's, and that rows without one stay poisoned.

    An expert that is not here, number E and up, makes zeros.
    """
    E = layer.wq.shape[0]
    for expert in set(layer.experts):
        rows = out[layer.rows_of(expert)]
        if expert == -1:
            assert is_poison(rows), "a row without an expert was written"
        elif expert >= E:
            assert (rows == 0).all(), "a row of an absent expert is not zero"
        else:
            assert_rounded(rows, *layer.sums(expert), note=f"expert={expert}")


def activation64(
    gate: Tensor, up: Tensor, kind: str, alpha: float, beta: float, limit: float
) -> Tensor:
    """The activated values in float64."""
    if kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if kind == "gelu":
        return gate * torch.special.ndtr(gate) * up
    if kind == "gelu_tanh":
        y = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate * (1 + torch.tanh(y)) / 2 * up
    if kind == "relu2":
        return gate.clamp(min=0) ** 2 * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * gate / (1 + torch.exp(-alpha * gate))


def gate_and_up(rows: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The gate and the up part of rows of sums."""
    if interleaved:
        return rows[:, ::2], rows[:, 1::2]
    gate, up = rows.chunk(2, dim=1)
    return gate, up


def assert_activated(
    payload: Tensor,
    scale: Tensor,
    layer: Layer,
    kind: str,
    interleaved: bool,
    swiglu: tuple[float, float, float],
) -> None:
    """Assert that payload and scale are the quantised activation of every row with an expert.

    The scale must be one that an amax within the error of the sums may have, and each value within
    that error and half a step of e4m3 of the exact one. Slopes of activations are below 1.2, but
    that of relu2 is twice the gate.
    """
    E = layer.wq.shape[0]
    for expert in set(layer.experts) - {-1}:
        rows = layer.rows_of(expert)
        scales = scale[rows]
        got = dequantize64(payload.view(torch.uint8)[rows], scales)
        if expert >= E:
            assert (got == 0).all(), "a row of an absent expert is not zero"
            continue
        ref, error, _ = layer.sums(expert)
        gate, up = gate_and_up(ref, interleaved)
        gate_error, up_error = gate_and_up(error, interleaved)
        value = activation64(gate, up, kind, *swiglu)
        slope = 1.2 * (gate_error * (up.abs() + abs(swiglu[1])) + up_error * gate.abs())
        if kind == "relu2":
            slope = gate_error * 2 * gate.abs() * up.abs() + up_error * gate**2
        exponent = {  # of what is raised to a power: its rounding counts as often as it is large
            "swiglu_oai": 1.702 * gate.abs(),
            "gelu": gate**2,
            "gelu_tanh": 1.6 * (gate + 0.044715 * gate**3).abs(),
        }.get(kind, gate.abs())
        bound = slope + (8 + exponent) * 2.0**-22 * value.abs() + 2.0**-120
        blocks = value.unflatten(1, (-1, 32))
        amax, amax_error = blocks.abs().amax(2), bound.unflatten(1, (-1, 32)).amax(2)
        byte = scales.to(torch.int64)
        nan = blocks.isnan().any(2)
        assert ((byte == 255) == nan).all(), f"expert {expert}: NaN scales"
        low, high = scale_byte(amax - amax_error), scale_byte(amax + amax_error)
        right = ((low <= byte) & (byte <= high)) | nan
        assert right.all(), f"scales {byte[~right]}, not {low[~right]} to {high[~right]}"
        unit = torch.exp2(byte.double() - 127).repeat_interleave(32, dim=1)
        step = torch.exp2(((value.abs() + bound) / unit).log2().floor().clamp(min=-6) - 3) * unit
        is_nan = nan.repeat_interleave(32, dim=1)
        wrong = ~((got - value).abs() <= bound + step / 2) & ~is_nan
        assert not wrong.any(), (
            f"expert {expert}: {int(wrong.sum())} activated values are wrong, got "
            f"{got[wrong][:4]}, float64 says {value[wrong][:4]}"
        )


def scale_byte(amax: Tensor) -> Tensor:
    """The byte of the least power of two that keeps ``amax`` within e4m3."""
    exponent = torch.ceil(torch.log2(amax.clamp(min=2.0**-140) / E4M3_MAX))
    return (exponent + 127).clamp(0, 254).to(torch.int64)
