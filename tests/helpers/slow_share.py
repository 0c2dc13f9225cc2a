"""Which slow tests continuous integration runs: those that execute what a change touches, and a part of the others.

What a test executes is recorded in `tests/slow_map.json` (`make slow-map`). A module that most slow tests execute shows nothing about
a change, and a change of many modules concerns more tests than there is time for. So a test counts for more the fewer others
execute the same changed modules, and only the first of them are run because of the change.
"""

import json
import subprocess
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

COMMON = 0.4
"""A module that more than this part of the recorded tests execute chooses none of them."""
FOR_CHANGE = 0.1
"""The part of all slow tests that may be run because of a change, besides their turn."""

ROOT = Path(__file__).parents[2]
SLOW_MAP = ROOT / "tests" / "slow_map.json"


def part_of(test: str, parts: int) -> int:
    """Return the number of a test's part, whatever tests there are beside it."""
    return zlib.crc32(test.encode()) % parts


def chosen_for_change(tests: Collection[str], executed: Mapping[str, Collection[str]], changed: Collection[str]) -> list[str]:
    """Return the tests to run because of a change, the most specific first.

    Each changed module counts as one divided by the number of tests that execute it. The file of a test is a module that all
    tests in it execute.

    Args:
        tests: All slow tests as "file::function": the parameters of a function are one test.
        executed: Paths of the modules that each recorded test executes. Others are chosen only if their own file has changed.
        changed: Paths of the changed files.
    """
    recorded = {test: set(executed[test]) for test in tests if test in executed}
    counts = Counter(module for modules in recorded.values() for module in modules)
    specific = {module for module in changed if counts[module] <= COMMON * len(recorded)}
    files = Counter(test.partition("::")[0] for test in tests)
    value: dict[str, float] = {}
    for test in tests:
        file = test.partition("::")[0]
        value[test] = sum(1 / counts[module] for module in recorded.get(test, set()) & specific)
        value[test] += (file in changed) / files[file]
    ranked = sorted((test for test in tests if value[test]), key=lambda test: (-value[test], test))
    return ranked[: max(1, round(FOR_CHANGE * len(tests)))]


def load_slow_map(path: Path = SLOW_MAP) -> dict[str, list[str]]:
    """Read which modules each recorded test executes."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    modules: list[str] = stored["modules"]
    masks = {test: int(mask, 16) for test, mask in stored["tests"].items()}
    return {test: [module for i, module in enumerate(modules) if mask >> i & 1] for test, mask in masks.items()}


def write_slow_map(executed: Mapping[str, Collection[str]], path: Path = SLOW_MAP) -> None:
    """Write which modules each test executes: for each test, a number whose bits stand for the modules, the first the lowest."""
    modules = sorted({module for names in executed.values() for module in names})
    tests = {test: f"{sum(1 << modules.index(module) for module in set(executed[test])):x}" for test in sorted(executed)}
    path.write_text(json.dumps({"modules": modules, "tests": tests}, indent=0) + "\n")


def changed_since(commit: str) -> list[str] | None:
    """Return the paths of files that differ from a commit, or None where git does not have it."""
    done = subprocess.run(
        ["git", "diff", "--name-only", "--no-renames", commit, "--"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else None
