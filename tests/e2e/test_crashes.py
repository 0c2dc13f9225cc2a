"""Whatever happens to a run or to its folder, the last complete checkpoint is found, and nothing else is lost."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from soak import soak

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.checkpoint import save, storage
from drivetrain.engine.checkpoint.manager import CheckpointManager
from drivetrain.engine.checkpoint.manifest import CHECKSUM, write_manifest
from drivetrain.engine.checkpoint.retention import latest, recover
from drivetrain.engine.checkpoint.storage import MANIFEST, LocalStore, RemoteStore, open_store
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import CheckpointError, DrivetrainError
from drivetrain.trainers.sft import main
from helpers.engines import build, steps, weights
from helpers.harness import run_ranks
from helpers.hub import receive
from helpers.runs import losses, make_task, words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "more"), [(8, ("engine.backend=fsdp",)), (5, ("engine.backend=mcore", "engine.parallel.tp=2"))]
)
@pytest.mark.usefixtures("real_commands")
def test_killed_at_random_instants_a_run_goes_on(kills: int, more: tuple[str, ...], tmp_path: Path) -> None:
    done = soak(tmp_path, kills, more=more)
    assert done.kills == kills
    assert 0 < done.of_one < kills
    assert done.during_save > 0
    assert len(done.resumed) > kills // 3


@pytest.fixture
def engine(tmp_path: Path, process_group: None) -> BaseEngine:
    return build(save_tiny_model(tmp_path / "model", "llama"))


class Gate:
    """Holds back the writing of checkpoints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.error: Exception | None = None
        real = save._write_rank

        def held(*args: Any) -> Any:
            self.entered.set()
            assert self.open.wait(20)
            if self.error is not None:
                raise self.error
            return real(*args)

        monkeypatch.setattr(save, "_write_rank", held)


