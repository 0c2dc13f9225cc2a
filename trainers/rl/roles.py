"""The roles of a run, and the group that they run in."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...engine.config import EngineConfig, LoraConfig, ModelConfig, OffloadConfig, OptimConfig
from ...engine.errors import ConfigError, ModelError
from ...engine.hf.config import read_config
from ...engine.hf.shape import experts_of
from ...engine.registry import engine_class
from ...generation.memory import TOKENS_WITHOUT_GPU
from ...generation.options import RolloutConfig
from ...generation.registry import generator_class
from ...losses.value import ValueLoss
from ...workers.groups.base import WorkerGroup
from ...workers.groups.local import LocalWorkerGroup
from ...workers.process.role_host import RoleSpec
from ...workers.roles.actor import ActorConfig, ActorWorker
from ...workers.roles.advantage import AdvantageConfig, AdvantageWorker
from ...workers.roles.base import WorkerConfig
from ...workers.roles.critic import CriticConfig, CriticWorker
from ...workers.roles.generator import RolloutWorker
from ...workers.roles.reference import ReferenceWorker, ReferenceWorkerConfig
from ...workers.roles.reward import RewardWorker
from ..config.rl import REWARD_MODEL, FrozenRoleConfig, RLConfig, TrainedRoleConfig
from .algorithms import Algorithm

MAIN = "main"
"""The name of the shared pool."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of a run.

    Args:
        specs: The roles by name.
        pools: The number of processes of each pool.
        has_own_reference: Whether the policy is its own reference, with its adapters disabled.
    """

    specs: Mapping[str, RoleSpec]
    pools: Mapping[str, int]
    has_own_reference: bool = False


def build_roles(config: RLConfig, algorithm: Algorithm, total_steps: int, most_tokens: int | None = None) -> Roles:
    """Return the roles that a run needs.

    Args:
        config: The run's settings.
        algorithm: The algorithm.
        total_steps: The number of steps, for learning-rate schedules with an end.
        most_tokens: The size of a generator's cache that always suffices, in tokens; None if the prompts are not known.
    """
    # Learning-rate schedules count optimizer steps, of which a step of the run may make several.
    each = updates_per_step(config)
    updates = total_steps * each
    model = _model(config, config.actor)
    if config.rl.routing_replay != "off" and experts_of(hf_config := read_config(model)) is None:
        raise ConfigError(
            f"rl.routing_replay={config.rl.routing_replay}, but model.path={model.path} ({hf_config.model_type}) is not a mixture of experts; "
            "set it to off"
        )
    specs: dict[str, RoleSpec] = {
        "actor": RoleSpec(
            worker=ActorWorker,
            config=ActorConfig(
                model=model,
                engine=_engine(config, config.actor),
                optim=_optim(config, config.actor),
                # The actor takes no steps during the critic's warmup.
                total_steps=max(each, updates - config.rl.critic_warmup * each),
                loss=algorithm.loss,
            ),
        ),
        "advantage": RoleSpec(worker=AdvantageWorker, config=algorithm.advantage or AdvantageConfig()),
    }
    own_reference = is_own_reference(config)
    # The actor's engine computes the reference, so another engine would have no effect.
    if own_reference and config.reference.engine is not None:
        raise ConfigError(
            "reference.engine is set, but the policy without its adapters is the reference; remove it, or set reference.model.path"
        )
    if not own_reference and not algorithm.needs_reference and config.reference != FrozenRoleConfig():
        raise ConfigError(
            f"reference is set, but rl.algorithm={config.rl.algorithm} with these settings uses no reference; remove it, or set "
            "rl.loss.kl_coef or rl.advantage.kl_coef"
        )
    if algorithm.needs_reference and not own_reference:
        temperature = config.rollout.temperature
        # A reference has the weights as they were before training, and nothing that only matters for training.
        frozen = replace(
            _model(config, config.reference),
            lora=LoraConfig(),
            freeze=(),
            router_aux_loss_coef=0.0,
            router_bias_update_rate=0.0,
        )
        reference = ReferenceWorkerConfig(
            model=frozen, engine=_frozen_engine(config, config.reference), temperature=temperature
        )
        specs["reference"] = RoleSpec(worker=ReferenceWorker, config=reference, pool=_pool(config, "reference"))
    if algorithm.needs_critic:
        critic = CriticConfig(
            model=replace(_model(config, config.critic), head="value"),
            engine=_engine(config, config.critic),
            optim=_optim(config, config.critic),
            total_steps=updates,
            loss=ValueLoss(clip=config.rl.critic_clip or None),
        )
        specs["critic"] = RoleSpec(worker=CriticWorker, config=critic, pool=_pool(config, "critic"))
    if REWARD_MODEL in config.rewards.use:
        scored = replace(
            _model(config, config.reward),
            head="value",
            lora=LoraConfig(),
            freeze=(),
            router_aux_loss_coef=0.0,
            router_bias_update_rate=0.0,
        )
        reward = WorkerConfig(model=scored, engine=_frozen_engine(config, config.reward))
        specs["reward"] = RoleSpec(worker=RewardWorker, config=reward, pool=_pool(config, "reward"))
    # Build the generator last, since the size of its cache may depend on the memory that the other roles leave.
    specs["rollout"] = RoleSpec(
        worker=RolloutWorker, config=rollout_config(config, most_tokens), pool=_pool(config, "rollout")
    )
    for name in config.group.pools:
        if name not in specs:
            raise ConfigError(
                f"group.pools.{name}={config.group.pools[name]}: this run has no {name}; its roles are {', '.join(specs)}"
            )
    return Roles(
        specs=specs,
        pools={MAIN: config.group.nproc, **config.group.pools},
        has_own_reference=own_reference and algorithm.needs_reference,
    )


def updates_per_step(config: RLConfig) -> int:
    """Return the number of optimizer steps of a full step."""
    size = config.rl.mini_batch_size
    if config.rl.algorithm == "online_dpo":
        # Each group yields one pair, which is not split.
        pairs = config.data.batch_size
        return config.rl.epochs * -(-pairs // (pairs if size is None else max(1, size // 2)))
    completions = config.data.batch_size * config.rl.group_size
    return config.rl.epochs * -(-completions // (size or completions))


def is_own_reference(config: RLConfig) -> bool:
    """Return whether the policy without its adapters is the reference."""
    lora = _model(config, config.actor).lora
    return lora.rank > 0 and not lora.modules_to_save and config.reference.model is None


def check_roles(roles: Roles) -> None:
    """Check the roles, as far as possible without reading weights.

    Args:
        roles: The roles.

    Raises:
        DrivetrainError: A role's settings are incompatible with its model or its backend.
    """
    for name, spec in roles.specs.items():
        role: Any = spec.config
        if isinstance(role, RolloutConfig):
            generator_class(role.generator).check(role, roles.pools[spec.pool])
            continue
        if isinstance(role, WorkerConfig):
            try:
                engine_class(role.engine.backend)(
                    model=role.model, engine=role.engine, optim=role.optim, total_steps=role.total_steps
                ).check()
            except (ConfigError, ModelError) as e:
                raise type(e)(f"the role {name} ({name}.model, {name}.engine, or what they inherit): {e}") from e


def rollout_config(config: RLConfig, most_tokens: int | None = None) -> RolloutConfig:
    """Return the configuration of the generator.

    Args:
        config: The run's settings.
        most_tokens: The size of a cache that always suffices, in tokens; None if the prompts are not known.
    """
    rollout, precision = config.rollout, (config.actor.engine or config.engine).precision
    # Only with float32 parameters does `auto` depend on the device, which only the generator knows.
    compute = precision.params if precision.compute == "auto" and precision.params != "float32" else precision.compute
    model = _model(config, config.actor)
    # Otherwise a cache of all free memory would leave nothing for the activations of the trained roles.
    is_alone = "rollout" in config.group.pools or config.group.offload != "none"
    shared = min(TOKENS_WITHOUT_GPU, most_tokens or TOKENS_WITHOUT_GPU)
    # With adapters alone, the generator reads the base weights itself, and needs the adapters' settings.
    alone = sends_adapters(config)
    return RolloutConfig(
        model=ModelConfig(
            path=model.path,
            lora=model.lora if alone else LoraConfig(),
            added_tokens=model.added_tokens,
            overrides=model.overrides,
            trust_remote_code=model.trust_remote_code,
        ),
        generator=rollout.generator,
        dtype=rollout.dtype or ("bfloat16" if compute == "bfloat16" else compute if compute == "auto" else "float32"),
        max_batch_size=rollout.max_batch_size,
        max_batch_total_tokens=rollout.max_batch_total_tokens or (0 if is_alone else shared),
        target_tokens_per_batch=rollout.target_tokens_per_batch,
        invariant=rollout.invariant,
        held_versions=held_versions(config),
        base_dtype=precision.params if alone else "float32",
        return_routed_experts=config.rl.routing_replay == "rollout",
        options=rollout.options,
    )


def held_versions(config: RLConfig) -> int:
    """Return the number of weight versions that the generator holds.

    With K versions, no weights wait for completions of older ones: the next step waits for those of the oldest version anyway.
    With `rl.inflight_weight_updates=true`, only the newest version is used.
    """
    if config.rl.inflight_weight_updates:
        return 1
    return config.rollout.held_versions or max(1, config.rl.staleness)


def sends_adapters(config: RLConfig) -> bool:
    """Return whether only the policy's adapters are sent to the generator."""
    group = config.group
    if group.sync_adapters is not None:
        return group.sync_adapters
    # Processes with both roles hand weights over directly, which is faster than reading those of the folder.
    return "rollout" in group.pools and not group.sync_changes and not config.not_adapters_alone()


