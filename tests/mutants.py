"""Applies the deliberate defects of `mutants.toml` to a copy of the code, one at a time, and runs the tests that should catch them.

python tests/mutants.py                    every defect against the fast tests; with --all also the slow ones where those pass
python tests/mutants.py budget_off_by_one  one of them
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600
SOUND = "tests/unit/test_microbatch.py"
"""Tests that must pass before there is a defect: where a copy cannot be imported, every defect would seem to be caught."""


@dataclass(frozen=True)
class Mutant:
    """A deliberate defect.

    Args:
        name: Its name.
        file: The file that it changes.
        old: The code that it replaces, which occurs in the file once.
        new: The code that it puts there.
        tests: The test files, or names of tests, that should catch it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def load_mutants() -> list[Mutant]:
    """Read the list.

    Raises:
        ValueError: An entry does not fit the code.
    """
    entries = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    mutants = [Mutant(name=name, **entry) for name, entry in entries.items()]
    for mutant in mutants:
        count = (ROOT / mutant.file).read_text().count(mutant.old)
        if count != 1:
            raise ValueError(f"{mutant.name}: its code occurs {count} times in {mutant.file}; it must occur once")
        if missing := [t for t in mutant.tests if not (ROOT / t.partition("::")[0]).exists()]:
            raise ValueError(f"{mutant.name}: {missing[0]} does not exist")
    return mutants


def copy_tree(target: Path) -> None:
    """Copy all files that git tracks, or would track, with the link that makes the folder a package."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    (target / ".types").mkdir()
    (target / ".types" / "drivetrain").symlink_to("..")


def run_tests(tree: Path, marker: str, tests: list[str]) -> int:
    """Run tests of a copy; return pytest's exit code.

    Raises:
        subprocess.TimeoutExpired: They take too long.
    """
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marker, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / ".types"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=False,
    ).returncode


def is_caught(mutant: Mutant, tree: Path, marker: str) -> bool:
    """Run a defect's tests on a copy that has it. A run that takes too long counts as caught.

    Raises:
        RuntimeError: The tests that it names do not exist.
    """
    file = tree / mutant.file
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        code = run_tests(tree, marker, mutant.tests)
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(original)
    if code == 4:
        raise RuntimeError(f"{mutant.name}: pytest cannot run {' '.join(mutant.tests)}; name tests that exist")
    # 5: no test was left to run.
    return code not in (0, 5)


def main() -> int:
    """Run; 0 when every defect was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="defects to apply; all of them by default")
    parser.add_argument("--all", action="store_true", help="run the slow tests too where the fast ones catch nothing")
    parser.add_argument("--jobs", type=int, default=2, help="defects at a time")
    args = parser.parse_args()
    mutants = [m for m in load_mutants() if not args.names or m.name in args.names]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drivetrain-mutants-") as folder:
        trees: Queue[Path] = Queue()
        for job in range(args.jobs):
            # A name that Python allows for a package, which the copy is.
            tree = Path(folder, f"tree_{job}")
            copy_tree(tree)
            if run_tests(tree, "not slow and not gpu", [SOUND]) != 0:
                raise RuntimeError(f"{SOUND} fails without a defect; run it in the checkout, and see why")
            trees.put(tree)

        def run(mutant: Mutant) -> str:
            tree, began = trees.get(), time.monotonic()
            try:
                outcome = "caught" if is_caught(mutant, tree, "not slow and not gpu") else "MISSED"
                if outcome == "MISSED" and args.all and is_caught(mutant, tree, "slow"):
                    outcome = "caught by the slow tests alone"
            finally:
                trees.put(tree)
            print(f"{mutant.name:40} {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
            return outcome

        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = list(pool.map(run, mutants))
    print(
        f"{outcomes.count('caught')} of {len(mutants)} defects caught by the fast tests, in {time.monotonic() - start:.0f} s"
    )
    return 1 if "MISSED" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
