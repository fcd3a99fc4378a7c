"""Runs the PTX that Triton compiles, without a GPU: each thread, with checks of memory.

    compiler.py      a kernel's launch -> PTX (Triton's own, in a process of its own)
    parse.py         PTX -> a list of instructions
    arithmetic.py    what an instruction computes, of arrays with one number a thread
    warp.py          instructions of whole warps: mma, ldmatrix, stmatrix, shfl
    memory.py        global memory: each access lies within a tensor
    shared.py        shared memory: races between warps, asynchronous copies
    instructions.py  what each instruction does
    machine.py       threads, their registers, branches, barriers
    mutants.py       programs with one barrier less, or a shorter wait
    launch.py        runs what the package's wrappers launch, on tensors of the CPU

An access out of all tensors, or not aligned; two programs that write the same bytes; two warps
of a program that use the same bytes of shared memory with no barrier between, one of them to
write; bytes that an asynchronous copy is still to fill: each raises a Fault. Copies land as
late as their wait allows, and warps run together or in any order that is asked for.

What it is not: a warp's threads are taken to run in step; there is no timing; approximate
instructions (ex2.approx, div.full) are exact to float32. It knows the instructions that Triton
makes of this project's kernels for compute capability 7.5, 8.x and 12.0, and refuses others.
The matrix instructions of 9.0 and 10.0 (wgmma, tcgen05, with their barriers in memory) are left
out: for those chips the machine code is read (test_compiled_kernels.py).

Source: NVIDIA's "Parallel Thread Execution ISA", chapters 9.7 (instructions) and 8 (memory).
"""
