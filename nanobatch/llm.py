"""What users call: a model by name, text in, text out.

    llm = LLM("tiny")
    llm.generate(["Once upon a time", "One day"], SamplingParams(temperature=0))
    for out in llm.stream("Once upon a time"):
        print(out.delta, end="")

One request's way from here to its last token:

    LLM.generate -> LLMEngine.submit -> Scheduler.add -> waiting
      LLMEngine.step -> Scheduler.schedule -> ModelRunner.run -> Decoder -> sample
                     -> Scheduler.update -> IncrementalDetokenizer -> RequestOutput

This is the one place that puts the parts together: build_runner() finds the extensions that the
settings ask for and puts them around a ModelRunner.

Always holds: results come in the order of their prompts; all prompts are checked before the
first is queued; streams and generate calls on one engine may interleave, and each gets its
own outputs; no extension is imported that no setting asks for.

Taught in notebooks/07_the_engine.ipynb. Source: vLLM's LLM class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from nanobatch.config import EngineConfig
from nanobatch.detokenizer import Tokenizer
from nanobatch.engine import LLMEngine
from nanobatch.kernels.kv_cache import choose_kind
from nanobatch.model_runner import ModelRunner
from nanobatch.models.decoder import Decoder
from nanobatch.models.loader import LoadedModel, load
from nanobatch.request import Request, RequestOutput, SamplingParams
from nanobatch.utils.device import resolve_device, resolve_dtype
from nanobatch.utils.extensions import has_extension, load_extension

if TYPE_CHECKING:
    from nanobatch.extensions.ranks import Ranks

logger = logging.getLogger(__name__)


class LLM:
    """A model and an engine around it. Its repr shows the dtype and device that "auto" stands
    for; so does a line of the logger "nanobatch.llm".

    Args:
        model: "tiny", "smollm2", "dummy:NAME", a directory, a .gguf file or a hub id.
        config: the engine's settings.
        overrides: EngineConfig fields by keyword; they override those of config.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: a field or the checkpoint is wrong; the message says which one and why.
    """

    def __init__(self, model: str, config: EngineConfig | None = None, **overrides):
        if config is not None and not isinstance(config, EngineConfig):
            raise ValueError(f"config is {config!r}; it must be an EngineConfig")
        names = {f.name for f in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(overrides) - names)
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is no field of EngineConfig; these are: "
                + ", ".join(sorted(names))
            )
        config = dataclasses.replace(config or EngineConfig(), **overrides)
        self.name, ranks = str(model), join_ranks(config)
        self._is_first_rank = ranks is None or ranks.rank == 0
        loaded, draft = load_model(self.name, config, ranks), None
        if config.speculative == "draft":
            draft = load_model(config.draft_model, config).model
        runner = build_runner(loaded.model, config, draft, ranks)
        self.tokenizer, self._sampling = loaded.tokenizer, loaded.sampling
        self.engine = build_engine(runner, tokenizer=self.tokenizer)
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # by request id
        logger.info("%r, attention_backend=%r", self, runner.backend)

    def __repr__(self) -> str:
        runner = self.engine.runner
        dtype = str(runner.dtype).removeprefix("torch.")
        return f"LLM({self.name!r}, dtype={dtype!r}, device={runner.device.type!r})"

    @property
    def default_params(self) -> SamplingParams:
        """The sampling settings that came with the model (models/sampling_defaults.py), which
        params="model" stands for. SamplingParams() if it has none.

        Raises:
            ValueError: one is malformed or not supported; the message names the file and key.
        """
        return self._sampling.params()

    def _params(self, params: SamplingParams | str | None) -> SamplingParams | None:
        if isinstance(params, str) and params != "model":
            raise ValueError(f"params is {params!r}; it must be SamplingParams or 'model'")
        return self.default_params if isinstance(params, str) else params

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | str | Sequence[SamplingParams | str] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Finish one or many prompts (text or token ids) and return their last outputs.

        Args:
            prompts: one prompt or a list of them.
            params: for all, or one for each prompt. None is SamplingParams(), whatever came
                with the model; "model" is default_params.
            progress: show a progress bar.

        Returns:
            in the order of the prompts; n consecutive ones for a prompt with params.n > 1.

        Raises:
            ValueError: a prompt or a parameter is refused; nothing was queued.
        """
        if not isinstance(prompts, (str, list, tuple)):
            raise ValueError(f"prompts is {prompts!r}; it must be text, a list of ids, or many")
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        prompts = [prompts] if is_one else list(prompts)
        if params is None or isinstance(params, (SamplingParams, str)):
            params = [params] * len(prompts)
        if not isinstance(params, (list, tuple)):
            raise ValueError(
                f"params is {params!r}; it must be SamplingParams, or one for each"
            )
        if len(params) != len(prompts):
            raise ValueError(f"params has {len(params)} entries for {len(prompts)} prompts")
        params = [self._params(p) for p in params]
        with self.engine.guard:
            families = [
                self.engine.prepare(*pair) for pair in zip(prompts, params, strict=True)
            ]
        requests = [request for family in families for request in family]
        last: dict[str, RequestOutput] = {}
        with (
            self._bar(len(requests), progress) as bar,
            contextlib.closing(self._stream(requests)) as outputs,
        ):
            for out in outputs:
                if out.finished:
                    last[out.request_id] = out
                    bar.update()
        return [last[request.request_id] for request in requests]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | str | None = None
    ) -> Iterator[RequestOutput]:
        """Yield an output for each new token (with drafts, several); `delta` is the new text.
        params are as in generate().

        The prompt is checked now and queued when the first output is asked for. Closing the
        stream early aborts its request.
        """
        with self.engine.guard:
            requests = self.engine.prepare(prompt, self._params(params))
        return self._stream(requests)

    def chat(
        self,
        messages: Sequence[dict],
        params: SamplingParams | str | None = None,
        progress: bool = False,
    ) -> RequestOutput:
        """Answer a conversation, through the checkpoint's own chat template.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            params: as in generate().

        Raises:
            ValueError: messages is not such a list; or the model has no chat template, or one
                that refuses the conversation or cannot be rendered (models/chat_template.py).
        """
        is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
        for message in messages if is_list else [None]:
            is_message = isinstance(message, dict) and all(
                isinstance(message.get(key), str) for key in ("role", "content")
            )
            if not is_message:
                raise ValueError(
                    f"messages has {message!r}; each must be a dict with role and content"
                )
        if params is not None and getattr(params, "n", 1) > 1:
            raise ValueError(f"n is {params.n}; a chat has one answer")
        apply = getattr(self.tokenizer, "apply_chat_template", None)
        if apply is None:
            raise ValueError("this model's tokenizer has no chat template")
        return self.generate(apply(messages), params, progress)[0]

    def _stream(self, requests: list[Request]) -> Iterator[RequestOutput]:
        inbox: deque[RequestOutput] = deque()
        num_left = len(requests)
        try:
            try:
                self._submit(requests, inbox)
                while num_left > 0:
                    self._wait_for(inbox)
                    out = inbox.popleft()
                    num_left -= out.finished
                    yield out
            finally:  # interrupted: the engine must not go on with these requests
                self._release(requests)
        except BaseException:
            self._release(requests)  # again: Ctrl-C may have come just before the line above
            raise

    def _submit(self, requests: list[Request], inbox: deque[RequestOutput]) -> None:
        with self.engine.guard:
            self.engine.submit(requests)
            self._inboxes.update((request.request_id, inbox) for request in requests)

    def _wait_for(self, inbox: deque[RequestOutput]) -> None:
        """Step until the inbox has something. Another thread's step may bring it."""
        while not inbox:
            with self.engine.guard:
                if not inbox:
                    self._step()

    def _step(self) -> None:
        if not self.engine.has_unfinished():
            raise RuntimeError("outputs are lost: engine.step() took them, or was interrupted")
        self.engine.advance()
        ready = self.engine.outputs.ready
        while ready:
            inbox = self._inboxes.get(ready[0].request_id, deque())
            inbox.append(ready.popleft())

    def _release(self, requests: list[Request]) -> None:
        with self.engine.guard:
            for request in requests:
                self._inboxes.pop(request.request_id, None)
            self.engine.discard(requests)

    def _bar(self, total: int, shown: bool):
        from tqdm.auto import tqdm

        return tqdm(total=total, disable=not (shown and self._is_first_rank), unit="request")


