"""Filters for Megatron-core's own output, which the user of an engine cannot act on."""

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
    """From now on, ignore the warnings that Megatron-core's modules cause, and its log messages below the error level."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    # The pipeline schedule reads the gradients of the tensors that one stage sends to the next.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    logging.getLogger("megatron").setLevel(logging.ERROR)
