"""The `drivetrain` command, which dispatches to the module that does the work and imports nothing else."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

PACKAGE = __package__ or "drivetrain"

COMMANDS = {
    "sft": "supervised fine-tuning: key=value ..., --nproc N for more than one process",
    "dpo": "preference learning: DPO, IPO, hinge, SimPO, ORPO, CPO, KTO; same arguments as sft",
    "rm": "reward model training; same arguments as sft",
    "grpo": "reinforcement learning: GRPO, DAPO, GSPO, RLOO and others: key=value ..., --nproc N worker processes",
    "ppo": "reinforcement learning with a critic; same arguments as grpo",
    "online_dpo": "preference learning on the policy's own answers; same arguments as grpo",
    "rl": "the phases of a step by themselves: rl rollout, rl score, rl train",
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
    "worker": "run a model worker, which answers requests on a pipe or a socket; worker comm-id prints an id for its ranks",
    "backends": "list the engines that engine.backend accepts",
    "generators": "list the generators that rollout.generator accepts",
}
RL = ("grpo", "ppo", "online_dpo")
"""Trainers that start their workers themselves, unless group.kind=local."""
MODULES = {
    **{name: f"{PACKAGE}.trainers.{name}" for name in ("sft", "dpo", "rm", "grpo", "ppo", "online_dpo")},
    "conformance": f"{PACKAGE}.engine.conformance",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: drivetrain COMMAND ...\n")
        print("\n".join(f"  {name:19} {description}" for name, description in COMMANDS.items()))
        return 0
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
    if command in ("serve", "chat"):
        return _serve(command, rest)
    if command in ("demo", "parity"):
        result: int = import_module(f"{PACKAGE}.trainers.{command}.cli").main(rest)
        return result
    if command == "worker":
        from .workers.model_worker.cli import main as worker

        return worker(rest)
    if command in ("merge", "inspect", "verify", "import"):
        from .checkpoint_tools.cli import main as tool

        return tool(command, rest)
    if command in MODULES:
        return _module(MODULES[command], rest)
    print(f"error: unknown command {command!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


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
    nproc = "1"
    arguments = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--nproc=") else [word])]
    if "--nproc" in arguments:
        index = arguments.index("--nproc")
        if index + 1 >= len(arguments) or not arguments[index + 1].isdigit() or int(arguments[index + 1]) < 1:
            print("error: --nproc must be followed by the number of processes, at least 1", file=sys.stderr)
            return 2
        nproc = arguments[index + 1]
        del arguments[index : index + 2]
    if module.rpartition(".")[2] in RL and "group.kind=local" not in arguments:
        arguments, nproc = [*arguments, *([f"group.nproc={nproc}"] if nproc != "1" else [])], "1"
    launcher = ["-m", f"{PACKAGE}.launch", "--nproc-per-node", nproc] if nproc != "1" else []
    # Replace this process, so that a signal or Ctrl-C sent to the command reaches the process that trains.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", module, *arguments])


if __name__ == "__main__":
    sys.exit(main())
