"""A process that forks others on request after importing the modules that they need.

The processes communicate only over sockets and pipes. The standard library's fork server comes with a tracker of named semaphores,
which complains when the program or a part of it is killed; this one leaves nothing behind. The server adopts and reaps all processes
that its processes leave behind when they are killed. When the program ends, for any reason, the server kills all of them.
"""

import logging
import math
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Self

from .orphans import adopt_orphans, die_with_parent

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REQUEST = struct.Struct("=cq")
_FORK, _KILL = b"f", b"k"
_NUMBER = struct.Struct("=q")
_SIZE = struct.Struct("=Q")
_LOOK_S = 1.0
"""The interval in seconds at which the server checks whether its program is alive, because a fork may hold the socket open."""
_END_S = 10.0
"""The timeout in seconds for a killed process to end."""
_ADOPTED_S = 1.0
"""The timeout in seconds for adopted processes to end at shutdown: a sandbox's end with their parent, others may not."""


class ProcessEndedError(Exception):
    """A process has ended.

    Args:
        exit_code: Its exit code; negative for a signal; None if it is unknown because the server ended too.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return "it was lost" if self.exit_code is None else f"exit code {self.exit_code}"


class ForkServer:
    """The program's handle of the server.

    Args:
        module: The name of the module with the function `serve_one`, which each process runs with its end of a `Messages`.
        preload: The name of another module that the server imports, so that processes have it.
    """

    def __init__(self, module: str, preload: str) -> None:
        self._module, self._preload = module, preload
        self._lock, self._silent = threading.Lock(), False
        self._socket, theirs = socket.socketpair()
        # As with multiprocessing, a child has the same module search path as its parent.
        search = [os.path.abspath(path) for path in sys.path]
        call = f"main({theirs.fileno()}, {module!r}, {preload!r}, {os.getpid()})"
        words = f"import sys; sys.path[:] = {search!r}; from {__name__} import main; {call}"
        # A signal to all processes of a run is meant for the run, which saves its state and then ends these processes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with theirs:
                # The child inherits the mask of blocked signals. Its own session keeps the terminal's signals away.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", words],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether the server has ended, or is known to be ending."""
        return self._silent or self._process.poll() is not None

    def note_silence(self) -> None:
        """Record that the server has closed a pipe without a report, which only happens when it ends."""
        self._silent = True

    def replaced_if_lost(self) -> "ForkServer":
        """Return this server, or a replacement if it has ended."""
        if not self.lost:
            return self
        log.warning("the process that starts others for %s was lost and is replaced", self._preload)
        self.close()
        return ForkServer(self._module, self._preload)

    def fork(self) -> "ForkedProcess":
        """Start a process.

        Raises:
            ProcessEndedError: The server has ended.
        """
        ours, theirs = socket.socketpair()
        status, report = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [_REQUEST.pack(_FORK, 0)], [theirs.fileno(), report])
        except OSError as e:
            self.note_silence()
            ours.close()
            os.close(status)
            raise ProcessEndedError(None) from e
        finally:
            # The server has copies of its own. With ours open, the end of the process would not close the connection.
            theirs.close()
            os.close(report)
        return ForkedProcess(self, Messages(ours), status)

    def kill(self, pid: int) -> None:
        """Kill a process and its process group. The server knows whether the id still belongs to it."""
        # An error means that the server has ended, and all its processes with it.
        with suppress(OSError), self._lock:
            self._socket.sendall(_REQUEST.pack(_KILL, pid))

    def close(self) -> None:
        """End the server, and with it all its processes."""
        with self._lock:
            self._socket.close()
        try:
            self._process.wait(_END_S + 2 * _ADOPTED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """The program's handle of a process of the server. Use it from a single thread.

    Args:
        server: The server.
        messages: The messages to and from the process.
        status: A pipe from the server, which carries the process id and later the exit code.
    """

    def __init__(self, server: ForkServer, messages: "Messages", status: int) -> None:
        self._server, self._messages, self._status = server, messages, status
        self._pid: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the process was seen to end, or was killed."""
        return self._status < 0

    def send(self, value: Any, timeout_s: float) -> None:
        """Send a value to the process.

        Raises:
            ProcessEndedError: The process has ended.
            TimeoutError: The process did not read the value in time; it was killed.
        """
        if self._status_of(0.0) == "ended":
            raise ProcessEndedError(self.kill())
        try:
            self._messages.send(value, timeout_s)
        except (BrokenPipeError, ConnectionResetError):
            raise ProcessEndedError(self.kill()) from None
        except TimeoutError:
            self.kill()
            raise

    def receive(self, timeout_s: float | None) -> Any:
        """Wait for a value from the process, without limit if None, and return it.

        Raises:
            ProcessEndedError: The process has ended.
            TimeoutError: No value arrived in time; the process was killed.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                left = None if timeout_s is None else max(0.0, deadline - time.monotonic())
                state = self._status_of(left, self._messages.fileno())
                if state == "message":
                    return self._messages.receive(None if left is None else max(0.01, deadline - time.monotonic()))
                if state == "ended":
                    raise EOFError
                if time.monotonic() >= deadline:
                    raise TimeoutError
        except EOFError:
            raise ProcessEndedError(self.kill()) from None
        except TimeoutError:
            self.kill()
            raise

    def wait(self, timeout_s: float | None, *others: int) -> str:
        """Wait until there is a value to receive, without limit if None; return `message`, `ended`, or `nothing` if there is neither.

        Args:
            timeout_s: The timeout in seconds; None for no limit.
            others: File descriptors of other sockets or pipes; the wait also ends when one of them is readable.
        """
        ready = _readable(timeout_s, self._status, self._messages.fileno(), *others)
        if self._messages.fileno() in ready:
            return "message"
        return self._status_of(0.0) if self._status in ready else "nothing"

    def kill(self) -> int | None:
        """End the process if it is running, and return its exit code; None if the server ended before it could report it."""
        if self.ended:
            return None
        code = None
        if self._pid is None and _readable(_END_S, self._status):
            self._pid = self._read_number()
        if self._pid is not None:
            self._server.kill(self._pid)
            code = self._read_number() if _readable(_END_S, self._status) else None
        self._messages.close()
        os.close(self._status)
        self._status = -1
        return code

    def _status_of(self, timeout_s: float | None, *more: int) -> str:
        """Wait for a message or a report of the server; return `message`, `ended`, or `nothing`."""
        # Messages count first: a process may send its result and end before it is read.
        ready = _readable(timeout_s, self._status, *more)
        if any(number in ready for number in more):
            return "message"
        if self._status not in ready:
            return "nothing"
        if self._pid is None:
            self._pid = self._read_number()
            return "ended" if self._pid is None else "nothing"
        return "ended"

    def _read_number(self) -> int | None:
        data = os.read(self._status, _NUMBER.size)
        if len(data) < _NUMBER.size:
            self._server.note_silence()
            return None
        (number,) = _NUMBER.unpack(data)
        return int(number)


class Messages:
    """Values that are sent over a socket.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    def send(self, value: Any, timeout_s: float | None = None) -> None:
        """Send a value.

        Raises:
            TimeoutError: The other end did not read it in time.
        """
        self.send_bytes(pickle.dumps(value), timeout_s)

    def send_bytes(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send a value that is already pickled.

        Raises:
            TimeoutError: The other end did not read it in time.
        """
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_SIZE.pack(len(data)))
        self._socket.sendall(data)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for a value, and return it.

        Raises:
            EOFError: The other end was closed.
            TimeoutError: The value did not arrive in time.
        """
        return pickle.loads(self.receive_bytes(timeout_s))

    def receive_bytes(self, timeout_s: float | None = None) -> bytearray:
        """Wait for a value, and return it still pickled.

        Raises:
            EOFError: The other end was closed.
            TimeoutError: The value did not arrive in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = _SIZE.unpack(self._read(_SIZE.size, deadline))
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(None if deadline is None else max(0.01, deadline - time.monotonic()))
            try:
                # In bounded pieces: `recv` allocates as many bytes as it is asked for.
                chunk = self._socket.recv(min(size - len(data), 2**20))
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


