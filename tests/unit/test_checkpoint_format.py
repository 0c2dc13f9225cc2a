"""The format by itself: files read in checked parts, hostile files refused, stores of both kinds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from drivetrain.checkpoint_tools.commands import main as checkpoint_command
from drivetrain.engine.checkpoint.hf_folder import atomic_folder
from drivetrain.engine.checkpoint.machine import describe_machine, warn_if_machine_differs
from drivetrain.engine.checkpoint.manifest import CHECKSUM, CheckpointManifest, write_manifest
from drivetrain.engine.checkpoint.retention import find_checkpoint, folder_name, latest, recover, rotate, steps
from drivetrain.engine.checkpoint.safetensors_io import (
    CHUNK_BYTES,
    RAW,
    CheckedFile,
    DamagedError,
    TensorFiles,
    TensorWriter,
    digests_of,
)
from drivetrain.engine.checkpoint.storage import MANIFEST, LocalStore, Store, open_store
from drivetrain.engine.checkpoint.tensor_slices import TensorSlice
from drivetrain.engine.errors import CheckpointError

SHAPE = (6, 5, 4)


def write(store: Store, number: int = 3, **changes: Any) -> None:
    """A checkpoint of one tensor in two boxes, cut by columns."""
    value = np.arange(120, dtype=np.float32).reshape(SHAPE)
    boxes, files = [], {}
    made = store.begin(folder_name(number))
    for rank, (first, width) in enumerate(((0, 2), (2, 3))):
        name, key = f"rank-{rank:05d}.safetensors", f"value/w@0.{first}.0"
        with made.create(name) as file:
            writer = TensorWriter(file, {key: ("F32", (6, width, 4))})
            writer.write(key, memoryview(value[:, first : first + width].tobytes()))
            files[name] = writer.finish()
        boxes.append({"offset": [0, first, 0], "length": [6, width, 4], "file": name, "key": key})
    made.write("model/config.json", b"{}")
    files["model/config.json"] = {"bytes": 2, "xxh3": digests_of(b"{}")}
    data: dict[str, Any] = {
        "format": 1,
        "step": number,
        "backend": "fsdp",
        "parallel": {},
        "world_size": 2,
        "engine": {"precision": {"params": "float32"}},
        "model": {},
        "optim": None,
        "schedule": {"step": number},
        "optimizer": None,
        "extra": {},
        "files": files,
        "ranks": [{}, {}],
        "tensors": {"w": {"shape": list(SHAPE), "kinds": {"value": {"dtype": "F32", "boxes": boxes}}}},
    }
    write_manifest(made, {**data, **changes})
    store.commit(made, folder_name(number))


def value_of(manifest: CheckpointManifest) -> Any:
    files = manifest.tensor_files()
    found = np.full(SHAPE, 7, RAW[4])
    for box in manifest.check_cover(files, "w", "value").boxes:
        files.read(box.file, box.key, TensorSlice((0, 0, 0), box.box.length), found[box.box.within((0, 0, 0))])
    return found.view(np.float32)


# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalStore, bytes]:
    folder = tmp_path_factory.mktemp("big")
    data = np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES + 1000, dtype=np.uint8).tobytes()
    (folder / "file").write_bytes(data)
    return LocalStore(folder), data


@settings(deadline=None, max_examples=60)
@given(ends=st.tuples(st.integers(0, 2 * CHUNK_BYTES + 1000), st.integers(0, 2 * CHUNK_BYTES + 1000)))
@pytest.mark.parametrize("checked", [True, False])
def test_any_range_of_a_file_is_read(big: tuple[LocalStore, bytes], checked: bool, ends: tuple[int, int]) -> None:
    store, data = big
    start, end = sorted(ends)
    file = CheckedFile(store, "file", len(data), digests_of(data) if checked else None)
    for _ in range(2):  # the second time its chunks are known to be good
        out = bytearray(end - start)
        file.read_into(start, memoryview(out))
        assert bytes(out) == data[start:end]


def test_damage_shows_where_it_is_read_and_nowhere_else(big: tuple[LocalStore, bytes], tmp_path: Path) -> None:
    _, data = big
    spoiled = bytearray(data)
    spoiled[CHUNK_BYTES + 17] ^= 1
    (tmp_path / "file").write_bytes(spoiled)
    file = CheckedFile(LocalStore(tmp_path), "file", len(data), digests_of(data))
    out = bytearray(100)
    for start in (0, CHUNK_BYTES - 100, 2 * CHUNK_BYTES, len(data) - 100):
        file.read_into(start, memoryview(out))
    for start in (CHUNK_BYTES - 50, CHUNK_BYTES, 2 * CHUNK_BYTES - 100):
        with pytest.raises(DamagedError, match=f"bytes starting at {CHUNK_BYTES} do not match"):
            file.read_into(start, memoryview(out))
    with pytest.raises(DamagedError):
        file.read_into(0, memoryview(bytearray(len(data))))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_part_of_a_tensor_is_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16, np.float32, np.int64]))
    value = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    folder = tmp_path_factory.mktemp("parts")
    save_file({"other": np.ones(3, np.uint8), "w": value}, folder / "a.safetensors")
    offset, length = [], []
    for n in shape:
        first = data.draw(st.integers(0, n - 1))
        offset.append(first)
        length.append(data.draw(st.integers(0, n - first)))
    part = TensorSlice(tuple(offset), tuple(length))
    room = np.zeros((*part.length, 2), RAW[value.itemsize])
    out = room[..., 0] if data.draw(st.booleans()) else room[..., 0].copy()
    TensorFiles(LocalStore(folder)).read("a.safetensors", "w", part, out)
    assert np.array_equal(
        out.view(dtype) if out.flags.c_contiguous else out.copy().view(dtype), value[part.within((0,) * len(shape))]
    )


def test_what_is_written_safetensors_reads(tmp_path: Path) -> None:
    write(LocalStore(tmp_path))
    found = load_file(tmp_path / "step-00000003" / "rank-00001.safetensors")
    assert found["value/w@0.2.0"].shape == (6, 3, 4)
    assert np.array_equal(value_of(find_checkpoint(tmp_path)), np.arange(120, dtype=np.float32).reshape(SHAPE))


# ---- hostile and damaged files -----------------------------------------------------------------------------------

BOX = {"offset": [0, 0, 0], "length": [6, 2, 4], "file": "rank-00000.safetensors", "key": "value/w@0.0.0"}


def tensors(shape: list[Any], *boxes: dict[str, Any], dtype: str = "F32") -> dict[str, Any]:
    return {"w": {"shape": shape, "kinds": {"value": {"dtype": dtype, "boxes": list(boxes)}}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "has format 2; this version reads format 1"),
        ({"step": -1}, "-1 is not a count"),
        ({"step": True}, "True is not a count"),
        ({"step": 10.5}, "10.5 is not a count"),
        ({"ranks": []}, "world_size is 2, but there is state for 0 ranks"),
        ({"extra": []}, "extra is list"),
        ({"schedule": {}}, "malformed: KeyError 'step'"),
        ({"tensors": tensors([6, -5, 4], BOX)}, "-5 is not a count"),
        ({"tensors": tensors([6, 5, 4], {**BOX, "offset": [1, 0, 0]})}, "does not fit into the tensor"),
        ({"tensors": tensors([6, 5, 4], {**BOX, "offset": [0]})}, "does not fit into the tensor|argument"),
        ({"tensors": tensors([6, 5, 4], {**BOX, "file": "../../etc/passwd"})}, "does not list"),
        ({"tensors": tensors([6, 5, 4], BOX, dtype="PICKLE")}, "unknown dtype 'PICKLE'"),
        ({"tensors": {"w": 5}}, "malformed"),
        ({"files": {"/etc/passwd": {"bytes": 1, "xxh3": []}}}, "not a plain name"),
        ({"files": {"..": {"bytes": 1, "xxh3": []}}}, "not a plain name"),
        ({"files": {"model/../x": {"bytes": 1, "xxh3": []}}}, "not a plain name"),
        ({"files": {"a\0b": {"bytes": 1, "xxh3": []}}}, "not a plain name"),
        ({"files": {"rank-00000.safetensors": {"bytes": 10**18, "xxh3": []}}}, "the manifest says 1000000000000000000"),
        ({"files": {"model/config.json": {"bytes": 2, "xxh3": []}}}, "0 checksums for 2 bytes"),
        ({"files": {"model/config.json": {"bytes": 2, "xxh3": [7]}}}, "1 checksums"),
    ],
)
def test_a_manifest_that_lies_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(LocalStore(tmp_path), **changes)
    with pytest.raises(CheckpointError, match=message):
        CheckpointManifest.read(LocalStore(tmp_path / "step-00000003"))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        # A tensor of exabytes costs nothing until somebody believes it.
        (tensors([2**40, 5, 4], {**BOX, "length": [2**40, 5, 4]}), r"has F32 \[6, 2, 4\] under"),
        (tensors([6, 2, 4], BOX, BOX), "do not cover"),
        (tensors([6, 3, 4], BOX), "do not cover"),
        (tensors([6, 2, 4], {**BOX, "key": "nothing"}), "has no tensor 'nothing'"),
        (tensors([6, 2, 4], BOX, dtype="BF16"), "has F32"),
    ],
)
def test_boxes_that_lie_are_refused(found: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(LocalStore(tmp_path), tensors=found)
    manifest = CheckpointManifest.read(LocalStore(tmp_path / "step-00000003"))
    with pytest.raises(CheckpointError, match=message):
        manifest.check_cover(manifest.tensor_files(), "w", "value")


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc", "it has 3 bytes"),
        (header(b"{}", 2**62), "a header of"),
        (header(b"[]"), "cannot be read"),
        (header(b"{"), "cannot be read"),
        (header(b"[" * 100_000), "cannot be read"),
        (header(json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()), "takes"),
        (header(json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode()), "is not a count"),
        (header(json.dumps({"w": {"dtype": "OBJ", "shape": [1], "data_offsets": [0, 4]}}).encode()), "cannot be read"),
        (header(json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()), "takes 4 bytes"),
        (b"\x80\x05\x95" + b"." * 100, "a header of"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        TensorFiles(LocalStore(tmp_path)).arrays("a.safetensors")


@pytest.mark.parametrize("place", ["rank-00000.safetensors", "model", MANIFEST])
def test_links_lead_nowhere(place: str, tmp_path: Path) -> None:
    write(LocalStore(tmp_path))
    path = tmp_path / "step-00000003" / place
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match=r"is missing|has no manifest"):
        CheckpointManifest.read(LocalStore(tmp_path / "step-00000003"))


@pytest.mark.parametrize("file", [MANIFEST, CHECKSUM])
@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: b"", lambda d: bytes([d[0] ^ 1]) + d[1:], None])
def test_a_damaged_manifest_is_passed_over(file: str, change: Any, tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    write(root, 3)
    write(root, 4)
    path = tmp_path / "step-00000004" / file
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    manifest, skipped = latest(root)
    assert manifest is not None
    assert manifest.step == 3
    assert "step-00000004" in skipped[0]


def test_damaged_model_files_are_found(tmp_path: Path) -> None:
    write(LocalStore(tmp_path))
    manifest = find_checkpoint(tmp_path)
    assert dict(manifest.model_files()) == {"config.json": b"{}"}
    (tmp_path / "step-00000003" / "model" / "config.json").write_bytes(b"[]")
    with pytest.raises(DamagedError, match=r"config.json does not match"):
        dict(manifest.model_files())


# ---- stores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "memory", "file"])
def test_a_store_keeps_what_is_complete(kind: str, tmp_path: Path) -> None:
    url = {"folder": str(tmp_path / "c"), "memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/c"}[kind]
    root = open_store(url)
    assert steps(root) == []
    write(root, 3)
    write(root, 4)
    write(root, 4)  # again, over itself
    # Where there is no rename, a second attempt stands beside the first until it is complete.
    newest = "step-00000004" if kind != "memory" else "step-00000004+1"
    assert steps(root) == ["step-00000003", newest]
    found = find_checkpoint(url)
    assert found.step == 4
    assert np.array_equal(value_of(found), np.arange(120, dtype=np.float32).reshape(SHAPE))
    # A save that was cut off: it is passed over, and swept once nobody saves.
    made = root.begin(folder_name(5))
    made.write("rank-00000.safetensors", b"half")
    assert latest(root)[0].step == 4  # type: ignore[union-attr]
    root.sweep(deleted_only=True)
    assert made.size("rank-00000.safetensors") == 4
    root.sweep()
    assert made.size("rank-00000.safetensors") is None
    root.remove(newest)
    assert steps(root) == ["step-00000003"]


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nowhere://x cannot be opened"):
        open_store("nowhere://x")


def test_a_folder_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"checkpoints has no complete checkpoint: .*has no manifest.json"):
        find_checkpoint(tmp_path)


def test_a_second_attempt_that_fails_leaves_the_first(tmp_path: Path) -> None:
    root = open_store(f"memory://{tmp_path.name}/again")
    write(root, 5)
    made = root.begin(folder_name(5))
    made.write("rank-00000.safetensors", b"half")
    found, skipped = latest(root)
    assert found is not None
    assert (found.step, found.store.name, len(skipped)) == (5, "step-00000005", 1)
    for attempt in (2, 3, 4):
        write(root, 5)
        assert steps(root) == [f"step-00000005+{attempt}"]


@pytest.mark.parametrize("whole", [".tmp-", ".del-"])
def test_between_two_renames_a_checkpoint_is_taken_back(whole: str, tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    write(root, 5)
    # As a kill leaves it while a step is saved a second time: no folder has the step's name.
    (tmp_path / "step-00000005").rename(tmp_path / f"{whole}step-00000005-0badcafe")
    (tmp_path / ".tmp-step-00000006-0badcafe").mkdir()
    recover(root)
    root.sweep()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    assert find_checkpoint(tmp_path).step == 5


def test_names_that_look_like_a_checkpoints_are_left_alone(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    for number in range(1, 5):
        write(root, number)
    for name in ("step-00000002.bak", "step-old", "step-1", "my-step-00000009"):
        (tmp_path / name).mkdir()
    assert steps(root) == [folder_name(n) for n in range(1, 5)]
    rotate(root, 1, newest=4)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == sorted(["my-step-00000009", "step-00000002.bak", "step-00000004", "step-1", "step-old"])
    write(root, 10**8)
    assert latest(root)[0].step == 10**8  # type: ignore[union-attr]


def test_damaged_folders_do_not_count_as_kept(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    for number in range(1, 6):
        write(root, number)
    (tmp_path / "step-00000004" / MANIFEST).unlink()
    rotate(root, 2, newest=5, damaged={"step-00000003"})
    # Two good ones, and the damaged ones that are younger than the older of them.
    assert steps(root) == [folder_name(n) for n in (2, 3, 4, 5)]


def test_a_runs_name_is_no_pattern(tmp_path: Path) -> None:
    for name in ("runA", "run*", "run[1]"):
        write(open_store(f"memory://{tmp_path.name}/{name}"), 1)
    for name in ("run*", "run[1]"):
        open_store(f"memory://{tmp_path.name}/{name}").remove(folder_name(1))
    left = {name: steps(open_store(f"memory://{tmp_path.name}/{name}")) for name in ("runA", "run*", "run[1]")}
    assert left == {"runA": ["step-00000001"], "run*": [], "run[1]": []}


def test_an_exports_name_is_no_pattern(tmp_path: Path) -> None:
    # Another export that is being written, and what a killed one of this name left behind.
    for name in ("exp1", "exp?"):
        (tmp_path / f".tmp-{name}-0badcafe").mkdir()
    with atomic_folder(tmp_path / "exp?") as folder:
        (folder / "config.json").write_text("{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-exp1-0badcafe", "exp?"]


def test_an_empty_tensor_costs_nothing(tmp_path: Path) -> None:
    write(LocalStore(tmp_path), tensors=tensors([2**30, 0, 4]))
    assert verify_or_refuse(tmp_path)
    for shape in ([2**60, 0], [1, 0, 2**63], [2**40, 2**40]):
        write(LocalStore(tmp_path), tensors=tensors(shape))
        with pytest.raises(CheckpointError, match="is not a shape that a tensor can have"):
            find_checkpoint(tmp_path)


def verify_or_refuse(where: Path) -> bool:
    from drivetrain.checkpoint_tools import verify

    return verify(where).tensors == 1


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/pytorch_model.bin", "model/.hidden"])
def test_model_files_are_no_weights(name: str, tmp_path: Path) -> None:
    write(LocalStore(tmp_path))
    (tmp_path / "step-00000003" / name).write_bytes(b"{}")
    manifest = find_checkpoint(tmp_path)
    data = {**manifest.data, "files": {**manifest.data["files"], name: {"bytes": 2, "xxh3": digests_of(b"{}")}}}
    write_manifest(LocalStore(tmp_path / "step-00000003"), data)
    with pytest.raises(CheckpointError, match="is not a file that belongs next to"):
        dict(find_checkpoint(tmp_path).model_files())


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ({}, "with threads 64 instead of"),
        ({"torch": "1.0"}, "torch 1.0 instead of"),
        (None, ""),
        ("a word", ""),
    ],
)
def test_another_machine_is_told(stored: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    here = describe_machine()
    warn_if_machine_differs("step-1", here)
    assert not caplog.records
    warn_if_machine_differs("step-1", {**here, "threads": 64, **stored} if isinstance(stored, dict) else stored)
    assert [told in record.getMessage() and "not to the bit" in record.getMessage() for record in caplog.records] == [
        True
    ] * bool(told)


def test_merge_names_what_a_call_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty, model = (tmp_path / name for name in ("run", "empty", "model"))
    for folder in (run, empty, model):
        folder.mkdir()
    for file in (run / "config.yaml", run / "metrics.jsonl", model / "config.json"):
        file.touch()
    output = tmp_path / "out"
    example = f"; for example: drivetrain merge runs/sft {output}"
    way_out = f"; give the folder of a run or of a checkpoint{example}"
    for words, message in (
        (
            [],
            "drivetrain merge needs a CHECKPOINT to read and an OUTPUT, the folder to write; for example: drivetrain merge runs/sft sft-hf",
        ),
        (
            [f"{run}"],
            f"drivetrain merge {run} needs an OUTPUT, the folder to write; for example: drivetrain merge {run} run-hf",
        ),
        ([f"{tmp_path}/no", f"{output}"], f"CHECKPOINT={tmp_path}/no: {tmp_path}/no does not exist{way_out}"),
        ([f"{run}/config.yaml", f"{output}"], f"CHECKPOINT={run}/config.yaml: {run}/config.yaml is a file{way_out}"),
        (
            [f"{empty}", f"{output}"],
            f"CHECKPOINT={empty}: {empty} is not a complete checkpoint: it has no manifest.json{way_out}",
        ),
        ([f"{model}", f"{output}"], f"CHECKPOINT={model}: {model} is a Hugging Face folder, not a checkpoint{way_out}"),
        (
            [f"{run}", f"{output}"],
            f"CHECKPOINT={run}: {run} is a run that has not saved a checkpoint; start it again, with trainer.save_every for more "
            f"frequent ones{example}",
        ),
    ):
        assert checkpoint_command("merge", words) == (1 if len(words) == 2 else 2)
        assert capsys.readouterr().err == f"error: {message}\n"
    assert not output.exists()
