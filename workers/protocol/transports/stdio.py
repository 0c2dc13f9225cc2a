"""Lines of JSON on standard input and output."""

import os
import select
import sys
import threading
import time
from typing import Self

from ....engine.errors import ConfigError
from .base import ControllerLostError, Frame, FrameTooLargeError, Wakeup

MAX_LINE_BYTES = 256 * 2**20
CLOSE_S = 5.0
"""The time limit for the controller to read the last replies, in seconds."""
_CHUNK = 2**18


class StdioTransport:
    """Reads requests from one descriptor and writes replies to another, one JSON object per line.

    Args:
        read: The descriptor to read from.
        write: The descriptor to write to.
        max_line_bytes: The length of the longest line that is accepted.
    """

    binary = False
    greets = False

    def __init__(self, read: int, write: int, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._read, self._write, self._max = read, write, max_line_bytes
        self._buffer = bytearray()
        # Reused by every read: allocating a new buffer would cost more than the rest of a short request.
        self._chunk = memoryview(bytearray(_CHUNK))
        self._scanned = 0
        self._skipping = self._ended = False
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._wakeup = Wakeup()
        # Without events to wait for, poll still reports when the reader of the output is gone.
        self._poll.register(write, 0)
        self._poll.register(self._wakeup.fileno(), select.POLLIN)
        self._reading = False
        self._outgoing = bytearray()
        self._room = select.poll()
        self._room.register(write, select.POLLOUT)

    @classmethod
    def take(cls, max_line_bytes: int = MAX_LINE_BYTES) -> Self:
        """Take over the standard input and output of this process.

        Afterward, what Python or a C library prints to standard output goes to standard error, and standard input is empty.
        """
        if sys.stdout is not None:
            sys.stdout.flush()
        try:
            read, write = os.dup(0), os.dup(1)
        except OSError as e:
            raise ConfigError(f"--transport stdio needs standard input and output, and one of them is closed: {e}") from e
        with open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
        os.dup2(2, 1)
        return cls(read, write, max_line_bytes)

    def receive(self, timeout_s: float, *, reading: bool) -> list[Frame | FrameTooLargeError] | None:
        """Return the lines that have arrived; see `Transport.receive`."""
        if (reading and not self._ended) != self._reading:
            self._reading = not self._reading
            (self._poll.register if self._reading else self._poll.unregister)(self._read)
        waiting = bool(self._outgoing)
        if waiting:
            self._poll.modify(self._write, select.POLLOUT)
        ready = dict(self._poll.poll(timeout_s * 1000))
        # If its reader is gone, a pipe reports an error, and a socket a hang-up.
        if ready.get(self._write, 0) & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            raise ControllerLostError("the reader of the replies has closed its end")
        if waiting:
            self._poll.modify(self._write, 0)
            self._flush()
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        if self._read not in ready:
            return []
        size = os.readv(self._read, [self._chunk])
        if not size:
            # The last line may lack its line feed. The next call finds the end of the input again.
            remaining = bytes(self._buffer)
            self._buffer.clear()
            if remaining.strip() and not self._skipping:
                return [[remaining]]
            self._ended = True
            return None
        self._buffer += self._chunk[:size]
        return self._lines()

    def _lines(self) -> list[Frame | FrameTooLargeError]:
        if not self._scanned and not self._skipping and self._buffer.find(b"\n") == len(self._buffer) - 1:
            # The usual case: exactly one line has arrived.
            line = bytes(self._buffer)
            self._buffer.clear()
            return [[line]] if line.strip() else []
        lines: list[Frame | FrameTooLargeError] = []
        begin = 0
        # No byte is searched twice: a line of many megabytes arrives in thousands of pieces.
        while (end := self._buffer.find(b"\n", max(begin, self._scanned))) >= 0:
            line = bytes(self._buffer[begin:end])
            begin = self._scanned = end + 1
            if self._skipping:
                self._skipping = False
            elif line.strip():
                lines.append([line])
        del self._buffer[:begin]
        self._scanned = len(self._buffer)
        if len(self._buffer) > self._max:
            if not self._skipping:
                lines.append(FrameTooLargeError(f"a line is longer than {self._max} bytes"))
            self._skipping = True
            self._buffer.clear()
            self._scanned = 0
        return lines

    def wake(self) -> None:
        """End the wait of `receive`."""
        self._wakeup.set()

    def send(self, frame: Frame) -> None:
        """Write a line, or as much of it as the controller has room for; the I/O thread writes the rest."""
        with self._lock:
            self._outgoing += frame[0]
            self._outgoing += b"\n"
        self._flush()
        if self._outgoing:
            self._wakeup.set()

    def _flush(self) -> None:
        """Write without ever waiting: a controller that does not read must not stop beats and the watchdog."""
        with self._lock:
            try:
                while self._outgoing and self._room.poll(0):
                    # A ready descriptor takes this many bytes without blocking. O_NONBLOCK would affect other processes
                    # that share it as well.
                    count = os.write(self._write, self._outgoing[: select.PIPE_BUF])
                    del self._outgoing[:count]
            except OSError as e:
                raise ControllerLostError(f"the replies cannot be written ({e.strerror})") from e

    def close(self) -> None:
        """Write the remaining replies, if the controller reads them, and close both descriptors."""
        deadline = time.monotonic() + CLOSE_S
        while self._outgoing and time.monotonic() < deadline:
            self._flush()
            time.sleep(0.01 if self._outgoing else 0.0)
        os.close(self._write)
        os.close(self._read)
