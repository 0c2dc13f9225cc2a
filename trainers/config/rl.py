"""Settings of the reinforcement learning trainers."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...engine.config import MOST_PROCESSES, EngineConfig, ModelConfig, OptimConfig, Settings, check_least, setting
from ...engine.errors import ConfigError
from ...losses.algorithms import ALGORITHMS
from ...losses.estimators.base import ESTIMATORS, Estimator
from ...losses.estimators.of_tokens import GAEEstimator
from ...losses.names import Level
from ...rewards.config import RewardsConfig
from ...workers.protocol.hooks import WeightSync
from .algorithm import AlgorithmName, EstimatorConfig, PolicyLossConfig
from .command import CommandConfig
from .data import PromptsConfig
from .environment import EnvironmentConfig
from .methods import PreferenceConfig
from .trainer import RLTrainerConfig

RewardNorm = Literal["none", "batch", "running"]
OldLogProbs = Literal["actor", "rollout"]
GroupKind = Literal["process", "ray", "local"]
OffloadMode = Literal["none", "host", "disk"]
REWARD_MODEL = "model"
"""The name of the reward model in `rewards.use`."""
ENVIRONMENT_REWARD = "environment"
"""The name, in `rewards.use`, of the reward that an environment returns."""
ROLES = ("actor", "critic", "reference", "reward", "rollout")
"""The roles of a run that have a model."""


@dataclass(frozen=True, kw_only=True)
class RLSettings(Settings):
    """The algorithm."""

    section: ClassVar[str] = "rl"

    algorithm: AlgorithmName = setting(
        "grpo", "algorithm; it provides the defaults of rl.loss and rl.advantage where these are null"
    )
    loss: PolicyLossConfig = setting(factory=PolicyLossConfig, help="policy loss")
    advantage: EstimatorConfig = setting(factory=EstimatorConfig, help="advantages")
    group_size: int = setting(8, "completions per prompt", most=65536)
    mini_batch_size: int | None = setting(None, "completions per optimizer step; null: all completions of the step")
    epochs: int = setting(1, "passes over the completions of a step", most=10000)
    staleness: int = setting(
        0,
        "maximum number of steps by which the generator's weights may lag behind the trained ones; above 0, it generates while the policy trains, which needs group.pools.rollout; 0: generate and train by turns",
        most=1024,
    )
    inflight_weight_updates: bool = setting(
        False,
        "with rl.staleness: switch the generator to new weights in the middle of completions, which continue from their tokens so far; new weights never wait, but runs are not reproducible bit by bit",
    )
    critic_warmup: int = setting(0, "first steps of the run, in which only the critic is trained")
    critic_clip: float = setting(0.5, "how far a value may move in a step before its loss is clipped; 0: no clipping")
    kl_target: float | None = setting(
        None,
        "target of the KL divergence per completion, in nats: the weight of the KL penalty, rl.loss.kl_coef or rl.advantage.kl_coef, is raised after a step above it and lowered after a step below it; null: constant weight",
    )
    kl_horizon: int = setting(
        10000, "number of completions over which an adapted weight of the KL penalty changes by at most a fifth"
    )
    reward_clip: float | None = setting(None, "largest absolute value of a completion's reward; null: no clipping")
    reward_norm: RewardNorm = setting(
        "none", "shift and scale rewards to mean 0 and variance 1; batch: over the step; running: over all steps so far"
    )
    dynamic_sampling: bool | None = setting(
        None,
        "replace groups whose rewards are all equal, which carry no learning signal, with groups of further prompts; null: as in rl.algorithm",
    )
    max_resamples: int = setting(
        10,
        "with dynamic sampling: how many times the prompts of a step may be replaced; after that, groups with equal rewards are kept",
    )
    old_log_probs: OldLogProbs = setting(
        "actor",
        "old log-probabilities in the ratios; actor: recomputed by the actor; rollout: those of the generator",
    )
    routing_replay: Literal["off", "rollout", "actor"] = setting(
        "off",
        "mixture-of-experts models: which experts tokens are routed to in the update and the pass before it; off: those that the router selects; rollout: those of the generator; actor: those of the pass that computes rl.old_log_probs",
    )
    importance: Literal["auto", "none", "truncate", "mask"] = setting(
        "auto",
        "importance weights that correct the difference between actor and generator; truncate: clip weights at the upper bound; mask: exclude tokens or completions whose weight is out of bounds from the loss; auto: truncate if the generator's numerics differ from the actor's (bfloat16, vLLM, quantized weights) or its weights may be older (rl.staleness above 0), otherwise none",
    )
    importance_level: Level = setting("token", "whether an importance weight is per token or per completion")
    importance_bounds: tuple[float, float] = setting(
        (0.5, 2.0), "bounds of the importance weights; truncate uses only the upper one"
    )
    rejection: dict[str, Any] = setting(
        factory=dict,
        help="exclude from the loss the tokens and completions for which actor and generator differ too much: criterion and limit, as in rl.rejection.seq_mean_k3=0.01; see losses.importance.Rejection",
    )
    max_log_prob_gap: float | None = setting(
        0.1,
        "stop the run if the log-probabilities of actor and generator differ by more than this on average, in nats per token; null: never",
    )
    allow_biased_sampling: bool = setting(
        False,
        "accept values of rollout.top_p and rollout.top_k that sample from a part of the vocabulary, although the actor's log-probabilities, taken over all of it, are then wrong",
    )
    log_entropy: bool = setting(True, "compute the entropy of the policy, for the metrics")
    eval_before_train: bool = setting(True, "evaluate before the first step")
    eval_samples: int = setting(
        1, "completions per held-out prompt; 1: greedy; more: sampled, for avg@k and pass@k", most=65536
    )
    eval_reward: str | None = setting(
        None, "reward that decides whether a completion is correct (a value of 1 or more); null: the first of rewards.use"
    )
    warn_equal_steps: int = setting(10, "log a warning after this many steps in which every group had equal rewards")

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        for name in (
            "group_size",
            "mini_batch_size",
            "epochs",
            "kl_horizon",
            "max_resamples",
            "eval_samples",
            "warn_equal_steps",
        ):
            check_least(f"rl.{name}", getattr(self, name), 1)
        for name in ("critic_warmup", "critic_clip", "staleness"):
            check_least(f"rl.{name}", getattr(self, name), 0)
        for name in ("kl_target", "reward_clip", "max_log_prob_gap"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"rl.{name}={value}; it must be more than 0, or null")
        low, high = self.importance_bounds
        if not (0 <= low < 1 < high < math.inf):
            raise ConfigError(
                f"rl.importance_bounds={[low, high]}; the lower bound must be from 0 to below 1, the upper one above 1 and finite"
            )
        defaults = RLSettings()
        corrects = self.importance in ("truncate", "mask") or (self.importance == "auto" and self.old_log_probs == "actor")
        for names, other, is_used in (
            (("importance_level", "importance_bounds"), "importance", corrects),
            (("kl_horizon",), "kl_target", self.kl_target is not None),
        ):
            for name in names:
                if not is_used and getattr(self, name) != getattr(defaults, name):
                    raise ConfigError(
                        f"rl.{name}={getattr(self, name)} is not used without rl.{other}; set that, or remove rl.{name}"
                    )
        if self.routing_replay == "actor" and self.old_log_probs == "rollout":
            raise ConfigError(
                "rl.routing_replay=actor with rl.old_log_probs=rollout: without a pass of the actor before the update there are no routes to "
                "replay; set rl.routing_replay=rollout, or rl.old_log_probs=actor"
            )
        corrections: list[tuple[str, Any]] = (
            [("importance", self.importance)] if self.importance in ("truncate", "mask") else []
        )
        corrections += [("rejection", self.rejection)] if self.rejection else []
        for name, value in corrections:
            if self.old_log_probs == "rollout":
                raise ConfigError(
                    f"rl.{name}={value} with rl.old_log_probs=rollout: a correction compares the generator's "
                    "log-probabilities with the actor's; set rl.old_log_probs=actor"
                )


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """The generation of completions."""

    section: ClassVar[str] = "rollout"

    generator: str = setting("static", "generator; `drivetrain generators` lists them")
    temperature: float = setting(
        1.0, "temperature at which completions are sampled and log-probabilities are computed", least=1e-3, most=1e3
    )
    top_p: float = setting(1.0, "probability mass to sample from")
    top_k: int = setting(0, "number of most likely tokens to sample from; 0: all")
    max_tokens: int = setting(256, "maximum number of tokens in a completion")
    prompts_per_call: int | None = setting(
        None,
        "prompts per call of the generator; completions of one call are scored while those of the next are generated; null: all pending prompts",
    )
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None,
        "dtype of the generator's weights; null: bfloat16 if engine.precision.compute is or resolves to bfloat16, otherwise float32",
    )
    max_batch_size: int = setting(256, "number of completions that a process generates at the same time")
    max_batch_total_tokens: int | None = setting(
        None,
        "size of the KV cache of a process in tokens, prompts and completions together; null: as many as fit if the generator has the GPU to itself while it generates (group.pools.rollout, or group.offload); otherwise 32768, or fewer if all completions of a call need fewer",
    )
    target_tokens_per_batch: int = setting(8192, "number of tokens in a forward pass")
    held_versions: int | None = setting(
        None,
        "with rl.staleness: number of weight versions that the generator holds; it uses one of them, and the others stay in host memory; new weights wait until the completions of older ones are finished; null: as many as rl.staleness",
        most=1024,
    )
    restarts: int = setting(
        3,
        "with dedicated generator processes (group.pools.rollout): how many times in a row they are restarted after one of them died, before the run ends; with rl.staleness, the actor's first process keeps the generator's weight versions in host memory for this; 0: never",
        most=1000,
    )
    invariant: bool = setting(
        False,
        "make each completion bitwise independent of what is generated in the same batch; for the continuous and static generators, on CPUs",
    )
    environment: str | None = setting(
        None,
        "environment in which the policy acts turn by turn: a name that `drivetrain environments` lists, or module:class; null: single-turn completions",
    )
    options: dict[str, Any] = setting(factory=dict, help="settings specific to this generator")

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        for name in (
            "max_tokens",
            "prompts_per_call",
            "max_batch_size",
            "max_batch_total_tokens",
            "target_tokens_per_batch",
            "held_versions",
        ):
            check_least(f"rollout.{name}", getattr(self, name), 1)
        check_least("rollout.top_k", self.top_k, 0)
        check_least("rollout.restarts", self.restarts, 0)
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(
                f"rollout.temperature={self.temperature}; it must be more than 0, since the policy is trained on sampled completions"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p={self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class FrozenRoleConfig(Settings):
    """The model and the engine of a frozen role. Settings that are not given are those of the top level."""

    model: ModelConfig | None = setting(
        None,
        "settings of this role's model, such as actor.model.lora.rank=16; those that are not set are inherited from model",
    )
    engine: EngineConfig | None = setting(
        None, "settings of this role's engine; those that are not set are inherited from engine"
    )


@dataclass(frozen=True, kw_only=True)
class TrainedRoleConfig(FrozenRoleConfig):
    """The model, the engine and the optimizer of a trained role. Settings that are not given are those of the top level."""

    optim: OptimConfig | None = setting(
        None, "settings of this role's optimizer; those that are not set are inherited from optim"
    )


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Settings):
    """The processes that run the roles."""

    section: ClassVar[str] = "group"

    kind: GroupKind = setting(
        "process", "process: started on this machine; ray: on a Ray cluster; local: this program, under torchrun"
    )
    nproc: int = setting(
        1, "number of processes in the pool that roles share; with group.kind=local, torchrun sets it", most=MOST_PROCESSES
    )
    pools: dict[str, int] = setting(
        factory=dict,
        help="roles with dedicated processes, and how many: group.pools.rollout=2 (also critic, reference and reward)",
    )
    offload: OffloadMode = setting(
        "none", "where roles on shared processes keep their state while other roles run; the generator's is dropped instead"
    )
    weight_sync: WeightSync = setting(
        "auto",
        "how weights are sent to a generator with dedicated processes; nccl: from GPU to GPU; tcp: through host memory; auto: nccl if every process has a GPU, otherwise tcp; gloo: like nccl, on CPUs, for tests",
    )

    sync_changes: bool | None = setting(
        None,
        "send only changed weights to a generator with dedicated processes; both sides then keep all weights in host memory; not with nccl; null: enabled with group.kind=ray if the generator's weights have 16 bits, since few of those change in a step",
    )
    sync_adapters: bool | None = setting(
        None,
        "for a policy with adapters, send only the adapters to the generator, which adds them to the weights of model.path; null: enabled if the generator has dedicated processes, group.sync_changes is not true, and the rest of the policy equals the weights of model.path",
    )

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        check_least("group.nproc", self.nproc, 1)
        for role, size in self.pools.items():
            if role not in ROLES[1:]:
                raise ConfigError(
                    f"group.pools.{role}={size}: roles that can have dedicated processes are {', '.join(ROLES[1:])}"
                )
            check_least(f"group.pools.{role}", size, 1)
            if size > MOST_PROCESSES:
                raise ConfigError(f"group.pools.{role}={size}; it must be at most {MOST_PROCESSES}")
        if self.weight_sync != "auto" and "rollout" not in self.pools:
            raise ConfigError(
                f"group.weight_sync={self.weight_sync} is not used, because actor and generator share their processes; remove it, or set "
                "group.pools.rollout"
            )
        if self.sync_changes and ("rollout" not in self.pools or self.weight_sync in ("nccl", "gloo")):
            other = f"group.weight_sync={self.weight_sync}" if "rollout" in self.pools else "no group.pools.rollout"
            raise ConfigError(
                f"group.sync_changes=true with {other}, where weights are not sent between processes through host memory; remove it"
            )
        if self.sync_changes and self.sync_adapters:
            raise ConfigError(
                "group.sync_changes=true and group.sync_adapters=true: only one of the two can be sent; remove one of them"
            )
        if self.pools and self.kind == "local":
            raise ConfigError(
                f"group.pools.{next(iter(self.pools))} with group.kind=local, where all roles share the processes of torchrun; use "
                "process or ray"
            )


@dataclass(frozen=True, kw_only=True)
class RLConfig(CommandConfig):
    """The settings that all reinforcement learning trainers share."""

    recipe_prefix: ClassVar[str] = ""
    """The common prefix of the command's recipe names."""

    model: ModelConfig = setting(factory=ModelConfig, help="the policy")
    data: PromptsConfig = setting(factory=PromptsConfig, help="the prompts")
    rewards: RewardsConfig = setting(factory=RewardsConfig, help="the rewards")
    rl: RLSettings = setting(factory=RLSettings, help="the algorithm")
    dpo: PreferenceConfig = setting(factory=PreferenceConfig, help="the loss of rl.algorithm=online_dpo")
    rollout: RolloutSettings = setting(factory=RolloutSettings, help="generation")
    environment: EnvironmentConfig = setting(factory=EnvironmentConfig, help="the environment of the policy")
    engine: EngineConfig = setting(factory=EngineConfig, help="the engine")
    optim: OptimConfig = setting(factory=OptimConfig, help="the optimizer")
    actor: TrainedRoleConfig = setting(factory=TrainedRoleConfig, help="the policy that is trained")
    critic: TrainedRoleConfig = setting(factory=TrainedRoleConfig, help="the critic")
    reference: FrozenRoleConfig = setting(factory=FrozenRoleConfig, help="the reference")
    reward: FrozenRoleConfig = setting(factory=FrozenRoleConfig, help="the reward model")
    group: GroupConfig = setting(factory=GroupConfig, help="the processes")
    trainer: RLTrainerConfig = setting(factory=RLTrainerConfig, help="the training loop")

    def check(self) -> None:
        """Check every section, then the settings that depend on another section.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        sections = (self.data, self.engine, self.rl, self.dpo, self.rollout, self.environment, self.group, self.trainer)
        for section in sections:
            section.check()
        self.optim.check(self.trainer.max_steps or 1)
        self._check_group_size()
        self._check_used()
        self._check_staleness()
        self._check_environment()
        if self.group.sync_adapters and (reason := self.not_adapters_alone()):
            raise ConfigError(f"group.sync_adapters=true, but {reason}; remove it")
        if REWARD_MODEL in self.rewards.use and (self.reward.model is None or not self.reward.model.path):
            raise ConfigError(
                f"rewards.use has {REWARD_MODEL}, but reward.model.path is not set; give the reward model's folder"
            )
        if self.reward.model is not None and self.reward.model.path and REWARD_MODEL not in self.rewards.use:
            raise ConfigError(
                f"reward.model.path={self.reward.model.path} is not used; add {REWARD_MODEL} to rewards.use, or remove it"
            )
        overrides = (self.actor.model or self.model).overrides
        if overrides and self.rollout.generator not in ("static", "continuous", "exact"):
            raise ConfigError(
                f"model.overrides={overrides} with rollout.generator={self.rollout.generator}, which reads the config from the "
                "model folder; use static or continuous, or change config.json"
            )
        if self.rollout.generator == "exact" and not (self.actor.engine or self.engine).invariant:
            raise ConfigError(
                "rollout.generator=exact with engine.invariant=false: completions would cost a forward pass per token, and their "
                "log-probabilities would not equal the actor's bit by bit; set engine.invariant=true, or use static or continuous"
            )
        # The actor computes log-probabilities over the whole vocabulary, so the generator must sample from all of it.
        biased = {"top_p": self.rollout.top_p} if self.rollout.top_p < 1 else {}
        biased |= {"top_k": self.rollout.top_k} if self.rollout.top_k else {}
        for name, value in biased.items():
            if not self.rl.allow_biased_sampling:
                raise ConfigError(
                    f"rollout.{name}={value}: completions would be sampled from a part of the vocabulary, but the actor's log-probabilities "
                    f"are over all of it, so every ratio would be wrong; remove rollout.{name}, or accept that with "
                    "rl.allow_biased_sampling=true"
                )
        for name in ("best_metric", "eval_every"):
            value = getattr(self.trainer, name)
            if value and not self.data.eval:
                raise ConfigError(f"trainer.{name}={value} needs data.eval, which is not set")

    @property
    def max_answer_tokens(self) -> int:
        """The maximum number of tokens after a prompt, in a completion or an episode."""
        if self.rollout.environment is None:
            return self.rollout.max_tokens
        return self.environment.max_tokens or self.environment.max_turns * self.rollout.max_tokens

    def _check_environment(self) -> None:
        """Check the settings of environments against the others."""
        if self.rollout.environment is None:
            if self.environment != EnvironmentConfig():
                raise ConfigError("environment is set, but rollout.environment is not; set that, or remove it")
            if ENVIRONMENT_REWARD in self.rewards.use:
                raise ConfigError(
                    f"rewards.use has {ENVIRONMENT_REWARD}, the reward that an environment returns, but rollout.environment is not set; set that, or "
                    "remove it"
                )
            return
        if self._estimator is not None and "baselines" in self._estimator.needs:
            raise ConfigError(
                f"rollout.environment={self.rollout.environment} with the estimator {self._estimator.name}, whose baselines are greedy completions of "
                "a single turn; use another estimator"
            )
        most = self.environment.max_tokens
        if most is not None and most < self.rollout.max_tokens:
            raise ConfigError(
                f"environment.max_tokens={most} is less than rollout.max_tokens={self.rollout.max_tokens}, the limit of a single turn; lower that, or "
                "raise environment.max_tokens"
            )

    def not_adapters_alone(self) -> str:
        """Return why sending only the adapters would not reproduce the policy in the generator; empty if it would."""
        model = self.actor.model or self.model
        reasons = {
            "the policy has no adapters (model.lora.rank=0)": not model.lora.rank,
            f"its weights are not those of model.path (model.init={model.init})": model.init == "random",
            f"the base weights are quantized (model.quantization={model.quantization})": (model.quantization != "none"),
            f"the weights of new tokens are not in model.path (model.added_tokens={list(model.added_tokens)})": bool(
                model.added_tokens
            ),
            f"the routers' biases change too (model.router_bias_update_rate={model.router_bias_update_rate})": (
                model.router_bias_update_rate > 0
            ),
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _check_staleness(self) -> None:
        """Check that the generator has dedicated processes, and that the policy can train on completions of older weights."""
        staleness, held = self.rl.staleness, self.rollout.held_versions
        if not staleness:
            if held is not None:
                raise ConfigError(f"rollout.held_versions={held} is not used without rl.staleness; set that, or remove it")
            if self.rl.inflight_weight_updates:
                raise ConfigError(
                    "rl.inflight_weight_updates=true with rl.staleness=0, where nothing is generated when new weights arrive; set rl.staleness, or remove rl.inflight_weight_updates"
                )
            return
        if "rollout" not in self.group.pools:
            raise ConfigError(
                f"rl.staleness={staleness}, but the generator has no dedicated processes in which to generate while the policy trains; "
                "set group.pools.rollout, or rl.staleness=0"
            )
        if held is not None and self.rl.inflight_weight_updates:
            raise ConfigError(
                f"rollout.held_versions={held} with rl.inflight_weight_updates=true, where all completions continue with the newest weights; remove one of them"
            )
        processes, tp = self.group.pools["rollout"], self.rollout.options.get("tp", 1)
        if self.rl.inflight_weight_updates and self.rollout.generator == "vllm" and processes > 1 and tp != 1:
            raise ConfigError(
                f"rl.inflight_weight_updates=true with rollout.generator=vllm, rollout.options.tp={tp} and group.pools.rollout={processes}: the processes of a model "
                "would have to interrupt a call at the same step; set tp=1, one process, or rl.inflight_weight_updates=false"
            )
        if held is not None and held > staleness:
            raise ConfigError(
                f"rollout.held_versions={held} with rl.staleness={staleness}, which needs at most {staleness}; lower it, or remove it"
            )
        if self._estimator is not None and "baselines" in self._estimator.needs:
            raise ConfigError(
                f"rl.staleness={staleness} with the estimator {self._estimator.name} (rl.algorithm={self.rl.algorithm}, rl.advantage.estimator="
                f"{self.rl.advantage.estimator}), whose baselines are completions of the current weights; set rl.staleness=0, or use another estimator"
            )

    def _check_used(self) -> None:
        """Reject settings that the algorithm does not use."""
        rl = self.rl
        estimator = self._estimator
        defaults = RLSettings()
        unused: list[str] = []
        if estimator is None:
            unused += ["rl.loss"] * (rl.loss != defaults.loss) + ["rl.advantage"] * (rl.advantage != defaults.advantage)
            names = ("rejection", "old_log_probs", "reward_clip", "reward_norm", "kl_target", "dynamic_sampling")
            unused += ["rl.importance"] * (rl.importance in ("truncate", "mask"))
            unused += ["rl.routing_replay"] * (rl.routing_replay == "actor")
            unused += [f"rl.{name}" for name in names if getattr(rl, name) != getattr(defaults, name)]
        elif self.dpo != PreferenceConfig():
            unused.append("dpo")
        if estimator is None or "values" not in estimator.needs:
            unused += [
                f"rl.{name}" for name in ("critic_warmup", "critic_clip") if getattr(rl, name) != getattr(defaults, name)
            ]
            unused += ["critic"] * (self.critic != TrainedRoleConfig())
        if unused:
            raise ConfigError(
                f"rl.algorithm={rl.algorithm} does not use {', '.join(unused)}; remove it, or choose another algorithm"
            )
        if self.group.kind == "local" and self.group.nproc != 1:
            raise ConfigError(
                f"group.nproc={self.group.nproc} with group.kind=local, where torchrun sets the number of processes; use its "
                "--nproc-per-node"
            )
        if self.trainer.max_steps is not None and rl.critic_warmup >= self.trainer.max_steps:
            raise ConfigError(
                f"rl.critic_warmup={rl.critic_warmup} is not less than trainer.max_steps={self.trainer.max_steps}, so the policy would "
                "never be trained"
            )
        for name in ("actor", "critic"):
            optim = getattr(self, name).optim
            if optim is not None:
                try:
                    optim.check(self.trainer.max_steps or 1)
                except ConfigError as e:
                    raise ConfigError(f"{name}.{e}") from e

    @property
    def _estimator(self) -> type[Estimator] | None:
        """The advantage estimator; None if the loss compares pairs of completions."""
        spec = ALGORITHMS.get(self.rl.algorithm)
        if spec.advantage is None:
            return None
        # A registration without an estimator uses the default of the advantage settings.
        return ESTIMATORS.get(self.rl.advantage.estimator or spec.advantage.get("estimator", GAEEstimator.name))

    def _check_group_size(self) -> None:
        rl, estimator = self.rl, self._estimator
        dynamic = ALGORITHMS.get(rl.algorithm).dynamic_sampling if rl.dynamic_sampling is None else rl.dynamic_sampling
        if rl.group_size < 2 and dynamic:
            raise ConfigError(
                f"rl.group_size={rl.group_size} with dynamic sampling, which replaces groups whose rewards are all equal, as is every group of "
                "one completion; use at least 2, or rl.dynamic_sampling=false"
            )
        if rl.group_size < 2 and (estimator is None or estimator.compares):
            others = [name for name, kind in ESTIMATORS.all().items() if not kind.compares]
            raise ConfigError(
                f"rl.group_size={rl.group_size} with rl.algorithm={rl.algorithm}, which compares the completions of one prompt; use at "
                f"least 2, or an algorithm with one of the estimators {', '.join(others)}"
            )


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RLConfig):
    """The configuration of `python -m drivetrain.trainers.grpo`."""

    recipe_prefix: ClassVar[str] = "grpo"
    trainer: RLTrainerConfig = setting(factory=lambda: RLTrainerConfig(output_dir="runs/grpo"), help="the training loop")


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RLConfig):
    """The configuration of `python -m drivetrain.trainers.ppo`."""

    recipe_prefix: ClassVar[str] = "ppo"
    rl: RLSettings = setting(factory=lambda: RLSettings(algorithm="ppo", group_size=1), help="the algorithm")
    trainer: RLTrainerConfig = setting(factory=lambda: RLTrainerConfig(output_dir="runs/ppo"), help="the training loop")


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(RLConfig):
    """The configuration of `python -m drivetrain.trainers.online_dpo`."""

    recipe_prefix: ClassVar[str] = "online_dpo"
    rl: RLSettings = setting(factory=lambda: RLSettings(algorithm="online_dpo"), help="the algorithm")
    trainer: RLTrainerConfig = setting(factory=lambda: RLTrainerConfig(output_dir="runs/online-dpo"), help="the training loop")
