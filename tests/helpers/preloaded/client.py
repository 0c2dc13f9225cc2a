"""Asks the server for a fork that runs a module, and stands for it: passes signals on, and ends as it ends. Imports little.

client.py PYTHON [-u] -m MODULE ...
"""

import json
import os
import signal
import socket
import sys
from typing import NoReturn

SERVER = "DRIVETRAIN_TEST_SERVER"
MODULES = ("drivetrain.", "torch.distributed.run")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> NoReturn:
    """Run the command."""
    real, *words = sys.argv[1:]
    rest = words[words[:1] == ["-u"] :]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if SERVER not in os.environ or rest[:1] != ["-m"] or not rest[1].startswith(MODULES):
        os.execv(real, [real, *words])
    try:
        connection.connect(os.environ[SERVER])
    except OSError:
        os.execv(real, [real, *words])
    mask = os.umask(0)
    os.umask(mask)
    # This process has opened none that children inherit.
    passed = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inherited(number)]
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "mask": mask,
        "numbers": passed,
        "pid": os.getpid(),
        "leads_session": os.getsid(0) == os.getpid(),
    }
    # A message of this kind of socket has to fit into its buffer, which an environment may not.
    held = os.memfd_create("request")
    os.write(held, json.dumps(request).encode())
    socket.send_fds(connection, [b"fork"], [held, *passed])
    if connection.recv(64) == b"real":
        os.execv(real, [real, *words])
    for number in FORWARDED:
        signal.signal(number, lambda sent, _: connection.send(str(int(sent)).encode()))
    answer = connection.recv(64)
    code = int(answer) if answer else 1  # the server has ended
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # that of the listing itself
        return False


main()
