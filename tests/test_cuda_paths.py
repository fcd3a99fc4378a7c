"""What only a GPU runs, on a machine that has none.

Fake tensors (torch's FakeTensorMode) know their shape, format and device, and have no
numbers: an operation that mixes devices raises, and so does a look at a number, which on a
GPU would wait for all of its work. The device is one that torch lets Python make up, since a
torch without CUDA cannot so much as slice a fake CUDA tensor. The Triton kernels are replaced
by something that checks how they are called. That leaves the numbers, which test_kernels.py
and test_decode_graphs.py prove, and the recording itself, which test_gpu.py does on a GPU.
"""

import dataclasses
import inspect
import math
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bench
from nanobatch import LLM, EngineConfig, LLMEngine, SamplingParams
from nanobatch.batch import Row, pack
from nanobatch.bench.static_batching import run_static_batch
from nanobatch.extensions.async_scheduling import AsyncEngine
from nanobatch.extensions.cuda_graphs import DecodeGraphs
from nanobatch.extensions.ranks import Ranks
from nanobatch.extensions.rejection_sampling import DraftedRow, Proposal, draw_tokens
from nanobatch.extensions.tensor_parallel import Shard
from nanobatch.llm import build_engine, build_runner, load_model
from nanobatch.model_runner import ModelRunner
from nanobatch.models.config import bytes_per_block
from nanobatch.models.decoder import LMHead
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.models.rope import Rope
from nanobatch.models.variants import make_decoder
from nanobatch.sampler import Draws, Sampled, begin_sample
from nanobatch.utils import device as device_module
from nanobatch.utils.cache_size import GIB
from nanobatch.utils.device import GpuMemory, cache_bytes, resolve_device, resolve_dtype

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources  # noqa: E402

from nanobatch import paged_attention_kernel  # noqa: E402
from nanobatch.extensions import quantized_kernels  # noqa: E402
from nanobatch.kernels import grouped_matmul, triton_ops  # noqa: E402
from nanobatch.kernels.gather import Group  # noqa: E402
from nanobatch.kernels.triton_ops import TritonOps  # noqa: E402

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("gpu")
except ImportError:
    pytest.skip("this torch lets nobody make up a device", allow_module_level=True)

GPU = torch.device("gpu", 0)
KERNELS = {
    paged_attention_kernel: ["paged_attention_kernel", "reduce_splits_kernel"],
    grouped_matmul: ["grouped_matmul_kernel"],
    triton_ops: ["rms_norm_kernel", "rope_and_write_kernel", "silu_mul_kernel"],
    quantized_kernels: ["quantized_attention_kernel", "quantized_rope_and_write_kernel"],
}
H200 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232_448
)
OPTIONS = {"num_warps", "num_stages", "maxnreg"}


# Numbers that a kernel is not compiled for (do_not_specialize).
ANY_NUMBER = {"num_seqs", "table_stride"}


class Counts(dict):
    """How often each kernel was launched, by name; `forms`: all that the compiler sees."""

    def __init__(self):
        super().__init__()
        self.forms = set()


class Launches:
    """Stands for a kernel: checks each call against its arguments, and counts."""

    def __init__(self, kernel, counts):
        self.signature = inspect.signature(kernel.fn)
        self.name, self.counts = kernel.fn.__name__, counts

    def __getitem__(self, grid):
        assert 1 <= len(grid) <= 3 and all(type(n) is int and n >= 1 for n in grid), grid
        assert all(n < 2**16 for n in grid[1:]), f"{grid}: CUDA's limit in y and z"
        return self.launch

    def launch(self, *args, **kwargs):
        form = {k: v for k, v in kwargs.items() if k in OPTIONS}
        kwargs = {k: v for k, v in kwargs.items() if k not in OPTIONS}
        bound = self.signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            is_pointer = name.endswith("_ptr")
            assert isinstance(value, torch.Tensor) == is_pointer, f"{self.name}: {name}"
            assert not is_pointer or value.is_cuda, f"{self.name}: {name} is on the CPU"
            is_constant = self.signature.parameters[name].annotation is not inspect._empty
            if is_pointer:
                form[name] = value.dtype, value.storage_offset() * value.itemsize % 16 == 0
            elif is_constant:
                form[name] = value
            elif isinstance(value, int) and name not in ANY_NUMBER:
                form[name] = value == 1, value % 16 == 0
        self.counts.forms.add((self.name, *sorted(form.items())))
        self.counts[self.name] = self.counts.get(self.name, 0) + 1


