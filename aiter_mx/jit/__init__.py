"""Builds kernels on first use and keeps the results.

``build`` turns a source and its compile-time parameters into a code object, ``toolchain`` finds
the compiler (``amd`` and ``nvidia`` know the vendors' ones, ``compiler`` runs them), ``cache``
keeps what was built and ``lock`` makes one process build it.
"""
