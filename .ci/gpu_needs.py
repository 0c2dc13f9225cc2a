"""What this machine lacks for the tests that need a GPU; exit code 1 where it lacks anything.

python .ci/gpu_needs.py [REQUIREMENT ...]
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement


def main(more: list[str]) -> int:
    """Compare what is installed with pyproject.toml, and look for a GPU."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    tests = [r for r in project["optional-dependencies"]["dev"] if Requirement(r).name == "pytest"]
    lacking = []
    for text in (*project["dependencies"], *project["optional-dependencies"]["mcore"], *tests, *more):
        requirement = Requirement(text)
        try:
            there = version(requirement.name)
        except PackageNotFoundError:
            lacking.append(f"{text}: not installed")
            continue
        if not requirement.specifier.contains(there, prereleases=True):
            lacking.append(f"{text}: there is {there}")
    try:
        import torch
    except ImportError:
        names = []
    else:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        print(f"torch {torch.__version__}, {len(names)} CUDA devices {names}")
    if not names:
        lacking.append("a CUDA device")
    for line in lacking:
        print(f"this machine lacks {line}")
    if any("not installed" in line for line in lacking):
        print("`make wheels-gpu`, on a machine with a network, collects what a GPU machine seen before lacked, in .wheels")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
