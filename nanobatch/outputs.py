"""What the engine owes: the output of each request that is live or was not shown to its end.

    streams   request id -> OutputStream     tokens in, RequestOutputs out
    groups    group id -> request ids        the samples of one prompt (Request.group)
    ready     outputs to show in the next step

Always holds: a request is here from the moment it is enqueued until its last output was made.
So after an interrupted step these are the requests to go on with (recovery.py).

Source: vLLM's OutputProcessor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nanobatch.detokenizer import IncrementalDetokenizer, Tokenizer
from nanobatch.request import Request, RequestOutput


class OutputStream:
    """One request's output: its text if there is a tokenizer, its log-probabilities if asked.

    Attributes:
        request: whose it is.
        stopped: a stop string was completed.
        error: why the request has failed, or None.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        params = request.params
        self.request, self._tokenizer, self._detokenizer = request, tokenizer, None
        if tokenizer is not None:
            stream = tokenizer.stream(request.prompt_token_ids)
            self._detokenizer = IncrementalDetokenizer(stream, params.stop, params.min_tokens)
        self._logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self._num_tokens = 0
        self.stopped = False
        self.error: str | None = None

    def extend(self, logprobs: Sequence[dict[int, float]]) -> int:
        """Take the request's new tokens, and drop those after a stop string; return how many
        it keeps.

        Args:
            logprobs: of the new tokens; empty if none were asked for.
        """
        request, detokenizer = self.request, self._detokenizer
        if detokenizer is not None:
            hidden = request.stop_token_ids + request.eos_token_ids
            new_token_ids = request.output_token_ids[self._num_tokens :]
            try:
                request.drop_tokens(detokenizer.extend(new_token_ids, hidden))
                if request.is_finished:
                    detokenizer.finish()
            except Exception as error:  # the tokenizer's, about this request alone
                self.error = f"its tokens cannot be decoded: {error!r}"
            self.stopped = detokenizer.stopped
        num_new = len(request.output_token_ids) - self._num_tokens
        if self._logprobs is not None:
            self._logprobs += logprobs[:num_new]
        self._num_tokens += num_new
        return num_new

    def rewind(self, num_tokens: int) -> None:
        """Take back what was recorded beyond the first num_tokens of the output, which were
        taken before; if the request has ended, it goes on."""
        logprobs = (self._logprobs or [])[:num_tokens]
        self.request.rewind(num_tokens)
        self.__init__(self.request, self._tokenizer)
        self.extend(logprobs)
        self.take()

    def take(self) -> RequestOutput:
        """The output so far; `delta` is the text that became certain since the last call."""
        request, detokenizer, logprobs = self.request, self._detokenizer, self._logprobs
        output = RequestOutput(
            request_id=request.request_id,
            text="",
            delta="" if detokenizer is None else detokenizer.take_delta(request.is_finished),
            token_ids=[],
            logprobs=None,
            finish_reason=request.finish_reason,
            finished=request.is_finished,
            metrics=request.metrics,
            error=self.error,
        )
        # These grow with every step: whoever reads them pays for the copy.
        output.read_later("token_ids", request.output_token_ids)
        if detokenizer is not None:
            output.read_later("text", detokenizer.deltas, "".join)
        if logprobs is not None:
            output.read_later("logprobs", logprobs)
        return output


Mark = tuple[OutputStream, int]  # and how many output tokens of it are known


def _known(streams: Sequence[OutputStream]) -> list[Mark]:
    requests = [stream.request for stream in streams]
    counts = [len(r.output_token_ids) - r.has_placeholder for r in requests]
    return list(zip(streams, counts, strict=True))


class Outputs:
    """The streams of an engine's requests, and the outputs that are ready."""

    def __init__(self):
        self.streams: dict[str, OutputStream] = {}
        self.groups: dict[str, dict[str, None]] = {}
        self.ready: deque[RequestOutput] = deque()
        self.marked: list[Mark] = []  # before they changed

    def add(self, stream: OutputStream) -> None:
        """A request was enqueued."""
        request = stream.request
        self.streams[request.request_id] = stream
        if request.group is not None:
            self.groups.setdefault(request.group, {})[request.request_id] = None

    def mark(self, requests: Sequence[Request]) -> None:
        """These change next. Until their outputs are ready, that may have to be taken back."""
        self.marked = _known([self.streams[request.request_id] for request in requests])

    def in_doubt(self) -> list[Mark]:
        """What to take back after an exception: what is marked, and all placeholders."""
        streams = self.streams.values()
        return self.marked + _known([s for s in streams if s.request.has_placeholder])

    def take(self, request: Request) -> RequestOutput:
        """A request's output so far. A finished request is forgotten by this call."""
        output = self.streams[request.request_id].take()
        if request.is_finished:
            del self.streams[request.request_id]
            ids = self.groups.get(request.group, {})
            ids.pop(request.request_id, None)
            if not ids:
                self.groups.pop(request.group, None)
        return output

    def make_ready(self, requests: Sequence[Request]) -> None:
        """Take the requests' outputs, to be shown in the next step. What was marked is done."""
        outputs = [self.take(request) for request in requests]
        # In one line: an interrupt comes before both or after both.
        self.ready, self.marked = deque([*self.ready, *outputs]), []
