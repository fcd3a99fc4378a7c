"""A .gguf file, or the first of several, as a checkpoint.

    general.architecture    llama, qwen2 or qwen3
    ARCH.*                  sizes and options: each one is read, or known to change no number,
                            or refused
    split.*                 the model goes on in NAME-00002-of-0000N.gguf
    tokenizer.*             the vocabulary (models/gguf_tokenizer.py)

Why not transformers' GGUF reader: it takes twelve times as long, holds all weights in float32
at once, and ignores tensors and keys that it does not know.

Always holds: a key of the architecture that would change the numbers and is not supported is
refused, never ignored.

Sources: llama.cpp's load_hparams, for what a key means and what is taken for granted without
it; its convert_hf_to_gguf.py, for the order of a file's rows; its gguf-split.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanobatch.models.checkpoints import check_shape, refuse_left
from nanobatch.models.config import MAX_EPS, ModelConfig
from nanobatch.models.families import LLAMA, QWEN2, QWEN3, count
from nanobatch.models.gguf_header import GgufHeader, GgufTensor, read_gguf
from nanobatch.models.gguf_tokenizer import ends_of_text
from nanobatch.models.rope_scaling import MAX_CONTEXT, MIN_POSITIVE, scaling_fields
from nanobatch.models.sampling_defaults import SamplingDefaults
from nanobatch.utils.checks import check_choice, check_float, check_int

GGUF_ARCHITECTURES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
ROPE_FREQS = "rope_freqs.weight"
READ = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type",
    "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
)  # fmt: skip
NO_NUMBERS = ("rope.scaling.finetuned",)  # only tells how the model was trained
OTHER_KINDS = ("adapter.", "clip.", "diffusion.", "xielu.")  # keys that no supported model has


class GgufFile:
    """A model in GGUF. Tensors are dequantized one by one, as they are read."""

    def __init__(self, file: Path):
        self._file = file
        header = _read_parts(file)
        self._tensors = header.tensors
        self.tokenizer_fields = {
            key: value for key, value in header.fields.items() if key.startswith("tokenizer.")
        }
        sampling = {k: v for k, v in header.fields.items() if k.startswith("general.sampling.")}
        self.sampling = SamplingDefaults(str(file), sampling)
        self._unread = set(self._tensors) - {ROPE_FREQS}  # read into the config
        try:
            self.config = _model_config(header.fields, header.tensors)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        self._names = _gguf_names(self.config.num_layers)

    def _name(self, name: str) -> str | None:
        """GGUF's name of a tensor, from Hugging Face's."""
        return self._names.get_name(name, try_suffixes=(".weight", ".bias"))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """ValueError if it is missing, or has another shape or a type of integers."""
        gguf_name = self._name(name)
        tensor = self._tensors.get(gguf_name)
        if tensor is None:
            raise ValueError(f"{self._file}: the checkpoint has no tensor {gguf_name or name}")
        check_shape(self._file, gguf_name, tensor.shape, shape)
        _check_kind(self._file, gguf_name, tensor)
        self._unread.discard(gguf_name)

    def check_none_left(self) -> None:
        """ValueError if a tensor was never checked: the file is of another model."""
        refuse_left(self._file, self._unread)

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        """Every tensor is copied."""
        return False

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that (Hugging Face) name, dequantized to float32."""
        gguf_name = self._name(name)
        try:
            numbers = self._tensors[gguf_name].dequantized()
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{self._file}: {gguf_name} cannot be read: {error}") from error
        if not numbers.flags.writeable:  # a view of the file
            numbers = numbers.copy()
        weight = torch.from_numpy(numbers)
        is_q_or_k = name.endswith(("q_proj.weight", "k_proj.weight"))
        if self.config.architecture == LLAMA and is_q_or_k:
            weight = self._half_split(weight)
        return weight

    def _half_split(self, weight: Tensor) -> Tensor:
        """Undo llama.cpp's order of a head's rows, with the two rows of a RoPE pair side by
        side."""
        D = self.config.head_dim
        return weight.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _gguf_names(num_layers: int):
    """gguf's table from Hugging Face's names. Qwen 3's has all names of the other two."""
    import gguf

    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)


def _check_kind(where: object, name: str, tensor: GgufTensor) -> None:
    if re.fullmatch(r"I\d+", tensor.kind.name):
        raise ValueError(
            f"{where}: {name} has type {tensor.kind.name}; a weight has no integers"
        )


# ----------------------------------------------------------------------------- several files


def _read_parts(file: Path) -> GgufHeader:
    """The header of a file and the tensors of all its parts, as gguf-split makes them.

    Raises:
        FileNotFoundError, ValueError: a part is missing, or is no part of this model.
    """
    whole = read_gguf(file)
    num_parts = whole.fields.get("split.count", 1)
    check_int(f"{file}: split.count", num_parts, 0, 99999)
    if num_parts <= 1:
        return whole
    name = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file.name)
    if name is None or int(name[3]) != num_parts:
        raise ValueError(
            f"{file}: split.count is {num_parts}; the file's name must end in "
            f"-00001-of-{num_parts:05}.gguf, as gguf-split names it"
        )
    parts = [
        file.with_name(f"{name[1]}-{i + 1:05}-of-{name[3]}.gguf") for i in range(num_parts)
    ]
    if file != parts[0]:
        raise ValueError(
            f"{file}: part {int(name[2])} of {num_parts}; load the first, {parts[0].name}"
        )
    for i, part in enumerate(parts):
        header = whole if i == 0 else read_gguf(part)
        for key, value in (("split.no", i), ("split.count", num_parts)):
            if header.fields.get(key) != value:
                raise ValueError(
                    f"{part}: {key} is {header.fields.get(key)!r}; it must be {value}"
                )
        twice = whole.tensors.keys() & header.tensors.keys() if i else ()
        if twice:
            raise ValueError(f"{part}: {min(twice)} is in an earlier part too")
        whole.tensors |= header.tensors
    num_tensors = whole.fields.get("split.tensors.count", len(whole.tensors))
    if num_tensors != len(whole.tensors):
        raise ValueError(
            f"{file}: split.tensors.count is {num_tensors!r}; the parts have "
            f"{len(whole.tensors)} tensors"
        )
    return whole


