"""What quantisation and routing must give, worked out apart from the package."""

from __future__ import annotations

import torch
from torch import Tensor

from op_tests.mx_reference import E4M3_VALUES, NAN_SCALE

_LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
_TOP = {"e4m3": 8, "e2m1": 2}  # exponent of the largest number
_CODES = {"e4m3": E4M3_VALUES[:127], "e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()}


def quantised(x: Tensor, mode: str, format: str) -> tuple[Tensor, Tensor]:
    """The code of every element, sign in the top bit, and the scale byte of every block of 32."""
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    finite = blocks.isfinite().all(-1)
    amax = torch.where(finite, amax, 1.0)
    exponent = torch.frexp(amax)[1].double() - 1 - _TOP[format]
    if mode == "rceil":
        exponent += amax / torch.exp2(exponent) > _LARGEST[format]
    exponent = torch.where(amax == 0, -127.0, exponent).clamp(-127, 127)
    scaled = blocks.abs() / torch.exp2(exponent).unsqueeze(-1)
    numbers = _CODES[format]
    middles = (numbers[1:] + numbers[:-1]) / 2
    codes = torch.bucketize(scaled.nan_to_num(0.0).contiguous(), middles)  # ties go down
    # A tie goes to the even code: up, where the one below is odd.
    tie = (codes < len(middles)) & (scaled == middles[codes.clamp(max=len(middles) - 1)])
    codes += tie & (codes % 2 == 1)
    bits = {"e4m3": 7, "e2m1": 3}[format]
    codes |= torch.signbit(blocks).long() << bits
    codes[~finite] = 0x7F if format == "e4m3" else 0
    scale = torch.where(finite, exponent + 127, float(NAN_SCALE)).to(torch.uint8)
    return codes.flatten(-2), scale


def routed_lists(
    topk_ids: list[list[int]], block_m: int, num_experts: int, numbers: list[int], drop: bool
) -> tuple[list[int], list[int]]:
    """vLLM's sorted ids up to those in use, and the expert of each block."""
    slots = len(topk_ids[0]) if topk_ids else 1
    padding, ids, owners = len(topk_ids) * slots, [], []
    for expert in range(num_experts):
        rows = [
            token * slots + slot
            for token, experts in enumerate(topk_ids)
            for slot, chosen in enumerate(experts)
            if chosen == expert and (numbers[expert] >= 0 or not drop)
        ]
        ids += rows + [padding] * (-len(rows) % block_m)
        owners += [numbers[expert]] * -(-len(rows) // block_m)
    return ids, owners
