"""config.json: each field that is missing, out of range or not supported is refused by name.

That good config.json files are read correctly is tested in test_models.py.
"""

import copy
import json

import pytest
from small_checkpoint import CONFIG, D, configure, fault_in, greedy, load
from test_models import FAMILIES, IS_TRANSFORMERS_4, as_transformers_4_writes_it
from transformers import Phi3Config

from nanobatch.models.hf_config import model_config

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


SHAPES_OF = {
    **{name: FAMILIES[name] for name in (
        "llama3.1", "llama-yarn", "mistral", "qwen2-window-above", "qwen3", "phi3", "olmo2",
        "granite", "gemma2", "gemma3", "starcoder2", "mixtral", "qwen3-moe",
    )},
    "phi3-longrope": (Phi3Config, {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 300.0, "long_factor": [4.0] * 2,
            "short_factor": [1.0] * 2,
        },
        "original_max_position_embeddings": 32,
    }),
}  # fmt: skip


def whole_config(name: str) -> tuple[type, dict]:
    """A configuration class of transformers, and all fields of a config.json of its family.

    No value is a default; 32 heads divide by every default of num_key_value_heads.
    """
    config_class, settings = SHAPES_OF[name]
    settings = {
        "vocab_size": 200, "intermediate_size": 64, "num_hidden_layers": 3, **settings,
        "hidden_size": 128, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 6, "max_position_embeddings": 256, "eos_token_id": 7, "rms_norm_eps": 1e-4,
        "norm_epsilon": 1e-4, ("num_local_experts" if name == "mixtral" else "num_experts"): 16,
    }  # fmt: skip
    if name == "phi3-longrope":
        del settings["head_dim"]
    if IS_TRANSFORMERS_4:
        type_key = "type" if config_class is Phi3Config else "rope_type"
        settings = as_transformers_4_writes_it(settings, type_key)
    architecture = config_class.__name__.replace("TextConfig", "Config")
    names = {"architectures": [architecture.replace("Config", "ForCausalLM")]}
    return config_class, config_class(**settings).to_dict() | names


def with_one_left_out(raw: dict) -> dict[str, dict]:
    """raw without each of its fields, and without each field of the objects in it."""
    found = {}
    for name, value in raw.items():
        found[name] = {other: raw[other] for other in raw if other != name}
        if isinstance(value, dict):
            inner = with_one_left_out(value)
            found |= {f"{name}.{key}": raw | {name: rest} for key, rest in inner.items()}
    return found


@pytest.mark.parametrize("name", SHAPES_OF)
def test_a_field_that_is_left_out_has_the_default_of_transformers(name):
    """Or is refused: what has no default there, and the sizes."""
    config_class, whole = whole_config(name)
    num_read = 0
    for left_out, raw in with_one_left_out(whole).items():
        try:
            ours = model_config(copy.deepcopy(raw), {})
        except ValueError as error:
            assert left_out in REQUIRED.split() or "rope" in left_out, (left_out, error)
            assert left_out.rpartition(".")[2].rstrip("s") in str(error)
            continue
        filled = config_class.from_dict(copy.deepcopy(raw)).to_dict()
        architectures = {"architectures": whole["architectures"]}
        assert ours == model_config(filled | architectures, {}), left_out
        num_read += ours != model_config(copy.deepcopy(whole), {})
    assert num_read >= 5  # else none of these would be a test


# ModelConfig's names of the fields, which its checks use.
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
    "rms_norm_eps": [-1.0, 0, 0.0, 0.011, "1e-5", [], 10**400, float("nan"), float("inf")],
    "rope_theta": [0, -1.0, 0.99, 1e16, "1e4", [], 10**400, float("nan"), float("inf")],
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
        ({"rope_type": "linear", "factor": 1e300}, "factor"),
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
    """As in transformers 5, which writes rope_parameters and reads both."""
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for other in ({}, None, {"rope_type": "default", "rope_theta": 5.0}):
        config = model_config(CONFIG | scaled | {"rope_parameters": other}, {})
        assert config.rope_divisors == (8.0,) * (D // 2)
    for wrong in ("yarn", 5, [1.0], [], {"factor": 8.0}):  # the last one has no type
        with pytest.raises(ValueError, match="rope_scaling"):
            model_config(CONFIG | {"rope_scaling": wrong, "rope_parameters": {}}, {})


@pytest.mark.parametrize(
    "rope, culprit",
    [
        ({"sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0}},
         "rope_type is 'linear'"),
        ({"sliding_attention": {"rope_theta": 9.0}, "full_attention": "x"}, "full_attention"),
        ({"sliding_attention": 5}, "sliding_attention"),
        ({"sliding_attention": {"rope_theta": 0.5}}, "local_rope_theta"),
        ({"full_attention": {"rope_theta": "x"}}, "rope_theta"),
    ],
)  # fmt: skip
def test_gemma_3_s_rope_of_the_layers_with_a_window(rope, culprit):
    raw = CONFIG | {"architectures": ["Gemma3ForCausalLM"], "head_dim": D}
    raw |= {"hidden_activation": "gelu_pytorch_tanh"}
    with pytest.raises(ValueError, match=culprit):
        model_config(raw | {"rope_parameters": rope}, {})


@pytest.mark.parametrize("rope_type", ["longrope", "su", "yarn"])
def test_phi3_s_old_names_of_longrope(checkpoint, rope_type):
    """In Microsoft's first config.json files. The original context is a field of its own, or
    4,096."""
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
    """Its weights need scales, which are tensors of their own."""
    configure(checkpoint, quantization_config={"quant_method": "fp8"})
    assert "quantization_config" in fault_in(checkpoint / "config.json", checkpoint)


def test_a_llama_has_no_sliding_window(checkpoint):
    """transformers' Llama ignores the field, which some checkpoints have."""
    prompt = [1, 7, 2, 9, 4, 3]
    wanted = greedy(load(checkpoint), prompt)
    configure(checkpoint, sliding_window=1)
    assert greedy(load(checkpoint), prompt) == wanted
    configure(checkpoint, sliding_window=1, architectures=["MistralForCausalLM"])
    assert greedy(load(checkpoint), prompt) != wanted  # the field would be seen
