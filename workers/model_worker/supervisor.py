"""A model in a process of its own, supervised: it is restarted when it dies, and its caller never dies with it."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ...engine.errors import ConfigError, WorkerLostError
from . import comm_id, messages
from .controller import Channel, Controller
from .errors import raise_error
from .names import Names, collect, name_of
from .process import TERMINATE_S, ChildProcess

logger = logging.getLogger(__name__)

ROLE = "model"
LAST_WORDS = "; its last words:"


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """How a model worker is started, watched and ended.

    Args:
        name: The name of the worker in messages and in the log.
        start_s: For how many seconds the model may load.
        beat_s: The interval of beats, in seconds.
        silence_s: After how many seconds without a beat the worker counts as dead. Beats do not come from the thread that computes,
            so a long batch is not silence.
        watchdog_s: After how many seconds without progress in a request the worker ends itself; 0 is never.
        restarts: How often the worker is restarted after it died.
        pause_s: The pause before the first restart, in seconds; it doubles with every further one.
        max_pause_s: The longest pause.
        terminate_s: For how many seconds the worker may end by itself before it is killed.
        environment: Additional environment variables of the worker.
        names: Further classes and functions that requests and replies may hold; see `names`.
    """

    name: str = "model-worker"
    start_s: float = 600.0
    beat_s: float = 1.0
    silence_s: float = 60.0
    watchdog_s: float = 1800.0
    restarts: int = 3
    pause_s: float = 1.0
    max_pause_s: float = 60.0
    terminate_s: float = TERMINATE_S
    environment: Mapping[str, str] = field(default_factory=dict)
    names: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for setting in ("start_s", "beat_s", "silence_s", "terminate_s"):
            if not getattr(self, setting) > 0:
                raise ConfigError(f"{setting}={getattr(self, setting)}; it must be above 0")
        for setting in ("watchdog_s", "restarts", "pause_s", "max_pause_s"):
            if not getattr(self, setting) >= 0:
                raise ConfigError(f"{setting}={getattr(self, setting)}; it must be at least 0")
        if self.silence_s <= self.beat_s:
            raise ConfigError(f"silence_s={self.silence_s} is not above beat_s={self.beat_s}; no worker would seem alive")


class ProcessControl:
    """What is known about the life of a worker."""

    def __init__(self) -> None:
        self._started, self._completed = threading.Event(), threading.Event()
        self.restarts = 0
        """How often the worker has been restarted."""

    def set_started(self, started: bool = True) -> None:
        """Note that the model exists and takes requests, or that it does not any more."""
        (self._started.set if started else self._started.clear)()

    def set_completed(self) -> None:
        """Note that the worker has ended for good."""
        self._completed.set()

    def is_started(self) -> bool:
        """Return whether the worker takes requests."""
        return self._started.is_set()

    def is_completed(self) -> bool:
        """Return whether the worker has ended for good."""
        return self._completed.is_set()


class SupervisedWorker:
    """A model in a process of its own. Enter it with `with` or `async with`; see `start_model_worker`."""

    def __init__(self, model_factory: Callable[[Any], Any], config: Any, settings: SupervisorSettings) -> None:
        allow = collect(model_factory) | collect(config) | {name_of(target) for target in settings.names}
        self._factory, self._config, self._settings = model_factory, config, settings
        self._names = Names(allow)
        self._allow = allow
        self.control = ProcessControl()
        self._lock = threading.Condition()
        self._closing = False
        self._failure: WorkerLostError | None = None
        self._controller: Controller | None = None
        self._process: ChildProcess | None = None
        self._channel: Channel | None = None
        self._monitor: threading.Thread | None = None

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, method: str, *args: Any, **options: Any) -> "Future[Any]":
        """Call a method of the model, which must be marked with `dispatch.register("all")`; return a future of its result.

        The future fails with a WorkerLostError if the worker dies. While a worker restarts, this waits for it.

        Raises:
            WorkerLostError: The worker has ended for good.
            ConfigError: An argument cannot be sent.
        """
        with self._lock:
            self._lock.wait_for(lambda: self.control.is_started() or self._failure or self._closing)
            if self._failure is not None or self._channel is None or self._closing:
                raise self._failure or WorkerLostError(f"{self._settings.name} was closed")
            channel = self._channel
            sent = channel.send(messages.Call(role=ROLE, method=method, args=list(args), options=options))
        found: Future[Any] = Future()

        def arrive(done: Any) -> None:
            try:
                reply = done.reply()
                if isinstance(reply, messages.Error):
                    if reply.kind == "watchdog":
                        # The worker is ending: nothing more is sent to it.
                        self._note_end(channel)
                    raise_error(reply, f"{method} of {self._settings.name}")
                found.set_result(reply.result)
            except Exception as e:  # the future's
                found.set_exception(e)

        sent.add_done_callback(arrive)
        return found

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the model and return its result; see `submit`.

        Raises:
            WorkerError: The method failed; its cause is the original error.
            WorkerLostError: The worker died.
        """
        return self.submit(method, *args, **options).result()

    async def acall(self, method: str, *args: Any, **options: Any) -> Any:
        """Like `call`, while the event loop goes on."""
        future = await asyncio.to_thread(self.submit, method, *args, **options)
        return await asyncio.wrap_future(future)

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of the worker, as of its last beat."""
        beat = None if self._channel is None else self._channel.beat
        return {} if beat is None else dict(beat.metrics)

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return None if self._process is None else self._process.pid

    # ---- lifetime ----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the worker and wait until its model is loaded.

        Raises:
            WorkerError: The model cannot be loaded; the cause is the original error.
            WorkerLostError: The worker died while it loaded.
        """
        self._controller = Controller(self._names)
        try:
            self._start_process()
        except BaseException:
            self.close()
            raise
        self._monitor = threading.Thread(target=self._watch, name=f"{self._settings.name}-monitor", daemon=True)
        self._monitor.start()
        return self

    def close(self) -> None:
        """End the worker: politely, then by force."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._monitor is not None:
            self._monitor.join()
        self.control.set_started(False)
        if self._process is not None and self._channel is not None and self._process.exit_code is None:
            with contextlib.suppress(TimeoutError, WorkerLostError):
                self._channel.send(messages.Shutdown()).reply(self._settings.terminate_s)
            if not self._process.wait(self._settings.terminate_s):
                self._process.terminate(self._settings.terminate_s)
        if self._channel is not None:
            self._channel.fail(WorkerLostError(f"{self._settings.name} was closed"))
        if self._controller is not None:
            self._controller.close()
        self.control.set_completed()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _start_process(self) -> None:
        settings, controller = self._settings, self._controller
        assert controller is not None
        identity = f"{settings.name}-{self.control.restarts}"
        channel = self._channel = controller.channel(identity)
        run, listener = comm_id.mint()
        process = self._process = ChildProcess(
            identity,
            controller.address,
            arguments=["--beat", str(settings.beat_s), "--watchdog", str(settings.watchdog_s), "--watchdog", "initialize=0"],
            allow=self._allow,
            environment=settings.environment,
            listener=listener,
            on_exit=lambda ended: self._note_exit(channel, ended),
        )
        deadline = time.monotonic() + settings.start_s
        for request in (
            messages.Hello(protocol=messages.PROTOCOL, world_size=1),
            messages.Init(comm_id=run.hex()),
            messages.Initialize(role=ROLE, worker=self._factory, config=self._config),
        ):
            try:
                reply = channel.send(request).reply(max(deadline - time.monotonic(), 0.1))
            except TimeoutError:
                process.terminate(settings.terminate_s)
                raise WorkerLostError(
                    f"{settings.name} did not load its model within start_s={settings.start_s:g}; raise start_s"
                ) from None
            if isinstance(reply, messages.Error):
                process.terminate(settings.terminate_s)
                raise_error(reply, f"loading the model of {settings.name}")
        with self._lock:
            self.control.set_started()
            self._lock.notify_all()

    def _note_end(self, channel: Channel) -> None:
        with self._lock:
            if channel is self._channel:
                self.control.set_started(False)

    def _note_exit(self, channel: Channel, process: ChildProcess) -> None:
        self._note_end(channel)
        channel.fail(self._lost(process))

    def _lost(self, process: ChildProcess) -> WorkerLostError:
        words = process.last_words()
        return WorkerLostError(f"{self._settings.name} {process.ending()}" + (f"{LAST_WORDS}\n{words}" if words else ""))

    def _watch(self) -> None:
        settings = self._settings
        while True:
            with self._lock:
                if self._lock.wait_for(lambda: self._closing, timeout=min(settings.beat_s, 0.2)):
                    return
            process, channel = self._process, self._channel
            assert process is not None
            assert channel is not None
            if process.exit_code is None:
                silence = channel.silence_s()
                if silence < settings.silence_s:
                    continue
                logger.warning("%s has been silent for %.0f s; it is ended", settings.name, silence)
                process.terminate(settings.terminate_s)
            lost = self._lost(process)
            self.control.set_started(False)
            channel.fail(lost)
            if not self._restart(lost):
                return

    def _restart(self, lost: WorkerLostError) -> bool:
        """Start the worker again until it works; return whether it does."""
        settings = self._settings
        while self.control.restarts < settings.restarts:
            pause = min(settings.pause_s * 2**self.control.restarts, settings.max_pause_s)
            self.control.restarts += 1
            logger.warning(
                "%s; restart %d of %d in %.1f s",
                str(lost).splitlines()[0].removesuffix(LAST_WORDS),
                self.control.restarts,
                settings.restarts,
                pause,
            )
            with self._lock:
                if self._lock.wait_for(lambda: self._closing, timeout=pause):
                    return False
            try:
                self._start_process()
            except Exception as e:  # whatever keeps the model from loading; the next attempt may do better
                lost = WorkerLostError(f"{settings.name} could not be restarted: {e}")
                continue
            return True
        with self._lock:
            self._failure = WorkerLostError(
                f"{lost}\nthe worker was restarted {self.control.restarts} times (restarts={settings.restarts})"
            )
            self._lock.notify_all()
        logger.error("%s", self._failure)
        return False


def start_model_worker(
    model_factory: Callable[[Any], Any], config: Any, settings: SupervisorSettings | None = None
) -> SupervisedWorker:
    """Return a context manager, for `with` or `async with`, that runs a model in a fresh process.

    Args:
        model_factory: The function that makes the model from the configuration, in the worker. If the model has `initialize`, that
            is called as well. It must be found by its name, so it cannot be a lambda.
        config: Its argument: plain data, tensors, or a dataclass at the top level of a module.
        settings: How the worker is watched.

    Raises:
        ConfigError: The factory or the configuration cannot be sent.
    """
    return SupervisedWorker(model_factory, config, settings or SupervisorSettings())
