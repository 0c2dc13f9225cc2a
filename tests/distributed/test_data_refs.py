"""Groups with references: samples stay with the workers, move between them bit for bit, and leave nothing behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch
import zmq

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.errors import BatchError, ConfigError, DataMissingError, ManifestError, WorkerError, WorkerLostError
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.workers.data_plane.dataset import DatasetSpec
from drivetrain.workers.data_plane.links import Header, Links, new_keys
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.groups.ray import RayWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.protocol import data_messages as d
from drivetrain.workers.protocol.hooks import Evaluate, Offload, Save, SyncParams
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.generator import RolloutWorker
from drivetrain.workers.roles.reference import ReferenceWorker, ReferenceWorkerConfig
from helpers.harness import run_ranks
from helpers.hybridflow import EXAMPLES, example
from helpers.roles import Carrier, Trouble, samples
from helpers.search_path import python_path

EXAMPLE = example()
Start = Callable[..., Any]


def carrier(pool: str = "main", ranks: tuple[int, ...] | None = None, **options: Any) -> RoleSpec:
    return RoleSpec(worker=Carrier, config=Trouble(), pool=pool, ranks=ranks, **options)


def odd_batch(count: int = 5) -> PackedBatch:
    """Numbers that no detour over float32 leaves as they are."""
    lengths = [i % 3 + 2 for i in range(count)]
    batch = from_lists([[2**24 + 1 + i + j for j in range(n)] for i, n in enumerate(lengths)])
    raw = (torch.arange(batch.num_tokens) % 120 + 127 * 256 + 128).to(torch.int16)
    return batch.with_fields(x=torch.arange(batch.num_tokens, dtype=torch.float64) + 2**-30).with_fields(
        nan=raw.view(torch.bfloat16)
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def stores(group: Any) -> dict[str, tuple[int, int]]:
    """The number of samples of every worker, and their memory."""
    names = sorted({name for role in group.roles for name in group.workers(role)})
    found = group.ask("looking", {name: [d.ClearDataCache(ids=[])] for name in names})
    return {name: (replies[0].samples, replies[0].bytes_held) for name, replies in found.items()}


# ---- what all groups do alike -------------------------------------------------------------------------------------------


def check_refs(group: Any) -> None:
    """On two ranks; in a local group every rank runs this."""
    batch = odd_batch()
    ref = group.data.put(batch)
    assert (len(ref), ref.lengths, ref.num_tokens) == (5, tuple(batch.lengths), batch.num_tokens)
    # The answer to a reference is a reference; values come when they are asked for, bit for bit.
    doubled = group["carrier"].double(ref)
    assert list(doubled.keys) == ["doubled"]
    both = ref | doubled
    found = group.data.get(both, ["input_ids", "nan", "doubled"])
    assert same_bits(found["input_ids"], batch.input_ids)
    assert same_bits(found["nan"], batch.token_fields["nan"])
    assert same_bits(found["doubled"], batch.token_fields["x"] * 2)
    # Tensors go in and out by the same way, with the same numbers.
    assert same_bits(group["carrier"].double(batch)["doubled"], found["doubled"])
    ranks = group.data.get(group["carrier"].rank(ref), ["rank"])["rank"].tolist()
    assert sorted(set(ranks)) == [0, 1]
    assert group["carrier"].lists(ref) == [batch.select([i]).input_ids.tolist() for i in range(5)]
    # A part, in another order, also one that leaves a rank without samples.
    for rows in ([4, 0, 2], [3]):
        part = group.data.get_batch(both.select(rows))
        assert torch.equal(part.input_ids, batch.select(rows).input_ids)
        again = group.data.get(group["carrier"].double(ref.select(rows)), ["doubled"])["doubled"]
        assert same_bits(again, batch.select(rows).token_fields["x"] * 2)
    # Columns that the controller computes.
    own = group.data.put_columns(ref, tokens={"x": torch.arange(float(ref.num_tokens))}, rows={"worth": torch.arange(5)})
    assert group.data.get(group["carrier"].double(ref | own), ["doubled"])["doubled"].tolist() == [
        2.0 * i for i in range(ref.num_tokens)
    ]
    assert group.data.get(own, ["worth"])["worth"].tolist() == [0, 1, 2, 3, 4]
    for run, kind, message in (
        (lambda: group["carrier"].double(ref.select([])), BatchError, "has no samples"),
        (lambda: group.data.get(ref, ["nothing"]), BatchError, "no field 'nothing'"),
        (lambda: group.data.put_columns(ref, tokens={"y": torch.ones(3)}), BatchError, r"y is \[3\]; it must have 14 rows"),
        (lambda: group.data.put_columns(ref), BatchError, "there are no columns"),
        (lambda: group.put(batch), AttributeError, r"WorkerGroup.put has moved: use group\.data\.put$"),
    ):
        with pytest.raises(kind, match=message):
            run()
    group.data.clear_data_cache(own, "worth")
    with pytest.raises(DataMissingError, match="have no worth@"):
        group.data.get(own, ["worth"])
    group.data.clear_data_cache(ref)
    for run in (
        lambda: group["carrier"].double(ref),
        lambda: group.data.get(doubled, ["doubled"]),
        lambda: ref.locations("x"),
    ):
        with pytest.raises(DataMissingError, match="are not in the data store; they were dropped") as found_error:
            run()
        assert found_error.value.ids == list(ref.ids)
    assert set(stores(group).values()) == {(0, 0)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Functions of the helpers are found by the processes.
    os.environ["PYTHONPATH"] = python_path()
    # A group of an earlier test in this process may have started one.
    ray.shutdown()
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level=50)
    yield
    ray.shutdown()


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest) -> Start:
    if request.param == "process":
        return lambda roles, pools, **options: ProcessWorkerGroup(roles, pools=pools, names=[samples], **options)
    request.getfixturevalue("cluster")
    return lambda roles, pools, **options: RayWorkerGroup(roles, pools=pools, cpus=2 / sum(pools.values()), **options)


def test_references_in_a_group(start: Start) -> None:
    with start({"carrier": carrier()}, {"main": 2}) as group:
        check_refs(group)


def rank_refs() -> bool:
    with LocalWorkerGroup({"carrier": carrier()}) as group:
        check_refs(group)
    return True


def test_references_in_a_local_group() -> None:
    assert run_ranks(rank_refs, 2) == [True, True]


def rank_diverging(rank_of: int = 1) -> str:
    """A program that calls something else on one rank."""
    import torch.distributed as dist

    with LocalWorkerGroup({"carrier": carrier()}) as group:
        group._worker.agreement._flush_s = 5.0
        try:
            group["carrier"].wait(0.01 if dist.get_rank() == rank_of else 0.02)
            # The arguments are each rank's own; what must be the same is the call.
            group["carrier"].held() if dist.get_rank() == rank_of else group["carrier"].wait(0.0)
        except ManifestError as e:
            return str(e)
    return ""


def test_a_program_that_diverges_between_ranks_is_told_instead_of_hanging() -> None:
    assert all("the ranks were sent different flushes" in text for text in run_ranks(rank_diverging, 2))


# ---- between pools ------------------------------------------------------------------------------------------------------


def test_samples_and_weights_go_from_pool_to_pool_bit_for_bit(start: Start) -> None:
    roles = {"near": carrier(), "far": carrier("far"), "pair": carrier("far", ranks=(1,))}
    batch = odd_batch(7)
    with start(roles, {"main": 2, "far": 2}) as group:
        ref = group.data.put(batch)
        assert {name.split("/")[0] for names in ref.locations("x") for name in names} == {"main"}
        sent = group.controller_bytes
        doubled = group["far"].double(ref)
        # They are there now, besides where they were; the controller has seen metadata.
        assert all({name.split("/")[0] for name in names} == {"main", "far"} for names in ref.locations("nan"))
        assert group.controller_bytes - sent < 12_000
        back = group["near"].double((ref | doubled).without("x").rename(doubled="x"))
        assert same_bits(group.data.get(back, ["doubled"])["doubled"], batch.token_fields["x"] * 4)
        # All on one rank, from both ranks of the other pool.
        alone = group.data.get(group["pair"].rank(ref), ["rank"])["rank"]
        assert alone.tolist() == [1] * 7
        held = group.data.get(ref, ["nan", "input_ids"])
        assert same_bits(held["nan"], batch.token_fields["nan"])
        # Weights too: to other processes of a pool, to another pool, to a part of one.
        for source, target in (("near", "far"), ("far", "near"), ("near", "pair"), ("pair", "far")):
            group.sync_weights(source, target)
            for i, (name, tensor) in enumerate(group[target].held()):
                assert name == f"w{i}"
                assert same_bits(tensor, torch.arange(5 + i, dtype=torch.bfloat16 if i % 2 else torch.float64).reshape(1, -1))
        with pytest.raises(WorkerError, match=r"ConfigError: eta=0.5: Carrier, the worker of 'far', cannot average weights"):
            group.sync_weights("near", "far", eta=0.5)
        # Nothing is left half-done.
        assert group["far"].wait(0.0) == 0.0


@pytest.mark.slow
def test_roles_on_a_part_of_a_pool() -> None:
    roles = {"all": carrier(), "first": carrier(ranks=(0,)), "second": carrier(ranks=(1,))}
    with ProcessWorkerGroup(roles, pools={"main": 2}) as group:
        ref = group.data.put(odd_batch(), "first")
        assert set(ref.locations("x")) == {("main/0",)}
        # Both at once: what one needs moves there before either begins.
        one, two = (group.submit(role, "rank", ref) for role in ("first", "second"))
        three = group.submit("all", "rank", ref)
        group.flush()
        assert [group.data.get(s.result(), ["rank"])["rank"].tolist() for s in (one, two)] == [[0] * 5, [1] * 5]
        assert sorted(set(group.data.get(three.result(), ["rank"])["rank"].tolist())) == [0, 1]
        assert len(set(group.data.digests(ref, "all").values())) == 1
        group.sync_weights("first", "second")
        assert len(group["second"].held()) == 6
        # Flushes of different processes may be under way at the same time; of the same ones not.
        long = group.submit("first", "wait", 1.5)
        group.flush()
        began = time.monotonic()
        assert group["second"].wait(0.0) == 0.0
        assert time.monotonic() - began < 1.0
        with pytest.raises(
            ConfigError, match=r"all.wait cannot be sent: first.wait has not been answered, and both need main/0"
        ):
            group["all"].wait(0.0)
        assert long.result() == 1.5
        assert group["all"].wait(0.0) == 0.0
    for ranks, message in (
        ((1, 0), "ascending order"),
        ((), "ascending order"),
        ((0, 0), "ascending"),
        ((5,), "has 2 processes"),
    ):
        with pytest.raises(ConfigError, match=message):
            ProcessWorkerGroup({"odd": carrier(ranks=ranks)}, pools={"main": 2})


# ---- what runs at once --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metadata_is_asked_for_while_a_call_runs(start: Start) -> None:
    data = DatasetSpec(load=samples, options={"count": 5})
    with start({"carrier": carrier(dataset=data)}, {"main": 2}) as group:
        first = group.data.fetch(3)
        assert [sample.rpartition(":")[2] for sample in first.ids] == ["0", "1", "2"]
        assert first.locations("x") == [("main/0",), ("main/1",), ("main/0",)]
        assert group.data.get(first, ["x"])["x"].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        long = group.submit("carrier", "double", first, slowly=2.0)
        group.flush()
        began = time.monotonic()
        assert (group.data.spec().samples, group.data.spec().position) == (5, 3)
        # The samples that it needs are dropped when it has run.
        second = group.data.fetch(4)
        assert [sample.split(":", 1)[1] for sample in second.ids] == ["0:3", "0:4", "1:0", "1:1"]
        group.data.clear_data_cache(first)
        assert {count for count, _ in stores(group).values()} != {0}
        assert time.monotonic() - began < 1.9
        long.result()
        group.data.clear_data_cache(second)
        assert set(stores(group).values()) == {(0, 0)}
        # From a position again, as after a restart.
        assert group.data.fetch(2, start=1).ids == ("carrier:0:1", "carrier:0:2")
        with pytest.raises(ConfigError, match="samples=0; give a number of at least 1"):
            group.data.fetch(0)
        with pytest.raises(ConfigError, match="there is no role 'nobody'"):
            group.data.fetch(1, "nobody")
        with pytest.raises(WorkerError, match="role 'carrier' has no engine, so it has no model configuration"):
            group.model_config("carrier")


def test_what_is_submitted_and_not_flushed_is_told() -> None:
    with ProcessWorkerGroup({"carrier": carrier()}) as group:
        waiting = group.submit("carrier", "wait", 0.0)
        with pytest.raises(ConfigError, match=r"carrier.wait has been submitted, but not flushed; call flush\(\) first"):
            waiting.result()
        with pytest.raises(
            ConfigError, match=r"carrier.held cannot be called: carrier.wait has been submitted; flush\(\) first"
        ):
            group["carrier"].held()
        assert group.flush() == [waiting]
        assert waiting.result() == waiting.result() == 0.0
        assert group.flush() == []
        assert group["carrier"].count(from_lists([[1, 2], [3]])) == {"tokens": 3.0}
        for hooks, message in (
            ({"after": [Evaluate(data=group.data.put(odd_batch()))]}, "the hook evaluate is valid only after an update"),
            ({"before": [Offload(role="nobody")]}, "there is no role 'nobody'"),
            ({"before": [Offload(role="carrier")]}, "Carrier has no method 'to'"),
            ({"after": [SyncParams(source="carrier", target="carrier", eta=2)]}, "eta=2; .* between 0 and 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                group.submit("carrier", "wait", 0.0, **hooks)
        ref = group.data.put(odd_batch())
        group.rebuild()
        with pytest.raises(ConfigError, match="belongs to another group, or to this one before it was rebuilt"):
            group["carrier"].double(ref)


# ---- nothing is left, and nothing passes through the controller ---------------------------------------------------------


@pytest.mark.slow
def test_after_a_hundred_steps_the_stores_are_as_small_as_after_one() -> None:
    with ProcessWorkerGroup({"carrier": carrier(), "other": carrier(ranks=(1,))}, pools={"main": 2}) as group:
        sizes = []
        for _ in range(100):
            ref = group.data.put(odd_batch())
            ref |= group["carrier"].double(ref)
            ref |= group["other"].rank(ref)
            group["carrier"].double(odd_batch())
            group.data.clear_data_cache(ref)
            sizes.append((stores(group), len(group.data.buffer), group.data.buffer.bytes_held()))
        assert sizes[0] == sizes[-1] == ({"main/0": (0, 0), "main/1": (0, 0)}, 0, 0)


def controller_bytes_of(group: Any, length: int) -> int:
    """The bytes of a step with samples of this length, after they were put."""
    ref = group.data.put(from_lists([[1] * length] * 4).with_fields(x=torch.ones(4 * length)))
    before: int = group.controller_bytes
    ref |= group["carrier"].double(ref)
    ref |= group["other"].double(ref.without("x").rename(doubled="x"))
    group["far"].rank(ref)
    group.data.clear_data_cache(ref)
    return int(group.controller_bytes - before)


def test_what_passes_through_the_controller_does_not_grow_with_the_samples() -> None:
    roles = {"carrier": carrier(), "other": carrier(ranks=(1,)), "far": carrier("far")}
    with ProcessWorkerGroup(roles, pools={"main": 2, "far": 1}) as group:
        controller_bytes_of(group, 10)
        short, long = controller_bytes_of(group, 100), controller_bytes_of(group, 10_000)
        # But for the digits of lengths and counters.
        assert 0 < short <= long < short + 400


# ---- with engines -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = EXAMPLE.make_models(tmp_path_factory.mktemp("models"))
    return folder


def engine_roles(models: Path, **parallel: Any) -> dict[str, RoleSpec]:
    def engine(backend: str, **layout: Any) -> EngineConfig:
        return EngineConfig(backend=backend, parallel=ParallelConfig(**layout), micro_batch=MicroBatchConfig(max_tokens=64))

    policy, other = (ModelConfig(path=str(models / name)) for name in ("policy", "reference"))
    return {
        "actor": RoleSpec(
            worker=ActorWorker, config=ActorConfig(model=policy, engine=engine("fsdp"), optim=OptimConfig(lr=1e-3))
        ),
        "reference": RoleSpec(worker=ReferenceWorker, config=ReferenceWorkerConfig(model=other, engine=engine("mcore", tp=2))),
        "rollout": RoleSpec(worker=RolloutWorker, config=RolloutConfig(model=policy), pool="answers"),
    }


def test_a_step_with_references_from_prompts_to_an_update(models: Path, tmp_path: Path) -> None:
    """Rollout on a pool of its own, training on another one, hooks around the update."""
    options = SamplingOptions(max_tokens=5, samples=2, seed=3)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    with ProcessWorkerGroup(engine_roles(models), pools={"main": 2, "answers": 1}) as group:
        asked = group.data.put(prompts, "rollout")
        answers = group["rollout"].generate(asked, options)
        listed = group["rollout"].generate(prompts, options)
        # The same answers as documents, in the order of their prompts.
        flat = [g for some in listed for g in some]
        batch = group.data.get_batch(answers)
        assert [batch.select([i]).input_ids.tolist() for i in range(6)] == [[*g.prompt, *g.response] for g in flat]
        assert answers.group_ids is not None
        assert [group - answers.group_ids[0] for group in answers.group_ids] == [0, 0, 1, 1, 2, 2]
        # The prompts of another call are other groups.
        assert not set(answers.group_ids) & set(group["rollout"].generate(asked, options).group_ids)
        assert batch.sequence_fields["finished"].tolist() == [g.finished for g in flat]
        # The actor agrees with what the generator has recorded.
        computed = group["actor"].compute_log_probs(answers)
        values = group.data.get(answers | computed, ["log_probs", "rollout_log_probs"])
        assert (values["log_probs"] - values["rollout_log_probs"]).abs().max() < 1e-5
        # Every rank of a tensor-parallel share holds the same inputs.
        group["reference"].compute_log_probs(answers)
        assert len(set(group.data.digests(answers, "reference").values())) == 1
        advantages = group.data.put_columns(answers, tokens={"advantages": torch.linspace(-1, 1, answers.num_tokens)})
        ready = answers | computed.rename(log_probs="old_log_probs") | advantages
        update = group.submit(
            "actor",
            "update",
            ready,
            before=[Offload(role="reference")],
            after=[
                Evaluate(data=ready),
                Save(role="actor", root=str(tmp_path), step=1),
                SyncParams(source="actor", target="rollout"),
                SyncParams(source="actor", target="reference"),
            ],
        )
        group.flush()
        (result,) = update.result()
        offloaded, evaluated, folder, *rest = update.hook_results()
        assert offloaded is None
        # Both are receipts of the same tensors.
        assert rest[0] == rest[1]
        assert rest[0]["tensors"] == 24
        assert evaluated == group["actor"].evaluate(ready)
        assert evaluated["loss"] != result.loss
        assert Path(folder, "manifest.json").exists()
        # After the update both others compute what the actor does.
        mine = group.data.get(group["actor"].compute_log_probs(answers), ["log_probs"])["log_probs"]
        theirs = group.data.get(group["reference"].compute_log_probs(answers), ["reference_log_probs"])["reference_log_probs"]
        assert (mine - theirs).abs().max() < 1e-5
        assert (mine - values["log_probs"]).abs().max() > 1e-4
        greedy = SamplingOptions(max_tokens=4, temperature=0.0, evaluation=True)
        fresh = group["rollout"].generate(prompts, greedy)
        check = group["actor"].compute_log_probs(group.data.put(from_lists([[*g.prompt, *g.response] for (g,) in fresh])))
        recorded = [p for (g,) in fresh for p in g.log_probs]
        found = group.data.get(check, ["log_probs"])["log_probs"]
        at = [
            i
            for (g, b) in zip(fresh, _starts(fresh), strict=True)
            for i in range(b + len(g[0].prompt) - 1, b + len(g[0].prompt) + len(g[0].response) - 1)
        ]
        assert (found[at] - torch.tensor(recorded)).abs().max() < 1e-5
        assert group.model_config("actor")["model_type"] == "qwen3"


def _starts(answers: Any) -> list[int]:
    starts = [0]
    for (g,) in answers:
        starts.append(starts[-1] + len(g.prompt) + len(g.response))
    return starts[:-1]


def test_fewer_samples_than_ranks(models: Path) -> None:
    roles = engine_roles(models)
    with ProcessWorkerGroup({"actor": roles["actor"]}, pools={"main": 2}) as group:
        ref = group.data.put(from_lists([[3, 4, 5, 6]]))
        ref |= group["actor"].compute_log_probs(ref).rename(log_probs="old_log_probs")
        ref |= group.data.put_columns(ref, tokens={"advantages": torch.ones(4)})
        (result,) = group["actor"].update(ref)
        assert result.sequences == 1
        # What a call lacks is told with the field, and nothing is lost.
        with pytest.raises(WorkerError, match="needs the token field 'advantages'"):
            group["actor"].update(ref.without("advantages"))
        with pytest.raises(
            WorkerError, match="the batch has the field 'advantagse', which is never read; did you mean 'advantages'"
        ):
            group["actor"].update(ref.rename(advantages="advantagse"))
        assert len(group["actor"].update(ref)) == 1


def rank_mixed_weights(folder: str) -> list[float]:
    """A moving average between engines of other layouts, tensor by tensor."""
    from drivetrain.engine.registry import engine_class

    def build(name: str, backend: str, **layout: Any) -> Any:
        return engine_class(backend)(
            model=ModelConfig(path=f"{folder}/{name}"),
            engine=EngineConfig(backend=backend, parallel=ParallelConfig(**layout)),
            optim=OptimConfig(lr=1e-3),
        ).initialize()

    errors = []
    for source, target in (("fsdp", "mcore"), ("mcore", "fsdp")):
        layouts: dict[str, Any] = {"fsdp": {}, "mcore": {"tp": 2}}
        one, other = build("policy", source, **layouts[source]), build("reference", target, **layouts[target])

        def read(engine: Any) -> dict[str, torch.Tensor]:
            with engine.named_weights() as stream:
                return {name: tensor.clone() for name, tensor in stream}

        before, new = read(other), read(one)
        with one.named_weights() as stream:
            other.load_weights(stream, eta=0.25)
        after = read(other)
        errors.append(max(float((after[n] - (0.25 * new[n] + 0.75 * before[n])).abs().max()) for n in new))
        assert max(float((after[n] - before[n]).abs().max()) for n in new) > 1e-3
        with one.named_weights() as stream:
            other.load_weights(stream)
        assert all(torch.equal(tensor, new[name]) for name, tensor in read(other).items())
        # What is not a whole set of weights is refused, and nothing is computed with it.
        for damage, message in (
            (lambda pairs: pairs[:-1], "the weights lack 1 tensors"),
            (lambda pairs: [*pairs, ("odd", torch.ones(1))], "the weights have odd, which the model does not have"),
            (lambda pairs: [(pairs[0][0], pairs[0][1][:1]), *pairs[1:]], "in the model; the weights belong to another model"),
        ):
            with pytest.raises(Exception, match=message):
                other.load_weights(damage(list(new.items())))
            with pytest.raises(ConfigError, match="the weights are incomplete"), other.named_weights():
                raise AssertionError
        other.load_weights(new.items())
        assert all(torch.equal(tensor, new[name]) for name, tensor in read(other).items())
        for eta in (-0.1, 1.1, float("nan")):
            with pytest.raises(ConfigError, match="between 0 and 1"):
                other.load_weights(new.items(), eta=eta)
        one.close()
        other.close()
    return errors


@pytest.mark.slow
def test_weights_are_averaged_between_engines(models: Path) -> None:
    assert max(max(errors) for errors in run_ranks(rank_mixed_weights, 2, str(models))) < 1e-6


# ---- connections between pools ------------------------------------------------------------------------------------------


def links_of(name: str, endpoint: str, keys: Any = None, timeout_s: float = 1.0) -> Links:
    return Links(name, endpoint, keys, timeout_s)


def test_bytes_over_a_connection(tmp_path: Path) -> None:
    one, two, three = (links_of(f"p/{i}", f"ipc://{tmp_path}/{i}") for i in range(3))
    addresses = {f"p/{i}": links.address for i, links in enumerate((one, two, three))}
    for links in (one, two, three):
        links.set_addresses(addresses)
    # More than a chunk; another peer's transfer in between; nothing at all; an error.
    large = torch.arange(2_000_000).view(torch.uint8)
    one.send("p/1", "large", [large[:50].numpy(), large[50:].numpy()], about=["x", 1])
    three.send("p/1", "none", [])
    one.send("p/1", "failed", [], error="no such sample")
    none = two.receive_header("p/2", "none")
    assert (none.size, none.about) == (0, None)
    two.receive_into(none, [])
    header = two.receive_header("p/0", "large")
    into = torch.empty(header.size, dtype=torch.uint8)
    two.receive_into(header, [into[:50].numpy(), into[50:].numpy()])
    assert torch.equal(into, large)
    assert header.about == ["x", 1]
    assert two.receive_header("p/0", "failed").error == "no such sample"
    one.send("p/1", "short", [b"ab"])
    short = two.receive_header("p/0", "short")
    with pytest.raises(ManifestError, match="p/0 sends 2 bytes of 'short', but 3 are expected"):
        two.receive_into(short, [bytearray(3)])
    two.receive_into(short, [bytearray(2)])
    one.send("p/1", "another", [b"x"])
    with pytest.raises(ManifestError, match="p/1 waits for 'this' of p/0, which sends 'another'"):
        two.receive_header("p/0", "this")
    with pytest.raises(WorkerLostError, match="p/2 sent nothing of 'more' to p/1 within 1 s"):
        two.receive_header("p/2", "more")
    with pytest.raises(WorkerLostError, match="does not know the address of p/9"):
        one.send("p/9", "x", [b"x"])
    for links in (one, two, three):
        links.close()


def test_what_came_from_a_worker_that_died_is_not_taken_for_its_successors(tmp_path: Path) -> None:
    def connect(first: Links, second: Links, incarnation: int) -> None:
        addresses = {"p/0": first.address, "p/1": second.address}
        for links in (first, second):
            links.set_addresses(addresses, {"p/0": 1, "p/1": incarnation})

    one, two = links_of("p/0", f"ipc://{tmp_path}/0"), links_of("p/1", f"ipc://{tmp_path}/1")
    connect(one, two, 1)
    # What was half read, what has arrived, and what nobody has taken yet.
    two.send("p/0", "1/a", [b"half", b"read"])
    half = one.receive_header("p/1", "1/a")
    two.send("p/0", "2/b", [b"old"])
    with pytest.raises(WorkerLostError, match="p/2 sent nothing"):
        one.receive_header("p/2", "1/a")
    # It died before it had sent the bytes that belong to this.
    two._peer("p/0").send(msgspec.msgpack.encode(Header("p/1#1", "3/b", 8)))
    one.send("p/1", "4/c", [b"for the old one"])
    two.close()
    again = Links("p/1", f"ipc://{tmp_path}/1-2", None, 1.0, incarnation=2)
    connect(one, again, 2)
    again.send("p/0", "5/d", [b"new"])
    header = one.receive_header("p/1", "5/d")
    into = bytearray(3)
    one.receive_into(header, [into])
    assert (bytes(into), half.size) == (b"new", 8)
    one.send("p/1", "6/e", [b"for the new one"])
    assert again.receive_header("p/0", "6/e").size == 15
    for links in (one, again):
        links.close()


@pytest.mark.slow
def test_a_connection_demands_the_keys_of_the_group() -> None:
    keys = new_keys()
    two = links_of("p/1", "tcp://127.0.0.1:*", keys)
    for own, gets_through in ((None, False), (new_keys(), False), (keys, True)):
        one = links_of("p/0", "tcp://127.0.0.1:*", own)
        one.set_addresses({"p/1": two.address})
        one.send("p/1", "x", [b"secret"])
        if gets_through:
            header = two.receive_header("p/0", "x")
            assert header.size == 6
        else:
            with pytest.raises(WorkerLostError, match="sent nothing"):
                two.receive_header("p/0", "x")
        for socket in one._peers.values():
            socket.setsockopt(zmq.LINGER, 0)
        one.close()
    two.close()


# ---- the examples -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_controller_makes_the_step_of_the_other_example() -> None:
    found, wanted = (
        json.loads(subprocess.run([sys.executable, EXAMPLES / name, "--json"], check=True, capture_output=True).stdout)
        for name in ("controller.py", "hybridflow_step.py")
    )
    for name in ("ppo actor", "ppo critic"):
        assert found[name] == wanted[name]
    assert found["actor after"]["loss"] != found["ppo actor"][0]["loss"]
    assert found["actor synced"]["tensors"] == 24


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "controller.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(page.split("```python\n")[1].split("```")[0])
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, loss, numbers, folder, *receipts = done.stdout.splitlines()
    assert first.startswith("1.0/")
    assert "('rollout/0',)" in first
    assert loss.startswith("loss ")
    assert "'policy'" in numbers
    assert folder.endswith("step-00000001")
    assert len(receipts) == 2
    assert all("'digest'" in line for line in receipts)


def test_a_call_that_was_interrupted_does_not_mix_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProcessWorkerGroup({"carrier": carrier()}, pools={"main": 2}) as group:
        read = group._collect_flush

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(group, "_collect_flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group["carrier"].wait(0.5)
        monkeypatch.setattr(group, "_collect_flush", read)
        assert group["carrier"].wait(0.1) == 0.1


def test_what_was_dropped_meanwhile_is_missing_everywhere_and_nothing_is_lost() -> None:
    with ProcessWorkerGroup({"carrier": carrier(), "one": carrier(ranks=(0,))}, pools={"main": 2}, grace_s=3) as group:
        ref = group.data.put(odd_batch())
        # Between submission and flush: that call fails, the other one runs.
        gone, kept = group.data.put(odd_batch()), group.submit("carrier", "rank", ref)
        lost = group.submit("carrier", "double", gone)
        group.data.clear_data_cache(gone.select([0]))
        assert group.flush() == [kept, lost]
        with pytest.raises(DataMissingError):
            lost.result()
        assert len(group.data.get(kept.result(), ["rank"])["rank"]) == 5
        # Behind the controller's back, on one rank: told on all ranks, and the group goes on.
        some = [sample for sample in ref.ids if "main/1" in group.data.buffer.holders(sample, "x")]
        group.ask("the test", {"main/1": [d.ClearDataCache(ids=some)]})
        held = stores(group)["main/0"]
        with pytest.raises(WorkerError, match=r"DataMissingError: the samples .* are not in the data store"):
            group["carrier"].double(ref)
        with pytest.raises(WorkerError, match="are not in the data store"):
            group["one"].double(ref)
        assert group["carrier"].wait(0.0) == 0.0
        # Nothing has been stored for what did not arrive, and none of it counts as having arrived.
        assert stores(group)["main/0"] == held
        assert all("main/0" not in group.data.buffer.holders(sample, "x") for sample in some)
        # What was put for a call of tensors goes when the call fails.
        count = len(group.data.buffer)
        with pytest.raises(WorkerError, match="KeyError"):
            group["carrier"].double(from_lists([[1, 2], [3]]))
        assert len(group.data.buffer) == count
        # While the call runs: its results go with the samples.
        fresh = group.data.put(odd_batch())
        running = group.submit("carrier", "double", fresh, slowly=0.5)
        group.flush()
        group.data.clear_data_cache(fresh)
        running.result()
        assert not set(fresh.ids) & set(group.data.buffer._samples)


@pytest.mark.slow
def test_a_flush_that_nobody_asks_for_does_not_stand_in_the_way(tmp_path: Path) -> None:
    with ProcessWorkerGroup({"carrier": carrier(), "one": carrier(ranks=(0,))}, pools={"main": 2}) as group:
        group.submit("carrier", "wait", 0.0)
        group.flush()
        time.sleep(1.0)
        assert group["one"].wait(0.0) == 0.0
        # A refused flush loses nothing.
        long = group.submit("one", "wait", 1.0)
        group.flush()
        next_one = group.submit("carrier", "wait", 0.1)
        with pytest.raises(ConfigError, match=r"one.wait has not been answered, and both need main/0"):
            group.flush()
        assert long.result() == 1.0
        group.flush()
        assert next_one.result() == 0.1
        withdrawn = group.submit("carrier", "wait", 0.1)
        group.withdraw(withdrawn)
        assert group.flush() == []
        with pytest.raises(ConfigError, match=r"carrier.wait was withdrawn"):
            withdrawn.result()
        # What was under way when the group was rebuilt is not read from the new processes.
        old = group.submit("carrier", "wait", 0.3)
        group.flush()
        group.rebuild()
        with pytest.raises(WorkerLostError, match=r"carrier.wait was not answered"):
            old.result()
        assert group["carrier"].wait(0.1) == 0.1


def test_a_flush_that_is_refused_for_its_transfers_stays_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"first": carrier(ranks=(0,)), "second": carrier(ranks=(1,))}
    with ProcessWorkerGroup(roles, pools={"main": 2}) as group:
        ref = group.data.put(odd_batch(), "first")
        other = group.submit("first", "wait", 0.0)
        group.flush()
        # It runs on main/1 only, but its samples come from main/0.
        call = group.submit("second", "rank", ref)
        with monkeypatch.context() as patch:
            # As if the first call took long.
            patch.setattr(group, "_collect_done", lambda: None)
            with pytest.raises(ConfigError, match=r"first.wait has not been answered, and both need main/0"):
                group.flush()
        assert set(ref.locations("x")) == {("main/0",)}
        assert other.result() == 0.0
        assert group.flush() == [call]
        assert group.data.get(call.result(), ["rank"])["rank"].tolist() == [1] * 5


def test_hooks_after_a_call_that_fails_do_not_run_and_hold_up_nobody() -> None:
    """Also on another pool, whose process waits for weights that do not come."""
    roles = {"carrier": carrier(), "far": carrier("far")}
    with ProcessWorkerGroup(roles, pools={"main": 2, "far": 1}, grace_s=5, timeout_s=60) as group:
        began = time.monotonic()
        failing = group.submit(
            "carrier", "double", group.data.put(from_lists([[1], [2]])), after=[SyncParams(source="carrier", target="far")]
        )
        group.flush()
        with pytest.raises(WorkerError, match="KeyError: 'x'"):
            failing.result()
        assert time.monotonic() - began < 20
        group.sync_weights("carrier", "far")
        assert len(group["far"].held()) == 6
        averaged = [SyncParams(source="carrier", target="far", eta=eta) for eta in (0.5, 0.25)]
        late = group.submit("carrier", "wait", 0.0, after=averaged)
        group.flush()
        with pytest.raises(WorkerError, match=r"the hook sync_params after .*; the call itself did not: ConfigError: eta=0.5"):
            late.result()
        group.sync_weights("carrier", "far")


def test_a_local_call_does_not_change_the_callers_tensors() -> None:
    with ProcessWorkerGroup({"carrier": carrier()}) as group:
        batch = odd_batch()
        before = batch.token_fields["x"].clone()
        ref = group.data.put(batch)
        for _ in range(2):
            # The role works in place.
            assert same_bits(group.data.get(group["carrier"].double_in_place(ref), ["doubled"])["doubled"], before * 2)
        assert same_bits(batch.token_fields["x"], before)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda g, r: g.data.put_columns(r, tokens={"a@b": torch.ones(14)}), "'a@b' has an @"),
        (
            lambda g, r: g.data.put_columns(r, tokens={"a": torch.ones(14)}, rows={"a": torch.ones(5)}),
            "for tokens and for rows",
        ),
        (lambda g, r: g.data.put_columns(r.only(), rows={"a": [1.0, 2.0]}), r"a is \[2\]; it must have 5 rows"),
        (lambda g, r: g.data.get(r, "x"), "fields='x'; give a list"),
        (lambda g, r: g.data.get(odd_batch(), ["x"]), r"PackedBatch is not a reference; put\(\) the batch first"),
        (lambda g, r: g.submit("carrier", "wait", 0.0, after=Offload(role="carrier")), "give a list of hooks"),
        (lambda g, r: g.submit("carrier", "wait", 0.0, after=["save"]), "'save' is not a valid hook here"),
        (lambda g, r: g.submit_hooks(), "has no hooks; pass at least one"),
        (lambda g, r: g.data.fetch(1, "carrier", start=-1), "start=-1; give a position"),
    ],
)
def test_mistakes_are_told_by_the_controller(run: Any, message: str, small_group: Any) -> None:
    with pytest.raises((ConfigError, BatchError), match=message):
        run(small_group, small_group.data.put(odd_batch()))


@pytest.fixture(scope="module")
def small_group() -> Iterator[Any]:
    with ProcessWorkerGroup({"carrier": carrier()}) as group:
        yield group
