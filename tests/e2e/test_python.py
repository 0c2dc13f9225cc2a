"""The trainers as Python classes: rows in memory, formatting, losses, metrics and callbacks of the user's own."""

import functools
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain import (
    Callback,
    ConfigError,
    DPOConfig,
    DPOTrainer,
    DrivetrainError,
    LossSums,
    PackedBatch,
    PreferenceLoss,
    RewardTrainer,
    RMConfig,
    SFTConfig,
    SFTLoss,
    SFTTrainer,
    TokenOutputs,
)
from drivetrain.trainers.data.python_data import PythonData
from drivetrain.trainers.loop.completion_metrics import CompletionMetrics, exact_match
from drivetrain.trainers.loop.early_stopping import EarlyStopping
from drivetrain.trainers.loop.loop import StopReason
from drivetrain.trainers.loop.samples import HeldOutCompletion
from drivetrain.trainers.offline.run import evaluation_metrics
from drivetrain.trainers.sft import main
from drivetrain.trainers.tasks.addition import write_model
from drivetrain.trainers.tasks.rising_digits import write_pairs
from helpers.runs import losses, records, words


def rows_of(task: Path, name: str = "train") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / "data" / f"{name}.jsonl").read_text().splitlines()]


def config_of(task: Path, run: str, *more: str, files: bool = False) -> SFTConfig:
    given = [word for word in words(task) if files or not word.startswith("data.train")]
    return SFTConfig.parse(
        *given, "trainer.max_steps=3", *more, f"trainer.output_dir={task / run}", f"data.cache_dir={task / 'cache'}"
    )