@pytest.fixture
def launches(monkeypatch):
    """A torch that sees an H200, with kernels that are counted and not run."""
    counts = Counts()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Launches(getattr(module, name), counts))
    fake = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device: (9, 0),
        "get_device_properties": lambda device: H200,
        "synchronize": lambda device=None: None,
        "Event": lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 1 * GIB,
        "max_memory_allocated": lambda device: 2 * GIB,
        "memory_reserved": lambda device: 3 * GIB,
        "mem_get_info": lambda device: (137 * GIB, 141 * GIB),
    }
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    # Else a fake tensor of one known number would be computed with for real.
    monkeypatch.setattr("torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT", 0)
    is_cuda = property(lambda tensor: tensor.device.type in ("cuda", "gpu"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
    from_data(monkeypatch)
    return counts


def from_data(monkeypatch):
    """Let Python's numbers come to the made-up device as they come to a GPU: by a copy."""
    with torch.device("meta"):
        torch.empty(0)  # the first of these notes down what torch.tensor is, for good
    tensor, get, put = torch.tensor, torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def copied(data, dtype=None, device="cpu"):
        return tensor(data, dtype=dtype).to(device)

    def index(where):
        return torch.tensor(where, dtype=torch.int64) if isinstance(where, list) else where

    monkeypatch.setattr(torch, "tensor", copied)
    monkeypatch.setattr(
        torch.Tensor, "new_tensor", lambda self, data: copied(data, self.dtype, self.device)
    )
    monkeypatch.setattr(
        torch.Tensor, "__getitem__", lambda self, where: get(self, index(where))
    )
    monkeypatch.setattr(
        torch.Tensor, "__setitem__", lambda self, where, value: put(self, index(where), value)
    )


@pytest.fixture
def numbers_are_zero(monkeypatch):
    """Where the program looks at a fake tensor's numbers, it sees zeros."""

    def zeros(tensor):
        number = 0.0 if tensor.is_floating_point() else 0
        for size in reversed(tensor.shape):
            number = [number] * size
        return number

    monkeypatch.setattr(FakeTensor, "tolist", zeros)
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: 0.0)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: False)


@pytest.fixture
def no_capture(monkeypatch):
    """A captured step is run again when it is replayed."""
    monkeypatch.setattr(
        "nanobatch.extensions.cuda_graphs.CudaCapture", lambda: lambda step: step
    )


def check_no_row_is_sorted(function, args):
    """Nor by topk, which sorts whole rows of at least 100,000 if there are at most 10."""
    name = function.overloadpacket.__name__
    if name in ("topk", "sort"):
        *rows, row_size = args[0].shape
        is_sorted = name == "sort" or (math.prod(rows) <= 10 and row_size >= 100_000)
        assert not is_sorted or row_size < 1000, f"{name} sorts rows of {row_size}"


class OnlyOnGpu(TorchDispatchMode):
    """No operation may touch a tensor on the CPU: a captured step copies nothing over."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            is_elsewhere = isinstance(leaf, torch.Tensor) and not leaf.is_cuda
            assert not is_elsewhere, f"{function} touches a tensor on {leaf.device}"
        check_no_row_is_sorted(function, args)
        return out


class NoWaiting(TorchDispatchMode):
    """No operation may wait for the GPU: none mixes devices, but for copies that need not wait.

    Fake tensors raise by themselves when a number is looked at.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if len({tensor.is_cuda for tensor in tensors}) > 1:
            flags = [a for a in (*args, *(kwargs or {}).values()) if a is True]
            is_copy = "copy" in str(function) or str(function).startswith("aten.to.")
            assert is_copy and flags, f"{function} waits for the GPU"
        check_no_row_is_sorted(function, args)
        return out


