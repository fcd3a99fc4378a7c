"""Where a model's weights can come from, all read alike: a shape, and tensors by name.

    HFDirectory     config.json and safetensors, in one file or several with an index
    GgufFile        one .gguf file, dequantized as it is read
    Dummy           no checkpoint at all: seeded random weights, for speed only

Nothing is executed: safetensors and GGUF are tables of numbers. What differs between model
families ends here, as fields of ModelConfig.

Always holds: what is wrong with a file is one ValueError that names the file and the fault.

Sources: Hugging Face's config.json; llama.cpp's convert_hf_to_gguf.py for GGUF's names and
the order of its rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanobatch.config import ModelConfig

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class Checkpoint(Protocol):
    """A model's shape, and its tensors by Hugging Face's names."""

    config: ModelConfig

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name; ValueError unless it is there and of that shape."""
        ...


def _check_shape(where: object, name: str, found: tuple[int, ...], wanted: tuple[int, ...]):
    if tuple(found) != wanted:
        raise ValueError(
            f"{where}: {name} has shape {list(found)}; its config asks for {list(wanted)}"
        )


class Dummy:
    """Seeded random weights, scaled so that activations neither vanish nor explode."""

    def __init__(self, config: ModelConfig, seed: int):
        self.config = config
        self._generator = torch.Generator().manual_seed(seed)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Ones for a norm; else normal with variance 1 / inputs."""
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        return torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5


class HFDirectory:
    """config.json and safetensors, in one file or in several with an index."""

    def __init__(self, path: Path):
        self.config = _read_hf_config(path)
        index = path / "model.safetensors.index.json"
        self._open_files = {}
        if index.exists():
            names = _read_json(index).get("weight_map")
            if not isinstance(names, dict):
                raise ValueError(f"{index}: weight_map is missing")
            self._file_of = {}
            for name, file in names.items():
                if not isinstance(file, str) or Path(file).name != file:
                    raise ValueError(f"{index}: {name} is in {file!r}, not a plain file name")
                self._file_of[name] = path / file
        else:
            file = path / "model.safetensors"
            self._file_of = dict.fromkeys(self._open(file).keys(), file)
        self._path = path

    def _open(self, file: Path):
        from safetensors import SafetensorError, safe_open

        if file not in self._open_files:
            if not file.exists():
                raise FileNotFoundError(f"{file}: no such file; weights must be safetensors")
            try:
                self._open_files[file] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file}: not a whole safetensors file: {error}") from None
        return self._open_files[file]

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, from whichever file has it."""
        from safetensors import SafetensorError

        file = self._file_of.get(name)
        if file is None:
            raise ValueError(f"{self._path}: the checkpoint has no tensor {name}")
        try:
            piece = self._open(file).get_slice(name)
            _check_shape(file, name, piece.get_shape(), shape)
            return piece[:]
        except SafetensorError as error:
            raise ValueError(f"{file}: {name} cannot be read: {error}") from None


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return content


def _read_hf_config(path: Path) -> ModelConfig:
    file = path / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    raw = _read_json(file)
    architecture = (raw.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file}: architecture {architecture} is not supported; these are: "
            + ", ".join(ARCHITECTURES)
        )
    try:
        config = _model_config(raw, architecture)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{file}: {what}") from None
    generation_file = path / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else raw
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return dataclasses.replace(config, eos_token_ids=eos)


