"""Checkpoints of a run, which consist of the actor's and the critic's. The actor's is written last and marks the checkpoint as complete."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.checkpoint.manifest import CheckpointManifest
from ...engine.checkpoint.retention import find_checkpoint, folder_name, newest_first, recover, rotate, step_of, steps
from ...engine.checkpoint.safetensors_io import DamagedError
from ...engine.checkpoint.storage import Store, open_store
from ...engine.errors import CheckpointError, DrivetrainError
from ...engine.hf.model_path import fingerprint
from ...workers.groups.base import WorkerGroup
from ..config.rl import RLConfig
from ..loop.checkpoint_checks import check_fingerprint, check_method, check_no_later
from ..loop.ranks import TrainerRanks
from .kept_completions import digest_of

log = logging.getLogger(__name__)

METHOD = "rl"
COMPLETIONS = "completions.safetensors"
"""The file of completions that are pending for training."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A loaded checkpoint.

    Args:
        folder: Its folder.
        step: The last completed step.
        extra: The state of the trainer.
        completions: Completions that were pending for training, as file contents; None if there were none.
    """

    folder: str
    step: int
    extra: Mapping[str, Any]
    completions: bytes | None = None


class RunCheckpoints:
    """The checkpoints of a run.

    Args:
        config: The run's settings.
        group: The group of workers.
        ranks: The processes of the controller.
    """

    def __init__(self, config: RLConfig, group: WorkerGroup, ranks: TrainerRanks) -> None:
        self._config, self._group, self._ranks = config, group, ranks
        where = config.trainer.checkpoint_dir or str(Path(config.trainer.output_dir) / "checkpoints")
        # Workers of a cluster may have another working directory.
        self.root = where if "://" in where else str(Path(where).absolute())

    @property
    def _has_critic(self) -> bool:
        return "critic" in self._group.roles

    @staticmethod
    def _critic_root(root: str) -> str:
        return f"{root.rstrip('/')}/critic"

    @staticmethod
    def _completions_store(root: str) -> Store:
        return open_store(f"{root.rstrip('/')}/completions")

    def save(self, step: int, extra: Mapping[str, Any], *, best: int | None, completions: bytes | None = None) -> None:
        """Write a checkpoint, and delete old ones.

        Args:
            step: The last completed step.
            extra: The state of the trainer.
            completions: Completions that are pending for training, as file contents; None if there are none.
            best: The step of the best evaluation so far, whose checkpoint is kept.
        """
        trainer = self._config.trainer
        roots = [self.root]
        if self._has_critic:
            # Write the critic first: resuming looks for the actor's checkpoint, which is complete only with the critic's.
            roots.insert(0, self._critic_root(self.root))
            self._group["critic"].save_checkpoint(roots[0], step, {})
        store = self._completions_store(self.root)
        # Pending completions come before the actor's checkpoint too, which names their digest. With the
        # digest in the name of the folder, saving a step again leaves the file of its earlier
        # checkpoint intact until the new one is complete.
        if completions is not None:
            data, digest = completions, digest_of(completions)
            self._ranks.run_on_rank0(lambda: store.child(_completions_folder(step, digest)).write(COMPLETIONS, data))
            extra = {**extra, "completions": digest}
        self._group["actor"].save_checkpoint(self.root, step, {"method": METHOD, "config": asdict(self._config), **extra})

        def delete_old() -> None:
            # Delete the actor's first: a critic's checkpoint alone does not count, but an actor's alone is incomplete.
            for root in reversed(roots):
                rotate(
                    open_store(root),
                    trainer.keep_last,
                    newest=step,
                    keep_every=trainer.keep_every,
                    keep=() if best is None else (best,),
                )
            # If a step is saved again, its completions may differ.
            # The digest of this checkpoint's completions; other folders of the step are of an earlier save.
            written = extra.get("completions")
            left = {(step_of(name) or (0, 0))[0] for name in steps(open_store(self.root))} - {step}
            for folder in store.folders():
                number, _, name = folder.partition("-")
                if number.isdigit() and int(number) not in left and (int(number) != step or name != written):
                    store.remove(folder)

        self._ranks.run_on_rank0(delete_old)

    def resume(self) -> Restored | None:
        """Load the checkpoint that `trainer.resume` names; None if the run starts from the beginning.

        Raises:
            CheckpointError: The checkpoint cannot be used, or all of them are damaged.
            ConfigError: The folder has later checkpoints than the one that the run starts from.
        """
        setting = self._config.trainer.resume
        # Each round skips the checkpoints that earlier rounds have found damaged.
        damaged: list[str] = []
        while True:
            checkpoint = self._ranks.run_on_rank0(lambda: self._find(setting, damaged))
            if checkpoint is None:
                return None
            folder, root, step, extra = checkpoint
            try:
                completions = self._completions_of(root, step, extra)
                self.load(folder, f"{self._critic_root(root)}/{Path(folder).name}")
            except DrivetrainError as e:
                # Damage is detected only when the bytes are read. All processes of the controller get this error.
                # The error of another process arrives as text, so look for the name of its class.
                if setting != "auto" or "DamagedError" not in f"{type(e).__name__} {e} {e.__cause__!r}":
                    raise
                log.warning("checkpoint skipped: %s", e)
                damaged.append(Path(folder).name)
                continue
            log.info("resumed from %s, after step %d", folder, step)
            return Restored(folder=folder, step=step, extra=extra, completions=completions)

    def _completions_of(self, root: str, step: int, extra: Mapping[str, Any]) -> bytes | None:
        """Return the completions that belong to a checkpoint.

        Raises:
            DamagedError: The file is missing, or its digest does not match.
        """
        digest = extra.get("completions")
        if digest is None:
            return None
        store = self._completions_store(root).child(_completions_folder(step, digest))
        try:
            data = store.read(COMPLETIONS)
        except CheckpointError as e:
            raise DamagedError(f"{store}/{COMPLETIONS} cannot be used: {e}") from e
        if digest_of(data) != digest:
            raise DamagedError(f"{store}/{COMPLETIONS} cannot be used: its contents do not match its digest")
        return data

    def steps(self) -> set[int]:
        """Return the steps that have a checkpoint in the folder of this run."""
        names = self._ranks.run_on_rank0(lambda: steps(open_store(self.root)))
        return {(step_of(name) or (0, 0))[0] for name in names}

    def load(self, actor: str, critic: str) -> None:
        """Load checkpoints of the actor and, if there is one, of the critic."""
        self._group["actor"].load_checkpoint(actor)
        if self._has_critic:
            self._group["critic"].load_checkpoint(critic)

    def load_step(self, step: int) -> None:
        """Load the actor's checkpoint of a step.

        Raises:
            CheckpointError: It does not exist.
        """
        self._group["actor"].load_checkpoint(f"{self.root.rstrip('/')}/{folder_name(step)}")

    def _find(self, setting: str, damaged: Collection[str] = ()) -> tuple[str, str, int, Mapping[str, Any]] | None:
        """Return the folder of the checkpoint to start from, its parent folder, its step and the trainer's state."""
        root = open_store(self.root)
        # A killed run may have left a complete checkpoint under its temporary name, and others incomplete.
        for store in (root, open_store(self._critic_root(self.root))):
            recover(store)
            store.sweep()
        present = steps(root)
        manifest: CheckpointManifest | None = None
        if setting == "auto":
            manifest = self._newest(root, damaged)
        elif setting != "none":
            manifest = find_checkpoint(setting)
        step = 0 if manifest is None else int(manifest.data["step"])
        check_no_later(str(root), present, setting, step)
        if manifest is None:
            return None
        folder = str(manifest.store)
        check_method(folder, manifest.data["extra"].get("method", METHOD), METHOD)
        extra = manifest.data["extra"]
        if "data" not in extra:
            raise CheckpointError(
                f"{folder} has no position in the prompts, so it was not saved by a run; give the folder of a run, or one of "
                "its checkpoints"
            )
        actor = self._config.actor.model or self._config.model
        saved_path = manifest.data["model"].get("path")
        check_fingerprint(folder, manifest.data.get("fingerprint"), saved_path, fingerprint(actor.path), actor.path)
        root_of = folder.rpartition("/")[0]
        if self._has_critic and not self._is_complete(f"{self._critic_root(root_of)}/{Path(folder).name}"):
            raise CheckpointError(
                f"{folder} has no checkpoint of a critic beside it ({self._critic_root(root_of)}), but this run trains a critic; it is from a run "
                "without one: set model.path to the model that it exported"
            )
        return folder, root_of, step, extra

    def _newest(self, root: Store, damaged: Collection[str]) -> CheckpointManifest | None:
        skipped = []
        for name, candidate in newest_first(root):
            # Reasons are only logged once an older checkpoint is found; otherwise they are part of the error.
            if name in damaged:
                skipped.append(f"{root}/{name} is damaged")
            elif not isinstance(candidate, CheckpointManifest):
                skipped.append(str(candidate))
            elif self._has_critic and not self._is_complete(f"{self._critic_root(str(root))}/{name}"):
                skipped.append(f"{root}/{name} has no checkpoint of the critic")
            else:
                for reason in skipped:
                    log.warning("checkpoint skipped: %s", reason)
                return candidate
        if skipped:
            raise CheckpointError(
                f"{root} has no undamaged checkpoint ({'; '.join(skipped)}); restore one from a backup, or start over in another folder"
            )
        return None

    @staticmethod
    def _is_complete(folder: str) -> bool:
        try:
            CheckpointManifest.read(open_store(folder))
        except CheckpointError:
            return False
        return True


def _completions_folder(step: int, digest: str) -> str:
    """Return the name of the folder of a step's completions."""
    return f"{step:08d}-{digest}"