class Work(TorchDispatchMode):
    """Notes down what a GPU is given to do besides Triton's kernels: all but views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.name():
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def fake_decoder(name="tiny", dtype=torch.bfloat16, ranks=None):
    """A decoder (or a rank's shard) on a GPU that is not there, for a FakeTensorMode.

    name: of a preset, with two layers, since the others are alike; or a config.
    """
    config = name
    if isinstance(name, str):
        config = dataclasses.replace(MODEL_PRESETS[name], num_layers=2)
    shard = None if ranks is None else Shard(ranks)
    with torch.device("meta"):
        model = make_decoder(config if shard is None else shard.config(config))
    weights = {
        name: torch.empty(weight.shape, dtype=dtype, device=GPU)
        for name, weight in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    for module in model.modules():
        if isinstance(module, Rope):
            module.inv_freq_R = torch.empty(module.inv_freq_R.shape, device=GPU)
    if shard is not None:
        shard.connect(model, config)
    return model.eval().requires_grad_(False)


def only_on_gpu(runner):
    """Let a runner's forward touch no tensor on the CPU."""
    forward = runner.forward

    def watched(batch):
        with OnlyOnGpu():
            return forward(batch)

    runner.forward = watched


# ---- which device, which format --------------------------------------------------------


def test_auto_takes_the_gpu_and_what_it_multiplies_in_hardware(launches, monkeypatch):
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cpu") == torch.device("cpu")
    gpu = torch.device("cuda", 0)
    assert resolve_dtype("auto", gpu) == torch.bfloat16
    assert resolve_dtype("float32", gpu) == torch.float32
    for capability, dtype in {(8, 0): torch.bfloat16, (7, 5): torch.float16}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        assert resolve_dtype("auto", gpu) == dtype


def test_a_gpu_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device is 'cuda'.*no CUDA device.*'cpu' or 'auto'"):
        LLM("tiny", device="cuda")


@pytest.fixture
def t4(launches, monkeypatch):
    """A torch that sees a T4. Returns what was asked of the loader: (model, dtype)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    loaded = []

    def load(name, dtype, *args):
        loaded.append((name, dtype))
        raise LookupError("far enough")

    monkeypatch.setattr("nanobatch.llm.load", load)
    return loaded


NO_BFLOAT16 = r"dtype is 'bfloat16'.*capability >= 8\.0, and this one's is 7\.5: use 'float16'"
NO_FP8 = r"kv_cache_dtype is 'fp8'.*capability >= 8\.9, and this one's is 7\.5: use 'int8'"


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"dtype": "bfloat16"}, NO_BFLOAT16),
        ({"dtype": "bfloat16", "attention_backend": "torch"}, NO_BFLOAT16),
        ({"dtype": "bfloat16", "speculative": "draft", "draft_model": "tiny"}, NO_BFLOAT16),
        ({"kv_cache_dtype": "fp8"}, NO_FP8),
        ({"kv_cache_dtype": "fp8", "dtype": "float32"}, NO_FP8),
    ],
)
def test_what_a_t4_cannot_multiply_is_refused_before_weights_are_loaded(t4, knobs, message):
    with pytest.raises(ValueError, match=message):
        LLM("tiny", **knobs)
    if "speculative" not in knobs:
        config = EngineConfig(**knobs, tensor_parallel_size=2)
        with pytest.raises(ValueError, match=message):
            load_model("tiny", config, Ranks(1, 2))
    assert t4 == []


@pytest.mark.parametrize("flags", [[], ["kernels"], ["speculative"]])
def test_the_bench_refuses_it_too(t4, flags):
    with pytest.raises(ValueError, match=NO_BFLOAT16):
        bench.main([*flags, "--dtype", "bfloat16"])
    assert t4 == []


def test_a_t4_takes_the_other_formats_whatever_a_checkpoint_is_in(t4):
    for name, dtype in {"auto": torch.float16, "float32": torch.float32}.items():
        with pytest.raises(LookupError):
            LLM("tiny", dtype=name, kv_cache_dtype="int8")
        assert t4.pop() == ("tiny", dtype)
    assert resolve_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


def test_weights_that_a_t4_cannot_multiply_are_refused_by_the_runner(t4):
    with FakeTensorMode(), pytest.raises(ValueError, match=NO_BFLOAT16):
        ModelRunner(fake_decoder(dtype=torch.bfloat16), EngineConfig(num_blocks=9))


# ---- memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reserved, utilization, left",
    [
        # 90 of 100 may be used; 5 are others', 30 weights, 10 the largest steps'
        (0, 0.9, 45),
        # captured graphs have tensors and buffers of their own
        (7, 0.9, 38),
        (45, 0.9, 0),
        (0, 0.4, -5),
    ],
)
def test_what_is_left_for_the_cache(reserved, utilization, left):
    memory = GpuMemory(total=100, others=5, before=30, peak=40)
    assert memory.taken == 10
    assert cache_bytes(memory, utilization, reserved) == left


def test_measuring_a_step(launches):
    steps = []
    memory = device_module.measure_step(lambda: steps.append(1), torch.device("cuda", 0))
    # of 141 GiB 137 are free, and 3 more are ours though nothing is in them
    assert steps == [1] and memory == GpuMemory(141 * GIB, 1 * GIB, 1 * GIB, 2 * GIB)


class Memory(TorchDispatchMode):
    """The memory of the made-up GPU: the bytes of all tensors on it that are alive."""

    def __init__(self, total, others):
        super().__init__()
        self.total, self.others, self.now, self.peak = total, others, 0, 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                self.count(leaf.untyped_storage())
        return out

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, key, size)

    def free(self, key, size):
        self.known.remove(key)
        self.now -= size

    def reset_peak(self, device):
        self.peak = self.now

    def install(self, monkeypatch):
        for name, function in {
            "memory_allocated": lambda device: self.now,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: self.now,
            "reset_peak_memory_stats": self.reset_peak,
            "mem_get_info": lambda d: (self.total - self.others - self.now, self.total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)


# A 24 GB card with Llama-3.1-8B in bfloat16, worked out by hand, in bytes.
E, F, V, NUM_LAYERS = 4096, 14_336, 128_256, 32
LAYER = 2 * (2 * E + (4096 + 2 * 1024) * E + 4096 * E + 3 * E * F)
WEIGHTS = 2 * 2 * V * E + NUM_LAYERS * LAYER + 2 * E  # 15.0 GiB
T, S = 2048, 256  # max_num_batched_tokens and max_num_seqs, by default
# In a layer's MLP: gate and up, their product, what goes into the MLP and into the layer in
# bfloat16, and two residuals in float32.
LAYERS_STEP = T * (2 * (2 * F + F + E + E) + 4 * (E + E))
LOGITS_STEP = S * V * (2 + 4)  # bfloat16, then float32
GRAPHS = S * V * 4 + S * 512 * 4 + LOGITS_STEP + 35 * 8 * 2**20 + 32 * 2**20


@pytest.fixture
def card_of_24_gb(launches, numbers_are_zero, no_capture, monkeypatch):
    """Makes a runner of that model and card; returns the bytes of its pool.

    The model has 2 of its 32 layers; `rest` stands for the weights of the others.
    """

    def pool(**knobs):
        with FakeTensorMode(), Memory(24 * GIB, others=GIB // 2) as memory:
            memory.install(monkeypatch)
            model = fake_decoder("llama-3.1-8b")
            rest = torch.empty(WEIGHTS - memory.now, dtype=torch.uint8, device=GPU)
            runner = build_runner(model, EngineConfig(max_model_len=8192, **knobs))
            assert rest.is_cuda and memory.now > WEIGHTS
        blocks = sum(part.nbytes for cache in runner.caches for part in cache.parts)
        assert blocks == runner.config.num_blocks * bytes_per_block(model.config, 16, 2)
        return blocks

    return pool


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_pool_of_an_8b_model_on_a_24_gb_card(card_of_24_gb, cuda_graphs, monkeypatch):
    """Part by part, with a sampler that takes nothing, and logits that are one product."""
    monkeypatch.setattr(
        LMHead, "forward", lambda self, x: torch.nn.functional.linear(x, self.weight).float()
    )
    monkeypatch.setattr("nanobatch.model_runner.begin_sample", begin_zeros)
    assert LOGITS_STEP < LAYERS_STEP
    wanted = 0.9 * 24 * GIB - GIB // 2 - WEIGHTS - LAYERS_STEP - cuda_graphs * GRAPHS
    small_tensors = 8 * 2**20  # angles, block tables, numbers of tokens
    assert 0 <= wanted - card_of_24_gb(cuda_graphs=cuda_graphs) < small_tensors


def test_most_of_what_an_8b_model_leaves_is_cache(card_of_24_gb):
    """With everything that is run: 6.1 GiB are left beside the weights."""
    assert card_of_24_gb() > 4.8 * GIB


def test_ranks_take_a_pool_that_fits_all_of_them(launches, numbers_are_zero, monkeypatch):
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(f"nanobatch.extensions.ranks.dist.{name}", lambda *tensors: None)
    monkeypatch.setattr("nanobatch.extensions.ranks.dist.is_initialized", lambda: True)
    monkeypatch.setattr(Ranks, "all_of", lambda ranks, number: [number, 40])
    config = EngineConfig(cuda_graphs=False, tensor_parallel_size=2, max_num_seqs=3)
    with FakeTensorMode():
        ranks = Ranks(0, 2)
        runner = build_runner(fake_decoder(ranks=ranks), config, ranks=ranks)
    assert runner.config.num_blocks == 40 == runner.caches[0].keys.shape[0]


def test_memory_that_does_not_suffice_is_a_value_error(launches, numbers_are_zero, monkeypatch):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with FakeTensorMode():
        model = fake_decoder()
        with pytest.raises(ValueError, match="gpu_memory_utilization is 0.01.*max_num_seqs"):
            ModelRunner(model, EngineConfig(max_num_seqs=8, gpu_memory_utilization=0.01))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", run_out)
            with pytest.raises(ValueError, match="num_blocks is 9; .* GiB .* lower it"):
                ModelRunner(model, EngineConfig(num_blocks=9))
        monkeypatch.setattr(model, "logits", run_out)
        with pytest.raises(ValueError, match="max_num_batched_tokens is 2048 .*lower them"):
            ModelRunner(model, EngineConfig(max_num_seqs=8))


# ---- steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_a_captured_step_neither_waits_nor_copies(name, launches, numbers_are_zero):
    """Either would end the capture with an error, on a GPU alone."""
    with FakeTensorMode():
        model = fake_decoder(name)
        config = model.config
        knobs = {"num_blocks": 40, "max_num_seqs": 3, "max_model_len": 4096}
        runner = ModelRunner(model, EngineConfig(**knobs, cuda_graphs=False))
        only_on_gpu(runner)
        steps = []
        graphs = DecodeGraphs(runner, capture=lambda step: steps.append(step) or step)
        assert graphs.sizes == [1, 2, 3]
        for step in steps:
            launches.clear()
            with torch.inference_mode():
                step()
            assert launches["rope_and_write_kernel"] == config.num_layers
            assert launches["paged_attention_kernel"] == config.num_layers
            assert launches["silu_mul_kernel"] == config.num_layers
            norms_of_a_layer = 4 if config.qk_norm else 2
            assert launches["rms_norm_kernel"] == norms_of_a_layer * config.num_layers + 1
        batch = pack([Row([5], 20, [3, 1]), Row([6], 0, [2])], 16)
        assert graphs.replay(batch).shape == (2, config.vocab_size)


FAMILIES = {
    "gemma2": {"activation": "gelu_tanh", "post_norm": True, "embedding_multiplier": 7.3,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
               "sliding_window": 6, "full_attention_layers": (1,)},
    "gemma3": {"activation": "gelu_tanh", "post_norm": True, "embedding_multiplier": 7.3,
               "qk_norm": "each_head", "local_rope_theta": 1e4, "sliding_window": 6},
    "olmo2": {"pre_norm": False, "post_norm": True, "qk_norm": "all_heads"},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "starcoder2": {"norm": "layer", "activation": "gelu_tanh", "gated_mlp": False},
    "yarn": {"rope_attention_factor": 1.2},
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}  # fmt: skip


def family(name):
    return dataclasses.replace(MODEL_PRESETS["tiny"], num_layers=2, **FAMILIES[name])


MIXED = [Row([5], 20, [3, 1]), Row([6], 0, [2]), Row([1, 2, 3], 2, [4])]


@pytest.fixture
def cold(monkeypatch):
    """No step is run before the test's own."""
    monkeypatch.setattr(ModelRunner, "warm_up", lambda runner: None)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_s_step_stays_on_the_gpu(name, launches, cold):
    with FakeTensorMode():
        runner = ModelRunner(fake_decoder(family(name)), EngineConfig(num_blocks=9))
        assert runner.backend.name == "triton"
        batch = pack(MIXED, 16, GPU)
        with NoWaiting():  # the work list is copied to the GPU, once for all layers of a kind
            logits_SV = runner.forward(batch)
    assert logits_SV.is_cuda and logits_SV.shape == (3, 258)
    assert launches["paged_attention_kernel"] == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_with_torch_on_a_gpu(
    name, launches, cold, numbers_are_zero, monkeypatch
):
    """Which tokens attend together is worked out from numbers: here a prompt, and a decode."""

    def groups(batch, num_kv_heads, block_size, window, *wanted):
        runs = torch.empty(num_kv_heads, dtype=torch.int64, device=GPU)
        tail, shape = runs[:0], (1, num_kv_heads, 1)
        mask = None if window is None else torch.empty(1, 1, 3, 3, dtype=bool, device=GPU)
        yield Group(slice(0, 3), shape, runs, 3, mask, tail)
        mask = torch.empty(1, 1, 1, 9, dtype=bool, device=GPU)
        yield Group(slice(3, 4), shape, runs, 9, mask, tail)

    monkeypatch.setattr("nanobatch.attention.make_groups", groups)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: True)  # no slot is -1
    with FakeTensorMode():
        config = EngineConfig(num_blocks=9, attention_backend="torch")
        runner = ModelRunner(fake_decoder(family(name)), config)
        batch = pack([Row([1, 2, 3], 0, [4]), Row([5], 8, [3])], 16, GPU)
        with OnlyOnGpu():
            logits_SV = runner.forward(batch)
    assert logits_SV.shape == (2, 258) and launches == {}


