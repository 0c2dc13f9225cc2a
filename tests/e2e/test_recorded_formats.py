"""Checkpoints, messages and replay bundles of an older version load: recorded by commit 53f42e7, before modules and names changed.

`formats/` holds a model, a run of SFT on two processes, one on Megatron-core and one of PPO, each with its second checkpoint, two replay
bundles, and the messages of such runs with one of every other kind.
"""

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drivetrain.checkpoint_tools.commands import main as checkpoint_tool
from drivetrain.engine.errors import ConfigError
from drivetrain.losses.policy import PolicyLoss
from drivetrain.losses.registry import RegistryConfig
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import PPOConfig
from drivetrain.trainers.config.runs import SFTConfig
from drivetrain.trainers.offline.trainer import SFTTrainer
from drivetrain.trainers.rl.algorithms import published
from drivetrain.trainers.rl.phase_commands import main as rl_phase
from drivetrain.trainers.rl.trainer import PPOTrainer
from drivetrain.workers.protocol.codec import Codec
from drivetrain.workers.protocol.compute_messages import Call
from drivetrain.workers.protocol.names import Names
from drivetrain.workers.protocol.operations import Registry
from drivetrain.workers.protocol.values import dump, load
from drivetrain.workers.roles.advantage import AdvantageConfig
from helpers import rl_runs, runs

FORMATS = Path(__file__).parents[1] / "recorded" / "formats"


