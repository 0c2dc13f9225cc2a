"""GPUs are hidden from the tests' own processes, whose comparisons run on the CPU, and shown to those that ask for them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Kept in the environment: pytest-xdist's workers import conftest after their parent has hidden the GPUs.
COUNT, BEFORE = "DRIVETRAIN_TEST_GPUS", "DRIVETRAIN_TEST_VISIBLE_DEVICES"


def hide_gpus() -> int:
    """Hide the GPUs from this process and its children; how many there were before anybody hid them."""
    if COUNT not in os.environ:
        os.environ[COUNT] = str(torch.cuda.device_count())
        if VISIBLE in os.environ:
            os.environ[BEFORE] = os.environ[VISIBLE]
    os.environ[VISIBLE] = ""
    return int(os.environ[COUNT])


def gpu_environment() -> dict[str, str]:
    """The environment of a process that sees the GPUs."""
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    return environment | ({VISIBLE: os.environ[BEFORE]} if BEFORE in os.environ else {})


@contextmanager
def shown_gpus() -> Iterator[None]:
    """Children that are started meanwhile see the GPUs."""
    hidden = os.environ.pop(VISIBLE)
    os.environ.update(gpu_environment())
    try:
        yield
    finally:
        os.environ[VISIBLE] = hidden
