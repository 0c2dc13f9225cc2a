"""The command lines of the trainers: parse, train, and turn an error into one line and an exit code."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..commands import COMMANDS, Command
from ..engine.hf.model_path import check_model_path
from ..engine.parallel.orphans import die_with_parent
from ..engine.parallel.process import report_failure
from .config.parse import parse

PACKAGE = __name__.rpartition(".trainers.")[0]
DRY_RUN = "--dry-run"


def run_trainer(command: str, argv: Sequence[str] | None = None) -> int:
    """Parse the command line, then train; with `--dry-run`, run only the first step.

    Args:
        command: The name of the trainer's command.
        argv: The command-line arguments; None for those of this process.

    Returns:
        The exit code.
    """
    entry = COMMANDS[command]
    words = list(sys.argv[1:] if argv is None else argv)
    signal: int | None = None
    try:
        # The classes of a command are imported by name, so that `--help` loads only its settings.
        config = parse(_imported(entry.config), [word for word in words if word != DRY_RUN], usage(command, entry))
        # Check before importing torch, which takes seconds. The trainer checks again, with the model's config.
        config.check()
        if not config.model.path:
            # Only a path that is not set is refused here, because it is unset in all processes. Folders are checked later, where all
            # ranks take part: one may be missing on a single node, and the others must then end too.
            check_model_path(config.model.path)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # A launcher that is killed cannot end its processes, which would continue to train and keep the folder locked.
            die_with_parent()
        trainer = _imported(entry.trainer)(config)
        if DRY_RUN in words:
            trainer.dry_run()
        else:
            signal = trainer.train().signal
        # The process exits without finalizing the interpreter, which would otherwise close them.
        _imported("engine.parallel.process_groups:close_if_open")()
    except Exception as e:  # any error: this process must end now, or its peers would wait for it until their timeout
        return report_failure(e)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted; the same command resumes from the last checkpoint, if one was saved", file=sys.stderr)
        return 130
    # The launcher reports the signal itself. It would take any other exit code of a worker that has saved as a failure.
    return 0 if signal is None or "TORCHELASTIC_RUN_ID" in os.environ else 128 + signal


def usage(name: str, command: Command) -> str:
    """Return the first lines of a trainer's `--help`.

    Args:
        name: The name of the command.
        command: The command.
    """
    module = f"{PACKAGE}.{command.module}"
    if command.starts_workers:
        lines = [
            f"drivetrain {name} --nproc N recipe={name} model.path=MODEL data.train=[PROMPTS] rewards.use=[answer] ...",
            f"torchrun --nproc-per-node N -m {module} group.kind=local ...          (in the processes of torchrun)",
        ]
    else:
        lines = [
            f"drivetrain {name} --nproc N recipe=NAME key=value ...",
            f"torchrun --nproc-per-node N -m {module} recipe=NAME key=value ...          (the same)",
        ]
    return "\n".join([f"{command.help[0].upper()}{command.help[1:]}", "", *lines])


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)
