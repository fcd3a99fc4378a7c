"""A model shared by ranks: the same answers as from one process, the same on all ranks.

The parts that ranks load are put together again in this process; the exchanges run in two
processes that torchrun starts (tensor_parallel_rank.py), over gloo, on one thread each.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_checkpoint import LAYER, write_gguf
from tensor_parallel_rank import SMALL_POOL, answers
from test_models import FAMILIES, random_model

from nanobatch import LLM, EngineConfig, ModelConfig, ModelRunner
from nanobatch.extensions.ranks import Ranks, join
from nanobatch.extensions.tensor_parallel import Shard
from nanobatch.models.loader import load, make_dummy, save

HERE = Path(__file__).parent
SCRIPT = str(HERE / "tensor_parallel_rank.py")
# A vocabulary that no number of ranks divides, and a bias wherever there may be one.
BIASED = ModelConfig(
    "LlamaForCausalLM", vocab_size=131, hidden_size=64, intermediate_size=96, num_layers=2,
    num_heads=16, num_kv_heads=8, head_dim=8, max_position_embeddings=256, qkv_bias=True,
    o_bias=True, mlp_bias=True,
)  # fmt: skip


def environment(**more):
    gone = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if name not in gone}
    paths = [str(HERE.parent.parent), env.get("PYTHONPATH", "")]
    return env | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A folder with a checkpoint named "biased"."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "biased").mkdir()
    save(make_dummy(BIASED, torch.float32, seed=5), folder / "biased")
    return folder


def serve(folder, device):
    """What each of two ranks found."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", SCRIPT, "serve", str(folder), device],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def served(biased):
    return serve(biased, "cpu")


# ---- the parts ---------------------------------------------------------------------------


@pytest.fixture
def no_sums(monkeypatch):
    monkeypatch.setattr(Ranks, "sum", lambda ranks, x: x)
    monkeypatch.setattr(Ranks, "gather_columns", lambda ranks, x: x)


def parts_and_whole(name, size):
    shards = [Shard(Ranks(rank, size)) for rank in range(size)]
    parts = [load(name, torch.float32, shard=shard).model for shard in shards]
    return parts, load(name, torch.float32).model


@pytest.mark.parametrize(
    "name, size",
    [("tiny", 2), ("biased", 2), ("biased", 8), ("gguf", 2), ("dummy:tiny", 2)]
    + [(family, 2) for family in ("mixtral", "phi4-mini", "gemma2", "starcoder2", "qwen3-moe")],
)
@torch.inference_mode()
def test_what_the_ranks_compute_adds_up_to_the_whole(name, size, biased, no_sums, tmp_path):
    """Each product by itself, so that a part that is left out or counted twice shows."""
    if name == "gguf":
        kv = {f"{LAYER}self_attn.{p}_proj.weight": torch.randn(8, 8) for p in "kv"}
        two = {"attention.head_count_kv": 2}
        name = str(write_gguf(tmp_path, changes=two, weights=kv, tokenizer=False))
    if name in FAMILIES:
        random_model(name).save_pretrained(tmp_path)
        name = str(tmp_path)
    name = str(biased / name) if name == "biased" else name
    parts, whole = parts_and_whole(name, size)
    config = whole.config
    x_TE = torch.randn(5, config.hidden_size)
    token_ids_T = torch.arange(whole.vocab_size)

    def total(values):
        return torch.stack(list(values)).sum(dim=0)

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    close(total(p.embed(token_ids_T) for p in parts), whole.embed(token_ids_T))
    logits_SX = torch.cat([part.lm_head(x_TE) for part in parts], dim=1)
    close(logits_SX[:, : whole.vocab_size], whole.lm_head(x_TE))
    for i, layer in enumerate(whole.layers):
        own = [part.layers[i] for part in parts]
        close(total(p.mlp(x_TE) for p in own), layer.mlp(x_TE))
        heads = [
            p.qkv(x_TE).unflatten(-1, (-1, config.head_dim)).split(p.heads, 1) for p in own
        ]
        q_THD, k_TKD, v_TKD = (torch.cat(part, dim=1) for part in zip(*heads, strict=True))
        close(torch.cat((q_THD, k_TKD, v_TKD), dim=1).flatten(1), layer.qkv(x_TE))
        out_TX = q_THD.flatten(1).chunk(size, dim=1)  # heads, as attention gives them
        summed = total(p.o(x) for p, x in zip(own, out_TX, strict=True))
        close(summed, layer.o(q_THD.flatten(1)))


def test_a_rank_keeps_no_more_than_its_part(biased):
    parts, whole = parts_and_whole(str(biased / "biased"), 4)

    def num_bytes(model):
        return sum(p.untyped_storage().nbytes() for p in model.parameters())

    replicated = sum(p.nbytes for n, p in whole.named_parameters() if "norm" in n or "o.b" in n)
    assert num_bytes(parts[3]) < num_bytes(whole) / 4 + replicated + 4096


def test_a_norm_over_all_heads_is_refused(tmp_path):
    random_model("olmo2", num_attention_heads=4, num_key_value_heads=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 2; with norms over all heads"
    ):
        load(str(tmp_path), torch.float32, shard=Shard(Ranks(0, 2)))


