"""A Python interpreter as a tool, in the sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..rewards.sandbox import SandboxLimits, check_sandbox, run_program
from .tools import ToolEnvironment, text_argument, tool


class PythonEnvironment(ToolEnvironment):
    """An environment whose policy may call `python` with a program. Each program runs in a fresh sandbox; no state is kept between them.

    Args:
        seconds: The time limit of a program, in seconds.
        memory_mb: Its memory limit, in MiB.
        limits: As for `ToolEnvironment`.

    Raises:
        ConfigError: There is no sandbox on this machine.
    """

    def __init__(self, *, seconds: float = 5.0, memory_mb: int = 512, **limits: int) -> None:
        super().__init__(**limits)
        check_sandbox()
        self._limits = SandboxLimits(seconds=seconds, memory_mb=memory_mb)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The interpreter."""
        description = (
            "Run a Python program by itself, and return what it prints. It has the standard library, no network and no files."
        )
        return (tool("python", description, code="the program"),)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a program and return its output.

        Raises:
            RuntimeError: The sandbox did not start it.
        """
        result = run_program(text_argument(arguments, "code"), "", self._limits)
        if result.kind == "not_started":
            raise RuntimeError(f"the sandbox did not start the program: {result.stderr.strip()[-300:]}")
        printed = result.stdout + result.stderr
        if result.kind != "ended":
            limit = {
                "timeout": f"{self._limits.seconds:g} s",
                "memory": f"{self._limits.memory_mb} MiB of memory",
                "output": f"{self._limits.output_mb:g} MiB of output",
            }[result.kind]
            return f"{printed}\nerror: the program was ended after {limit}"
        return printed if result.exit_code == 0 else f"{printed}\nerror: exit code {result.exit_code}"
