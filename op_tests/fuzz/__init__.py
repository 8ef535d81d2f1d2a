"""Calls of every op drawn at random for as long as one likes: ``python -m op_tests.fuzz``."""