@pytest.mark.parametrize(
    "size, message",
    [
        (4, "tensor_parallel_size is 4; it must divide the model's num_heads, which is 6"),
        (3, "tensor_parallel_size is 3; it must divide the model's num_kv_heads, which is 2"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused_by_name(size, message):
    with pytest.raises(ValueError, match=message):
        load("tiny", torch.float32, shard=Shard(Ranks(0, size)))


def test_an_mlp_that_cannot_be_shared_is_refused_by_name():
    config = ModelConfig("LlamaForCausalLM", 10, 8, 9, 1, 2, 2, 4)
    with pytest.raises(ValueError, match="must divide the model's intermediate_size.* is 9"):
        Shard(Ranks(0, 2)).config(config)


def test_a_tensor_of_another_kind_is_refused_by_name():
    weight = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="size is 2; layers.0.mixer.weight cannot be shared"):
        Shard(Ranks(0, 2)).tensor("layers.0.mixer.weight", weight, BIASED)
    assert Shard(Ranks()).tensor("layers.0.mixer.weight", weight, BIASED) is weight


@pytest.mark.parametrize("size, world_size", [(2, None), (2, "3"), (1, "2")])
def test_another_number_of_processes_is_refused(size, world_size, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    started = world_size or "1"
    wanted = (
        f"tensor_parallel_size is {size}, and .* {started} process.*--nproc-per-node {size}"
    )
    with pytest.raises(ValueError, match=wanted):
        LLM("tiny", tensor_parallel_size=size)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join(1, "cpu") == Ranks()


def test_a_model_loaded_for_another_number_is_refused():
    model = load("tiny", torch.float32, shard=Shard(Ranks(1, 2))).model
    with pytest.raises(ValueError, match="tensor_parallel_size is 1; .* loaded for 2"):
        ModelRunner(model, EngineConfig())


# ---- two processes -----------------------------------------------------------------------


def check_against_one(served, model, folder):
    name, dtype = model.split()
    name = "tiny" if name == "tiny" else str(folder / name)
    alone = answers(LLM(name, dtype=dtype, device="cpu", **SMALL_POOL))
    assert alone["preempted"] > 0
    for found in served:
        for what in ("greedy", "seeded", "preempted"):
            assert found[model][what] == alone[what], what
        close = {"rtol": 0, "atol": 1e-4}
        torch.testing.assert_close(
            torch.tensor(found[model]["logprobs"]), torch.tensor(alone["logprobs"]), **close
        )


@pytest.mark.parametrize("model", ["tiny float32", "biased float32"])
def test_two_ranks_say_what_one_says(served, biased, model):
    check_against_one(served, model, biased)


@pytest.mark.gpu
def test_two_gpus_say_what_a_cpu_says(biased):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    served = serve(biased, "cuda")
    check_against_one(served, "biased float32", biased)
    assert served[0]["other draws"] == served[1]["other draws"]


def test_in_bfloat16_the_cpu_s_kernels_take_parts(served):
    """Laid out for tiles where there are some. Sums of rounded parts: near, not equal."""
    alone = answers(LLM("tiny", dtype="float32", **SMALL_POOL))
    for found in served:
        logprobs = torch.tensor(found["tiny bfloat16"]["logprobs"])
        error = (logprobs.exp() - torch.tensor(alone["logprobs"]).exp()).abs().max()
        assert error < 0.03


def test_both_ranks_say_the_same(served):
    """To the last bit of a log-probability and of a time; what rank 1 draws is not asked."""
    first, second = served
    for key in ("tiny float32", "tiny bfloat16", "biased float32", "metrics", "other draws"):
        assert first[key] == second[key], key
    assert first["other draws"] == first["biased float32"]["seeded"]


def test_what_cannot_be_is_refused_on_both_ranks(served):
    for rank, found in enumerate(served):
        other_config, nine_heads, saving, not_shared = found["refused"]
        assert f"on rank {rank}; it must be the same on all 2 ranks" in other_config
        assert "tensor_parallel_size is 2; it must divide the model's num_heads" in nine_heads
        assert "one of 2 ranks' parts cannot be saved" in saving
        assert "tensor_parallel_size is 1, and there are 2 processes" in not_shared


def test_the_ladder_on_two_ranks_is_reported_by_one(served, biased):
    report = json.loads((biased / "bench-0.json").read_text())
    assert list(report["systems"])[0] == "sequential" and len(report["systems"]) == 5
    assert "greedy tokens: the same in all" in served[0]["printed"]
    assert served[1]["printed"] == "" and not (biased / "bench-1.json").exists()


def test_a_step_that_fails_on_one_rank_fails_on_the_other(served):
    (lost, lost_again), (own, own_again) = (found["failed"] for found in served)
    assert own == "MemoryError: rank 1 alone"
    assert lost.startswith("RuntimeError") and "peer" in lost
    for message in (lost_again, own_again):
        assert message == "RuntimeError: a rank has failed; the others cannot go on without it"
    assert served[0]["seconds"] < 15


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other(victim, tmp_path):
    """Without torchrun, which would end the other itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "forever", str(tmp_path), "cpu"],
            env=environment(RANK=str(rank), **where), stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for _ in range(600):
            if len(list(tmp_path.glob("ready-*"))) == 2:
                break
            time.sleep(0.1)
        ranks[victim].kill()
        _, said = ranks[1 - victim].communicate(timeout=15)
        assert ranks[1 - victim].returncode != 0 and "RuntimeError" in said, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
