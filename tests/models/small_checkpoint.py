"""A good checkpoint of one tiny layer, written by hand, for tests that spoil it in one way.

Also what those tests share: loading it, and the message with which it is refused.
"""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanobatch import LLM, SamplingParams

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


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write_checkpoint(path: Path) -> Path:
    """The good checkpoint as config.json and safetensors, without a tokenizer."""
    configure(path)
    save_file(tensors(), path / "model.safetensors")
    return path


def configure(path: Path, **changes) -> None:
    """Write config.json with some fields changed."""
    (path / "config.json").write_text(json.dumps(CONFIG | changes))


GGUF_FIELDS = {
    "context_length": 32,
    "embedding_length": E,
    "block_count": 1,
    "feed_forward_length": FF,
    "attention.head_count": H,
    "attention.head_count_kv": K,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
GGUF_TOKENIZER = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": [chr(ord("a") + i) for i in range(V - 1)] + ["ab"],
    "merges": ["a b"],
}


def write_gguf(
    path: Path,
    arch: str = "llama",
    changes=None,
    weights=None,
    tokenizer: bool = True,
    more=None,
    alignment: int | None = None,
) -> Path:
    """The good checkpoint as GGUF. A field or a tensor that is None is left out; `more` are
    fields and tensors by their whole names."""
    file = path / "model.gguf"
    writer = gguf.GGUFWriter(file, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    fields = {f"{arch}.{name}": x for name, x in (GGUF_FIELDS | (changes or {})).items()}
    if tokenizer:
        fields |= {f"tokenizer.ggml.{name}": x for name, x in GGUF_TOKENIZER.items()}
    for name, value in (fields | (more or {})).items():
        add = {
            int: writer.add_int32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array, bool: writer.add_bool,
            type(None): lambda key, value: None,
            torch.Tensor: lambda key, value: writer.add_tensor(key, value.numpy()),
        }[type(value)]  # fmt: skip
        add(name, value)
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


NO_FILES = ["fifo", "socket", "device", "directory"]


def put(kind: str, file: Path) -> None:
    """Something in the place of a file that is no file."""
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        home = os.getcwd()
        os.chdir(file.parent)  # a socket's path is at most 107 bytes
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
        os.chdir(home)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()


def load(path, **config) -> LLM:
    return LLM(str(path), dtype="float32", **config)


def refusal(path, kind=ValueError, **config) -> str:
    """The message with which loading fails; any exception but `kind` fails the test."""
    with pytest.raises(Exception) as refused:
        load(path, **config)
    assert type(refused.value) is kind, repr(refused.value)
    return str(refused.value)


def fault_in(file, path=None, kind=ValueError) -> str:
    """The message of a refusal that begins with the file's name, without that name."""
    message = refusal(file if path is None else path, kind)
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ").replace(str(file), "")


def greedy(llm: LLM, prompt) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    return llm.generate(prompt, params, progress=False)[0].token_ids
