"""Checkpoints: where a model's weights come from. All have a config, and tensors by name.

    HFDirectory     config.json and safetensors, in one file or several with an index
    GgufFile        a .gguf file (models/gguf_checkpoint.py)
    Dummy           no checkpoint: seeded random weights, for measuring speed only

Nothing in a file is executed: safetensors and GGUF are tables of numbers. What config.json
means is in models/hf_config.py.

Always holds: whatever is wrong with a file is one ValueError that names the file and the fault;
a file that is not there is a FileNotFoundError.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanobatch.models.config import ModelConfig
from nanobatch.models.hf_config import model_config
from nanobatch.models.sampling_defaults import SamplingDefaults
from nanobatch.utils.files import check_file, read_json

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the types that a weight may have


class Checkpoint(Protocol):
    """A model's config, and its tensors by Hugging Face's names."""

    config: ModelConfig

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """ValueError if the tensor is missing, or has another shape or no numbers that a weight
        can have."""
        ...

    def check_none_left(self) -> None:
        """ValueError if a tensor was never checked: the file is of another model."""
        ...

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        """Whether get() takes no memory of its own: the tensor is in the file in that dtype."""
        ...

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, after check() of all that are wanted."""
        ...


def check_shape(
    where: object, name: str, found: Sequence[int], wanted: tuple[int, ...]
) -> None:
    """Raise ValueError unless the shapes are equal."""
    if tuple(found) != wanted:
        raise ValueError(
            f"{where}: {name} has shape {list(found)}; its config asks for {list(wanted)}"
        )


def refuse_left(where: object, names: Collection[str]) -> None:
    """Raise ValueError if there are names of tensors that nothing reads."""
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

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Every tensor can be made."""

    def check_none_left(self) -> None:
        """Nothing can be left over."""

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        """They are made in memory."""
        return False

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Ones for a norm; else normal with variance 1 / (size of the input)."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        numbers = torch.randn(shape, generator=self._generator, device=self._device)
        return numbers.mul_(shape[-1] ** -0.5)


# -------------------------------------------------------------------- a Hugging Face directory


class HFDirectory:
    """config.json and safetensors, in one file or in several with an index."""

    def __init__(self, path: Path):
        self.config, self.sampling = _read_hf_config(path)
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
            try:
                check_file(file)
                self._open_files[file] = safe_open(file, framework="pt")
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{error}; weights must be safetensors") from None
            except (SafetensorError, OSError, RuntimeError) as error:
                raise ValueError(f"{file}: not readable as safetensors: {error}") from None
        return self._open_files[file]

    def _slice(self, name: str):
        """safetensors' handle of a tensor."""
        from safetensors import SafetensorError

        file = self._file_of.get(name)
        if file is None:
            raise ValueError(f"{self._path}: the checkpoint has no tensor {name}")
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: {name} cannot be read: {error}") from None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """ValueError if it is missing, or has another shape or the type of no weight."""
        piece = self._slice(name)
        check_shape(self._file_of[name], name, piece.get_shape(), shape)
        if piece.get_dtype() not in FLOATS:
            raise ValueError(
                f"{self._file_of[name]}: {name} has dtype {piece.get_dtype()}; it must be one "
                f"of {', '.join(FLOATS)}"
            )
        self._unread.discard(name)

    def check_none_left(self) -> None:
        """ValueError if a tensor was never checked: the checkpoint is of another model."""
        # Old checkpoints carry the RoPE frequencies, which follow from the config.
        is_rope = re.compile(r"\.rotary_emb\.inv_freq$").search
        refuse_left(self._path, [name for name in self._unread if not is_rope(name)])

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        """Safetensors are mapped, so the tensor itself lies in the file."""
        return self._slice(name)[:0].dtype == dtype

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, from whichever file has it."""
        return self._slice(name)[:]


def _read_index(index: Path) -> dict[str, Path]:
    """From each tensor's name to its file, which lies beside the index."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{index}: weight_map is missing")
    for name, file in names.items():
        is_plain = isinstance(file, str) and file not in ("", "..")
        if not is_plain or Path(file).name != file:
            raise ValueError(f"{index}: {name} is in {file!r}, not a plain file name")
    return {name: index.parent / file for name, file in names.items()}


def _read_hf_config(path: Path) -> tuple[ModelConfig, SamplingDefaults]:
    file, generation_file = path / "config.json", path / "generation_config.json"
    raw = read_json(file)
    generation = read_json(generation_file) if generation_file.exists() else {}
    try:
        config = model_config(raw, generation)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return config, SamplingDefaults(str(generation_file), generation)
