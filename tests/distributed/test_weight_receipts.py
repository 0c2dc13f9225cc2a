"""A rollout on several processes answers with the weights that all of them have, or with an error: never with a mixture."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import WorkerError, WorkerLostError
from drivetrain.engine.hf.weights import stored_weights
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.trainers.tasks.addition import write_model
from drivetrain.workers.groups import base
from drivetrain.workers.groups.base import WorkerGroup
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.generator import RolloutWorker
from helpers.roles import Folder, FolderSource

PROMPTS = [[6, 7, 8], [9, 5], [4, 4, 4, 4]]
GREEDY = SamplingOptions(max_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write_model(found, 0)
    return found


@pytest.fixture
def group(folder: Path) -> Iterator[WorkerGroup]:
    roles = {
        "source": RoleSpec(worker=FolderSource, config=Folder(path=str(folder)), pool="source"),
        "rollout": RoleSpec(worker=RolloutWorker, config=RolloutConfig(model=ModelConfig(path=str(folder))), pool="rollout"),
    }
    with ProcessWorkerGroup(roles, pools={"source": 1, "rollout": 2}, grace_s=2.0) as found:
        yield found


def answers(group: WorkerGroup, version: int | None = None) -> Any:
    return group["rollout"].generate(PROMPTS, GREEDY, version=version)


def test_only_a_whole_set_of_weights_is_generated_with(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = group.sync_weights("source", "rollout", version=7)
    assert (receipt.version, receipt.tensors) == (7, 24)
    first = answers(group, 7)
    assert {version for some in first for g in some for version in g.versions} == {7}
    with pytest.raises(WorkerError, match="has version 7 of the weights, but version 8 was requested"):
        answers(group, 8)
    for damage, message in (("lost", "1 parameters have no tensor"), ("doubled", "1 tensors match no parameter")):
        group["source"].set_damage(damage)
        with pytest.raises(WorkerError, match=message):
            group.sync_weights("source", "rollout", version=8)
        # Neither the new weights nor the old ones: some of them were overwritten.
        with pytest.raises(WorkerError, match="are a mix of two models because loading new ones failed"):
            answers(group)
    group["source"].set_damage("0.5")
    assert group.sync_weights("source", "rollout", version=8).digest != receipt.digest
    assert {version for some in answers(group, 8) for g in some for version in g.versions} == {8}
    group["source"].set_damage("")
    assert group.sync_weights("source", "rollout", version=9).digest == receipt.digest
    assert [g.log_probs for some in answers(group, 9) for g in some] == [g.log_probs for some in first for g in some]

    def disagree(replies: Any) -> Any:
        raise WorkerError("rollout/1 has something else")

    monkeypatch.setattr(base, "agreed_receipt", disagree)
    with pytest.raises(WorkerError, match="rollout/1 has something else"):
        group.sync_weights("source", "rollout", version=10)
    with pytest.raises(WorkerError, match=r"are not the same in all processes \(rollout/1 has something else\)"):
        answers(group)
    monkeypatch.undo()
    # A source that dies half-way leaves no mixture.
    group["source"].set_damage("dies")
    with pytest.raises(WorkerLostError):
        group.sync_weights("source", "rollout", version=1)
    with pytest.raises(WorkerError):
        answers(group)


def test_only_changes_are_sent_and_all_weights_are_loaded(group: WorkerGroup) -> None:
    receipt = group.sync_weights("source", "rollout", version=1, changes=True)
    assert receipt == group.sync_weights("source", "rollout", version=1)
    first = answers(group, 1)
    for damage, most in (("one", 100), ("", 100), ("", 0), ("0.5", receipt.bytes)):
        group["source"].set_damage(damage)
        changed = group.sync_weights("source", "rollout", version=2, changes=True)
        assert changed.sent_bytes <= most
        assert (changed.bytes, changed.tensors) == (receipt.bytes, receipt.tensors)
        made = answers(group, 2)
        # All weights by themselves are the same.
        everything = group.sync_weights("source", "rollout", version=2)
        assert (everything.digest, everything.sent_bytes) == (changed.digest, receipt.bytes)
        assert [g.log_probs for some in answers(group, 2) for g in some] == [g.log_probs for some in made for g in some]
        assert (changed.digest == receipt.digest) is (damage == "")
        if not damage:
            assert [g.log_probs for some in made for g in some] == [g.log_probs for some in first for g in some]
    # A transfer that has failed is followed by one of all weights.
    group["source"].set_damage("lost")
    with pytest.raises(WorkerError, match="1 parameters have no tensor"):
        group.sync_weights("source", "rollout", version=3, changes=True)
    group["source"].set_damage("")
    assert group.sync_weights("source", "rollout", version=3, changes=True) == replace(receipt, version=3)
    # Of other weights than the controller believes nothing is changed.
    group._kept_weights["source", "rollout"] = "another"
    with pytest.raises(
        WorkerError, match=r"of tensors with the digest another, but this process has [0-9a-f]{12}; sync all weights"
    ):
        group.sync_weights("source", "rollout", version=4, changes=True)
    with pytest.raises(WorkerError, match="are a mix of two models"):
        answers(group)


@pytest.mark.slow
def test_digests_of_weights_that_stay_and_that_leave_are_of_one_kind(folder: Path) -> None:
    """The second process hands weights on a device to itself, and the third one gets them in host memory."""
    config = RolloutConfig(model=ModelConfig(path=str(folder)), dtype="bfloat16")
    roles = {
        "source": RoleSpec(worker=FolderSource, config=Folder(path=str(folder)), ranks=(0, 1)),
        "rollout": RoleSpec(worker=RolloutWorker, config=config, ranks=(1, 2)),
    }
    with ProcessWorkerGroup(roles, pools={"main": 3}, grace_s=2.0) as group:
        group["source"].set_damage("device")
        assert group.sync_weights("source", "rollout", version=1).tensors == 24
        assert {version for some in answers(group, 1) for g in some for version in g.versions} == {1}


@pytest.mark.parametrize("sources", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_on_a_device_go_to_another_pool(folder: Path, sources: int) -> None:
    # The digest of what is sent and of what arrives is of one kind, however many processes gather the weights.
    config = RolloutConfig(model=ModelConfig(path=str(folder)), dtype="bfloat16")
    roles = {
        "source": RoleSpec(worker=FolderSource, config=Folder(path=str(folder)), pool="source"),
        "rollout": RoleSpec(worker=RolloutWorker, config=config, pool="rollout"),
    }
    with ProcessWorkerGroup(roles, pools={"source": sources, "rollout": 1}, grace_s=2.0) as group:
        group["source"].set_damage("device")
        assert group.sync_weights("source", "rollout", version=1).tensors == 24
        # They were rounded before they left, to what the generator makes of them.
        group["source"].set_damage("0.5")
        sizes = [tensor.numel() for _, tensor in stored_weights(str(folder))]
        assert group.sync_weights("source", "rollout", version=2).bytes == 2 * sum(sizes)
        found = answers(group, 2)
        alone = RolloutWorker(config).initialize()
        alone.load_weights((name, tensor * 0.5) for name, tensor in stored_weights(str(folder)))
        expected = alone.generate(PROMPTS, GREEDY)
        assert [g.log_probs for some in found for g in some] == [g.log_probs for some in expected for g in some]
