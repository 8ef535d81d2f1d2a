"""Builds kernels on first use and keeps the results."""
