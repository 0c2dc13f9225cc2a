"""A model worker as a child process of its controller: its start, output and end."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from ...engine.errors import ConfigError
from ..protocol.errors import LAST_OUTPUT
from ..protocol.names import importing_program, program_arguments
from ..protocol.transports.base import WorkerKeys

logger = logging.getLogger(__name__)

TERMINATE_S = 5.0
"""The time between SIGTERM and SIGKILL when ending a worker."""
LAST_LINES = 20
# Longer output without a line end is passed on in pieces, so that it does not accumulate in memory.
_MAX_LINE = 2**16
_MODULE = f"{__name__.rpartition('.supervision.')[0]}.process"
# The format in which a worker logs; see `process.program.run`.
_RECORD = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)


class ChildProcess:
    """A model worker that this process has started.

    Its log records are re-emitted through this process's logging, prefixed with its name. All other output goes to this process's
    standard error.

    Args:
        name: The name of the worker, for messages.
        address: The controller's address.
        arguments: Additional arguments of `drivetrain worker run`, beyond those derived from the other arguments.
        allow: The names that requests may refer to.
        environment: Additional environment variables.
        keys: The keys that it connects with.
        program: The arguments that locate the controller's program; None for this program.
        listener: The socket at which rank 0 listens; it is passed on, and closed here.
        on_exit: Called with this object when the process has ended, in a separate thread.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        arguments: Sequence[str] = (),
        allow: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        keys: WorkerKeys | None = None,
        program: Sequence[str] | None = None,
        listener: socket.socket | None = None,
        on_exit: Callable[["ChildProcess"], None] = lambda process: None,
    ) -> None:
        if importing_program():
            raise ConfigError(
                "this program starts a worker at import time, and workers import it; move that code under: if __name__ == '__main__':"
            )
        self.name = name
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._on_exit = on_exit
        words = [sys.executable, "-m", _MODULE, "--transport", address, f"--identity={name}", "--parent", str(os.getpid())]
        words += ["--log-level", _level(), *arguments]
        words += [part for allowed in sorted(allow) for part in ("--allow", allowed)]
        words += program_arguments() if program is None else program
        inherited = []
        if keys is not None:
            inherited.append(keys.pass_on())
            words += ["--keys-fd", str(inherited[-1])]
        if listener is not None:
            inherited.append(listener.detach())
            words += ["--listen-fd", str(inherited[-1])]
        # As with multiprocessing, a child can import the modules that its parent can.
        search = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))
        # If torchrun started the controller, these describe the controller, not the worker.
        ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=inherited,
                env={**ours, "PYTHONPATH": search, **(environment or {})},
                # A separate session: Ctrl-C reaches only the controller, which ends its workers itself, and all processes that a worker
                # starts can be ended with it.
                start_new_session=True,
            )
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name=f"{name}-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal; None while the process runs."""
        return self._process.poll()

    def ending(self) -> str:
        """Return how the process ended, for messages."""
        code = self.exit_code
        if code is None:
            return "is still running"
        how = f"exited with code {code}"
        if code < 0:
            is_signal = -code in set(signal.Signals)
            how = f"was killed by {signal.Signals(-code).name if is_signal else f'signal {-code}'}"
        if code == -signal.SIGKILL:
            how += ", either from outside or because memory ran out"
        return how

    def describe_end(self) -> str:
        """Return how the process ended, with its last output."""
        words = self.last_output()
        return self.ending() + (f"{LAST_OUTPUT}\n{words}" if words else "")

    def last_output(self) -> str:
        """Return the last lines that the process printed."""
        # The last output may still be in the pipe. A process that the worker started may keep the pipe open.
        self._reader.join(1.0 if self.exit_code is not None else 0.0)
        return "\n".join(self._lines)

    def terminate(self, patience_s: float = TERMINATE_S) -> None:
        """End the process and everything that it started: SIGTERM, then SIGKILL if it is still running."""
        with suppress(ProcessLookupError, PermissionError):
            self._process.terminate()
        if not self.wait(patience_s):
            self.kill()

    def send_kill(self) -> None:
        """Kill the process and everything that it started, without waiting for its end."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        self.send_kill()
        self.wait(TERMINATE_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait(self) -> None:
        self._process.wait()
        # Processes that it started and left behind are ended too.
        self.send_kill()
        self._on_exit(self)

    def _read(self) -> None:
        assert self._process.stdout is not None
        unfinished = b""
        with self._process.stdout as output:
            while chunk := os.read(output.fileno(), 65536):
                # A progress bar returns to the start of its line with \r and never ends the line.
                *lines, unfinished = re.split(rb"[\r\n]+", unfinished + chunk)
                for line in lines:
                    self._take(line.decode(errors="replace"))
                if len(unfinished) > _MAX_LINE:
                    self._take(unfinished.decode(errors="replace"))
                    unfinished = b""
        self._take(unfinished.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if not line:
            return
        self._lines.append(line)
        record = _RECORD.fullmatch(line)
        if record is not None:
            level, source, message = record.groups()
            logger.log(getattr(logging, level), "[%s] %s: %s", self.name, source, message)
            return
        # The reader of this process's standard error may be gone; the worker must still be able to print.
        with suppress(OSError, ValueError):
            # A single write, so that the lines of several workers do not interleave.
            sys.stderr.write(f"[{self.name}] {line}\n")
            sys.stderr.flush()


def _level() -> str:
    """Return the log level of a child: that of this module."""
    level = logger.getEffectiveLevel()
    return next((name for name, number in (("debug", 10), ("info", 20), ("warning", 30)) if level <= number), "error")
