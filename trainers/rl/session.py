"""The resources of the phases, opened and closed together: the group, the rewards, the memory manager."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ...engine.hf.config import read_config
from ...engine.hf.shape import context_of
from ...engine.hf.tokenizer import load_tokenizer
from ...rewards.pool import RewardTarget
from ..config.rl import RLConfig
from ..data.prompts import PromptSet
from ..loop.ranks import TrainerRanks, process_group
from .adaptive import Adaptive
from .algorithms import Algorithm
from .correction import resolve_importance
from .environments import environment_pool
from .memory_manager import MemoryManager
from .phases import Phases
from .prompts import conversation_of
from .reward_runner import RewardRunner
from .roles import Roles, start_group
from .state import GroupStates, is_random


@contextmanager
def controller_ranks(config: RLConfig) -> Iterator[TrainerRanks]:
    """Return the processes that run the controller: this one, or with `group.kind=local`, all processes that hold the models."""
    if config.group.kind != "local":
        yield TrainerRanks(alone=True)
        return
    with process_group(config.trainer.timeout_minutes):
        yield TrainerRanks()


@contextmanager
def open_phases(
    config: RLConfig,
    algorithm: Algorithm,
    roles: Roles,
    ranks: TrainerRanks,
    *,
    functions: Sequence[RewardTarget] = (),
    prompts: Sequence[PromptSet] = (),
    only: Collection[str] | None = None,
    judges: bool = True,
) -> Iterator[Phases]:
    """Start the rewards and the processes of a run, and build its roles; stop everything after the block.

    Args:
        config: The run's settings.
        algorithm: The algorithm.
        roles: The roles.
        ranks: The processes that run the controller.
        functions: Reward functions of the program.
        prompts: The prompts whose columns the rewards will need.
        only: The roles that are needed; None for all.
        judges: Whether completions will be scored.

    Raises:
        ConfigError: A reward cannot be used, or a prompt lacks a column.
        WorkerError: A role cannot be built.
    """
    if only is not None:
        # Processes are only started for roles that are needed.
        specs = {name: spec for name, spec in roles.specs.items() if name in only}
        used = {spec.pool for spec in specs.values()}
        roles = replace(roles, specs=specs, pools={name: size for name, size in roles.pools.items() if name in used})
    with ExitStack() as opened:
        # Check the rewards before models are loaded.
        reward_runner = RewardRunner(config, functions, ranks) if judges else None
        if reward_runner is not None:
            opened.callback(reward_runner.close)
            reward_runner.check(prompts)
        generates = only is None or "rollout" in only
        environments = opened.enter_context(environment_pool(config, ranks)) if generates else None
        group = opened.enter_context(start_group(config, roles))
        # After the group has started, because the generator knows its own dtype only then.
        config = resolve_importance(config, group)
        memory_manager = MemoryManager(GroupStates(group, config), offload_to=config.group.offload)
        memory_manager.log_plan()
        tokenizer = load_tokenizer(config.model)
        yield Phases(
            config=config,
            algorithm=algorithm,
            roles=roles,
            ranks=ranks,
            group=group,
            rewards=reward_runner,
            tokenizer=tokenizer,
            environments=environments,
            positions=context_of(read_config(config.actor.model or config.model)) if generates else None,
            conversation=conversation_of(config, tokenizer) if generates else None,
            memory_manager=memory_manager,
            adaptive=Adaptive(config.rl, algorithm),
            is_random="actor" in group.roles
            and is_random(group.model_config("actor"), roles.specs["actor"].config.model.lora.dropout),
        )
