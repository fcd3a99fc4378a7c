"""The least work of a step, by hand and by brute force; the kernels' table that rests on it."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import bench
from nanobatch import ModelConfig
from nanobatch.bench import attention_systems as systems
from nanobatch.bench import kernels as kernel_bench
from nanobatch.bench.hardware import (
    GpuUtilization,
    Hardware,
    measure_hardware,
    num_copies,
    seconds_of,
)
from nanobatch.bench.kernels import KernelBench, print_lines
from nanobatch.kernels.ops import Ops
from nanobatch.models.variants import make_decoder
from nanobatch.simulation.roofline import Work, step_work, weights_of_layers
from nanobatch.utils.arithmetic import keys_seen

SMALL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=10, hidden_size=8, intermediate_size=16,
    num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
)  # fmt: skip
CPU = torch.device("cpu")


def test_weights_are_those_of_the_decoder():
    decoder = make_decoder(SMALL)
    products = [
        module.weight.numel()
        for name, module in decoder.layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    # qkv 8 x 16, o 8 x 8, gate and up 8 x 32, down 16 x 8, in two layers
    assert weights_of_layers(SMALL) == sum(products) == 2 * (128 + 64 + 256 + 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"gated_mlp": False, "activation": "gelu_tanh"},
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        {"num_experts": 6, "moe_intermediate_size": 12, "dense_layers": frozenset({1})},
    ],
)
def test_weights_of_other_mlps(changes):
    """Of a mixture, those of the experts that one token goes through."""
    config = replace(SMALL, **changes)
    num_met = 0
    for name, weight in make_decoder(config).layers.named_parameters():
        is_expert = name.endswith(("gate_up_XFE", "down_XEF"))
        share = config.num_experts_per_tok / config.num_experts if is_expert else 1
        num_met += share * weight.numel() * (weight.dim() > 1)
    assert weights_of_layers(config) == round(num_met)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_keys_seen_by_brute_force(window):
    for start in range(6):
        for num_tokens in range(1, 7):
            seen = [
                range(max(0, q - (window or q + 1) + 1), q + 1)
                for q in range(start, start + num_tokens)
            ]
            keys = {key for keys in seen for key in keys}
            scores = sum(len(keys) for keys in seen)
            assert keys_seen(start, num_tokens, window) == (len(keys), scores)


def test_a_step_by_hand():
    # One decodes its 6th token, one computes a prompt of 3 and does not sample: 4 tokens,
    # 6 + 3 keys, 6 + (1 + 2 + 3) scores a layer.
    work = step_work(SMALL, [(5, 1), (0, 3)], num_logits=1, itemsize=2)
    weights, lm_head, kv_of_a_token = 1152, 80, 2 * 1 * 4
    assert work.bytes == 2 * (weights + lm_head + 2 * (9 + 4) * kv_of_a_token)
    assert work.flops == 2 * (4 * weights + lm_head + 2 * 12 * 2 * 2 * 4)
    in_8_bits = step_work(SMALL, [(5, 1), (0, 3)], num_logits=1, itemsize=2, kv_itemsize=1)
    # of 4 numbers 8 bytes; in 8 bits 4, and 2 of their scale
    assert in_8_bits.bytes == work.bytes - 2 * (9 + 4) * 2 * (8 - 6)
    without = step_work(SMALL, [(5, 1), (0, 3)], num_logits=0, itemsize=2)
    assert work.bytes - without.bytes == work.flops - without.flops == 2 * lm_head


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads is 3; it must be a multiple"),
        ({"head_dim": 5}, "head_dim is 5; RoPE needs an even number"),
        ({"rope_divisors": (1.0,)}, "rope_divisors has 1 entries; .* 2"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_layers": 5000}, "num_layers is 5000"),
    ],
)
def test_shapes_that_no_model_has_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **wrong)


def test_the_roof_is_the_lower_of_two():
    assert Work(bytes=100, flops=100).seconds(bandwidth=10, flop_rate=1000) == 10
    assert Work(bytes=100, flops=100).seconds(bandwidth=1000, flop_rate=10) == 10


# ---- measuring -------------------------------------------------------------------------


def test_seconds_of_is_a_call_s():
    import time

    seconds = seconds_of([lambda: time.sleep(0.004), lambda: time.sleep(0.006)], CPU)
    assert 0.005 <= seconds < 0.02


def test_a_machine_is_measured():
    machine = measure_hardware(CPU, torch.float32)
    assert 1e8 < machine.bandwidth < 1e13 and 1e8 < machine.flop_rate < 1e15


def test_small_inputs_are_copied_until_no_cache_holds_them():
    assert num_copies(2**40) == 1
    assert num_copies(2**26) == 4
    assert num_copies(1) == num_copies(0) == 64


def test_utilization_is_what_nvml_says_or_nothing(monkeypatch):
    with GpuUtilization(CPU) as gpu:
        pass
    assert gpu.mean is None
    said = iter([20, 40, 60])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(said), raising=False)
    watch = GpuUtilization(torch.device("cuda", 0))
    with watch as gpu:
        watch._thread.join()  # it stops when NVML fails, here after three answers
    assert gpu.mean == 0.4
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 70)
    with GpuUtilization(torch.device("cuda", 0)) as gpu:
        pass
    assert gpu.mean == 0.7, "one look at least"


# ---- the kernels' table ----------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """The table at sizes that take no time."""
    small = {
        "SHAPES": {"llama-3-8b": (4, 2, 16), "smollm2": (3, 1, 8)},
        "DECODES": {"cpu": [(2, 20)]},
        "PREFILLS": {"cpu": [(2, 33)]},
        "NUM_TOKENS": {"cpu": 8},
        "HIDDEN": 16, "INTERMEDIATE": 32, "VOCAB": 40, "NUM_SAMPLING": 2,
        "num_copies": lambda num_bytes: 2,
        "seconds_of": lambda calls, device: [call() for call in calls] and 1e-3,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(kernel_bench, name, value)
    return KernelBench(CPU, torch.float32, Hardware(bandwidth=1e7, flop_rate=1e9))


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_systems_agree_and_amounts_are_right(small):
    decode = small.attention_line("decode", "llama-3-8b", (2, 20), flex_attention)
    # keys and values of 2 sequences, 20 positions, 2 heads of 16, 4 bytes each
    assert decode.amount == 2 * 2 * 20 * 2 * 16 * 4
    assert list(decode.seconds) == ["nanobatch", "SDPA", "FlexAttention"]
    assert decode.rate("SDPA") == pytest.approx(decode.amount / 1e-3 / 1e9)
    assert decode.share == pytest.approx(decode.amount / 1e-3 / 1e7)
    prefill = small.attention_line("prefill", "smollm2", (2, 33), flex_attention)
    # query x key and weight x value: 2 x 2 operations for each score, of 3 heads of 8
    assert prefill.amount == 4 * 2 * 3 * 8 * (33 * 34 // 2)
    assert prefill.share == pytest.approx(prefill.amount / 1e-3 / 1e9)
    assert prefill.rate("nanobatch") == pytest.approx(prefill.amount / 1e-3 / 1e12)


@torch.inference_mode()
def test_what_disagrees_is_not_timed(small, monkeypatch):
    def wrong(q_THD, *args, **kwargs):
        return torch.zeros_like(q_THD)

    monkeypatch.setattr(systems, "paged_attention", wrong)
    with pytest.raises(AssertionError, match="not close"):
        small.attention_line("decode", "smollm2", (2, 20))


@torch.inference_mode()
def test_a_peer_that_cannot_has_no_figure(small, capsys):
    def cannot(*args, **kwargs):
        raise RuntimeError("no such group size\nand more")

    line = small.attention_line("decode", "smollm2", (2, 20), cannot)
    assert list(line.seconds) == ["nanobatch", "SDPA"]
    assert "FlexAttention, smollm2: no such group size\n" in capsys.readouterr().out
    print_lines([line])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_bench_kernels_prints_and_saves_the_table(small, tmp_path, capsys):
    file = tmp_path / "k.json"
    report = bench.main(
        ["kernels", "--device", "cpu", "--dtype", "float32", "--save-json", str(file)]
    )
    lines = json.loads(file.read_text())["kernels"]
    assert [line["kernel"] for line in lines] == ["decode"] * 2 + ["prefill"] * 2 + [
        "RMSNorm", "RoPE + write", "SiLU x gate", "argmax", "top 32",
    ]  # fmt: skip
    assert report["machine"]["bandwidth"] > 0
    printed = capsys.readouterr().out
    assert "measured now: copy" in printed and "RoPE + write" in printed
    # RMSNorm: x and the normed rows in float32 here, the residual in and out
    assert lines[4]["amount"] == 8 * 16 * 4 * 4
    # RoPE: 4 + 2 heads in and out, 2 value heads in and out, cos and sin
    assert lines[5]["amount"] == 8 * 16 * (2 * (4 + 2 * 2) * 4 + 4)
    assert lines[6]["amount"] == 8 * 3 * 32 * 4


def test_one_failing_case_is_a_row_and_the_others_go_on(small, tmp_path, monkeypatch, capsys):
    """One shape does not fit into shared memory, one gives other numbers, one kernel does not
    compile, one needs more memory than there is (which is no fault)."""
    ours = systems.paged_attention

    def fails(q_THD, *args, **kwargs):
        T, _, D = q_THD.shape
        if D == 8:
            raise RuntimeError("out of resource: shared memory\nand more")
        if T > 2:
            raise torch.OutOfMemoryError("no room")
        return ours(q_THD, *args, **kwargs) * 1.5

    class CannotCompile(Ops):
        def silu_mul(self, gate_up_TF):
            raise TypeError("at 12:4")

    monkeypatch.setattr(systems, "paged_attention", fails)
    monkeypatch.setattr(kernel_bench, "choose_backend", lambda *args: CannotCompile())
    file = tmp_path / "k.json"
    with pytest.raises(SystemExit) as end:
        bench.main(
            ["kernels", "--device", "cpu", "--dtype", "float32", "--save-json", str(file)]
        )
    assert end.value.code == "4 of the cases failed; see above", "a text is exit status 1"
    lines = json.loads(file.read_text())["kernels"]
    told = {
        (x["kernel"], x["shape"]): x["error"].splitlines()[0] for x in lines if "error" in x
    }
    assert told == {
        ("decode", "llama-3-8b"): "AssertionError: Tensor-likes are not close!",
        ("decode", "smollm2"): "RuntimeError: out of resource: shared memory",
        ("prefill", "llama-3-8b"): "does not fit into the GPU's memory",
        ("prefill", "smollm2"): "RuntimeError: out of resource: shared memory",
        ("SiLU x gate", "llama-3-8b"): "TypeError: at 12:4",
    }
    timed = [x["kernel"] for x in lines if "seconds" in x]
    assert timed == ["RMSNorm", "RoPE + write", "argmax", "top 32"]
    printed = capsys.readouterr().out
    assert all(text in printed for text in told.values()) and "and more" not in printed
