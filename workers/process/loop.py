"""The request loop of a model worker process: an I/O thread, and the executor on the main thread.

The I/O thread reads frames, answers immediate operations, sends heartbeats, and monitors the executor. Only the executor uses the device
and takes part in collectives; it also collects requests until their flush. A third thread reads data sets. Requests that share a model
go to its scheduler, which the executor advances step by step. Frames without an id are answered strictly in order; only frames with an id
may be answered out of order.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...engine import progress
from ...engine.parallel.process import exit_process
from ..protocol.codec import Codec, FrameError, text
from ..protocol.compute_messages import ComputeRequest, Flush, Generate
from ..protocol.data_messages import GetOk
from ..protocol.messages import Beat, Bye, Cancel, Error, Reply, Request, Shutdown
from ..protocol.transports.base import ControllerLostError, Frame, FrameTooLargeError, Transport
from . import metrics
from .background import Background
from .flush import run_flush
from .serving import Serving
from .watchdog import Watchdog
from .worker import AbandonedError, ModelWorker, error_of

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""The interval at which the I/O thread checks the executor and the parent process."""


class _Waiting:
    """A request in the queue, or a reply that has to wait for its turn.

    Args:
        reply: The reply, if there is nothing to execute.
        request: The request.
        parts: The parts of its message.
    """

    def __init__(self, reply: Reply | None, request: Request | None = None, parts: Frame = ()) -> None:
        self.reply, self.request, self.parts = reply, request, parts

    @property
    def number(self) -> Any:
        """The id of the request."""
        return self.reply.id if self.request is None and self.reply is not None else getattr(self.request, "id", None)


