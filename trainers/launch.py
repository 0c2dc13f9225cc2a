"""What every trainer's command does: parse, run, and turn an error into one line and an exit code."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..engine.parallel.process import report_failure
from .config.parse import parse

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
    except Exception as e:  # of any kind: this process must end now, or peers would wait for it until their timeout
        return report_failure(e)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted; the same command goes on from the last checkpoint, if one was saved", file=sys.stderr)
        return 130
    return 0
