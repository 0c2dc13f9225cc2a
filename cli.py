"""The `drivetrain` command, which dispatches to the module of a subcommand and imports only that one."""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .commands import COMMANDS, SECTIONS, Command
from .engine.errors import install_command

PACKAGE = __package__ or "drivetrain"
LAUNCHER_OPTIONS = (
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-backend",
)
"""torchrun's options for runs on several machines, which are passed through."""


PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "peft", "megatron-core", "vllm", "ray")
"""Packages whose versions `--version --verbose` prints."""
OPTIONAL = ("fastapi", "uvicorn", "prometheus_client", "starlette", "pydantic", "google.protobuf", "google", "zstandard")
"""Modules of optional dependencies, which may be missing when a command is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    # The reader of the output, such as `head`, has ended. Python would report the error again when it flushes at exit.
    except BrokenPipeError:
        from .engine.parallel.process import discard_output

        discard_output()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: drivetrain COMMAND ...        drivetrain COMMAND --help for details; drivetrain --version [--verbose]")
        for section, names in SECTIONS.items():
            print(f"\n{section}:")
            for name in names:
                print(f"  {name:19} {'; '.join(filter(None, (COMMANDS[name].help, COMMANDS[name].arguments)))}")
        print("\nfirst steps: drivetrain demo dpo trains a tiny model in about a minute")
        return 0
    if arguments[0] in ("-V", "--version"):
        print("\n".join(_version(verbose={"-v", "--verbose"} & {*arguments[1:]} != set())))
        return 0
    if arguments[0].startswith("-"):
        print(f"error: {arguments[0]} must follow a command, as in drivetrain sft {' '.join(arguments)} ...", file=sys.stderr)
        return 2
    command, words = arguments[0], arguments[1:]
    if command in COMMANDS:
        return _call(command, COMMANDS[command], words)
    close_matches = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {close_matches[0]!r}? " if close_matches else ""
    print(f"error: unknown command {command!r}; {hint}the commands are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _version(*, verbose: bool) -> list[str]:
    """Return the lines of `--version`; with `--verbose`, also the installed versions and the tested ones."""
    from importlib.metadata import PackageNotFoundError, version
    from platform import platform, python_version

    from .engine.tested import TESTED

    lines = [f"drivetrain {version('drivetrain')}"]
    if not verbose:
        return lines
    lines.append(f"{'python':15} {python_version()}, {platform()}")
    for package in PACKAGES:
        try:
            lines.append(f"{package:15} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package:15} not installed")
    return [*lines, TESTED]


def _call(name: str, command: Command, arguments: list[str]) -> int:
    if command.is_launched:
        return _train(command, arguments)
    try:
        module = import_module(f"{PACKAGE}.{command.module}")
    except ModuleNotFoundError as e:
        # Any other missing module is an error of the installation, or of Drivetrain, and shows its traceback.
        if not command.extra or e.name not in OPTIONAL:
            raise
        print(f"error: drivetrain {name} needs {e.name}: {install_command(command.extra)}", file=sys.stderr)
        return 2
    code: int = module.main(name, arguments) if command.names_itself else module.main(arguments)
    return code


def _train(command: Command, arguments: list[str]) -> int:
    try:
        arguments, options = _options(arguments)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    nproc = options.pop("--nproc", "1")
    if command.starts_workers and "group.kind=local" not in arguments:
        if options:
            print(
                f"error: {next(iter(options))}: reinforcement learning starts its workers itself; use group.kind=ray for several "
                "machines, or group.kind=local",
                file=sys.stderr,
            )
            return 2
        arguments, nproc = [*arguments, *([f"group.nproc={nproc}"] if nproc != "1" else [])], "1"
    more = [word for pair in options.items() for word in pair]
    launcher = ["-m", f"{PACKAGE}.launch", "--nproc-per-node", nproc, *more] if nproc != "1" or more else []
    # Replace this process, so that a signal or Ctrl-C sent to the command reaches the training process.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", f"{PACKAGE}.{command.module}", *arguments])


def _options(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Separate the settings from `--nproc` and the launcher's options.

    Raises:
        ValueError: An option has no value, or `--nproc` is not a valid number of processes.
    """
    from .engine.config import MOST_PROCESSES

    settings: list[str] = []
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, separator, value = word.partition("=")
        # torchrun accepts both spellings.
        name = name.replace("_", "-") if name.startswith("--") else name
        if name not in ("--nproc", *LAUNCHER_OPTIONS):
            settings.append(word)
            continue
        # An option may be written as one word with `=`, or as two.
        value = value if separator else next(words, "")
        if name == "--nproc" and not (value.isdigit() and 0 < int(value) <= MOST_PROCESSES):
            raise ValueError(
                f"--nproc {value}: give the number of processes on this machine, from 1 to {MOST_PROCESSES}".replace("  ", " ")
            )
        if not value:
            raise ValueError(f"{name} has no value; it is passed to torchrun")
        options[name] = value
    return settings, options


if __name__ == "__main__":
    sys.exit(main())
