"""The settings of the trainers of reinforcement learning. This module does not import torch."""

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
"""The name of the reward that an environment gives in `rewards.use`."""
ROLES = ("actor", "critic", "reference", "reward", "rollout")
"""The roles of a run, except those that have no model."""


@dataclass(frozen=True, kw_only=True)
class RLSettings(Settings):
    """The algorithm."""

    section: ClassVar[str] = "rl"

    algorithm: AlgorithmName = setting("grpo", "algorithm, which sets rl.loss and rl.advantage where these are null")
    loss: PolicyLossConfig = setting(factory=PolicyLossConfig, help="loss of the policy")
    advantage: EstimatorConfig = setting(factory=EstimatorConfig, help="advantages")
    group_size: int = setting(8, "answers to each prompt", most=65536)
    mini_batch_size: int | None = setting(None, "answers per optimizer step; null: all answers of the step")
    epochs: int = setting(1, "passes over the answers of a step", most=10000)
    staleness: int = setting(
        0,
        "K: answers are generated while the policy is trained, by weights of at most so many steps before; 0: in turns; needs group.pools.rollout",
        most=1024,
    )
    swap_at: Literal["completion", "token"] = setting(
        "completion",
        "with rl.staleness: where new weights take over; completion: an answer is made by one version from beginning to end; token: inside an answer, which goes on from the tokens so far, so that no weights wait, and another run is not the same to the bit",
    )
    critic_warmup: int = setting(0, "steps at the beginning in which only the critic is trained")
    critic_clip: float = setting(0.5, "how far a value may move in a step before its loss is clipped; 0: no clipping")
    kl_target: float | None = setting(
        None, "KL divergence per answer, in nats, that rl.advantage.kl_coef is adapted to; null: the weight is constant"
    )
    kl_horizon: int = setting(10000, "answers over which an adapted weight changes by at most a fifth")
    reward_clip: float | None = setting(None, "largest absolute value of an answer's reward; null: no clipping")
    reward_norm: RewardNorm = setting(
        "none", "shift and scale rewards to mean 0 and variance 1; batch: of the step; running: of all steps so far"
    )
    dynamic_sampling: bool | None = setting(
        None,
        "replace groups whose rewards are all equal, which teach nothing, by those of further prompts; null: as in rl.algorithm",
    )
    max_resamples: int = setting(
        10,
        "with dynamic sampling: at most so many times the prompts of a step are replaced; then groups of equal rewards are kept",
    )
    old_log_probs: OldLogProbs = setting(
        "actor",
        "log-probabilities that ratios compare with; actor: computed again by the actor; rollout: those of the generator",
    )
    routing_replay: Literal["off", "rollout", "actor"] = setting(
        "off",
        "mixtures of experts: where tokens go in the update, and before it; off: where the router sends them; rollout: to the experts of the generator; actor: to those of the pass that computes rl.old_log_probs",
    )
    importance: Literal["auto", "none", "truncate", "mask"] = setting(
        "auto",
        "correction of the difference between actor and generator; truncate: weights of at most the upper bound; mask: nothing is learned where the weight is out of bounds; auto: truncate if the generator computes other numbers than the actor (bfloat16, vLLM, quantized weights), otherwise none",
    )
    importance_level: Level = setting("token", "whether a weight belongs to a token or to an answer")
    importance_bounds: tuple[float, float] = setting((0.5, 2.0), "bounds of the weights; truncate uses the upper one")
    rejection: dict[str, Any] = setting(
        factory=dict,
        help="tokens and answers that are not learned because actor and generator differ too much: criterion and limit, as in rl.rejection.seq_mean_k3=0.01; see losses.importance.Rejection",
    )
    max_log_prob_gap: float | None = setting(
        0.1,
        "the run stops if the log-probabilities of actor and generator differ by more than this on average, in nats per token; null: never",
    )
    allow_biased_sampling: bool = setting(
        False,
        "accept rollout.top_p and top_k that leave out a part of the vocabulary, for which the log-probabilities of the actor are wrong",
    )
    log_entropy: bool = setting(True, "compute the entropy of the policy, for the metrics")
    eval_before_train: bool = setting(True, "evaluate before the first step")
    eval_samples: int = setting(
        1, "answers to each held-out prompt; 1: the most likely tokens; more: sampled, for avg@k and pass@k", most=65536
    )
    eval_reward: str | None = setting(
        None, "reward that decides whether an answer counts as right (a value of 1 or more); null: the first of rewards.use"
    )
    warn_equal_steps: int = setting(10, "steps without any group of different rewards after which a warning is logged")

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
    """The generation of answers."""

    section: ClassVar[str] = "rollout"

    generator: str = setting("static", "generator; `drivetrain generators` lists them")
    temperature: float = setting(
        1.0, "temperature at which answers are sampled and log-probabilities are computed", least=1e-3, most=1e3
    )
    top_p: float = setting(1.0, "probability mass to sample from")
    top_k: int = setting(0, "number of most likely tokens to sample from; 0: all")
    max_tokens: int = setting(256, "maximum number of tokens in an answer")
    prompts_per_call: int | None = setting(
        None,
        "prompts that are answered together, whose answers are judged while the next ones are generated; null: all that are due",
    )
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None,
        "number format of the generator's weights; null: bfloat16 if engine.precision.compute is or comes to be, otherwise float32",
    )
    max_batch_size: int = setting(256, "number of answers that a process generates at the same time")
    max_batch_total_tokens: int | None = setting(
        None,
        "number of tokens of these answers and their prompts, which bounds the cache; null: as many as fit on the GPU if the generator has it to itself while it generates (group.pools.rollout, or group.offload), otherwise 32768 or what all answers of a call can need, if that is less",
    )
    target_tokens_per_batch: int = setting(8192, "number of tokens in a forward pass")
    held_versions: int | None = setting(
        None,
        "with rl.staleness: versions of the weights that the generator holds, of which it uses one, while the others are in host memory; new weights wait until the answers of older ones are complete; null: as many as rl.staleness",
        most=1024,
    )
    restarts: int = setting(
        3,
        "with processes of its own (group.pools.rollout): how often in a row these are started again after one died, before the run ends; with rl.staleness the actor's first process keeps the versions that the generator holds in host memory for that; 0: never",
        most=1000,
    )
    invariant: bool = setting(
        False,
        "whether an answer is the same to the bit whatever is generated at the same time; for continuous and static, on a CPU",
    )
    environment: str | None = setting(
        None,
        "what the policy acts in, turn by turn: a name that `drivetrain environments` lists, or module:class; null: an answer is a single turn",
    )
    options: dict[str, Any] = setting(factory=dict, help="settings that only this generator has")

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
                f"rollout.temperature={self.temperature}; it must be more than 0, since answers are learned from"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p={self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class FrozenRoleConfig(Settings):
    """The model and the engine of a role that is not trained. What is not set is that of the top level."""

    model: ModelConfig | None = setting(None, "settings as of `model`, where they differ from those")
    engine: EngineConfig | None = setting(None, "settings as of `engine`, where they differ from those")


@dataclass(frozen=True, kw_only=True)
class TrainedRoleConfig(FrozenRoleConfig):
    """The model, the engine and the optimizer of a role that is trained. What is not set is that of the top level."""

    optim: OptimConfig | None = setting(None, "settings as of `optim`, where they differ from those")


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Settings):
    """The processes that run the roles."""

    section: ClassVar[str] = "group"

    kind: GroupKind = setting(
        "process", "process: started on this machine; ray: on a Ray cluster; local: this program, under torchrun"
    )
    nproc: int = setting(
        1, "processes of the pool that all roles share; for local torchrun says how many", most=MOST_PROCESSES
    )
    pools: dict[str, int] = setting(
        factory=dict,
        help="roles with processes of their own, and how many: group.pools.rollout=2 (critic, reference, reward too)",
    )
    offload: OffloadMode = setting(
        "none", "where the state of roles on shared processes is kept while others work; the generator's is dropped meanwhile"
    )
    weight_sync: WeightSync = setting(
        "auto",
        "how weights go to a generator with processes of its own; nccl: from GPU to GPU; tcp: through host memory; auto: nccl if every process has a GPU, otherwise tcp; gloo: as nccl, on CPUs, for tests",
    )

    sync_changes: bool | None = setting(
        None,
        "whether a generator with processes of its own is sent only the weights that have changed, for which both sides keep all weights in host memory; not with nccl; null: with group.kind=ray, if its weights have 16 bits, of which few change in a step",
    )
    sync_adapters: bool | None = setting(
        None,
        "whether of a policy that is trained through adapters these are sent alone to the generator, which adds them to the weights of model.path; null: if the generator has processes of its own, group.sync_changes is not true, and nothing else of the policy differs from these weights",
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
                    f"group.pools.{role}={size}: roles that can have processes of their own are {', '.join(ROLES[1:])}"
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
                f"group.sync_changes=true with {other}, where weights do not go from process to process through host memory; remove it"
            )
        if self.sync_changes and self.sync_adapters:
            raise ConfigError(
                "group.sync_changes=true and group.sync_adapters=true: either changes are sent, or adapters; remove one of them"
            )
        if self.pools and self.kind == "local":
            raise ConfigError(
                f"group.pools.{next(iter(self.pools))} with group.kind=local, where all roles share the processes of torchrun; use "
                "process or ray"
            )


