"""No code from a checkpoint is run, and nobody is asked whether it may be.

A checkpoint can hold code in many places: modules that tokenizer_config.json or config.json
names, pickles in the place of weights or vocabularies, modules that Python finds by itself.
transformers asks on the terminal whether to run some of them. Each is tried here with a payload
that would leave a file behind:

    checkpoint with a payload  --LLM(...)-->  it loads, or ValueError / FileNotFoundError
                                              no file, no question, though the answer were "y"
"""

import importlib.util
import json
import pickle

import pytest
import torch
from small_checkpoint import V, configure, write_gguf

from nanobatch import LLM, SamplingParams


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.code = f"open({str(mark)!r}, 'w').close()"

    def __reduce__(self):
        return exec, (self.code,)


def module(mark) -> str:
    """The source of a module that makes a file when it is imported."""
    classes = "class Custom: pass\nclass CustomConfig: model_type = 'custom'\n"
    return f"open({str(mark)!r}, 'w').close()\n{classes}"


def write_tokenizer(path, whole=True) -> None:
    """A tokenizer that can be read: in tokenizer.json, or in the older two files."""
    from tokenizers import Tokenizer, models

    model = models.BPE({chr(ord("a") + i): i for i in range(V)}, [])
    if whole:
        Tokenizer(model).save(str(path / "tokenizer.json"))
    else:
        model.save(str(path))  # vocab.json and merges.txt


TOKENIZER_MAP = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
OTHERS_MAP = {"AutoTokenizer": ["owner/repo--custom.Custom", "owner/repo--custom.Custom"]}
CONFIG_MAP = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.Custom"}


def tokenizer_config(**fields):
    def write(path):
        (path / "tokenizer_config.json").write_text(json.dumps(fields))

    return write


def config(**fields):
    return lambda path: configure(path, **fields)


def both(path):
    tokenizer_config(auto_map=TOKENIZER_MAP, tokenizer_class="Custom")(path)
    config(auto_map=CONFIG_MAP | TOKENIZER_MAP, model_type="custom")(path)


NAMED = {  # a module that is named in the checkpoint
    "tokenizer_config": tokenizer_config(auto_map=TOKENIZER_MAP),
    "tokenizer_config, a list": tokenizer_config(auto_map=TOKENIZER_MAP["AutoTokenizer"]),
    "with a class": tokenizer_config(auto_map=TOKENIZER_MAP, tokenizer_class="Custom"),
    "a known class": tokenizer_config(auto_map=TOKENIZER_MAP, tokenizer_class="LlamaTokenizer"),
    "a class alone": tokenizer_config(tokenizer_class="custom.Custom"),
    "another's": tokenizer_config(auto_map=OTHERS_MAP, tokenizer_class="Custom"),
    "config": config(auto_map=CONFIG_MAP, model_type="custom"),
    "config, a known type": config(auto_map=CONFIG_MAP, model_type="llama"),
    "config's tokenizer": config(auto_map=TOKENIZER_MAP),
    "config's class": config(auto_map=CONFIG_MAP | TOKENIZER_MAP, tokenizer_class="Custom"),
    "both": both,
    "processor_config": lambda path: (path / "processor_config.json").write_text(
        json.dumps({"auto_map": {"AutoProcessor": "custom.Custom"}})
    ),
}
PICKLES = [
    "pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth", "adapter_model.bin",
    "training_args.bin", "model.safetensors", "tokenizer.json", "tokenizer.model", "vocab.pkl",
    "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja", "generation_config.json", "model.gguf",
]  # fmt: skip


@pytest.fixture
def mark(tmp_path_factory, monkeypatch):
    """The payload's file, which must not be there at the end; all questions are noted."""
    mark, questions = tmp_path_factory.mktemp("mark") / "was-run", []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    yield mark
    assert not questions
    assert not mark.exists()


def load_or_refuse(path, kinds=(ValueError, FileNotFoundError)) -> LLM | None:
    try:
        return LLM(str(path), dtype="float32", num_blocks=8)
    except Exception as error:
        assert type(error) in kinds, repr(error)
    return None


def test_the_payloads_work(tmp_path):
    """Or the other tests would show nothing."""
    mark, file = tmp_path / "was-run", tmp_path / "custom.py"
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()
    mark.unlink()
    file.write_text(module(mark))
    spec = importlib.util.spec_from_file_location("custom", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert mark.exists()


@pytest.mark.parametrize("door", NAMED)
@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json", "gguf"])
def test_a_module_that_is_named(kind, door, checkpoint, mark):
    write_tokenizer(checkpoint, whole=kind != "vocab.json")
    NAMED[door](checkpoint)
    (checkpoint / "custom.py").write_text(module(mark))
    load_or_refuse(write_gguf(checkpoint) if kind == "gguf" else checkpoint)


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("in_zip", [False, True], ids=["pickle", "torch.save"])
def test_a_pickle_in_the_place_of_a_file(name, in_zip, checkpoint, mark):
    write_tokenizer(checkpoint)
    if name.startswith("model.p") or name.startswith(("pytorch", "consolidated")):
        (checkpoint / "model.safetensors").unlink()
    if in_zip:
        torch.save({"x": Payload(mark)}, checkpoint / name)
    else:
        (checkpoint / name).write_bytes(pickle.dumps(Payload(mark)))
    load_or_refuse(checkpoint / name if name.endswith(".gguf") else checkpoint)


def test_an_index_that_names_a_pickle(checkpoint, mark):
    torch.save({"model.norm.weight": Payload(mark)}, checkpoint / "pytorch_model.bin")
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_or_refuse(checkpoint, (ValueError,)) is None


@pytest.mark.parametrize("name", ["sitecustomize.py", "usercustomize.py", "jinja2.py"])
def test_a_module_that_python_finds(name, checkpoint, mark, monkeypatch):
    """In the working directory, when a process of our own starts there."""
    write_tokenizer(checkpoint)
    (checkpoint / name).write_text(module(mark))
    monkeypatch.chdir(checkpoint)
    monkeypatch.syspath_prepend("")
    llm = LLM(".", dtype="float32", num_blocks=8)
    llm.tokenizer.hf.chat_template = "ab"
    assert llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1)).finished


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_good_loads(whole, checkpoint):
    """The files that the doors are added to."""
    write_tokenizer(checkpoint, whole)
    assert load_or_refuse(checkpoint).tokenizer.encode("ab") == [0, 1]
