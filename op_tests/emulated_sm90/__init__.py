"""An emulator of Hopper, on which kernels run without a GPU: ``launch.launch``.

A kernel's source is preprocessed as for nvcc, its inline PTX and shared memory are translated to
C++ (``translate``, ``asm``, ``ptx``), and what a compiler for the CPU makes of it (``build``) runs
on fibers (``runtime.cpp``). ``docs/add_a_kernel.md`` says what is found and what is not. It is for
x86-64 under Linux.
"""
