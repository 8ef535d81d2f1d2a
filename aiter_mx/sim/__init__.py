"""A functional simulator that runs gfx950 code objects on the CPU."""
