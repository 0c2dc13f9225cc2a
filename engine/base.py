"""BaseEngine: the contract between workers and backends, and the one driver that every backend shares.

A backend subclasses `BaseEngine` and says only what differs (`backend.py`): how a model is built, run, reduced and read out.
What a step means - the global weight, micro-batches, accumulation, clipping, the non-finite policy, modes - stands here once.
"""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .backend import Adapters, Backend
from .checkpoint.load import RestoredState, load_state, restore_random_state
from .checkpoint.save import HostCopies, Snapshot, take_snapshot, write_snapshot
from .checkpoint.storage import open_store
from .config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig
from .errors import BatchError, ConfigError, NonFiniteError
from .hf.model_path import fingerprint
from .loss import Loss, OutputRequest, StepResult
from .lr_schedule import check_optim, learning_rate
from .offload import PARTS, Part, Residency, free_memory
from .packing.batch import PackedBatch
from .parallel.topology import resolve_parallel
from .step import Collected, Objective
from .step_plan import StepPlan, StepPlanner

Mode = Literal["train", "eval", "save"]


class BaseEngine(Backend):
    """A sharded model with an optimizer, driven by packed batches.

    Every public method is collective: all ranks of the engine call it, in the same order.

    Args:
        model: which model.
        engine: layout, precision, budgets.
        optim: None builds an engine that only infers.
        total_steps: of the whole run; needed by schedules that end.
        ranks: the global ranks that make up this engine; all by default.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None = None,
        total_steps: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.model_config, self.config, self.optim_config = model, engine, optim
        self.total_steps = total_steps
        self.step = 0
        """Optimizer steps made, skipped ones left out."""
        self._ranks = ranks
        self._mode: Mode | None = None
        self._residency = Residency(self._tensors)
        self._finite = True
        self._was_deterministic: bool | None = None
        self._files: Mapping[str, bytes] | None = None
        self._model_fingerprint: str | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what can be told from the settings and the model's config: nothing is built and no weight is read. `initialize`
        does so too; a trainer calls this before it works on its data. Not collective.

        Raises:
            ConfigError, ModelError, TopologyError: name the setting and the way out.
        """
        self.capabilities.check(self.config, self.model_config, None if self.optim_config is None else self.optim_config.name)
        self._check_model(self._resolved())

    def _resolved(self) -> ParallelConfig:
        """The layout, resolved where the number of processes is known already."""
        if not dist.is_initialized():
            return self.config.parallel
        return resolve_parallel(self.config.parallel, dist.get_world_size() if self._ranks is None else len(self._ranks))

    def initialize(self) -> Self:
        """Check everything that can be checked, then build. An error of one rank is raised on all."""
        self.capabilities.check(self.config, self.model_config, None if self.optim_config is None else self.optim_config.name)
        if self.optim_config is not None:
            check_optim(self.optim_config, self.total_steps)
        self.topology = self._build_topology(self._ranks)
        try:
            if self.config.deterministic:
                # cuBLAS reads it when it starts, and refuses deterministic products without it.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                self._was_deterministic = torch.are_deterministic_algorithms_enabled()
                torch.use_deterministic_algorithms(True)
            with self.topology.collective_errors():
                self._check_model(self.topology.parallel)
            with self.topology.collective_errors():
                self._build_model()
            with self.topology.collective_errors():
                if self.optim_config is not None:
                    self._build_optimizer(self.optim_config)
            with self.topology.collective_errors():
                self._finish_build()
            self._planner = StepPlanner(self.topology, self.config.micro_batch, self.model_config, self.model_shape)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Free process groups and memory, the device's too. Closing again does nothing."""
        if self._was_deterministic is not None:
            torch.use_deterministic_algorithms(self._was_deterministic)
            self._was_deterministic = None
        self._free()
        self._residency.close()
        if hasattr(self, "topology"):
            free_memory(self.topology.device)
            self.topology.close()
            del self.topology

    # ---- modes and residency -------------------------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[Self]:
        """State on the device and dropout on. Keeps both over several calls."""
        with self._entered("train"):
            yield self

    @contextmanager
    def eval_mode(self) -> Iterator[Self]:
        """Parameters on the device, dropout off, no gradients."""
        with self._entered("eval"), torch.no_grad():
            yield self

    @contextmanager
    def _entered(self, mode: Mode) -> Iterator[None]:
        if self._mode == mode:
            yield
            return
        if self._mode is not None:
            raise ConfigError(f"{mode}_mode() inside {self._mode}_mode(); leave the first before entering the second")
        parts: tuple[Part, ...] = PARTS if mode == "train" else ("params",)
        with self._residency.on_device(parts):
            self._mode = mode
            self._set_training(mode == "train")
            try:
                yield
            finally:
                self._mode = None
                self._set_training(False)

    def to(self, place: str, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        """Move state to `device`, `host` or `disk` (a folder of TMPDIR). A mode brings it to the device and back.

        Raises:
            ConfigError: an unknown place, no room on the disk, or a mode that needs the state is entered.
        """
        if self._mode is not None and place != "device":
            raise ConfigError(
                f"to({place!r}) inside {self._mode}_mode(), which needs the state on the device; leave the mode first"
            )
        chosen = {"params": params, "grads": grads, "optimizer": optimizer}
        self._residency.to(place, tuple(part for part in PARTS if chosen[part]))

    # ---- the driver ----------------------------------------------------------------------------------------------

    def train_batch(self, batch: PackedBatch, loss: Loss, *, plan: StepPlan | None = None) -> StepResult:
        """One optimizer step on a global batch.

        Args:
            batch: this rank's data-parallel share, the same on its context-parallel peers.
            loss: what to minimise.
            plan: of `check_batches` for this batch and this loss, on every rank; made anew by default.

        Raises:
            NonFiniteError: under `engine.non_finite=raise`; the parameters are untouched.
            BatchError: nothing to learn from, or a sequence over the budget.
        """
        self._require_optimizer()
        with self.train_mode():
            self.zero_grad()
            result = self.forward_backward(batch, loss, plan=plan)
            return self.optimizer_step(result)

    def forward_backward(
        self,
        batch: PackedBatch,
        loss: Loss,
        *,
        total_weights: Mapping[str, float] | None = None,
        forward_only: bool = False,
        plan: StepPlan | None = None,
    ) -> StepResult:
        """Loss of a global batch, and its gradient added to what is there.

        Args:
            batch: this rank's data-parallel share.
            loss: what to minimise.
            total_weights: the weights to divide by, when several calls make one step: those of all their batches.
            forward_only: no gradient: an evaluation, dropout off.
            plan: see `train_batch`.
        """
        plan = plan or self._planner.plan(batch, loss, training=not forward_only, total_weights=total_weights)
        objective = Objective(loss, plan, self._aux_coef(), backward=not forward_only)
        with self.eval_mode() if forward_only else self.train_mode():
            try:
                micro_batches = plan.micro_batches(batch, self.topology.device)
                self._run_micro_batches(micro_batches, objective, backward=not forward_only)
                result = objective.finish(self.topology)
            except Exception:
                # Half of a gradient must not wait for the next step.
                self.zero_grad()
                raise
        if not forward_only:
            self._finite = self._finite and math.isfinite(result.loss)
        return result

    def check_batches(self, batches: Iterable[PackedBatch], count: int, loss: Loss) -> list[StepPlan]:
        """Refuse what `train_batch` would refuse of any of these batches, before a first step is made of them. Collective.

        Args:
            batches: this rank's share of each step; one at a time is held.
            count: how many they are, equally many on every rank.
            loss: of all of them.

        Returns:
            how each is worked on, for `train_batch`.

        Raises:
            BatchError: see `train_batch`.
        """
        return self._planner.plan_all(batches, count, loss)

    def warn_of_positions(self, longest: int, which: str) -> None:
        """See `StepPlanner.warn_of_positions`."""
        self._planner.warn_of_positions(longest, which)

    def infer_batch(
        self, batch: PackedBatch, outputs: OutputRequest, *, tokens: Tensor | None = None, as_in_training: bool = False
    ) -> dict[str, Tensor]:
        """Per-token outputs without gradients, dropout off.

        Args:
            batch: this rank's data-parallel share.
            outputs: which numbers.
            tokens: `[T]` bool, of which tokens; by default those with a label, or all when only values are asked for.
            as_in_training: cut the batch into the micro-batches that `train_batch` makes of it, not into those of
                `infer_max_tokens`. Of equal weights in an equal layout, the numbers then differ by no rounding.

        Returns:
            name -> `[T]` in the order of `batch`, on its device; zero where nothing was asked for.
        """
        if tokens is not None and tokens.shape != (batch.num_tokens,):
            raise BatchError(f"tokens is {tuple(tokens.shape)}; it must be [{batch.num_tokens}], one for each token")
        plan = self._planner.plan(batch, None, training=as_in_training, asked=outputs)
        collected = Collected(batch, outputs, tokens, plan)
        with self.eval_mode():
            self._run_micro_batches(plan.micro_batches(batch, self.topology.device), collected, backward=False)
        return collected.result(self.topology)

    def optimizer_step(self, result: StepResult | None = None) -> StepResult:
        """Clip and step the optimizer and the schedule, or leave both out when something is not finite.

        Args:
            result: of `forward_backward`, to be completed.
        """
        optim = self._require_optimizer()
        result = result or StepResult(loss=math.nan, terms={}, metrics={}, weights={})
        with self._residency.on_device(PARTS):
            norm = self._reduce_and_clip(optim.clip_grad_norm)
            lr = learning_rate(self.step, optim, self.total_steps)
            # Both numbers are global, so every rank decides alike.
            finite, self._finite = self._finite and math.isfinite(norm), True
            if finite:
                self._optimizer_step(lr)
                self.lr_step()
                return replace(result, grad_norm=norm, lr=lr)
            self.zero_grad()
        if self.config.non_finite == "raise":
            raise NonFiniteError(
                f"step {self.step + 1}: loss {result.loss:g}, gradient norm {norm:g}; the parameters are as before. Look at "
                "the data and the learning rate, or set engine.non_finite=skip to leave such steps out"
            )
        return replace(result, grad_norm=norm, lr=lr, skipped=True)

    def _require_optimizer(self) -> OptimConfig:
        if self.optim_config is None:
            raise ConfigError("this engine was built without optim: it can infer, not train")
        return self.optim_config

    def zero_grad(self) -> None:
        """Forget the gradients, and what was not finite about them."""
        self._finite = True
        with self._residency.on_device(("grads",)):
            self._zero_grad()

    def lr_step(self) -> None:
        """Advance the schedule by one step."""
        self.step += 1

    def _aux_coef(self) -> float:
        return self.model_config.router_aux_loss_coef or 0.0

    # ---- weights -------------------------------------------------------------------------------------------------

    @contextmanager
    def named_weights(self, *, adapters: Adapters = "folded") -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Stream full tensors under Hugging Face names, one at a time, on every rank.

        Args:
            adapters: `folded` adds adapters into the weights they adapt; `only` yields the adapters, under peft's names.
        """
        with self._residency.on_device(("params",)) as moved:
            stream = self._stream_weights(adapters)
            try:
                # A tensor may be a view of memory that goes back to rest.
                yield ((name, tensor.clone()) for name, tensor in stream) if moved else stream
            finally:
                # A rank that stopped early, or failed, still takes part in what the others are waiting in.
                for _ in stream:
                    pass

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def snapshot(self, step: int, extra: Mapping[str, Any] | None, copies: HostCopies) -> Snapshot:
        """This rank's part of a checkpoint of the state as it is, in copies: it stays what it is while training goes on.

        Args:
            step: its number.
            extra: JSON-able state of the trainer and the loader.
            copies: room for them, kept from one save to the next.
        """
        with self._residency.on_device(PARTS):
            return take_snapshot(step, self._pieces(), self._said(extra), self._model_files, copies)

    @contextmanager
    def live_snapshot(self, step: int, extra: Mapping[str, Any] | None = None) -> Iterator[Snapshot]:
        """The same without copies, of live memory: meanwhile nothing is trained, and nothing leaves the device."""
        if self._mode is not None:
            raise ConfigError(f"live_snapshot() inside {self._mode}_mode(); leave the mode first")
        with self._residency.on_device(PARTS):
            self._mode = "save"
            try:
                yield take_snapshot(step, self._pieces(), self._said(extra), self._model_files, None)
            finally:
                self._mode = None

    def _said(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "backend": self.config.backend,
            "engine": asdict(self.config),
            "model": asdict(self.model_config),
            "fingerprint": self.model_fingerprint,
            "optim": None if self.optim_config is None else asdict(self.optim_config),
            "schedule": {"step": self.step},
            "optimizer": None if self.optim_config is None else self._optimizer_scalars(),
            "extra": dict(extra or {}),
        }

    @property
    def model_fingerprint(self) -> str:
        """Of the model that training began with: a resumed run and a merge of adapters must have that one."""
        if self._model_fingerprint is None:
            self._model_fingerprint = fingerprint(self.model_config.path)
        return self._model_fingerprint

    def _model_files(self) -> Mapping[str, bytes]:
        """Config, generation config and tokenizer, which do not change: read back once from what transformers writes."""
        if self._files is None:
            with tempfile.TemporaryDirectory() as folder:
                self._save_model_files(Path(folder))
                found = sorted(p for p in Path(folder).rglob("*") if p.is_file())
                self._files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}
        return self._files

    def save_checkpoint(self, root: Path | str, step: int, extra: Mapping[str, Any] | None = None) -> str:
        """Write `root/step-XXXXXXXX`, complete or not at all; see `CheckpointManager` for saving in the background.

        Args:
            root: folder of all checkpoints of a run, or its URL.
            step: its number.
            extra: JSON-able state of the trainer and the loader.

        Returns:
            the folder, or its URL.

        Raises:
            CheckpointError: it cannot be written; those saved before are untouched.
        """
        with self.live_snapshot(step, extra) as snapshot:
            return write_snapshot(snapshot, open_store(root), self.topology, self.topology.host)

    def load_checkpoint(self, folder: Path | str, *, verify: bool = True) -> RestoredState:
        """Take over a checkpoint of any layout and engine: each rank reads the slices it needs.

        Args:
            folder: of the checkpoint, or its URL.
            verify: compare what is read with its checksums.

        Raises:
            CheckpointError: incomplete, damaged, or of another model; nothing has been changed then, unless the damage
                shows only while reading.
        """
        optimizer = None if self.optim_config is None else self.optim_config.name
        with self._residency.on_device(PARTS):
            manifest = load_state(
                open_store(folder), topology=self.topology, pieces=self._pieces, optimizer=optimizer, verify=verify
            )
            self._restore_optimizer(None if optimizer is None else manifest.data["optimizer"])
            self.zero_grad()
        self.step = manifest.data["schedule"]["step"]
        same = restore_random_state(manifest, self.topology, self.config.seed, self.step)
        return RestoredState(
            step=manifest.step,
            extra=manifest.data["extra"],
            same_layout=same,
            model=manifest.data["model"].get("path"),
            fingerprint=manifest.data.get("fingerprint"),
        )