# ---- in the server ------------------------------------------------------------------------------------------------------


def main(number: int, module: str, preload: str, parent: int) -> None:
    """Run the server.

    Args:
        number: The file descriptor of the socket for requests.
        module: The name of the module with `serve_one`.
        preload: The name of another module to import.
        parent: The process id of the program.
    """
    import_module(preload)
    run: Callable[[Messages], None] = import_module(module).serve_one
    with _Server(socket.socket(fileno=number), run, parent) as server:
        server.serve()


class _Server:
    def __init__(self, control: socket.socket, run: Callable[[Messages], None], parent: int) -> None:
        self._control, self._run, self._parent = control, run, parent
        self._reports: dict[int, int] = {}
        """For each process, the pipe on which its exit code is reported."""
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        adopt_orphans()
        # The handler does nothing. The loop wakes up because Python writes a byte to the wakeup descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._reports:
            _kill_group(pid)
        # Their child processes die with them, and are adopted and reaped here.
        for seconds, of_own in ((_END_S, True), (_ADOPTED_S, False)):
            deadline = time.monotonic() + seconds
            while self._reap() and (self._reports or not of_own) and time.monotonic() < deadline:
                time.sleep(0.002)

    def serve(self) -> None:
        """Serve requests until the program ends."""
        with selectors.DefaultSelector() as selector:
            for end in (self._control, self._woken):
                selector.register(end, selectors.EVENT_READ)
            while os.getppid() == self._parent:
                ready = {key.fileobj for key, _ in selector.select(_LOOK_S)}
                if self._woken in ready:
                    self._woken.recv(4096)
                self._reap()
                if self._control in ready and not self._answer():
                    return

    def _answer(self) -> bool:
        """Handle a request; return whether there was one."""
        try:
            data, numbers, _, _ = socket.recv_fds(self._control, _REQUEST.size, 2)
        except ConnectionResetError:
            return False
        if len(data) < _REQUEST.size:
            return False
        kind, pid = _REQUEST.unpack(data)
        if kind == _FORK:
            self._fork(*numbers)
        elif pid in self._reports:
            # It has not been reaped yet, so no other process can have its id.
            _kill_group(pid)
        return True

    def _fork(self, connection: int, report: int) -> None:
        for number in (connection, report):
            os.set_inheritable(number, False)
        server, pid = os.getpid(), os.fork()
        if not pid:
            self._become(server, connection, report)
        # The process itself does this too; either one may come first.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        os.close(connection)
        self._reports[pid] = report
        self._report(report, pid)

    def _become(self, server: int, connection: int, report: int) -> None:
        code = 1
        try:
            # The handlers of the server are not for this process.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            die_with_parent()
            if os.getppid() != server:
                return  # the server ended before this process could ask the kernel to be killed with it
            # With copies of the reports' pipes here, they would stay open after the server's end, and the program
            # would not notice it.
            for number in (report, *self._reports.values()):
                os.close(number)
            for end in (self._control, self._woken, self._wake):
                end.close()
            # Its child processes may be ended by these signals. The process itself is not, because Python's handlers are not inherited.
            for name in _SIGNALS:
                signal.signal(name, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._run(Messages(socket.socket(fileno=connection)))
            code = 0
        except BaseException:  # there is nothing above that could report it
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> bool:
        """Reap all ended processes, including adopted ones; return whether others are still running."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid in self._reports:
                # End the other processes in its group too.
                _kill_group(pid)
                report = self._reports.pop(pid)
                self._report(report, os.waitstatus_to_exitcode(status))
                os.close(report)

    def _report(self, report: int, number: int) -> None:
        with suppress(BrokenPipeError):  # the program is no longer interested in the process
            os.write(report, _NUMBER.pack(number))


def _readable(timeout_s: float | None, *numbers: int) -> set[int]:
    with selectors.DefaultSelector() as selector:
        for number in numbers:
            selector.register(number, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(timeout_s)}


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
