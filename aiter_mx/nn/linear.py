"""Linears whose products run over MX-FP8 operands, forward and backward."""

from __future__ import annotations

import math
from functools import cache
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from aiter_mx.autograd import grouped_linear, linear_autograd, refuse_grad_format
from aiter_mx.checks import BLOCK, refuse_no_whole_number
from aiter_mx.ops.quantize import Dual, quantize_dual


class _Steps:
    """What stands for the last step that an optimizer has taken in this process.

    Fused ones, torch's and others', write parameters in launches that torch counts no change by,
    and so does what torch compiles of any.
    """

    def __init__(self) -> None:
        self.latest: list[object] = []
        register_optimizer_step_post_hook(self._renew)

    def _renew(self, *of_hook: object) -> None:
        self.latest = []  # another object, which compiled steps make without a guard; no count


_steps = cache(_Steps)


class QuantizedOnce:
    """A parameter's quantisation, made anew for another parameter and when this one has changed.

    torch counts changes in place, but for those through ``.data``, those of launches that it does
    not know, and a graph's replays; a step of any optimizer of its kind is taken for one. Copies of
    it have nothing yet, as they are for other parameters.
    """

    def __init__(self) -> None:
        self._made: tuple[ref[Tensor], tuple[int, int], list[object], Dual] | None = None

    def __reduce__(self) -> tuple[type[QuantizedOnce], tuple[()]]:
        return QuantizedOnce, ()

    def of(self, w: Tensor) -> Dual:
        """Both quantisations of ``w`` as it is."""
        state, step = (w.data_ptr(), w._version), _steps().latest
        made = self._made
        # Another tensor may have the memory of one that is gone, and as many changes.
        if made is None or made[0]() is not w or made[1] != state or made[2] is not step:
            # outside of inference mode, whose tensors no backward pass may take later
            with torch.inference_mode(False), torch.no_grad():
                made = self._made = (ref(w), state, step, quantize_dual(w))
        return made[3]


class _OfWeight(nn.Module):
    """What linears share: a weight, a bias, and the weight's quantisation."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _declare(
        self,
        shape: tuple[int, ...],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        reuse: bool,
        grad_format: str,
    ) -> None:
        for name, size in (("out_features", shape[-2]), ("in_features", shape[-1])):
            refuse_no_whole_number(**{name: size})
            if size <= 0 or size % BLOCK:
                raise ValueError(f"{name} must be a multiple of {BLOCK}, got {size}")
        refuse_grad_format(grad_format)
        self.reuse_quantized, self.grad_format = reuse, grad_format
        self._quantized = QuantizedOnce()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        of_bias = torch.empty(shape[:-1], device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if of_bias is None else nn.Parameter(of_bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases as ``torch.nn.Linear`` does."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _quantized_weight(self) -> Dual | None:
        """What is kept of the weight; None where it cannot be told whether the weight changes."""
        if not self.reuse_quantized or torch.compiler.is_compiling():
            return None
        transformed = torch._C._functorch.maybe_current_level() is not None
        return (
            None if transformed or self.weight.is_inference() else self._quantized.of(self.weight)
        )

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        *groups, N, K = self.weight.shape
        of_groups = f"groups={groups[0]}, " if groups else ""
        return f"{of_groups}in_features={K}, out_features={N}, bias={self.bias is not None}"


class MxLinear(_OfWeight):
    """``torch.nn.Linear`` over MX-FP8 operands, with its parameters and state dict.

    Args:
        in_features: a multiple of 32.
        out_features: a multiple of 32.
        bias: whether there is one.
        device, dtype: of the parameters, as torch has them.
        reuse_quantized: whether the quantised weight is kept until the weight changes, as for the
            micro-batches of a step; 2.1 bytes an element more. Compiled calls quantise each time.
            Not for weights that are written through ``.data`` or by a captured graph: torch counts
            no such change. A step of a ``torch.optim.Optimizer`` is one, fused or not.
        grad_format: of gradients in the backward pass, ``"e4m3"`` or ``"e5m2"``.

    Example:
        >>> layer = aiter_mx.nn.MxLinear(64, 32)
        >>> layer(torch.randn(5, 64)).shape
        torch.Size([5, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        reuse_quantized: bool = False,
        grad_format: str = "e4m3",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, in_features)
        self._declare(shape, bias, device, dtype, reuse_quantized, grad_format)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, reuse_quantized: bool = False, grad_format: str = "e4m3"
    ) -> MxLinear:
        """A layer that shares the parameters of a ``torch.nn.Linear``.

        Args:
            linear: the layer whose weight and bias this one trains.
            reuse_quantized, grad_format: as in ``MxLinear``.

        Returns:
            The layer; both have the same parameters, not copies.

        Raises:
            TypeError: another kind of layer.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            "meta",
            linear.weight.dtype,
            reuse_quantized=reuse_quantized,
            grad_format=grad_format,
        )
        for name, parameter in linear.named_parameters():
            made.register_parameter(name, parameter)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, of x's dtype, or autocast's."""
        return linear_autograd(
            x,
            self.weight,
            self.bias,
            quantized_w=self._quantized_weight(),
            grad_format=self.grad_format,
        )


class MxGroupedLinear(_OfWeight):
    """A linear for each group of rows, with weight ``[groups, out, in]``: ``grouped_linear``.

    Args:
        groups: of rows.
        in_features: a multiple of 32.
        out_features: a multiple of 32.
        bias: whether there is one, ``[groups, out_features]``.
        device, dtype: of the parameters, as torch has them.
        reuse_quantized, grad_format: as in ``MxLinear``.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        reuse_quantized: bool = False,
        grad_format: str = "e4m3",
    ) -> None:
        super().__init__()
        shape = (groups, out_features, in_features)
        self._declare(shape, bias, device, dtype, reuse_quantized, grad_format)

    def forward(
        self, x: Tensor, group_offs: Tensor | None = None, *, group_lens: Tensor | None = None
    ) -> Tensor:
        """``[T, in_features]`` to ``[T, out_features]``; groups as ``grouped_linear`` has them."""
        return grouped_linear(
            x,
            self.weight,
            group_offs,
            self.bias,
            group_lens=group_lens,
            quantized_w=self._quantized_weight(),
            grad_format=self.grad_format,
        )
