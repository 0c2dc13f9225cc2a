"""Shared fixtures."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def process_group() -> Iterator[None]:
    """A default process group of one, for engines that run in the test's own process."""
    import torch
    import torch.distributed as dist

    from drivetrain.engine.topology import init_distributed

    torch.set_num_threads(1)
    init_distributed()
    yield
    dist.destroy_process_group()