# ------------------------------------------------------------------------------------ config


def _model_config(fields: dict, tensors: dict[str, GgufTensor]) -> ModelConfig:
    arch = fields.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise ValueError(f"architecture {arch} is not supported; these are: {supported}")
    H = count(fields, f"{arch}.attention.head_count")
    E = count(fields, f"{arch}.embedding_length")
    head_dim = count(fields, f"{arch}.attention.key_length", max(1, E // H))
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("the checkpoint has no matrix token_embd.weight")
    vocab_size = embedding.shape[0]
    _refuse_unread(fields, arch, head_dim, vocab_size)
    eps_name = f"{arch}.attention.layer_norm_rms_epsilon"
    check_float(eps_name, fields.get(eps_name), 0.0, MAX_EPS, open_low=True)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": E,
        "intermediate_size": count(fields, f"{arch}.feed_forward_length"),
        "num_layers": count(fields, f"{arch}.block_count"),
        "num_heads": H,
        "num_kv_heads": count(fields, f"{arch}.attention.head_count_kv", H),
        "head_dim": head_dim,
        "max_position_embeddings": count(fields, f"{arch}.context_length"),
    }
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[arch],
        rms_norm_eps=fields[eps_name],
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="each_head" if "blk.0.attn_q_norm.weight" in tensors else None,
        tie_word_embeddings="output.weight" not in tensors,
        eos_token_ids=ends_of_text(fields, vocab_size),
        **sizes | _rope_fields(fields, arch, sizes, tensors.get(ROPE_FREQS)),
    )


def _rope_fields(fields: dict, arch: str, sizes: dict, freqs: GgufTensor | None) -> dict:
    """The fields of ModelConfig that RoPE sets.

    As in llama.cpp, a factor without a type is linear, one of 0 is none, and the divisors of
    rope_freqs.weight (Llama 3.1) come on top.
    """
    head_dim, context = sizes["head_dim"], sizes["max_position_embeddings"]
    theta = fields.get(f"{arch}.rope.freq_base", 10000.0)
    rope_type = fields.get(f"{arch}.rope.scaling.type", "linear")
    check_choice(f"{arch}.rope.scaling.type", rope_type, ("none", "linear", "yarn"))
    name = f"{arch}.rope.scaling.factor"
    if name not in fields:
        name = f"{arch}.rope.scale_linear"  # its old name
    factor = fields.get(name, 0)
    check_float(name, factor, 0.0, MAX_CONTEXT)
    original_name = f"{arch}.rope.scaling.original_context_length"
    scaling = {
        "rope_type": "default" if factor == 0 else rope_type.replace("none", "default"),
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": count(fields, original_name, context),
    }
    rope = {"rope_theta": theta} | scaling_fields(scaling, head_dim, context)
    if freqs is not None:
        if freqs.shape != (head_dim // 2,):
            raise ValueError(
                f"{ROPE_FREQS} has shape {list(freqs.shape)}; it must be [{head_dim // 2}]"
            )
        _check_kind("RoPE", ROPE_FREQS, freqs)
        divisors = freqs.dequantized().astype(np.float64)
        for divisor in divisors.tolist():
            check_float(ROPE_FREQS, divisor, MIN_POSITIVE)
        linear = np.array(rope.get("rope_divisors", 1.0))
        rope["rope_divisors"] = tuple((divisors * linear).tolist())
    return rope


def _refuse_unread(fields: dict, arch: str, head_dim: int, vocab_size: int) -> None:
    """Raise ValueError for a key that may change the numbers, and that nothing reads.

    A key may always say that something is off: 0 or false. Others may say what goes without
    saying.
    """
    same = dict.fromkeys(
        ("logit_scale", "embedding_scale", "residual_scale", "rope.scaling.attn_factor",
         "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (0, 1),
    ) | {
        "vocab_size": (vocab_size,),
        "tensor_data_layout": ("Meta AI original pth",) if arch == "llama" else (),
        "attention.causal": (True,),
        "attention.value_length": (head_dim,),
        "attention.scale": (0, head_dim**-0.5),
        "rope.dimension_count": (head_dim,),
        "rope.scaling.yarn_beta_fast": (32,),
        "rope.scaling.yarn_beta_slow": (1,),
    }  # fmt: skip
    for key, value in fields.items():
        name = key.removeprefix(f"{arch}.")
        if key == "general.type":
            allowed = ("model",)
        elif key == "general.quantization_version":
            allowed = (2,)
        elif key.startswith(OTHER_KINDS) or (name != key and name not in READ + NO_NUMBERS):
            allowed = same.get(name, (0,))
        else:
            continue
        if not any(_is_same(value, wanted) for wanted in allowed):
            only = " or ".join(map(repr, allowed)) or "nothing"
            raise ValueError(f"{key} is {value!r}; only {only} is supported")


def _is_same(value: object, wanted: object) -> bool:
    if isinstance(value, list):
        return all(_is_same(one, wanted) for one in value)
    if isinstance(value, float):
        return not isinstance(wanted, str) and math.isclose(value, wanted, rel_tol=1e-6)
    return value == wanted
