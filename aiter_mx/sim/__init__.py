"""A functional simulator that runs gfx950 code objects on the CPU.

>>> from aiter_mx.sim.program import Program, SimOptions

See docs/simulator.md.
"""
