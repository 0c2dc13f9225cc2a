"""The runs of reinforcement learning, as the training loop drives them."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...engine.errors import CheckpointError, RewardError, WorkerLostError
from ...rewards.pool import RewardTarget, title_of
from ..config.rl import RLConfig
from ..loop.callbacks import Callback
from ..loop.early_stopping import EarlyStopping
from ..loop.loggers import CHAT, Display
from ..loop.run_folder import announce_settings, locked_folders
from ..loop.signals import StopSignal
from ..loop.training_run import EvaluationResult, TrainingRun
from .algorithms import Algorithm
from .bundle import StepBundles
from .checkpoints import RunCheckpoints
from .collect import Collector
from .completions import Completion
from .environments import described
from .episode_rollouts import EpisodeRollouts
from .evaluation import evaluate
from .kept_completions import from_bytes, to_bytes
from .metrics import PANELS, RLLines, RLSummary, held_out_completions
from .phases import Phases
from .prompts import Prompts
from .roles import Roles
from .rollouts import Rollouts
from .session import controller_ranks, open_phases
from .step import make_step
from .ticket_log import TicketLog
from .tickets import Tickets

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class RLRun(TrainingRun):
    """A run of reinforcement learning. The version of the weights is the number of steps that they have been trained for.

    Args:
        phases: The phases.
        prompts: The prompts.
        checkpoints: The checkpoints.
    """

    settings: RLConfig
    phases: Phases
    prompts: Prompts
    checkpoints: RunCheckpoints
    rollouts: Rollouts = field(init=False)
    """The completions of the run's tickets."""

    def __post_init__(self) -> None:
        config = self.phases.config
        self.evaluates_first = config.rl.eval_before_train
        self._log = TicketLog(Path(config.trainer.output_dir) if self.ranks.is_first else None)
        # Before tickets are made, which report their first events immediately.
        self._log.begin(config.data.batch_size, config.rl.staleness, self.total_steps)
        self.rollouts = self._resume() or self._rollouts(
            Tickets(config.data.batch_size, config.rl.staleness, steps=self.total_steps, observe=self._log.note)
        )
        super().__post_init__()
        self._collector = Collector(config, self.phases, self.rollouts)
        self._bundles = StepBundles(self.phases)

    def _rollouts(self, tickets: Tickets) -> Rollouts:
        rollouts_class = Rollouts if self.phases.config.rollout.environment is None else EpisodeRollouts
        return rollouts_class(self.phases.config, self.phases, self.prompts, tickets)

    @property
    def checkpoint_root(self) -> str:
        """The folder or URL of the run's checkpoints."""
        return self.checkpoints.root

    @property
    def has_evaluation(self) -> bool:
        """Whether there are held-out prompts."""
        return self.prompts.held_out is not None

    @property
    def has_adapters(self) -> bool:
        """Whether the policy is trained through adapters."""
        return self.phases.has_adapters

    def make_step(self) -> dict[str, Any]:
        """Make a step, from prompts to new weights; see the base class."""
        start, phases = time.perf_counter(), self.phases
        # A reward may fail, for example because its judge cannot be reached.
        with self.saved_on(RewardError, f"the rewards of step {self.step + 1}"):
            completed = make_step(phases, self._collector, self.rollouts, bundles=self._bundles)
        self.step += 1
        self._log.write()
        self._collector.warn(completed.metrics)
        seconds = time.perf_counter() - start
        return {
            "step": self.step,
            **completed.metrics,
            **phases.timing(),
            **phases.adaptive.metrics(),
            **phases.memory_manager.metrics(),
            "epoch": self.rollouts.tickets.first / len(self.prompts.order),
            "sync_bytes": float(phases.memory_manager.sent_bytes),
            "generating_s": self.rollouts.generating_s(),
            "seconds": seconds,
            # Time outside of all phases, and the wait for rewards, in which no model works.
            "seconds/idle": seconds - sum(phases.seconds.values()) + phases.seconds.get("reward_wait", 0.0),
        }

    def evaluate(self, stop: StopSignal) -> EvaluationResult:
        """Evaluate on the held-out prompts; see the base class. It is not interrupted."""
        assert self.prompts.held_out is not None
        scored: list[Completion] | None = None
        while scored is None:
            self.rollouts.use_newest()
            # A generator that died is replaced, and the whole evaluation repeated.
            with self.saved_on(RewardError, f"the rewards of the evaluation after step {self.step}", evaluation_due=True):
                try:
                    metrics, scored = evaluate(self.phases, self.prompts.held_out, version=self.step)
                except WorkerLostError as e:
                    self.rollouts.replace_generator(e)
        count = min(self.config.eval_completions, len(scored))
        # Spread over all prompts, since neighbors may be samples of one prompt.
        completions = held_out_completions([scored[i * len(scored) // count] for i in range(count)])
        return EvaluationResult(
            metrics=metrics, tokens=sum(len(completion.tokens) for completion in scored), completions=completions
        )

    def write_checkpoint(self, *, evaluation_due: bool, last: bool) -> None:
        """Write the checkpoints of the actor and the critic, and the completions that are pending for training."""
        # First let the generator finish the tickets that a checkpoint cannot restart: those
        # of older weights, which it does not store.
        kept = self.rollouts.kept()
        tickets = self.rollouts.tickets.state(kept)
        stored = {number: kept[number] for number, _, is_stored in tickets["out"] if is_stored}
        self._log.write()
        # Writing a checkpoint temporarily loads all of a role's state to the device.
        self.phases.memory_manager.enter("score")
        extra = {
            # The position of the oldest outstanding ticket.
            "data": self.prompts.order.state(self.prompts.order.cursor(tickets["next"] - len(tickets["out"]))),
            "tickets": tickets,
            "adaptive": self.phases.adaptive.state(),
            "watch": self.early_stopping.state(),
            "evaluate": evaluation_due,
            "eval_digests": self._eval_digests,
        }
        completions = to_bytes(stored) if stored else None
        self.checkpoints.save(self.step, extra, best=self.early_stopping.best_step, completions=completions)

    @property
    def _eval_digests(self) -> dict[str, str]:
        return {} if self.prompts.held_out is None else self.prompts.held_out.source_digests

    def restore_step(self, step: int) -> None:
        """Load the actor's checkpoint of a step."""
        self.phases.memory_manager.enter("score")
        self.checkpoints.load_step(step)

    def export_model(self, folder: Path, *, adapters_only: bool) -> str:
        """Export the policy or its adapters."""
        self.phases.memory_manager.enter("score")
        # Workers of a cluster may have another working directory.
        adapters = "only" if adapters_only else "merged"
        where: str = self.phases.group["actor"].export(str(folder.absolute()), adapters=adapters)
        return where

    def _resume(self) -> Rollouts | None:
        """Load the checkpoint to start from, if there is one; return the completions of its outstanding tickets."""
        restored = self.checkpoints.resume()
        if restored is None:
            return None
        config, order = self.phases.config, self.prompts.order
        size: dict[str, Any] = {"batch": config.data.batch_size, "staleness": config.rl.staleness}
        try:
            first = order.number(order.restore(restored.extra["data"], epochs=self.config.max_steps is None))
            # Checkpoints from before tickets were introduced have none: the completions of their next prompts do not exist yet.
            state = restored.extra.get("tickets", {**size, "version": restored.step, "next": first, "out": []})
            tickets = Tickets.restore(state, **size, steps=self.total_steps, observe=self._log.note)
            tokenizer = self.phases.tokenizer
            kept = {} if restored.completions is None else from_bytes(restored.completions, self.prompts, tokenizer)
        except CheckpointError as e:
            raise CheckpointError(f"{restored.folder}: {e}") from e
        rollouts = self._rollouts(tickets)
        rollouts.restore({number: kept[number] for number in sorted(tickets.answered)})
        self.step, self.evaluates_first = restored.step, bool(restored.extra.get("evaluate"))
        changed = order.changed_sources(restored.extra["data"])
        self.compare_data(changed, restored.extra.get("eval_digests", {}), self._eval_digests)
        self.phases.adaptive.restore(restored.extra.get("adaptive", {}))
        self.early_stopping.restore(restored.extra.get("watch", {}), self.checkpoints.steps(), self.checkpoint_root)
        return rollouts


@contextmanager
def open_run(
    config: RLConfig,
    algorithm: Algorithm,
    roles: Roles,
    prompts: Prompts,
    *,
    functions: Sequence[RewardTarget],
    callbacks: Sequence[Callback],
    total_steps: int,
) -> Iterator[RLRun]:
    """Start the processes of a run, build its roles in them, and resume; stop the processes after the block.

    Args:
        config: The settings.
        algorithm: The algorithm.
        roles: The roles.
        prompts: The prompts.
        functions: Reward functions in addition to those that the settings name.
        callbacks: Code that the training loop calls.
        total_steps: The number of the last step.

    Raises:
        DrivetrainError: Something cannot be opened; the message says what to do.
    """
    with ExitStack() as opened:
        ranks = opened.enter_context(controller_ranks(config))
        # Lock the folders before models are loaded.
        opened.enter_context(locked_folders(config.trainer, ranks))
        phases = opened.enter_context(open_phases(config, algorithm, roles, ranks, functions=functions, prompts=prompts.sets))
        digest = "" if prompts.held_out is None else prompts.held_out.digest
        run = RLRun(
            settings=_with_functions(config, functions),
            ranks=ranks,
            early_stopping=EarlyStopping.of(config.trainer, evaluation_metrics(config), digest),
            display=Display(
                lines=RLLines(),
                summary=RLSummary(total_steps),
                plot_name="reward plot",
                plot_file="rewards.png",
                panels=PANELS,
                next_command=CHAT,
            ),
            total_steps=total_steps,
            callbacks=callbacks,
            phases=phases,
            prompts=prompts,
            checkpoints=RunCheckpoints(config, phases.group, ranks),
        )
        _announce(run)
        phases.memory_manager.sync(run.step)
        yield run


def evaluation_metrics(config: RLConfig) -> dict[str, bool]:
    """Return the evaluation metrics that can select the best checkpoint, and for each whether lower is better."""
    samples = config.rl.eval_samples
    names = ["reward", "accuracy", *([f"avg@{samples}", f"pass@{samples}"] if samples > 1 else [])]
    return dict.fromkeys(names, False)


def _with_functions(config: RLConfig, functions: Sequence[RewardTarget]) -> RLConfig:
    """Return the settings with the names of a program's functions, so that `config.yaml` records them."""
    names = tuple(f if isinstance(f, str) else f"{f.__module__}:{title_of(f)}" for f in functions)
    return replace(config, rewards=replace(config.rewards, use=(*config.rewards.use, *names)))


def _announce(run: RLRun) -> None:
    prompts, algorithm = run.prompts, run.phases.algorithm
    announce_settings(run.settings)
    log.info(
        "%d prompts, %d steps, %d completions per step",
        len(prompts.order),
        run.total_steps,
        prompts.order.batch_size * run.settings.rl.group_size,
    )
    if (staleness := run.settings.rl.staleness) > 0:
        judges = "rewards depend" if run.settings.rollout.environment is None else "environments and rewards depend"
        exact = run.settings.rollout.invariant or run.settings.rollout.generator == "exact"
        log.info(
            "completions are generated while the policy trains, by weights at most %d step%s old (rl.staleness); %s",
            staleness,
            "s" if staleness > 1 else "",
            "the generator switches to new weights within a completion (rl.inflight_weight_updates=true), so runs are not reproducible"
            if run.settings.rl.inflight_weight_updates
            else f"runs are reproducible bit by bit if their {judges} only on the completion, and reach no time limit"
            if exact
            else "runs are reproducible up to rounding, since rollout.invariant=false",
        )
    if (environment := run.settings.rollout.environment) is not None:
        log.info(
            "environment: %s, at most %d turns and %d tokens after a prompt; a call that takes more than %g s counts as failed%s",
            environment,
            run.settings.environment.max_turns,
            run.settings.max_answer_tokens,
            run.settings.environment.timeout_s,
            "" if described(run.settings).independent else "; agents run elsewhere, so runs are not reproducible",
        )
    for line in run.phases.group["actor"].describe_settings():
        log.info("actor: %s", line)
    log.info("loss: %s", algorithm.loss_text)
    if algorithm.advantage is not None:
        log.info("advantages: %s", algorithm.advantage_text)
    first = prompts.train[0]
    log.info("first prompt (%s, %d tokens):\n  %s", first.name, len(first.ids), run.phases.tokenizer.decode(first.ids))
