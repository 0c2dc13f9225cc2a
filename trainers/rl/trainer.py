"""The reinforcement learning trainers: a single controller over the roles of a group, independent of backends and transports."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from ...engine.errors import ConfigError
from ...rewards.pool import RewardTarget
from ..base_trainer import BaseTrainer
from ..config.rl import GRPOConfig, OnlineDPOConfig, PPOConfig, RLConfig
from ..loop.callbacks import Callback, check_callbacks
from ..loop.early_stopping import EarlyStopping
from ..validate import check_outputs, unused_settings, warn_about_data
from .adaptive import Adaptive
from .algorithms import Algorithm, resolve
from .dry_run import RLDryRun, dry_run
from .prompts import Prompts, load_data, most_tokens
from .roles import Roles, build_roles, check_roles
from .run import RLRun, evaluation_metrics, open_run

log = logging.getLogger(__name__)


class RLTrainer(BaseTrainer[RLConfig, RLDryRun]):
    """A reinforcement learning trainer.

    Args:
        config: The settings.
        rewards: Reward functions, each at the top level of a module, in addition to those that `config.rewards.use` names.
        callbacks: Code that the training loop calls; with `group.kind=local` in every process.
    """

    config_class: ClassVar[type[RLConfig]] = RLConfig

    def __init__(self, config: RLConfig, rewards: Sequence[RewardTarget] = (), *, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(config)
        check_callbacks(callbacks)
        self._rewards, self._callbacks = tuple(rewards), tuple(callbacks)
        self._algorithm: Algorithm = resolve(config)

    def check(self) -> None:
        """Check everything that can be checked without data and without reading weights.

        Raises:
            ConfigError: A setting is invalid; the message names the setting, its value and how to fix it.
        """
        config = self.config
        config.check()
        if not config.rewards.use and not self._rewards:
            raise ConfigError("rewards.use is not set, so no reward is configured; give names, such as rewards.use=[answer]")
        # Built only for their checks; the run builds its own.
        Adaptive(config.rl, self._algorithm)
        EarlyStopping.of(config.trainer, evaluation_metrics(config))
        check_outputs(config.trainer)
        check_roles(build_roles(config, self._algorithm, total_steps=1))

    def open_run(self) -> AbstractContextManager[RLRun]:
        """Read the prompts, start the processes and their roles, and resume."""
        prompts, total_steps, roles = self._plan()
        return open_run(
            self.config,
            self._algorithm,
            roles,
            prompts,
            functions=self._rewards,
            callbacks=self._callbacks,
            total_steps=total_steps,
        )

    def make_first_step(self) -> RLDryRun:
        """Run the first step of the run, and report its completions and memory use."""
        prompts, total_steps, roles = self._plan()
        return dry_run(self.config, self._algorithm, roles, prompts, self._rewards, total_steps)

    def _plan(self) -> tuple[Prompts, int, Roles]:
        """Read the prompts and check the settings that depend on them; return them, the number of steps, and the roles. Reads no weights."""
        config, prompts = self.config, load_data(self.config)
        warn_about_data(config.data, config.data.batch_size, len(prompts.order), "prompts")
        # Rounded up once, since a batch of prompts may continue from one epoch to the next.
        total_steps = config.trainer.max_steps or -(-config.trainer.epochs * len(prompts.order) // prompts.order.batch_size)
        if self._algorithm.needs_critic and config.rl.critic_warmup >= total_steps:
            raise ConfigError(
                f"rl.critic_warmup={config.rl.critic_warmup} is as many steps as the run has ({total_steps}), so the policy would "
                "never be trained; lower it, or raise trainer.max_steps or trainer.epochs"
            )
        # Schedules depend on the number of steps, and the generator's cache on the
        # prompts, so roles are built only now.
        roles = build_roles(config, self._algorithm, total_steps, most_tokens(config, prompts))
        lines: set[str] = set()
        for name in roles.specs.keys() & {"actor", "critic"}:
            role: Any = roles.specs[name].config
            has_own = getattr(config, name).optim is not None
            lines |= {*unused_settings(role.optim, role.total_steps, f"{name}.optim" if has_own else "optim")}
        for line in sorted(lines):
            log.warning("%s", line)
        return prompts, total_steps, roles


class GRPOTrainer(RLTrainer):
    """GRPO and related methods that compare the completions of a prompt; see `rl.algorithm`."""

    config_class: ClassVar[type[RLConfig]] = GRPOConfig


class PPOTrainer(RLTrainer):
    """PPO with a critic."""

    config_class: ClassVar[type[RLConfig]] = PPOConfig


class OnlineDPOTrainer(RLTrainer):
    """DPO on pairs of the policy's own completions."""

    config_class: ClassVar[type[RLConfig]] = OnlineDPOConfig