class RequestLoop:
    """Serves the requests of one controller.

    Args:
        worker: The worker.
        transport: The connection to the controller.
        parent: The process whose end ends this one; None monitors none.
    """

    def __init__(self, worker: ModelWorker, transport: Transport, parent: int | None = None) -> None:
        self._worker, self._transport, self._parent = worker, transport, parent
        self._codec = Codec(worker.registry, binary=transport.binary)
        self._queue: deque[_Waiting] = deque()
        self._taken: _Waiting | None = None
        """The request that is being moved from the queue to those pending a flush."""
        self._unflushed: list[_Waiting] = []
        self._flushing: list[_Waiting] = []
        self._background = Background(self._serve_data)
        self._serving = Serving(worker, self._send)
        self._changed = threading.Condition()
        self._held: deque[_Waiting] = deque()
        self._outstanding = 0
        self._ended = self._done = False
        self._refusal = ""
        self._next_beat = time.monotonic()
        self._watchdog = Watchdog(worker)
        worker.cancel_request = self._cancel

    def run(self) -> int:
        """Serve until the controller sends `shutdown` or closes its end; return the exit code.

        The calling thread, the main one of a worker program, becomes the executor.
        """
        self._watchdog.executor = threading.get_ident()
        io_thread = threading.Thread(target=self._serve_io, name="model-worker-io", daemon=True)
        io_thread.start()
        try:
            self._execute_all()
        except BaseException as e:
            # Without an executor, the I/O thread would keep answering pings.
            with suppress(OSError):
                traceback.print_exc()
            self._refuse_rest(f"the worker failed: {type(e).__name__}: {e}")
            exit_process(1)
        self._done = True
        self._transport.wake()
        io_thread.join()
        self._transport.close()
        return 0

    # ---- the executor ------------------------------------------------------------------------------------------------

    def _execute_all(self) -> None:
        while True:
            waiting = self._next()
            if waiting is None and self._ended:
                break
            try:
                if waiting is not None:
                    self._serve(waiting)
                # Alternate, so that neither blocks the other.
                if not self._done and self._serving.wait_s() == 0.0:
                    self._serving.run()
            except AbandonedError:
                # The watchdog has already answered, and ends the process.
                threading.Event().wait()
            if self._done:
                return
        self._refuse_rest("the input has ended before a flush")
        try:
            self._worker.close()
        except Exception:
            logger.exception("a role could not be closed")

    def _next(self) -> _Waiting | None:
        """Wait for work; return the next request of the queue, if there is one."""
        with self._changed:
            while not self._queue and not self._ended:
                wait_s = self._serving.wait_s()
                if wait_s == 0.0:
                    return None
                self._changed.wait(wait_s)
            if not self._queue:
                return None
            waiting = self._taken = self._queue.popleft()
            if self._held:
                # Admitted here, so that an empty queue always means that no work is left, even at the end of the input.
                self._queue.append(self._held.popleft())
                self._transport.wake()
            return waiting

    def _serve(self, waiting: _Waiting) -> None:
        request = waiting.request
        if waiting.reply is not None or request is None:
            assert waiting.reply is not None
            self._finish(waiting, waiting.reply)
        elif isinstance(request, ComputeRequest):
            self._hold_back(waiting, request)
        elif isinstance(request, Flush):
            self._flush(waiting, request)
        else:
            reply = self._worker.answer(request, self._loader(waiting))
            metrics.add("requests")
            if isinstance(reply, Bye):
                # The last reply.
                self._refuse_rest("the worker has been shut down")
                self._done = True
            self._finish(waiting, reply)

    def _hold_back(self, waiting: _Waiting, request: ComputeRequest) -> None:
        """Keep a request for the next flush. An invalid request is answered immediately, and is then missing from the flush."""
        try:
            self._worker.check_request(request)
            # The id is kept, so that the request can be cancelled.
            waiting.request = self._worker.loaded(request, self._loader(waiting))
        except Exception as e:
            self._finish(waiting, error_of(self._worker.registry.of(request), e))
            return
        with self._changed:
            self._unflushed.append(waiting)
            self._taken = None

    def _flush(self, waiting: _Waiting, flush: Flush) -> None:
        with self._changed:
            self._flushing, self._unflushed = self._unflushed, []
            by_request = {id(w.request): w for w in self._flushing}
        requests: list[Any] = [w.request for w in by_request.values()]
        for request, outcome in run_flush(self._worker, flush, requests):
            request_reply = waiting if request is flush else by_request[id(request)]
            reply = error_of(self._worker.registry.of(request), outcome) if isinstance(outcome, BaseException) else outcome
            metrics.add("requests")
            with self._changed:
                if request_reply is not waiting:
                    self._flushing.remove(request_reply)
            self._finish(request_reply, reply)

    def _finish(self, waiting: _Waiting, reply: Reply) -> None:
        """Send the reply to a request that was in the queue."""
        reply.id = waiting.number
        # Released before the reply, so that samples which the controller drops after it are freed immediately.
        self._release(waiting)
        self._send(reply)
        with self._changed:
            # Only after the reply: requests without an id are answered out of order by the I/O thread as soon as none
            # is outstanding.
            self._outstanding -= 1
            self._worker.cancelled.discard(waiting.number)
            if self._taken is waiting:
                self._taken = None

    def _loader(self, waiting: _Waiting) -> Any:
        assert waiting.request is not None

        def load(plain: Any) -> Any:
            from ..protocol.values import load as load_values

            return load_values(plain, waiting.parts, self._worker.names)

        return load if waiting.request.values else None

    def _refuse_rest(self, reason: str) -> None:
        with self._changed:
            self._refusal = reason
            remaining = [*self._flushing, *self._unflushed, *self._queue, *self._held]
            self._flushing.clear()
            self._unflushed.clear()
            self._queue.clear()
            self._held.clear()
        for waiting in remaining:
            self._send(waiting.reply or Error(id=waiting.number, kind="cancelled", message=reason))
        for number in [*(request.id for request in self._background.take_rest()), *self._serving.take_rest()]:
            self._send(Error(id=number, kind="cancelled", message=reason))

    def _send(self, reply: Reply) -> None:
        try:
            self._transport.send(self._encode(reply))
        except ControllerLostError as e:
            # A controller that has read the last reply may be gone.
            if not self._done:
                self._lose_controller(e)

    def _encode(self, reply: Reply) -> Frame:
        try:
            parts: Any = []
            plain = reply
            if reply.values:
                from ..protocol.values import dump

                # Data in the data store never changes.
                copy = not isinstance(reply, GetOk)
                plain, parts = dump(reply, self._worker.names, inline=not self._codec.binary, copy=copy)
            return [self._codec.encode(plain), *parts]
        except Exception as e:  # a result of any type
            message = text(f"the result cannot be sent: {e}")
            return [self._codec.encode(Error(id=reply.id, kind="forward_failed", message=message))]

    # ---- the I/O thread ----------------------------------------------------------------------------------------------

    def _serve_io(self) -> None:
        try:
            if self._transport.greets:
                self._beat()
            while not self._done:
                frames = self._transport.receive(TICK_S, reading=not self._held)
                if frames is None:
                    with self._changed:
                        self._ended = True
                        self._changed.notify()
                for frame in frames or ():
                    self._accept(frame)
                self._tick()
        except ControllerLostError as e:
            if not self._done:
                self._lose_controller(e)
        except BaseException:
            # Without the I/O thread, this process could neither answer nor be ended.
            with suppress(OSError):
                traceback.print_exc()
            exit_process(1)

    def _accept(self, frame: Frame | FrameTooLargeError) -> None:
        if isinstance(frame, FrameTooLargeError):
            self._answer_in_order(Error(kind="bad_request", message=str(frame)))
            return
        try:
            request = self._codec.decode_request(frame[0])
        except FrameError as e:
            self._answer_in_order(e.reply)
            return
        op = self._worker.registry.of(request)
        waiting = _Waiting(None, request, frame[1:])
        # Replies without an id are matched to requests by their order, so such a request must not overtake those that
        # wait.
        if op.execution == "immediate" and (request.id is not None or self._idle()):
            self._send(self._worker.answer(request, self._loader(waiting), on_executor=False))
            return
        if op.execution == "scheduled":
            self._serving.accept(request, self._loader(waiting))
            self._notify()
            return
        if op.execution == "background" and request.id is not None:
            if len(self._background) >= self._worker.settings.queue_size:
                self._refuse_full(request)
            else:
                self._background.submit(request)
            return
        with self._changed:
            # A flush or a shutdown is accepted in any case, because it empties the queue.
            full = len(self._queue) + len(self._unflushed) >= self._worker.settings.queue_size and not isinstance(
                request, Flush | Shutdown
            )
        if full and request.id is not None:
            self._refuse_full(request)
            return
        if isinstance(request, ComputeRequest):
            # Held on arrival: a later request to drop the samples is served by this thread, before the executor reaches
            # this one.
            self._worker.hold(request)
        self._enqueue(waiting)

    def _refuse_full(self, request: Request) -> None:
        limit = self._worker.settings.queue_size
        self._send(Error(id=request.id, kind="queue_full", message=f"{limit} requests are waiting; send it again later"))

    def _serve_data(self, request: Request) -> Callable[[], None]:
        """Execute a request that may take long, in a separate thread."""
        reply = self._worker.answer(request, on_executor=False)
        return lambda: self._send(reply)

    def _answer_in_order(self, reply: Error) -> None:
        if reply.id is not None or self._idle():
            self._send(reply)
        else:
            self._enqueue(_Waiting(reply))

    def _idle(self) -> bool:
        with self._changed:
            return self._outstanding == 0

    def _enqueue(self, waiting: _Waiting) -> None:
        with self._changed:
            if self._refusal:
                request_id = None if waiting.request is None else waiting.request.id
                self._send(waiting.reply or Error(id=request_id, kind="cancelled", message=self._refusal))
                return
            self._outstanding += 1
            # Without an id, a refusal could be mistaken for the reply to an earlier request, so the queue blocks the controller instead.
            if self._held or len(self._queue) >= self._worker.settings.queue_size:
                self._held.append(waiting)
                return
            self._queue.append(waiting)
            self._changed.notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    def _cancel(self, cancel: Cancel) -> bool:
        if cancel.early_end:
            return self._end_early(cancel.request)
        return self._remove(cancel.request)

    def _end_early(self, request_id: Any) -> bool:
        with self._changed:
            waiting = [*self._queue, *self._held, *([self._taken] if self._taken else []), *self._unflushed, *self._flushing]
            is_known = any(w.number == request_id and isinstance(w.request, Generate) for w in waiting)
            if is_known:
                # Kept until the request is answered.
                self._worker.cancelled.add(request_id)
            return is_known

    def _remove(self, request_id: Any) -> bool:
        if self._serving.cancel(request_id):
            self._notify()
            return True
        with self._changed:
            for waiting in [*self._queue, *self._held]:
                if waiting.request is not None and waiting.request.id == request_id:
                    self._release(waiting)
                    # Replaced in place, to keep the order of replies.
                    waiting.reply = Error(id=request_id, kind="cancelled", message="the request was cancelled while it waited")
                    waiting.request, waiting.parts = None, ()
                    return True
            unflushed = next((w for w in self._unflushed if w.number == request_id), None)
            if unflushed is not None:
                self._unflushed.remove(unflushed)
        if unflushed is not None:
            self._finish(unflushed, Error(kind="cancelled", message="the request was cancelled before its flush"))
        return unflushed is not None

    def _release(self, waiting: _Waiting) -> None:
        if isinstance(waiting.request, ComputeRequest):
            self._worker.release(waiting.request)

    def _tick(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            self._lose_controller(ControllerLostError("the parent process has ended"))
        error = self._watchdog.check()
        if error is not None:
            self._send(error)
            with self._changed:
                # That was its reply.
                self._flushing = [w for w in self._flushing if w.number != error.id]
            self._serving.forget(error.id)
            self._refuse_rest(error.message)
            self._watchdog.end_process(self._transport)
        beat_s = self._worker.settings.beat_s
        now = time.monotonic()
        if beat_s and now >= self._next_beat:
            self._next_beat = now + beat_s
            self._beat()

    def _beat(self) -> None:
        running = self._worker.running()
        beat = Beat(rank=self._worker.settings.rank, progress=progress.finished(), metrics=metrics.snapshot())
        if running is not None:
            beat.running, beat.running_s = running.op.name, round(time.monotonic() - running.since, 3)
        self._send(beat)

    def _lose_controller(self, error: ControllerLostError) -> None:
        """Exit immediately: the main thread may be in a collective that never ends."""
        # The reader of standard error is often gone together with the controller.
        with suppress(OSError):
            print(f"model worker {self._worker.settings.rank} ends: {error}", file=sys.stderr, flush=True)
        # A worker that leads a session of its own shares its process group only with its own children.
        if self._parent is not None and os.getsid(0) == os.getpid():
            # Including everything that this worker has started.
            os.killpg(0, signal.SIGKILL)
        exit_process(1)
