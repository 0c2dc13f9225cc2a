"""What Megatron-core prints of its own that no user of an engine can act on. Imports no torch."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ignored_warnings() -> Iterator[None]:
    """Ignore Megatron-core's warnings inside the block."""
    with warnings.catch_warnings():
        ignore_warnings()
        yield


def ignore_warnings() -> None:
    """Ignore the warnings that Megatron-core's modules cause, and its log messages below errors, from now on."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    # Its schedule asks for the gradient of what one stage hands to the next.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    logging.getLogger("megatron").setLevel(logging.ERROR)
