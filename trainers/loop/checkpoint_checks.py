"""Checks of the checkpoint that a run starts from, the same for all trainers."""

from collections.abc import Sequence

from ...engine.checkpoint.retention import step_of
from ...engine.errors import CheckpointError, ConfigError


def check_method(checkpoint: str, saved: str, method: str) -> None:
    """Check that a checkpoint was saved by the same training method.

    Args:
        checkpoint: The checkpoint.
        saved: The method that saved it.
        method: The method of this run.

    Raises:
        CheckpointError: It does not match.
    """
    if saved != method:
        raise CheckpointError(
            f"{checkpoint} is from a {saved} run, and this {method} run cannot resume from it; choose another "
            "trainer.output_dir, and set model.path to the model that the other run exported"
        )


def check_fingerprint(checkpoint: str, saved: str | None, saved_path: str | None, fingerprint: str | None, path: str) -> None:
    """Check that a checkpoint belongs to this run's model; adapters, for example, fit only one model.

    Args:
        checkpoint: The checkpoint.
        saved: The fingerprint of the model that it was trained from; None if it was not recorded.
        saved_path: The path of that model.
        fingerprint: The fingerprint of this run's model.
        path: The path of this run's model.

    Raises:
        CheckpointError: It does not match.
    """
    if saved is not None and saved != fingerprint:
        raise CheckpointError(
            f"{checkpoint} was trained from model.path={saved_path}, but it is now {path}, a different model, whose weights would not be "
            "read; choose another trainer.output_dir"
        )


def check_no_later(root: str, present: Sequence[str], resume: str, step: int) -> None:
    """Check that the folder of a run has no checkpoints that the next `trainer.resume=auto` would prefer to those of this run.

    Args:
        root: The folder of the checkpoints.
        present: The names of the checkpoints in it, oldest first.
        resume: The setting `trainer.resume`.
        step: The last completed step of the checkpoint that the run starts from; 0 if there is none.

    Raises:
        ConfigError: There are later checkpoints.
    """
    latest = (step_of(present[-1]) or (0, 0))[0] if present else 0
    if resume != "auto" and present and latest > step:
        raise ConfigError(
            f"{root} contains {present[-1]} of an earlier run, but trainer.resume={resume} starts at step {step + 1}; choose "
            "another trainer.output_dir, delete it, or set trainer.resume=auto to resume from it"
        )
