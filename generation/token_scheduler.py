"""Continuous serving with a generator: requests join the batch as they arrive, and tokens are reported after every step."""

from dataclasses import dataclass, field

from ..engine.errors import ModelError
from .generator import BaseGenerator
from .options import SamplingOptions
from .scheduler import Ended, Event, RequestId, RequestProgress, Scheduler, SchedulerSettings
from .token_stream import TokenStream


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for one completion.

    Args:
        prompt: The token ids of the prompt.
        options: The sampling options. `samples` is not used.
        row: The number of the prompt, which seeds the completion together with `options.seed` and `sample`.
        sample: The number of the completion among those to the prompt.
        images: The images of the prompt as data URIs; see `BaseGenerator.submit`.
    """

    prompt: list[int]
    options: SamplingOptions = SamplingOptions()
    row: int = 0
    sample: int = 0
    images: list[str] = field(default_factory=list)


class TokenGenerationScheduler(Scheduler[GenerationRequest]):
    """The scheduler of a generator.

    The result of a request is its finish reason; see `Generation`.

    Args:
        generator: The generator.
        settings: The settings.
    """

    def __init__(self, generator: BaseGenerator, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._generator = generator
        self._streams: dict[RequestId, TokenStream] = {}
        self._reported: dict[RequestId, int] = {}

    def waiting(self) -> int:
        """Return the number of requests that the generator has not begun."""
        return len(self._generator.waiting)

    def has(self, request_id: RequestId) -> bool:
        """Return whether the generator has a request."""
        return request_id in self._streams

    def is_running(self) -> bool:
        """Return whether the generator can advance a request."""
        # After incomplete weights there is work too: `execute` fails the requests.
        return bool(self._streams) and (self._generator.ready or not self._generator.complete)

    def aborted(self, request_id: RequestId) -> Event:
        """Return the end of a request without tokens."""
        return Ended(request_id, "aborted")

    def begin(self, request_id: RequestId, request: GenerationRequest) -> list[Event]:
        """Submit a request to the generator."""
        try:
            self._streams[request_id] = self._generator.submit(
                request.prompt,
                request.options,
                request_id,
                row=request.row,
                sample=request.sample,
                images=request.images,
            )
        except Exception as e:  # reported as the request's error
            return [Ended(request_id, error=e)]
        self._reported[request_id] = 0
        return []

    def end(self, request_id: RequestId) -> list[Event]:
        """Cancel a request of the generator."""
        return self._report() if self._generator.cancel(request_id) else []

    def execute(self) -> list[Event]:
        """Advance the generator by a step."""
        if self._streams and self._generator.ready:
            self._generator.step()
        events = self._report()
        # The step that failed may have ended some requests, so the tokens are reported first.
        return events if self._generator.complete else [*events, *self._fail_all()]

    def current(self) -> RequestId | None:
        """Return the first request of the generator."""
        return next(iter(self._streams), None)

    def _fail_all(self) -> list[Event]:
        """Fail requests that would wait for a complete set of weights, which may never arrive."""
        ids = list(self._streams)
        for request_id in ids:
            self._generator.cancel(request_id)
        self._streams, self._reported = {}, {}
        error = ModelError(
            "new weights could not be loaded completely, so the model does not generate until it has a complete set"
        )
        return [Ended(request_id, error=error) for request_id in ids]

    def _report(self) -> list[Event]:
        events: list[Event] = []
        for request_id, stream in list(self._streams.items()):
            first = self._reported[request_id]
            if first < len(stream.tokens):
                # There is at most one step between two reports, so only one version.
                events.append(
                    RequestProgress(request_id, stream.tokens[first:], stream.log_probs[first:], stream.versions[-1])
                )
                self._reported[request_id] = len(stream.tokens)
            if stream.ended:
                del self._streams[request_id], self._reported[request_id]
                events.append(Ended(request_id, stream.finish_reason, stream.error, len(stream.prompt)))
        return events
