"""Linear layers of the same x, computed at once by whichever of them is called first.

transformers has a layer each for queries, keys and values, and one each for a gate and what it
opens. Their weights are made to lie behind one another, so that one quantisation of x and one
product serve them all; names and shapes stay, and so does what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from aiter_mx.checks import ALIGNMENT_BYTES
from aiter_mx.integrations.layers import MxLinear, frozen, linear
from aiter_mx.registration import register

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of a module's children that it calls with the same x, in this order."""
_TENSORS = ("weight", "weight_scale_inv", "bias")


class Siblings:
    """Layers that are called with the same x, one after the other.

    The first computes what all of them will return. Once one of them is called with another x in
    between, as in attention to another sequence, or with x that was changed in place, each computes
    its own.

    Attributes:
        out_features: of all of them.
    """

    def __init__(self, layers: Sequence[MxLinear]) -> None:
        self._layers = tuple(layers)
        *self._ends, self.out_features = accumulate(layer.out_features for layer in layers)
        self._waiting: tuple[Tensor, int, tuple[Tensor, ...]] | None = None
        self._apart = False
        for place, layer in enumerate(layers):
            layer.together = (self, place)
        self.put_together()

    def put_together(self) -> None:
        """Give the layers memory that they share, with the values that they have.

        They stay as they are while they are on several devices, as one after the other is moved,
        and where one would begin where kernels cannot load.
        """
        if not _are_alike(self._layers):
            return
        for name in _TENSORS:
            parts = [getattr(layer, name) for layer in self._layers]
            if parts[0] is None or any(part.nbytes % ALIGNMENT_BYTES for part in parts[:-1]):
                continue
            if parts[0].is_meta or _adjacent(parts) is not None:
                continue
            as_bytes = [part.detach().view(torch.uint8) for part in parts]
            whole = torch.cat(as_bytes).view(parts[0].dtype)
            places = whole.split([len(part) for part in parts])
            for layer, place in zip(self._layers, places, strict=True):
                setattr(layer, name, frozen(place))

    def compute(self, place: int, x: Tensor) -> Tensor:
        """What the layer of this place makes of x."""
        if place == 0 and not self._apart:
            whole = joined_linear(x, *_tensors_of(self._layers))
            results = whole.tensor_split(self._ends, -1)
            self._waiting = (x, _changes(x), results)
            return results[0]
        waiting, last = self._waiting, place == len(self._layers) - 1
        if last:
            self._waiting = None
        if waiting is not None:
            of, changes, results = waiting
            if of is x and changes == _changes(x):
                return results[place]
            self._apart, self._waiting = True, None
        return self._layers[place].alone(x)


def _changes(x: Tensor) -> int:
    """How often x was changed in place, as far as torch counts that."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def join(model: nn.Module) -> None:
    """Have the layers of a model that are called with the same x compute together.

    They keep parameters of their own, which are parts of the same memory from now on, also after
    the model is moved to another device.
    """
    for module in model.modules():
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            found = [layer for layer in layers if type(layer) is MxLinear]
            if len(found) == len(names) and _are_alike(found):
                Siblings(found)


def joined_linear(
    x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor]
) -> Tensor:
    """What ``linear`` makes of x and each weight ``[N, K]``, one behind the other ``[..., sum N]``.

    Weights that are adjacent in memory, as their scales and biases, take one product.
    """
    if torch.compiler.is_compiling():
        out: Tensor = _op(x, weights, scales, biases)
        return out
    return _run(x, weights, scales, biases)


def _run(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor]) -> Tensor:
    weight, scale = _adjacent(weights), _adjacent(scales)
    bias = _adjacent(biases) if biases else None
    if weight is not None and scale is not None and (bias is None) == (not biases):
        return linear(x, weight, scale, bias)
    own: list[Tensor | None] = [*biases] if biases else [None] * len(weights)
    each = zip(weights, scales, own, strict=True)
    return torch.cat([linear(x, *of_layer) for of_layer in each], -1)


def _fake(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)))


_op = register(
    "joined_linear",
    "(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases) -> Tensor",
    _run,
    _fake,
)


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one tensor over their memory; None if they do not lie behind one another."""
    first = parts[0]
    memory, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        own = part.untyped_storage().data_ptr()
        if part.data_ptr() != end or own != memory or not part.is_contiguous():
            return None
        end += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _tensors_of(layers: Sequence[MxLinear]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return (
        [layer.weight for layer in layers],
        [layer.weight_scale_inv for layer in layers],
        [layer.bias for layer in layers if layer.bias is not None],
    )


def _are_alike(layers: Sequence[MxLinear]) -> bool:
    """Whether one product can serve all of them."""
    kinds = {
        (x.in_features, x.weight.device, None if x.bias is None else x.bias.dtype) for x in layers
    }
    return len(kinds) == 1
