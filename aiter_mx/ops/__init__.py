"""The public ops: argument checks, and the way from a call to a launch."""
