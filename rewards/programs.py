"""The reward for programs: runs the program in a completion in the sandbox."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .sandbox import ProgramResult, SandboxLimits, run_program

_FENCE = re.compile(r"\s*```[ \t]*([\w+-]*).*")


def check_program(
    completion: str,
    *,
    tests: Any,
    partial: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
) -> float:
    """Return 1 if the program in a completion passes all its tests; otherwise 0.

    See `find_program`.

    Args:
        completion: The text of the completion.
        tests: From the column `tests`. Either a mapping, or its JSON, with `inputs` and `outputs`: lists of strings of equal length with
            the standard input and the expected output, compared apart from whitespace at line ends. Or a string, or list of strings, of
            `assert` statements, which run after the program.
        partial: Return the fraction of tests that pass instead.
        seconds: The time limit of each test, in seconds.
        memory_mb: The memory limit, in MiB.

    Raises:
        ValueError: There are no tests, or they have a different format.
        ConfigError: There is no sandbox on this machine.
    """
    cases = _cases(tests)
    program = find_program(completion)
    limits = SandboxLimits(seconds=seconds, memory_mb=memory_mb)
    passed = 0
    for case in cases:
        if _passes(program, case, limits):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(cases)


def find_program(completion: str) -> str:
    """Return the program in a completion: its last Python block, else its last block without a language, else the whole text."""
    blocks: dict[str, str] = {}
    language: str | None = None
    lines: list[str] = []
    for line in completion.splitlines():
        fence = _FENCE.fullmatch(line)
        if fence and language is None:
            language, lines = fence.group(1).lower(), []
        # Inside a block, a fence with a language does not end it.
        elif fence and not fence.group(1):
            blocks["python" if str(language).startswith("py") else str(language)] = "\n".join(lines)
            language = None
        else:
            lines.append(line)
    if language is not None:
        # The completion was truncated, or the last fence is missing.
        blocks["python" if language.startswith("py") else language] = "\n".join(lines)
    return blocks.get("python", blocks.get("", completion))


def _cases(tests: Any) -> list[str | tuple[str, str]]:
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        tests = json.loads(tests)
    cases: list[str | tuple[str, str]]
    if isinstance(tests, Mapping):
        inputs: Any = tests.get("inputs")
        outputs: Any = tests.get("outputs")
        if (
            set(tests) != {"inputs", "outputs"}
            or not _are_texts(inputs)
            or not _are_texts(outputs)
            or len(inputs) != len(outputs)
        ):
            raise ValueError(
                f"tests needs inputs and outputs, lists of texts of equal length, and nothing else; it has {', '.join(tests)}"
            )
        cases = list(zip(inputs, outputs, strict=True))
    elif isinstance(tests, str):
        cases = [tests] if tests.strip() else []
    elif isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests):
        cases = list(tests)
    else:
        raise ValueError(
            f"tests is a {type(tests).__name__}; it must be a mapping with inputs and outputs, or statements with assert"
        )
    if not cases:
        raise ValueError("there are no tests")
    return cases


def _are_texts(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(value, str) for value in values)


def _passes(program: str, case: str | tuple[str, str], limits: SandboxLimits) -> bool:
    if isinstance(case, str):
        # A program may exit early, even with exit code 0, before reaching the end of its tests.
        end = secrets.token_hex(16)
        run = run_program(f'{program}\n\n{case}\n\nprint("\\n{end}")\n', "", limits)
        return _succeeded(run) and run.stdout.endswith(f"\n{end}\n")
    stdin, stdout = case
    run = run_program(program, stdin, limits)
    return _succeeded(run) and _lines(run.stdout) == _lines(stdout)


def _succeeded(run: ProgramResult) -> bool:
    if run.kind == "not_started":
        raise RuntimeError(f"the sandbox did not start the program: {run.stderr.strip()[-300:]}")
    return run.kind == "ended" and run.exit_code == 0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
