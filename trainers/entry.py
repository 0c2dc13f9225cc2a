"""What every trainer's command does: parse, run, and turn an error into one line and an exit code."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..engine.errors import DrivetrainError
from .options import parse

Config = TypeVar("Config")


def run_main(cls: type[Config], argv: Sequence[str] | None, usage: str, load: Callable[[], Callable[[Config], None]]) -> int:
    """Parse, then run.

    Args:
        cls: the config class.
        argv: words of the command line; this process's by default.
        usage: first lines of `--help`.
        load: imports and returns what runs: torch takes a second, which --help and a typing error need not wait for.

    Returns:
        the exit code.
    """
    try:
        config = parse(cls, sys.argv[1:] if argv is None else argv, usage)
        load()(config)
    except DrivetrainError as e:
        return _fail(e)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted; the same command goes on from the last checkpoint, if one was saved", file=sys.stderr)
        return 130
    return 0


def _fail(error: Exception) -> int:
    """Say what is wrong, once for the whole job."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    # torchrun ends with a report of its own on the worker that failed; told this way, the report ends with the message.
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        with open(report, "w") as file:
            json.dump({"message": f"error: {error}", "timestamp": int(time.time())}, file)
    return 1
