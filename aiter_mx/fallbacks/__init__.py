"""What computes an op where none of our kernels does: Triton, and torch."""
