"""Checkpoints: where a model's weights come from. All have a config, and tensors by name.

    HFDirectory     config.json and safetensors, in one file or several with an index
    GgufFile        one .gguf file, dequantized as it is read
    Dummy           no checkpoint: seeded random weights, for measuring speed only

Nothing in a file is executed: safetensors and GGUF are tables of numbers. What config.json
means is in models/hf_config.py.

Why not transformers' GGUF reader: it takes twelve times as long, holds all weights in float32
at once, and ignores tensors that it does not know.

Always holds: whatever is wrong with a file is one ValueError that names the file and the fault;
a file that is not there is a FileNotFoundError.

Sources: Hugging Face's config.json; llama.cpp's convert_hf_to_gguf.py, for the order of a GGUF
file's rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanobatch.models.config import ModelConfig
from nanobatch.models.families import LLAMA, QWEN2, QWEN3, count
from nanobatch.models.gguf_tokenizer import ends_of_text
from nanobatch.models.hf_config import model_config
from nanobatch.utils.checks import check_float


class Checkpoint(Protocol):
    """A model's config, and its tensors by Hugging Face's names."""

    config: ModelConfig

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name; ValueError if it is missing or has another shape."""
        ...

    def check_all_read(self) -> None:
        """ValueError if a tensor was never read: the file is of another model."""
        ...


def _check_shape(where: object, name: str, found: tuple[int, ...], wanted: tuple[int, ...]):
    if tuple(found) != wanted:
        raise ValueError(
            f"{where}: {name} has shape {list(found)}; its config asks for {list(wanted)}"
        )


def _check_none_left(where: object, names: Collection[str]) -> None:
    if names:
        raise ValueError(f"{where}: nothing of the model reads {min(names)}")


class Dummy:
    """Seeded random weights, scaled so that activations neither vanish nor explode.

    Args:
        config: the model's shape.
        seed: of the weights.
        device: where they are made; on a CPU those of a 7B model take a minute.
    """

    def __init__(self, config: ModelConfig, seed: int, device: torch.device):
        self.config = config
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Ones for a norm; else normal with variance 1 / (size of the input)."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        numbers = torch.randn(shape, generator=self._generator, device=self._device)
        return numbers * shape[-1] ** -0.5

    def check_all_read(self) -> None:
        """Nothing can be left over."""


# -------------------------------------------------------------------- a Hugging Face directory


class HFDirectory:
    """config.json and safetensors, in one file or in several with an index."""

    def __init__(self, path: Path):
        self.config = _read_hf_config(path)
        self._path = path
        self._open_files = {}
        index, file = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.exists():
            self._file_of = _read_index(index)
        else:
            self._file_of = dict.fromkeys(self._open(file).keys(), file)
        self._unread = set(self._file_of)
        if self.config.tie_word_embeddings:
            self._unread.discard("lm_head.weight")

    def _open(self, file: Path):
        from safetensors import SafetensorError, safe_open

        if file not in self._open_files:
            if not file.exists():
                raise FileNotFoundError(f"{file}: no such file; weights must be safetensors")
            try:
                self._open_files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
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
            self._unread.discard(name)
            return piece[:]
        except SafetensorError as error:
            raise ValueError(f"{file}: {name} cannot be read: {error}") from None

    def check_all_read(self) -> None:
        """ValueError if a tensor was never read: the checkpoint is of another model."""
        # Old checkpoints carry the RoPE frequencies, which follow from the config.
        is_rope = re.compile(r"\.rotary_emb\.inv_freq$").search
        _check_none_left(self._path, [name for name in self._unread if not is_rope(name)])


def _read_index(index: Path) -> dict[str, Path]:
    """From each tensor's name to its file, which lies beside the index."""
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{index}: weight_map is missing")
    for name, file in names.items():
        is_plain = isinstance(file, str) and file not in ("", "..")
        if not is_plain or Path(file).name != file:
            raise ValueError(f"{index}: {name} is in {file!r}, not a plain file name")
    return {name: index.parent / file for name, file in names.items()}


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return content


def _read_hf_config(path: Path) -> ModelConfig:
    file, generation_file = path / "config.json", path / "generation_config.json"
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    raw = _read_json(file)
    generation = _read_json(generation_file) if generation_file.exists() else {}
    try:
        return model_config(raw, generation)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


# ---------------------------------------------------------------------------------------- GGUF

GGUF_ARCHITECTURES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


