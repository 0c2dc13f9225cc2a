"""Canonical checkpoints: any layout to any other, damage found, crashes survived, no path out of the folder."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.checkpoint import hf_folder
from drivetrain.engine.checkpoint.manager import CheckpointManager
from drivetrain.engine.checkpoint.manifest import CheckpointManifest, write_manifest
from drivetrain.engine.checkpoint.retention import folder_name, latest, rotate, steps
from drivetrain.engine.checkpoint.rng import restore_rng, rng_state
from drivetrain.engine.checkpoint.safetensors_io import TensorWriter
from drivetrain.engine.checkpoint.save import write_snapshot
from drivetrain.engine.checkpoint.storage import MANIFEST, LocalStore, RemoteStore, open_store
from drivetrain.engine.checkpoint.tensor_slices import TensorSlice, covers, intersect, whole
from drivetrain.engine.config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import CheckpointError
from drivetrain.engine.export import export_hf
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss
from helpers.harness import run_ranks

OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, schedule="cosine", warmup_steps=2)


def build(folder: str, axes: dict[str, Any]) -> BaseEngine:
    return engine_class("fsdp")(
        model=ModelConfig(path=folder), engine=EngineConfig(parallel=ParallelConfig(**axes)), optim=OPTIM, total_steps=20
    ).initialize()


def train(engine: BaseEngine, numbers: range) -> list[tuple[float, float | None, float | None]]:
    found = []
    for number in numbers:
        documents = tiny_documents(8, seed=number)
        mine = balance([len(d) for d in documents], engine.topology.dp_size)[engine.topology.dp_rank]
        result = engine.train_batch(from_lists([documents[i] for i in mine]), SFTLoss())
        found.append((result.loss, result.grad_norm, result.lr))
    return found


def stored(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every tensor of a checkpoint, put together with safetensors alone."""
    manifest = json.loads((folder / MANIFEST).read_text())
    found = {}
    for name, entry in manifest["tensors"].items():
        for kind, part in entry["kinds"].items():
            value = torch.full(entry["shape"], float("nan"))
            for box in part["boxes"]:
                with safe_open(str(folder / box["file"]), "pt") as file:
                    where = tuple(slice(o, o + n) for o, n in zip(box["offset"], box["length"], strict=True))
                    value[where] = file.get_tensor(box["key"])
            found[name, kind] = value
    return found


@pytest.fixture
def checkpoint(tmp_path: Path, process_group: None) -> tuple[BaseEngine, Path]:
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    engine = build(folder, {})
    return engine, Path(engine.save_checkpoint(tmp_path / "checkpoints", 5))


def edit(folder: Path, change: Any) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    write_manifest(LocalStore(folder), data)


def rename_file(data: Any, name: str) -> None:
    data["files"][name] = data["files"].pop("rank-00000.safetensors")
    for entry in data["tensors"].values():
        for kind in entry["kinds"].values():
            for box in kind["boxes"]:
                box["file"] = name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=99), "format 99"),
        (lambda d: rename_file(d, "../escape.safetensors"), "not a plain name"),
        (lambda d: rename_file(d, "/etc/passwd"), "not a plain name"),
        (lambda d: rename_file(d, "model/../../x"), "not a plain name"),
        (lambda d: d["optim"].update(name="sgd"), "saved with optim.name=sgd, but this run has optim.name=adamw"),
        (
            lambda d: d["tensors"].update(more=d["tensors"]["model.norm.weight"]),
            "1 tensors that the model does not have, including more",
        ),
        (lambda d: d["tensors"]["model.norm.weight"]["kinds"]["value"].update(dtype="BF16"), "is F32 in the model and BF16"),
        (lambda d: d["files"]["rank-00000.safetensors"].update(bytes=7), "the manifest says 7 bytes"),
        (lambda d: d["files"].update({"rank-00009.safetensors": {"bytes": 7}}), "is missing"),
        (lambda d: d.pop("tensors"), "malformed"),
        (
            lambda d: d["tensors"]["model.norm.weight"].update(shape=[99]),
            r"model.norm.weight is \[64\] in the model and \[99\]",
        ),
        (lambda d: d["tensors"].pop("model.norm.weight"), "has no value of model.norm.weight"),
        (lambda d: d["tensors"]["model.norm.weight"]["kinds"]["value"]["boxes"].clear(), "covers only 0 of the 64"),
        (lambda d: d["tensors"]["model.norm.weight"]["kinds"]["value"]["boxes"][0].update(file="x"), "does not list"),
    ],
)
def test_a_hostile_or_damaged_manifest_is_refused(checkpoint: tuple[BaseEngine, Path], change: Any, message: str) -> None:
    engine, folder = checkpoint
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(folder)


