"""Calls of a generator in other processes that are cancelled, and calls that go on from what these have made."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import WorkerError, WorkerLostError
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.result import Generation
from drivetrain.trainers.data.prompts import Prompt
from drivetrain.trainers.rl.completions import Completion
from drivetrain.trainers.rl.kept_completions import KeptCompletions
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.generator import RolloutWorker
from helpers.roles import Trouble, Troubled
from helpers.search_path import python_path

PROMPTS = [[5, 6, 7], [9], [200, 100, 4, 4], [3] * 9]
OPTIONS = SamplingOptions(max_tokens=150, samples=2, seed=1, ignore_eos=True)


def begun_in(batch: PackedBatch) -> list[list[Generation]]:
    begun = []
    for number, prompt in enumerate(PROMPTS):
        rows = [2 * number, 2 * number + 1]
        named = Prompt(name="", ids=prompt, content="")
        completions = []
        for row in rows:
            tokens = batch.input_ids[batch.bounds[row] + len(prompt) : batch.bounds[row + 1]].tolist()
            finished = bool(batch.sequence_fields["finished"][row])
            completions.append(Completion(prompt=named, group=number, tokens=tokens, text="", finished=finished))
        kept = KeptCompletions(batch=batch.select(rows), rows=tuple(completions))
        begun.append(kept.resumable(OPTIONS.max_tokens))
    return begun


@pytest.mark.slow
def test_calls_go_on_from_what_cancelled_ones_have_made(tmp_path: Path) -> None:
    """On two processes, by what a controller reads of their stores: the same answers as without it."""
    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    config = RolloutConfig(
        model=ModelConfig(path=str(folder)), generator="helpers.hesitant:SlowToBegin", return_routed_experts=True
    )
    roles = {
        "rollout": RoleSpec(worker=RolloutWorker, config=config),
        "other": RoleSpec(worker=Troubled, config=Trouble()),
    }
    with ProcessWorkerGroup(roles, pools={"main": 2}, environment={"PYTHONPATH": python_path()}) as group:
        prompts = group.data.put(PROMPTS, "rollout")
        whole = group.data.get_batch(group["rollout"].generate(prompts, OPTIONS))
        begun: list[Any] = [None] * len(PROMPTS)
        lengths = []
        # Before it begins, when one of two processes has begun, and in the middle.
        for seconds in (0.0, 0.3, 1.0):
            call = group.submit(
                "rollout", "generate", prompts, OPTIONS, columns={"number": [*range(4)], "partial_completions": begun}
            )
            group.flush()
            time.sleep(seconds)
            assert group.cancel(call)
            part = group.data.get_batch(call.result())
            assert not group.cancel(call)
            begun = begun_in(part)
            lengths.append(sum(len(one.response) for ones in begun for one in ones))
        assert lengths == sorted(lengths)
        assert 0 < lengths[-1] < 8 * 150
        rest = group["rollout"].generate(prompts, OPTIONS, columns={"number": [*range(4)], "partial_completions": begun})
        batch = group.data.get_batch(rest)
        for name in ("input_ids", "labels"):
            assert getattr(batch, name).equal(getattr(whole, name))
        for name, values in whole.token_fields.items():
            assert (batch.token_fields[name] - values).abs().max() < 1e-4, name
        # Others go on to their end.
        other = group.submit("other", "echo", 7)
        group.flush()
        assert not group.cancel(other)
        assert other.result() == [[7], {}]
        with pytest.raises(WorkerError, match="a partial completion belongs to another prompt"):
            group["rollout"].generate(prompts, OPTIONS, columns={"number": [*range(4)], "partial_completions": begun[::-1]})


@pytest.mark.slow
def test_a_process_that_is_dead_cannot_be_asked_to_end_a_call(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    config = RolloutConfig(model=ModelConfig(path=str(folder)), generator="helpers.hesitant:HesitantGenerator")
    rollout = RoleSpec(worker=RolloutWorker, config=config, pool="answers")
    roles = {"rollout": rollout, "other": RoleSpec(worker=Troubled, config=Trouble())}
    pools = {"main": 1, "answers": 1}
    with ProcessWorkerGroup(roles, pools=pools, environment={"PYTHONPATH": python_path()}, grace_s=3) as group:
        prompts = group.data.put(PROMPTS, "rollout")
        call = group.submit("rollout", "generate", prompts, OPTIONS)
        group.flush()
        (process,) = group._processes["answers"]
        os.kill(process.pid, signal.SIGKILL)

        def cancelled() -> Any:
            # It may be known already that there is nothing to cancel.
            group.cancel(call)
            return call.result()

        with pytest.raises(WorkerLostError, match="rank 0 of pool 'answers'"):
            cancelled()
        assert group.lost_pools.keys() == {"answers"}
        group.restart_pool("answers")
        prompts = group.data.put(PROMPTS, "rollout")
        call = group.submit("rollout", "generate", prompts, OPTIONS)
        group.flush()
        assert group.cancel(call)
        assert len(call.result()) == 8
