"""A step as a GPU would run it: how often the host waits, padding to its kernels' tiles, moments that come and go."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host_syncs import HostSyncs
from drivetrain.engine.config import MicroBatchConfig, OffloadConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.fsdp import optimizer as optimizer_module
from drivetrain.engine.fsdp import replicas
from drivetrain.engine.fsdp.host_moments import HostMoments, MomentSlice, parts_of
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.parallel import topology
from drivetrain.engine.torch_private import storage_key
from drivetrain.losses.sft import SFTLoss
from helpers.engines import build, close_to, reference_steps, steps
from helpers.harness import run_ranks

# What reads the caller's batch, or exchanges objects through gloo, is on the host on any machine. The sums of the loss are here, and are
# read one by one; those on a device are read together.
ON_THE_HOST = ("losses/sft.py", "step_plan.py", "parallel/collectives.py", "engine/step.py")


def waits(syncs: HostSyncs) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, count in syncs.places.items():
        operator, _, where = place.partition(" in ")
        if not any(file in where for file in ON_THE_HOST):
            key = f"{operator} in {where.rpartition(':')[0]}"
            found[key] = found.get(key, 0) + count
    return found


@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_the_host_waits_for_the_device_twice_per_micro_batch(backend: str, tmp_path: Path, process_group: None) -> None:
    counts = []
    for layers in (1, 3):
        folder = save_tiny_model(tmp_path / str(layers), "qwen3", num_hidden_layers=layers)
        engine = build(folder, backend=backend, micro_batch=MicroBatchConfig(max_tokens=32, infer_max_tokens=32))
        batch = from_lists([list(range(i, i + 20)) for i in (3, 10, 20)])
        engine.train_batch(batch, SFTLoss())
        with HostSyncs("cpu") as syncs:
            result = engine.train_batch(batch, SFTLoss())
        assert result.micro_batches == 3
        found = waits(syncs)
        norm = next(place for place in found if place.startswith("_local_scalar_dense"))
        assert found == {"nonzero in engine/rank_slice.py": 3, "equal in ops/linear_head.py": 3, norm: 1}
        with HostSyncs("cpu") as syncs:
            engine.infer_batch(batch, OutputRequest(log_probs=True, entropy=True))
        assert waits(syncs) == {"nonzero in engine/rank_slice.py": 3}
        counts.append(found)
        engine.close()
    # Whatever the number of layers.
    assert counts[0] == counts[1]


def test_a_read_in_a_loss_is_counted(tmp_path: Path, process_group: None) -> None:
    # The control of the test above.
    class Reading(SFTLoss):
        def __call__(self, outputs: Any, batch: Any) -> Any:
            assert float(outputs.log_probs.sum()) <= 0
            return super().__call__(outputs, batch)

    engine = build(save_tiny_model(tmp_path / "model", "qwen3"))
    batch = from_lists([list(range(3, 20))])
    with HostSyncs("cpu") as syncs:
        engine.train_batch(batch, Reading())
    assert waits(syncs)["_local_scalar_dense in distributed/test_step_on_device.py"] > 0
    engine.close()


# ---- padding to tiles ----------------------------------------------------------------------------------------------------


def rank_aligned(folder: str, layouts: list[tuple[str, dict[str, Any]]]) -> list[list[tuple[float, float]]]:
    topology.ALIGNMENT["cpu"] = 128
    found = []
    for backend, axes in layouts:
        with contextlib.closing(build(folder, backend=backend, parallel=ParallelConfig(**axes))) as engine:
            assert engine.topology.token_alignment == 128
            found.append(steps(engine))
    return found


@pytest.mark.slow
def test_padding_to_tiles_changes_no_number(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    layouts: list[tuple[str, dict[str, Any]]] = [
        ("fsdp", {"dp_shard": 2}),
        ("fsdp", {"cp": 2}),
        ("mcore", {"pp": 2}),
        ("mcore", {"tp": 2, "tp_sequence": True}),
    ]
    want = reference_steps(folder)
    for got in run_ranks(rank_aligned, 2, str(folder), layouts)[0]:
        close_to(got, want)


def rank_sizes(folder: str) -> list[set[int]]:
    from drivetrain.engine.rank_slice import RankSlice

    seen: list[int] = []
    build_slice = RankSlice.from_micro_batch.__func__  # type: ignore[attr-defined]

    def recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        part = build_slice(cls, *args, **kwargs)
        seen.append(len(part.input_ids))
        return part

    RankSlice.from_micro_batch = classmethod(recorded)  # type: ignore[method-assign,assignment]
    found = []
    for axes in ({"pp": 2}, {"dp_shard": 2}):
        seen.clear()
        sizes = MicroBatchConfig(max_tokens=32)
        with contextlib.closing(build(folder, backend="mcore", parallel=ParallelConfig(**axes), micro_batch=sizes)) as engine:  # type: ignore[arg-type]
            engine.train_batch(from_lists([list(range(i, i + n)) for i, n in ((3, 30), (10, 20), (20, 5))]), SFTLoss())
        found.append(set(seen))
    return found


def test_stages_of_a_pipeline_receive_one_size(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    for pipeline, data in run_ranks(rank_sizes, 2, str(folder)):
        assert pipeline == {30}
        assert data == {30, 25}


# ---- parameters and moments ----------------------------------------------------------------------------------------------


def test_one_rank_casts_its_parameters_once_per_step(
    tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    gathered: list[str] = []
    copied: list[str] = []
    unshard = FSDPParamGroup.unshard

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            # Of gradients to the buffer of a reduction, and of that, divided by 1, to another one.
            if "chunk_cat" in name or (name == "div" and args[0].dim() == 1 and args[1] == 1.0):
                copied.append(name)
            return func(*args, **(kwargs or {}))

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._all_gather_result is None and not self.is_unsharded:
            gathered.append(self._module_fqn)
        return unshard(self, *args, **kwargs)

    monkeypatch.setattr(FSDPParamGroup, "unshard", counted)
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    batch = from_lists([list(range(i, i + 20)) for i in (3, 10, 20)])
    engine = build(folder, precision=PrecisionConfig(compute="bfloat16"), micro_batch=MicroBatchConfig(max_tokens=32))
    with Copies():
        first = engine.train_batch(batch, SFTLoss())
    assert first.micro_batches == 3
    # Nor are its gradients copied as if they were reduced.
    assert not copied
    for _ in range(2):
        gathered.clear()
        found = engine.train_batch(batch, SFTLoss())
        # The update of the step before is seen: a copy from before it would give the same loss again.
        assert found.loss < first.loss
        first = found
        assert len(gathered) == len(set(gathered)) > 1
    engine.close()


def rank_replicas(folder: str, bucket: int) -> tuple[str, list[tuple[float, float]], list[float]]:
    replicas.BUCKET_BYTES = bucket
    with contextlib.closing(build(folder, parallel=ParallelConfig(dp_replicate=2))) as engine:
        root: Any = engine._root  # type: ignore[attr-defined]
        found = steps(engine)
        return type(root).__name__, found, [float(p.detach().double().norm()) for p in root.parameters()]


@pytest.mark.parametrize("bucket", [1, 2**26])
def test_replicas_of_a_whole_model_train_as_one(bucket: int, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    one, other = run_ranks(rank_replicas, 2, str(folder), bucket)
    # Not wrapped by FSDP, which would only copy.
    assert one[0] == "PackedModel"
    close_to(one[1], reference_steps(folder))
    assert one == other


def test_parts_of_moments() -> None:
    assert parts_of([], 10) == []
    assert parts_of([0], 10) == [[MomentSlice(0, 0, 0)]]
    assert parts_of([6, 5, 0, 12], 10) == [
        [MomentSlice(0, 0, 6), MomentSlice(1, 0, 4)],
        [MomentSlice(1, 4, 5), MomentSlice(2, 0, 0), MomentSlice(3, 0, 9)],
        [MomentSlice(3, 9, 12)],
    ]
    for lengths in ([1], [10, 10], [25, 0, 1, 9]):
        pieces = [piece for part in parts_of(lengths, 10) for piece in part]
        assert [sum(p.end - p.start for p in pieces if p.index == i) for i in range(len(lengths))] == lengths


def staged_moments(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> list[HostMoments]:
    made: list[HostMoments] = []

    def staged(tensors: Any, kinds: Any) -> HostMoments:
        made.append(HostMoments(tensors, kinds, part_bytes, staged=True))
        return made[-1]

    monkeypatch.setattr(optimizer_module, "HostMoments", staged)
    return made


@pytest.mark.parametrize("part_bytes", [3000, 2**29])
def test_moments_that_come_and_go_change_no_number(
    part_bytes: int, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = staged_moments(monkeypatch, part_bytes)
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    engine: Any = build(folder, offload=OffloadConfig(optimizer="host"))
    # Two steps would not do: what the second made of its moments shows in the third.
    close_to(steps(engine, 3), reference_steps(folder, 3))
    (moments,) = made
    assert (len(moments.parts) == 1) == (part_bytes == 2**29)
    largest = max(sum(8 * (p.end - p.start) for p in part) for part in moments.parts)
    assert largest <= part_bytes
    # A run that goes on from a checkpoint has the same moments and step counts.
    engine.save_checkpoint(tmp_path / "saved", 3)
    want = steps(engine, 3)[2]
    engine.close()
    resumed = build(folder, offload=OffloadConfig(optimizer="host"))
    resumed.load_checkpoint(tmp_path / "saved" / "step-00000003")
    assert steps(resumed, 3)[2] == pytest.approx(want, rel=1e-6)
    resumed.close()


def test_a_failed_part_leaves_the_moments_on_the_host(
    tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (moments_of,) = [staged_moments(monkeypatch, 3000)]
    engine: Any = build(save_tiny_model(tmp_path / "model", "qwen3"), offload=OffloadConfig(optimizer="host"))
    steps(engine, 1)
    optimizer = engine._optimizer

    def fail() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(optimizer._optimizers[1], "step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        steps(engine, 1)
    on_host = {storage_key(t) for kinds in moments_of[0].host for t in kinds.values()}
    assert {storage_key(t) for t in engine.state_tensors("optimizer")} <= on_host
    engine.close()


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_selective_recomputation_of_megatron_keeps_less(family: str, tmp_path: Path, process_group: None) -> None:
    wide: dict[str, Any] = {"intermediate_size": 256} if family == "qwen3" else {"moe_intermediate_size": 256}
    folder = save_tiny_model(tmp_path / "model", family, **wide)
    batch = from_lists([list(range(3, 60))])
    sizes = {}
    for mode in ("none", "selective"):
        engine: Any = build(folder, backend="mcore", recompute=mode)
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[storage_key(tensor)] = tensor
            return tensor

        at_backward: list[int] = []
        run = engine.forward_step

        def measured(*args: Any, run: Any = run, kept: Any = kept, into: Any = at_backward) -> Any:
            done = run(*args)
            into.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
            return done

        engine.forward_step = measured
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            sizes[mode] = (engine.train_batch(batch, SFTLoss()).grad_norm, at_backward[0])
        engine.close()
    assert sizes["selective"][0] == pytest.approx(sizes["none"][0], rel=1e-6)
    assert sizes["selective"][1] < 0.9 * sizes["none"][1]
