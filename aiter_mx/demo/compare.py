"""Figures that say how near one set of embeddings is to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """How well neighbours are kept.

    Attributes:
        nearest_kept: whether each sentence's nearest neighbour is the same, ``[sentences]``.
        correlation: Spearman's correlation of each sentence's neighbour ranking, ``[sentences]``.
    """

    nearest_kept: tuple[bool, ...]
    correlation: tuple[float, ...]


def compare_rankings(expected: Tensor, got: Tensor) -> Ranking:
    """Compare the order of neighbours in two sets of unit vectors ``[sentences, features]``."""
    count = len(expected)
    others = ~torch.eye(count, dtype=torch.bool)
    wanted, found = (
        _ranks((vectors @ vectors.T)[others].view(count, count - 1)) for vectors in (expected, got)
    )
    n = count - 1
    correlation = 1 - 6 * (wanted - found).square().sum(dim=1) / (n * (n * n - 1))
    return Ranking(
        tuple((wanted.argmin(dim=1) == found.argmin(dim=1)).tolist()), tuple(correlation.tolist())
    )


def _ranks(similarity: Tensor) -> Tensor:
    """0 for each row's greatest, 1 for the next, and so on."""
    return similarity.argsort(dim=1, descending=True).argsort(dim=1).double()
