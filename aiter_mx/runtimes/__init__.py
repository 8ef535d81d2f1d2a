"""One file for each way to load and launch a code object, behind the same interface."""
