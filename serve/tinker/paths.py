"""The paths of checkpoints, `tinker://MODEL/KIND/NAME`: keys of the database, which are never joined to folders."""

import re
from dataclasses import dataclass

from .errors import BadRequestError

SCHEME = "tinker://"
TRAINING, EXTERNAL = "weights", "external_weights"
KINDS = {TRAINING: "training", "sampler_weights": "sampler", EXTERNAL: "external"}
"""The parts of a path that say what a checkpoint is for, with their names in lists."""
# Names are parts of addresses, so they have nothing that would be escaped there, and do not begin with a dot.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class CheckpointPath:
    """The path of a checkpoint.

    Args:
        model: The id of the model.
        kind: One of `KINDS`.
        name: Its name.
    """

    model: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "CheckpointPath":
        """Return a path.

        Raises:
            BadRequestError: It is not one.
        """
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise BadRequestError(
                f"{text[:200]!r} is not a path of a checkpoint: {SCHEME}MODEL/weights/NAME, or sampler_weights"
            )
        return cls(parts[0], parts[1], checked_name(parts[2]))

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """Return the name of a checkpoint.

    Raises:
        BadRequestError: It has other characters than names have.
    """
    if not _NAME.fullmatch(name):
        raise BadRequestError(
            f"the name {name[:200]!r} of a checkpoint must have 1 to 128 letters, digits, '.', '_' and '-', and begin with one of the first two"
        )
    return name