class Watch(Callback):
    def __init__(self, stop_at: int | None = None, fail_at: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.stop_at, self.fail_at = stop_at, fail_at

    def on_train_begin(self, run: Any, step: int) -> None:
        self.calls.append(("begin", step))

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, Any]) -> bool:
        assert metrics["step"] == step
        assert run.engine.step == step
        self.calls.append(("step", step))
        if step == self.fail_at:
            raise RuntimeError("the disk of my dashboard is full")
        return step == self.stop_at

    def on_evaluate(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["loss"] > 0
        self.calls.append(("evaluate", step))

    def on_save(self, run: Any, step: int) -> None:
        self.calls.append(("save", step))

    def on_train_end(self, run: Any, step: int) -> None:
        self.calls.append(("end", step))


def test_public_names_are_listed_and_importing_them_waits_for_no_torch() -> None:
    names = dir(drivetrain)
    assert {"SFTTrainer", "DPOTrainer", "RewardTrainer", "SFTConfig", "Callback", "GRPOTrainer"} <= set(names)
    for name in names:
        assert getattr(drivetrain, name).__name__ == name
    with pytest.raises(AttributeError, match=r"no attribute 'KTOTrainer'"):
        _ = drivetrain.KTOTrainer  # type: ignore[attr-defined]
    code = "import sys, drivetrain; drivetrain.SFTConfig; dir(drivetrain); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_rows_in_memory_train_as_rows_of_a_file_do_and_as_the_command_does(task: Path) -> None:
    import datasets

    assert main([*words(task, "trainer.max_steps=3"), f"trainer.output_dir={task / 'command'}"]) == 0
    outcome = SFTTrainer(config_of(task, "rows"), train_data=rows_of(task)).train()
    assert (outcome.step, outcome.reason) == (3, StopReason.DONE)
    assert Path(outcome.outputs["model"]).is_dir()
    SFTTrainer(config_of(task, "table"), train_data=datasets.Dataset.from_list(rows_of(task))).train()
    assert losses(task / "rows") == losses(task / "table") == losses(task / "command")
    assert "train_data" in (task / "rows" / "config.yaml").read_text()
    # Other rows are other data, though they have the same name; what was saved with them cannot be resumed.
    with pytest.raises(DrivetrainError, match=r"saved with the number of samples = 40, now it is 39"):
        SFTTrainer(config_of(task, "rows"), train_data=rows_of(task)[:39]).train()


@pytest.mark.slow
def test_formatting_is_applied_to_every_row_and_cached_by_what_it_does(task: Path) -> None:
    plain = rows_of(task)
    renamed = [{"question": row["messages"][:1], "solution": row["messages"][1:]} for row in plain]
    SFTTrainer(config_of(task, "plain"), train_data=plain).train()
    SFTTrainer(
        config_of(task, "renamed"),
        train_data=renamed,
        formatting=lambda row: {"prompt": row["question"], "completion": row["solution"]},
    ).train()
    assert losses(task / "plain") == losses(task / "renamed")
    # Another function with the same rows must not find the samples of the first one.
    SFTTrainer(
        config_of(task, "text"),
        train_data=renamed,
        formatting=lambda row: f"{row['question'][0]['content']}{row['solution'][0]['content']}",
    ).train()
    assert losses(task / "text")[0] != losses(task / "plain")[0]
    # Rows of files too, of whose columns the trainer knows none.
    file = task / "data" / "renamed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    config = config_of(task, "file", f"data.train=[{file}]", "data.workers=2")
    SFTTrainer(config, formatting=lambda row: {"prompt": row["question"], "completion": row["solution"]}).train()
    assert losses(task / "file") == losses(task / "plain")


def test_a_formatting_function_that_fails_names_the_row(task: Path) -> None:
    failing: list[tuple[Any, str]] = [
        (lambda row: row["question"], r"train_data:1: formatting failed with KeyError: 'question'"),
        (lambda row: None, r"train_data:1: formatting returned a NoneType; it must return a row \(dict\) or a text"),
        (lambda row: {"a": 1}, r"train_data:1 has the columns a; it needs"),
    ]
    for formatting, told in failing:
        with pytest.raises(DrivetrainError, match=told):
            SFTTrainer(config_of(task, "run"), train_data=rows_of(task), formatting=formatting).train()


class Misnamed(Callback):
    """One of whose methods is none of a callback."""

    def on_step(self, run: Any, step: int) -> None: ...


def test_arguments_of_other_types_are_refused_at_once(task: Path) -> None:
    config, rows = config_of(task, "run"), rows_of(task)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"train_data": "train.jsonl"}, r"train_data is a str; give a list of rows"),
        ({"train_data": iter(rows)}, r"train_data is a list_iterator"),
        ({"train_data": {"prompt": ["a"]}}, r"train_data is a dict"),
        ({"train_data": []}, r"train_data has no rows"),
        ({"train_data": rows, "formatting": "text"}, r"formatting is a str; give a function of a row"),
        ({"train_data": rows, "callbacks": [print]}, r"which is not a Callback; derive its class from drivetrain.Callback"),
        (
            {"train_data": rows, "callbacks": [Misnamed()]},
            r"Misnamed has the method on_step, .*; a Callback has on_evaluate, on_save, on_s",
        ),
        (
            {"train_data": rows, "loss": "focal"},
            r"loss is 'focal', without request, linear, tokens, weights, __call__; see docs/python.md",
        ),
        ({"train_data": rows, "loss": SFTLoss}, r"loss is <class '.*SFTLoss'>, a class; give an object of it"),
        ({"eval_data": rows}, r"eval_data is given, but neither train_data nor data.train"),
    ]
    for arguments, told in refused:
        with pytest.raises(ConfigError, match=told):
            SFTTrainer(config, **arguments)
    with pytest.raises(ConfigError, match=r"train_data is given, and data.train=\['a.jsonl'\] too; give one of them"):
        SFTTrainer(replace(config, data=replace(config.data, train=("a.jsonl",))), train_data=rows)
    with pytest.raises(ConfigError, match=r"config is a SFTConfig; DPOTrainer needs a DPOConfig"):
        DPOTrainer(config, train_data=rows)  # type: ignore[arg-type]
    with pytest.raises(DrivetrainError, match=r"train_data:2 is a int; a row is a dict of columns"):
        SFTTrainer(config, train_data=[rows[0], 5]).train()  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"data.train is not set"):
        SFTTrainer(config).train()


@pytest.mark.slow
def test_callbacks_see_the_run_and_stop_it_and_a_later_run_goes_on(task: Path) -> None:
    more = ("trainer.save_every=2", "trainer.eval_every=2", "trainer.max_steps=4", "trainer.export_hf=false")
    whole = Watch()
    SFTTrainer(
        config_of(task, "whole", *more), train_data=rows_of(task), eval_data=rows_of(task, "eval"), callbacks=[whole]
    ).train()
    assert whole.calls == [
        ("begin", 0), ("step", 1), ("step", 2), ("evaluate", 2), ("save", 2),
        ("step", 3), ("step", 4), ("evaluate", 4), ("save", 4), ("end", 4),
    ]  # fmt: skip
    stopping = Watch(stop_at=1)
    arguments: dict[str, Any] = {"train_data": rows_of(task), "eval_data": rows_of(task, "eval")}
    outcome = SFTTrainer(config_of(task, "parts", *more), callbacks=[stopping], **arguments).train()
    assert (outcome.step, outcome.reason) == (1, StopReason.CALLBACK)
    assert stopping.calls == [("begin", 0), ("step", 1), ("save", 1), ("end", 1)]
    rest = Watch()
    SFTTrainer(config_of(task, "parts", *more), callbacks=[rest], **arguments).train()
    assert rest.calls[0] == ("begin", 1)
    assert losses(task / "parts") == losses(task / "whole")
    failing = Watch(fail_at=2)
    with pytest.raises(RuntimeError, match=r"the disk of my dashboard is full"):
        SFTTrainer(config_of(task, "failed", *more), callbacks=[failing], **arguments).train()
    # The process can train again.
    SFTTrainer(config_of(task, "again", *more), **arguments).train()
    assert losses(task / "again") == losses(task / "whole")