# ------------------------------------------------------------- the parts, put together


def build_runner(
    model: Decoder,
    config: EngineConfig,
    draft: Decoder | None = None,
    ranks: Ranks | None = None,
) -> ModelRunner:
    """A ModelRunner with the extensions that config asks for.

    Args:
        model: with its weights, or this rank's shard of it.
        config: the engine's settings.
        draft: the draft model, of the same dtype and device, if config.speculative is "draft".
        ranks: the processes that share the model, if there are several (join_ranks).

    Raises:
        ValueError: as ModelRunner; an extension's file is missing; or the draft model, or the
            number of ranks, is not what config says.
    """
    kind = ModelRunner
    if config.speculative is not None or draft is not None:
        module = load_extension("speculative_runner", f"speculative is {config.speculative!r}")
        kind = functools.partial(module.SpeculativeRunner, draft=draft)
    make = functools.partial(kind, model, reserve=_bytes_of_extensions)
    if ranks is None:
        return _extended(make(config, served={"preemption"}))
    parallel = _load_for_ranks("tensor_parallel", config)
    make = functools.partial(make, served={"preemption", "tensor_parallel_size"})
    config = parallel.agree_on_blocks(make, config, ranks)
    with ranks.together():
        runner = _extended(make(config))
    return parallel.ParallelRunner(runner, ranks)