@dataclass(frozen=True, kw_only=True)
class RLConfig(CommandConfig):
    """The settings that all trainers of reinforcement learning share."""

    recipe_prefix: ClassVar[str] = ""
    """What the names of the command's recipes begin with."""

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
                f"model.overrides={overrides} with rollout.generator={self.rollout.generator}, which reads the config of the "
                "folder; use static or continuous, or change config.json"
            )
        if self.rollout.generator == "exact" and not (self.actor.engine or self.engine).invariant:
            raise ConfigError(
                "rollout.generator=exact with engine.invariant=false: answers would cost a forward pass for each token, and their "
                "log-probabilities would not be the actor's to the bit; set engine.invariant=true, or use static or continuous"
            )
        biased = {"top_p": self.rollout.top_p} if self.rollout.top_p < 1 else {}
        biased |= {"top_k": self.rollout.top_k} if self.rollout.top_k else {}
        for name, value in biased.items():
            if not self.rl.allow_biased_sampling:
                raise ConfigError(
                    f"rollout.{name}={value}: answers would be drawn from a part of the vocabulary, but the actor's log-probabilities "
                    f"are of all of it, so every ratio would be wrong; remove rollout.{name}, or accept that with "
                    "rl.allow_biased_sampling=true"
                )
        for name in ("best_metric", "eval_every"):
            value = getattr(self.trainer, name)
            if value and not self.data.eval:
                raise ConfigError(f"trainer.{name}={value} needs data.eval, which is not set")

    @property
    def max_answer_tokens(self) -> int:
        """The number of tokens that may follow a prompt: of an answer, or of an episode."""
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
                    f"rewards.use has {ENVIRONMENT_REWARD}, the reward that an environment gives, but rollout.environment is not set; set that, or "
                    "remove it"
                )
            return
        if self._estimator is not None and "baselines" in self._estimator.needs:
            raise ConfigError(
                f"rollout.environment={self.rollout.environment} with the estimator {self._estimator.name}, whose baselines are most likely answers of "
                "a single turn; use another one"
            )
        most = self.environment.max_tokens
        if most is not None and most < self.rollout.max_tokens:
            raise ConfigError(
                f"environment.max_tokens={most} is less than rollout.max_tokens={self.rollout.max_tokens}, the tokens of a single turn; lower that, or "
                "raise environment.max_tokens"
            )

    def not_adapters_alone(self) -> str:
        """Return why the generator cannot be sent adapters alone; empty if it can, and what it then computes with is what it would be sent."""
        model = self.actor.model or self.model
        reasons = {
            "the policy has no adapters (model.lora.rank=0)": not model.lora.rank,
            f"its weights are not those of model.path (model.init={model.init})": model.init == "random",
            f"the weights that adapters are added to have another number format (model.quantization={model.quantization})": (
                model.quantization != "none"
            ),
            f"the weights of new tokens are not in model.path (model.added_tokens={list(model.added_tokens)})": bool(
                model.added_tokens
            ),
            f"the bias of routers changes too (model.router_bias_update_rate={model.router_bias_update_rate})": (
                model.router_bias_update_rate > 0
            ),
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _check_staleness(self) -> None:
        """Check that what answers meanwhile has processes of its own, and that answers of older weights can be learned from."""
        staleness, held = self.rl.staleness, self.rollout.held_versions
        if not staleness:
            if held is not None:
                raise ConfigError(f"rollout.held_versions={held} is not used without rl.staleness; set that, or remove it")
            if self.rl.swap_at == "token":
                raise ConfigError(
                    "rl.swap_at=token with rl.staleness=0, where nothing is generated while new weights come; set rl.staleness, or remove rl.swap_at"
                )
            return
        if "rollout" not in self.group.pools:
            raise ConfigError(
                f"rl.staleness={staleness}, but the generator has no processes of its own in which it could answer while the policy is trained; "
                "set group.pools.rollout, or rl.staleness=0"
            )
        if held is not None and self.rl.swap_at == "token":
            raise ConfigError(
                f"rollout.held_versions={held} with rl.swap_at=token, where all answers go on with the newest weights; remove one of them"
            )
        processes, tp = self.group.pools["rollout"], self.rollout.options.get("tp", 1)
        if self.rl.swap_at == "token" and self.rollout.generator == "vllm" and processes > 1 and tp != 1:
            raise ConfigError(
                f"rl.swap_at=token with rollout.generator=vllm, rollout.options.tp={tp} and group.pools.rollout={processes}: the processes of a model "
                "would have to end a call at the same step; set tp=1, one process, or rl.swap_at=completion"
            )
        if held is not None and held > staleness:
            raise ConfigError(
                f"rollout.held_versions={held} with rl.staleness={staleness}, for which {staleness} suffice; lower it, or remove it"
            )
        if self._estimator is not None and "baselines" in self._estimator.needs:
            raise ConfigError(
                f"rl.staleness={staleness} with the estimator {self._estimator.name} (rl.algorithm={self.rl.algorithm}, rl.advantage.estimator="
                f"{self.rl.advantage.estimator}), whose baselines are answers of the present weights; set rl.staleness=0, or use another one"
            )

    def _check_used(self) -> None:
        """Refuse settings that the algorithm would not read."""
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
                f"group.nproc={self.group.nproc} with group.kind=local, where torchrun says how many processes there are; use its "
                "--nproc-per-node"
            )
        if self.trainer.max_steps is not None and rl.critic_warmup >= self.trainer.max_steps:
            raise ConfigError(
                f"rl.critic_warmup={rl.critic_warmup} is as many steps as trainer.max_steps={self.trainer.max_steps}, so the policy would "
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
        """The estimator of the advantages; None if the loss compares pairs of answers."""
        spec = ALGORITHMS.get(self.rl.algorithm)
        if spec.advantage is None:
            return None
        return ESTIMATORS.get(self.rl.advantage.estimator or spec.advantage.get("estimator", GAEEstimator.name))

    def _check_group_size(self) -> None:
        rl, estimator = self.rl, self._estimator
        dynamic = ALGORITHMS.get(rl.algorithm).dynamic_sampling if rl.dynamic_sampling is None else rl.dynamic_sampling
        if rl.group_size < 2 and dynamic:
            raise ConfigError(
                f"rl.group_size={rl.group_size} with dynamic sampling, which replaces groups whose rewards are all equal, as those of a "
                "single answer always are; use at least 2, or rl.dynamic_sampling=false"
            )
        if rl.group_size < 2 and (estimator is None or estimator.compares):
            others = [name for name, kind in ESTIMATORS.all().items() if not kind.compares]
            raise ConfigError(
                f"rl.group_size={rl.group_size} with rl.algorithm={rl.algorithm}, which compares the answers to one prompt; use at "
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
