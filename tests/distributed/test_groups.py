"""What holds for groups of processes, whatever carries their requests: numbers, failures, deaths, hangs, weights, messages."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.errors import BatchError, ConfigError, ModelError, RemoteError, WorkerError, WorkerLostError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.workers.groups.base import WorkerGroup
from drivetrain.workers.groups.group_call import FlushManifest, GroupCall
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.groups.ray import RayWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.protocol import compute_messages as c
from drivetrain.workers.protocol import data_messages as d
from drivetrain.workers.protocol import messages as p
from drivetrain.workers.protocol.comm_id import mint
from drivetrain.workers.protocol.errors import RemoteWorkerError
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.generator import RolloutWorker
from drivetrain.workers.roles.reward import FunctionRewardConfig, FunctionRewardWorker
from helpers.harness import run_ranks
from helpers.hybridflow import EXAMPLES, example, expected
from helpers.roles import DiesWhileBuilt, FailingActor, FailsWhileBuilt, LateFailure, Trouble, Troubled, fails_on_nine
from helpers.search_path import python_path

EXAMPLE = example()
ROWS = json.loads((EXAMPLES / "rollouts.json").read_text())

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Two processes whatever the machine, and functions of the helpers found by the processes.
    os.environ["PYTHONPATH"] = python_path()
    # A group of an earlier test in this process may have started one.
    ray.shutdown()
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level=50)
    yield
    ray.shutdown()


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest) -> Start:
    """Starts a group of one kind."""
    if request.param == "process":
        # Ray brings this class to its processes by itself.
        return lambda roles, pools, **options: ProcessWorkerGroup(roles, pools=pools, names=[FailsWhileBuilt], **options)
    request.getfixturevalue("cluster")
    return lambda roles, pools, **options: RayWorkerGroup(roles, pools=pools, cpus=2 / sum(pools.values()), **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = EXAMPLE.make_models(tmp_path_factory.mktemp("models"))
    return folder


@pytest.fixture(scope="module")
def float64(models: Path) -> dict[str, list[tuple[float, float]]]:
    return expected(models, ROWS, EXAMPLE.STEPS.steps(list(range(len(ROWS)))))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A bound that tells a wait for a timeout of minutes from none; no measurement."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def troubled(trouble: Trouble | None = None, pool: str = "main", worker: Any = Troubled) -> RoleSpec:
    return RoleSpec(worker=worker, config=trouble or Trouble(), pool=pool)


def actor_role(models: Path, pool: str = "main", **options: Any) -> RoleSpec:
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64))
    model = ModelConfig(path=str(models / "policy"))
    config = ActorConfig(model=model, engine=engine, optim=OptimConfig(lr=1e-3), extra_fields=("uids",))
    return RoleSpec(worker=ActorWorker, config=config, pool=pool, **options)


def batch_of(group: WorkerGroup) -> dict[str, Any]:
    data: dict[str, Any] = EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json")
    old = group["actor"].compute_log_probs(data)["log_probs"]
    return {**data, "old_log_probs": old, "advantages": torch.linspace(-1, 1, old.numel()).view_as(old)}


# ---- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "parallel"), [("fsdp", {}), ("mcore", {"tp": 2})])
def test_all_roles_on_two_processes_give_the_numbers_of_plain_float64(
    start: Start, models: Path, float64: dict[str, Any], backend: str, parallel: dict[str, Any]
) -> None:
    with start(EXAMPLE.roles_on(backend, models, ParallelConfig(**parallel)), {"main": 2}) as group:
        got = EXAMPLE.run(group)
    for name, steps in float64.items():
        for record, (loss, norm) in zip(got[name], steps, strict=True):
            assert record["loss"] == pytest.approx(loss, rel=5e-6, abs=1e-6), name
            assert record["grad_norm"] == pytest.approx(norm, rel=5e-5), name


# ---- failures -----------------------------------------------------------------------------------------------------------


def test_a_failure_is_the_reason_first_and_leaves_no_reply_behind(start: Start) -> None:
    roles = {
        "troubled": troubled(),
        "reward": RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=fails_on_nine)),
    }
    with start(roles, {"main": 2}, grace_s=5) as group:
        for kind, cause, message in (
            ("value", ValueError, r"ValueError: not me \[rank 1 of pool 'main' in troubled.fail\]\nTraceback(?s:.*)in fail\n"),
            ("batch", BatchError, r"BatchError: not me \[rank 1 of pool 'main' in troubled.fail\]"),
            ("odd", RemoteWorkerError, r"OddError: not me \[rank 1 (?s:.*)OddError: not me"),
            ("memory", torch.OutOfMemoryError, r"OutOfMemoryError: not me \[rank 1 "),
        ):
            with pytest.raises(WorkerError) as found:
                group["troubled"].fail(kind)
            assert re.match(message, str(found.value))
            assert type(found.value.__cause__) is cause
            assert "role_host.py" not in str(found.value)
            # An error that a user can fix is one line.
            assert (str(found.value).count("\n") == 0) == (kind == "batch")
            # The other rank had answered; that reply is not taken for this one.
            assert group["troubled"].echo(kind) == [[kind], {}]
        with (
            within(5),
            pytest.raises(WorkerError, match=r"^ValueError: a nine \[rank \d of pool 'main' in reward.compute_rew"),
        ):
            group["reward"].compute_rewards(from_lists([[9, 1], [2, 3]]))
        found_rewards = group["reward"].compute_rewards(from_lists([[8, 1], [2, 3]]), columns={"worth": ["4", "5"]})
        assert found_rewards["rewards"].tolist() == [4.0, 5.0]
        # Several ranks with the same reason are one message.
        with pytest.raises(WorkerError, match=r"a nine \[rank 0, 1 of pool"):
            group["reward"].compute_rewards(from_lists([[9, 1], [9, 3]]))


def check_shared(group: Any) -> None:
    """What every group does alike, on two ranks; in a local group every rank runs this."""
    assert group["troubled"].echo(1, x=(2, None)) == [[1], {"x": (2, None)}]
    assert group["troubled"].stats() == {"kl": 0.1, "names": ["a"]}
    assert group["troubled"].gather("all") == ["all", "all"]
    for kind, cause in (("value", ValueError), ("batch", BatchError)):
        error = failure_of(lambda kind=kind: group["troubled"].fail(kind))  # type: ignore[misc]
        # In a local group it is the error itself, and the other rank's report of it.
        assert isinstance(error, cause) or isinstance(error.__cause__, cause) or isinstance(error, RemoteError)
        assert "not me" in str(error).splitlines()[0]
        assert group["troubled"].echo(kind) == [[kind], {}]
    error = failure_of(lambda: group["reward"].compute_rewards(from_lists([[9, 1], [2, 3]])))
    assert "a nine" in str(error).splitlines()[0]
    rewards = group["reward"].compute_rewards(from_lists([[8, 1], [2, 3]]), columns={"worth": ["4", "5"]})["rewards"]
    assert rewards.tolist() == [4.0, 5.0]
    batch = from_lists([[1, 2], [3, 4], [5]])
    assert sorted(group["troubled"].score(batch)["scores"].unique().tolist()) == [0.0, 1.0]
    group.sync_weights("giver", "troubled")
    assert group["troubled"].total() == 100 * sum(range(20))
    for call in (lambda: group["nobody"], lambda: group["troubled"].nothing(), lambda: group["reward"].compute_rewards()):
        error = failure_of(call)
        assert isinstance(error, ConfigError)
        assert "\n" not in str(error)
    group.close()
    error = failure_of(lambda: group["troubled"].echo())
    assert isinstance(error, WorkerLostError)
    assert "closed" in str(error)
    assert "\n" not in str(error)


def failure_of(run: Callable[[], Any]) -> Exception:
    try:
        run()
    except Exception as e:
        return e
    raise AssertionError("it did not fail")


def shared_roles() -> dict[str, RoleSpec]:
    return {
        "troubled": troubled(),
        "giver": troubled(Trouble(rank=-1)),
        "reward": RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=fails_on_nine)),
    }


def test_what_all_groups_do_alike(start: Start) -> None:
    with start(shared_roles(), {"main": 2}) as group:
        check_shared(group)


def rank_shared() -> bool:
    with LocalWorkerGroup(shared_roles()) as group:
        check_shared(group)
    return True


def test_a_local_group_does_so_too() -> None:
    assert run_ranks(rank_shared, 2) == [True, True]


@pytest.mark.slow
def test_a_role_that_dies_is_told_and_is_built_again_from_its_checkpoint(start: Start, models: Path, tmp_path: Path) -> None:
    group = start({"actor": actor_role(models), "troubled": troubled()}, {"main": 2}, grace_s=5)
    try:
        # What the batch lacks is refused by every process, and nothing is lost.
        data = batch_of(group)
        with pytest.raises(
            WorkerError, match=r"^BatchError: .*needs the token field 'advantages'.*\[rank 0.* of pool"
        ) as found:
            group["actor"].update({k: v for k, v in data.items() if k != "advantages"})
        assert isinstance(found.value.__cause__, BatchError)
        (first,) = group["actor"].update(data)
        folder = group["actor"].save_checkpoint(str(tmp_path), 1)
        (second,) = group["actor"].update(data)
        # A process is killed while the other waits for it inside a collective.
        with (
            within(20),
            pytest.raises(WorkerLostError, match=r"(?s)^rank 1 of pool 'main' died during troubled.die.*rebuild\(\)"),
        ):
            group["troubled"].die()
        with pytest.raises(WorkerLostError, match=r"cannot be used: rank 1 of pool 'main' died") as closed:
            group["actor"].update(data)
        assert "\n" not in str(closed.value)
        # From the checkpoint it makes the step that it made before.
        group.rebuild({"actor": folder})
        (again,) = group["actor"].update(data)
        assert (again.loss, again.grad_norm) == (second.loss, second.grad_norm)
        assert again.loss != first.loss
        with pytest.raises(ConfigError, match="there is no role 'nope'"):
            group.rebuild({"nope": "x"})
    finally:
        group.close()
    with pytest.raises(WorkerLostError, match="cannot be used: it was closed"):
        group["actor"].update(data)


def test_no_operation_leaves_a_reply_behind_when_one_rank_fails(start: Start) -> None:
    """Rank 1 fails in each in turn; the next request gets its own replies, on all ranks."""
    comm_id = mint()
    comm_id[1].close()
    built = c.Initialize(role="again", worker=Troubled, config=Trouble(rank=1))
    steps: list[tuple[p.Request, str]] = [
        (p.Init(comm_id=comm_id[0].hex()), "already has its communicator"),
        (c.Initialize(role="mortal", worker=FailsWhileBuilt, config=Trouble()), "not built"),
        (c.Initialize(role="troubled", worker=Troubled, config=Trouble()), "there is a role 'troubled' already"),
        (c.Call(role="troubled", method="fail", args=["value"]), "ValueError: not me"),
        (c.Call(role="troubled", method="nothing"), "no method 'nothing'"),
        (c.Call(role="nobody", method="nothing"), "there is no role 'nobody'"),
        (c.Inference(role="troubled", method="score", ids=["x"], rows=[0]), "the samples 'x' are not in the data store"),
        (d.Get(ids=["nothing"], keys=["x"]), "the samples 'nothing' are not in the data store"),
        (d.Spec(role="troubled"), "role 'troubled' has no data set"),
        (d.Fetch(role="troubled", count=1), "role 'troubled' has no data set"),
        (d.ModelConfigRequest(role="troubled"), "has no engine"),
        (d.Peers(addresses={}), "does not listen"),
        (p.LoadDenseShard(model_id="m", config_json="", safetensors_paths=[]), "config_json is not JSON"),
        (p.GenerateStep(model_id="m", tokens=[1], offset=0), "there is no model 'm'"),
        (c.Flush(ids=[7], digest=""), "request 7 of the flush did not come"),
    ]
    with start({"troubled": troubled(), "taker": troubled(Trouble(rank=-1))}, {"main": 2}, grace_s=5) as group:
        for i, (request, message) in enumerate(steps):
            with pytest.raises(WorkerError, match=message):
                ask(group, request)
            # Nothing has been left half-done either.
            assert group["troubled"].echo(i) == [[i], {}]
        with pytest.raises(WorkerError, match="no more weights"):
            group.sync_weights("troubled", "taker")
        assert group["troubled"].echo() == [[], {}]
        assert len(ask(group, built)) == 2
        assert [reply.observed_sum for reply in ask(group, p.NcclSanityCheck())] == [2, 2]


def ask(group: Any, request: p.Request) -> list[Any]:
    """Send a request to both ranks, with a flush if it needs one."""
    if not isinstance(request, c.ComputeRequest):
        return [replies[0] for replies in group.ask("the test", {"main/0": [request], "main/1": [request]}).values()]
    call = GroupCall(id=group.next_id(), title="the test", workers=("main/0", "main/1"), message=request)
    group._run(FlushManifest.of([call]))
    call.result()
    return list(call.replies.values())


@pytest.mark.slow
def test_who_waits_for_a_failed_process_is_ended(start: Start) -> None:
    with start({"troubled": troubled()}, {"main": 2}, grace_s=2) as group:
        with (
            within(10),
            pytest.raises(
                WorkerError, match=r"(?s)^RuntimeError: not me \[rank 1 of.*rank 0 waited for it and was killed after 2 s"
            ),
        ):
            group["troubled"].fail_beside_a_barrier()
        with pytest.raises(WorkerLostError, match="cannot be used: RuntimeError: not me"):
            group["troubled"].echo()


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_an_error_in_a_forward_pass_ends_the_group_and_is_shown_once(start: Start, models: Path) -> None:
    role = replace(actor_role(models), worker=FailingActor)
    with start({"actor": role}, {"main": 2}, grace_s=2) as group:
        pids = process_ids(group)
        with within(15), pytest.raises(WorkerError, match=r"^OutOfMemoryError: planted failure \[rank 1 of pool") as found:
            group["actor"].compute_log_probs(EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json"))
        assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
        assert all(ended(pid) for pid in pids)


def process_ids(group: Any) -> list[int]:
    return [process.pid for processes in getattr(group, "_processes", {}).values() for process in processes]


def ended(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_a_wedged_rank_is_told_from_a_slow_one(start: Start) -> None:
    with start({"troubled": troubled()}, {"main": 2}, grace_s=5, watchdog_s=4.0) as group:
        # Slow, but it makes progress.
        assert group["troubled"].work_slowly(6.0) == "done"
        with within(20), pytest.raises(WorkerLostError) as found:
            group["troubled"].hang()
        told = str(found.value)
        assert re.search(r"rank 1 of 2 made no progress in troubled.hang for \d+ s, in hang of ", told)
        # On a busy machine the other one may come too late to say where it stood.
        waits = r"rank 0 of 2 made no progress in troubled.hang for \d+ s, waiting for other ranks in .*, called by hang"
        assert re.search(waits, told) or "rank 0 then failed too: " in told
        # Its connections are not used again.
        with pytest.raises(WorkerLostError, match=r"cannot be used: rank \d of 2 made no progress"):
            group["troubled"].echo()
        group.rebuild()
        assert group["troubled"].echo(1) == [[1], {}]


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_a_process_without_a_sign_of_life_is_killed() -> None:
    """Of a stopped process not even the I/O thread answers. Ray watches over its own."""
    with ProcessWorkerGroup({"troubled": troubled()}, pools={"main": 2}, grace_s=1, silence_s=6) as group:
        pids = process_ids(group)
        with within(30), pytest.raises(WorkerLostError, match=r"rank 1 of pool 'main' gave no sign of life for 6 s"):
            group["troubled"].stop()
        assert all(ended(pid) for pid in pids)


@pytest.mark.slow
def test_a_process_that_dies_while_it_is_built_is_told_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pytest.raises(WorkerLostError, match=r"rank 1 of pool 'main' died during building mortal"):
        start({"mortal": troubled(Trouble(note=note), worker=DiesWhileBuilt)}, {"main": 2}, grace_s=3)
    assert time.monotonic() - float(note.read_text()) < 15


@pytest.mark.slow
def test_a_role_that_cannot_be_built_is_told_and_leaves_nothing(start: Start, models: Path) -> None:
    config = ActorConfig(model=ModelConfig(path=str(models / "none")), optim=OptimConfig())
    for _ in range(2):
        # The second time too: the first one's room was given back.
        with pytest.raises(WorkerError, match=r"^ModelError: .*\[rank 0, 1 of pool 'main' in building actor\]$") as found:
            start({"actor": RoleSpec(worker=ActorWorker, config=config)}, {"main": 2})
        assert isinstance(found.value.__cause__, ModelError)


def test_what_a_role_does_to_itself_is_an_answer(start: Start) -> None:
    roles = {"troubled": troubled(), "closing": troubled(Trouble(text="cannot be closed"))}
    with start(roles, {"main": 2}, grace_s=5) as group:
        # A role that ends its process politely does not.
        with pytest.raises(WorkerError, match=r"^SystemExit: 3 \[rank 1 of pool 'main' in troubled.leave\]"):
            group["troubled"].leave()
        # A string that is no text, a mapping of plain values.
        assert group["troubled"].echo("\ud800", name="caf\udce9") == [["\ud800"], {"name": "caf\udce9"}]
        assert group["troubled"].stats() == {"kl": 0.1, "names": ["a"]}
        # What has been answered does not change with what the role does next.
        first = group["troubled"].buffer()
        group["troubled"].buffer()
        assert first.unique().tolist() == [1.0]
        began = time.monotonic()
    assert time.monotonic() - began < 4


def test_what_cannot_be_sent_to_one_rank_is_sent_to_none(start: Start) -> None:
    batch = from_lists([[1, 2], [3, 4]])
    with start({"troubled": troubled()}, {"main": 2}, grace_s=2) as group:
        if isinstance(group, RayWorkerGroup):
            columns: dict[str, Any] = {"x": [1, threading.Lock()]}
        else:
            columns = {"x": [1, object()]}
        with pytest.raises(ConfigError, match=r"options\['columns'\]\['x'\]\[0\]"):
            group["troubled"].score(batch, columns=columns)
        # Nobody waits in a collective for a rank that was never asked.
        with within(5):
            assert group["troubled"].gather("next") == ["next", "next"]
        assert group["troubled"].score(batch)["scores"].tolist() == [0.0, 1.0]


def test_threads_that_share_a_group_do_not_mix_their_calls(start: Start) -> None:
    with start({"troubled": troubled()}, {"main": 2}) as group, ThreadPoolExecutor(4) as threads:
        ballast = torch.zeros(2**20)
        tags = [f"call {i}" for i in range(24)]
        assert list(threads.map(lambda tag: group["troubled"].gather(tag, ballast), tags)) == [[tag, tag] for tag in tags]


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_a_process_that_was_stopped_for_a_while_goes_on() -> None:
    with ProcessWorkerGroup({"troubled": troubled()}, pools={"main": 2}, grace_s=8, silence_s=2) as group:
        pid = process_ids(group)[1]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(4.0, os.kill, (pid, signal.SIGCONT)).start()
        assert group["troubled"].gather("late") == ["late", "late"]


@pytest.mark.slow
def test_a_forked_process_does_not_end_the_workers_of_its_parent() -> None:
    with ProcessWorkerGroup({"troubled": troubled()}) as group:
        child = os.fork()
        if child == 0:
            group.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert group["troubled"].echo(1) == [[1], {}]


PROGRAM = """
import argparse, sys
from drivetrain.engine.packing.convert import from_lists
from drivetrain import FunctionRewardConfig, FunctionRewardWorker, ProcessWorkerGroup, RoleSpec

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("--worth", type=float)
WORTH = ARGUMENTS.parse_args().worth