def _model_config(raw: dict, architecture: str) -> ModelConfig:
    """config.json's fields in ours. The differences between the families end here."""
    H, num_layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    is_qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    window = raw.get("sliding_window")
    if is_qwen and not raw.get("use_sliding_window", False):
        window = None
    layer_types = raw.get("layer_types") or ["sliding_attention"] * num_layers
    if "layer_types" not in raw and is_qwen and window is not None:
        first = raw.get("max_window_layers", 0)
        layer_types = ["full_attention"] * first + layer_types[first:]
    full = frozenset(i for i, kind in enumerate(layer_types) if kind == "full_attention")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; it must be 'silu'")
    # transformers 5 keeps all of RoPE in rope_parameters, 4 in two places.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    head_dim = raw.get("head_dim") or raw["hidden_size"] // H
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=num_layers,
        num_heads=H,
        num_kv_heads=raw.get("num_key_value_heads") or H,
        head_dim=head_dim,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_divisors=_rope_divisors(rope, theta, head_dim),
        qkv_bias=attention_bias or is_qwen2,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
        full_attention_layers=full,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _rope_divisors(rope: dict, theta: float, head_dim: int) -> tuple[float, ...] | None:
    """What Llama 3.1 divides each RoPE frequency by to reach 128k tokens.

    Waves shorter than the old context / high_freq_factor are kept, those longer than the old
    context / low_freq_factor are divided by factor, and in between it is blended.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(
            f"rope_type {kind!r} is not supported; it must be 'default' or 'llama3'"
        )
    old_context = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        kept = (old_context / wavelength - low) / (high - low)
        kept = min(1.0, max(0.0, kept))
        divisors.append(1 / (kept + (1 - kept) / factor))
    return tuple(divisors)


GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class GgufFile:
    """One .gguf file: dequantized as it is read."""

    def __init__(self, file: Path):
        from gguf import GGUFReader

        self._file = file
        try:
            reader = GGUFReader(file)
            self._tensors = {t.name: t for t in reader.tensors}
            self._fields = reader.fields
        except Exception as error:  # the reader raises whatever its numpy views raise
            raise ValueError(f"{file}: not a whole GGUF file: {error}") from error
        self.config = self._read_config()

    def _field(self, name: str, default: object = None) -> object:
        field = self._fields.get(name)
        if field is None and default is None:
            raise ValueError(f"{self._file}: {name} is missing")
        return default if field is None else field.contents()

    def _read_config(self) -> ModelConfig:
        arch = self._field("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            raise ValueError(
                f"{self._file}: architecture {arch} is not supported; these are: "
                + ", ".join(GGUF_ARCHITECTURES)
            )
        H, E = (
            self._field(f"{arch}.attention.head_count"),
            self._field(f"{arch}.embedding_length"),
        )
        eos = self._field("tokenizer.ggml.eos_token_id", -1)
        factors = self._tensors.get("rope_freqs.weight")
        embedding = self._tensors.get("token_embd.weight")
        try:
            return ModelConfig(
                architecture=GGUF_ARCHITECTURES[arch],
                vocab_size=int(embedding.shape[1]),
                hidden_size=E,
                intermediate_size=self._field(f"{arch}.feed_forward_length"),
                num_layers=self._field(f"{arch}.block_count"),
                num_heads=H,
                num_kv_heads=self._field(f"{arch}.attention.head_count_kv", H),
                head_dim=self._field(f"{arch}.attention.key_length", E // H),
                max_position_embeddings=self._field(f"{arch}.context_length"),
                rms_norm_eps=self._field(f"{arch}.attention.layer_norm_rms_epsilon"),
                rope_theta=self._field(f"{arch}.rope.freq_base", 10000.0),
                rope_divisors=None if factors is None else tuple(factors.data.tolist()),
                qkv_bias="blk.0.attn_q.bias" in self._tensors,
                qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
                tie_word_embeddings="output.weight" not in self._tensors,
                eos_token_ids=() if eos < 0 else (eos,),
            )
        except (AttributeError, TypeError, ZeroDivisionError, ValueError) as error:
            raise ValueError(f"{self._file}: {error}") from error

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that (Hugging Face) name, dequantized to float32."""
        from gguf.quants import dequantize

        stem, _, kind = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.", stem)
        part = stem[layer.end() :] if layer else stem
        gguf_name = (f"blk.{layer[1]}." if layer else "") + f"{GGUF_NAMES[part]}.{kind}"
        tensor = self._tensors.get(gguf_name)
        if tensor is None:
            raise ValueError(f"{self._file}: the checkpoint has no tensor {gguf_name}")
        _check_shape(self._file, gguf_name, tuple(reversed(tensor.shape.tolist())), shape)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(
            shape
        )
        is_llama = self.config.architecture == "LlamaForCausalLM"
        if is_llama and part in ("self_attn.q_proj", "self_attn.k_proj"):
            weight = self._half_split(weight)
        return weight

    def _half_split(self, weight: Tensor) -> Tensor:
        """Undo llama.cpp's order of a head's rows: its RoPE pairs are side by side."""
        D = self.config.head_dim
        return weight.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).reshape(weight.shape)