@dataclass(frozen=True)
class Doubled(SFTLoss):
    """The negative log-likelihood twice."""

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        sums = super().__call__(outputs, batch)
        return LossSums(terms={name: 2 * value for name, value in sums.terms.items()}, metrics=sums.metrics)


class Shortest(PreferenceLoss):
    """Prefers the chosen side by its log-probability alone."""

    needs_reference = False  # type: ignore[assignment]

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        assert outputs.log_probs is not None
        chosen = batch.sequence_fields["chosen"].repeat_interleave(torch.tensor(batch.lengths))
        signs = torch.where(chosen > 0, -1.0, 1.0)
        return LossSums(terms={"preference": (outputs.log_probs * signs).sum()})


def test_a_loss_of_the_users_own_is_minimized(task: Path) -> None:
    SFTTrainer(config_of(task, "plain"), train_data=rows_of(task)).train()
    SFTTrainer(config_of(task, "doubled"), train_data=rows_of(task), loss=Doubled()).train()
    plain, doubled = (records(task / run)[0] for run in ("plain", "doubled"))
    assert doubled["loss"] == pytest.approx(2 * plain["loss"], rel=1e-6)
    assert doubled["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-5)
    assert doubled["nll"] == pytest.approx(plain["loss"], rel=1e-6)
    # What the loss does not report cannot select a checkpoint.
    config = config_of(
        task, "best", "trainer.best_metric=accuracy", "trainer.eval_every=1", f"data.eval=[{task / 'data' / 'eval.jsonl'}]"
    )
    with pytest.raises(
        ConfigError, match=r"trainer.best_metric=accuracy, which this loss does not report; it reports loss, nll"
    ):
        SFTTrainer(config, train_data=rows_of(task), loss=Doubled()).train()


@pytest.mark.slow
def test_pairs_in_memory_train_a_policy_and_a_reward_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 0)
    write_pairs(tmp_path / "data", 0)
    rows = rows_of(tmp_path)[:40]
    common = (
        "data.batch_size=8",
        "engine.micro_batch.max_tokens=128",
        f"model.path={tmp_path / 'model'}",
        "trainer.max_steps=2",
    )
    config = DPOConfig.parse(*common, f"trainer.output_dir={tmp_path / 'dpo'}", f"data.cache_dir={tmp_path / 'cache'}")
    assert DPOTrainer(config, train_data=rows).train().step == 2
    assert losses(tmp_path / "dpo")[0] == pytest.approx(0.6931472, rel=1e-6)
    own = replace(config, trainer=replace(config.trainer, output_dir=str(tmp_path / "own")))
    assert DPOTrainer(own, train_data=rows, loss=Shortest()).train().step == 2
    rewards = RMConfig.parse(*common, f"trainer.output_dir={tmp_path / 'rm'}", f"data.cache_dir={tmp_path / 'cache'}")
    assert RewardTrainer(rewards, train_data=rows).train().step == 2


# ---- metrics of answers ----------------------------------------------------------------------------------------------


def length(completion: str) -> int:
    return len(completion)


def without_marks(text: str) -> str:
    return re.sub(r"<\w+>", "", text)


