"""A request: what a user asks for, what the engine knows about it, and what it returns.

    SamplingParams   how to choose tokens and when to stop; checked when built
    Request          one sequence and its state in the engine
    RequestMetrics   its times and counts
    RequestOutput    what step() hands out

A request has tokens (prompt + output) and a count of those whose keys and values are in the
cache. The difference is the work to do:

    token_ids             [ p0 p1 p2 p3 p4 | o0 o1 ]      num_tokens          = 7
    num_computed_tokens     ^  ^  ^  ^  ^    ^            num_computed_tokens = 6
    to compute                                  ^         1 left: a "decode"

A negative token id is a placeholder: the token is being computed, and the host does not know it
yet (extensions/async_scheduling.py).

Always holds: token_ids is prompt_token_ids + output_token_ids; only the last may be a
placeholder; num_computed_tokens never exceeds num_tokens; when a step is planned, block_table
has room for exactly the computed tokens, rounded up to blocks.

Taught in notebooks/03_iteration_level_scheduling.ipynb. Source: Orca (Yu et al., OSDI 2022);
the names are vLLM's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from nanobatch.utils.checks import check_bool, check_float, check_int, check_token_ids, shown

MAX_N = 10_000  # outputs of one prompt


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    Attributes:
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k most likely tokens; 0, -1 or more than the vocabulary: off.
        top_p: keep the most likely tokens that together reach this probability; 1: off.
        min_p: drop tokens below min_p times the largest probability; 0: off.
        seed: of this request's own random stream; None: from the engine's seed and the
            order of arrival.
        max_tokens: most tokens to generate.
        min_tokens: the request does not stop before this many tokens: until then stop ids are
            not sampled, and stop strings are ignored.
        stop: strings that end the text; it is cut where the string begins. A single string
            is one stop.
        stop_token_ids: tokens that end the request, also under ignore_eos.
        ignore_eos: go on after the end-of-text token.
        logprobs: None: none; k: at each position the log-probabilities of the k likeliest
            tokens and of the chosen one, by the raw logits (before penalties and temperature).
        presence_penalty: subtracted once from the logit of a token that is in the output.
        frequency_penalty: subtracted once for each time that the token is in the output.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens
            that are in the prompt or the output; 1: off.
        n: how many independent outputs; child i's seed is seed + i.

    Raises:
        ValueError: a field is of the wrong type or out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1

    def __post_init__(self):
        check_float("temperature", self.temperature, 0.0)
        check_int("top_k", self.top_k, -1)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_bool("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, open_low=True)
        check_int("n", self.n, 1, MAX_N)
        self._freeze_stops()

    def _freeze_stops(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        is_list_of_str = isinstance(stop, (list, tuple)) and all(
            isinstance(s, str) and s for s in stop
        )
        if not is_list_of_str:
            raise ValueError(f"stop is {shown(self.stop)}; it must be non-empty strings")
        check_token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


class RequestStatus(enum.Enum):
    """Waiting, running, running with its last token as a placeholder, waiting with its blocks
    in host memory, or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass
