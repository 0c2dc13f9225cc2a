"""The process that forks; see the package. Started with the path of its socket and of the program that stands for the interpreter."""

import atexit
import fcntl
import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOAD = (
    "drivetrain.tests.helpers.preloaded.imports",
    "torch.distributed.run",
    "datasets",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "drivetrain.cli",
)
ANY = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES", "GLOO_"),
    *("DRIVETRAIN_", "PYTEST_", "COLUMNS", "LINES", "CUBLAS_", "NVTE_", "WANDB_SERVICE", "_TORCHINDUCTOR"),
    # What torchrun sets for NCCL, and `drivetrain serve` for the hub's bars.
    *("TORCH_NCCL_", "HF_HUB_DISABLE_PROGRESS_BARS"),
)
"""The beginnings of the variables that no import reads, or that libraries set while they work."""
SET_HERE = ("PYTHON", "PYTHONPATH", "PWD", "OLDPWD", "SHLVL", "_")


class Server:
    """The server.

    Args:
        path: The path of its socket.
        client: The path of the program that stands for the interpreter.
    """

    def __init__(self, path: str, client: str) -> None:
        self._client = client
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._environment = self._compared(dict(os.environ))
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._search = [entry for entry in sys.path[1:] if entry not in given]
        self._running: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    @staticmethod
    def _compared(environment: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if not name.startswith(ANY) and name not in SET_HERE}

    def serve(self) -> None:
        """Serve until the standard input ends, which it does with the program that has started this one."""
        for end in (self._listener, self._woken, sys.stdin.fileno()):
            self._selector.register(end, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == sys.stdin.fileno():
                    for pid in self._running:
                        _kill(pid)
                    return
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    self._take(key.fileobj)
            self._reap()

    def _take(self, connection: Any) -> None:
        pid = next((p for p, c in self._running.items() if c is connection), None)
        try:
            data, numbers, _, _ = socket.recv_fds(connection, 64, 250)
        except ConnectionResetError:
            data, numbers = b"", []
        if numbers:
            self._start(connection, numbers)
        elif data:
            # A signal, which may come when the process has ended already.
            if pid is not None:
                os.kill(pid, int(data))
        else:
            self._selector.unregister(connection)
            connection.close()
            if pid is not None:
                # Whoever had started it has killed what stood for it.
                _kill(pid)

    def _start(self, connection: socket.socket, numbers: list[int]) -> None:
        with os.fdopen(numbers[0], "rb") as file:
            file.seek(0)
            request = json.loads(file.read())
        if self._compared(request["environment"]) != self._environment:
            connection.send(b"real")
            for number in numbers[1:]:
                os.close(number)
            return
        pid = os.fork()
        if not pid:
            connection.close()
            self._become(request, numbers[1:])
        for number in numbers[1:]:
            os.close(number)
        self._running[pid] = connection
        connection.send(b"forked")

    def _become(self, request: dict[str, Any], numbers: list[int]) -> None:
        code = 1
        try:
            if request["leads_session"]:
                os.setsid()
            else:
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for end in (self._listener, self._woken, self._wake, *self._running.values()):
                end.close()
            _place(numbers, request["numbers"])
            os.chdir(request["folder"])
            os.umask(request["mask"])
            os.environ.clear()
            os.environ.update(request["environment"])
            code = self._run(request["words"], request["pid"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _run(self, words: list[str], client: int) -> int:
        """Run a module as the interpreter would, and return its exit code."""
        unbuffered = words[0] == "-u"
        _, module, *arguments = words[unbuffered:]
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=unbuffered or os.isatty(1), write_through=unbuffered)
        sys.executable, sys.argv = self._client, ["-m", *arguments]
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = [os.getcwd(), *given, *self._search]
        # The parent that the program looks for is whoever started what stands for it.
        os.getppid = lambda: int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[1])
        # Of a module that is imported already.
        warnings.filterwarnings("ignore", r".* found in sys\.modules", RuntimeWarning)
        code = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as e:
            if isinstance(e.code, int | None):
                code = e.code or 0
            else:
                print(e.code, file=sys.stderr)
                code = 1
        except KeyboardInterrupt:
            traceback.print_exc()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            traceback.print_exc()
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        return code & 0xFF

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._running.pop(pid)
            with suppress(OSError):  # nobody waits for it any more
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _place(received: list[int], wanted: list[int]) -> None:
    """Give file descriptors the numbers that they have in the process that sent them."""
    above = max([*wanted, *received, 2]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in received]
    for number in received:
        os.close(number)
    for number, target in zip(moved, wanted, strict=True):
        os.dup2(number, target, inheritable=True)
        os.close(number)


def _kill(pid: int) -> None:
    for call in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            call(pid, signal.SIGKILL)


if __name__ == "__main__":
    # Before the imports: who connects meanwhile waits for them.
    server = Server(*sys.argv[1:])
    gc.disable()
    for name in PRELOAD:
        import_module(name)
    # A collection in a fork would walk through all of it, half a second each time.
    gc.freeze()
    gc.enable()
    server.serve()
