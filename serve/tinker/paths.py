"""The paths of checkpoints, `tinker://MODEL/KIND/NAME`. They are keys of the database, and are never used as file paths."""

import re
from dataclasses import dataclass

from .errors import BadRequestError

SCHEME = "tinker://"
TRAINING, EXTERNAL = "weights", "external_weights"
KINDS = {TRAINING: "training", "sampler_weights": "sampler", EXTERNAL: "external"}
"""The kinds of checkpoints in paths, with the names of these kinds in listings."""
# Names are parts of URLs, so they have no characters that must be escaped there, and do not begin with a dot.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class CheckpointPath:
    """The path of a checkpoint.

    Args:
        model: The id of the model.
        kind: One of `KINDS`.
        name: The name of the checkpoint.
    """

    model: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "CheckpointPath":
        """Parse a path.

        Raises:
            BadRequestError: The text is not the path of a checkpoint.
        """
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise BadRequestError(
                f"{text[:200]!r} is not the path of a checkpoint; use {SCHEME}MODEL/KIND/NAME, where KIND is one of {', '.join(KINDS)}"
            )
        return cls(parts[0], parts[1], checked_name(parts[2]))

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """Check the name of a checkpoint, and return it.

    Raises:
        BadRequestError: The name has characters that are not allowed, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise BadRequestError(
            f"the checkpoint name {name[:200]!r} is not valid; use 1 to 128 of the characters A-Z, a-z, 0-9, '.', '_' and '-', and begin with a "
            "letter or a digit"
        )
    return name
