"""The families of models, against `transformers`: the same logits, the same greedy tokens.

For each family a tiny random checkpoint is made with `transformers`, saved, and loaded as a
user would. Its norms and biases are random too: as they are initialised (1 and 0) a mistake
with them would not show. Two oracles, both dense and neither of them ours:

    model(prompt).logits            every position of every prompt, whatever the chunks and
                                    blocks (invariant 12, faults 24, 26, 27, 28, 30)
    model.generate(do_sample=False) the tokens of each prompt alone, against those of the
                                    engine with all prompts in one batch (invariant 12)

The cache is full of NaN before each run (invariant 14). Then the same weights in other
clothes: sharded, in bfloat16, under a config.json of transformers 4, and as GGUF, written
with llama.cpp's own names from the `gguf` package and its order of rows.
"""

import dataclasses
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from nanobatch import LLM, EngineConfig, LLMEngine, ModelRunner, SamplingParams
from nanobatch.attention import PagedAttend
from nanobatch.batch import Row, pack
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.models.decoder import Decoder, LMHead
from nanobatch.models.variants import ScaledEmbedding, make_decoder
from nanobatch.utils.arithmetic import cdiv

gguf = pytest.importorskip("gguf")

SEEDS = {"mixtral": 1}  # else 0: whose greedy tokens are clear
IS_TRANSFORMERS_4 = transformers.__version__.startswith("4.")
VOCAB_SIZE = 200
PROMPT_LENS = (23, 1, 9, 16)
NUM_NEW_TOKENS = 12
CHUNKS = (1, 2, 3, 5, 8)
ATOL = 1e-4

# Waves of up to 8 tokens are kept, those beyond 32 stretched: both happen in these prompts.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# In a context of 16 the first of 16 pairs turns 2.5 times; the ramp crosses several of them.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
}


def default_rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


def rope_of(settings: dict) -> dict:
    """rope_parameters of the layers that see all keys."""
    rope = settings.get("rope_parameters", default_rope(10000.0))
    return rope.get("full_attention", rope)


def as_transformers_4_writes_it(settings: dict, type_key: str) -> dict:
    """The same settings without rope_parameters, which version 5 brought."""
    settings, rope = dict(settings), dict(rope_of(settings))
    local = settings.pop("rope_parameters", {}).get("sliding_attention")
    if local is not None:
        settings["rope_local_base_freq"] = local["rope_theta"]
    for key in {"rope_theta", "partial_rotary_factor"} & rope.keys():
        settings[key] = rope.pop(key)
    kind = rope.pop("rope_type")
    settings["rope_scaling"] = None if kind == "default" else {type_key: kind, **rope}
    return settings


def heads(num: int, num_kv: int, head_dim: int) -> dict:
    return {"num_attention_heads": num, "num_key_value_heads": num_kv, "head_dim": head_dim}


