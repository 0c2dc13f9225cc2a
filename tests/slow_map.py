"""Records which modules each slow test executes, in `tests/slow_map.json`: `make slow-map`. About an hour.

python tests/slow_map.py                       all files with slow tests
python tests/slow_map.py tests/e2e/test_rl.py  one of them; what is recorded of the others stays

A module counts as executed when a line inside one of its functions ran, in the test's process or in one that it started: imports
alone execute the other lines. Processes that several tests of a file share count for all of them.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

import coverage
import pytest

from helpers.search_path import python_path
from helpers.slow_share import ROOT, load_slow_map, write_slow_map

FOLDER = "DRIVETRAIN_SLOW_MAP"
"""The variable with the folder of a file's measurements, in the process that runs its tests."""
SHARED = "shared"


@cache
def lines_in_functions(path: Path) -> frozenset[int]:
    """Return the lines of a file that run when a function is called."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)]
    return frozenset(line for node in nodes for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1))


def executed_in(folder: Path) -> dict[str, set[str]]:
    """Return the modules of this repository that measured processes executed, by the test that they did it for; "" for all."""
    modules: dict[str, set[str]] = defaultdict(set)
    for file in folder.glob("data.*"):
        data = coverage.CoverageData(str(file))
        try:
            data.read()
            lines = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
        except coverage.exceptions.DataError:
            # Of a process that was killed while it wrote the file.
            continue
        for path, contexts_by_line in lines.items():
            inside = lines_in_functions(Path(path))
            for line, contexts in contexts_by_line.items():
                if line in inside:
                    for context in contexts:
                        modules[context].add(str(Path(path).resolve().relative_to(ROOT)))
    return modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep apart what a test executes; as a plugin, in the process that runs the tests of a file."""
    folder = Path(os.environ[FOLDER])
    test = item.nodeid.partition("[")[0]
    alive = {name for name in os.listdir("/proc") if name.isdigit()}
    measured = coverage.Coverage.current()
    assert measured is not None
    measured.switch_context(test)
    result = yield
    measured.switch_context("")
    for file in folder.glob("data.*"):
        pid = file.name.partition(".pid")[2].partition(".")[0]
        if pid != str(os.getpid()):
            target = folder / (SHARED if pid in alive else test.partition("::")[2])
            target.mkdir(exist_ok=True)
            file.rename(target / file.name)
    return result


def record(file: str) -> dict[str, set[str]]:
    """Run the slow tests of a file, and return what each executed."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-slow-map-") as name:
        folder = Path(name)
        options = ["-p", "no:cacheprovider", "-p", "slow_map", "-m", "slow", "-rfE"]
        done = subprocess.run(
            [sys.executable, "-m", "coverage", "run", "-m", "pytest", *options, file],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), FOLDER: name, "COVERAGE_FILE": f"{name}/data"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(file, done.stdout.strip().splitlines()[-1], flush=True)
        if done.returncode:
            print(done.stdout)
        executed = executed_in(folder)
        for_all = executed.pop("", set())
        for part in filter(Path.is_dir, folder.iterdir()):
            modules = executed_in(part)[""]
            if part.name == SHARED:
                for_all |= modules
            else:
                executed[f"{file}::{part.name}"] = executed.get(f"{file}::{part.name}", set()) | modules
        return {test: modules | for_all for test, modules in executed.items()}


def files_with_slow_tests() -> list[str]:
    """Return the files of tests that have slow ones."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-m", "slow", "-qq"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({line.rpartition(": ")[0] for line in listed.splitlines() if line.startswith("tests/")})


def main() -> None:
    """Record the given files, or all, two at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of tests; all that have slow ones where none is named")
    files = parser.parse_args().files or files_with_slow_tests()
    executed = {test: set(modules) for test, modules in load_slow_map().items() if (ROOT / test.partition("::")[0]).exists()}
    with ThreadPoolExecutor(2) as pool:
        for recorded in as_completed([pool.submit(record, file) for file in files]):
            executed |= recorded.result()
            # An interrupted run keeps what it has recorded.
            write_slow_map(executed)


if __name__ == "__main__":
    main()
