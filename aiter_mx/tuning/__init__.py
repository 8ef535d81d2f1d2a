"""The tuner: sweeps candidates, checks and times them, and writes tables that dispatch reads."""
