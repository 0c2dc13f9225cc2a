"""A model in a supervised process, and the requests to it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ..protocol import messages
from ..protocol.compute_messages import Call
from ..protocol.errors import raise_error
from ..protocol.stream_messages import Embed, Stream
from .controller import Channel
from .hosts import Host
from .response_stream import ResponseStream
from .supervised_process import ROLE, SupervisedProcess, SupervisorSettings

if TYPE_CHECKING:
    from ...generation.token_scheduler import GenerationRequest

_POLL_S = 0.05


class SupervisedWorker(SupervisedProcess):
    """A model in a process of its own. Enter it once, with `with` or `async with`; see `start_model_worker`."""

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, method: str, *args: Any, **options: Any) -> "Future[Any]":
        """Call a method of the model, which must be marked with `dispatch.register("all")`; return a future of its result.

        The future fails with a WorkerLostError if the worker dies. While a worker restarts, this waits for it.

        Raises:
            WorkerLostError: The worker has ended for good.
            ConfigError: An argument cannot be sent.
        """
        channel = self.wait_for_channel()
        sent = channel.ask_flushed(Call(role=ROLE, method=method, args=list(args), options=options))
        found: Future[Any] = Future()
        # In a thread of its own: what runs when the future is done may call the worker again.
        sent.add_done_callback(
            lambda done: threading.Thread(target=self._arrive, args=(channel, done, found, method), daemon=True).start()
        )
        return found

    def _arrive(self, channel: Channel, sent: Any, found: "Future[Any]", method: str) -> None:
        if not found.set_running_or_notify_cancel():
            return
        try:
            reply = sent.reply()
            if isinstance(reply, messages.Error):
                if reply.kind == "watchdog":
                    # The worker is ending: nothing more is sent to it.
                    self.mark_ended(channel)
                raise_error(reply, f"{method} of {self.name}")
            found.set_result(reply.result)
        except Exception as e:  # the future's
            found.set_exception(e)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the model and return its result; see `submit`.

        Raises:
            WorkerError: The method failed; its cause is the original error.
            WorkerLostError: The worker died.
        """
        return self.submit(method, *args, **options).result()

    async def acall(self, method: str, *args: Any, **options: Any) -> Any:
        """Like `call`, while the event loop goes on."""
        while not self.is_settled():
            await asyncio.sleep(_POLL_S)
        return await asyncio.wrap_future(self.submit(method, *args, **options))

    def stream(self, request: "GenerationRequest") -> ResponseStream:
        """Generate a response, whose tokens are read from the result with `async for` or `for`.

        Many may be read at the same time; the model works on all of them together. A response that nobody reads any more, because
        the loop was left and the stream is gone, is not generated further. While a worker restarts, it waits.

        Args:
            request: The prompt and how to sample. The model must be a `RolloutWorker`, or another one with a scheduler of tokens.

        Raises:
            WorkerLostError: The worker has ended for good.
            ConfigError: The request cannot be sent.
        """
        message = Stream(
            role=ROLE,
            prompt=request.prompt,
            options=request.options,
            row=request.row,
            sample=request.sample,
            images=request.images,
        )
        return ResponseStream(message, self.connected_channel, self.name)

    async def embed(self, tokens: list[int]) -> Any:
        """Return the embedding of a text as a tensor `[D]`. The model must be an `EmbeddingWorker`, or another one that embeds.

        Args:
            tokens: The token ids of the text.

        Raises:
            WorkerError: The request failed; its cause is the original error. A QueueFullError if too many requests wait.
            WorkerLostError: The worker died.
        """
        while (channel := self.connected_channel()) is None:
            await asyncio.sleep(_POLL_S)
        sent = channel.ask(Embed(role=ROLE, tokens=tokens))
        await asyncio.wrap_future(sent)
        reply: Any = sent.reply()
        if isinstance(reply, messages.Error):
            raise_error(reply, f"an embedding of {self.name}")
        return reply.embedding


def start_model_worker(
    model_factory: Callable[[Any], Any], config: Any, settings: SupervisorSettings | None = None, host: Host | None = None
) -> SupervisedWorker:
    """Return a context manager, for `with` or `async with`, that runs a model in a fresh process.

    Args:
        model_factory: The function that makes the model from the configuration, in the worker. If the model has `initialize`, that
            is called as well. It must be found by its name, so it cannot be a lambda.
        config: Its argument: plain data, tensors, or a dataclass at the top level of a module.
        settings: How the worker is watched.
        host: Where its process runs, such as a `RayHost`; None is this machine.

    Raises:
        ConfigError: The factory or the configuration cannot be sent.
    """
    return SupervisedWorker(model_factory, config, settings or SupervisorSettings(), host)
