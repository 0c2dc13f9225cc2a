"""State that rests on disk: on either engine, with everything that needs it while it does."""

import gc
import os
import sys
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.engine.config import LoraConfig, OffloadConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.fsdp import engine as fsdp_engine
from drivetrain.engine.fsdp.engine import FSDPEngine
from drivetrain.engine.fsdp.optimizer import ShardOptimizer
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.offload import Offloader, _trim, free_memory, host_cores
from drivetrain.engine.torch_private import storage_key
from drivetrain.losses.sft import SFTLoss
from helpers.engines import build, share, steps, weights
from helpers.harness import run_ranks


def rank_rest(folder: str, backend: str, parallel: dict[str, Any]) -> None:
    layout = ParallelConfig(**parallel)
    engine, meta_model = (build(folder, backend=backend, parallel=layout) for _ in range(2))
    first = steps(engine, 1)
    assert first == steps(meta_model, 1)
    held = [t for part in ("params", "optimizer") for t in engine.state_tensors(part)]  # type: ignore[arg-type]
    storages = {storage_key(t): t.untyped_storage().nbytes() for t in map(local, held)}
    moved: list[int] = []
    write = Offloader._write

    def counted(data: torch.Tensor) -> Any:
        moved.append(len(data))
        return write(data)

    engine._offloader._write = counted  # type: ignore[method-assign]
    engine.to("disk")
    # Gradients of a step that is done are not taken along.
    assert sum(moved) == sum(storages.values()) > 0
    assert all(t.untyped_storage().nbytes() == 0 for t in map(local, held))
    # A step, an inference, an export and a checkpoint wake what they need, and it rests again.
    assert steps(engine, 2) == steps(meta_model, 2)
    assert all(t.untyped_storage().nbytes() == 0 for t in map(local, held))
    batch = share(engine, tiny_documents(4, seed=9))
    request = OutputRequest(log_probs=True)
    assert torch.equal(engine.infer_batch(batch, request)["log_probs"], meta_model.infer_batch(batch, request)["log_probs"])
    mine, theirs = weights(engine), weights(meta_model)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    root = Path(folder).parent / f"{backend}-{engine.topology.size}"
    saved = engine.save_checkpoint(root, 3)
    meta_model.close()
    again = build(folder, backend=backend, parallel=layout)
    again.to("disk", optimizer=False)
    again.load_checkpoint(saved)
    again.to("device")
    engine.to("device", params=False)
    assert steps(engine, 1) == steps(again, 1)
    # What would read memory that is elsewhere is refused, or brings it back.
    for mode in (engine.train_mode, engine.eval_mode):
        with mode(), pytest.raises(ConfigError, match=r"to\('disk'\) inside .*_mode\(\)"):
            engine.to("disk")
    with engine.live_snapshot(4), pytest.raises(ConfigError, match=r"to\('disk'\) inside save_mode"):
        engine.to("disk")
    # Gradients that a step still needs do travel, with all else; those that are dropped do not.
    engine.to("disk")
    moved.clear()
    engine.forward_backward(batch, SFTLoss())
    assert sum(moved) > sum(storages.values())
    assert engine.optimizer_step().grad_norm
    engine.forward_backward(batch, SFTLoss())
    moved.clear()
    engine.zero_grad()
    assert not moved
    with engine.named_weights() as stream:
        kept = dict(stream)
    assert all(value.isfinite().all() for value in kept.values())
    # Nothing is left in the folder of temporary files, whatever becomes of the process.
    assert not [p for p in Path(tempfile.gettempdir()).glob("drivetrain-*") if p.is_file()]
    engine.close()
    again.close()


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(
    ("backend", "nproc", "parallel"),
    [
        ("fsdp", 2, {}),
        pytest.param("mcore", 2, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("mcore", 2, {}, marks=pytest.mark.slow),
        pytest.param("fsdp", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_an_engine_rests_on_disk_and_loses_nothing(tmp_path: Path, backend: str, nproc: int, parallel: dict[str, Any]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    run_ranks(rank_rest, nproc, str(folder), backend, parallel)


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_memory_is_given_back(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    engine = build(save_tiny_model(tmp_path / "model", "llama", **sizes))
    steps(engine, 1)
    gc.collect()
    _trim()
    before = anonymous()
    size = sum(p.numel() for p in engine._root.parameters()) * 4  # type: ignore[attr-defined]
    assert size > 80e6
    engine.to("disk")
    # Parameters and two moments; the step has dropped the gradients.
    assert before - anonymous() > 2.5 * size
    engine.to("device")
    assert anonymous() > before - 0.2 * size
    engine.close()


def anonymous() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024.0 for line in file if line.startswith("RssAnon"))


@pytest.mark.usefixtures("process_group")
def test_a_full_disk_leaves_all_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    engine, meta_model = build(folder, offload=OffloadConfig(params="host")), build(folder)
    written: list[int] = []

    def fails(data: torch.Tensor) -> Any:
        written.append(len(data))
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        return write(data)

    write = Offloader._write
    monkeypatch.setattr(Offloader, "_write", staticmethod(fails))
    with pytest.raises(ConfigError, match=r"to\('disk'\): No space left on device .*set TMPDIR"):
        engine.to("disk")
    assert engine._offloader.location_of("params") == "device"
    assert steps(engine, 1) == steps(meta_model, 1)
    with pytest.raises(ConfigError, match=r"to\('moon'\)"):
        engine.to("moon")
    engine.to("host")
    assert steps(engine, 1) == steps(meta_model, 1)
    assert engine._offloader.location_of("params") == "host"
    engine.close()


@pytest.mark.parametrize(
    ("quota", "cores", "processes", "expected"),
    [
        (None, 192, 8, 24),
        ("max 100000", 192, 8, 24),
        ("3200000 100000", 192, 8, 4),
        ("50000 100000", 4, 1, 1),
        (None, 2, 8, 1),
    ],
)
def test_processes_share_the_cores_of_their_machine(
    quota: str | None, cores: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(path: Path) -> str:
        assert path == Path("/sys/fs/cgroup/cpu.max")
        if quota is None:
            raise FileNotFoundError(path)
        return quota

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(Path, "read_text", limit)
    assert host_cores(processes) == expected


@pytest.mark.usefixtures("process_group")
def test_a_step_on_the_host_has_threads_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    seen: list[int] = []
    update, finish = ShardOptimizer.step, FSDPEngine.finish_build

    def noted(self: ShardOptimizer, lr: float) -> None:
        seen.append(torch.get_num_threads())
        update(self, lr)

    monkeypatch.setattr(ShardOptimizer, "step", noted)
    monkeypatch.setattr(fsdp_engine, "host_cores", lambda processes: 3 * processes)

    def as_on_a_gpu(engine: Any) -> None:
        with monkeypatch.context() as patch:
            topology = SimpleNamespace(device=torch.device("cuda"), all_gather_object=engine.topology.all_gather_object)
            patch.setattr(type(engine), "topology", topology)
            finish(engine)

    assert torch.get_num_threads() == 1
    steps(build(folder, offload=OffloadConfig(params="host")), 1)
    monkeypatch.setattr(FSDPEngine, "finish_build", as_on_a_gpu)
    steps(build(folder), 1)
    engine = build(folder, offload=OffloadConfig(params="host"))
    steps(engine, 1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    try:
        # A number that was chosen stays.
        steps(engine, 1)
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 1, 3, 2]


def rank_closes(folder: str, backend: str, parallel: dict[str, Any], model: dict[str, Any], collected: bool) -> list[int]:
    """Tensors of a closed engine that are alive, garbage collection being off."""
    module: Any = sys.modules[free_memory.__module__]
    gc.collect()
    gc.disable()
    engine = build(
        folder,
        backend=backend,
        model=model,
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(compute="bfloat16"),
    )
    steps(engine, 1)
    found = [weakref.ref(t) for t in gc.get_objects() if isinstance(t, torch.nn.Parameter)]
    found += [weakref.ref(t) for part in ("params", "grads", "optimizer") for t in engine.state_tensors(part)]  # type: ignore[arg-type]
    if not collected:
        module.gc = SimpleNamespace(collect=lambda: None)
    engine.close()
    return [len(found), sum(ref() is not None for ref in found)]


@pytest.mark.parametrize(
    ("backend", "parallel", "model"),
    [
        ("fsdp", {"cp": 2}, {}),
        ("fsdp", {}, {"lora": LoraConfig(rank=4)}),
        ("mcore", {"tp": 2}, {}),
        ("mcore", {"pp": 2}, {"lora": LoraConfig(rank=4)}),
    ],
)
def test_a_closed_engine_leaves_no_tensor(
    backend: str, parallel: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    for held, alive in run_ranks(rank_closes, 2, str(folder), backend, parallel, model, True):
        assert held > 10
        assert alive == 0


def test_the_control_of_the_test_above(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    assert all(alive > 10 for _, alive in run_ranks(rank_closes, 2, str(folder), "fsdp", {}, {}, False))


def test_after_an_error_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    free_memory(torch.device("cpu"))
    try:
        raise RuntimeError("one rank is out of memory")
    except RuntimeError:
        free_memory(torch.device("cuda"))
    assert not emptied
    free_memory(torch.device("cuda"))
    assert emptied == [True]
