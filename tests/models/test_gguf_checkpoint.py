"""GGUF files, each spoilt in one way, and every key of the format that a model may have.

Whatever is wrong is one ValueError that names the file and the fault. The list of keys is that
of the `gguf` package; that good files give the logits of transformers is tested in
test_models.py.
"""

import os
import struct
import time
from random import Random

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from small_checkpoint import (
    GGUF_FIELDS,
    LAYER,
    NO_FILES,
    D,
    E,
    V,
    fault_in,
    greedy,
    load,
    put,
    refusal,
    tensors,
    write_gguf,
)

from nanobatch.models.gguf_checkpoint import NO_NUMBERS, GgufFile
from nanobatch.models.gguf_header import read_gguf

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
    [(field, value) for field in GGUF_FIELDS for value in (0, -1, "x", [1, 2])],
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
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
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


# ---- every key of the format -----------------------------------------------------------


def keys_of(space: type) -> list[str]:
    """All of gguf's keys of a model, with {arch} in the place of the architecture."""
    keys = []
    for value in vars(space).values():
        if isinstance(value, type):
            keys += keys_of(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            keys.append(value.format(arch="{arch}", dense="dense_2"))
    return keys


OLD_KEYS = ["{arch}.rope.scale_linear", "{arch}.a_key_of_tomorrow"]
KEYS = sorted({*keys_of(gguf.constants.Keys), *OLD_KEYS})
OURS = GGUF_IN_OURS | {"rope.freq_base": "rope_theta"}
OURS |= dict.fromkeys(("attention.head_count", "embedding_length"), "head_dim")
# Read by llama.cpp for yarn alone; and for what they were trained with.
SAME = [*NO_NUMBERS, "rope.scaling.original_context_length"]


def config_of(path, changes, **kwargs):
    return GgufFile(write_gguf(path, changes=changes, tokenizer=False, **kwargs)).config


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_read_or_refused(tmp_path, key):
    """Never ignored: the config is another one, or the message names key and value."""
    name = key.removeprefix("{arch}.")
    plain = config_of(tmp_path, {})
    for value in (6, 0.25, "x", [6, 7]):
        try:
            is_read = config_of(tmp_path, {name: value}) != plain
        except ValueError as error:
            is_key = f"llama.{name} is {value!r}" in str(error)
            is_read = is_key or OURS.get(name, name) in str(error)
        assert is_read or name in SAME, f"{name} = {value}"


def test_attention_that_looks_ahead_is_refused(tmp_path):
    file = write_gguf(tmp_path, changes={"attention.causal": 0})
    assert "llama.attention.causal is 0" in fault_in(file)


OFF = ["expert_count", "expert_used_count", "logit_scale", "pooling_type",
       "attention.sliding_window", "attention.max_alibi_bias", "attention.clamp_kqv",
       "final_logit_softcapping", "use_parallel_residual", "rope.scaling.factor"]  # fmt: skip
SAID = {"vocab_size": V, "attention.causal": 1, "attention.value_length": D,
        "attention.scale": D**-0.5, "rope.dimension_count": D, "residual_scale": 1.0,
        "tensor_data_layout": "Meta AI original pth", "rope.scaling.factor": 1.0}  # fmt: skip


def test_keys_that_say_what_goes_without_saying(tmp_path):
    plain = config_of(tmp_path, {})
    assert config_of(tmp_path, dict.fromkeys(OFF, 0)) == plain
    said = config_of(tmp_path, SAID)
    assert said.rope_divisors in (None, (1.0,) * (D // 2))
    assert said.attention_scale == plain.attention_scale


@pytest.mark.parametrize("changes, divisor", [
    ({"rope.scaling.factor": 4.0}, 4.0),  # without a type: linear
    ({"rope.scale_linear": 4.0}, 4.0),
    ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ({"rope.scaling.factor": 0.0}, None),
])  # fmt: skip
def test_the_factor_of_rope_as_llama_cpp_reads_it(tmp_path, changes, divisor):
    wanted = None if divisor is None else (divisor,) * (D // 2)
    assert config_of(tmp_path, changes).rope_divisors == wanted


@pytest.mark.parametrize("changes", [
    {"rope.scaling.type": "longrope"}, {"rope.scaling.type": "dynamic"},
    {"rope.scaling.factor": -4.0}, {"rope.scaling.factor": float("nan")},
    {"rope.scaling.factor": 1e30},
    {"rope.scaling.factor": "4"}, {"rope.freq_base": 0.5}, {"rope.freq_base": float("inf")},
    {"attention.layer_norm_rms_epsilon": 0.0}, {"attention.layer_norm_rms_epsilon": 0.5},
], ids=str)  # fmt: skip
def test_a_key_out_of_reason(tmp_path, changes):
    [name] = changes
    ours = {"rope.freq_base": "rope_theta"}.get(name, name)
    assert ours in fault_in(write_gguf(tmp_path, changes=changes))


ROPE_FREQS = [torch.ones(D // 2 + 1), torch.ones(D // 2, 1), torch.ones(1, D // 2),
              torch.zeros(D // 2), torch.full((D // 2,), torch.nan),
              -torch.ones(D // 2), torch.ones(D // 2, dtype=torch.int32)]  # fmt: skip


@pytest.mark.parametrize("freqs", ROPE_FREQS, ids=str)
def test_rope_freqs_that_cannot_be(tmp_path, freqs):
    assert "rope_freqs.weight" in fault_in(
        write_gguf(tmp_path, more={"rope_freqs.weight": freqs})
    )


def test_rope_freqs_and_a_factor_both_count(tmp_path):
    """As in llama.cpp, where one divides the frequency and the other the position."""
    freqs = {"rope_freqs.weight": torch.tensor([1.0, 3.0])}
    assert config_of(tmp_path, {}, more=freqs).rope_divisors == (1.0, 3.0)
    scaled = config_of(tmp_path, {"rope.scaling.factor": 2.0}, more=freqs)
    assert scaled.rope_divisors == (2.0, 6.0)


@pytest.mark.parametrize("key, value", [
    ("general.type", "adapter"), ("general.quantization_version", 1),
    ("adapter.lora.alpha", 16.0), ("xielu.beta", 0.5),
])  # fmt: skip
def test_a_file_that_is_no_plain_model(tmp_path, key, value):
    assert f"{key} is {value!r}" in fault_in(write_gguf(tmp_path, more={key: value}))


def test_keys_of_others_say_nothing(tmp_path):
    load(write_gguf(tmp_path, more={"quantize.imatrix.chunks_count": 5, "general.url": "x"}))


# ---- tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_are_no_weights(tmp_path, dtype):
    for name in ("model.norm.weight", LAYER + "self_attn.q_proj.weight"):
        ints = tensors()[name].to(dtype)
        fault = fault_in(write_gguf(tmp_path, weights={name: ints}))
        kind = f"I{8 * dtype.itemsize}"
        assert kind in fault and ("output_norm.weight" in fault or "attn_q.weight" in fault)


def test_a_scale_beside_a_weight_is_refused(tmp_path):
    more = {"blk.0.attn_q.scale": torch.ones(1)}
    assert "blk.0.attn_q.scale" in fault_in(write_gguf(tmp_path, more=more))


def test_each_type_is_read_as_gguf_reads_it(tmp_path):
    """Types of numbers by our own header, against gguf's reader."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    numbers = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    kinds = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
    for kind in map(GGMLQuantizationType.__getitem__, kinds):
        stored = gguf.quants.quantize(numbers, kind)
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
    writer.add_array("general.tags", ["a", "é"])
    writer.add_array("x.ints", [1, -2])
    writer.add_bool("x.flag", True)
    write_all(writer)
    header, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert header.tensors.keys() == {tensor.name for tensor in theirs.tensors} == set(kinds)
    for tensor in theirs.tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(header.tensors[tensor.name].dequantized(), wanted)
    for name, value in header.fields.items():
        assert theirs.fields[name].contents() == value


def write_all(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- headers whose numbers are not true --------------------------------------------------

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
STRING, ARRAY, UINT32 = map(
    int, (GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.UINT32)
)


def text(value: bytes, length: int | None = None) -> bytes:
    return U64(len(value) if length is None else length) + value


def raw_gguf(fields=(), infos=(), num_fields=None, num_tensors=None, version=3) -> bytes:
    counts = (num_tensors, infos), (num_fields, fields)
    numbers = [U64(len(items) if count is None else count) for count, items in counts]
    return b"GGUF" + U32(version) + b"".join([*numbers, *fields, *infos]) + bytes(256)


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + U32(kind) + value


def info(shape=(8,), kind=0, offset=0, num_dims=None) -> bytes:
    num_dims = len(shape) if num_dims is None else num_dims
    return text(b"w") + U32(num_dims) + b"".join(map(U64, shape)) + U32(kind) + U64(offset)


HUGE = [2**31, 2**33, 2**60, 2**64 - 1]
UNTRUE = {
    f"{what} {huge}": raw
    for huge in HUGE
    for what, raw in {
        "keys": raw_gguf(num_fields=huge),
        "tensors": raw_gguf(num_tensors=huge),
        "key": raw_gguf([text(b"k", huge) + U32(4) + U32(0)]),
        "string": raw_gguf([field(b"k", STRING, text(b"v", huge))]),
        "strings": raw_gguf([field(b"k", ARRAY, U32(STRING) + U64(huge))]),
        "bytes": raw_gguf([field(b"k", ARRAY, U32(0) + U64(huge))]),
        "ints": raw_gguf([field(b"k", ARRAY, U32(UINT32) + U64(huge))]),
        "arrays": raw_gguf([field(b"k", ARRAY, U32(ARRAY) + U64(huge))]),
        "dimension": raw_gguf(infos=[info((huge,))]),
        "dimensions": raw_gguf(infos=[info((huge, huge, huge, huge))]),
        "offset": raw_gguf(infos=[info(offset=huge // 32 * 32)]),
        "dims": raw_gguf(infos=[info(num_dims=min(huge, 2**32 - 1))]),
    }.items()
} | {
    "key twice": raw_gguf([field(b"k", 4, U32(1))] * 2),
    "tensor twice": raw_gguf(infos=[info()] * 2),
    "no utf-8": raw_gguf([field(b"\xff", 4, U32(1))]),
    "type of a key": raw_gguf([field(b"k", 13, U32(1))]),
    "type of a tensor": raw_gguf(infos=[info(kind=4)]),
    "part of a block": raw_gguf(infos=[info((8,), kind=8)]),
    "no dimensions": raw_gguf(infos=[info(())]),
    "no rows": raw_gguf(infos=[info((8, 0))]),
    "offset not aligned": raw_gguf(infos=[info(offset=8)]),
    "version": raw_gguf(version=1),
    "big endian": raw_gguf(version=3 << 24),
    **{f"alignment {a}": raw_gguf([field(b"general.alignment", UINT32, U32(a))], [info()])
       for a in (0, 3, 33)},
    "alignment of text": raw_gguf([field(b"general.alignment", STRING, text(b"32"))]),
}  # fmt: skip


@pytest.mark.parametrize("what", UNTRUE)
def test_a_header_is_held_against_the_file(tmp_path, what):
    file = tmp_path / "model.gguf"
    file.write_bytes(UNTRUE[what])
    start = time.monotonic()
    assert "GGUF" in fault_in(file)
    assert time.monotonic() - start < 2


def test_the_header_of_these_tests_is_good_but_for_what_is_said(tmp_path):
    file = tmp_path / "model.gguf"
    aligned = field(b"general.alignment", UINT32, U32(8))
    file.write_bytes(raw_gguf([aligned], [info(offset=8)]))
    assert read_gguf(file).tensors["w"].shape == (8,)


def test_the_alignment_of_a_file_counts(tmp_path):
    """Tensors lie at other places then: the same numbers are read."""
    wanted = greedy(load(write_gguf(tmp_path)), [1, 2])
    assert greedy(load(write_gguf(tmp_path, alignment=256)), [1, 2]) == wanted


def test_a_byte_gone_wrong_is_refused_or_changes_only_numbers(tmp_path):
    file = write_gguf(tmp_path, tokenizer=False)
    whole, random, num_refused = file.read_bytes(), Random(0), 0
    num_header = whole.index(tensors()["model.embed_tokens.weight"].numpy().tobytes())
    for _ in range(100):
        spoilt = bytearray(whole)
        spoilt[random.randrange(num_header)] = random.choice([0, 1, 127, 255])
        file.write_bytes(spoilt)
        try:
            GgufFile(file)
        except ValueError as error:
            assert str(file) in str(error)
            num_refused += 1
    assert num_refused > 30


# ---- a model in several files ------------------------------------------------------------


def write_split(path, num_parts: int = 3):
    """The good file's tensors in several, as llama.cpp's gguf-split names and marks them."""
    whole = gguf.GGUFReader(write_gguf(path))
    parts = [path / f"model-{i + 1:05}-of-{num_parts:05}.gguf" for i in range(num_parts)]
    for i, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        for key, kv in whole.fields.items() if i == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                value = kv.contents()
                if isinstance(value, list):
                    writer.add_array(key, value)
                else:
                    writer.add_key_value(key, value, kv.types[0])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[i::num_parts]:
            writer.add_tensor(tensor.name, tensor.data)
        write_all(writer)
    return parts


def test_a_model_in_several_files_is_the_same_model(tmp_path):
    parts = write_split(tmp_path)
    whole = load(tmp_path / "model.gguf")
    split = load(parts[0])
    assert greedy(split, "cab") == greedy(whole, "cab")
    ours, theirs = (llm.engine.runner.model.state_dict() for llm in (split, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_parts_that_are_missing_or_of_another_model(tmp_path):
    first, second, third = write_split(tmp_path)
    assert f"the first, {first.name}" in fault_in(second)
    kept = second.read_bytes()
    second.unlink()
    assert "no such file" in fault_in(second, first, FileNotFoundError)
    second.write_bytes(third.read_bytes())
    assert "split.no is 2; it must be 1" in fault_in(second, first)
    second.write_bytes(kept[: len(kept) // 2])
    assert "GGUF" in fault_in(second, first)
    second.write_bytes((tmp_path / "model.gguf").read_bytes())
    assert "split.no is None" in fault_in(second, first)
    other = tmp_path / "other.gguf"
    other.write_bytes(first.read_bytes())
    assert "-00001-of-00003.gguf" in fault_in(other)
    (tmp_path / "few").mkdir()
    two = write_split(tmp_path / "few", 2)
    fewer = two[0].with_name("model-00001-of-00003.gguf")
    two[0].rename(fewer)
    assert "split.count is 2" in fault_in(fewer)


@pytest.mark.parametrize("changes", [
    {"split.count": 10**6}, {"split.count": -1}, {"split.count": "2"}
], ids=str)  # fmt: skip
def test_a_number_of_files_that_cannot_be(tmp_path, changes):
    assert "split.count" in fault_in(write_gguf(tmp_path, more=changes))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs and devices are Unix's")
@pytest.mark.parametrize("kind", NO_FILES)
def test_a_file_that_is_no_file(tmp_path, no_waiting, kind):
    first, second, _ = write_split(tmp_path)
    put(kind, second)
    assert "regular file" in fault_in(second, first)
    put(kind, tmp_path / "model.gguf")
    assert "regular file" in refusal(tmp_path / "model.gguf")
