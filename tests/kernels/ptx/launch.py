"""Runs what the package's wrappers launch as PTX of a chip, on tensors of the CPU.

    with run_on(CHIPS[80], compiler) as launches:
        TritonBackend().paged_attention(...)      its own grid, arguments and constants

Nothing of a launch is written a second time here: `kernel[grid](...)` itself is caught.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import triton

from nanobatch import paged_attention_kernel
from nanobatch.kernels.launch_config import Chip
from ptx.compiler import Compiled, Compiler
from ptx.machine import Machine
from ptx.memory import GlobalMemory
from ptx.parse import Program, parse

MAX_THREADS = 1 << 13  # run at once: enough that numpy's calls cost little


class Launch(NamedTuple):
    """A kernel's launch. arguments: those that the PTX takes, in its order."""

    name: str
    compiled: Compiled
    grid: tuple[int, ...]
    arguments: list[torch.Tensor | float]

    def copy(self) -> Launch:
        """The same on tensors of its own, which lie as these do."""
        copies: dict[int, torch.UntypedStorage] = {}

        def copied(t: torch.Tensor) -> torch.Tensor:
            storage = t.untyped_storage()
            own = copies.setdefault(storage.data_ptr(), storage.clone())
            return t.new_empty(0).set_(own, t.storage_offset(), t.shape, t.stride())

        arguments = [copied(x) if isinstance(x, torch.Tensor) else x for x in self.arguments]
        return self._replace(arguments=arguments)

    def bytes(self) -> list[bytes]:
        """What its tensors hold."""
        tensors = (x for x in self.arguments if isinstance(x, torch.Tensor))
        return [bytes(t.untyped_storage()) for t in tensors]


Order = Sequence[Sequence[int]] | None


def execute(launch: Launch, program: Program | None = None, order: Order = None) -> None:
    """Run a launch; its tensors are changed.

    Args:
        program: in place of the launch's own PTX.
        order: see Machine.run.

    Raises:
        Fault: see the package's docstring.
    """
    program = program or parse(launch.compiled.ptx)
    memory = GlobalMemory([x for x in launch.arguments if isinstance(x, torch.Tensor)])
    values = [_bits(x, memory) for x in launch.arguments]
    # Triton adds parameters for memory of its own, which these kernels do not use.
    values += [np.uint64(0)] * (len(program.parameters) - len(values))
    arguments = dict(zip(program.parameters, values, strict=True))
    x, y, z = (*launch.grid, 1, 1)[:3]
    ids = np.array([(i, j, k) for k in range(z) for j in range(y) for i in range(x)])
    num_at_once = max(1, MAX_THREADS // program.num_threads)
    for start in range(0, len(ids), num_at_once):
        some = ids[start : start + num_at_once]
        size = launch.compiled.shared_size
        Machine(program, memory, size, arguments, some, start).run(order)
    memory.copy_back()


def _bits(x: torch.Tensor | float, memory: GlobalMemory) -> np.unsignedinteger:
    """An argument as the PTX takes it: an address, a float32, or an integer of 32 bits."""
    if isinstance(x, torch.Tensor):
        return np.uint64(memory.address_of(x))
    if isinstance(x, float):
        return np.frombuffer(struct.pack("<f", x), np.uint32)[0]
    assert -(1 << 31) <= x < 1 << 31, f"{x} is not an integer of 32 bits"
    return np.uint32(x & 0xFFFFFFFF)


@contextmanager
def run_on(
    chip: Chip, compiler: Compiler, run: Callable[[Launch], None] = execute
) -> Iterator[list[Launch]]:
    """Inside, kernels that are launched are compiled for a chip and run.

    Args:
        chip: what the kernels are compiled for, and what the wrappers are told that they
            run on.
        run: what to do with each launch.

    Yields:
        the launches so far.
    """
    launches: list[Launch] = []
    major, minor = chip.capability

    def launch(kernel, grid, *args, **options):
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        compiled = compiler.compile(kernel.fn, 10 * major + minor, args, options)
        arguments = [named[name] for name in compiled.parameters]
        launches.append(Launch(kernel.fn.__name__, compiled, grid, arguments))
        if math.prod(grid):
            run(launches[-1])

    kind = type(paged_attention_kernel.paged_attention_kernel)
    with (
        mock.patch.object(kind, "__getitem__", lambda *given: partial(launch, *given)),
        mock.patch.object(paged_attention_kernel, "chip_of", lambda _: chip),
        triton.knobs.runtime.scope(),
    ):
        triton.knobs.runtime.interpret = False  # what is asked for a cast before products
        yield launches
