"""How long a step takes on a GPU: calculated, so that no GPU is needed.

A step is a sum of parts, each bounded by memory or by arithmetic:

    products        weights are read once, whatever the batch; 2 operations a weight and token
    attention       each request's keys and values are read once; 4 D operations a score
    lm_head         only for the rows that sample
    the rest        norms, RoPE, activation: bytes, and kernels that take a few microseconds
    the host        Python between the steps
    the bus         blocks that are swapped out and in
    all-reduce      two a layer, with tensor parallelism

The two bounds of a part do not meet in a sharp corner. Near it both count, and a p-norm

    seconds = (memory_seconds ^ p + arithmetic_seconds ^ p) ^ (1 / p)

fits measured times better than their maximum. Products work on tiles, so tokens are rounded
up to TILE. The efficiencies and p of A100 and H100 are fitted to measured times of Llama-2-7B's
layers (Vidur's profiles; tests/simulation/test_simulator.py prints the fit). Those of
the other GPUs are guesses from these two.

Plain arithmetic, without torch. Taught in notebooks/01_why_decoding_is_slow.ipynb. Sources: the
roofline model (Williams et al., 2009); Vidur (Agrawal et al., MLSys 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from nanobatch.models.config import ModelConfig, bytes_per_block
from nanobatch.plan import SchedulerOutput
from nanobatch.simulation.roofline import num_weights
from nanobatch.utils.arithmetic import cdiv, keys_seen

TILE = 64  # tokens of one tile of a matrix product
ITEMSIZE = 2  # bytes: weights, and the cache unless it is in 8 bits
ATTENTION_EFFICIENCY = 0.6  # of the flop rate that products reach
# Norms, RoPE, activation and additions: the numbers they move for a token and layer, in hidden
# sizes (the activation's three intermediate sizes are extra), and their kernels. Fitted.
OTHER_HIDDEN, OTHER_KERNELS = 25, 5


@dataclass(frozen=True)
class Gpu:
    """What a GPU can do by its data sheet, and the share of it that is reached.

    memory: bytes. bandwidth: bytes/s. flop_rate: 16-bit dense FLOP/s. link: bytes/s to its
    neighbours. bus: bytes/s to the host. The efficiencies are shares of bandwidth and rate;
    knee is the p of the p-norm; kernel_seconds: the least that a small kernel takes.
    """

    memory: float
    bandwidth: float
    flop_rate: float
    link: float
    bus: float = 25e9
    bandwidth_efficiency: float = 0.86
    flop_efficiency: float = 0.75
    knee: float = 1.6
    kernel_seconds: float = 4.5e-6


GPUS = {
    "a100-80gb": Gpu(80e9, 2.039e12, 312e12, 300e9, flop_efficiency=0.71, knee=1.94),
    "h100": Gpu(80e9, 3.35e12, 989e12, 450e9, flop_efficiency=0.79, knee=1.33),
    "h200": Gpu(141e9, 4.8e12, 989e12, 450e9, flop_efficiency=0.79, knee=1.33),
    "rtx-4090": Gpu(24e9, 1.008e12, 165e12, 25e9),
    "l4": Gpu(24e9, 0.3e12, 121e12, 25e9),
    "t4": Gpu(16e9, 0.32e12, 65e12, 12e9, bus=12e9),
}


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step, of one model on one GPU or several.

    Args:
        model: the decoder's shape.
        gpu: what it runs on.
        tensor_parallel_size: GPUs that share each layer.
        block_size: tokens of a block of the cache.
        kv_cache_dtype: as in EngineConfig.
        host_seconds: between two steps, when the GPU waits for the host.
    """

    model: ModelConfig
    gpu: Gpu
    tensor_parallel_size: int = 1
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    host_seconds: float = 1e-3

    def __post_init__(self):
        if self.model.num_experts:
            raise ValueError(
                f"num_experts is {self.model.num_experts}; it must be 0: the cost model has no "
                "mixture of experts"
            )

    def step_seconds(self, plan: SchedulerOutput) -> float:
        """The time that a plan takes, its copies and its padding rows included."""
        num_tokens = num_keys = num_scores = num_logits = 0
        window = self.model.sliding_window
        for row in plan.scheduled:
            start, n = row.request.num_computed_tokens, row.num_tokens
            num_tokens += n
            num_logits += start + n == len(row.request.token_ids)
            if n == 1 and window is None:
                num_keys += start + 1
                num_scores += start + 1
            else:
                keys, scores = keys_seen(start, n, window)
                num_keys += keys
                num_scores += scores
        for request in plan.padding:  # still computed, then discarded
            num_tokens += 1
            num_logits += 1
            num_keys += request.num_tokens
            num_scores += request.num_tokens
        num_copied = len(plan.swap_out) + len(plan.swap_in)
        copy_seconds = num_copied * self.block_bytes / self.gpu.bus
        return copy_seconds + self.seconds(num_tokens, num_keys, num_scores, num_logits)

    def seconds(
        self, num_tokens: int, num_keys: int, num_scores: int, num_logits: int
    ) -> float:
        """The time of a step from its counts: tokens, keys read in each layer, scores of each
        layer and head, and rows that go through lm_head."""
        model, tp = self.model, self.tensor_parallel_size
        layer = self.products_seconds(num_tokens) + self.other_seconds(num_tokens)
        kv_bytes = num_keys * self._token_bytes / model.num_layers
        attention_flops = 4 * num_scores * model.num_heads * model.head_dim
        layer += self._smooth_max(kv_bytes / tp, attention_flops / tp / ATTENTION_EFFICIENCY)
        if tp > 1:
            num_bytes = 2 * (tp - 1) / tp * num_tokens * model.hidden_size * ITEMSIZE
            layer += 2 * (num_bytes / self.gpu.link + self.gpu.kernel_seconds)
        lm_head = 0.0
        if num_logits:
            lm_head = self.product_seconds(num_logits, model.hidden_size, model.vocab_size)
        return model.num_layers * layer + lm_head + self.host_seconds

    def products_seconds(self, num_tokens: int) -> float:
        """The matrix products of one layer."""
        model = self.model
        E, F, D = model.hidden_size, model.intermediate_size, model.head_dim
        qkv = (model.num_heads + 2 * model.num_kv_heads) * D
        sizes = [(E, qkv), (model.num_heads * D, E), (E, 2 * F), (F, E)]
        return sum(self.product_seconds(num_tokens, *size) for size in sizes)

    def product_seconds(self, num_tokens: int, size_in: int, size_out: int) -> float:
        """Tokens times a weight of [size_in, size_out], which the GPUs share."""
        num_numbers = size_in * size_out + num_tokens * (size_in + size_out)
        num_padded = cdiv(num_tokens, TILE) * TILE
        flops = 2 * num_padded * size_in * size_out
        tp = self.tensor_parallel_size
        return self._smooth_max(num_numbers * ITEMSIZE / tp, flops / tp)

    def other_seconds(self, num_tokens: int) -> float:
        """All that is not a matrix product or attention, in one layer."""
        model, gpu = self.model, self.gpu
        numbers = 3 * model.intermediate_size + OTHER_HIDDEN * model.hidden_size
        num_bytes = num_tokens * numbers * ITEMSIZE / self.tensor_parallel_size
        reached = gpu.bandwidth * gpu.bandwidth_efficiency
        return num_bytes / reached + OTHER_KERNELS * gpu.kernel_seconds

    def _smooth_max(self, num_bytes: float, flops: float) -> float:
        gpu = self.gpu
        memory = num_bytes / (gpu.bandwidth * gpu.bandwidth_efficiency)
        arithmetic = flops / (gpu.flop_rate * gpu.flop_efficiency)
        return (memory**gpu.knee + arithmetic**gpu.knee) ** (1 / gpu.knee)

    # ------------------------------------------------------------------------------ memory

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, all layers, on all GPUs together."""
        return self.block_size * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        itemsize = ITEMSIZE if self.kv_cache_dtype == "auto" else 1
        return bytes_per_block(self.model, 1, itemsize)

    def num_blocks(self, utilization: float) -> int:
        """Blocks of the cache that fit beside the weights.

        Args:
            utilization: share of the GPUs' memory that may be used.

        Raises:
            ValueError: not even one does.
        """
        usable = self.gpu.memory * self.tensor_parallel_size * utilization
        weights = num_weights(self.model) * ITEMSIZE
        most = int((usable - weights) // self._token_bytes)  # tokens
        if 0 < most < self.block_size:
            raise ValueError(
                f"block_size is {self.block_size}; it must be <= {most}, the tokens whose keys "
                "and values the GPU(s) hold beside the weights"
            )
        if usable < weights + self.block_bytes:
            raise ValueError(
                f"the model does not fit: its weights are {weights / 1e9:.1f} GB, and a block "
                f"of the cache {self.block_bytes / 1e9:.3f} GB; {self.tensor_parallel_size} "
                f"GPU(s) of {self.gpu.memory / 1e9:.0f} GB have {usable / 1e9:.1f} GB to use"
            )
        return int((usable - weights) // self.block_bytes)
