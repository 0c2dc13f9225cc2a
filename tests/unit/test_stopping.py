"""Training that ends where a goal is reached, and the demonstrations, which give up at a bound."""

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from drivetrain.engine.errors import ConfigError
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.runs import SFTConfig
from drivetrain.trainers.config.trainer import TrainerConfig
from drivetrain.trainers.demo import preferences, reinforcement, single_run
from drivetrain.trainers.loop import ranks, signals
from drivetrain.trainers.loop.callbacks import Callback
from drivetrain.trainers.loop.early_stopping import EarlyStopping
from drivetrain.trainers.loop.loop import StopReason, train
from drivetrain.trainers.loop.ranks import TrainerRanks
from drivetrain.trainers.loop.training_run import EvaluationResult, TrainingRun


class StandInRun(TrainingRun):
    """A run that learns nothing and whose n-th evaluation measures the n-th accuracy."""

    has_evaluation, has_adapters, checkpoint_root = True, False, ""  # type: ignore[assignment]

    def __init__(self, accuracies: list[float], **settings: Any) -> None:
        config = TrainerConfig(**{"best_metric": "accuracy", "eval_every": 2, **settings})
        assert config.max_steps is not None
        super().__init__(
            settings=SFTConfig(trainer=config),
            ranks=TrainerRanks(alone=True),
            early_stopping=EarlyStopping.of(config, {"accuracy": False}),
            display=cast(Any, None),
            total_steps=config.max_steps,
        )
        self.accuracies, self.saved = iter(accuracies), [0]

    def make_step(self) -> dict[str, Any]:
        self.step += 1
        return {"step": self.step}

    def evaluate(self, stop: Any) -> EvaluationResult:
        return EvaluationResult(metrics={"accuracy": next(self.accuracies)}, tokens=0)

    def write_checkpoint(self, *, evaluation_due: bool, last: bool) -> None:
        self.saved.append(self.step)

    def restore_step(self, step: int) -> None:
        raise AssertionError

    def export_model(self, folder: Path, *, adapters_only: bool) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("settings", "steps", "reason"),
    [
        ({"stopping_threshold": 0.6}, 6, StopReason.THRESHOLD),
        ({"stopping_threshold": 0.9}, 12, StopReason.DONE),
        ({"stopping_threshold": 0.9, "patience": 2}, 10, StopReason.PATIENCE),
        ({"stopping_threshold": 0.9, "max_minutes": 0.06}, 3, StopReason.TIME),
        ({"stopping_threshold": 0.2, "max_minutes": 0.06}, 2, StopReason.THRESHOLD),
    ],
)
def test_training_ends_at_its_goal_or_at_a_bound(
    settings: dict[str, Any], steps: int, reason: StopReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StandInRun([0.2, 0.3, 0.7, 0.5, 0.6, 0.8], max_steps=12, **settings)
    # A second passes between two looks at the clock, of which two are before the first step.
    seconds = iter(range(1000))
    monkeypatch.setattr(signals.time, "monotonic", lambda: float(next(seconds)))
    result = train(run)
    assert (result.step, result.reason) == (steps, reason)
    assert run.saved[-1] == steps


class Stopping(StandInRun):
    """A run that starts with an evaluation, in which something happens."""

    def __init__(self, happens: str = "", *, callbacks: Sequence[Callback] = (), **settings: Any) -> None:
        super().__init__([0.1] * 9, max_steps=3, **settings)
        self.happens, self.evaluates_first, self.callbacks = happens, True, callbacks

    def evaluate(self, stop: Any) -> EvaluationResult:
        if self.happens == "signal in the first evaluation" and not self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluate(stop)

    def write_checkpoint(self, *, evaluation_due: bool, last: bool) -> None:
        super().write_checkpoint(evaluation_due=evaluation_due, last=last)
        if self.happens == "signal in the last save" and self.step == self.total_steps:
            os.kill(os.getpid(), signal.SIGTERM)


class Willing(Callback):
    """A callback that says True where it does not count."""

    def on_train_begin(self, run: Any, step: int) -> bool:  # type: ignore[override]
        return True

    def on_save(self, run: Any, step: int) -> bool:  # type: ignore[override]
        return True


def test_a_signal_before_the_first_step_ends_a_run_that_was_saved() -> None:
    run = Stopping("signal in the first evaluation", best_metric=None)
    result = train(run)
    assert (result.step, result.reason, result.signal) == (0, StopReason.SIGNAL, signal.SIGTERM)
    assert run.saved[1:] == [0]


def test_a_process_whose_time_is_always_up_makes_a_step() -> None:
    run = Stopping(max_minutes=1e-9)
    assert (train(run).reason, run.step, run.saved[-1]) == (StopReason.TIME, 1, 1)


def test_a_signal_in_the_last_save_leaves_out_what_follows() -> None:
    result = train(Stopping("signal in the last save"))
    assert (result.step, result.reason, result.signal) == (3, StopReason.SIGNAL, signal.SIGTERM)


def test_a_signal_before_training_begins_makes_no_step() -> None:
    class Impatient(Callback):
        def on_train_begin(self, run: Any, step: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    run = Stopping(callbacks=[Impatient()])
    run.evaluates_first = False
    assert (train(run).reason, run.step, run.saved) == (StopReason.SIGNAL, 0, [0])


def test_callbacks_end_training_after_steps_and_evaluations_alone() -> None:
    run = Stopping(callbacks=[Willing()], save_every=1)
    assert (train(run).reason, run.step) == (StopReason.DONE, 3)


def test_a_due_evaluation_without_data_is_not_saved_as_done() -> None:
    run = Stopping()
    run.has_evaluation = False  # type: ignore[misc, method-assign]
    assert (train(run).step, run.saved[1:]) == (3, [3])


@pytest.mark.parametrize("save_every", [None, 2])
def test_a_step_is_completely_saved_before_an_error_of_the_next_ones_input_is_raised(save_every: int | None) -> None:
    class Failing(Stopping):
        waits = 0

        def make_step(self) -> dict[str, Any]:
            with self.saved_on(ValueError, f"the data of step {self.step + 1}"):
                if self.step == 2:
                    raise ValueError("planted")
            return super().make_step()

        def wait(self) -> None:
            self.waits += 1

    run = Failing(save_every=save_every)
    with pytest.raises(ValueError, match="planted"):
        train(run)
    # A save in the background is waited for, and nothing is saved twice.
    assert (run.saved.count(2), run.waits) == (1, int(save_every is not None))


def test_an_error_of_a_logger_is_raised_by_the_exchange() -> None:
    class Broken:
        def log(self, record: Any) -> None:
            raise ValueError("the logger is broken")

    run = Stopping()
    run.loggers = [cast(Any, Broken())]
    assert str(run.log({"step": 0})) == "the logger is broken"
    with pytest.raises(ValueError, match="the logger is broken"):
        train(run)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stopping_threshold": 0.5}, "the only evaluation is at the end; set trainer.eval_every"),
        ({"stopping_threshold": float("nan")}, "trainer.stopping_threshold=nan; it must be a finite number"),
        ({"max_minutes": 0.0}, "trainer.max_minutes=0.0; it must be more than 0"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainerConfig(**settings).check()


def test_threshold_follows_the_direction_of_its_metric() -> None:
    def reached(metric: str, threshold: float, *values: float) -> bool:
        stopping = EarlyStopping(metric, None, "", {"loss": True, "accuracy": False}, threshold)
        for step, value in enumerate(values):
            stopping.update(step, {metric: value})
        return stopping.reached and stopping.stop

    assert reached("accuracy", 0.9, 0.5, 0.9)
    assert not reached("accuracy", 0.9, 0.5, 0.89, float("nan"))
    assert reached("loss", 0.1, 0.2, 0.1)
    assert not reached("loss", 0.1, 0.2, 0.11)
    assert not reached("loss", 0.1)
    with pytest.raises(ConfigError, match=r"trainer.stopping_threshold=0.5 needs trainer.best_metric"):
        EarlyStopping(None, None, "", {"loss": True}, 0.5)


@pytest.mark.parametrize(("after", "shuffled", "code"), [(0.7, False, 0), (0.64, False, 1), (0.95, True, 1), (0.31, True, 0)])
def test_demo_of_rewards_trains_towards_goals_within_bounds(
    after: float, shuffled: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in trainer, which learns as much as the case says."""
    commands: list[tuple[str, ...]] = []
    accuracies = iter((0.3, after))

    def stand_in(*words: str) -> None:
        commands.append(words)
        if "drivetrain.trainers.grpo" in words:
            (tmp_path / "run").mkdir()
            lines = [json.dumps({"step": step, "reward": 0.1 * step}) for step in range(1, 8)]
            (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def measured(*words: str) -> float:
        commands.append(words)
        return 2.0 if "processes" in words else next(accuracies)

    monkeypatch.setattr(reinforcement, "python", stand_in)
    monkeypatch.setattr(reinforcement, "measured", measured)
    options: dict[str, Any] = {"nproc": None, "steps": None, "shuffled": shuffled, "tools": False, "seed": 3}
    assert reinforcement.run_rl_demo(tmp_path, "grpo", "fsdp", **options) == code
    said = capfd.readouterr()
    assert ("was expected" in said.err) == bool(code)
    assert f"{after:.3f} after 7 steps" in said.out
    start = next(words for words in commands if "drivetrain.trainers.sft" in words)
    config = parse(SFTConfig, list(start[start.index("recipe=sft_demo") :]), "").trainer
    assert (config.best_metric, config.stopping_threshold) == ("exact_match", 0.35)
    assert (config.max_steps, config.max_minutes) == (reinforcement.START_STEPS, reinforcement.START_MINUTES)
    # What decides when to stop is not what is reported.
    asked = [words[words.index("answer") + 2] for words in commands if "answer" in words]
    assert asked == [str(tmp_path / "data" / "test.jsonl")] * 2
    assert not any("test.jsonl" in word for words in commands if "answer" not in words for word in words)
    rewarded = next(words for words in commands if "drivetrain.trainers.grpo" in words)
    assert ("trainer.stopping_threshold=null" in rewarded) == shuffled


@pytest.mark.parametrize(("after", "code"), [(0.95, 0), (0.85, 1)])
@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_demo_of_preferences_reports_rows_that_did_not_decide(
    task: str, after: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    judged: list[str] = []
    accuracies = iter((0.5, after))

    def stand_in(*words: str) -> None:
        if f"drivetrain.trainers.{task}" in words:
            assert not any("test.jsonl" in word for word in words)
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 20, "loss": 0.1}\n')

    def measured(*words: str) -> float:
        if "processes" in words:
            return 2.0
        judged.append(words[-2])
        return next(accuracies)

    for module in (preferences, single_run):
        monkeypatch.setattr(module, "python", stand_in)
    monkeypatch.setattr(preferences, "measured", measured)
    assert preferences.run_preference_demo(task, tmp_path, None, None, 0) == code
    assert judged == [str(tmp_path / "data" / "test.jsonl")] * 2
    assert ("after training; at least 0.9 was expected" in capfd.readouterr().err) == bool(code)


@pytest.mark.parametrize("recipe", ["sft_demo", "dpo_demo", "rm_demo", "grpo_demo", "ppo_demo"])
def test_recipes_of_demos_have_a_goal_and_bounds(recipe: str) -> None:
    import yaml

    from drivetrain.trainers import recipes

    folder = Path(recipes.__file__).parent
    fields = yaml.safe_load((folder / f"{recipe}.yaml").read_text())
    settings = {
        **yaml.safe_load((folder / f"{fields.get('recipe', recipe)}.yaml").read_text())["trainer"],
        **fields["trainer"],
    }
    assert {"best_metric", "stopping_threshold", "max_steps", "max_minutes", "eval_every"} <= settings.keys()


def test_a_process_group_that_a_program_has_set_up_is_left_to_it(process_group: None) -> None:
    with ranks.process_group(minutes=1):
        assert TrainerRanks().is_first
    assert dist.is_initialized()
    with pytest.raises(ValueError, match="planted"), ranks.process_group(minutes=1):
        raise ValueError("planted")
    assert dist.is_initialized()


def test_a_process_group_of_a_run_ends_with_it() -> None:
    with ranks.process_group(minutes=1):
        assert TrainerRanks().all_gather_object(3) == [3]
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="planted"), ranks.process_group(minutes=1):
        raise ValueError("planted")
    assert not dist.is_initialized()
