"""Weights in safetensors and GGUF files, each file spoilt in one way.

Whatever is wrong is one ValueError (FileNotFoundError if a file is not there) that names the
file and the fault. It is never another exception, and never a model that loads and computes
something else than its file says. That good checkpoints are read correctly is tested in
test_models.py.
"""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import (
    CONFIG,
    FF,
    GGUF_FIELDS,
    LAYER,
    SHAPES,
    D,
    E,
    V,
    configure,
    fault_in,
    greedy,
    load,
    refusal,
    tensors,
    write_gguf,
)

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


# ---- GGUF ------------------------------------------------------------------------------

GGUF_IN_OURS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def test_the_gguf_of_these_tests_is_a_good_one(tmp_path):
    llm = load(write_gguf(tmp_path))
    assert llm.tokenizer.encode("cab") == [2, V - 1]
    assert len(greedy(llm, "cab")) == 3


def test_truncated_gguf(tmp_path):
    file = write_gguf(tmp_path)
    whole = file.read_bytes()
    for num_bytes in (0, 3, 4, 8, 20, 100, 300, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:num_bytes])
        assert "GGUF" in fault_in(file), f"cut after {num_bytes} bytes"
    file.write_bytes(b"GGML" + whole[4:])
    assert "GGUF" in fault_in(file)


def test_a_gguf_of_an_architecture_that_is_not_supported(tmp_path):
    file = write_gguf(tmp_path, arch="phi2")
    fault = fault_in(file)
    assert all(arch in fault for arch in ("phi2", "llama", "qwen2", "qwen3"))


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field in GGUF_FIELDS for value in (0, -1, "x", [1, 2])
     if (field, value) != ("attention.layer_norm_rms_epsilon", 0)],
    ids=str,
)  # fmt: skip
def test_a_gguf_field_that_is_absurd(tmp_path, field, value):
    file = write_gguf(tmp_path, changes={field: value})
    fault = fault_in(file)
    assert str(value) in fault
    assert field in fault or GGUF_IN_OURS[field] in fault


@pytest.mark.parametrize("field", sorted(set(GGUF_FIELDS) - {"attention.head_count_kv"}))
def test_a_gguf_field_that_is_missing(tmp_path, field):
    file = write_gguf(tmp_path, changes={field: None})
    assert f"llama.{field}" in fault_in(file)


def test_gguf_tensors_that_are_wrong(tmp_path):
    def fault_with(name, weight):
        return fault_in(write_gguf(tmp_path, weights={name: weight}))

    wrong_shape = fault_with("model.norm.weight", torch.zeros(E + 1))
    assert all(part in wrong_shape for part in ("output_norm.weight", "[9]", "[8]"))
    assert "output_norm.weight" in fault_with("model.norm.weight", None)
    assert "token_embd.weight" in fault_with("model.embed_tokens.weight", None)
    assert "token_embd.weight" in fault_with("model.embed_tokens.weight", torch.zeros(V))
    bias_of_o = fault_with(LAYER + "self_attn.o_proj.bias", torch.zeros(E))
    assert "blk.0.attn_output.bias" in bias_of_o  # nothing of ours would read it
    as_ints = torch.zeros(E, dtype=torch.int32)
    assert "output_norm.weight" in fault_with("model.norm.weight", as_ints)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope.dimension_count": D // 2},
        {"expert_count": 8},
    ],
    ids=str,
)
def test_a_gguf_that_asks_for_what_is_not_supported(tmp_path, changes):
    """It must not load and compute something else."""
    file = write_gguf(tmp_path, changes=changes)
    assert next(iter(changes)) in fault_in(file)


@pytest.mark.parametrize("changes", [
    {"rope.scaling.type": "none"}, {"rope.dimension_count": D}, {"expert_count": 0},
])  # fmt: skip
def test_a_gguf_that_says_what_goes_without_saying(tmp_path, changes):
    load(write_gguf(tmp_path, changes=changes))


def test_a_gguf_without_a_tokenizer_takes_token_ids(tmp_path):
    llm = load(write_gguf(tmp_path, tokenizer=False))
    assert llm.tokenizer is None
    assert llm.generate([1, 2], progress=False)[0].token_ids
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", progress=False)
