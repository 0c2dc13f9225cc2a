"""BaseEngine: the interface between workers and backends, and the driver that all backends share.

A backend subclasses `BaseEngine` and implements the methods of `backend.py`: how to build the model, run it, reduce its
gradients and read its weights. The semantics of a step (global weights, micro-batches, accumulation, clipping, the non-finite
policy, modes) are implemented once, in this module.
"""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from .backend import Adapters, Backend, check_adapters
from .checkpoint.full_weights import load_full_weights
from .checkpoint.load import RestoredState, load_state, restore_random_state
from .checkpoint.local_shards import LocalShard
from .checkpoint.save import HostCopies, Snapshot, take_snapshot, write_snapshot
from .checkpoint.storage import open_store
from .config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig, SharePrefixes
from .errors import BatchError, ConfigError, NonFiniteError
from .hf.config import read_config
from .hf.model_path import fingerprint
from .hf.shape import router_aux_coef
from .loss import Loss, OutputRequest, StepResult
from .lr_schedule import learning_rate
from .offload import PARTS, Offloader, StatePart, free_bytes, free_memory
from .ops.expert_loads import ExpertLoads
from .packing.batch import PackedBatch
from .parallel.process_groups import init_distributed
from .parallel.topology import Topology, resolve_parallel
from .registry import other_backends
from .resolve import describe_resolved, resolve_device
from .rope import length_dependent_rope
from .step import LossAccumulator, OutputCollector
from .step_plan import StepPlan, StepPlanner

EngineMode = Literal["train", "eval", "save"]


