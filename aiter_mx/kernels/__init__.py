"""The kernel registry: one module for each op, listing what can compute it."""
