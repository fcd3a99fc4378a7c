"""`bench.py kernels`: each kernel against what the hardware can do, measured in the same run.

    decode     one query token a sequence: reads all keys and values once, so GB/s counts
    prefill    whole prompts: multiplies far more than it reads, so TFLOP/s counts
    the rest   RMSNorm, RoPE + write, SiLU x gate, and the sampler's two passes over the logits

Paged attention is compared with torch's scaled_dot_product_attention and, on a GPU, with
compiled FlexAttention, both on dense keys of the same shape: what could be read if no sequence
ever grew. All must agree before any is timed. Inputs rotate through more memory than a cache
holds, as the layers of a model do.

Always holds: a case that fails is a row that says why, and the others go on.

Source: figures are counted as FlashAttention's and FlashInfer's benchmarks count them.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from nanobatch.attention import choose_backend
from nanobatch.bench import flags, report
from nanobatch.bench.attention_systems import (
    BLOCK_SIZE,
    OURS,
    Flex,
    attention_inputs,
    attention_systems,
)
from nanobatch.bench.hardware import (
    Hardware,
    describe_rates,
    measure_hardware,
    num_copies,
    seconds_of,
)
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.models.decoder import NUM_EXACT_LOGITS
from nanobatch.utils.arithmetic import cdiv, keys_seen
from nanobatch.utils.device import resolve_device, resolve_dtype

# Query heads, KV heads, head dimension
SHAPES = {"llama-2-7b": (32, 32, 128), "llama-3-8b": (32, 8, 128), "smollm2": (9, 3, 64)}
# (sequences, keys of each)
DECODES = {
    "cuda": [(1, 1024), (1, 32768), (16, 1024), (16, 4096), (64, 1024), (64, 4096)],
    "cpu": [(1, 1024), (16, 1024)],
}
PREFILLS = {"cuda": [(1, 2048), (8, 2048)], "cpu": [(1, 512)]}
NUM_TOKENS = {"cuda": 8192, "cpu": 512}  # of the operations between matrix products
HIDDEN, INTERMEDIATE, VOCAB, NUM_SAMPLING = 4096, 14336, 128256, 64  # Llama-3-8B's
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
PEERS = ("SDPA", "FlexAttention")
FLAGS = {"dtype": "auto", "device": "auto", "threads": None, "save_json": None}

Call = Callable[[], object]


class Line(NamedTuple):
    """One line of the table.

    seconds: by system, ours first. amount: the least bytes or operations there are, and unit
    says which. share: of the hardware's bandwidth or rate, ours.
    """

    kernel: str
    shape: str
    size: str
    unit: str
    amount: int
    seconds: dict[str, float]
    share: float

    def rate(self, system: str) -> float:
        """GB/s or TFLOP/s."""
        return self.amount / self.seconds[system] / (1e9 if self.unit == "GB/s" else 1e12)


class NoLine(NamedTuple):
    """A case without figures. is_fault: it is wrong; else the GPU has too little memory."""

    kernel: str
    shape: str
    size: str
    error: str
    is_fault: bool


class Case(NamedTuple):
    """A line of the table that is still to be measured: measure() checks and times it."""

    kernel: str
    shape: str
    size: str
    measure: Callable[[], Line]

    def line(self) -> Line | NoLine:
        """The line, or why there is none."""
        try:
            return self.measure()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return NoLine(*self[:3], "does not fit into the GPU's memory", is_fault=False)
        except Exception as error:  # of any kind: Triton's and CUDA's have no common one
            return NoLine(*self[:3], f"{type(error).__name__}: {error}", is_fault=True)


@dataclass(frozen=True)
class KernelBench:
    """Times everything on one device, in one number format, against its measured limits."""

    device: torch.device
    dtype: torch.dtype
    hardware: Hardware

    def cases(self) -> Iterator[Case]:
        """All cases of the table."""
        for kernel, grid in (("decode", DECODES), ("prefill", PREFILLS)):
            for shape_name in SHAPES:
                yield from self.attention_cases(kernel, shape_name, grid[self.device.type])
        yield from self.other_cases()

    def attention_cases(
        self,
        kernel: str,
        shape_name: str,
        sizes: Iterable[tuple[int, int]],
        with_flex: bool = True,
    ) -> Iterator[Case]:
        """Cases of "decode" or "prefill"; a size is (sequences, keys of each).

        Args:
            with_flex: compare with FlexAttention too; on a GPU it is compiled for each size.
        """
        flex = None
        if self.device.type == "cuda" and with_flex:
            torch.compiler.reset()  # it gives up compiling after some shapes
            flex = torch.compile(flex_attention, dynamic=False)
        for size in sizes:
            measure = functools.partial(self.attention_line, kernel, shape_name, size, flex)
            yield Case(kernel, shape_name, "{} x {}".format(*size), measure)

    def attention_line(
        self,
        kernel: str,
        shape_name: str,
        size: tuple[int, int],
        flex: Flex | None = None,
    ) -> Line:
        """Check and time a case of "decode" or "prefill"; size is (sequences, keys of each).

        Raises:
            AssertionError: the systems disagree.
        """
        H, K, D = shape = SHAPES[shape_name]
        num_seqs, seq_len = size
        is_decode = kernel == "decode"
        query_len = 1 if is_decode else seq_len
        num_keys, num_scores = keys_seen(seq_len - query_len, query_len, None)
        kv_bytes = 2 * num_seqs * num_keys * K * D * self.dtype.itemsize
        of = (shape, num_seqs, query_len, seq_len, self.dtype, self.device)
        copies = [
            attention_systems(attention_inputs(*of, seed), flex)
            for seed in range(num_copies(kv_bytes))
        ]
        seconds = {}
        wanted = copies[0][OURS]()
        for name, call in copies[0].items():
            try:
                found = call()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a peer that cannot do this shape has no figure
                print(f"{name}, {shape_name}: {str(error).splitlines()[0]}")
                continue
            torch.testing.assert_close(found, wanted, atol=TOLERANCE[self.dtype], rtol=0)
            seconds[name] = seconds_of([c[name] for c in copies], self.device)
        where = (kernel, shape_name, f"{num_seqs} x {seq_len}")
        if is_decode:
            return self._line(*where, "GB/s", kv_bytes, seconds)
        return self._line(*where, "TFLOP/s", 4 * num_seqs * H * D * num_scores, seconds)

    def other_cases(self) -> Iterator[Case]:
        """The operations between matrix products, and the sampler's passes over the logits."""
        T, S, E, V = NUM_TOKENS[self.device.type], NUM_SAMPLING, HIDDEN, VOCAB
        H, K, D = SHAPES["llama-3-8b"]
        itemsize, wide = self.dtype.itemsize, torch.float32
        ops = choose_backend("auto", self.device, BLOCK_SIZE)

        def randn(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, device=self.device, dtype=dtype)

        def norm() -> Call:
            x_TE, residual_TE, weight_E = randn(T, E), randn(T, E, dtype=wide), randn(E)
            return lambda: ops.rms_norm(x_TE, weight_E, 1e-5, residual_TE)

        def rope() -> Call:
            q_THD, k_TKD, v_TKD = randn(T, H + 2 * K, D).split([H, K, K], dim=1)
            cos_TR, sin_TR = randn(2, T, D // 2, dtype=wide)
            cache = KVCache(*(randn(cdiv(T, BLOCK_SIZE), K, BLOCK_SIZE, D) for _ in range(2)))
            inputs = (q_THD, k_TKD, v_TKD, cos_TR, sin_TR, cache)
            slots_T = torch.randperm(T, device=self.device)
            return lambda: ops.rope_and_write(*inputs, slots_T)

        def silu() -> Call:
            gate_up_TF = randn(T, 2 * INTERMEDIATE)
            return lambda: ops.silu_mul(gate_up_TF)

        def argmax() -> Call:
            logits_SV = randn(S, V, dtype=wide)
            return lambda: logits_SV.max(dim=-1)

        def topk() -> Call:
            logits_SV = randn(S, V, dtype=wide)
            return lambda: logits_SV.topk(NUM_EXACT_LOGITS)

        # Name, size, the least bytes there are to move, what makes a call on fresh inputs.
        cases = [
            ("RMSNorm", f"{T} x {E}", T * E * 2 * (itemsize + 4), norm),
            ("RoPE + write", f"{T} x {H}+{K}", T * D * (2 * (H + 2 * K) * itemsize + 4), rope),
            ("SiLU x gate", f"{T} x {INTERMEDIATE}", 3 * T * INTERMEDIATE * itemsize, silu),
            ("argmax", f"{S} x {V}", S * V * 4, argmax),
            (f"top {NUM_EXACT_LOGITS}", f"{S} x {V}", S * V * 4, topk),
        ]
        for name, size, num_bytes, make in cases:
            where = (name, "llama-3-8b", size)
            yield Case(*where, functools.partial(self._time, where, num_bytes, make))

    def _time(
        self, where: tuple[str, str, str], num_bytes: int, make: Callable[[], Call]
    ) -> Line:
        calls = [make() for _ in range(num_copies(num_bytes))]
        seconds = {OURS: seconds_of(calls, self.device)}
        return self._line(*where, "GB/s", num_bytes, seconds)

    def _line(
        self, kernel: str, shape: str, size: str, unit: str, amount: int, seconds: dict
    ) -> Line:
        most = self.hardware.bandwidth if unit == "GB/s" else self.hardware.flop_rate
        return Line(kernel, shape, size, unit, amount, seconds, amount / seconds[OURS] / most)


def print_lines(lines: Iterable[Line | NoLine]) -> list[Line | NoLine]:
    """Print each line as it comes: our rate and share, then the peers' rates. Returns all."""
    table = report.Table("", ("us", f"{OURS:>15}", "of the most", *PEERS), label_width=38)
    done = []
    for line in lines:
        done.append(line)
        label = f"{line.kernel:12}  {line.shape:10}  {line.size:>12}"
        if isinstance(line, NoLine):
            print(f"{label}  {line.error.splitlines()[0]}", flush=True)
            continue
        ours = (
            f"{line.seconds[OURS] * 1e6:.1f}",
            f"{line.rate(OURS):.4g} {line.unit}",
            f"{line.share:.0%}",
        )
        peers = [f"{line.rate(p):.4g}" if p in line.seconds else "" for p in PEERS]
        table.line(label, (*ours, *peers))
    return done


def failure_of(lines: Iterable[Line | NoLine]) -> str | None:
    """What to say if a case was wrong."""
    faults = sum(isinstance(line, NoLine) and line.is_fault for line in lines)
    return f"{faults} of the cases failed; see above" if faults else None


# ----------------------------------------------------------------------------- subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py kernels`."""
    flags.add_flags(parser, FLAGS)


def run_command(args: Namespace) -> dict:
    """Measure and print; the report. A "failure" in it makes the exit status 1."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    hardware, info = measure_hardware(device, dtype), report.describe_hardware(device)
    report.print_heading(f"kernels, {report.dtype_name(dtype)}", info)
    print(describe_rates(hardware))
    with torch.inference_mode():
        cases = KernelBench(device, dtype, hardware).cases()
        lines = print_lines(case.line() for case in cases)
    return {
        "machine": info | hardware._asdict(),
        "kernels": [line._asdict() for line in lines],
        "failure": failure_of(lines),
    }
