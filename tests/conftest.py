"""Shared fixtures."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.gpus import hide_gpus

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread in this process and in those that tests start: sums depend on the number, and runs are compared to the last bit.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Tokenised data of tests is no matter of the user's own cache.
_CACHE = tempfile.TemporaryDirectory(prefix="drivetrain-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Exact comparisons run on the CPU, also where there is a GPU; tests of CUDA kernels ask `run_ranks` for it.
GPUS = hide_gpus()
KINDS = ("unit", "distributed", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder; tests that are marked `gpu` skip themselves where there is none."""
    for item in items:
        kind = item.path.parent.name
        if kind in KINDS:
            item.add_marker(kind)
        if item.get_closest_marker("gpu") is not None and not GPUS:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A tiny model and forty rows of the embedded task."""
    from helpers.runs import make_task

    make_task(tmp_path)
    return tmp_path


@pytest.fixture
def process_group() -> Iterator[None]:
    """A default process group of one, for engines that run in the test's own process."""
    import torch.distributed as dist

    from drivetrain.engine.parallel.process_groups import init_distributed

    init_distributed()
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """No test leaves a default process group behind: tests of the same process that come later could not make their own."""
    import torch.distributed as dist

    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()
        pytest.fail("this test left a process group behind")