@pytest.mark.parametrize("name, num_norms", [("llama-3.1-8b", 2), ("qwen3-0.6b", 4)])
def test_what_a_layer_of_an_eager_step_launches(name, num_norms, launches, cold):
    """Four products, the norms, RoPE, SiLU, and attention: not one copy."""
    seen = {}
    for num_layers in (1, 3):
        config = dataclasses.replace(MODEL_PRESETS[name], num_layers=num_layers)
        launches.clear()
        with FakeTensorMode():
            knobs = {"num_blocks": 40, "cuda_graphs": False}
            runner = ModelRunner(fake_decoder(config), EngineConfig(**knobs))
            batch = pack([Row([7] * 200, 0, list(range(13))), Row([6], 0, [30])], 16, GPU)
            with torch.inference_mode(), Work() as work:
                runner.forward(batch)
        seen[num_layers] = Counter(work.names) + Counter(launches)
    a_layer = {kind: n // 2 for kind, n in (seen[3] - seen[1]).items()}
    for kind in ("paged_attention_kernel", "reduce_splits_kernel", "new_zeros"):
        a_layer.pop(kind, None)  # attention's own
    norms = {"rms_norm_kernel": num_norms}
    assert a_layer == norms | {"linear": 4, "rope_and_write_kernel": 1, "silu_mul_kernel": 1}


def test_a_rank_s_captured_step_exchanges_and_neither_waits_nor_copies(
    launches, numbers_are_zero, monkeypatch
):
    config, exchanges = dataclasses.replace(MODEL_PRESETS["llama-3.1-8b"], num_layers=2), []
    monkeypatch.setattr(Ranks, "all_of", lambda ranks, number: [number])
    for name in ("all_reduce", "all_gather"):
        stand_in = lambda *tensors, name=name: exchanges.append(name)  # noqa: E731
        monkeypatch.setattr(f"nanobatch.extensions.ranks.dist.{name}", stand_in)
    monkeypatch.setattr("nanobatch.extensions.ranks.dist.is_initialized", lambda: True)
    with FakeTensorMode():
        ranks, knobs = Ranks(1, 4), {"num_blocks": 40, "max_num_seqs": 2}
        model = fake_decoder("llama-3.1-8b", ranks=ranks)
        engine_config = EngineConfig(**knobs, cuda_graphs=False, tensor_parallel_size=4)
        runner = build_runner(model, engine_config, ranks=ranks).runner
        assert runner.caches[0].keys.shape[1] == config.num_kv_heads // 4

        only_on_gpu(runner)

        def capture(step):
            exchanges.clear()
            with torch.inference_mode():
                step()
            in_layers = ["all_reduce"] * (2 * config.num_layers)
            assert exchanges == ["all_reduce", *in_layers, "all_gather"]
            return step

        DecodeGraphs(runner, capture)


def test_the_engine_on_a_gpu_mixes_no_devices(launches, numbers_are_zero, no_capture):
    """Prefill, chunks, decodes, every kind of sampling: an engine to its end."""
    config = EngineConfig(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=8)
    kinds = [
        SamplingParams(temperature=0, max_tokens=5),
        SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.1, max_tokens=4),
        SamplingParams(repetition_penalty=1.2, presence_penalty=1, frequency_penalty=1,
                       min_tokens=2, stop_token_ids=(7,), max_tokens=6),
        SamplingParams(temperature=0, logprobs=3, max_tokens=3),
    ]  # fmt: skip
    with FakeTensorMode():
        runner = build_runner(fake_decoder(), config)
        assert runner.backend.name == "triton" and runner.compute.sizes == [1, 2, 4, 8]
        engine = LLMEngine(runner.config, runner)
        for i, params in enumerate(kinds):
            engine.add_request([1] * (9 + i), params)
        last = {}
        while engine.has_unfinished():
            last |= {out.request_id: out for out in engine.step()}
    assert [len(last[str(i)].token_ids) for i in range(4)] == [5, 4, 6, 3]
    assert all(out.finish_reason == "length" for out in last.values())


