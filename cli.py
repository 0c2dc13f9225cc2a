"""The `drivetrain` command: hands over to the module that does the work, and imports nothing else."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

PACKAGE = __package__ or "drivetrain"

COMMANDS = {
    "sft": "supervised fine-tuning: key=value ..., --nproc N for several processes",
    "dpo": "learning from preferences: DPO, IPO, hinge, SimPO, ORPO, CPO, KTO; as sft",
    "rm": "training a reward model; as sft",
    "demo": "train, export and question a tiny model on an embedded task; demo dpo, demo rm: on preferences",
    "parity": "compare engines and layouts with plain Hugging Face, step by step",
    "merge": "write a checkpoint, of any engine and layout, as a Hugging Face folder",
    "inspect": "say what a checkpoint is, without reading its tensors",
    "verify": "compare a checkpoint with its checksums, or two with each other, tensor by tensor",
    "import": "take over a sharded checkpoint of another program: torch's DCP, megatron's torch_dist, verl's shards",
    "conformance": "check a backend against the contract: BACKEND [cp=2 ...], --nproc N",
    "backends": "list the engines that can be named in engine.backend",
}
MODULES = {
    **{name: f"{PACKAGE}.trainers.{name}" for name in ("sft", "dpo", "rm")},
    "conformance": f"{PACKAGE}.engine.conformance",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print("usage: drivetrain COMMAND ...\n")
        print("\n".join(f"  {name:12} {what}" for name, what in COMMANDS.items()))
        return 0
    command, rest = words[0], words[1:]
    if command == "backends":
        from .engine.registry import backends

        print("\n".join(f"{name:12} {spec.engine}" for name, spec in backends().items()))
        return 0
    if command in ("demo", "parity"):
        result: int = import_module(f"{PACKAGE}.trainers.{command}.command").main(rest)
        return result
    if command in ("merge", "inspect", "verify", "import"):
        from .checkpoint_tools.cli import main as tool

        return tool(command, rest)
    if command in MODULES:
        return _module(MODULES[command], rest)
    print(f"error: unknown command {command!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _module(module: str, words: list[str]) -> int:
    nproc = "1"
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--nproc=") else [word])]
    if "--nproc" in words:
        at = words.index("--nproc")
        if at + 1 >= len(words) or not words[at + 1].isdigit() or int(words[at + 1]) < 1:
            print("error: --nproc needs a number of processes, 1 or more", file=sys.stderr)
            return 2
        nproc = words[at + 1]
        del words[at : at + 2]
    launcher = ["-m", f"{PACKAGE}.launch", "--nproc-per-node", nproc] if nproc != "1" else []
    # In place of this process: what stops the command, a signal or Ctrl-C, must reach the one that trains.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", module, *words])


if __name__ == "__main__":
    sys.exit(main())