def build_engine(
    runner: ModelRunner,
    config: EngineConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> LLMEngine:
    """An engine around a runner, and on its clock: one that plans ahead where that can be.

    Args:
        config: in place of the runner's; it fits into the runner's cache.
        tokenizer: as for LLMEngine.
    """
    make, config = LLMEngine, runner.config if config is None else config
    if runner.can_overlap and config.async_scheduling and has_extension("async_scheduling"):
        make = load_extension("async_scheduling", "async_scheduling is True").AsyncEngine
    return make(config, runner, tokenizer=tokenizer, clock=runner.clock)


def _extended(runner: ModelRunner) -> ModelRunner:
    """Add what a runner calls in its steps: copies of swapped blocks, captured graphs."""
    if runner.config.preemption == "swap":
        load_extension("host_cache", "preemption is 'swap'").HostCache.add_to(runner)
    graphs = _graphs_of(runner)
    if graphs is not None:
        graphs.DecodeGraphs.add_to(runner)
    return runner


def _bytes_of_extensions(runner: ModelRunner) -> int:
    """The GPU memory that _extended() will take."""
    graphs = _graphs_of(runner)
    return 0 if graphs is None else graphs.bytes_of_graphs(runner)


def _graphs_of(runner: ModelRunner) -> ModuleType | None:
    if not (runner.can_capture and has_extension("cuda_graphs")):
        return None
    return load_extension("cuda_graphs", "cuda_graphs is True")


def join_ranks(config: EngineConfig) -> Ranks | None:
    """Join the other processes that torchrun started; None if there is only this one.

    Raises:
        ValueError: there are not tensor_parallel_size processes, or not as many GPUs.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if config.tensor_parallel_size == num_processes == 1:
        return None
    return _load_for_ranks("ranks", config).join(config.tensor_parallel_size, config.device)


def load_model(name: str, config: EngineConfig, ranks: Ranks | None = None) -> LoadedModel:
    """Load a model onto the device and in the number format that config asks for.

    Args:
        ranks: the processes that share it (join_ranks), if there are several: then only this
            one's shard is kept.

    Raises:
        FileNotFoundError, ValueError: as models.loader.load; the device lacks the number format
            of weights or cache; or ranks disagree in these values.
    """
    device, shard = resolve_device(config.device), None
    dtype = resolve_dtype(config.dtype, device)
    choose_kind(config.kv_cache_dtype, dtype, device)  # refused before minutes of loading
    if ranks is not None:
        ranks.check_same(model=name, config=config, dtype=dtype, device=device.type)
        shard = _load_for_ranks("tensor_parallel", config).Shard(ranks)
    return load(name, dtype, device, config.seed, shard, config.max_model_len)


def _load_for_ranks(name: str, config: EngineConfig) -> ModuleType:
    return load_extension(name, f"tensor_parallel_size is {config.tensor_parallel_size}")