NUMBERS_WANTED = AssertionError, DataDependentOutputException, DynamicOutputShapeException
SAMPLING_KINDS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "cut": SamplingParams(top_k=5, top_p=0.9, min_p=0.1, temperature=0.7),
    "nucleus": SamplingParams(top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=1, min_tokens=9),
    "logprobs": SamplingParams(logprobs=3, temperature=0),
    "more logprobs": SamplingParams(logprobs=7),
}


def sampling_rows(*names):
    return [DraftedRow(SAMPLING_KINDS[name], [1, 2], [3], (7,), seed=0) for name in names]


@pytest.mark.parametrize("names", [*([name] for name in SAMPLING_KINDS), SAMPLING_KINDS])
def test_to_begin_to_sample_waits_for_nothing(names, launches, numbers_are_zero, monkeypatch):
    events = []
    event = SimpleNamespace(
        record=lambda: events.append("record"), synchronize=lambda: events.append("wait")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    seen = FakeTensor.tolist
    monkeypatch.setattr(FakeTensor, "tolist", lambda x: events.append("read") or seen(x))
    rows = sampling_rows(*names)
    with FakeTensorMode():
        logits_SV = torch.empty(len(rows), 128_256, device=GPU)
        with NoWaiting():
            draws = begin_sample(logits_SV, rows, TritonOps())
        assert draws.tokens_S.is_cuda and draws.tokens_S.shape == (len(rows),)
        assert draws.tokens_S.dtype == torch.int64 and events == ["record"]
        sampled = draws.read()
    assert events == ["record", "wait", "read"]
    assert [s.token_id for s in sampled] == [0] * len(rows)
    assert all(s.error is None for s in sampled)


def test_drafts_are_accepted_without_waiting_too(launches):
    with FakeTensorMode():
        logits_SV = torch.empty(3, 1000, device=GPU)
        probs_V = torch.empty(1000, dtype=torch.float64, device=GPU)
        greedy, plain, cut = sampling_rows("greedy", "plain", "cut")
        plain = dataclasses.replace(plain, proposal=Proposal(4, probs_V))
        with NoWaiting():
            draws = begin_sample(logits_SV, [greedy, plain, cut], TritonOps(), draw_tokens)
        assert draws.tokens_S.is_cuda and draws.tokens_S.shape == (3,)


def test_waiting_is_noticed(launches):
    """Each of these would wait for a GPU."""
    waiting = [
        lambda x: torch.tensor([1.0, 2.0]).to(GPU),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
    ]
    with FakeTensorMode():
        x = torch.empty(4, device=GPU)
        for look in waiting:
            with NoWaiting(), pytest.raises(NUMBERS_WANTED):
                look(x)


# Two kinds of layers: with a window and without.
WINDOWS = dataclasses.replace(
    MODEL_PRESETS["tiny"], num_layers=2, sliding_window=32, full_attention_layers={1}
)
SERVED = [
    {"speculative": "ngram", "num_speculative_tokens": 4},
    {"cuda_graphs": False, "max_num_batched_tokens": 200, "kv_cache_dtype": "int8"},
    {"speculative": "draft", "draft_model": "tiny", "num_speculative_tokens": 3},
    {"batching": "static", "enable_chunked_prefill": False, "max_num_batched_tokens": 256},
]
SERVED = [pytest.param(x, marks=[pytest.mark.slow] * (i > 0)) for i, x in enumerate(SERVED)]


@pytest.mark.parametrize("knobs", SERVED)
def test_serving_launches_nothing_that_was_not_launched_before(
    launches, numbers_are_zero, no_capture, knobs, monkeypatch
):
    """Nothing is compiled in a step: mixed batches, chunks, splits, drafts, padded graphs."""
    few_sms = SimpleNamespace(**vars(H200) | {"multi_processor_count": 8})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few_sms)
    monkeypatch.setattr("nanobatch.model_runner.begin_sample", begin_zeros)
    monkeypatch.setattr("nanobatch.extensions.speculative_runner.sample", sample_zeros)
    monkeypatch.setattr("nanobatch.extensions.rejection_sampling.sample", sample_zeros)
    monkeypatch.setitem(MODEL_PRESETS, "windows", WINDOWS)
    limits = {"num_blocks": 60, "max_num_seqs": 6, "max_model_len": 150}
    config = EngineConfig(**{**limits, "max_num_batched_tokens": 40, **knobs})
    with FakeTensorMode():
        draft = fake_decoder("windows") if config.speculative == "draft" else None
        runner = build_runner(fake_decoder("windows"), config, draft)
        before = set(launches.forms)
        launches.forms.clear()
        engine = LLMEngine(runner.config, runner)
        for num_prompt_tokens in (3, 70, 1, 1, 9, 120):
            params = SamplingParams(temperature=0, max_tokens=5)
            engine.add_request([0] * num_prompt_tokens, params)
            engine.step()
        while engine.has_unfinished():
            engine.step()
    attention = [form for form in launches.forms if "attention" in form[0]]
    assert len(attention) >= 4 and len(launches.forms) > len(attention)
    assert launches.forms <= before