# Groups of 1, 3, 4, 8 query heads and head dimensions 32, 64, 80 all occur.
FAMILIES = {
    "llama2": (LlamaConfig, heads(2, 2, 32)),
    "llama3.1": (LlamaConfig, heads(4, 1, 64) | {"rope_parameters": LLAMA3_ROPE}),
    "smollm2": (LlamaConfig, heads(6, 2, 64) | {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, heads(6, 2, 32) | {"sliding_window": 6}),
    "qwen2": (Qwen2Config, heads(8, 1, 32) | {"rope_parameters": default_rope(300.0)}),
    "qwen2-yarn": (Qwen2Config, heads(4, 2, 32) | {"rope_parameters": YARN_ROPE}),
    "llama-yarn": (
        LlamaConfig,
        heads(4, 2, 32)
        | {"rope_parameters": YARN_ROPE | {"truncate": False, "attention_factor": 1.3}},
    ),
    "qwen2-window-above": (
        Qwen2Config,
        heads(4, 1, 32)
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        Qwen2Config,
        heads(4, 4, 32)
        | {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": (Qwen3Config, heads(3, 1, 80) | {"tie_word_embeddings": True}),
    "qwen3-bias": (Qwen3Config, heads(4, 2, 32) | {"attention_bias": True}),
    "phi3": (Phi3Config, heads(4, 2, 24) | {"sliding_window": 7}),
    "phi4-mini": (
        Phi3Config,
        heads(4, 2, 24)
        | {"rope_parameters": default_rope(300.0) | {"partial_rotary_factor": 0.75}},
    ),
    "olmo2": (Olmo2Config, heads(3, 1, 32)),
    "granite": (
        GraniteConfig,
        heads(3, 1, 32)
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.25,
        },
    ),
    "gemma2": (
        Gemma2Config,
        heads(4, 2, 32)
        | {
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        heads(4, 1, 32)
        | {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": default_rope(100.0),
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
            },
        },
    ),
    "starcoder2": (Starcoder2Config, heads(6, 2, 16) | {"sliding_window": 9}),
    "mixtral": (MixtralConfig, heads(4, 2, 24) | {"num_local_experts": 4}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        heads(4, 2, 32)
        | {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-every-other": (
        Qwen3MoeConfig,
        heads(4, 2, 32)
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
        },
    ),
}


def random_model(family: str, **changes):
    """A transformers model with weights large enough for logits that differ.

    Its attention is the plain one: version 4's other ones leave out Gemma 2's softcap.
    """
    config_class, shape = FAMILIES[family]
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    settings |= shape | changes
    if IS_TRANSFORMERS_4:
        type_key = "type" if config_class is Phi3Config else "rope_type"
        settings = as_transformers_4_writes_it(settings, type_key)
    torch.manual_seed(SEEDS.get(family, 0))
    config = config_class(**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def random_prompts(seed: int = 7, lens: tuple[int, ...] = PROMPT_LENS) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(VOCAB_SIZE) for _ in range(n)] for n in lens]


@dataclasses.dataclass
class Checkpoint:
    """A saved model, and what transformers says about the prompts."""

    name: str
    hf: torch.nn.Module
    path: Path
    prompts: list[list[int]]

    def logits(self) -> list[torch.Tensor]:
        return [self.hf(torch.tensor([prompt])).logits[0] for prompt in self.prompts]

    def load(self, **config) -> LLM:
        return LLM(str(self.path), dtype="float32", **config)


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    model = random_model(request.param)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return Checkpoint(request.param, model, path, random_prompts())


def save(family: str, path: Path, **kwargs) -> Checkpoint:
    model = random_model(family)
    model.save_pretrained(path, **kwargs)
    return Checkpoint(family, model, path, random_prompts())


def paged_logits(
    model: Decoder, prompts: list[list[int]], chunk: int = 1000, block_size: int = 4
) -> list[torch.Tensor]:
    """Logits of every position, the prompts computed chunk by chunk in common steps.

    Each prompt starts one step after the one before it, so that a step mixes first chunks
    with later ones. Blocks lie shuffled in a cache of NaN.
    """
    config = model.config
    num_blocks = [cdiv(len(prompt), block_size) for prompt in prompts]
    ids = Random(7).sample(range(sum(num_blocks) + 2), sum(num_blocks))
    tables = [[ids.pop() for _ in range(n)] for n in num_blocks]
    shape = (sum(num_blocks) + 2, config.num_kv_heads, block_size, config.head_dim)
    caches = [
        KVCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        for _ in range(config.num_layers)
    ]
    pieces = [[] for _ in prompts]
    for step in range(len(prompts) + cdiv(max(map(len, prompts)), chunk)):
        starts = [(step - i) * chunk for i in range(len(prompts))]
        now = [i for i, start in enumerate(starts) if 0 <= start < len(prompts[i])]
        if not now:
            continue
        rows = [
            Row(prompts[i][starts[i] : starts[i] + chunk], starts[i], tables[i]) for i in now
        ]
        batch = pack(rows, block_size)
        with torch.inference_mode():
            hidden = model(batch.token_ids_T, batch.positions_T, PagedAttend(batch, caches))
            logits = model.logits(hidden)
        for i, piece in zip(
            now, logits.split([len(row.token_ids) for row in rows]), strict=True
        ):
            pieces[i].append(piece)
    return [torch.cat(p) for p in pieces]


def decoder_of(llm: LLM) -> Decoder:
    return llm.engine.runner.model


def assert_logits_close(found, wanted, atol: float = ATOL, what: str = "") -> None:
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(
            ours, theirs, atol=atol, rtol=0, msg=lambda m, i=i: f"{what} prompt {i}: {m}"
        )


# ---- each family -----------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_logits_of_every_position_for_every_chunk_size(checkpoint, block_size):
    model, wanted = decoder_of(checkpoint.load()), checkpoint.logits()
    for chunk in (*CHUNKS, 1000):
        found = paged_logits(model, checkpoint.prompts, chunk, block_size)
        assert_logits_close(found, wanted, what=f"{checkpoint.name}, chunk {chunk},")


def generate_alone(checkpoint: Checkpoint, prompt: list[int], **kwargs) -> list[int]:
    """What transformers makes of one prompt; the argmax must not hang on rounding."""
    out = checkpoint.hf.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **{"max_new_tokens": NUM_NEW_TOKENS} | kwargs,
    )
    best = torch.cat(out.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 10 * ATOL, "a tie: take another seed"
    return out.sequences[0, len(prompt) :].tolist()


def test_greedy_tokens_of_a_ragged_batch(checkpoint):
    wanted = [generate_alone(checkpoint, prompt) for prompt in checkpoint.prompts]
    assert len({token for tokens in wanted for token in tokens}) > NUM_NEW_TOKENS
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
    model = decoder_of(checkpoint.load())
    budgets = (*CHUNKS, 64)  # the chunk size, while nobody decodes
    for budget, block_size in zip(budgets, (1, 4, 16) * 2, strict=True):
        config = EngineConfig(
            max_num_batched_tokens=budget, max_num_seqs=min(budget, 4), block_size=block_size
        )
        runner = ModelRunner(model, config)
        engine = LLMEngine(runner.config, runner)
        ids = [engine.add_request(prompt, params) for prompt in checkpoint.prompts]
        outs = {}
        while engine.has_unfinished():
            outs |= {out.request_id: out for out in engine.step()}
        assert [outs[i].token_ids for i in ids] == wanted, f"{budget=} {block_size=}"
        assert {out.finish_reason for out in outs.values()} == {"length"}


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama3.1", {"rope_divisors": None}),
        ("llama3.1", {"rope_theta": 10000.0}),
        ("qwen2-yarn", {"rope_divisors": None}),
        ("qwen2-yarn", {"rope_attention_factor": 1.0}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen2-window-above", {"full_attention_layers": frozenset()}),
        ("qwen2-layer-types", {"full_attention_layers": frozenset({0})}),
        ("qwen3", {"qk_norm": None}),
        ("qwen3-bias", {"o_bias": False}),
        ("phi3", {"sliding_window": 8}),
        ("phi4-mini", {"partial_rotary_dim": 16}),
        ("phi4-mini", {"partial_rotary_dim": None}),
        ("olmo2", {"qk_norm": None}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"attention_multiplier": None}),
        ("granite", {"logits_scaling": 1.0}),
        ("gemma2", {"embedding_multiplier": 1.0}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"activation": "silu"}),
        ("gemma2", {"full_attention_layers": frozenset()}),
        ("gemma2", {"post_norm": False}),
        ("gemma3", {"local_rope_theta": None}),
        ("gemma3", {"rope_divisors": None}),
        ("starcoder2", {"norm": "rms"}),
        ("starcoder2", {"activation": "silu"}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3-moe", {"norm_topk_prob": False}),
    ],
)
def test_each_difference_between_families_shows_in_the_logits(family, changes, tmp_path):
    """Else the tests above could not tell whether it is right."""
    checkpoint = save(family, tmp_path)
    model = decoder_of(checkpoint.load())
    other = make_decoder(dataclasses.replace(model.config, **changes))
    other.load_state_dict(model.state_dict(), strict=False, assign=True)
    found = paged_logits(other, checkpoint.prompts)
    differences = [(a - b).abs().max() for a, b in zip(found, checkpoint.logits(), strict=True)]
    assert max(differences) > 100 * ATOL


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 9 for i in range(9)],
    "long_factor": [1.0 + i * i / 8 for i in range(9)],
}


