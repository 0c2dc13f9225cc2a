"""A sandbox for programs written by a model: bubblewrap under an otherwise unused user id.

The program has no network access. It sees only /usr and a small empty /tmp of the file system, and inherits neither environment
variables nor open files. Its memory, processes, output and time are limited. It runs under a dedicated user id, because the kernel's
process limit does not apply to root, and because its processes can then be identified. If any of this is unavailable, no program runs.
"""

import os
import platform
import re
import resource
import secrets
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ..engine.errors import ConfigError
from ..engine.parallel.orphans import adopting_orphans
from .seccomp import seccomp_filter

RunKind = Literal["ended", "timeout", "memory", "output", "not_started"]
MIB = 2**20
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
# The interval at which limits are checked while a program neither reads nor prints.
_POLL_S = 0.02
# Above the ids that systems assign. Each program gets a random one, because its memory is that of all processes with
# its id.
_FIRST_UID = 2**30
_PAGE = resource.getpagesize()
_REAP_S = 10.0
"""The time limit for reaping killed processes, in seconds. It is only reached if the kernel cannot end them yet."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """The resource limits of a program.

    Args:
        seconds: The wall-clock time, in seconds.
        memory_mb: The address space of each of its processes, in MiB. If this process runs as root, also the memory of all of them
            together; otherwise they cannot be identified.
        processes: The number of processes and threads.
        disk_mb: The size of /tmp, and of a single file, in MiB. It takes up memory of the machine.
        output_mb: The size of its output, in MiB.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    processes: int = 16
    disk_mb: int = 16
    output_mb: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "processes", "disk_mb", "output_mb"):
            if not 0 < getattr(self, name) < 2**31:
                raise ConfigError(f"the sandbox's {name}={getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """The result of running a program.

    Args:
        kind: `ended`, if it ended by itself; `timeout`, `memory` or `output`, if it exceeded that limit; `not_started`, if the sandbox or
            the interpreter failed before the program began.
        exit_code: The exit code; as in a shell, 128 plus the signal if a signal ended it.
        stdout: Its standard output.
        stderr: Its standard error.
    """

    kind: RunKind
    exit_code: int
    stdout: str
    stderr: str


def run_program(program: str, stdin: str = "", limits: SandboxLimits | None = None) -> ProgramResult:
    """Run a Python program in the sandbox.

    Args:
        program: The source.
        stdin: Its standard input.
        limits: Its resource limits.

    Raises:
        ConfigError: There is no sandbox on this machine; the message names what is missing.
    """
    limits = limits or SandboxLimits()
    return _run(check_sandbox(), program, stdin, limits)


@cache
def check_sandbox() -> str:
    """Check that programs can be confined on this machine; return the interpreter that runs them.

    Raises:
        ConfigError: Something is missing; the message names it.
    """
    if platform.system() != "Linux":
        raise ConfigError(
            f"programs written by a model run only on Linux, not on {platform.system()}; leave out the reward code"
        )
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux")):
        if shutil.which(tool) is None:
            raise ConfigError(
                f"programs written by a model run only in a sandbox, which needs {tool}: apt-get install {package}, or leave out the "
                "reward code"
            )
    python = next((path for path in _PYTHONS if os.access(path, os.X_OK)), None)
    if python is None:
        raise ConfigError(f"the sandbox needs a system Python ({' or '.join(_PYTHONS)}): apt-get install python3")
    secret = secrets.token_hex(8)
    # The process id is this small only in a process namespace of its own.
    result = _run(python, f"import os; print(os.getpid() < 9, {secret!r})", "", SandboxLimits(seconds=60))
    if result.stdout != f"True {secret}\n":
        raise ConfigError(
            "the sandbox does not work on this machine: bubblewrap says: "
            f"{result.stderr.strip()[-300:] or result.kind}; it needs unprivileged user namespaces (in a container: "
            "--security-opt seccomp=unconfined, or sysctl kernel.unprivileged_userns_clone=1). Leave out the reward code, or run where "
            "they are allowed"
        )
    return python


def _run(python: str, program: str, stdin: str, limits: SandboxLimits) -> ProgramResult:
    memory = int(limits.memory_mb * MIB)
    # Encoded before there is anything to clean up: a lone surrogate cannot be encoded.
    texts = program.encode(errors="replace"), stdin.encode(errors="replace")
    # Three pipes: the source of the program, a sign that it has begun, and bwrap's report of the first process.
    source, write = os.pipe()
    start_read, begin = os.pipe()
    about, tell = os.pipe()
    denied = _as_file(seccomp_filter() or b"")
    # The descriptor is closed before the program itself runs.
    bootstrap = (
        f"import os, runpy; os.write({begin}, b'1'); os.close({begin}); runpy.run_path('/main.py', run_name='__main__')"
    )
    words = [
        # New namespaces: no network, and no further user namespaces. Everything ends with this process.
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
        *("--seccomp", str(denied), "--info-fd", str(tell)),
        # Of the file system only /usr and the source are visible, and everything that can be written to is limited in
        # size.
        *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
        *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
        *("--proc", "/proc", "--dev", "/dev", "--size", str(MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(limits.disk_mb * MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--ro-bind-data", str(source), "/main.py", "--remount-ro", "/"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONIOENCODING", "utf-8"),
        # Limits that the kernel enforces; `_watch` adds those of the time, the output and the memory of all processes.
        *("--", "prlimit", f"--nproc={limits.processes}", f"--as={memory}", f"--fsize={limits.disk_mb * MIB}"),
        *(f"--cpu={int(limits.seconds) + 2}", "--nofile=64", "--core=0", "--"),
        *(python, "-I", "-B", "-c", bootstrap),
    ]
    # Root can switch to any user id; other users keep their own, mapped to an unprivileged one inside.
    uid = _FIRST_UID + secrets.randbelow(_FIRST_UID) if os.geteuid() == 0 else None
    with adopting_orphans():
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                cwd="/",
                pass_fds=[source, begin, tell, denied],
                start_new_session=True,
                user=uid,
                group=uid,
                extra_groups=None if uid is None else [],
            )
        except OSError as e:
            for number in (write, start_read, about):
                os.close(number)
            return ProgramResult(kind="not_started", exit_code=127, stdout="", stderr=f"bwrap cannot be started: {e}")
        finally:
            for number in (source, begin, tell, denied):
                os.close(number)
        with process:
            try:
                kind, printed = _watch(process, write, *texts, limits, uid)
            finally:
                _kill(process)
                _reap(process.pid, _first_process(about))
                # All processes have ended and closed their ends of the pipe, so this read does not block.
                started = os.read(start_read, 1) == b"1"
                os.close(start_read)
    code = process.returncode
    return ProgramResult(
        kind=kind if started else "not_started",
        exit_code=128 - code if code < 0 else code,
        stdout=printed[0].decode(errors="replace"),
        stderr=printed[1].decode(errors="replace"),
    )


def _watch(
    process: "subprocess.Popen[bytes]", source: int, program: bytes, stdin: bytes, limits: SandboxLimits, uid: int | None
) -> tuple[RunKind, tuple[bytes, bytes]]:
    """Feed a process and read it until it ends or exceeds a limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + limits.seconds
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    texts = tuple(outputs.values())
    # A duplicate, because `_write` closes it; Popen must not close the same number again.
    inputs = {source: memoryview(program), os.dup(process.stdin.fileno()): memoryview(stdin)}
    process.stdin.close()
    kind: RunKind = "ended"
    # One loop that never blocks serves all pipes: a program need not read its input, and may print without end.
    with selectors.DefaultSelector() as selector:
        for number in inputs:
            os.set_blocking(number, False)
            selector.register(number, selectors.EVENT_WRITE)
        for number in outputs:
            selector.register(number, selectors.EVENT_READ)
        try:
            while outputs:
                for key, _ in selector.select(_POLL_S):
                    if key.fd in inputs:
                        _write(key.fd, inputs, selector.unregister)
                    elif chunk := os.read(key.fd, 65536):
                        outputs[key.fd] += chunk
                    else:
                        selector.unregister(key.fd)
                        del outputs[key.fd]
                if sum(map(len, texts)) > limits.output_mb * MIB:
                    kind = "output"
                elif time.monotonic() > deadline:
                    kind = "timeout"
                # Without an id of its own, a program's processes cannot be identified; then only the address space of
                # each is limited.
                elif uid is not None and _memory_of(uid) > limits.memory_mb * MIB:
                    kind = "memory"
                if kind != "ended" or (process.poll() is not None and not outputs):
                    break
        finally:
            for number in inputs:
                os.close(number)
    if kind == "ended":
        try:
            # A program may close its output long before it ends.
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kind = "timeout"
    return kind, (bytes(texts[0]), bytes(texts[1]))


def _write(number: int, inputs: dict[int, memoryview], unregister: Callable[[int], object]) -> None:
    unwritten = inputs[number]
    try:
        sent = os.write(number, unwritten[:65536]) if unwritten else 0
    except BlockingIOError:
        return
    except BrokenPipeError:
        # The program does not read all of its input, or has ended.
        sent = len(unwritten)
    inputs[number] = unwritten[sent:]
    if not inputs[number]:
        unregister(number)
        os.close(number)
        del inputs[number]


def _as_file(content: bytes) -> int:
    number = os.memfd_create("filter")
    os.write(number, content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _kill(process: "subprocess.Popen[bytes]") -> None:
    # The namespace's first process ends with bwrap, and all others end with it, including stopped ones.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _first_process(about: int) -> int | None:
    """Return the process id of the sandbox's first process, as reported by bwrap, and close the pipe; None if it was not created."""
    os.set_blocking(about, False)
    try:
        status = os.read(about, 65536)
    except BlockingIOError:
        status = b""
    finally:
        os.close(about)
    match = re.search(rb'"child-pid": *(\d+)', status)
    return int(match[1]) if match else None


def _reap(group: int, first: int | None) -> None:
    """Reap the first process of the sandbox, which ends after all others in it.

    bwrap does not wait for it, and this process adopts it.

    Args:
        group: The process group of bwrap, which contains the first process until bwrap reports it.
        first: Its process id, if bwrap has reported it.
    """
    deadline = time.monotonic() + _REAP_S
    for child in (-group, *(() if first is None else (first,))):
        # No such child: it was already reaped, or the system does not allow adopting orphans.
        with suppress(ChildProcessError):
            while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                os.kill(child, signal.SIGKILL)
                time.sleep(0.001)


def _memory_of(uid: int) -> int:
    """Return the resident memory of all processes of a user, in bytes."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == uid:
                    total += int((folder / "statm").read_text().split()[1]) * _PAGE
            except (OSError, IndexError):
                # The process has ended.
                continue
    return total
