"""The commands, as a table: `drivetrain --help`, the dispatch to a command's module, and the trainers' own command lines follow from it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command.

    Args:
        module: The module that does the work, by its name in the package. It has a function `main`, which takes the arguments and returns an
            exit code.
        help: What it does, in a line.
        arguments: Its arguments, which follow in the same line.
        names_itself: Whether `main` takes the name of the command before the arguments, since the module has several.
        is_launched: Whether it takes the place of this process, with a launcher in front if it has several processes.
        starts_workers: Whether it starts its processes itself, unless `group.kind=local`.
        extra: The optional dependencies that it needs, as in `pip install 'drivetrain[NAME]'`; empty without any.
        config: Of a trainer, the class of its settings, as MODULE:CLASS.
        trainer: Of a trainer, the class that trains, as MODULE:CLASS. It is imported when the settings are known to be right, so that
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
        "the phases of a step by themselves: rl rollout, rl score, rl train; and rl check-log, the check of which weights answered what",
    ),
    "data": Command("trainers.data_show.data_command", "look at data before training: data show SOURCE ... --model MODEL"),
    "template": Command(
        "trainers.template.template_command",
        "check whether a chat template is fit for conversations of several turns: template check MODEL",
    ),
    "demo": Command(
        "trainers.demo.demo_command",
        "train, export and query a tiny model on an embedded task; demo dpo and demo rm use preference data, demo grpo rewards, demo vision pictures, demo tinker a training service; demo prompts FOLDER only writes prompts and an untrained model",
    ),
    "parity": Command("trainers.parity.parity_command", "compare engines and layouts with plain Hugging Face, step by step"),
    "merge": _checkpoint_tool("convert a checkpoint from any engine and layout into a Hugging Face folder"),
    "inspect": _checkpoint_tool("describe a checkpoint without reading its tensors"),
    "verify": _checkpoint_tool("check a checkpoint against its checksums, or compare two checkpoints tensor by tensor"),
    "import": _checkpoint_tool(
        "import a sharded checkpoint from another program: PyTorch DCP, Megatron torch_dist or verl shards"
    ),
    "conformance": Command(
        "engine.conformance", "check a backend against the contract: BACKEND [cp=2 ...], --nproc N", is_launched=True
    ),
    "conformance-rollout": Command(
        "generation.conformance.__main__", "check a generator against plain transformers: NAME [setting=value ...]"
    ),
    "conformance-tinker": Command(
        "serve.tinker.conformance.conformance_command",
        "check what a training service means, whoever has written it: URL --model NAME",
        extra="tinker",
    ),
    "serve": Command(
        "serve.openai.serve_command",
        "serve a model, a run or a checkpoint over HTTP, for clients of OpenAI's interface: MODEL|RUN|CHECKPOINT ...",
        extra="serve",
    ),
    "gateway": Command(
        "serve.gateway.gateway_command",
        "let agents of any making talk to a policy over HTTP, and keep its own tokens: MODEL|RUN|CHECKPOINT ...",
        extra="serve",
    ),
    "tinker": Command(
        "serve.tinker.tinker_command",
        "train and sample adapters of many users on one model, for clients of Tinker's protocol: [NAME=]MODEL ... [engine.KEY=VALUE ...]",
        extra="tinker",
    ),
    "chat": Command(
        "trainers.chat", "talk to a model, a run or a checkpoint in the terminal: MODEL|RUN|CHECKPOINT ...", extra="serve"
    ),
    "generate": Command("trainers.generate", "answer the prompts of a file: MODEL|RUN|CHECKPOINT PROMPTS OUT"),
    "worker": Command(
        "workers.process.program",
        "run a model worker, which answers requests on a pipe or a socket; worker comm-id prints an id for its ranks",
    ),
    "backends": Command("engine.registry", "list the engines that engine.backend accepts"),
    "generators": Command("generation.registry", "list the generators that rollout.generator accepts"),
    "environments": Command("environments.registry", "list the environments that rollout.environment accepts"),
}
