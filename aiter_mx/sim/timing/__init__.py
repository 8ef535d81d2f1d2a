"""How long a launch takes on an MI355X: a model held against published times.

``features`` counts what a launch does, ``floor`` sums that up with calibrated constants, and ``cu``
replays the waves of a compute unit. See docs/simulator.md.
"""
