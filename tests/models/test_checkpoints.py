"""Weights in safetensors, each file spoilt in one way. (GGUF: test_gguf_checkpoint.py.)

Whatever is wrong is one ValueError (FileNotFoundError if a file is not there) that names the
file and the fault. It is never another exception, and never a model that loads and computes
something else than its file says. That good checkpoints are read correctly is tested in
test_models.py.
"""

import json
import os
import time
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import (
    CONFIG,
    FF,
    LAYER,
    NO_FILES,
    SHAPES,
    D,
    E,
    V,
    configure,
    fault_in,
    greedy,
    load,
    put,
    refusal,
    tensors,
)

from nanobatch.models import loader

# ---- safetensors -----------------------------------------------------------------------


def test_weights_are_missing(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"never read: this is pickle")
    fault_in(checkpoint / "model.safetensors", checkpoint, FileNotFoundError)


def test_weights_are_a_directory(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").mkdir()
    fault_in(checkpoint / "model.safetensors", checkpoint)


def test_truncated_safetensors(checkpoint):
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    for num_bytes in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:num_bytes])
        assert "safetensors" in fault_in(file, checkpoint), f"cut after {num_bytes} bytes"


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_tensor_of_another_shape(checkpoint, name):
    weights = tensors()
    weights[name] = torch.zeros(*SHAPES[name][:-1], SHAPES[name][-1] + 1)
    save_file(weights, checkpoint / "model.safetensors")
    fault = fault_in(checkpoint / "model.safetensors", checkpoint)
    found, wanted = list(weights[name].shape), list(SHAPES[name])
    assert all(part in fault for part in (name, str(found), str(wanted)))


def test_a_tensor_with_its_dimensions_swapped(checkpoint):
    weights = tensors()
    name = LAYER + "mlp.down_proj.weight"
    weights[name] = weights[name].T.contiguous()
    save_file(weights, checkpoint / "model.safetensors")
    fault = fault_in(checkpoint / "model.safetensors", checkpoint)
    assert all(part in fault for part in (name, str([E, FF]), str([FF, E])))


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_tensor_that_is_missing(checkpoint, name):
    weights = tensors()
    del weights[name]
    save_file(weights, checkpoint / "model.safetensors")
    message = refusal(checkpoint)
    assert str(checkpoint) in message and name in message


@pytest.mark.parametrize("field, culprit", [
    ("attention_bias", "self_attn.q_proj.bias"),
    ("mlp_bias", "mlp.gate_proj.bias"),
    ("tie_word_embeddings", "lm_head.weight"),
])  # fmt: skip
def test_a_tensor_that_the_config_promises_is_missing(checkpoint, field, culprit):
    configure(checkpoint, **{field: not CONFIG.get(field, False)})
    assert culprit in refusal(checkpoint)


@pytest.mark.parametrize("name", [
    LAYER + "self_attn.q_proj.weight_scale_inv",  # an 8-bit weight means nothing without it
    LAYER + "self_attn.q_proj.bias",  # of a model whose config does not speak of it
    "model.layers.1.input_layernorm.weight",
])  # fmt: skip
def test_a_tensor_that_nothing_reads_is_refused(checkpoint, name):
    save_file(tensors() | {name: torch.ones(1)}, checkpoint / "model.safetensors")
    message = refusal(checkpoint)
    assert str(checkpoint) in message and name in message


def test_tensors_that_say_nothing_new_are_passed_over(checkpoint):
    wanted = greedy(load(checkpoint), [1, 2])
    tied_head = torch.zeros(V, E)  # the config says that the embedding is in its place
    more = {"lm_head.weight": tied_head, LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors() | more, checkpoint / "model.safetensors")
    assert greedy(load(checkpoint), [1, 2]) == wanted


# safetensors' names of the types that no weight has, and their sizes in bytes.
NO_WEIGHTS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2,
              "U32": 4, "I32": 4, "U64": 8, "I64": 8}  # fmt: skip


def write_safetensors(file: Path, dtypes: dict[str, str]) -> None:
    """All tensors in float32 but for some, by hand: torch does not save all types."""
    header, data = {}, b""
    for name, weight in tensors().items():
        dtype = dtypes.get(name, "F32")
        piece = weight.numpy().tobytes()
        if dtype != "F32":
            piece = bytes(weight.numel() * NO_WEIGHTS[dtype])
        ends = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": ends}
        data += piece
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", NO_WEIGHTS)
def test_numbers_that_no_weight_has(checkpoint, dtype):
    """Integers are quantized weights, and mean nothing without their scales."""
    file = checkpoint / "model.safetensors"
    write_safetensors(file, {})
    build(checkpoint)
    for name in SHAPES:
        write_safetensors(file, {name: dtype})
        with pytest.raises(ValueError, match=f"{name} has dtype {dtype}") as refused:
            build(checkpoint)
        assert str(refused.value).startswith(f"{file}: ")


def test_numbers_that_a_weight_may_have(checkpoint):
    for good in (torch.float16, torch.bfloat16, torch.float64):
        save_file({name: x.to(good) for name, x in tensors().items()},
                  checkpoint / "model.safetensors")  # fmt: skip
        build(checkpoint)


