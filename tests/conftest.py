"""Shared fixtures."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from helpers.gpus import hide_gpus
from helpers.preloaded import preloaded, real_processes
from helpers.slow_share import changed_since, chosen_for_change, load_slow_map, part_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread in this process and in those that tests start: sums depend on the number, and runs are compared to the last bit.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Tokenised data of tests is no matter of the user's own cache.
_CACHE = tempfile.TemporaryDirectory(prefix="drivetrain-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
# Ray connects to the cluster whose address is noted in its folder: with one for all, to that of a test that runs at the same time, and it
# ends this process a minute after that cluster has ended. The path is short, since those of sockets are limited.
_RAY = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
os.environ["RAY_TMPDIR"] = _RAY.name

# Exact comparisons run on the CPU, also where there is a GPU; tests of CUDA kernels ask `run_ranks` for it.
GPUS = hide_gpus()
KINDS = ("unit", "distributed", "e2e")
LEAST_FOR_SERVER = 5
"""The number of tests from which on it is worth while to start the server that commands are forked from."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that leave out slow tests."""
    parser.addoption("--slow-share", metavar="I/N", default="0/1", help="run the I-th of N parts of the slow tests, I from 0")
    parser.addoption(
        "--changed-since", metavar="COMMIT", default="", help="besides, run slow tests that execute what has changed since"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder; tests that are marked `gpu` skip themselves where there is none."""
    share, parts = (int(number) for number in config.getoption("slow_share").split("/"))
    if not 0 <= share < parts:
        raise pytest.UsageError(f"--slow-share {share}/{parts}; the first number must be from 0 to {parts - 1}")
    slow = {item: function_of(item) for item in items if item.get_closest_marker("slow") is not None}
    chosen = {test for test in slow.values() if part_of(test, parts) == share}
    changed = changed_since(commit) if (commit := config.getoption("changed_since")) else None
    if changed is not None:
        chosen.update(chosen_for_change(set(slow.values()), load_slow_map(), changed))
    left_out = {item for item, test in slow.items() if test not in chosen}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        kind = item.path.parent.name
        if kind in KINDS:
            item.add_marker(kind)
        if item.get_closest_marker("gpu") is not None and not GPUS:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection() -> None:
    """Look for no garbage while files of tests are imported: what is imported stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what was imported by now out of garbage collections, which engines ask for: each would take half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def function_of(item: pytest.Item) -> str:
    """Return the name of a test without its parameters: all of them run, or none."""
    return item.nodeid.partition("[")[0]


@pytest.fixture(scope="session", autouse=True)
def commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run commands as forks of a process with all imports, if more than a few tests are run that may start any."""
    count = sum(item.path.parent.name != "unit" for item in request.session.items)
    # Coverage begins with an interpreter.
    with nullcontext() if count < LEAST_FOR_SERVER or "COVERAGE_PROCESS_CONFIG" in os.environ else preloaded():
        yield


@pytest.fixture
def real_commands() -> Iterator[None]:
    """Start commands as processes of their own: for tests of signals, process ids, and what `/proc` says."""
    with real_processes():
        yield


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A tiny model and forty rows of the built-in toy task."""
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


@pytest.fixture(scope="module", autouse=True)
def no_ray_cluster_left() -> Iterator[None]:
    """End the Ray cluster that a group of a module has started: its processes would work beside all tests that come later."""
    yield
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        ray.shutdown()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """No test leaves a default process group behind: tests of the same process that come later could not make their own."""
    import torch.distributed as dist

    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()
        pytest.fail("this test left a process group behind")
