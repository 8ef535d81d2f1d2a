"""Kernels that others publish for gfx950, launched in the simulator: what calibration runs.

None of them is part of this project: the wheels and the checkout that hold them are given.
"""
