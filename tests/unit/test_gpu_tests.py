"""Tests that need a GPU find it, also in the workers of pytest-xdist, and skip themselves where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.search_path import python_path

ROOT = Path(__file__).parents[2]
FAKE = """
import torch

if "PYTEST_XDIST_WORKER" not in __import__("os").environ:
    torch.cuda.device_count = lambda: {count}
"""
PROBE = """
import os

import pytest
from helpers.gpus import gpu_environment


@pytest.mark.gpu
def test_needs_one():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert gpu_environment().get("CUDA_VISIBLE_DEVICES") == {before!r}
"""

ABSENT = """
import sys
from importlib.machinery import PathFinder

ABSENT = ("msgspec", "zmq", "ray", "pebble", "openai", "uvicorn", "fastapi", "math_verify", "jsonschema", "wandb", "hypothesis")


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "before", "told"),
    [
        (1, "3", "1 passed"),
        (1, None, "1 passed"),
        (0, "3", "1 skipped"),
    ],
)
def test_workers_of_xdist_know_of_the_gpus(count: int, before: str | None, told: str, tmp_path: Path) -> None:
    (tmp_path / "helpers" / "preloaded").mkdir(parents=True)
    for name in ("conftest.py", "helpers/gpus.py", "helpers/preloaded/__init__.py", "helpers/slow_share.py"):
        (tmp_path / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "fake_gpus.py").write_text(FAKE.format(count=count))
    (tmp_path / "test_probe.py").write_text(PROBE.format(before=before))
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = gpu\n")
    hidden = ("CUDA_VISIBLE_DEVICES", "DRIVETRAIN_TEST_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"PYTHONPATH": str(tmp_path), **({} if before is None else {"CUDA_VISIBLE_DEVICES": before})}
    words = ["-m", "pytest", "-q", "-n", "1", "-p", "fake_gpus", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_every_test_of_the_gpu_is_collected_without_packages_of_other_tests(tmp_path: Path) -> None:
    make = ["make", "-n", "test-gpu", f"PYTHON={sys.executable}"]
    recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = recipe.partition("-m pytest ")[2].partition("&&")[0].split()
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if file != Path(__file__) and "pytest.mark.gpu" in file.read_text()
    }
    assert {word for word in words if word.endswith(".py")} == marked
    # A machine with PyTorch, transformers, pytest without plugins, and what else pyproject.toml requires.
    (tmp_path / "absent.py").write_text(ABSENT)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTHONPATH"] = python_path(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "absent", "-p", "no:cacheprovider", "--collect-only", *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "<Function " in line]
    assert sum("test_cuda_kernels_agree_with_the_reference" in line for line in found) == 28
    assert sum("test_the_host_seldom_waits_for_the_device" in line for line in found) == 3
    assert sum("test_engines_agree_in_bfloat16_on_one_gpu" in line for line in found) == 1
    assert sum("test_a_worker_meets_on_nccl_and_answers_from_its_gpu" in line for line in found) == 1


def test_what_a_machine_lacks_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "gpu_needs.py"), "surely-not-installed>=1", "torch>=99"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "surely-not-installed>=1: not installed" in done.stdout
    assert "torch>=99: there is 2." in done.stdout
    assert "a CUDA device" in done.stdout
    assert "omegaconf" not in done.stdout