class RequestMetrics:
    """Times (seconds on the engine's clock) and counts of one request.

    A time is None until it is known, and so is a property that needs it.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at admission
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # lost to a preemption and computed again
    num_draft_tokens: int = 0  # drafts that were checked
    num_accepted_tokens: int = 0  # drafts that were right

    @property
    def queue_time(self) -> float | None:
        """From arrival until the first step that computed any of its tokens."""
        return _span(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return _span(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        decode_time = _span(self.first_token_time, self.finish_time)
        if decode_time is None or self.num_output_tokens < 2:
            return None
        return decode_time / (self.num_output_tokens - 1)

    @property
    def latency(self) -> float | None:
        """End to end: from arrival to the last token."""
        return _span(self.arrival_time, self.finish_time)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class Request:
    """One sequence and its state in the engine.

    Args:
        request_id: unique among the live requests.
        prompt_token_ids: the prompt, at least one token.
        params: how to sample and when to stop.
        arrival_time: seconds on the engine's clock.
        priority: for policies that look at it; lower is served first.
        cache_salt: only requests with the same salt share cached blocks. None is a salt like
            any other, and so is "".
        eos_token_ids: tokens that end the text unless params.ignore_eos.

    Raises:
        ValueError: the id, the prompt, a token, the priority or the salt is not of its type.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        params = SamplingParams() if params is None else params
        check_token_ids("eos_token_ids", eos_token_ids)
        _check_request(request_id, prompt_token_ids, params, arrival_time, priority, cache_salt)
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.eos_token_ids = tuple(eos_token_ids)
        eos = () if params.ignore_eos else self.eos_token_ids
        self.stop_token_ids = params.stop_token_ids + eos  # every token that ends it

        self.output_token_ids: list[int] = []
        self.token_ids: list[int] = list(prompt_token_ids)  # prompt + output, kept joined
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.host_block_table: list[int] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.metrics = RequestMetrics(arrival_time, num_prompt_tokens=len(prompt_token_ids))

        self.max_tokens = params.max_tokens  # cut by the scheduler to what can fit
        self.seed = params.seed  # set by the engine if params have none
        self.group: str | None = None  # a second id, shared by n samples of one prompt
        self.must_wait: Callable[[], bool] | None = None  # true: do not admit it yet
        self.arrival_order = 0  # set by the scheduler; breaks ties of arrival_time
        self.num_hit_tokens = 0  # found in the prefix cache, for policies that ask
        self.num_lost_tokens = 0  # computed tokens lost to a preemption

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The work to do: tokens whose keys and values are not in the cache."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def has_placeholder(self) -> bool:
        """Whether its last token is being computed."""
        return self.token_ids[-1] < 0

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had when the request was first admitted."""
        return self.metrics.num_cached_tokens

    @property
    def max_total_tokens(self) -> int:
        """Most tokens it can ever have: prompt + max_tokens."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def start(self, num_cached: int, now: float) -> None:
        """The request is admitted at time now, for the first time or again after it lost its
        blocks; num_cached tokens were found in the cache."""
        self.num_computed_tokens = num_cached
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = now
            self.metrics.num_cached_tokens = num_cached
        self.metrics.num_recomputed_tokens += max(0, self.num_lost_tokens - num_cached)
        self.num_lost_tokens = 0

    def append_token(self, token_id: int) -> str | None:
        """Record one sampled token; return why the request ends with it, or None.

        A stop token is recorded, and "stop" wins over "length". With a placeholder nothing ends
        yet; after that for max_tokens nothing more is computed.
        """
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
        num_output = len(self.output_token_ids)
        if token_id < 0:
            if num_output >= self.max_tokens:
                self.status = RequestStatus.ENDING
            return None
        self.metrics.num_output_tokens = num_output
        if token_id in self.stop_token_ids and num_output > self.params.min_tokens:
            return "stop"
        return "length" if num_output >= self.max_tokens else None

    def drop_placeholder(self) -> None:
        """Drop the placeholder, if there is one: the token is known, or will never be."""
        if self.has_placeholder:
            del self.output_token_ids[-1], self.token_ids[-1]

    def drop_tokens(self, num_tokens: int) -> None:
        """Drop the last num_tokens of the output: accepted drafts after a stop string."""
        if num_tokens > 0:
            del self.output_token_ids[-num_tokens:], self.token_ids[-num_tokens:]
            self.metrics.num_output_tokens -= num_tokens
            self.metrics.num_accepted_tokens -= num_tokens

    def rewind(self, num_output_tokens: int) -> None:
        """Take back what a step recorded: the output beyond these tokens, and that it ended."""
        del self.output_token_ids[num_output_tokens:]
        self.token_ids = self.prompt_token_ids + self.output_token_ids
        self.status, self.finish_reason = RequestStatus.WAITING, None
        self.metrics.num_output_tokens, self.metrics.finish_time = num_output_tokens, None
        if num_output_tokens == 0:
            self.metrics.first_token_time = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )


def check_request_id(request_id: object) -> None:
    """Raise ValueError unless request_id is a string, and not empty."""
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"request_id is {request_id!r}; it must be a non-empty string")


def _check_request(request_id, prompt_token_ids, params, arrival_time, priority, cache_salt):
    check_request_id(request_id)
    check_token_ids("prompt_token_ids", prompt_token_ids)
    if len(prompt_token_ids) == 0:
        raise ValueError(f"the prompt of request {request_id!r} is empty; it needs >= 1 token")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is {params!r}; it must be SamplingParams")
    check_float("arrival_time", arrival_time, float("-inf"))
    check_float("priority", priority, float("-inf"))
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt is {cache_salt!r}; it must be a string or None")


@dataclass
class RequestOutput:
    """What a request has produced so far.

    text and token_ids are cumulative; delta is the text since the last output; logprobs is
    one {token_id: log-probability} for each output token, or None if none were asked for.
    finish_reason is "stop", "length", "abort", "error" or None; error says what went wrong.

    The engine's outputs copy what is cumulative when it is first read, as it was at their step.
    """

    request_id: str
    text: str
    delta: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    finished: bool
    metrics: RequestMetrics
    error: str | None = None

    def read_later(self, name: str, source: list, make: Callable[[list], object] = list):
        """Let a field be make(the items that source has now), made when it is first read.

        Args:
            source: a list that only grows.
        """
        del self.__dict__[name]
        self.__dict__["_" + name] = source, len(source), make

    def __getattr__(self, name: str):
        # Python asks here only for what is not there.
        if "_" + name not in self.__dict__:
            raise AttributeError(f"RequestOutput has no attribute {name!r}")
        source, length, make = self.__dict__.pop("_" + name)
        value = self.__dict__[name] = make(source[:length])
        return value

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