def sample_zeros(logits_SV, rows, ops=None, draw=None):
    return [Sampled(0)] * len(rows)


def begin_zeros(logits_SV, rows, ops):
    return Draws(None, lambda: sample_zeros(logits_SV, rows))


@pytest.mark.parametrize("kernel", ["paged_attention_kernel", "rms_norm_kernel"])
@pytest.mark.parametrize("num_blocks", [None, 9])
def test_a_kernel_that_does_not_fit_is_refused_at_the_start(
    launches, numbers_are_zero, kernel, num_blocks, monkeypatch
):
    """Also one that only some steps launch, as those of more than 64 rows a program."""
    real = Launches.launch

    def launch(self, *args, **kwargs):
        if self.name == kernel and kwargs.get("BLOCK_M", 128) > 64:
            raise OutOfResources(98_304, 65_536, "shared memory")
        real(self, *args, **kwargs)

    monkeypatch.setattr(Launches, "launch", launch)
    message = (
        "attention_backend is 'triton'.*dtype 'bfloat16', kv_cache_dtype 'auto', block_size 16 "
        "and heads of 32: use 'torch'.*shared memory.*98304"
    )
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        ModelRunner(fake_decoder(), EngineConfig(max_num_seqs=8, num_blocks=num_blocks))


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_step_is_launched_without_waiting_for_the_one_before(
    cuda_graphs, launches, numbers_are_zero, no_capture, monkeypatch
):
    """Prefill, chunks, decodes, and every kind of sampling that needs no tokens on the host."""
    events = []

    def event():
        name = sum("record" in event for event in events)
        return SimpleNamespace(
            record=lambda: events.append(f"record {name}"),
            synchronize=lambda: events.append(f"wait {name}"),
        )

    config = EngineConfig(
        num_blocks=40, max_num_seqs=4, max_num_batched_tokens=4, cuda_graphs=cuda_graphs
    )
    names = ["greedy", "plain", "cut", "logprobs"]
    with FakeTensorMode():
        runner = build_runner(fake_decoder(), config)
        engine = build_engine(runner)
        monkeypatch.setattr(torch.cuda, "Event", event)
        launch = runner.launch

        def watched(plan, previous):
            events.append("launch")
            with NoWaiting():
                return launch(plan, previous)

        monkeypatch.setattr(runner, "launch", watched)
        for i, name in enumerate(names):
            params = dataclasses.replace(SAMPLING_KINDS[name], max_tokens=14 + i)
            engine.add_request([1] * (5 + i), params)
        last = {}
        while engine.has_unfinished():
            last |= {out.request_id: out for out in engine.step()}
    assert [len(last[str(i)].token_ids) for i in range(4)] == [14, 15, 16, 17]
    num_steps = events.count("launch")
    assert num_steps > 7 and events[:2] == ["launch", "record 0"]
    in_turn = [("launch", f"record {i}", f"wait {i - 1}") for i in range(1, num_steps)]
    assert events[2:-1] == [event for step in in_turn for event in step]
    assert events[-1] == f"wait {num_steps - 1}"


@pytest.mark.parametrize(
    "knobs, is_ahead",
    [
        ({}, True),
        ({"preemption": "swap"}, True),
        ({"async_scheduling": False}, False),
        ({"speculative": "ngram"}, False),
    ],
)
def test_where_a_step_is_launched_ahead(knobs, is_ahead, launches, numbers_are_zero):
    config = EngineConfig(num_blocks=40, max_num_seqs=2, cuda_graphs=False, **knobs)
    with FakeTensorMode():
        engine = build_engine(build_runner(fake_decoder(), config))
    assert isinstance(engine, AsyncEngine) == is_ahead


def test_static_batches_on_a_gpu_mix_no_devices(launches, numbers_are_zero):
    with FakeTensorMode():
        steps = list(run_static_batch(fake_decoder(), [[1, 2, 3], [4]], [3, 2]))
    assert steps == [{0: 0, 1: 0}, {0: 0, 1: 0}, {0: 0}]