def reward(answers):
    return [WORTH for _ in answers]


def main():
    role = RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=reward))
    group = ProcessWorkerGroup({"reward": role})
    print(group._controller.address.removeprefix("zmq://"))
    print(group["reward"].compute_rewards(from_lists([[1, 2]]))["rewards"].tolist())
    # Neither closed nor left.


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_a_program_finds_its_own_functions_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """As a file, and as a module of a package; with a command line that the workers see too."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROGRAM.replace("import argparse", "from . import other\nimport argparse"))
    (package / "other.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    for words in (["program.py"], ["-m", "package.program"]):
        done = run_python(tmp_path, *words, "--worth", "3")
        assert done.returncode == 0, done.stderr
        address, rewards = done.stdout.splitlines()
        assert rewards == "[3.0]"
        assert not Path(address).parent.exists()
    # Without the guard, and without a file.
    (tmp_path / "unguarded.py").write_text(PROGRAM.replace('if __name__ == "__main__":\n    main()', "main()"))
    done = run_python(tmp_path, "unguarded.py", "--worth", "3")
    assert "this program starts a worker group at import time, and workers import it; move that code under" in done.stderr
    done = run_python(tmp_path, "-c", PROGRAM, "--worth", "3")
    assert "reward is defined in a program without a file" in done.stderr


def run_python(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


# ---- weights ------------------------------------------------------------------------------------------------------------


def test_weights_go_to_a_pool_of_their_own(start: Start, models: Path) -> None:
    rollout = RoleSpec(
        worker=RolloutWorker, config=RolloutConfig(model=ModelConfig(path=str(models / "reference"))), pool="answers"
    )
    options, prompts = SamplingOptions(max_tokens=4, temperature=0.0), [r["prompt"] for r in ROWS[::3]]
    # A third role has an engine and a generator of its own.
    both = actor_role(models, generator=RolloutConfig(model=ModelConfig(path=str(models / "reference"))))
    with start({"actor": both, "rollout": rollout}, {"main": 1, "answers": 1}) as group:
        group.sync_weights("actor", "rollout")
        check_greedy(group["rollout"].generate(prompts, options), prompts, models / "policy")
        # Synced before it generates; and again after an update, without being asked.
        before = group["actor"].generate(prompts, options)
        check_greedy(before, prompts, models / "policy")
        data = batch_of(group)
        for _ in range(5):
            group["actor"].update(data)
        after = group["actor"].generate(prompts, options)
        group.sync_weights("actor", "rollout")
        assert after == group["rollout"].generate(prompts, options)
        assert [a[0].log_probs for a in after] != [b[0].log_probs for b in before]
        with pytest.raises(ConfigError, match=r"prompt 0 is 'two plus'; it must be a list of token ids") as found:
            group["rollout"].generate(["two plus"], options)
        assert "\n" not in str(found.value)


def check_greedy(answers: Any, prompts: list[list[int]], folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0].tolist()
        assert answer.response == out[len(prompt) :]


def test_a_generator_follows_every_change_of_its_role(models: Path, tmp_path: Path) -> None:
    """An update that fails late, a checkpoint, weights from another role."""
    options, prompts = SamplingOptions(max_tokens=4, seed=1), [r["prompt"] for r in ROWS[::3]]
    config = RolloutConfig(model=ModelConfig(path=str(models / "reference")))
    roles = {
        "actor": replace(actor_role(models, generator=config), worker=LateFailure),
        "rollout": RoleSpec(worker=RolloutWorker, config=config),
    }
    with ProcessWorkerGroup(roles) as group:

        def agrees() -> bool:
            group.sync_weights("actor", "rollout")
            return answers("actor") == answers("rollout")

        def answers(role: str = "actor") -> list[list[list[int]]]:
            # Their versions count what each of them has loaded.
            return [[answer.response for answer in some] for some in group[role].generate(prompts, options)]

        assert agrees()
        before = answers()
        folder = group["actor"].save_checkpoint(str(tmp_path), 0)
        data = batch_of(group)
        for _ in range(5):
            with pytest.raises(WorkerError, match="too late"):
                group["actor"].update(data)
        assert answers() != before
        assert agrees()
        group["actor"].load_checkpoint(folder)
        assert answers() == before
        # It leaves the device with the engine; test_role_moves.py has the rest.
        group["actor"].to("disk")
        group["actor"].to("device")
        assert answers() == before


@pytest.mark.slow
def test_a_stream_that_is_not_read_to_its_end_is_an_error() -> None:
    roles = {"giver": troubled(Trouble(rank=-1)), "taker": troubled(Trouble(rank=-1, text="reads too little"), pool="taker")}
    with (
        ProcessWorkerGroup(roles, pools={"main": 1, "taker": 1}) as group,
        within(20),
        pytest.raises(WorkerError, match="load_weights of 'taker' returned before it had read all weights"),
    ):
        group.sync_weights("giver", "taker")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["none", "fails"])
def test_a_stream_of_weights_arrives_whole_or_not_at_all(start: Start, trouble: str) -> None:
    roles = {
        "giver": troubled(Trouble(rank=-1 if trouble == "none" else 1)),
        "taker": troubled(Trouble(rank=-1), pool="taker"),
    }
    with start(roles, {"main": 2, "taker": 1}, grace_s=3) as group:
        if trouble == "none":
            group.sync_weights("giver", "taker")
            assert group["taker"].total() == 100 * sum(range(20))
            return
        with (
            within(15),
            pytest.raises(
                WorkerError, match=r"^RuntimeError: no more weights \[rank 1 of pool 'main' in weights of giver to taker\]"
            ),
        ):
            group.sync_weights("giver", "taker")
        # All processes have answered, so the group goes on, with all weights of the rank that sent them or with none.
        assert group["taker"].total() in (0, 100 * sum(range(20)))
        assert group["giver"].echo(1) == [[1], {}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying", "text", "message"),
    [
        (1, "", "rank 1 of pool 'main' died during weights of giver to taker"),
        (-1, "dies while fed", "rank 0 of pool 'taker' died during weights of giver to taker"),
    ],
)
def test_a_process_that_dies_in_the_middle_of_a_stream_is_told(
    start: Start, tmp_path: Path, dying: int, text: str, message: str
) -> None:
    note = tmp_path / "note"
    roles = {
        "giver": troubled(Trouble(rank=dying, note=note)),
        "taker": troubled(Trouble(rank=-1, note=note, text=text), pool="taker"),
    }
    with start(roles, {"main": 2, "taker": 1}, grace_s=3) as group:
        with pytest.raises(WorkerLostError, match=message):
            group.sync_weights("giver", "taker")
        assert time.monotonic() - float(note.read_text()) < 15
        with pytest.raises(WorkerLostError, match=f"cannot be used: {message}"):
            group.sync_weights("giver", "taker")
        if dying == -1:
            # The source is whole; the target takes part again once it has been started again.
            assert group.lost_pools.keys() == {"taker"}
            assert group["giver"].echo(1) == [[1], {}]
            group.restart_pool("taker")
            assert group.sync_weights("giver", "taker").tensors == 20
            assert group["taker"].total() == 100 * sum(range(20))


# ---- messages -----------------------------------------------------------------------------------------------------------


def no_group(*_: Any, **__: Any) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("kind", [LocalWorkerGroup, ProcessWorkerGroup, RayWorkerGroup])
def test_what_is_wrong_with_a_role_is_one_line_before_anything_starts(
    kind: Any, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", no_group)
    monkeypatch.setattr(ray, "init", no_group)
    options: dict[str, Any] = {} if kind is LocalWorkerGroup else {"pools": {"main": 1}}
    actor = actor_role(models)
    spec: Any = RoleSpec
    wrong: list[tuple[Any, str]] = [
        (
            {"actor": actor.config},
            r"role 'actor' is a ActorConfig \(ActorConfig\(.*\); pass RoleSpec\(worker=..., config=...\)",
        ),
        ({"actor": ActorWorker}, r"role 'actor' is a type"),
        (
            {"actor": RoleSpec(worker=ActorWorker, config="models/policy")},
            r"config is a str \('models/policy'\); ActorWorker needs",
        ),
        ({"actor": spec(worker="actor", config=actor.config)}, r"worker='actor'; give a worker class such as ActorWorker"),
        (
            {"actor": spec(worker=ActorWorker, config=actor.config, generator="vllm")},
            r"generator is a str; give a Rollout",
        ),
        ({}, "at least one role"),
        ([actor], "at least one role"),
    ]
    for roles, message in wrong:
        with pytest.raises(ConfigError, match=message) as found:
            kind(roles, **options)
        assert "\n" not in str(found.value)


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_what_cannot_cross_a_wire_is_refused_with_the_way_out(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", no_group)
        reward = RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=lambda answers: [1.0]))
        with pytest.raises(
            ConfigError, match=r"role 'reward': a lambda cannot be sent to a worker.*define it at the top level"
        ):
            ProcessWorkerGroup({"reward": reward})
        with pytest.raises(ConfigError, match=r"the pools are other"):
            ProcessWorkerGroup({"actor": actor_role(models)}, pools={"other": 1})
        with pytest.raises(ConfigError, match=r"pools=\{'main': 0\}; give the number of its processes, at least 1"):
            ProcessWorkerGroup({"actor": actor_role(models)}, pools={"main": 0})
        with pytest.raises(ConfigError, match=r"need 2 GPUs.*this machine has 0"):
            ProcessWorkerGroup({"actor": actor_role(models)}, pools={"main": 2}, gpus=1)
        with pytest.raises(ConfigError, match="grace_s=0"):
            ProcessWorkerGroup({"actor": actor_role(models)}, grace_s=0)
    # As if there were GPUs, which gpus=0 hides.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with ProcessWorkerGroup({"troubled": troubled()}, address="zmq://127.0.0.1:*", gpus=0) as group:
        assert b"CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{process_ids(group)[0]}/environ").read_bytes().split(b"\0")
        for value, message in (
            (lambda: 1, r"args\[0\]: a lambda cannot be sent"),
            (EXAMPLE.Path, r"args\[0\]: pathlib:Path is not on the list of names"),
            (iter([1]), r"args\[0\] is a builtins.list_iterator, which cannot be sent"),
            ({"a": [object()]}, r"args\[0\]\['a'\]\[0\] is a builtins.object"),
        ):
            with pytest.raises(ConfigError, match=message):
                group["troubled"].echo(value)
        values = [1.5, float("inf"), -(2**70), None, True, "text", b"\0\xff", (1, (2,)), {3: {4}}, Path("/a"), torch.bfloat16]
        assert group["troubled"].echo(*values, name=Trouble(text="x")) == [values, {"name": Trouble(text="x")}]
        # Another group at the same address.
        with pytest.raises(ConfigError, match=r"cannot listen at zmq://127.0.0.1:\d+ \(Address already in use\)"):
            ProcessWorkerGroup({"troubled": troubled()}, address=group._controller.address)  # type: ignore[union-attr]
        # Ctrl-C and a hang-up are for the controller.
        (pid,) = process_ids(group)
        os.kill(pid, signal.SIGINT)
        assert group["troubled"].pid() == pid
    assert ended(pid)


def test_what_a_worker_prints_does_not_disturb_its_frames(capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessWorkerGroup({"troubled": troubled()}) as group:
        for _ in range(3):
            assert group["troubled"].write("loud and clear") == "loud and clear"
    assert capfd.readouterr().err.count("[main-0] loud and clear") == 6
