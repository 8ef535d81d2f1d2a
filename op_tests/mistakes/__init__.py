"""Mistakes in Hopper's sources, each of which tests must find: ``python -m op_tests.planted``."""

from __future__ import annotations

from op_tests.mistakes import grouped, linear, moe
from op_tests.mistakes.mistake import Mistake

__all__ = ["MISTAKES", "Mistake"]

MISTAKES = [*linear.MISTAKES, *moe.MISTAKES, *grouped.MISTAKES]