class BaseEngine(Backend):
    """A sharded model with an optimizer that trains and infers on packed batches.

    Public methods are collective unless stated otherwise: all ranks of the engine must call them in the same order.

    Args:
        model: The model settings.
        engine: The engine settings: backend, layout, precision, token budgets.
        optim: The optimizer settings; None for an engine that only runs inference.
        total_steps: The number of optimizer steps of the run; required by schedules that decay over a fixed number of steps.
        ranks: The global ranks that make up this engine; all ranks if None.
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
        # Megatron layers are never compiled. On a CPU, compiled layers are slower than eager ones.
        cuda, compiler = torch.cuda.is_available(), find_spec("triton") is not None
        self.model_config, self.optim_config = model, optim
        can_compile = self.capabilities.compile and compiler and not model.max_adapters
        self.config = resolve_device(engine, cuda=cuda, can_compile=can_compile)
        """The settings of this engine; `auto` values are resolved by `initialize`."""
        self.memory_estimate = ""
        """One line about the memory estimate that resolved `auto`; empty if nothing had to be resolved."""
        self.total_steps = total_steps
        self.step = 0
        """The number of optimizer steps so far, not counting skipped ones."""
        self._ranks = ranks
        self._topology: Topology | None = None
        self._mode: EngineMode | None = None
        self._incomplete = ""
        self._offloader = Offloader(self.state_tensors)
        self._finite = True
        self._has_gradients = True
        self._expert_loads = ExpertLoads()
        self._was_deterministic: bool | None = None

    # ---- lifecycle -----------------------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """This process's position in the engine's grid, and the engine's process groups.

        Raises:
            ConfigError: The engine is not initialized, or it is closed.
        """
        if self._topology is None:
            raise ConfigError("the engine has no process groups; call initialize() first")
        return self._topology

    @property
    def options(self) -> Any:
        """The settings specific to the backend: `engine.options`, or their defaults."""
        if self.options_type is None or isinstance(self.config.options, self.options_type):
            return self.config.options
        if isinstance(self.config.options, Mapping):
            raise ConfigError(
                f"engine.options={dict(self.config.options)} is a mapping, which is not accepted; give a {self.options_type.__name__}"
            )
        return self.options_type()

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """The model's Hugging Face config, with the changes from the settings applied."""
        return read_config(self.model_config)

    @property
    def router_aux_coef(self) -> float:
        """The coefficient of the router's load-balancing loss; 0 for a model without one."""
        return router_aux_coef(self.hf_config, self.model_config)

    def check(self) -> None:
        """Check the settings against the backend and the model's config, without building anything or reading weights.

        `initialize` runs the same checks; a trainer calls this method before it processes its data. Not collective.

        Raises:
            ConfigError, ModelError, TopologyError: The engine cannot be built; the message names the setting and the way out.
        """
        self._check_capabilities()
        self._sharing()
        self.check_model(self._resolved())

    def describe_settings(self) -> list[str]:
        """Return lines about the resolved `auto` settings, the memory estimate if any, and on CUDA how far it is tested."""
        return describe_resolved(self.config, self.memory_estimate, cuda=self.topology.device.type == "cuda")

    def _check_capabilities(self) -> None:
        optimizer = None if self.optim_config is None else self.optim_config.name
        self.capabilities.check(self.config, self.model_config, optimizer, other_backends)

    def _sharing(self) -> SharePrefixes:
        """Return whether documents share prefixes, which needs positions that do not depend on what follows them."""
        if not self.capabilities.shared_prefixes or self.config.invariant:
            return "off"
        kind = length_dependent_rope(self.hf_config)
        if kind is None:
            return self.config.share_prefixes
        if self.config.share_prefixes == "on":
            raise ConfigError(
                f"engine.share_prefixes=on with rope_type={kind} in the config of {self.model_config.path}: the rotation of a prefix "
                "depends on the length of the whole document, so documents cannot share it; use auto or off"
            )
        return "off"

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix that documents have in common may be computed once; see `EngineConfig.share_prefixes`."""
        return self._sharing() != "off"

    def _resolved(self) -> ParallelConfig:
        """Return the parallel layout, resolved if the number of processes is already known."""
        if not dist.is_initialized():
            return self.config.parallel
        return resolve_parallel(self.config.parallel, dist.get_world_size() if self._ranks is None else len(self._ranks))

    def initialize(self) -> Self:
        """Check the settings, then build the engine and return it. An error on one rank is raised on all ranks."""
        self._check_capabilities()
        if self.optim_config is not None:
            self.optim_config.check(self.total_steps)
        sharing = self._sharing()
        self._topology = Topology.build(self.config.parallel, init_distributed(), self._ranks)
        try:
            if self.config.deterministic:
                # cuBLAS reads this variable when it starts; without it, deterministic matrix products raise an error.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                self._was_deterministic = torch.are_deterministic_algorithms_enabled()
                torch.use_deterministic_algorithms(True)
            # Each phase ends with an exchange of errors, so that no rank enters the collectives of the next phase
            # after another rank has failed.
            with self.topology.collective_errors():
                self.check_model(self.topology.parallel)
            with self.topology.collective_errors():
                memory = free_bytes(self.topology.device, self.topology.size)
            # The minimum over all ranks, because every rank must make the same choice.
            memory = min(self.topology.all_gather_object(memory))
            with self.topology.collective_errors():
                self.resolve_auto(memory)
            with self.topology.collective_errors():
                self.build_model()
            with self.topology.collective_errors():
                if self.optim_config is not None:
                    self.build_optimizer(self.optim_config)
            with self.topology.collective_errors():
                self.finish_build()
            self._planner = StepPlanner(
                self.topology,
                self.config.micro_batch,
                self.model_config,
                self.model_shape,
                sharing,
                self.media,
                self.routers,
                self.invariant_size,
            )
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Release the process groups and all memory, including the device's. Closing again has no effect."""
        if self._was_deterministic is not None:
            torch.use_deterministic_algorithms(self._was_deterministic)
            self._was_deterministic = None
        self.release()
        self._offloader.close()
        if self._topology is not None:
            free_memory(self._topology.device)
            self._topology.close()
            self._topology = None

    # ---- modes and offloading ------------------------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[Self]:
        """Keep all state on the device and dropout on until the `with` block ends."""
        with self._entered("train"):
            yield self

    @contextmanager
    def eval_mode(self) -> Iterator[Self]:
        """Keep the parameters on the device, dropout off and gradients disabled until the `with` block ends."""
        with self._entered("eval"), torch.no_grad():
            yield self

    @contextmanager
    def _entered(self, mode: EngineMode) -> Iterator[None]:
        if self._mode == mode:
            yield
            return
        self._require_complete()
        if self._mode is not None:
            raise ConfigError(f"{mode}_mode() inside {self._mode}_mode(); leave the outer mode before entering the other")
        parts: tuple[StatePart, ...] = PARTS if mode == "train" else ("params",)
        with self._offloader.on_device(parts):
            self._mode = mode
            self.set_training(mode == "train")
            try:
                yield
            finally:
                self._mode = None
                self.set_training(False)

    def _require_complete(self) -> None:
        if self._incomplete:
            raise ConfigError(f"the weights are incomplete ({self._incomplete}); load all weights, or a checkpoint, first")

    def to(self, place: str, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        """Move state to `device`, `host` or `disk` (temporary files in TMPDIR).

        A mode reloads offloaded state when it is entered, and offloads it again at its end.

        Args:
            place: The destination: `device`, `host` or `disk`.
            params: Whether to move the parameters.
            grads: Whether to move the gradients.
            optimizer: Whether to move the optimizer state.

        Raises:
            ConfigError: The destination is unknown, the disk is full, or the engine is in a mode that needs the state.
        """
        if self._mode is not None and place != "device":
            raise ConfigError(
                f"to({place!r}) inside {self._mode}_mode(), which needs the state on the device; leave the mode first"
            )
        selected = {"params": params, "grads": grads, "optimizer": optimizer}
        self._offloader.to(place, tuple(part for part in PARTS if selected[part]))

    def parameter_bytes(self) -> int:
        """Return the memory of this rank's parameters, wherever they are. Not collective."""
        return self._offloader.bytes_of("params")

    # ---- the driver ----------------------------------------------------------------------------------------------

    def train_batch(self, batch: PackedBatch, loss: Loss, *, plan: StepPlan | None = None) -> StepResult:
        """Run one optimizer step on a global batch.

        Args:
            batch: This rank's data-parallel shard of the global batch, the same on all ranks with the same `Topology.dp_rank`.
            loss: The loss to minimize.
            plan: The plan that `check_batches` returned for this batch and loss, passed on all ranks or on none; computed if
                None.

        Raises:
            NonFiniteError: The loss or the gradient is not finite and `engine.non_finite=raise`; the parameters are unchanged.
            BatchError: The batch has nothing to learn from, or a sequence exceeds the token budget.
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
        """Compute the loss of a global batch and add its gradient to the accumulated gradients.

        Args:
            batch: This rank's data-parallel shard of the global batch.
            loss: The loss to minimize.
            total_weights: The weights to divide by if several calls make up one step: each term's total over all their
                batches.
            forward_only: Whether to only evaluate the loss, without gradients and with dropout off.
            plan: The plan of the batch, as in `train_batch`.

        Returns:
            The result of the step, without `grad_norm` and `lr`.

        Raises:
            BatchError: The batch has nothing to learn from, or a sequence exceeds the token budget.
        """
        plan = plan or self._planner.plan(batch, loss, training=not forward_only, total_weights=total_weights)
        loads = self._expert_loads if self.model_config.router_bias_update_rate and not forward_only else None
        accumulator = LossAccumulator(loss, plan, self.router_aux_coef, backward=not forward_only, expert_loads=loads)
        with self.accumulating(backward=not forward_only):
            micro_batches = plan.micro_batches(batch, self.topology.device)
            self.run_micro_batches(micro_batches, accumulator, backward=not forward_only)
            result = accumulator.finish(self.topology)
        if not forward_only:
            # Over all calls of a step: one loss that is not finite is enough to reject the step.
            self._finite = self._finite and math.isfinite(result.loss)
        return result

    @contextmanager
    def accumulating(self, *, backward: bool) -> Iterator[None]:
        """Enter the mode for passes in the `with` block, whose gradients add up until the optimizer step.

        Args:
            backward: Whether there are backward passes.
        """
        with self.train_mode() if backward else self.eval_mode():
            if backward:
                self._has_gradients, self._offloader.gradients_are_zero = True, False
            try:
                yield
            except Exception:
                # A partial gradient must not leak into the next step.
                self.zero_grad()
                raise

    def check_batches(self, batches: Iterable[PackedBatch], count: int, loss: Loss) -> list[StepPlan]:
        """Check all batches of several steps before the first step runs, and plan the steps. Collective.

        Args:
            batches: This rank's data-parallel shard of each step's batch; only one at a time is kept in memory.
            count: The number of batches, the same on every rank.
            loss: The loss of all steps.

        Returns:
            The plan of each step, for `train_batch`.

        Raises:
            BatchError: `train_batch` would reject one of the batches.
        """
        return self._planner.plan_all(batches, count, loss)

    def warn_about_positions(self, longest: int, which: str) -> None:
        """Warn if documents are longer than the model supports; see `StepPlanner.warn_about_positions`."""
        self._planner.warn_about_positions(longest, which)

    def infer_batch(
        self, batch: PackedBatch, outputs: OutputRequest, *, tokens: Tensor | None = None, as_in_training: bool = False
    ) -> dict[str, Tensor]:
        """Compute per-token outputs without gradients and with dropout off.

        Args:
            batch: This rank's data-parallel shard of the global batch.
            outputs: The outputs to compute.
            tokens: `[T]` bool, the tokens for which to compute them. By default the tokens with a label; all tokens if only outputs of
                another type of head are requested.
            as_in_training: Whether to split the batch into the same micro-batches as `train_batch` instead of those of
                `infer_max_tokens`. With the same model weights and layout, the outputs are then bitwise equal to those in
                training. With compiled layers they are equal only up to rounding, because the compiler fuses a graph without gradients
                differently.

        Returns:
            Output name -> `[T, ...]`, in the order of `batch` and on its device; zero for tokens that were not selected.

        Raises:
            BatchError: `tokens` has the wrong shape.
        """
        if tokens is not None and tokens.shape != (batch.num_tokens,):
            raise BatchError(f"tokens is {tuple(tokens.shape)}; it must be [{batch.num_tokens}], one entry per token")
        plan = self._planner.plan(batch, None, training=as_in_training, outputs=outputs)
        head = self._planner.head
        collector = OutputCollector(batch, outputs, tokens, plan, None if head is None else head.outputs, self.routers)
        with self.eval_mode():
            self.run_micro_batches(plan.micro_batches(batch, self.topology.device), collector, backward=False)
        return collector.result(self.topology)

    def optimizer_step(self, result: StepResult | None = None, *, optim: OptimConfig | None = None) -> StepResult:
        """Clip the gradients and step the optimizer and the schedule, or skip both if the loss or the gradient is not finite.

        Either way the gradients are dropped.

        Args:
            result: The result of `forward_backward`, to which the fields of the optimizer step are added.
            optim: The settings from this step on: betas, eps, weight decay and clipping, and the learning rate without a schedule. None for
                those of the engine. Steps of one run either all have settings of their own, or none.

        Returns:
            The result with `grad_norm`, `lr` and `skipped`.

        Raises:
            NonFiniteError: The loss or the gradient is not finite and `engine.non_finite=raise`; the parameters are unchanged.
            ConfigError: `optim` is of another optimizer.
        """
        settings = self._require_optimizer()
        if optim is not None and optim.name != settings.name:
            raise ConfigError(
                f"optim.name={optim.name} in a step of an engine with optim.name={settings.name}; only the numbers may change"
            )
        result = result or StepResult(loss=math.nan, terms={}, metrics={}, weights={})
        with self._offloader.on_device(PARTS), self.step_threads():
            if optim is None:
                lr = learning_rate(self.step, settings, self.total_steps)
            else:
                settings, lr = optim, optim.lr
                self.set_optimizer_settings(optim)
            norm = self.reduce_and_clip(settings.clip_grad_norm)
            # Both numbers are global, so all ranks make the same decision.
            finite, self._finite = self._finite and math.isfinite(norm), True
            if finite:
                self.update_parameters(lr)
                result = self._update_router_biases(result)
                self.lr_step()
            # The gradients are no longer needed. If kept, they would be copied to the host and back with the offloaded state.
            self.zero_grad()
            if finite:
                return replace(result, grad_norm=norm, lr=lr)
        if self.config.non_finite == "raise":
            raise NonFiniteError(
                f"step {self.step + 1}: loss {result.loss:g}, gradient norm {norm:g}; the parameters are unchanged. Check "
                "the data and the learning rate, or set engine.non_finite=skip to skip such steps"
            )
        return replace(result, grad_norm=norm, lr=lr, skipped=True)

    def _update_router_biases(self, result: StepResult) -> StepResult:
        """Balance the loads of the experts through the routers' biases, if these are updated; see `ops.expert_loads`. Collective."""
        rate, routers, topology = self.model_config.router_bias_update_rate, self.routers, self.topology
        if not rate or routers is None:
            return result
        violation = self._expert_loads.update(self.router_biases(), rate, routers, topology.world, topology.device)
        return replace(result, metrics={**result.metrics, "expert_max_violation": violation})

    def _require_optimizer(self) -> OptimConfig:
        if self.optim_config is None:
            raise ConfigError(
                "this engine was built without optim, so it can infer but not train; pass optim=OptimConfig(...) when it is built"
            )
        return self.optim_config

    def zero_grad(self) -> None:
        """Drop the gradients and reset the record of non-finite losses."""
        self._finite = True
        self._expert_loads.clear()
        if not self._has_gradients:
            return
        # Do not fetch offloaded gradients only to drop them.
        self._offloader.discard_gradients()
        with self._offloader.on_device(("grads",)):
            self.drop_gradients()
            self._has_gradients = False

    def lr_step(self) -> None:
        """Advance the learning-rate schedule by one step."""
        self.step += 1

    # ---- weights -------------------------------------------------------------------------------------------------

    @contextmanager
    def named_weights(self, *, adapters: Adapters = "merged") -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Stream full tensors under Hugging Face names, one at a time, on every rank.

        Args:
            adapters: `merged` to merge adapters into the weights that they adapt, or `only` to yield just the adapters, under
                peft's names.

        Yields:
            An iterator over names and tensors.
        """
        check_adapters(adapters)
        self._require_complete()
        with self._offloader.on_device(("params",)) as moved:
            stream = self.stream_weights(adapters)
            try:
                # A tensor may be a view of memory that is offloaded again when the block ends.
                yield ((name, tensor.clone()) for name, tensor in stream) if moved else stream
            finally:
                # A rank that stopped early, or failed, must still take part in the collectives that the other ranks are
                # waiting in.
                for _ in stream:
                    pass

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self, step: int, extra: Mapping[str, Any] | None, copies: HostCopies) -> Snapshot:
        """Copy this rank's part of a checkpoint of the current state. The copy does not change while training continues.

        Args:
            step: The step of the checkpoint.
            extra: The JSON-serializable state of the trainer and the data loader.
            copies: The host buffers for the copies, which are reused from one save to the next.
        """
        with self._offloader.on_device(PARTS):
            return take_snapshot(step, self.local_shards(), self._manifest_fields(extra), lambda: self.model_files, copies)

    @contextmanager
    def live_snapshot(self, step: int, extra: Mapping[str, Any] | None = None) -> Iterator[Snapshot]:
        """Yield a snapshot of live memory, without copies. Nothing can be trained or offloaded until the `with` block ends.

        Args:
            step: The step of the checkpoint.
            extra: The JSON-serializable state of the trainer and the data loader.

        Raises:
            ConfigError: The engine is in a mode.
        """
        if self._mode is not None:
            raise ConfigError(f"live_snapshot() inside {self._mode}_mode(); leave the mode first")
        with self._offloader.on_device(PARTS):
            self._mode = "save"
            try:
                yield take_snapshot(step, self.local_shards(), self._manifest_fields(extra), lambda: self.model_files, None)
            finally:
                self._mode = None

    def _manifest_fields(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "backend": self.config.backend,
            "engine": asdict(self.config),
            "model": asdict(self.model_config),
            "fingerprint": self.model_fingerprint,
            "optim": None if self.optim_config is None else asdict(self.optim_config),
            "schedule": {"step": self.step},
            "optimizer": None if self.optim_config is None else self.optimizer_scalars(),
            "extra": dict(extra or {}),
        }

    @cached_property
    def model_fingerprint(self) -> str:
        """The fingerprint of the model that training started from. It must match when resuming a run or merging adapters."""
        return fingerprint(self.model_config.path)

    @cached_property
    def model_files(self) -> Mapping[str, bytes]:
        """The config, generation config and tokenizer files. They do not change, so transformers writes them only once."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_model_files(Path(folder))
            files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
            return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

    def save_checkpoint(self, root: Path | str, step: int, extra: Mapping[str, Any] | None = None) -> str:
        """Write the checkpoint `root/step-XXXXXXXX` atomically. `CheckpointManager` saves in the background instead.

        Args:
            root: The folder of all checkpoints of a run, or its URL.
            step: The step of the checkpoint.
            extra: The JSON-serializable state of the trainer and the data loader.

        Returns:
            The folder of the checkpoint, or its URL.

        Raises:
            CheckpointError: The checkpoint cannot be written; earlier checkpoints are unchanged.
        """
        with self.live_snapshot(step, extra) as snapshot:
            return write_snapshot(snapshot, open_store(root), self.topology, self.topology.host)

    def load_checkpoint(self, folder: Path | str, *, verify: bool = True, optimizer: bool = True) -> RestoredState:
        """Load a checkpoint that any backend saved in any layout. Each rank reads only the slices that it needs.

        Args:
            folder: The folder of the checkpoint, or its URL.
            verify: Whether to verify the checksums of the data that is read.
            optimizer: Whether to load the optimizer's state too; otherwise that and the step stay as they are.

        Returns:
            The restored state that does not belong to the engine.

        Raises:
            CheckpointError: The checkpoint is incomplete, damaged, or of another model. The engine's state is then unchanged,
                unless the damage is only detected while reading.
        """
        name = None if self.optim_config is None or not optimizer else self.optim_config.name

        def shards() -> Iterator[LocalShard]:
            return (shard for shard in self.local_shards() if optimizer or shard.kind == "value")

        with self._offloader.on_device(PARTS):
            manifest = load_state(
                open_store(folder), topology=self.topology, local_shards=shards, optimizer=name, verify=verify
            )
            self.restore_optimizer(None if name is None else manifest.data["optimizer"])
            self.zero_grad()
        self._incomplete = ""
        if optimizer:
            self.step = manifest.data["schedule"]["step"]
        same_layout = restore_random_state(manifest, self.topology, self.config.seed, self.step)
        return RestoredState(
            step=manifest.step,
            extra=manifest.data["extra"],
            same_layout=same_layout,
            model=manifest.data["model"].get("path"),
            fingerprint=manifest.data.get("fingerprint"),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """Load full tensors under Hugging Face names, as `named_weights` of another engine streams them. Collective.

        The optimizer keeps its state. Until a complete set has been loaded, the engine refuses to compute.

        Args:
            weights: The names and tensors, the same on all ranks.
            eta: The weight of the new tensors in a moving average: eta x new + (1 - eta) x current. A small weight needs float32 parameters
                (`engine.precision.params`): in 16 bits, small changes are rounded away.

        Raises:
            ConfigError: `eta` is not between 0 and 1, the engine is in a mode, or its model has adapters.
            ModelError: A tensor is unknown, has another shape, or is missing.
        """
        if not 0 <= eta <= 1:
            raise ConfigError(f"eta={eta}; the weight of the new tensors must be between 0 and 1")
        if self._mode is not None:
            raise ConfigError(f"load_weights() inside {self._mode}_mode(); leave the mode first")
        if self.model_config.lora.rank:
            raise ConfigError(
                "this engine trains adapters, so full weights cannot be loaded into it; load a checkpoint instead"
            )
        with self._offloader.on_device(PARTS), torch.no_grad():
            # Set before the first tensor is written: an error in between leaves a mixture of old and new weights.
            self._incomplete = "a previous load of weights did not finish"
            shapes = {name: shape for name, (_, shape) in self.weight_shapes().items()}
            load_full_weights(weights, self.local_shards(), shapes, eta)
            # As after loading a checkpoint, update the state that is derived from the parameters.
            self.restore_optimizer(None if self.optim_config is None else self.optimizer_scalars())
        self._incomplete = ""
