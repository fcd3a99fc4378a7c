"""The sampling settings that come with a model, and params="model".

The oracle is the request with the same settings written out, and the same seed of the engine.
That transformers means the same by them is tested in test_models.py.
"""

import json
import math

import pytest
from small_checkpoint import load, write_gguf

from nanobatch import LLM, SamplingParams
from nanobatch.models.sampling_defaults import FIELDS, OFF, SamplingDefaults

PROMPTS = [[1, 2, 3], [7, 5]]
SETTINGS = {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.02,
            "repetition_penalty": 1.3, "max_new_tokens": 6}  # fmt: skip
PARAMS = SamplingParams(
    temperature=0.6, top_k=7, top_p=0.9, min_p=0.02, repetition_penalty=1.3, max_tokens=6
)


def with_settings(checkpoint, settings) -> LLM:
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    return load(checkpoint, num_blocks=16)


def token_ids(outs):
    return [out.token_ids for out in outs]


def test_model_stands_for_the_settings_everywhere(checkpoint):
    """generate, for all or for one; stream. Without it they are not used."""

    def fresh():
        return with_settings(checkpoint, SETTINGS)

    assert fresh().default_params == PARAMS
    wanted = token_ids(fresh().generate(PROMPTS, PARAMS, False))
    assert token_ids(fresh().generate(PROMPTS, "model", False)) == wanted
    assert token_ids(fresh().generate(PROMPTS, ["model", PARAMS], False)) == wanted
    [*_, last] = fresh().stream(PROMPTS[0], "model")
    assert last.token_ids == wanted[0]
    without = token_ids(fresh().generate(PROMPTS, None, False))
    assert without == token_ids(fresh().generate(PROMPTS, SamplingParams(), False)) != wanted


def test_chat_takes_them_too(checkpoint):
    llm = with_settings(checkpoint, SETTINGS | {"max_new_tokens": 3})
    llm.tokenizer = type("Chat", (), {"apply_chat_template": lambda self, m: PROMPTS[0]})()
    message = {"role": "user", "content": "x"}
    assert len(llm.chat([message], "model").token_ids) == 3


def test_without_sampling_the_best_token_is_taken():
    settings = SETTINGS | {"do_sample": False}
    assert SamplingDefaults("some/file", settings).params().temperature == 0


@pytest.mark.parametrize("params", ["greedy", "", "Model"])
def test_another_word_is_refused(params, checkpoint):
    llm = with_settings(checkpoint, SETTINGS)
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=f"params is '{params}'.*'model'"):
            ask(PROMPTS[0], params)
    with pytest.raises(ValueError, match=f"params is '{params}'"):
        llm.generate(PROMPTS, ["model", params])
    assert not llm.engine.has_unfinished()


def test_a_model_without_settings_has_ours(checkpoint):
    assert load(checkpoint).default_params == SamplingParams()
    assert with_settings(checkpoint, {"eos_token_id": 3}).default_params == SamplingParams()
    assert LLM("dummy:tiny", num_blocks=4).default_params == SamplingParams()
    nothing = dict.fromkeys(SETTINGS) | {"max_length": 20, "pad_token_id": 0}
    assert with_settings(checkpoint, nothing).default_params == SamplingParams()


def test_those_of_a_gguf_file(tmp_path):
    keys = {"temp": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.0}
    file = write_gguf(tmp_path, more={f"general.sampling.{k}": v for k, v in keys.items()})
    params = load(file, num_blocks=4).default_params
    assert params == SamplingParams(temperature=0.5, top_k=7, top_p=0.75, min_p=0.125)
    file = write_gguf(tmp_path, more={"general.sampling.mirostat": 2})
    llm = load(file, num_blocks=4)
    with pytest.raises(ValueError, match="model.gguf: general.sampling.mirostat is 2"):
        llm.generate([1], "model")


# ---- settings that are refused ------------------------------------------------------------

BAD = ["0.7", [0.7], {}, True, math.nan, math.inf, -7]


@pytest.mark.parametrize("key", FIELDS)
def test_a_malformed_setting_is_named(key):
    for value in BAD:
        with pytest.raises(ValueError, match=f"some/file: {key}: .* is "):
            SamplingDefaults("some/file", {key: value}).params()


@pytest.mark.parametrize("value", ["false", 0, [], math.nan])
def test_do_sample_is_a_bool(value):
    with pytest.raises(ValueError, match="some/file: do_sample is"):
        SamplingDefaults("some/file", {"do_sample": value}).params()


@pytest.mark.parametrize("key", OFF)
def test_what_is_not_supported_is_named_unless_it_is_off(key):
    for off in (OFF[key], None, []):
        assert SamplingDefaults("some/file", {key: off}).params() == SamplingParams()
    for value in (2, 0.5, "x", [1], math.nan):
        with pytest.raises(ValueError, match=f"some/file: {key} is "):
            SamplingDefaults("some/file", {key: value}).params()


def test_a_bad_setting_stops_nothing_until_it_is_asked_for(checkpoint):
    llm = with_settings(checkpoint, {"temperature": "hot", "do_sample": "maybe"})
    assert llm.generate([1], SamplingParams(max_tokens=2), False)[0].finished
    with pytest.raises(ValueError, match="generation_config.json: temperature: "):
        llm.generate([1], "model")
    assert not llm.engine.has_unfinished()
