"""Chooses who computes a call: tuned table first, then the kernels' envelopes."""
