"""Logging of a run, on standard error of the first process."""

import logging
import os
import sys
from typing import TextIO


class _Stderr(logging.StreamHandler[TextIO]):
    """A handler that looks up `sys.stderr` for every record, so that a live progress line stays below the record."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def configure_logging() -> None:
    """Send log messages to standard error; processes other than the first log only errors."""
    logging.basicConfig(format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("drivetrain").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
