"""The shared commands of the trainers: parse, train, and turn an error into one line and an exit code."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TypeVar

from ..engine.hf.model_path import check_model_path
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

    return _launch(config_class, f".trainer:{trainer}", argv, usage)


def launch_rl(config_class: type[RLConfig], trainer: str, argv: Sequence[str] | None, usage: str | None) -> int:
    """Parse the command line, then train with reinforcement learning, or with `--dry-run` make only a first step.

    Args:
        config_class: The trainer's configuration.
        trainer: The name of the trainer's class in `trainers.rl.trainer`, which is imported after parsing.
        argv: The command-line arguments; None for those of this process.
        usage: The first lines of `--help`.

    Returns:
        The exit code.
    """

    return _launch(config_class, f".rl.trainer:{trainer}", argv, usage)


def _launch(config_class: type[C], trainer: str, argv: Sequence[str] | None, usage: str | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    signal: int | None = None
    try:
        config = parse(config_class, [word for word in words if word != DRY_RUN], (usage or "").strip())
        # Before torch is imported, which takes seconds; the trainer checks them again, with what it knows of the model.
        config.check()
        if not config.model.path:
            # A folder is looked for later: one that a single machine lacks is everybody's error.
            check_model_path(config.model.path)
        module, _, name = trainer.partition(":")
        made = getattr(import_module(module, __package__), name)(config)
        if DRY_RUN in words:
            made.dry_run()
        else:
            signal = made.train().signal
        # The process ends without finalizing the interpreter, which would close them otherwise.
        import_module("..engine.parallel.process_groups", __package__).close_if_open()
    except Exception as e:  # any error: this process must end now, or its peers would wait for it until their timeout
        return report_failure(e)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted; the same command resumes from the last checkpoint, if one was saved", file=sys.stderr)
        return 130
    # A launcher reports the signal itself, and would take another exit code of a worker that has saved for a failure.
    return 0 if signal is None or "TORCHELASTIC_RUN_ID" in os.environ else 128 + signal
