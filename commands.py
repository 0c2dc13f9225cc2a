"""The table of commands, from which `drivetrain --help`, the dispatch to modules and the trainers' command lines are built."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command.

    Args:
        module: The module that implements the command, relative to the package. Its `main` takes the arguments and returns an exit code.
        help: A one-line description.
        arguments: The command's arguments, printed on the same line.
        names_itself: Whether `main` takes the command's name before the arguments, because its module implements several commands.
        is_launched: Whether the command replaces this process, through a launcher if it runs several processes.
        starts_workers: Whether the command starts its processes itself, unless `group.kind=local`.
        extra: The optional dependencies it needs, as in `pip install -e '.[NAME]'`; empty if it needs none.
        config: For a trainer, the class of its settings, as MODULE:CLASS.
        trainer: For a trainer, the class that trains, as MODULE:CLASS. It is imported only after the settings are validated, so that
            `--help` and typos do not wait seconds for torch.
    """

    module: str
    help: str
    arguments: str = ""
    names_itself: bool = False
    is_launched: bool = False
    starts_workers: bool = False
    extra: str = ""
    config: str = ""
    trainer: str = ""


def _offline_trainer(name: str, config: str, trainer: str, help: str, arguments: str) -> Command:
    return Command(
        f"trainers.{name}",
        help,
        arguments,
        is_launched=True,
        config=f"trainers.config.runs:{config}",
        trainer=f"trainers.offline.trainer:{trainer}",
    )


def _rl_trainer(name: str, config: str, trainer: str, help: str, arguments: str) -> Command:
    return Command(
        f"trainers.{name}",
        help,
        arguments,
        is_launched=True,
        starts_workers=True,
        config=f"trainers.config.rl:{config}",
        trainer=f"trainers.rl.trainer:{trainer}",
    )


def _checkpoint_tool(help: str) -> Command:
    return Command("checkpoint_tools.commands", help, names_itself=True)


COMMANDS = {
    "sft": _offline_trainer(
        "sft", "SFTConfig", "SFTTrainer", "supervised fine-tuning", "key=value ..., --nproc N for more than one process"
    ),
    "dpo": _offline_trainer(
        "dpo",
        "DPOConfig",
        "DPOTrainer",
        "preference learning: DPO, IPO, hinge, SimPO, ORPO, CPO, KTO and others (dpo.loss)",
        "same arguments as sft",
    ),
    "rm": _offline_trainer("rm", "RMConfig", "RewardTrainer", "reward model training on pairs", "same arguments as sft"),
    "grpo": _rl_trainer(
        "grpo",
        "GRPOConfig",
        "GRPOTrainer",
        "reinforcement learning: GRPO, Dr. GRPO, DAPO, GSPO, RLOO and others (rl.algorithm)",
        "key=value ..., --nproc N worker processes",
    ),
    "ppo": _rl_trainer("ppo", "PPOConfig", "PPOTrainer", "reinforcement learning with a critic", "same arguments as grpo"),
    "online_dpo": _rl_trainer(
        "online_dpo",
        "OnlineDPOConfig",
        "OnlineDPOTrainer",
        "preference learning on pairs of the policy's own completions (dpo.loss)",
        "same arguments as grpo",
    ),
    "rl": Command(
        "trainers.rl.phase_commands",
        "run single phases of a step (rl rollout, rl score, rl train), or check which weights wrote which completions (rl check-log)",
    ),
    "data": Command("trainers.data_show.data_command", "inspect data before training: data show SOURCE ... --model MODEL"),
    "template": Command(
        "trainers.template.template_command",
        "check whether a chat template supports training on multi-turn conversations: template check MODEL",
    ),
    "demo": Command(
        "trainers.demo.demo_command",
        "train, export and query a tiny model on a built-in toy task: dpo, rm, sft, grpo, vision or tinker; prompts FOLDER only writes prompts and an untrained model",
    ),
    "parity": Command("trainers.parity.parity_command", "compare engines and layouts with plain Hugging Face, step by step"),
    "merge": _checkpoint_tool("convert a checkpoint from any engine and layout into a Hugging Face folder"),
    "inspect": _checkpoint_tool("describe a checkpoint without reading its tensors"),
    "verify": _checkpoint_tool("check a checkpoint against its checksums, or compare two checkpoints tensor by tensor"),
    "import": _checkpoint_tool(
        "import a sharded checkpoint from another program: PyTorch DCP, Megatron torch_dist or verl shards"
    ),
    "conformance": Command(
        "engine.conformance",
        "check that an engine gives the losses, gradients and checkpoints of plain transformers: BACKEND [cp=2 ...], --nproc N",
        is_launched=True,
    ),
    "conformance-rollout": Command(
        "generation.conformance.__main__", "check a generator against plain transformers: NAME [setting=value ...]"
    ),
    "conformance-tinker": Command(
        "serve.tinker.conformance.conformance_command",
        "check the behavior of any implementation of the training service: URL --model NAME",
        extra="tinker",
    ),
    "serve": Command(
        "serve.openai.serve_command",
        "serve a model, a run or a checkpoint over an OpenAI-compatible HTTP API: MODEL|RUN|CHECKPOINT ...",
        extra="serve",
    ),
    "gateway": Command(
        "serve.gateway.gateway_command",
        "let any agent talk to a policy over HTTP, and record the exact tokens of the policy: MODEL|RUN|CHECKPOINT ...",
        extra="serve",
    ),
    "tinker": Command(
        "serve.tinker.tinker_command",
        "train and sample adapters of many users on one model, for clients of the Tinker protocol: [NAME=]MODEL ... [engine.KEY=VALUE ...]",
        extra="tinker",
    ),
    "chat": Command(
        "trainers.chat", "talk to a model, a run or a checkpoint in the terminal: MODEL|RUN|CHECKPOINT ...", extra="serve"
    ),
    "generate": Command("trainers.generate", "generate completions for a file of prompts: MODEL|RUN|CHECKPOINT PROMPTS OUT"),
    "worker": Command(
        "workers.process.program",
        "run a model worker, which serves requests on a pipe or a socket; worker comm-id prints a communicator id for its ranks",
    ),
    "backends": Command("engine.registry", "list the engines that engine.backend accepts"),
    "generators": Command("generation.registry", "list the generators that rollout.generator accepts"),
    "environments": Command("environments.registry", "list the environments that rollout.environment accepts"),
}
"""The subcommands of `drivetrain` by name."""

SECTIONS = {
    "Train": ("sft", "dpo", "rm", "grpo", "ppo", "online_dpo", "rl"),
    "Use a model": ("chat", "generate", "serve", "gateway", "tinker"),
    "Checkpoints": ("merge", "inspect", "verify", "import"),
    "Data": ("data", "template"),
    "Try and check": ("demo", "parity", "conformance", "conformance-rollout", "conformance-tinker"),
    "Extend": ("backends", "generators", "environments", "worker"),
}
"""The subcommands in the order of `drivetrain --help`."""
