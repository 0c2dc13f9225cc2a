"""Trainers of reinforcement learning: one controller program over the roles of a group, which knows no backend and no transport."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ...engine.checkpoint.retention import folder_name
from ...engine.errors import ConfigError, RewardError, disk_error
from ...rewards.pool import RewardTarget
from ..config.parse import changes
from ..config.rl import GRPOConfig, OnlineDPOConfig, PPOConfig, RLConfig
from ..data.order import Cursor
from ..hub import check_push, push
from ..loop.loggers import check_loggers
from ..loop.logs import configure_logging
from ..loop.loop import StopReason
from ..loop.signals import StopSignal
from ..validate import unused_settings, warn_about_data
from .adaptive import Adaptive
from .algorithms import Algorithm, resolve
from .collect import Prompts, load_data, most_tokens
from .dry_run import RLDryRun, dry_run
from .evaluation import evaluate
from .metrics import RLSummary, shown
from .roles import Roles, build_roles, check_roles
from .run import RLRun, early_stopping_of, open_run
from .step import make_step

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RLOutcome:
    """The end of a run.

    Args:
        step: The last completed step.
        stopped: Whether a signal ended it.
        signal: The signal that this process has received, if any.
        outputs: The location of each output, by name.
        evaluation: The metrics of the last evaluation.
    """

    step: int
    stopped: bool = False
    signal: int | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


class RLTrainer:
    """A trainer of reinforcement learning.

    Args:
        config: The settings.
        rewards: Reward functions, each at the top level of a module, beside those that `config.rewards.use` names.
    """

    config_class: ClassVar[type[RLConfig]] = RLConfig

    def __init__(self, config: RLConfig, rewards: Sequence[RewardTarget] = ()) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"config is a {type(config).__name__}; {type(self).__name__} needs a {self.config_class.__name__}"
            )
        self.config, self._rewards = config, tuple(rewards)
        self._algorithm: Algorithm = resolve(config)

    def check(self) -> None:
        """Check everything that can be checked without data and without reading weights.

        Raises:
            ConfigError: A setting is wrong; the message names the setting, its value and how to fix it.
        """
        config = self.config
        config.check()
        if not config.rewards.use and not self._rewards:
            raise ConfigError(
                "rewards.use is not set, so nothing says which answers are good; give names, such as rewards.use=[answer]"
            )
        Adaptive(config.rl, self._algorithm)
        early_stopping_of(config, "")
        check_loggers(config.trainer.loggers)
        if config.trainer.push_to_hub is not None:
            check_push(config.trainer.push_to_hub)
        check_roles(build_roles(config, self._algorithm, total_steps=1))

    def train(self) -> RLOutcome:
        """Train from start to finish, or from the last checkpoint on.

        Raises:
            DrivetrainError: A setting, a file, a row or a reward is wrong, or a worker failed; the message says what to do.
        """
        prompts, total_steps, roles = self._planned()
        with open_run(self.config, self._algorithm, roles, prompts, functions=self._rewards, total_steps=total_steps) as run:
            outcome = self._steps(run)
            self._finish(run, outcome)
            summary = next((logger for logger in run.loggers if isinstance(logger, RLSummary)), None)
        if summary is not None:
            print("\n".join(summary.lines(outcome.outputs)), flush=True)
        return outcome

    def dry_run(self) -> RLDryRun:
        """Do everything up to and including a first step, save nothing, and report its answers and memory.

        Raises:
            DrivetrainError: A setting, a file, a row or a reward is wrong, or a worker failed; the message says what to do.
        """
        prompts, total_steps, roles = self._planned()
        return dry_run(self.config, self._algorithm, roles, prompts, self._rewards, total_steps)

    def _planned(self) -> tuple[Prompts, int, Roles]:
        """Check everything that can be checked without reading weights; return the prompts, the number of steps, and the roles."""
        configure_logging()
        self.check()
        prompts = load_data(self.config)
        warn_about_data(self.config.data, self.config.data.batch_size, len(prompts.order), "prompts")
        total_steps = self.config.trainer.max_steps or self.config.trainer.epochs * -(
            -len(prompts.order) // prompts.order.batch_size
        )
        if self._algorithm.needs_critic and self.config.rl.critic_warmup >= total_steps:
            raise ConfigError(
                f"rl.critic_warmup={self.config.rl.critic_warmup} is as many steps as the run has ({total_steps}), so the policy would "
                "never be trained; lower it, or raise trainer.max_steps or trainer.epochs"
            )
        roles = build_roles(self.config, self._algorithm, total_steps, most_tokens(self.config, prompts))
        lines: list[str] = []
        for name in roles.specs.keys() & {"actor", "critic"}:
            role: Any = roles.specs[name].config
            has_own = getattr(self.config, name).optim is not None
            lines += unused_settings(role.optim, role.total_steps, f"{name}.optim" if has_own else "optim")
        for line in sorted(set(lines)):
            log.warning("%s", line)
        return prompts, total_steps, roles

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _steps(self, run: RLRun) -> RLOutcome:
        """Make all steps. The version of the weights is the number of steps that they have been trained for."""
        phases, config = run.phases, self.config.trainer
        step, cursor = run.start
        self._announce(run, step)
        outcome = RLOutcome(step=step)
        phases.memory_manager.sync(step)
        time_is_up = False
        with StopSignal(config.max_minutes) as stop:
            if step == 0 and self.config.rl.eval_before_train and self._evaluate(run, outcome):
                self._save(run, 0, cursor)
            while outcome.step < run.total_steps and not (run.early_stopping.stop or outcome.stopped or time_is_up):
                step, started = outcome.step + 1, time.perf_counter()
                with self._saved_on_failed_rewards(run, outcome.step, cursor):
                    completed = make_step(phases, run.collector, cursor, step=step, bundles=run.bundles)
                outcome.step, cursor = step, completed.cursor
                self._log_step(run, cursor, completed.metrics, time.perf_counter() - started)
                is_best = self._is_due(step, config.eval_every, run) and self._evaluate(run, outcome)
                outcome.stopped = run.controllers.any(stop.requested_here)
                time_is_up = config.max_minutes is not None and run.controllers.any(stop.time_is_up_here)
                last = outcome.stopped or time_is_up or run.early_stopping.stop or step == run.total_steps
                if is_best or last or self._is_due(step, config.save_every, run):
                    self._save(run, outcome.step, cursor)
                if config.export_hf_every and step % config.export_hf_every == 0:
                    self._export(run, Path(config.output_dir) / "exports" / folder_name(step))
        outcome.signal = stop.number
        if run.early_stopping.reached:
            log.info(run.early_stopping.describe_reached(outcome.step))
        elif time_is_up and outcome.step < run.total_steps:
            log.info("stopped after step %d of %d: %s", outcome.step, run.total_steps, StopReason.TIME.value)
        return outcome

    @contextmanager
    def _saved_on_failed_rewards(self, run: RLRun, step: int, cursor: Cursor) -> Iterator[None]:
        """Save what was trained before the rewards of a step failed, such as a judge that cannot be reached."""
        try:
            yield
        except RewardError:
            if step > run.start[0] and not run.checkpoints.has(step):
                self._save(run, step, cursor)
                log.error(
                    "the rewards of step %d failed; step %d was saved, from which the same command resumes", step + 1, step
                )
            raise

    def _is_due(self, step: int, every: int | None, run: RLRun) -> bool:
        return step == run.total_steps or bool(every and step % every == 0)

    def _evaluate(self, run: RLRun, outcome: RLOutcome) -> bool:
        """Evaluate on the held-out prompts, if there are any; return whether it is the best evaluation so far."""
        if run.prompts.held_out is None:
            return False
        started = time.perf_counter()
        outcome.evaluation, judged = evaluate(run.phases, run.prompts.held_out, version=outcome.step)
        tokens = sum(len(answer.tokens) for answer in judged)
        record = {"step": outcome.step, "split": "eval", **outcome.evaluation, "tokens": tokens}
        count = min(self.config.trainer.generate, len(judged))
        some = shown([judged[i * len(judged) // count] for i in range(count)])

        def write() -> None:
            for logger in run.loggers:
                logger.log({**record, "seconds": time.perf_counter() - started})
                if some:
                    logger.answers(outcome.step, some)

        self._write(run, outcome.step, write)
        return run.early_stopping.update(outcome.step, outcome.evaluation)

    def _log_step(self, run: RLRun, cursor: Cursor, metrics: dict[str, float], seconds: float) -> None:
        phases = run.phases
        epoch = cursor.epoch + cursor.position / len(run.prompts.order)
        record: dict[str, Any] = {"step": phases.step, **metrics, **phases.timing(), **phases.adaptive.metrics()}
        idle = seconds - sum(phases.seconds.values()) + phases.seconds.get("reward_wait", 0.0)
        record |= {**phases.memory_manager.metrics(), "epoch": epoch, "seconds": seconds, "seconds/idle": idle}
        run.collector.warn(metrics)

        def write() -> None:
            for logger in run.loggers:
                logger.log(record)

        self._write(run, phases.step, write)

    def _write(self, run: RLRun, step: int, write: Any) -> None:
        def guarded() -> None:
            try:
                write()
            except OSError as e:
                raise disk_error(f"the metrics of step {step}", e) from e

        run.controllers.run_on_rank0(guarded)

    def _save(self, run: RLRun, step: int, cursor: Cursor) -> None:
        # A checkpoint brings all of a role's state to the device for a moment.
        run.phases.memory_manager.enter("score")
        extra = {
            "data": run.prompts.order.state(cursor),
            "adaptive": run.phases.adaptive.state(),
            "watch": run.early_stopping.state(),
        }
        run.checkpoints.save(step, extra, best=run.early_stopping.best_step)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, run: RLRun, outcome: RLOutcome) -> None:
        config, best = self.config.trainer, run.early_stopping.best_step
        outcome.outputs["checkpoints"] = run.checkpoints.root
        if outcome.stopped:
            log.info("stopped by a signal after step %d, which was saved; the same command resumes from there", outcome.step)
            return
        if not config.export_hf:
            return
        if best is not None and best != outcome.step:
            log.info(
                "best %s: %.4g after step %d; exporting that checkpoint",
                run.early_stopping.metric,
                run.early_stopping.best,
                best,
            )
            run.phases.memory_manager.enter("score")
            run.checkpoints.load_step(best)
        outcome.outputs |= self._export(run, Path(config.output_dir))
        if (repo := config.push_to_hub) is not None:
            folder = outcome.outputs.get("adapter", outcome.outputs["model"])
            outcome.outputs["Hub"] = run.controllers.run_on_rank0(lambda: push(Path(folder), repo))

    def _export(self, run: RLRun, folder: Path) -> dict[str, str]:
        run.phases.memory_manager.enter("score")
        actor, outputs, where = run.phases.group["actor"], {}, folder.absolute()
        if run.phases.has_adapters:
            outputs["adapter"] = actor.export(str(where / "adapter"), adapters="only")
        return {**outputs, "model": actor.export(str(where / "hf"))}

    def _announce(self, run: RLRun, step: int) -> None:
        config, prompts = self.config, run.prompts
        log.info("settings (complete list: %s/config.yaml)", config.trainer.output_dir)
        for name, value in changes(config).items():
            log.info("  %s=%s", name, value)
        log.info(
            "%d prompts, %d steps, %d answers per step",
            len(prompts.order),
            run.total_steps,
            prompts.order.batch_size * config.rl.group_size,
        )
        for line in run.phases.group["actor"].describe_settings():
            log.info("actor: %s", line)
        log.info("loss: %s", self._algorithm.loss_text)
        if self._algorithm.advantage is not None:
            log.info("advantages: %s", self._algorithm.advantage_text)
        first = prompts.train[0]
        log.info("first prompt (%s, %d tokens):\n  %s", first.name, len(first.ids), run.phases.tokenizer.decode(first.ids))
        if step >= run.total_steps:
            log.info("step %d of %d is already done; nothing to train", step, run.total_steps)


class GRPOTrainer(RLTrainer):
    """GRPO and related methods that compare the answers to a prompt; see `rl.algorithm`."""

    config_class: ClassVar[type[RLConfig]] = GRPOConfig


class PPOTrainer(RLTrainer):
    """PPO with a critic."""

    config_class: ClassVar[type[RLConfig]] = PPOConfig


class OnlineDPOTrainer(RLTrainer):
    """DPO on pairs of answers of the policy itself."""

    config_class: ClassVar[type[RLConfig]] = OnlineDPOConfig