@pytest.mark.parametrize("max_model_len", [None, 33, 32, 20])
def test_longrope_turns_by_the_longest_sequence_that_there_may_be(max_model_len, tmp_path):
    """transformers goes by the sequence at hand: the same, for those on the same side of 32."""
    settings = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
    model = random_model("phi4-mini", **settings)
    model.save_pretrained(tmp_path)
    is_short = max_model_len is not None and max_model_len <= 32
    prompts = random_prompts(lens=(8, 3) if is_short else (61, 40))
    checkpoint = Checkpoint("longrope", model, tmp_path, prompts)
    llm = checkpoint.load(max_model_len=max_model_len)
    for chunk in (3, 1000):
        assert_logits_close(paged_logits(decoder_of(llm), prompts, chunk), checkpoint.logits())
    if max_model_len is None or is_short:
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
        outs = llm.generate(prompts, params, progress=False)
        wanted = [generate_alone(checkpoint, prompt) for prompt in prompts]
        assert [out.token_ids for out in outs] == wanted


def test_longrope_that_was_stretched_over_nothing_is_short(tmp_path):
    """The old context is all that there is: no sequence is longer, whatever max_model_len."""
    settings = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}
    model = random_model("phi4-mini", **settings)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint("longrope", model, tmp_path, random_prompts())
    assert_logits_close(
        paged_logits(decoder_of(checkpoint.load()), checkpoint.prompts), checkpoint.logits()
    )


