"""Commands of tests as forks of a process that has imported torch, transformers and the engines.

A test starts commands with `sys.executable`, as the product does. While `preloaded` is active, that is a small program (`client.py`) that asks
a server (`server.py`) for a fork which runs the module, passes signals on to it, and ends as it ends. The server runs nothing itself, no
operation of torch and no thread, so that its forks begin as a fresh process would. Started as real processes are those of another
environment than the server's (of what may be read at import), and everything but `-m` with a module of this package or torchrun.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REAL = sys.executable
"""The interpreter."""
SERVER = "DRIVETRAIN_TEST_SERVER"
"""The variable with the path of the server's socket."""
server_environment: dict[str, str] = {}
"""The environment that the server was started with. Tests may change that of this process, and then commands are not forked."""


@contextmanager
def preloaded() -> Iterator[None]:
    """Run a block whose commands are forks. The server ends with it, or with this process."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="drivetrain-tests-") as folder:
        client = Path(folder) / "bin" / "python"
        client.parent.mkdir()
        # Programs are looked for beside the interpreter.
        for program in Path(REAL).parent.iterdir():
            if program.name != "python":
                (client.parent / program.name).symlink_to(program)
        client.write_text(
            f'#!/bin/sh\nexec {shlex.quote(REAL)} -ISB {shlex.quote(str(here / "client.py"))} {shlex.quote(REAL)} "$@"\n'
        )
        client.chmod(0o755)
        address = f"{folder}/socket"
        os.environ[SERVER] = address
        server_environment.update(os.environ)
        words = [REAL, str(here / "server.py"), address, str(client)]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        sys.executable = str(client)
        while not Path(address).exists() and server.poll() is None:
            time.sleep(0.01)
        try:
            yield
        finally:
            sys.executable = REAL
            del os.environ[SERVER]
            # It ends when its input does.
            assert server.stdin is not None
            server.stdin.close()
            server.wait()


@contextmanager
def real_processes() -> Iterator[None]:
    """Run a block whose commands are processes of their own, as those of a user."""
    before, sys.executable = sys.executable, REAL
    try:
        yield
    finally:
        sys.executable = before
