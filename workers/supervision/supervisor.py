"""A supervised model in a separate process: it is restarted when it dies, and its caller survives."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ...engine.errors import ConfigError, WorkerLostError
from ...generation.scheduler import SchedulerSettings
from ..process.worker import MAX_SECONDS
from ..protocol import messages
from ..protocol.compute_messages import Call, Initialize
from ..protocol.errors import LAST_OUTPUT, raise_error
from ..protocol.names import Names, collect, name_of
from ..protocol.stream_messages import Embed, Stream
from .child_process import TERMINATE_S
from .controller import Channel, Controller, listen
from .hosts import Host, LocalHost, ProcessArguments, WorkerProcess
from .response_stream import ResponseStream

if TYPE_CHECKING:
    from ...generation.token_scheduler import GenerationRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROLE = "model"
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """How a model worker is started, monitored and ended.

    Args:
        name: The name of the worker in messages and in the log.
        start_s: The time limit for loading the model, in seconds.
        beat_s: The interval of heartbeats, in seconds.
        silence_s: The time without a heartbeat after which the worker counts as dead, in seconds. A separate thread sends heartbeats, so
            they continue during a long batch.
        watchdog_s: The time without progress in a request after which the worker exits, in seconds; 0 disables this.
        restarts: The maximum number of consecutive restarts after the worker has died.
        stable_s: The working time after which the count of consecutive restarts is reset, in seconds.
        pause_s: The pause before the first restart, in seconds; it doubles with every further restart.
        max_pause_s: The longest pause, in seconds.
        terminate_s: The time that the worker has to exit by itself before it is killed, in seconds.
        queue_size: The maximum number of pending requests. Further requests are refused at once.
        max_wait_ms: The time that a request to an idle model waits for others to be batched with it, in milliseconds.
        environment: Additional environment variables of the worker.
        names: Additional classes and functions that requests and replies may hold; see `names`.
    """

    name: str = "model-worker"
    start_s: float = 600.0
    beat_s: float = 1.0
    silence_s: float = 60.0
    watchdog_s: float = 1200.0
    restarts: int = 3
    stable_s: float = 3600.0
    pause_s: float = 1.0
    max_pause_s: float = 60.0
    terminate_s: float = TERMINATE_S
    queue_size: int = 1024
    max_wait_ms: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    names: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for setting in ("start_s", "beat_s", "silence_s", "terminate_s"):
            if not 0 < getattr(self, setting) <= MAX_SECONDS:
                raise ConfigError(f"{setting}={getattr(self, setting)}; it must be above 0, and at most {MAX_SECONDS:g}")
        for setting in ("watchdog_s", "restarts", "stable_s", "pause_s", "max_pause_s"):
            if not 0 <= getattr(self, setting) <= MAX_SECONDS:
                raise ConfigError(f"{setting}={getattr(self, setting)}; it must be at least 0, and at most {MAX_SECONDS:g}")
        SchedulerSettings(queue_size=self.queue_size, max_wait_ms=self.max_wait_ms)
        if self.silence_s <= self.beat_s:
            raise ConfigError(
                f"silence_s={self.silence_s} is not above beat_s={self.beat_s}; every worker would count as dead"
            )


class ProcessControl:
    """The lifecycle state of a worker."""

    def __init__(self) -> None:
        self._started, self._completed = threading.Event(), threading.Event()
        self.restarts = 0
        """How often the worker has been restarted."""

    def set_started(self, started: bool = True) -> None:
        """Record whether the model exists and accepts requests."""
        (self._started.set if started else self._started.clear)()

    def set_completed(self) -> None:
        """Record that the worker has ended permanently."""
        self._completed.set()

    def is_started(self) -> bool:
        """Return whether the worker accepts requests."""
        return self._started.is_set()

    def is_completed(self) -> bool:
        """Return whether the worker has ended permanently."""
        return self._completed.is_set()


class SupervisedWorker:
    """A model in a separate process. Enter it once, with `with` or `async with`; see `start_model_worker`."""

    def __init__(
        self, model_factory: Callable[[Any], Any], config: Any, settings: SupervisorSettings, host: Host | None = None
    ) -> None:
        self._host = host or LocalHost()
        self._allow = collect(model_factory) | collect(config) | {name_of(target) for target in settings.names}
        self._factory, self._config, self._settings = model_factory, config, settings
        self._names = Names(self._allow)
        self.control = ProcessControl()
        self._changed = threading.Condition()
        self._entered = self._closing = False
        self._failure: WorkerLostError | None = None
        self._controller: Controller | None = None
        self._process: WorkerProcess | None = None
        self._channel: Channel | None = None
        self._monitor: threading.Thread | None = None
        self._remembered: dict[str, Call] = {}
        self._deaths, self._started_at = 0, 0.0

    @property
    def name(self) -> str:
        """The name of the worker."""
        return self._settings.name

    @property
    def metrics(self) -> dict[str, float]:
        """The worker's metrics, as of its last heartbeat."""
        beat = None if self._channel is None else self._channel.beat
        return {} if beat is None else dict(beat.metrics)

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return None if self._process is None else self._process.pid

    def remember(self, method: str, *args: Any, **options: Any) -> Callable[[], None]:
        """Repeat a call of the model after every restart, before any other request; for example a call that loads weights.

        Remembering the same method again replaces the earlier call.

        Returns:
            A function that restores the earlier call, if there was one; for a call that has failed, and would fail again.
        """
        call, earlier = Call(role=ROLE, method=method, args=list(args), options=options), self._remembered.get(method)
        self._remembered[method] = call

        def undo() -> None:
            # A later call has replaced this one.
            if self._remembered.get(method) is not call:
                return
            if earlier is None:
                del self._remembered[method]
            else:
                self._remembered[method] = earlier

        return undo

    def is_settled(self) -> bool:
        """Return whether the worker accepts requests, or never will."""
        return self.control.is_started() or self._failure is not None or self._closing

    def connected_channel(self) -> Channel | None:
        """Return the connection to the worker; None while the worker restarts.

        Raises:
            WorkerLostError: The worker has ended permanently.
        """
        with self._changed:
            if not self.is_settled():
                return None
            if self._failure is not None or self._closing or self._channel is None:
                raise WorkerLostError(str(self._failure or f"{self.name} was closed"))
            return self._channel

    def wait_for_channel(self) -> Channel:
        """Wait until the worker accepts requests, and return the connection to it.

        Raises:
            WorkerLostError: The worker has ended permanently.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self.is_settled)
            channel = self.connected_channel()
            if channel is not None:
                return channel

    def start(self) -> Self:
        """Start the worker and wait until its model is loaded.

        Raises:
            ConfigError: It has been started before.
            WorkerError: The model cannot be loaded; the cause is the original error.
            WorkerLostError: The worker died while it loaded.
        """
        with self._changed:
            if self._entered:
                raise ConfigError(f"{self._settings.name} has been started before; call start_model_worker for another one")
            self._entered = True
        self._controller = listen(self._host.controller_address(), self._names)
        try:
            self._start_process()
        except BaseException:
            self.close()
            raise
        self._monitor = threading.Thread(target=self._watch, name=f"{self._settings.name}-monitor", daemon=True)
        self._monitor.start()
        return self

    def close(self) -> None:
        """End the worker: politely if it is idle, otherwise by force. Pending requests fail."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            # A worker that is loading its model reads no `shutdown`, so it is ended by force.
            loading = not self.control.is_started()
            self._changed.notify_all()
        try:
            self._end_process(by_force=loading)
            if self._monitor is not None:
                self._monitor.join()
            # The monitor may have been starting a new process.
            self._end_process(by_force=True)
        finally:
            self.control.set_started(False)
            if self._controller is not None:
                self._controller.close()
            self.control.set_completed()

    def _end_process(self, *, by_force: bool) -> None:
        process, channel = self._process, self._channel
        if process is None or channel is None or process.exit_code is not None:
            return
        busy = channel.pending > 0
        # Before `fail`, after which this channel sends nothing.
        shutdown = None if by_force or busy else channel.ask(messages.Shutdown())
        channel.fail(WorkerLostError(f"{self._settings.name} was closed"))
        if shutdown is None or not process.wait(self._settings.terminate_s):
            process.terminate(0.0 if by_force else self._settings.terminate_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            return await in_thread(self.start)
        except BaseException:
            # For example cancelled while the model was loading: the thread that waits for it ends with the process.
            await asyncio.shield(in_thread(self.close))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(in_thread(self.close))

    def _start_process(self) -> None:
        settings, controller = self._settings, self._controller
        assert controller is not None
        # A new name for each start, so that late messages of a worker that has died are not taken for those of its
        # successor.
        identity = f"{settings.name}-{self.control.restarts}"
        deadline = time.monotonic() + settings.start_s
        channel = controller.channel(identity)
        # Not under the lock: starting on another machine takes a while.
        process, run = self._host.start(
            identity,
            controller.address,
            ProcessArguments(
                arguments=(
                    *("--beat", str(settings.beat_s)),
                    # Loading is limited by `start_s` instead.
                    *("--watchdog", str(settings.watchdog_s), "--watchdog", "initialize=0"),
                    *("--queue-size", str(settings.queue_size), "--max-wait-ms", str(settings.max_wait_ms)),
                ),
                allow=tuple(self._allow),
                environment=dict(settings.environment),
                keys=controller.new_keys(),
            ),
            lambda ended: self._on_exit(channel, ended),
            lambda: self._closing,
        )
        with self._changed:
            closing = self._closing
            if not closing:
                self._channel, self._process = channel, process
        # `close` has run while the process was starting, and could not end a process that it did not see.
        if closing:
            process.terminate(0.0)
            raise WorkerLostError(f"{settings.name} was closed")
        try:
            self._load(channel, run, deadline)
        except BaseException:
            # Nothing else would end it.
            process.terminate(settings.terminate_s)
            raise
        self._started_at = time.monotonic()
        with self._changed:
            self.control.set_started()
            self._changed.notify_all()

    def _load(self, channel: Channel, run: str, deadline: float) -> None:
        """Let a worker load the model, and repeat the remembered calls."""
        settings = self._settings
        requests: list[messages.Request] = [messages.Hello(protocol=messages.PROTOCOL, world_size=1)]
        if getattr(self._factory, "needs_process_group", True):
            requests.append(messages.Init(comm_id=run))
        requests.append(Initialize(role=ROLE, worker=self._factory, config=self._config))
        for request in [*requests, *self._remembered.values()]:
            try:
                sent = channel.ask_flushed(request) if isinstance(request, Initialize | Call) else channel.ask(request)
                reply = sent.reply(max(deadline - time.monotonic(), 0.1))
            except TimeoutError:
                what = f"answer {request.method}" if isinstance(request, Call) else "load its model"
                raise WorkerLostError(
                    f"{settings.name} did not {what} within start_s={settings.start_s:g}; raise start_s"
                ) from None
            if isinstance(reply, messages.Error):
                title = f"{request.method} of {settings.name} after a restart" if isinstance(request, Call) else ""
                raise_error(reply, title or f"loading the model of {settings.name}")

    def mark_ended(self, channel: Channel) -> None:
        """Record that a worker no longer accepts requests."""
        with self._changed:
            # A worker that has already been replaced does not stop its successor.
            if channel is self._channel:
                self.control.set_started(False)

    def _on_exit(self, channel: Channel, process: WorkerProcess) -> None:
        self.mark_ended(channel)
        channel.fail(self._lost(process))

    def _lost(self, process: WorkerProcess) -> WorkerLostError:
        return WorkerLostError(f"{self._settings.name} {process.describe_end()}")

    def _watch(self) -> None:
        try:
            self._supervise()
        except BaseException as e:
            # Without a monitor, callers would wait for a restart that never comes.
            self._give_up(WorkerLostError(f"the supervision of {self._settings.name} failed: {type(e).__name__}: {e}"))
            raise

    def _supervise(self) -> None:
        settings = self._settings
        while not self._closes_within(min(settings.beat_s, 0.2)):
            process, channel = self._process, self._channel
            assert process is not None
            assert channel is not None
            if process.exit_code is None:
                silence = channel.silence_s()
                if silence < settings.silence_s:
                    continue
                logger.warning("%s has been silent for %.0f s; ending it", settings.name, silence)
                process.terminate(settings.terminate_s)
            lost = self._lost(process)
            self._on_exit(channel, process)
            if not self._restart(lost):
                return

    def _closes_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, timeout=seconds)

    def _restart(self, lost: WorkerLostError) -> bool:
        """Restart the worker until it works; return whether it does."""
        settings = self._settings
        if time.monotonic() - self._started_at >= settings.stable_s:
            self._deaths = 0
        while self._deaths < settings.restarts:
            # The exponent is bounded, because a float cannot be multiplied by an arbitrarily large integer.
            pause = min(settings.pause_s * 2 ** min(self._deaths, 32), settings.max_pause_s)
            self._deaths += 1
            self.control.restarts += 1
            reason = str(lost).splitlines()[0].removesuffix(LAST_OUTPUT)
            logger.warning("%s; restart %d of %d in %.1f s", reason, self._deaths, settings.restarts, pause)
            if self._closes_within(pause):
                return False
            try:
                self._start_process()
            except Exception as e:  # loading a model can raise anything; the next attempt may succeed
                if self._closing:
                    return False
                lost = WorkerLostError(f"{settings.name} could not be restarted: {e}")
                continue
            return True
        self._give_up(WorkerLostError(f"{lost}\nthe worker was restarted {self._deaths} times (restarts={settings.restarts})"))
        return False

    def _give_up(self, failure: WorkerLostError) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        self.control.set_completed()
        logger.error("%s", failure)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, method: str, *args: Any, **options: Any) -> "Future[Any]":
        """Call a method of the model, which must be marked with `dispatch.register("all")`; return a future of its result.

        The future fails with a WorkerLostError if the worker dies. This method waits while a worker restarts.

        Raises:
            WorkerLostError: The worker has ended permanently.
            ConfigError: An argument cannot be sent.
        """
        channel = self.wait_for_channel()
        sent = channel.ask_flushed(Call(role=ROLE, method=method, args=list(args), options=options))
        future: Future[Any] = Future()
        # In a separate thread: callbacks of the future may call the worker again.
        sent.add_done_callback(
            lambda done: threading.Thread(target=self._arrive, args=(channel, done, future, method), daemon=True).start()
        )
        return future

    def _arrive(self, channel: Channel, sent: Any, future: "Future[Any]", method: str) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            reply = sent.reply()
            if isinstance(reply, messages.Error):
                if reply.kind == "watchdog":
                    # The worker is ending, so no more requests are sent to it.
                    self.mark_ended(channel)
                raise_error(reply, f"{method} of {self.name}")
            future.set_result(reply.result)
        except Exception as e:  # passed on to the future
            future.set_exception(e)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the model and return its result; see `submit`.

        Raises:
            WorkerError: The method failed; its cause is the original error.
            WorkerLostError: The worker died.
        """
        return self.submit(method, *args, **options).result()

    async def acall(self, method: str, *args: Any, **options: Any) -> Any:
        """Like `call`, without blocking the event loop."""
        # `submit` would block the event loop while the worker restarts.
        while not self.is_settled():
            await asyncio.sleep(_POLL_S)
        return await asyncio.wrap_future(self.submit(method, *args, **options))

    def stream(self, request: "GenerationRequest") -> ResponseStream:
        """Generate a completion; its tokens are read from the returned stream with `async for` or `for`.

        Many streams may be read at the same time; the model batches them. A completion is not generated further once its stream is
        gone, for example because the reading loop was left. While a worker restarts, the stream waits.

        Args:
            request: The prompt and the sampling options. The model must be a `RolloutWorker`, or another one with a scheduler of tokens.

        Raises:
            WorkerLostError: The worker has ended permanently.
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


async def in_thread(run: Callable[[], T]) -> T:
    """Run a function in a dedicated thread: all threads of the event loop's pool may be waiting."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            result = run()
        except BaseException as e:  # passed on to the future
            error: BaseException | None = e
        else:
            error = None
        # The event loop may have been cancelled in the meantime.
        if future.set_running_or_notify_cancel():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


def start_model_worker(
    model_factory: Callable[[Any], Any], config: Any, settings: SupervisorSettings | None = None, host: Host | None = None
) -> SupervisedWorker:
    """Return a context manager, for `with` or `async with`, that runs a model in a fresh process.

    Args:
        model_factory: The function that builds the model from the configuration, in the worker. If the model has `initialize`, that
            is called as well. The function is imported by name, so it cannot be a lambda.
        config: Its argument: plain data, tensors, or a dataclass at the top level of a module.
        settings: How the worker is monitored.
        host: Where its process runs, such as a `RayHost`; None for this machine.

    Raises:
        ConfigError: The factory or the configuration cannot be sent.
    """
    return SupervisedWorker(model_factory, config, settings or SupervisorSettings(), host)