def test_a_background_save_is_of_its_moment(engine: BaseEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(engine, 1)
    want = weights(engine)
    gate = Gate(monkeypatch)
    with CheckpointManager(engine, tmp_path / "c", keep_last=1) as manager:
        manager.save(1, {})
        assert gate.entered.wait(20)
        # The steps go on while it is held back, and change what is no part of it.
        steps(engine, 2)
        assert manager.present() == []
        gate.open.set()
    assert manager.present() == ["step-00000001"]
    engine.load_checkpoint(tmp_path / "c" / "step-00000001")
    got = weights(engine)
    assert all((got[k] == want[k]).all() for k in want)


def test_a_second_save_waits_for_the_first(engine: BaseEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    manager = CheckpointManager(engine, tmp_path / "c")
    manager.save(1, {})
    second = threading.Thread(target=lambda: manager.save(2, {}))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.open.set()
    second.join(20)
    manager.wait()
    assert manager.present() == ["step-00000001", "step-00000002"]


def test_what_went_wrong_in_the_background_is_raised(
    engine: BaseEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.error = OSError(28, "No space left on device")
    gate.open.set()
    manager = CheckpointManager(engine, tmp_path / "c")
    manager.save(1, {})
    with pytest.raises(CheckpointError, match=r"No space left.*Earlier checkpoints are untouched"):
        manager.save(2, {})
    assert manager.failure() is None
    gate.error = None
    manager.save(3, {})
    manager.wait()
    assert manager.present() == ["step-00000003"]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000003"]


def rank_fails_alone(folder: str, root: str) -> list[str]:
    """The second rank's disk is full: both learn of it when they wait."""
    import torch.distributed as dist

    engine = build(folder)
    module: Any = save
    real = module._write_rank

    def full(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    module._write_rank = full
    found = []
    manager = CheckpointManager(engine, root)
    try:
        manager.save(1, {})
        manager.wait()
    except DrivetrainError as e:
        found.append(f"{type(e).__name__}: {e}")
    module._write_rank = real
    manager.save(2, {})
    manager.wait()
    engine.close()
    return found


def test_a_rank_whose_disk_is_full_is_heard_by_all(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    first, second = run_ranks(rank_fails_alone, 2, folder, str(tmp_path / "c"))
    assert "RemoteError: rank 1 failed: CheckpointError" in first[0]
    assert "CheckpointError" in second[0]
    assert "No space left" in second[0]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000002"]


# ---- damage, through the trainer ---------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda c: flip(c / "rank-00000.safetensors"), "do not match their checksum", marks=pytest.mark.slow),
        pytest.param(lambda c: (c / "rank-00000.safetensors").unlink(), "is missing", marks=pytest.mark.slow),
        pytest.param(lambda c: (c / MANIFEST).unlink(), "has no manifest.json", marks=pytest.mark.slow),
        (lambda c: flip(c / MANIFEST), "does not match manifest.xxh3"),
        pytest.param(
            lambda c: [p.unlink() for p in c.iterdir() if p.is_file()], "has no manifest.json", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda c: (c / "rank-00000.safetensors").write_bytes(b"short"),
            "5 bytes; the manifest says",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    damage: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "drivetrain")
    make_task(tmp_path)
    run = words(tmp_path, "trainer.save_every=1", "trainer.keep_last=3", "trainer.max_steps=5", "trainer.loggers=[jsonl]")
    assert main(run) == 0
    want = losses(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    damage(checkpoints / "step-00000005")
    flip(checkpoints / "step-00000004" / "rank-00000.safetensors")
    assert main(run) == 0
    assert message in caplog.text
    assert f"resumed from {checkpoints}/step-00000003, after step 3" in caplog.text
    assert losses(tmp_path / "run") == want


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        flip,
        pytest.param(lambda f: f.write_bytes(b"x"), marks=pytest.mark.slow),
        pytest.param(lambda f: (f.parent / MANIFEST).unlink(), marks=pytest.mark.slow),
    ],
)
def test_nothing_but_damage_ends_a_run(damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_task(tmp_path)
    run = words(tmp_path, "trainer.max_steps=2", "trainer.save_every=1", "trainer.loggers=[jsonl]")
    assert main(run) == 0
    for step in (1, 2):
        damage(tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")
    assert main(run) == 1
    assert "has no undamaged checkpoint" in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == 2
    if damage is not flip:
        return
    # Taken as it is, at one's own risk.
    assert main([*run, "trainer.verify_checksums=false"]) == 0


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_task(tmp_path)
    run = words(tmp_path, "trainer.max_steps=2", "trainer.save_every=1", "trainer.loggers=[jsonl]")
    assert main(run) == 0
    store = LocalStore(tmp_path / "run" / "checkpoints" / "step-00000002")
    write_manifest(store, {**json.loads((store.path / MANIFEST).read_text()), "format": 2})
    assert main([*run, "trainer.max_steps=3"]) == 1
    assert "has format 2; this version reads format 1" in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == 2


def test_a_run_keeps_its_checkpoints_in_an_object_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "drivetrain")
    make_task(tmp_path)
    settings = ["trainer.save_every=1", "trainer.loggers=[jsonl]", f"trainer.checkpoint_dir=memory://{tmp_path.name}"]
    assert main(words(tmp_path, *settings, "trainer.max_steps=4")) == 0
    want = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    elsewhere = [*settings, f"trainer.output_dir={tmp_path / 'elsewhere'}", "trainer.max_steps=6"]
    assert main(words(tmp_path, *elsewhere)) == 0
    assert f"resumed from memory://{tmp_path.name}/step-00000004, after step 4" in caplog.text
    assert len(want) == 4
    assert len(losses(tmp_path / "elsewhere")) == 2
    assert not (tmp_path / "elsewhere" / "checkpoints").exists()


def test_every_nth_checkpoint_stays_and_exports_are_made_on_the_way(tmp_path: Path) -> None:
    from drivetrain.checkpoint_tools import compare, merge

    make_task(tmp_path)
    settings = ["trainer.save_every=1", "trainer.keep_last=1", "trainer.keep_every=3", "trainer.export_hf_every=3"]
    assert main(words(tmp_path, *settings, "trainer.max_steps=7", "trainer.loggers=[jsonl]")) == 0
    root = tmp_path / "run"
    assert sorted(p.name for p in (root / "checkpoints").iterdir()) == [f"step-{n:08d}" for n in (3, 6, 7)]
    assert sorted(p.name for p in (root / "exports").iterdir()) == [f"step-{n:08d}" for n in (3, 6)]
    merge(root / "checkpoints" / "step-00000003", tmp_path / "merged")
    assert compare(root / "exports" / "step-00000003" / "hf", tmp_path / "merged").same
    assert not compare(root / "hf", tmp_path / "merged").same


@pytest.mark.slow
def test_a_save_that_fails_meanwhile_ends_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_task(tmp_path)
    module: Any = save
    real = module._write_rank

    def full(store: Any, *args: Any) -> Any:
        if "step-00000004" in str(store):
            raise OSError(28, "No space left on device")
        return real(store, *args)

    monkeypatch.setattr(module, "_write_rank", full)
    run = words(tmp_path, "trainer.save_every=2", "trainer.max_steps=1000", "trainer.loggers=[jsonl]")
    assert main(run) == 1
    assert "No space left on device" in capsys.readouterr().err
    # Of the step that it failed in, or of the next; not at the end of the run.
    assert 4 <= len(losses(tmp_path / "run")) < 12
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    assert main([*run, "trainer.max_steps=6"]) == 0
    assert len(losses(tmp_path / "run")) == 6


def pushed(task: Path, address: str, repo: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run that pushes its export to a Hub that stands at an address."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(task / "home"), "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_TOKEN", None)
    run = words(task, *more, "trainer.max_steps=1", "trainer.loggers=[jsonl]", f"trainer.push_to_hub={repo}")
    command = [sys.executable, "-m", "drivetrain.trainers.sft", *run]
    return subprocess.run(command, capture_output=True, text=True, env={**environment, **variables}, timeout=100, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), ("model.lora.rank=4",)])
def test_an_export_is_pushed_to_the_hub_when_asked(model: tuple[str, ...], tmp_path: Path) -> None:
    make_task(tmp_path)
    uploaded: dict[str, bytes] = {}
    with receive("org/mine", uploaded) as address:
        done = pushed(tmp_path, address, "org/mine", *model, HF_TOKEN="hf_x")
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / ("adapter" if model else "hf")
    assert uploaded == {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.slow
def test_a_push_that_is_refused_is_an_error(tmp_path: Path) -> None:
    make_task(tmp_path)
    with receive("org/mine", {}) as address:
        without = pushed(tmp_path, address, "org/mine")
        assert without.returncode == 1
        assert "trainer.push_to_hub=org/mine needs a token for the Hub" in without.stderr
        assert not (tmp_path / "run").exists()
        refused = pushed(tmp_path, address, "org/other", HF_TOKEN="hf_x")
    assert refused.returncode == 1
    assert "was exported, but could not be uploaded" in refused.stderr
    assert (tmp_path / "run" / "hf" / "config.json").is_file()


@pytest.mark.slow
def test_a_run_goes_on_by_its_config_with_the_other_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_task(tmp_path)
    assert main(words(tmp_path, "trainer.max_steps=2", "trainer.loggers=[jsonl]")) == 0
    config = f"recipe={tmp_path / 'run' / 'config.yaml'}"
    assert main([config, "engine.backend=mcore", "trainer.max_steps=4"]) == 0
    assert "ignoring engine.options of the recipe's engine" in caplog.text
    assert main([config, "engine.backend=fsdp", "trainer.max_steps=6"]) == 0
    assert len(losses(tmp_path / "run")) == 6


def test_tools_find_checkpoints_where_a_runs_settings_say(tmp_path: Path) -> None:
    from drivetrain.checkpoint_tools import inspect

    make_task(tmp_path)
    elsewhere = tmp_path / "else where"
    run = words(tmp_path, "trainer.max_steps=2", "trainer.loggers=[jsonl]", f"trainer.checkpoint_dir={elsewhere}")
    assert main(run) == 0
    assert inspect(tmp_path / "run").where == f"{elsewhere}/step-00000002"
    (tmp_path / "file").write_text("")
    assert main(words(tmp_path, f"trainer.checkpoint_dir={tmp_path / 'file'}")) == 1


# ---- what a kill cannot show --------------------------------------------------------------------------------------------


class Disk:
    """What a save asks of the disk, in order: files and folders that are made to last, and renames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str, str]] = []
        sync, rename = os.fsync, Path.rename

        def fsync(handle: int) -> None:
            self.events.append(("sync", os.readlink(f"/proc/self/fd/{handle}"), ""))
            sync(handle)

        def renamed(path: Path, target: Path) -> Path:
            self.events.append(("rename", str(path), str(target)))
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", renamed)

    def forgotten(self, final: Path) -> list[str]:
        """What could be lost in a power cut although the folder has its name."""
        (at,) = (i for i, (kind, _, to) in enumerate(self.events) if kind == "rename" and to == str(final))
        made = Path(self.events[at][1])
        before = {path for kind, path, _ in self.events[:at] if kind == "sync"}
        after = {path for kind, path, _ in self.events[at:] if kind == "sync"}
        inside = [made, *(made / p.relative_to(final) for p in final.rglob("*"))]
        return [str(p) for p in inside if str(p) not in before] + [str(p) for p in [final.parent] if str(p) not in after]


def test_files_and_folders_last_before_they_have_their_name(
    engine: BaseEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    engine.save_checkpoint(tmp_path / "c", 1)
    final = tmp_path / "c" / "step-00000001"
    assert len([p for p in final.rglob("*") if p.is_file()]) >= 3
    assert disk.forgotten(final) == []
    # The control: folders that are left to chance.
    monkeypatch.setattr(storage, "fsync_folder", lambda folder: None)
    disk.events.clear()
    engine.save_checkpoint(tmp_path / "c", 2)
    assert {Path(p).name for p in disk.forgotten(tmp_path / "c" / "step-00000002")} >= {"c", "model"}


@pytest.mark.parametrize("fails", [CHECKSUM, MANIFEST])
def test_on_an_object_store_a_manifest_comes_after_its_checksum(
    engine: BaseEngine, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    root = open_store(f"memory://{fails}")
    engine.save_checkpoint(str(root), 1)
    real = RemoteStore.write

    def full(self: RemoteStore, name: str, data: bytes) -> None:
        if name == fails:
            raise OSError(28, "No space left on device")
        real(self, name, data)

    monkeypatch.setattr(RemoteStore, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        engine.save_checkpoint(str(root), 2)
    assert root.child("step-00000002").size(MANIFEST) is None
    assert (root.child("step-00000002").size(CHECKSUM) is None) == (fails == CHECKSUM)
    manifest, _ = latest(root)
    assert manifest is not None
    assert manifest.step == 1


def test_a_step_saved_again_is_there_whenever_its_publication_fails(
    engine: BaseEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, final = LocalStore(tmp_path / "c"), tmp_path / "c" / "step-00000001"
    engine.save_checkpoint(root.path, 1, {"attempt": 1})
    real = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if target == final:
            raise OSError(5, "Input/output error")
        return real(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            engine.save_checkpoint(root.path, 1, {"attempt": 2})
    assert not final.exists()
    recover(root)
    assert engine.load_checkpoint(final).extra == {"attempt": 1}
    engine.save_checkpoint(root.path, 1, {"attempt": 3})
    assert engine.load_checkpoint(final).extra == {"attempt": 3}
    assert [p.name for p in root.path.iterdir()] == ["step-00000001"]
