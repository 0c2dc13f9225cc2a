"""The shared commands of the trainers: parse, train, and turn an error into one line and an exit code."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeVar

from ..engine.parallel.process import report_failure
from .config.parse import parse
from .config.rl import RLConfig
from .config.runs import RunConfig

C = TypeVar("C", RunConfig, RLConfig)


DRY_RUN = "--dry-run"


def launch(config_class: type[RunConfig], trainer: str, argv: Sequence[str] | None, usage: str | None) -> int:
    """Parse the command line, then train, or with `--dry-run` make only a first step.

    Args:
        config_class: The trainer's configuration.
        trainer: The name of the trainer's class in `trainers.trainer`. It is imported after parsing, so that `--help` and typos
            do not wait seconds for torch.
        argv: The command-line arguments; None for those of this process.
        usage: The first lines of `--help`.

    Returns:
        The exit code.
    """

    words = list(sys.argv[1:] if argv is None else argv)

    def train(config: RunConfig) -> int | None:
        made = getattr(import_module(".trainer", __package__), trainer)(config)
        if DRY_RUN in words:
            made.dry_run()
            return None
        signal: int | None = made.train().result.signal
        return signal

    return _launch(config_class, train, [word for word in words if word != DRY_RUN], usage)


def launch_rl(config_class: type[RLConfig], trainer: str, argv: Sequence[str] | None, usage: str | None) -> int:
    """Parse the command line, then train with reinforcement learning.

    Args:
        config_class: The trainer's configuration.
        trainer: The name of the trainer's class in `trainers.rl.trainer`, which is imported after parsing.
        argv: The command-line arguments; None for those of this process.
        usage: The first lines of `--help`.

    Returns:
        The exit code.
    """

    def train(config: RLConfig) -> int | None:
        module = import_module(".rl.trainer", __package__)
        signal: int | None = getattr(module, trainer)(config).train().signal
        return signal

    return _launch(config_class, train, argv, usage)


def _launch(config_class: type[C], train: Callable[[C], int | None], argv: Sequence[str] | None, usage: str | None) -> int:
    try:
        signal = train(parse(config_class, sys.argv[1:] if argv is None else argv, (usage or "").strip()))
    except Exception as e:  # any error: this process must end now, or its peers would wait for it until their timeout
        return report_failure(e)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted; the same command resumes from the last checkpoint, if one was saved", file=sys.stderr)
        return 130
    # A launcher reports the signal itself, and would take another exit code of a worker that has saved for a failure.
    return 0 if signal is None or "TORCHELASTIC_RUN_ID" in os.environ else 128 + signal
