"""BaseEngine: the contract between workers and backends, and the one driver that every backend shares.

A backend subclasses `BaseEngine` and says only what differs (`backend.py`): how a model is built, run, reduced and read out.
What a step means - the global weight, micro-batches, accumulation, clipping, the non-finite policy, modes - stands here once.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from .backend import Adapters
from .checkpointable import CheckpointableEngine, Mode
from .config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig
from .errors import BatchError, ConfigError, NonFiniteError
from .hf.config import read_config
from .hf.shape import router_aux_coef
from .loss import Loss, OutputRequest, StepResult
from .lr_schedule import learning_rate
from .offload import PARTS, Offloader, Part, free_memory
from .packing.batch import PackedBatch
from .parallel.process_groups import init_distributed
from .parallel.topology import Topology, resolve_parallel
from .step import LossAccumulator, OutputCollector
from .step_plan import StepPlan, StepPlanner


class BaseEngine(CheckpointableEngine):
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
        self._topology: Topology | None = None
        self._mode: Mode | None = None
        self._offloader = Offloader(self._tensors)
        self._finite = True
        self._was_deterministic: bool | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """This process's place in the engine's grid, and the engine's process groups.

        Raises:
            ConfigError: The engine is not initialized, or it is closed.
        """
        if self._topology is None:
            raise ConfigError("the engine has no process groups; call initialize() first")
        return self._topology

    @property
    def options(self) -> Any:
        """`engine.options`, or the backend's defaults."""
        if self.options_type is None or isinstance(self.config.options, self.options_type):
            return self.config.options
        return self.options_type()

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """The model's Hugging Face config, with what the settings change in it."""
        return read_config(self.model_config)

    @property
    def router_aux_coef(self) -> float:
        """The coefficient of a router's balancing loss; 0 without one."""
        return router_aux_coef(self.hf_config, self.model_config)

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
            self.optim_config.check(self.total_steps)
        self._topology = Topology.build(self.config.parallel, init_distributed(), self._ranks)
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
        self._offloader.close()
        if self._topology is not None:
            free_memory(self._topology.device)
            self._topology.close()
            self._topology = None

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
        with self._offloader.on_device(parts):
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
        self._offloader.to(place, tuple(part for part in PARTS if chosen[part]))

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
        accumulator = LossAccumulator(loss, plan, self.router_aux_coef, backward=not forward_only)
        with self.eval_mode() if forward_only else self.train_mode():
            try:
                micro_batches = plan.micro_batches(batch, self.topology.device)
                self._run_micro_batches(micro_batches, accumulator, backward=not forward_only)
                result = accumulator.finish(self.topology)
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
        collector = OutputCollector(batch, outputs, tokens, plan)
        with self.eval_mode():
            self._run_micro_batches(plan.micro_batches(batch, self.topology.device), collector, backward=False)
        return collector.result(self.topology)

    def optimizer_step(self, result: StepResult | None = None) -> StepResult:
        """Clip and step the optimizer and the schedule, or leave both out when something is not finite.

        Args:
            result: of `forward_backward`, to be completed.
        """
        optim = self._require_optimizer()
        result = result or StepResult(loss=math.nan, terms={}, metrics={}, weights={})
        with self._offloader.on_device(PARTS):
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
        with self._offloader.on_device(("grads",)):
            self._zero_grad()

    def lr_step(self) -> None:
        """Advance the schedule by one step."""
        self.step += 1

    # ---- weights -------------------------------------------------------------------------------------------------

    @contextmanager
    def named_weights(self, *, adapters: Adapters = "merged") -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Stream full tensors under Hugging Face names, one at a time, on every rank.

        Args:
            adapters: `merged` adds adapters into the weights they adapt; `only` yields the adapters, under peft's names.
        """
        with self._offloader.on_device(("params",)) as moved:
            stream = self._stream_weights(adapters)
            try:
                # A tensor may be a view of memory that goes back to rest.
                yield ((name, tensor.clone()) for name, tensor in stream) if moved else stream
            finally:
                # A rank that stopped early, or failed, still takes part in what the others are waiting in.
                for _ in stream:
                    pass