def frames() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FORMATS / "frames.jsonl").read_text().splitlines()]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A copy with the data that the runs were made on."""
    shutil.copytree(FORMATS, tmp_path / "recorded")
    runs.make_task(tmp_path / "recorded" / "task")
    rl_runs.make_task(tmp_path / "recorded" / "task")
    return tmp_path / "recorded"


def test_messages_mean_the_same_and_look_the_same() -> None:
    codec, names = Codec(Registry(), binary=True), Names(["drivetrain.engine.loss:OutputRequest"])
    ops = set()
    for record in frames():
        frame = base64.b64decode(record["msgpack"])
        message: Any = codec.decode_request(frame) if record["kind"] == "request" else codec.decode_reply(frame)
        assert msgspec.msgpack.decode(codec.encode(message)) == msgspec.msgpack.decode(frame)
        loaded = load(message, [base64.b64decode(part) for part in record["parts"]], names)
        assert not any("$" in str(getattr(loaded, field)) for field in loaded.values)
        ops.add((record["kind"], msgspec.msgpack.decode(frame)["op"]))
    registry = Registry()
    assert {op for kind, op in ops if kind == "request"} >= set(registry.ops)


def with_class(plain: Any, name: str) -> Iterator[dict[str, Any]]:
    """What stands for instances of a class, anywhere in plain data."""
    if isinstance(plain, dict):
        if str(plain.get("$")).endswith(f":{name}"):
            yield plain["fields"]
        yield from (found for part in plain.values() for found in with_class(part, name))
    elif isinstance(plain, list):
        yield from (found for part in plain for found in with_class(part, name))


@pytest.mark.parametrize("kind", [PolicyLoss, AdvantageConfig])
def test_losses_in_messages_keep_their_settings(kind: type[RegistryConfig]) -> None:
    """Messages of before have the settings of all objectives and estimators; now they have those of one, under the same names."""
    codec, names, found = Codec(Registry(), binary=True), Names(["drivetrain.engine.loss:OutputRequest"]), 0
    for record in frames():
        if record["kind"] != "request" or kind.__name__.encode() not in (frame := base64.b64decode(record["msgpack"])):
            continue
        message = codec.decode_request(frame)
        loaded = load(message, [base64.b64decode(part) for part in record["parts"]], names)
        again = codec.encode(dump(loaded, names)[0])
        (before,), (after,) = (list(with_class(msgspec.msgpack.decode(f), kind.__name__)) for f in (frame, again))
        assert after.items() <= before.items()
        assert before.keys() - after.keys() <= kind.setting_names() - {f.name for f in fields(kind)}  # type: ignore[arg-type]
        found += 1
    assert found == {PolicyLoss: 6, AdvantageConfig: 2}[kind]


def test_every_published_loss_of_before_is_that_of_today() -> None:
    """Recorded by commit a2b0806, before each objective and estimator had settings of its own."""
    lines = (FORMATS / "losses.jsonl").read_text().splitlines()
    assert len(lines) == 20
    for record in map(json.loads, lines):
        today = published(record["algorithm"])
        plain = [record["loss"], record["advantage"]]
        loaded = load(Call(id=1, role="actor", method="update", args=plain), [], Names()).args
        recorded = load(Call(id=1, role="actor", method="update", args=[part["fields"] for part in plain]), [], Names()).args
        assert loaded == [today.loss, today.advantage]
        for part, values in zip(loaded, recorded, strict=True):
            settings = part.settings()
            assert settings == {name: values[name] for name in settings}
            assert settings.keys() == {f.name for f in (*fields(part), *fields(getattr(part, part.part)))}


def test_a_name_that_never_was_is_refused() -> None:
    codec = Codec(Registry(), binary=True)
    first = next(record for record in frames() if b"PolicyLoss" in base64.b64decode(record["msgpack"]))
    message = codec.decode_request(base64.b64decode(first["msgpack"]).replace(b"PolicyLoss", b"PolicyLost"))
    with pytest.raises(ConfigError, match="PolicyLost is not on the list"):
        load(message, [], Names())


@pytest.mark.parametrize("engine", ["fsdp", "mcore"])
def test_a_run_of_sft_goes_on(recorded: Path, engine: str) -> None:
    run = recorded / f"sft_{engine}"
    before = runs.records(run)
    words = runs.words(recorded, f"model.path={recorded / 'model'}", f"trainer.output_dir={run}", f"engine.backend={engine}")
    words = [word for word in words if not word.startswith("data.train")]
    data = recorded / "task" / "data"
    more = [f"data.train=[{data / 'train.jsonl'}]", "trainer.max_steps=3", "trainer.loggers=[jsonl]"]
    SFTTrainer(parse(SFTConfig, [*words, *more], "")).train()
    after = [record for record in runs.records(run) if record["step"] == 3 and record.get("split") is None]
    wanted = next(record for record in before if record["step"] == 3)
    assert after[-1]["seconds"] != wanted["seconds"]
    assert after[-1]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert after[-1]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_a_run_of_ppo_goes_on(recorded: Path) -> None:
    run = recorded / "ppo"
    more = ["trainer.max_steps=3", "trainer.save_every=2", f"model.path={recorded / 'model'}"]
    PPOTrainer(parse(PPOConfig, rl_runs.words(recorded / "task", run, *more), "")).train()
    assert rl_runs.records(run)[-1]["step"] == 3
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {"step-00000002", "step-00000003"}


@pytest.mark.slow
def test_replay_bundles_repeat_their_step_and_can_be_scored(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"model.path={recorded / 'model'}"
    assert rl_phase(["train", str(recorded / "ppo" / "bundles" / "step-00000002.safetensors"), model]) == 0
    assert "the repeated step equals the recorded one" in capsys.readouterr().out
    assert rl_phase(["score", str(recorded / "rollout.safetensors"), str(recorded / "scored.safetensors"), model]) == 0


@pytest.mark.parametrize("run", ["sft_fsdp", "sft_mcore", "ppo"])
def test_checkpoints_are_verified_and_merged(recorded: Path, run: str) -> None:
    checkpoint = recorded / run / "checkpoints" / "step-00000002"
    assert checkpoint_tool("verify", [str(checkpoint)]) == 0
    assert checkpoint_tool("merge", [str(checkpoint), str(recorded / "merged")]) == 0
    assert (recorded / "merged" / "model.safetensors").is_file()