def kept_versions(config: RLConfig) -> int:
    """Return the number of versions that the actor's first process keeps, for generator processes that replace dead ones.

    Without staleness, the generator only needs the version that the actor has.
    """
    return held_versions(config) if config.rl.staleness and config.rollout.restarts else 0


def start_group(config: RLConfig, roles: Roles) -> WorkerGroup:
    """Start the processes of a run and build its roles in them.

    Args:
        config: The run's settings.
        roles: The roles.

    Raises:
        WorkerError: A role cannot be built.
        ConfigError: Ray is not installed, or the roles do not match the processes.
    """
    timeout = 60 * config.trainer.timeout_minutes
    if config.group.kind == "local":
        return LocalWorkerGroup(roles.specs, timeout_s=timeout)
    if config.group.kind == "ray":
        # Imported only here, since Ray is an optional package.
        from ...workers.groups.ray import RayWorkerGroup

        return RayWorkerGroup(roles.specs, pools=roles.pools, timeout_s=timeout, weight_sync=config.group.weight_sync)
    from ...workers.groups.process import ProcessWorkerGroup

    return ProcessWorkerGroup(roles.specs, pools=roles.pools, timeout_s=timeout, weight_sync=config.group.weight_sync)


def _pool(config: RLConfig, role: str) -> str:
    return role if role in config.group.pools else MAIN


def _model(config: RLConfig, role: FrozenRoleConfig) -> ModelConfig:
    return config.model if role.model is None else role.model


def _engine(config: RLConfig, role: FrozenRoleConfig) -> EngineConfig:
    return config.engine if role.engine is None else role.engine


def _frozen_engine(config: RLConfig, role: FrozenRoleConfig) -> EngineConfig:
    engine = _engine(config, role)
    # Unless it has an engine section of its own, a frozen role inherits the layout but no
    # recomputation, since it has no backward pass, and no offloading.
    return engine if role.engine is not None else replace(engine, recompute="none", offload=OffloadConfig())


def _optim(config: RLConfig, role: TrainedRoleConfig) -> OptimConfig:
    return config.optim if role.optim is None else role.optim
