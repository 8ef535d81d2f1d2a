"""What each gfx950 instruction does, as tables of C expressions by class of instruction."""
