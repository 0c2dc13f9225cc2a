"""PYTHONPATH of a process that a test starts."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]


def python_path(*folders: Path | str) -> str:
    """Folders before those of this process; without any, the tests', whose helpers a child then imports."""
    return os.pathsep.join([*map(str, folders or (TESTS,)), *filter(None, [os.environ.get("PYTHONPATH")])])
