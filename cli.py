"""The `drivetrain` command, which dispatches to the module that does the work and imports nothing else."""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

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
"""Options of torchrun for runs on several machines, which are passed on."""

COMMANDS = {
    "sft": "supervised fine-tuning: key=value ..., --nproc N for more than one process",
    "dpo": "preference learning: DPO, IPO, hinge, SimPO, ORPO, CPO, KTO; same arguments as sft",
    "rm": "reward model training; same arguments as sft",
    "grpo": "reinforcement learning: GRPO, DAPO, GSPO, RLOO and others: key=value ..., --nproc N worker processes",
    "ppo": "reinforcement learning with a critic; same arguments as grpo",
    "online_dpo": "preference learning on the policy's own answers; same arguments as grpo",
    "rl": "the phases of a step by themselves: rl rollout, rl score, rl train",
    "data": "look at data before training: data show SOURCE ... --model MODEL",
    "demo": "train, export and query a tiny model on an embedded task; demo dpo and demo rm use preference data",
    "parity": "compare engines and layouts with plain Hugging Face, step by step",
    "merge": "convert a checkpoint from any engine and layout into a Hugging Face folder",
    "inspect": "describe a checkpoint without reading its tensors",
    "verify": "check a checkpoint against its checksums, or compare two checkpoints tensor by tensor",
    "import": "import a sharded checkpoint from another program: PyTorch DCP, Megatron torch_dist or verl shards",
    "conformance": "check a backend against the contract: BACKEND [cp=2 ...], --nproc N",
    "conformance-rollout": "check a generator against plain transformers: NAME [setting=value ...]",
    "serve": "serve a model, a run or a checkpoint over HTTP, for clients of OpenAI's interface: MODEL|RUN|CHECKPOINT ...",
    "chat": "talk to a model, a run or a checkpoint in the terminal: MODEL|RUN|CHECKPOINT ...",
    "generate": "answer the prompts of a file: MODEL|RUN|CHECKPOINT PROMPTS OUT",
    "worker": "run a model worker, which answers requests on a pipe or a socket; worker comm-id prints an id for its ranks",
    "backends": "list the engines that engine.backend accepts",
    "generators": "list the generators that rollout.generator accepts",
}
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "peft", "megatron-core", "vllm", "ray")
"""Packages whose versions `--version --verbose` prints."""
RL = ("grpo", "ppo", "online_dpo")
"""Trainers that start their workers themselves, unless group.kind=local."""
MODULES = {
    **{name: f"{PACKAGE}.trainers.{name}" for name in ("sft", "dpo", "rm", "grpo", "ppo", "online_dpo")},
    "conformance": f"{PACKAGE}.engine.conformance",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except BrokenPipeError:
        from .engine.parallel.process import discard_output

        discard_output()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: drivetrain COMMAND ...        drivetrain COMMAND --help says more; drivetrain --version [--verbose]\n")
        print("\n".join(f"  {name:19} {description}" for name, description in COMMANDS.items()))
        return 0
    if arguments[0] in ("-V", "--version"):
        print("\n".join(_version(verbose={"-v", "--verbose"} & {*arguments[1:]} != set())))
        return 0
    if arguments[0].startswith("-"):
        print(
            f"error: {arguments[0]} belongs behind a command, as in drivetrain sft {' '.join(arguments)} ...", file=sys.stderr
        )
        return 2
    command, rest = arguments[0], arguments[1:]
    if command == "backends":
        from .engine.registry import backends

        print("\n".join(f"{name:12} {spec.engine}" for name, spec in backends().items()))
        return 0
    if command == "generators":
        from .workers.rollout.registry import generators

        print("\n".join(f"{name:15} {generator.generator}" for name, generator in generators().items()))
        return 0
    if command == "conformance-rollout":
        from .workers.rollout.conformance.__main__ import main as conformance_rollout

        return conformance_rollout(rest)
    if command == "rl":
        from .trainers.rl.cli import main as phases

        return phases(rest)
    if command == "generate":
        from .serve.generate import main as generate

        return generate(rest)
    if command in ("serve", "chat"):
        return _serve(command, rest)
    if command in ("data", "demo", "parity"):
        folder = "data_show" if command == "data" else command
        result: int = import_module(f"{PACKAGE}.trainers.{folder}.cli").main(rest)
        return result
    if command == "worker":
        from .workers.model_worker.cli import main as worker

        return worker(rest)
    if command in ("merge", "inspect", "verify", "import"):
        from .checkpoint_tools.cli import main as tool

        return tool(command, rest)
    if command in MODULES:
        return _module(MODULES[command], rest)
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    print(f"error: unknown command {command!r}; {hint}the commands are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _version(*, verbose: bool) -> list[str]:
    """Return the lines of `--version`; with `--verbose` also those of what it runs on, and what it was tested on."""
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


def _serve(command: str, rest: list[str]) -> int:
    try:
        module = import_module(f"{PACKAGE}.serve.{'cli' if command == 'serve' else command}")
    except ModuleNotFoundError as e:
        if e.name not in ("fastapi", "uvicorn", "prometheus_client", "starlette", "pydantic"):
            raise
        print(f"error: drivetrain {command} needs {e.name}: pip install 'drivetrain[serve]'", file=sys.stderr)
        return 2
    result: int = module.main(rest)
    return result


def _module(module: str, arguments: list[str]) -> int:
    try:
        arguments, options = _options(arguments)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    nproc = options.pop("--nproc", "1")
    if module.rpartition(".")[2] in RL and "group.kind=local" not in arguments:
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
    # Replace this process, so that a signal or Ctrl-C sent to the command reaches the process that trains.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", module, *arguments])


def _options(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Separate the settings from `--nproc` and the options of the launcher.

    Raises:
        ValueError: An option has no value, or `--nproc` is not a number of processes.
    """
    from .engine.config import MOST_PROCESSES

    rest: list[str] = []
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, given, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name not in ("--nproc", *LAUNCHER_OPTIONS):
            rest.append(word)
            continue
        value = value if given else next(words, "")
        if name == "--nproc" and not (value.isdigit() and 0 < int(value) <= MOST_PROCESSES):
            raise ValueError(
                f"--nproc {value}: give the number of processes on this machine, from 1 to {MOST_PROCESSES}".replace("  ", " ")
            )
        if not value:
            raise ValueError(f"{name} has no value; it is passed to torchrun")
        options[name] = value
    return rest, options


if __name__ == "__main__":
    sys.exit(main())