def test_yarn_s_context_is_the_old_one_times_its_factor(tmp_path):
    checkpoint = save("qwen2-yarn", tmp_path)
    edit_config(tmp_path, lambda config: config.update(max_position_embeddings=16))
    assert decoder_of(checkpoint.load(max_model_len=64)).config.max_position_embeddings == 64
    with pytest.raises(ValueError, match="max_model_len is 65"):
        checkpoint.load(max_model_len=65)


# ---- the same weights in other clothes -------------------------------------------------


def assert_same_weights(model: Decoder, other: Decoder) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


def test_a_sharded_checkpoint_is_the_same_model(tmp_path):
    whole = save("llama2", tmp_path / "whole")
    sharded = save("llama2", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    assert_same_weights(decoder_of(sharded.load()), decoder_of(whole.load()))


def test_a_bfloat16_checkpoint_loads_as_float32(tmp_path):
    random_model("llama2").to(torch.bfloat16).save_pretrained(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = Checkpoint("llama2", hf.requires_grad_(False), tmp_path, random_prompts())
    model = decoder_of(checkpoint.load())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_logits_close(paged_logits(model, checkpoint.prompts), checkpoint.logits())


def test_the_largest_logits_are_exact_in_bfloat16():
    """Those of float32 products; the others are rounded to bfloat16."""
    head, generator = LMHead(64, 256), torch.Generator().manual_seed(0)
    weight_VE = torch.randn(256, 64, generator=generator).bfloat16()
    head.weight = torch.nn.Parameter(weight_VE, requires_grad=False)
    hidden_SE = torch.randn(3, 64, generator=generator).bfloat16()
    exact_SV = hidden_SE.float() @ weight_VE.float().T
    found_SV = head(hidden_SE)
    best_SX = exact_SV.topk(24).indices
    torch.testing.assert_close(
        found_SV.gather(1, best_SX), exact_SV.gather(1, best_SX), atol=1e-4, rtol=0
    )
    assert (found_SV - exact_SV).abs().max() > 1e-2, "the others"


def test_an_embedding_s_multiplier_is_rounded_as_in_transformers():
    ids, size = torch.arange(8), 48
    theirs = Gemma3TextScaledWordEmbedding(8, size, 0, embed_scale=size**0.5).bfloat16()
    ours = ScaledEmbedding(theirs.weight, size**0.5)
    assert torch.equal(ours(ids), theirs(ids))


def test_bfloat16_is_near_float32(tmp_path):
    checkpoint = save("qwen3", tmp_path)
    llm = LLM(str(tmp_path), dtype="bfloat16")
    assert {p.dtype for p in decoder_of(llm).parameters()} == {torch.bfloat16}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    for prompt, logits in zip(checkpoint.prompts, checkpoint.logits(), strict=True):
        [out] = llm.generate([prompt], params, progress=False)
        [(token, logprob)] = out.logprobs[0].items()
        assert logprob == pytest.approx(logits[-1].log_softmax(-1)[token].item(), abs=0.3)


@pytest.mark.parametrize("family, tied", [("smollm2", True), ("llama2", False)])
def test_tied_embeddings_share_their_memory(family, tied, tmp_path):
    model = decoder_of(save(family, tmp_path).load())
    assert (model.embed.weight.data_ptr() == model.lm_head.weight.data_ptr()) == tied


def edit_config(path: Path, edit) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


def logits_after_edit(checkpoint: Checkpoint, edit) -> list[torch.Tensor]:
    edit_config(checkpoint.path, edit)
    return paged_logits(decoder_of(checkpoint.load()), checkpoint.prompts)


ROPE_KEYS = (
    "rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq",
    "partial_rotary_factor",
)  # fmt: skip
ROPE_FAMILIES = [name for name, (_, shape) in FAMILIES.items() if "rope_parameters" in shape]


@pytest.mark.parametrize("type_key", ["rope_type", "type", "version 5"])
@pytest.mark.parametrize("family", ROPE_FAMILIES)
def test_rope_as_transformers_4_and_5_write_it(family, type_key, tmp_path):
    """Whichever is installed."""
    rope = {"rope_parameters": FAMILIES[family][1]["rope_parameters"]}
    if type_key != "version 5":
        rope = as_transformers_4_writes_it(rope, type_key)

    def edit(config):
        for key in ROPE_KEYS:
            config.pop(key, None)
        config.update(rope)

    checkpoint = save(family, tmp_path)
    assert_logits_close(logits_after_edit(checkpoint, edit), checkpoint.logits())


def test_windows_by_max_window_layers_as_transformers_4_writes_them(tmp_path):
    checkpoint = save("qwen2-window-above", tmp_path)
    found = logits_after_edit(checkpoint, lambda config: config.pop("layer_types"))
    assert_logits_close(found, checkpoint.logits())


def test_a_window_that_is_switched_off_is_off(tmp_path):
    """Qwen2 checkpoints carry a sliding_window that use_sliding_window says to ignore."""

    def edit(config):
        config.pop("layer_types")
        config.update(sliding_window=3, max_window_layers=0)
        assert config["use_sliding_window"] is False

    checkpoint = save("qwen2", tmp_path)
    assert_logits_close(logits_after_edit(checkpoint, edit), checkpoint.logits())


def test_the_eos_list_of_generation_config_counts(tmp_path):
    checkpoint = save("llama2", tmp_path)
    free = [generate_alone(checkpoint, prompt) for prompt in checkpoint.prompts]
    eos = [free[0][4], free[2][6]]
    ignored = free[0][1]  # config.json's own: generation_config.json overrules it
    edit_config(tmp_path, lambda config: config.update(eos_token_id=ignored))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    wanted = [generate_alone(checkpoint, p, eos_token_id=eos) for p in checkpoint.prompts]
    assert 1 < len(wanted[0]) < NUM_NEW_TOKENS and len(wanted[2]) < NUM_NEW_TOKENS

    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
    outs = checkpoint.load().generate(checkpoint.prompts, params, progress=False)
    assert [out.token_ids for out in outs] == wanted
    ended = ["stop" if tokens[-1] in eos else "length" for tokens in wanted]
    assert [out.finish_reason for out in outs] == ended


def test_without_generation_config_the_eos_of_config_counts(tmp_path):
    checkpoint = save("llama2", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    [prompt] = checkpoint.prompts[:1]
    free = generate_alone(checkpoint, prompt)
    eos = free[3]
    edit_config(tmp_path, lambda config: config.update(eos_token_id=eos))
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
    [out] = checkpoint.load().generate([prompt], params, progress=False)
    assert out.token_ids == free[: free.index(eos) + 1]


def test_a_model_s_own_sampling_settings_as_transformers_reads_them(tmp_path):
    checkpoint = save("llama2", tmp_path)
    settings = {"do_sample": False, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.4,
                "max_new_tokens": 9, "eos_token_id": None}  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    outs = checkpoint.load().generate(checkpoint.prompts, "model", progress=False)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path, pad_token_id=0)
    for prompt, out in zip(checkpoint.prompts, outs, strict=True):
        wanted = checkpoint.hf.generate(torch.tensor([prompt]), generation_config=theirs)
        assert out.token_ids == wanted[0, len(prompt) :].tolist()
        assert len(out.token_ids) == 9


# ---- GGUF ------------------------------------------------------------------------------

GGUF_ARCHS = {
    "llama3.1": gguf.MODEL_ARCH.LLAMA,
    "smollm2": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
F32, F16, Q8_0 = (getattr(gguf.GGMLQuantizationType, n) for n in ("F32", "F16", "Q8_0"))


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """q's or k's rows as llama.cpp's convert_hf_to_gguf.py permutes them for a Llama."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def kind_of(weight: np.ndarray, wanted: gguf.GGMLQuantizationType):
    """A matrix is of the wanted kind where its rows are whole blocks of numbers."""
    is_quantizable = weight.ndim == 2 and weight.shape[1] % 32 == 0
    return wanted if is_quantizable else F32


def write_gguf(
    path: Path, model, family: str, kind: gguf.GGMLQuantizationType, rope: dict | None = None
) -> None:
    """The file that llama.cpp would make of the model, its matrices in numbers of one kind.

    rope: its rope_parameters, if they are not the family's.
    """
    arch, config = GGUF_ARCHS[family], model.config
    rope = rope or rope_of(FAMILIES[family][1])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":  # a factor without a type is linear
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_tokenizer(writer)
    for name, parameter in model.named_parameters():  # a tied lm_head is not among them
        weight = parameter.numpy()
        if arch == gguf.MODEL_ARCH.LLAMA and "q_proj" in name:
            weight = llama_cpp_rows(weight, config.num_attention_heads)
        if arch == gguf.MODEL_ARCH.LLAMA and "k_proj" in name:
            weight = llama_cpp_rows(weight, config.num_key_value_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        own_kind = kind_of(weight, kind)
        weight = gguf.quants.quantize(weight, own_kind)
        writer.add_tensor(gguf_name, weight, raw_dtype=own_kind)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(model, rope["rope_theta"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_factors(model, rope_theta: float) -> np.ndarray:
    """What transformers' stretched frequencies have been divided by."""
    config, stretched = model.config, model.model.rotary_emb.inv_freq.double()
    exponent = torch.arange(0, config.head_dim, 2).double() / config.head_dim
    plain = rope_theta**-exponent
    return (plain / stretched).float().numpy()


EOS, THE = VOCAB_SIZE - 1, VOCAB_SIZE - 2


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level vocabulary: printable ASCII at its own places, two merges, an end."""
    tokens = [f"<unused{i}>" for i in range(VOCAB_SIZE)]
    for byte in range(ord("!"), ord("~") + 1):
        tokens[byte] = chr(byte)
    tokens[ord(" ")] = "\u0120"  # the letter that byte-level BPE writes for a space
    tokens[-3:] = ["th", "the", "<|end|>"]
    types = [gguf.TokenType.NORMAL] * (VOCAB_SIZE - 1) + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(EOS)


def with_numbers_of(model, kind: gguf.GGMLQuantizationType):
    """The model with its matrices rounded to what the kind can hold."""
    for parameter in model.parameters():
        own_kind = kind_of(parameter.numpy(), kind)
        stored = gguf.quants.quantize(parameter.numpy(), own_kind)
        parameter.data = torch.from_numpy(gguf.quants.dequantize(stored, own_kind).copy())
    return model


@pytest.mark.parametrize("kind", [F32, F16, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", list(GGUF_ARCHS))
def test_gguf_gives_the_logits_of_its_numbers(family, kind, tmp_path):
    model, prompts = random_model(family), random_prompts()
    write_gguf(tmp_path / "model.gguf", model, family, kind)
    with_numbers_of(model, kind).save_pretrained(tmp_path)
    from_gguf, from_safetensors = (
        decoder_of(LLM(str(path), dtype="float32"))
        for path in (tmp_path / "model.gguf", tmp_path)
    )
    assert_same_weights(from_gguf, from_safetensors)
    wanted = Checkpoint(family, model, tmp_path, prompts).logits()
    assert_logits_close(paged_logits(from_gguf, prompts), wanted)


@pytest.mark.parametrize("family", ["smollm2", "qwen2"])
@pytest.mark.parametrize("rope", [
    default_rope(300.0) | {"rope_type": "linear", "factor": 4.0},
    {key: YARN_ROPE[key] for key in YARN_ROPE if not key.startswith("beta")},
], ids=lambda rope: rope["rope_type"])  # fmt: skip
def test_gguf_s_scaled_rope(family, rope, tmp_path):
    model, prompts = random_model(family, rope_parameters=rope), random_prompts()
    write_gguf(tmp_path / "model.gguf", model, family, F32, rope)
    llm = LLM(str(tmp_path / "model.gguf"), dtype="float32")
    wanted = Checkpoint(family, model, tmp_path, prompts).logits()
    assert_logits_close(paged_logits(decoder_of(llm), prompts), wanted)
    plain = Checkpoint(family, random_model(family), tmp_path, prompts).logits()
    differences = [(a - b).abs().max() for a, b in zip(wanted, plain, strict=True)]
    assert max(differences) > 100 * ATOL  # else this could not tell


def test_rounding_to_q8_shows_in_the_logits():
    """Else the test above could not tell a dequantized weight from the one before."""
    [prompt] = random_prompts()[:1]
    exact, rounded = (
        with_numbers_of(random_model("qwen3"), kind)(torch.tensor([prompt])).logits
        for kind in (F32, Q8_0)
    )
    assert (exact - rounded).abs().max() > 100 * ATOL


@pytest.mark.parametrize("family, head_dim", [("smollm2", 16), ("qwen3", 128)])
def test_transformers_reads_our_gguf_alike(family, head_dim, tmp_path):
    """The file of these tests is one that others read, and they read the same model.

    (The head dimensions are the ones that transformers takes for granted in a GGUF.)
    """
    model = random_model(family, head_dim=head_dim)
    write_gguf(tmp_path / "model.gguf", model, family, F32)
    hf = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    prompts = random_prompts()
    found = paged_logits(
        decoder_of(LLM(str(tmp_path / "model.gguf"), dtype="float32")), prompts
    )
    wanted = Checkpoint(family, hf.requires_grad_(False), tmp_path, prompts).logits()
    assert_logits_close(found, wanted)


def test_gguf_brings_its_tokenizer(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model("smollm2"), "smollm2", F32)
    llm = LLM(str(tmp_path / "model.gguf"), dtype="float32")
    assert llm.tokenizer.encode("the hat") == [THE, *b" hat"]
    assert EOS in llm.engine.runner.eos_token_ids
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    from_text, from_ids = llm.generate(["the hat", [THE, *b" hat"]], params, progress=False)
    assert from_text.token_ids == from_ids.token_ids