def test_a_link_is_no_file_of_a_checkpoint(checkpoint: tuple[BaseEngine, Path]) -> None:
    engine, folder = checkpoint
    file = folder / "rank-00000.safetensors"
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(CheckpointError, match="is missing"):
        engine.load_checkpoint(folder)


def test_one_flipped_bit_is_found(checkpoint: tuple[BaseEngine, Path]) -> None:
    engine, folder = checkpoint
    engine.load_checkpoint(folder)
    file = folder / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        engine.load_checkpoint(folder)


def test_a_checkpoint_of_another_machine_is_loaded_and_told(
    checkpoint: tuple[BaseEngine, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine, folder = checkpoint
    engine.load_checkpoint(folder)
    assert not [record for record in caplog.records if "not to the bit" in record.getMessage()]
    edit(folder, lambda data: data["ranks"][0]["machine"].update(torch="1.0"))
    engine.load_checkpoint(folder)
    assert "was computed with torch 1.0 instead of" in caplog.text
    edit(folder, lambda data: data["ranks"][0].pop("machine"))
    engine.load_checkpoint(folder)


def test_no_pickle_is_written(checkpoint: tuple[BaseEngine, Path]) -> None:
    _, folder = checkpoint
    kinds = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja", ".xxh3"}


def make(root: LocalStore, step: int) -> None:
    made = root.begin(folder_name(step))
    state = {
        "parallel": {},
        "world_size": 0,
        "engine": {"precision": {"params": "float32"}},
        "model": {},
        "extra": {},
        "backend": "fsdp",
        "schedule": {"step": 0},
    }
    write_manifest(
        made, {"format": 1, "step": step, **state, "optim": None, "optimizer": None, "files": {}, "ranks": [], "tensors": {}}
    )
    root.commit(made, folder_name(step))


def test_latest_passes_over_what_is_incomplete(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    for number in (1, 2, 3):
        make(root, number)
    assert steps(root) == ["step-00000001", "step-00000002", "step-00000003"]
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    root.begin(folder_name(4))
    manifest, skipped = latest(root)
    assert manifest is not None
    assert manifest.step == 2
    assert len(skipped) == 1
    assert "step-00000003 is not a complete checkpoint" in skipped[0]
    # The damaged one is later than what was saved last: it does not count as kept.
    rotate(root, 1, newest=2)
    root.sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    rotate(root, 1, newest=3)
    assert steps(root) == ["step-00000002", "step-00000003"]
    make(root, 3)
    rotate(root, 1, newest=3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    assert latest(LocalStore(tmp_path / "nowhere")) == (None, [])


def test_rotation_keeps_the_last_every_nth_and_the_named(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    for number in range(1, 10):
        make(root, number)
    rotate(root, 2, newest=9, keep_every=3, keep=[2])
    assert [int(n[-2:]) for n in steps(root)] == [2, 3, 6, 8, 9]


def test_disk_full_leaves_the_older_checkpoint(checkpoint: tuple[BaseEngine, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, folder = checkpoint

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorWriter, "_put", full)
    monkeypatch.setattr(hf_folder.FolderWriter, "_put", full)
    with pytest.raises(CheckpointError, match=r"No space left.*; free up space"):
        engine.save_checkpoint(folder.parent, 6)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    with pytest.raises(CheckpointError, match=r"No space left.*; free up space"):
        export_hf(engine, folder.parent / "hf")
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def rank_restoring(folder: str, root: str) -> str:
    engine = build(folder, {"dp_shard": 2})
    manager = CheckpointManager(engine, root, background=False)
    manager.save(5, {})
    if engine.topology.rank == 1:

        def fail(*_: Any) -> None:
            raise MemoryError("no memory for the slices")

        LocalStore.read_into = fail  # type: ignore[assignment,method-assign]  # in this rank's own process
    try:
        manager.restore_last()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_an_error_that_is_no_damage_is_raised_on_all_ranks(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    errors = run_ranks(rank_restoring, 2, folder, str(tmp_path / "checkpoints"))
    assert errors == [
        "RemoteError: rank 1 failed: MemoryError: no memory for the slices",
        "MemoryError: no memory for the slices",
    ]


@pytest.mark.parametrize("failing", ["rotation", "removal"])
def test_what_fails_after_the_manifest_leaves_the_new_checkpoint(
    failing: str, checkpoint: tuple[BaseEngine, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = checkpoint
    root = open_store(f"memory://{tmp_path.name}/{failing}")

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with engine.live_snapshot(5) as snapshot:
        write_snapshot(snapshot, root, engine.topology, engine.topology.host)
        with monkeypatch.context() as patch:
            if failing == "removal":
                # As if the store failed while the older attempt at this step is deleted, after its manifest is.
                assert isinstance(root, RemoteStore)
                patch.setattr(root.system, "find", fail)
            with pytest.raises(CheckpointError, match="Input/output error"):
                write_snapshot(snapshot, root, engine.topology, engine.topology.host, fail)
    whole, _ = latest(root)
    assert whole is not None
    assert whole.store.name == "step-00000005+1"


def test_export_loads_in_plain_transformers(checkpoint: tuple[BaseEngine, Path]) -> None:
    from transformers import AutoModelForCausalLM

    engine, folder = checkpoint
    out = export_hf(engine, folder.parent / "hf", shard_bytes=100_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    export_hf(engine, out, shard_bytes=100_000)  # again, over itself
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with engine.named_weights() as stream:
        for name, value in stream:
            assert torch.equal(model.state_dict()[name], value)
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted([folder.name, "hf"])
    manifest = CheckpointManifest.read(LocalStore(folder))
    assert set(manifest.names) == {n for n, _ in model.named_parameters()}
    shutil.rmtree(out)


def test_safetensors_alone_reads_a_checkpoint(checkpoint: tuple[BaseEngine, Path]) -> None:
    engine, folder = checkpoint
    found = stored(folder)
    with engine.named_weights() as stream:
        for name, value in stream:
            assert torch.equal(found[name, "value"], value)
            assert {kind for n, kind in found if n == name} == {"value", "exp_avg", "exp_avg_sq"}


def test_random_state_round_trips_through_json() -> None:
    state = json.loads(json.dumps(rng_state()))
    import numpy as np

    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random(), random.gauss(0, 1)]

    first = draw()
    second = draw()
    restore_rng(state)
    assert draw() == first
    assert draw() == second


@settings(deadline=None, max_examples=100)
@given(shape=st.lists(st.integers(1, 6), min_size=0, max_size=3), data=st.data())
def test_covers_means_exactly_once(shape: list[int], data: st.DataObject) -> None:
    boxes = [whole(shape)]
    for _ in range(data.draw(st.integers(0, 5))):  # cut a box in two, again and again
        at = data.draw(st.integers(0, len(boxes) - 1))
        box = boxes[at]
        axes = [d for d, n in enumerate(box.length) if n > 1]
        if not axes:
            continue
        d = data.draw(st.sampled_from(axes))
        cut = data.draw(st.integers(1, box.length[d] - 1))
        left = TensorSlice(box.offset, (*box.length[:d], cut, *box.length[d + 1 :]))
        right = TensorSlice(
            (*box.offset[:d], box.offset[d] + cut, *box.offset[d + 1 :]),
            (*box.length[:d], box.length[d] - cut, *box.length[d + 1 :]),
        )
        boxes[at : at + 1] = [left, right]
    assert covers(shape, data.draw(st.permutations(boxes)))
    assert not covers(shape, boxes[1:])
    assert not covers(shape, [*boxes, boxes[0]])
    assert all(intersect(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])


def test_covers_sees_an_overlap_that_a_gap_makes_up_for() -> None:
    assert not covers((4,), [TensorSlice((0,), (2,)), TensorSlice((1,), (2,))])
    assert not covers((2, 4), [TensorSlice((0, 0), (2, 2)), TensorSlice((0, 1), (2, 2))])
    assert not covers((2,), [TensorSlice((0,), (1,)), TensorSlice((2,), (1,))])


VALUES: list[Any] = [None, True, -1, 0, 3, 2**63, 1.5, "x", "", [], ["x"], {}, {"x": 1}]


def leaves(node: Any, at: tuple[Any, ...] = ()) -> Any:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items)[:6]:
        yield (*at, key)
        yield from leaves(value, (*at, key))


@pytest.mark.slow
def test_whatever_a_manifest_says_nothing_but_a_checkpoint_error_comes_of_it(checkpoint: tuple[BaseEngine, Path]) -> None:
    from drivetrain.checkpoint_tools import inspect, merge, verify

    engine, folder = checkpoint
    text = (folder / MANIFEST).read_text()
    places = [p for p in leaves(json.loads(text)) if not (p[0] == "ranks" and len(p) > 5)]
    rng = random.Random(0)
    refused = 0
    with engine.named_weights() as stream:
        before = {name: value.clone() for name, value in stream}
    for _ in range(150):
        data = json.loads(text)
        *way, last = rng.choice(places)
        node = data
        for key in way:
            node = node[key]
        node[last] = rng.choice(VALUES)
        write_manifest(LocalStore(folder), data)
        for look in (engine.load_checkpoint, inspect, verify, lambda f: merge(f, folder.parent / "out")):
            try:
                look(folder)
            except CheckpointError:
                refused += 1
    assert refused > 100
    with engine.named_weights() as stream:
        assert all(torch.equal(before[name], value) for name, value in stream)