def build(path: Path):
    """Load the weights alone."""
    return loader.load(str(path), torch.float32).model


TOO_LARGE = [
    ("MixtralForCausalLM", {"num_local_experts": 2**16, "num_hidden_layers": 1000},
     "block_sparse_moe"),
    ("LlamaForCausalLM", {"num_hidden_layers": 1000}, "model.layers.1."),
    ("LlamaForCausalLM", {"head_dim": 2**31 - 2}, "head_dim"),
    ("LlamaForCausalLM", {"num_attention_heads": 2**30, "head_dim": 2}, "num_heads"),
    ("LlamaForCausalLM", {"vocab_size": 2**31 - 1}, "embed_tokens"),
    ("LlamaForCausalLM", {"hidden_size": 2**31 - 1, "head_dim": D}, "embed_tokens"),
    ("LlamaForCausalLM", {"intermediate_size": 2**31 - 1}, "gate_proj"),
    ("LlamaForCausalLM", {"max_position_embeddings": 2**31}, "max_position_embeddings"),
    ("Phi3ForCausalLM",
     {"num_attention_heads": 2**17, "head_dim": D, "partial_rotary_factor": 0.5}, "qkv_proj"),
]  # fmt: skip


@pytest.mark.parametrize("architecture, sizes, culprit", TOO_LARGE, ids=str)
def test_sizes_that_no_file_holds_are_refused_before_anything_is_made(
    checkpoint, monkeypatch, architecture, sizes, culprit
):
    def make_decoder(config):
        raise AssertionError("modules are made for tensors that are not there")

    monkeypatch.setattr(loader, "make_decoder", make_decoder)
    configure(checkpoint, architectures=[architecture], **sizes)
    start = time.monotonic()
    assert culprit in refusal(checkpoint)
    assert time.monotonic() - start < 5


OPENED = ["config.json", "generation_config.json", "model.safetensors",
          "model.safetensors.index.json", "shard.safetensors", "tokenizer.json",
          "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "tokenizer.model", "chat_template.jinja",
          "additional_chat_templates/one.jinja", "byte_tokenizer"]  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs and devices are Unix's")
@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", OPENED)
def test_what_is_no_file_is_not_opened(checkpoint, no_waiting, name, kind):
    if name == "shard.safetensors":
        write_index(checkpoint, dict.fromkeys(SHAPES, name))
    put(kind, checkpoint / name)
    is_read = name.startswith(("config", "generation", "model", "shard"))
    if kind != "directory" or is_read:
        assert "regular file" in fault_in(checkpoint / name, checkpoint)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800"], ids=ascii)
def test_names_that_no_file_can_have(checkpoint, name):
    write_index(checkpoint, dict.fromkeys(SHAPES, name))
    refusal(checkpoint, FileNotFoundError)
    refusal(checkpoint / name, FileNotFoundError)
    refusal(f"~{name}/model.gguf", FileNotFoundError)


def write_index(path: Path, weight_map) -> Path:
    file = path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))
    return file


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "..", ".", "", "/a/model.safetensors", "a/b.safetensors", 5,
     None, []],
)  # fmt: skip
def test_an_index_that_points_elsewhere(checkpoint, file):
    """Even if the file it points to is a good one."""
    inner = checkpoint / "inner"
    inner.mkdir()
    (inner / "config.json").write_text(json.dumps(CONFIG))
    index = write_index(inner, dict.fromkeys(SHAPES, file))
    assert repr(file) in fault_in(index, inner)


def test_an_index_that_points_to_a_missing_file(checkpoint):
    write_index(checkpoint, dict.fromkeys(SHAPES, "model-00001-of-00002.safetensors"))
    fault_in(checkpoint / "model-00001-of-00002.safetensors", checkpoint, FileNotFoundError)


def test_an_index_that_points_to_the_wrong_shard(checkpoint):
    name = "model.norm.weight"
    save_file({"other": torch.zeros(1)}, checkpoint / "other.safetensors")
    write_index(
        checkpoint, dict.fromkeys(SHAPES, "model.safetensors") | {name: "other.safetensors"}
    )
    assert name in fault_in(checkpoint / "other.safetensors", checkpoint)


@pytest.mark.parametrize("weight_map", [[], None, "model.safetensors"])
def test_an_index_without_a_map(checkpoint, weight_map):
    index = write_index(checkpoint, weight_map)
    assert "weight_map" in fault_in(index, checkpoint)


def test_a_byte_gone_wrong_is_refused_or_changes_only_numbers(tmp_path):
    """Random bytes of a file's header set to random values: at worst a ValueError."""
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    configure(tmp_path)
    whole = bytearray(file.read_bytes())
    num_header = 8 + int.from_bytes(whole[:8], "little")
    random = Random(0)
    num_refused = 0
    for _ in range(100):
        spoilt = bytearray(whole)
        spoilt[random.randrange(num_header)] = random.randrange(256)
        file.write_bytes(spoilt)
        try:
            load(tmp_path, num_blocks=2)
        except ValueError as error:
            assert str(tmp_path) in str(error)
            num_refused += 1
    assert num_refused > 50