def test_answers_are_measured_and_select_the_best_checkpoint(task: Path) -> None:
    config = config_of(
        task, "run", "trainer.eval_completions=12", "trainer.eval_max_tokens=6", "trainer.eval_every=1",
        "trainer.metrics=[exact_match]", "trainer.best_metric=length",
    )  # fmt: skip
    SFTTrainer(config, train_data=rows_of(task), eval_data=rows_of(task, "eval"), metrics=[length]).train()
    evaluations = [record for record in records(task / "run") if record.get("split") == "eval"]
    answers = [json.loads(line) for line in (task / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(answers) == 12 * 3
    for evaluation in evaluations:
        of_step = [answer for answer in answers if answer["step"] == evaluation["step"]]
        plain = [without_marks(answer["completion"]) for answer in of_step]
        assert evaluation["length"] == pytest.approx(sum(map(len, plain)) / 12)
        right = [a == without_marks(b["expected"]) for a, b in zip(plain, of_step, strict=True)]
        assert evaluation["exact_match"] == pytest.approx(sum(right) / 12)


def test_metrics_are_checked_before_the_run_and_on_every_answer() -> None:
    answer = HeldOutCompletion(
        name="a.jsonl:1", prompt="", completion="", plain_prompt="2+2=", plain_completion=" 4\n", plain_expected="4"
    )
    assert CompletionMetrics.of(["exact_match", "contains"]).measure([answer]) == {"exact_match": 1.0, "contains": 1.0}
    assert CompletionMetrics.of([], [lambda **given: len(given)]).measure([answer]) == {"<lambda>": 3.0}
    for names, functions, told in (
        (["f1"], [], r"trainer.metrics has 'f1'; give module:function, or one of exact_match, contains"),
        (["nowhere:f1"], [], r"cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (["json:f1"], [], r"cannot be imported: AttributeError: module 'json' has no attribute 'f1'"),
        (["json:__name__"], [], r"is a str and cannot be called"),
        (["metrics.py:f1"], [], r"give module:function"),
        (["exact_match"], [exact_match], r"two metrics of an evaluation are called exact_match"),
        (
            [],
            [lambda text: 1.0],
            r"the metric <lambda> needs 'text'; a metric is a function of any of prompt, completion, expected",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            CompletionMetrics.of(names, functions)
    with pytest.raises(
        DrivetrainError, match=r"the metric <lambda> returned 'yes' for the completion for a.jsonl:1; it must be a number"
    ):
        CompletionMetrics.of([], [lambda completion: "yes"]).measure([answer])  # type: ignore[return-value, list-item]
    with pytest.raises(
        DrivetrainError, match=r"the metric <lambda> failed on the completion for a.jsonl:1 with ZeroDivisionError"
    ):
        CompletionMetrics.of([], [lambda completion: 1 / 0]).measure([answer])


# ---- dry runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_makes_a_step_on_the_longest_samples_and_writes_nothing(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(task, "run", files=True)
    plan = SFTTrainer(config).dry_run()
    assert not (task / "run").exists()
    assert (plan.first_step, plan.total_steps, plan.samples) == (1, 3, 40)
    # A token is a character, and there are three marks of the chat's turns.
    longest = sorted((sum(len(m["content"]) for m in row["messages"]) + 3 for row in rows_of(task)), reverse=True)[:8]
    assert plan.result.sequences == 8
    assert plan.result.tokens == sum(longest)
    assert 0 < plan.initial_gib <= plan.result.peak_gib < plan.device_gib
    told = capsys.readouterr().out
    assert "steps        1 to 3" in told
    assert "dry run: nothing was saved" in told
    # The command; and beside a run that has been made.
    line = words(task, "trainer.max_steps=2", "trainer.export_hf=false")
    assert main([*line, "--dry-run"]) == 0
    assert not (task / "run").exists()
    assert main(line) == 0
    before = sorted((str(path), path.stat().st_mtime_ns) for path in (task / "run").rglob("*"))
    capsys.readouterr()
    assert main([*line, "--dry-run", "trainer.max_steps=5"]) == 0
    assert "steps        3 to 5" in capsys.readouterr().out
    assert sorted((str(path), path.stat().st_mtime_ns) for path in (task / "run").rglob("*")) == before


def test_a_dry_run_finds_what_the_run_would(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(task, "data.max_length=3"), "--dry-run"]) == 1
    assert "tokens, more than data.max_length=3" in capsys.readouterr().err
    assert not (task / "run").exists()


def test_metrics_select_by_the_higher_value(task: Path) -> None:
    config = config_of(
        task, "run", "trainer.eval_completions=1", "trainer.metrics=[exact_match]", "trainer.best_metric=exact_match"
    )
    trainer = SFTTrainer(config, train_data=rows_of(task))
    watch = EarlyStopping.of(
        config.trainer, evaluation_metrics(trainer.make_method(), CompletionMetrics.of(config.trainer.metrics))
    )
    assert watch.update(1, {"exact_match": 0.25})
    assert not watch.update(2, {"exact_match": 0.125})


# ---- several processes -----------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from drivetrain import Callback, DrivetrainError, SFTConfig, SFTTrainer

task = Path(sys.argv[1])
rows = [json.loads(line) for line in (task / "data" / "train.jsonl").read_text().splitlines()]


def config(run, *more):
    return SFTConfig.parse(
        f"model.path={task / 'model'}", "data.batch_size=8", "engine.micro_batch.max_tokens=64", "trainer.max_steps=3",
        f"data.cache_dir={task / 'cache'}", f"trainer.output_dir={task / run}", "trainer.export_hf=false", *more,
    )


class Fails(Callback):
    def on_step_end(self, run, step, metrics):
        if dist.get_rank() == 1:
            raise RuntimeError("the dashboard is down")


class Gathers(Callback):
    def on_step_end(self, run, step, metrics):
        dist.barrier()


class Breaks(list):
    def __getitem__(self, index):
        if index == 300:
            raise ConnectionError("the network is down")
        return super().__getitem__(index)


told = []
SFTTrainer(config("first"), train_data=rows).dry_run()
told.append(SFTTrainer(config("first"), train_data=rows).train().step)
told.append(SFTTrainer(config("second"), train_data=rows).train().step)
try:
    SFTTrainer(config("failed"), train_data=rows, callbacks=[Fails(), Gathers()]).train()
except Exception as e:
    told.append(f"{type(e).__name__}: {e}")
streaming = ("data.streaming=true", "data.stream_rows=8", "data.shuffle=false", "trainer.max_steps=99")
try:
    SFTTrainer(config("streamed", *streaming), train_data=Breaks(10 * rows)).train()
except DrivetrainError as e:
    told.append(str(e))
(task / f"told-{dist.get_rank()}.json").write_text(json.dumps(told))
"""


@pytest.mark.slow
def test_a_program_under_torchrun_trains_again_and_ends_on_an_error_of_one_rank(task: Path) -> None:
    (task / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py", str(task)]
    done = subprocess.run(command, cwd=task, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    mine, other = (json.loads((task / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert mine[:2] == other[:2] == [3, 3]
    assert losses(task / "first") == losses(task / "second")
    assert mine[2] == "RemoteError: rank 1 failed: RuntimeError: the dashboard is down"
    assert other[2] == "RuntimeError: the dashboard is down"
    # Rows are read 256 at a time; the steps of the first are made and saved before the error is raised on both.
    assert mine[3] == "train_data cannot be read: ConnectionError: the network is down"
    assert mine[3] in other[3]
    assert [path.name for path in (task / "streamed" / "checkpoints").glob("step-*")] == ["step-00000032"]


def test_a_formatting_function_of_a_module_that_was_edited_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "my_formatting.py"
    monkeypatch.syspath_prepend(tmp_path)
    # Two texts of one second and one length would be one file to the cache of bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keys = set()
    for text in ("'a'", "'b'"):
        module.write_text(f"def helper():\n    return {text}\n\ndef formatting(row):\n    return helper()\n")
        importlib.invalidate_caches()
        sys.modules.pop("my_formatting", None)
        made = importlib.import_module("my_formatting")
        assert PythonData.of(None, None, made.formatting).runs_anywhere

        def local(row: dict[str, Any], module: Any = made) -> str:
            return str(module.helper())

        keys |= {PythonData.of(None, None, made.formatting).key(), PythonData.of(None, None, local).key()}
        keys.add(PythonData.of(None, None, functools.partial(made.formatting)).key())
    assert len(keys) == 6
    assert not PythonData.of(None, None, lambda row: row).runs_anywhere


def test_rows_of_the_program_stay_as_they_are(task: Path) -> None:
    def formatting(row: dict[str, Any]) -> dict[str, Any]:
        row["messages"][0]["content"] += "9"
        return row

    rows = rows_of(task)
    SFTTrainer(config_of(task, "run"), train_data=rows, formatting=formatting).train()
    assert rows == rows_of(task)


def test_a_frame_is_refused_with_the_way_out_and_metrics_need_answers(task: Path) -> None:
    class Frame(dict[str, Any]):
        iloc = None

    with pytest.raises(ConfigError, match=r"train_data is a Frame; give train_data=frame.to_dict\('records'\)"):
        SFTTrainer(config_of(task, "run"), train_data=Frame())  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"metrics are given, which measure generated answers, but trainer.eval_completions=0"
    ):
        SFTTrainer(config_of(task, "run"), train_data=rows_of(task), eval_data=rows_of(task), metrics=[length]).train()


def test_a_dry_run_with_a_cached_reference(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 0)
    write_pairs(tmp_path / "data", 0)
    config = DPOConfig.parse(
        f"model.path={tmp_path / 'model'}", "data.batch_size=8", "engine.micro_batch.max_tokens=256", "reference.mode=cached",
        f"trainer.output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}",
    )  # fmt: skip
    plan = DPOTrainer(config, train_data=rows_of(tmp_path)[:20]).dry_run()
    assert plan.result.loss == pytest.approx(0.6931472, rel=1e-6)
    assert not (tmp_path / "run").exists()
