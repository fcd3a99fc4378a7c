"""PTX of a kernel's launch, from a process in which Triton's interpreter is off.

    python -m ptx.compiler            requests on standard input, answers on standard output

A request is what a wrapper gave to `kernel[grid](...)`. Triton's own launcher makes the
signature, the hints and the options of it (which pointers are multiples of 16, which numbers
are 1). Only the device that it asks for is made up, and its last stage, the machine code, is
left out. Triton's cache is a folder of its own, which the test processes share.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[3]


class Compiled(NamedTuple):
    """A kernel as PTX. parameters: names of the arguments that it takes, in order."""

    ptx: str
    shared_size: int  # bytes of a program
    parameters: list[str]


class Compiler:
    """The process, started when it is first asked. cache: the folder of what is compiled."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.process: subprocess.Popen | None = None
        self.answers: dict[str, Compiled] = {}

    def compile(
        self, function: Callable, capability: int, args: tuple, options: dict
    ) -> Compiled:
        """Compile function for `sm_<capability>`; args and options are those of its launch.

        Raises:
            RuntimeError: Triton refuses it, with the end of its message.
        """
        request = {
            "function": [function.__module__, function.__name__],
            "capability": capability,
            "args": [_describe(arg) for arg in args],
            "options": options,
        }
        line = json.dumps(request)
        if line not in self.answers:
            answer = self._ask(line)
            if "error" in answer:
                raise RuntimeError(answer["error"])
            self.answers[line] = Compiled(**answer)
        return self.answers[line]

    def _ask(self, line: str) -> dict:
        if self.process is None:
            environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(ROOT), str(ROOT / "tests/kernels")]
            )
            environment["TRITON_CACHE_DIR"] = str(self.cache)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ptx.compiler"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the compiler's process ended with {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def _describe(arg) -> dict | float:
    """What the launcher reads of an argument: a tensor's format and its address modulo 16."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return {"dtype": str(arg.dtype).removeprefix("torch."), "address": arg.data_ptr() % 16}


class Pointer:
    """Stands for a tensor in the launcher."""

    def __init__(self, dtype: str, address: int):
        self.dtype = getattr(torch, dtype)
        self.address = address

    def data_ptr(self) -> int:
        """Where it begins; only the remainder by 16 counts."""
        return self.address

    @staticmethod
    def ptr_range() -> int:
        """As triton.runtime.jit.MockTensor answers."""
        return 0


class MadeUpDriver:
    """A device of any compute capability. Its number is the capability, so that the launcher
    keeps a cache for each."""

    def __init__(self):
        self.capability = 0

    def get_current_device(self) -> int:
        """The device's number."""
        return self.capability

    def get_current_target(self):
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_stream(self, device: int) -> int:
        """No stream is ever used."""
        return 0


def answer(line: str, driver: MadeUpDriver) -> dict:
    """Compile one request."""
    request = json.loads(line)
    module, name = request["function"]
    driver.capability = request["capability"]
    args = [Pointer(**x) if isinstance(x, dict) else x for x in request["args"]]
    kernel = getattr(importlib.import_module(module), name)
    compiled = kernel.run(*args, grid=(1,), warmup=True, **request["options"])
    signature = compiled.src.signature
    return {
        "ptx": compiled.asm["ptx"],
        "shared_size": compiled.metadata.shared,
        "parameters": [name for name, kind in signature.items() if kind != "constexpr"],
    }


def main() -> None:
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    # The assembler takes a third of the time, and nothing here runs what it makes.
    CUDABackend.make_cubin = lambda *_: b""
    driver = MadeUpDriver()
    triton.runtime.driver.set_active(driver)
    for line in sys.stdin:
        try:
            reply = answer(line, driver)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
