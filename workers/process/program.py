"""Run a model worker: one process that holds roles of a controller and serves its requests, on a pipe or a socket.

python -m drivetrain.workers.process --rank R --world-size N --transport stdio
drivetrain worker run --rank R --world-size N --transport stdio       the same
drivetrain worker comm-id                                             an id for `init`, for controllers in other languages

`drivetrain worker run --help` lists all options.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from ...engine.errors import ConfigError
from ...engine.parallel.process import exit_process
from ..protocol import comm_id
from ..protocol.names import parse_program
from ..protocol.operations import Registry
from ..protocol.transports.base import Transport
from ..protocol.transports.stdio import MAX_LINE_BYTES, StdioTransport
from .loop import RequestLoop
from .worker import ModelWorker, WorkerSettings


def run(argv: Sequence[str] | None = None) -> int:
    """Serve requests until the controller ends; return the exit code."""
    args = _parser().parse_args(argv)
    # Standard output carries the replies of the stdio transport.
    logging.basicConfig(stream=sys.stderr, level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = _settings(args)
        worker = ModelWorker(settings)
        if args.listen_fd is not None:
            worker.listener = socket.socket(fileno=args.listen_fd)
        transport = _transport(args)
    except (ConfigError, OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    settings.export()
    parent = os.getppid() if args.parent is None else args.parent
    # Ctrl-C in a terminal reaches all processes. A controller ends its workers itself, in order.
    signal.signal(signal.SIGINT, signal.SIG_DFL if args.transport == "stdio" else signal.SIG_IGN)
    # Bypasses the interpreter's normal exit, which would wait for threads of roles.
    exit_process(RequestLoop(worker, transport, parent).run())


def print_comm_id(argv: Sequence[str] | None = None) -> int:
    """Print a communicator id; return the exit code."""
    parser = argparse.ArgumentParser(prog="drivetrain worker comm-id", description="Print an id for the request init.")
    parser.add_argument("--host", default="127.0.0.1", help="the address at which rank 0 can be reached by all ranks")
    parser.add_argument("--port", type=int, default=0, help="its port; 0 takes one that is free now")
    args = parser.parse_args(argv)
    try:
        minted, listener = comm_id.mint(args.host, args.port)
        listener.close()
        print(minted.hex())
    except comm_id.CommIdError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `drivetrain worker`; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"run": run, "comm-id": print_comm_id}
    if words and words[0] in commands:
        return commands[words[0]](words[1:])
    if words and words[0] not in ("-h", "--help"):
        print(f"error: unknown command {words[0]!r}; the commands are {', '.join(commands)}", file=sys.stderr)
        return 2
    print(__doc__)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain worker run", description="Start one model worker: one process, one rank.", allow_abbrev=False
    )
    add = parser.add_argument
    environment = os.environ
    # Strings, so that argparse itself refuses what is not a number.
    add("--rank", type=int, default=environment.get("RANK", "0"), help="its rank")
    add("--world-size", type=int, default=environment.get("WORLD_SIZE", "1"), help="the number of ranks")
    add("--local-rank", type=int, default=environment.get("LOCAL_RANK"), help="the index of its device; defaults to its rank")
    add("--transport", default="stdio", help="stdio (lines of JSON), zmq:///path or zmq://host:port")
    add("--allow", action="append", default=[], metavar="MODULE:NAME", help="a class or function that requests may refer to")
    add(
        "--program",
        default=None,
        metavar="JSON",
        help="the program that names of __main__ refer to: its module, file, arguments",
    )
    add("--init-timeout", type=float, default=120.0, metavar="S", help="how long init waits for the other ranks")
    add("--timeout", type=float, default=1800.0, metavar="S", help="timeout of collectives")
    add("--flush-timeout", type=float, default=60.0, metavar="S", help="how long a flush waits until all ranks have it")
    add(
        "--watchdog",
        action="append",
        default=[],
        metavar="[OP=]S",
        help="how long an operation may make no progress; 0 disables the limit (default: 1200)",
    )
    add("--beat", type=float, default=0.0, metavar="S", help="interval of heartbeats; 0 sends none")
    add("--queue-size", type=int, default=1024, metavar="N", help="maximum number of pending requests")
    add(
        "--max-wait-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="how long a request to an idle model waits for others to be batched with it",
    )
    add("--max-line-mib", type=int, default=MAX_LINE_BYTES // 2**20, metavar="N", help="the longest line on standard input")
    add("--identity", default=None, help="its name for the controller behind a socket")
    add(
        "--keys-fd",
        type=int,
        default=None,
        metavar="FD",
        help="an inherited file descriptor with the keys for zmq://host:port",
    )
    add("--listen-fd", type=int, default=None, metavar="FD", help="an inherited socket that listens at the comm_id's address")
    add("--parent", type=int, default=None, metavar="PID", help="the process whose end ends this one; defaults to its parent")
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser


def _settings(args: argparse.Namespace) -> WorkerSettings:
    launched = os.environ.get("WORLD_SIZE")
    if launched is not None and launched != str(args.world_size):
        raise ConfigError(
            f"--world-size {args.world_size}, but the launcher started {launched} processes (WORLD_SIZE); use the same number"
        )
    watchdog: dict[str, float] = {}
    default = WorkerSettings.watchdog_s
    ops = Registry().ops
    for word in args.watchdog:
        op, separator, seconds = word.rpartition("=")
        try:
            value = float(seconds)
        except ValueError:
            raise ConfigError(
                f"--watchdog {word}; pass seconds, or an operation and seconds as in generate_step=120"
            ) from None
        if separator and op not in ops:
            raise ConfigError(f"--watchdog {word}: there is no operation {op!r}; there are {', '.join(ops)}")
        if separator:
            watchdog[op] = value
        else:
            default = value
    return WorkerSettings(
        rank=args.rank,
        world_size=args.world_size,
        local_rank=args.local_rank,
        init_s=args.init_timeout,
        timeout_s=args.timeout,
        flush_s=args.flush_timeout,
        watchdog_s=default,
        watchdog=watchdog,
        beat_s=args.beat,
        queue_size=args.queue_size,
        max_wait_ms=args.max_wait_ms,
        names=tuple(args.allow),
        program=None if args.program is None else parse_program(args.program),
    )


def _stdio(args: argparse.Namespace) -> Transport:
    if args.max_line_mib < 1:
        raise ConfigError(f"--max-line-mib {args.max_line_mib}; it must be at least 1")
    return StdioTransport.take(args.max_line_mib * 2**20)


def _zeromq(args: argparse.Namespace) -> Transport:
    from ..protocol.transports.zeromq import CurveKeys, ZmqTransport

    identity = args.identity or f"rank-{args.rank}"
    if len(identity.encode()) > 255:
        raise ConfigError(f"--identity has {len(identity.encode())} bytes; it may have 255")
    keys = None if args.keys_fd is None else CurveKeys.read(args.keys_fd)
    return ZmqTransport(args.transport, identity.encode(), keys, patience_s=args.init_timeout)


TRANSPORTS: dict[str, Callable[[argparse.Namespace], Transport]] = {"stdio": _stdio, "zmq": _zeromq}
"""What opens a transport, by the first word of `--transport`."""


def _transport(args: argparse.Namespace) -> Transport:
    scheme = args.transport.partition("://")[0]
    if scheme not in TRANSPORTS:
        raise ConfigError(f"--transport {args.transport}: there is no transport {scheme!r}; there are {', '.join(TRANSPORTS)}")
    return TRANSPORTS[scheme](args)