def _gguf_reader(file: Path):
    """gguf's reader on a plain array: a vocabulary is 500,000 slices, which take 2 s longer
    from a memmap."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, *args, **kwargs):
            self.data = self.data.view(np.ndarray)
            return super()._get(*args, **kwargs)

    return Reader(file)


class GgufFile:
    """One .gguf file. Tensors are dequantized one by one, as they are read."""

    def __init__(self, file: Path):
        self._file = file
        try:
            reader = _gguf_reader(file)
            self._tensors = {t.name: t for t in reader.tensors}
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # the reader raises whatever its numpy views raise
            raise ValueError(f"{file}: not a whole GGUF file: {error}") from error
        self._unread = set(self._tensors) - {"rope_freqs.weight"}  # read into the config
        self.tokenizer_fields = {
            name: value for name, value in fields.items() if name.startswith("tokenizer.")
        }
        try:
            self.config = self._read_config(fields)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        self._gguf_names = _gguf_names(self.config.num_layers)

    def _read_config(self, fields: dict) -> ModelConfig:
        arch = fields.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            supported = ", ".join(GGUF_ARCHITECTURES)
            raise ValueError(f"architecture {arch} is not supported; these are: {supported}")
        H = count(fields, f"{arch}.attention.head_count")
        E = count(fields, f"{arch}.embedding_length")
        head_dim = count(fields, f"{arch}.attention.key_length", max(1, E // H))
        _refuse_unsupported(fields, arch, head_dim)
        eps_name = f"{arch}.attention.layer_norm_rms_epsilon"
        check_float(eps_name, fields.get(eps_name), 0.0)
        factors = self._tensors.get("rope_freqs.weight")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError("the checkpoint has no matrix token_embd.weight")
        return ModelConfig(
            architecture=GGUF_ARCHITECTURES[arch],
            vocab_size=int(embedding.shape[1]),
            hidden_size=E,
            intermediate_size=count(fields, f"{arch}.feed_forward_length"),
            num_layers=count(fields, f"{arch}.block_count"),
            num_heads=H,
            num_kv_heads=count(fields, f"{arch}.attention.head_count_kv", H),
            head_dim=head_dim,
            max_position_embeddings=count(fields, f"{arch}.context_length"),
            rms_norm_eps=fields[eps_name],
            rope_theta=fields.get(f"{arch}.rope.freq_base", 10000.0),
            rope_divisors=None if factors is None else tuple(factors.data.tolist()),
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            qk_norm="each_head" if "blk.0.attn_q_norm.weight" in self._tensors else None,
            tie_word_embeddings="output.weight" not in self._tensors,
            eos_token_ids=ends_of_text(fields, int(embedding.shape[1])),
        )

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that (Hugging Face) name, dequantized to float32."""
        from gguf.quants import dequantize

        gguf_name = self._gguf_names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = self._tensors.get(gguf_name)
        if tensor is None:
            raise ValueError(f"{self._file}: the checkpoint has no tensor {gguf_name}")
        _check_shape(self._file, gguf_name, tuple(reversed(tensor.shape.tolist())), shape)
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{self._file}: {gguf_name} cannot be read: {error}") from error
        self._unread.discard(gguf_name)
        if not numbers.flags.writeable:  # a view of the file
            numbers = numbers.copy()
        weight = torch.from_numpy(numbers).view(shape)
        is_q_or_k = name.endswith(("q_proj.weight", "k_proj.weight"))
        if self.config.architecture == LLAMA and is_q_or_k:
            weight = self._half_split(weight)
        return weight

    def check_all_read(self) -> None:
        """ValueError if a tensor was never read: the checkpoint is of another model."""
        _check_none_left(self._file, self._unread)

    def _half_split(self, weight: Tensor) -> Tensor:
        """Undo llama.cpp's order of a head's rows, with the two rows of a RoPE pair side by
        side."""
        D = self.config.head_dim
        return weight.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _gguf_names(num_layers: int):
    """gguf's table from Hugging Face's names. Qwen 3's has all names of the other two."""
    import gguf

    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)


def _refuse_unsupported(fields: dict, arch: str, head_dim: int) -> None:
    for name, supported in (
        ("rope.scaling.type", "none"),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
    ):
        value = fields.get(f"{arch}.{name}", supported)
        if value != supported:
            raise ValueError(f"{arch}.{name} is {value!r}; only {supported!r} is supported")
