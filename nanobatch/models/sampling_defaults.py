"""The sampling settings that come with a model: generation_config.json, or general.sampling.*
in a GGUF file.

    {"do_sample": true, "temperature": 0.7, "top_p": 0.8, "eos_token_id": 2}
    SamplingParams(temperature=0.7, top_p=0.8)

They hold where a user asks for them (params="model"). As in vLLM only what the file says
counts: what it leaves out is as in SamplingParams, not as in transformers, which is greedy
without do_sample and keeps the 50 best tokens with it. `"do_sample": false` is temperature 0.
max_length is not read: it counts the prompt.

Always holds: a setting that is malformed, or would change the tokens and is not supported, is
refused when it is asked for, by file and key; it does not stop a model from loading.

Sources: GenerationConfig of Hugging Face transformers; get_default_sampling_params of vLLM; the
keys of GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nanobatch.request import SamplingParams
from nanobatch.utils.checks import check_bool

FIELDS = {  # of SamplingParams, by the file's key
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}
OFF = {  # not supported, unless it has this value, or none, or is empty
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "guidance_scale",
         "encoder_repetition_penalty", "general.sampling.penalty_repeat"),
        1,
    ),
    **dict.fromkeys(
        ("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size",
         "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "token_healing",
         "general.sampling.mirostat", "general.sampling.xtc_probability"),
        0,
    ),
    **dict.fromkeys(
        ("top_h", "bad_words_ids", "force_words_ids", "constraints", "sequence_bias",
         "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
         "forced_eos_token_id", "exponential_decay_length_penalty", "stop_strings",
         "watermarking_config", "dola_layers", "general.sampling.sequence"),
        None,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's settings; without any, SamplingParams().

    Attributes:
        where: the file, for errors.
        settings: what it says, with other keys among it.
    """

    where: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)

    def params(self) -> SamplingParams:
        """Raise ValueError if a setting is malformed or not supported."""
        chosen = {}
        for key, name in FIELDS.items():
            value = self.settings.get(key)
            if value is None:
                continue
            try:
                SamplingParams(**{name: value})
            except ValueError as error:
                raise ValueError(f"{self.where}: {key}: {error}") from None
            chosen[name] = value
        for key, off in OFF.items():
            value = self.settings.get(key)
            if value not in (None, off, [], {}, ""):
                raise ValueError(
                    f"{self.where}: {key} is {value!r}; it is not supported, unless it is {off}"
                )
        return SamplingParams(**chosen | self._greedy())

    def _greedy(self) -> dict:
        do_sample = self.settings.get("do_sample")
        if do_sample is not None:
            check_bool(f"{self.where}: do_sample", do_sample)
        return {"temperature": 0.0} if do_sample is False else {}
