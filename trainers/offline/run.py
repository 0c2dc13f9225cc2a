"""The runs of SFT, DPO and reward models, as the training loop drives them."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...engine.base import BaseEngine
from ...engine.checkpoint.load import RestoredState
from ...engine.checkpoint.manager import CheckpointManager
from ...engine.checkpoint.retention import step_of
from ...engine.errors import CapabilityError, CheckpointError, DrivetrainError
from ...engine.export import export_hf
from ...engine.flops import known_peak_tflops
from ...engine.loss import StepResult
from ...engine.parallel.collectives import collective_errors
from ...engine.registry import engine_class
from ..config.data import DataConfig
from ..config.runs import RunConfig
from ..config.trainer import TrainerConfig
from ..data.dataset import TokenDataset
from ..data.load import RunData, load_data
from ..data.loader import Loader
from ..data.order import Cursor, Sampler
from ..data.python_data import PythonData
from ..data.stream import StreamLoader
from ..data.tokenize import NO_PYTHON
from ..loop.callbacks import Callback
from ..loop.checkpoint_checks import check_fingerprint, check_method, check_no_later
from ..loop.completion_metrics import CompletionMetrics
from ..loop.console import Lines, Summary
from ..loop.early_stopping import EarlyStopping
from ..loop.loggers import CHAT, LOSS, Display
from ..loop.ranks import TrainerRanks, process_group
from ..loop.run_folder import locked_folders
from ..loop.samples import HeldOutCompletion, generate_completions
from ..loop.signals import StopSignal
from ..loop.training_run import EvaluationResult, TrainingRun
from ..methods.base import TrainingMethod
from ..validate import unused_settings, warn_about_data
from .report import announce

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class OfflineRun(TrainingRun):
    """A run on a fixed dataset.

    Args:
        engine: The initialized engine.
        method: The training method: the loss to minimize, and the preparation of batches for it.
        data: The tokenizer and the data.
        loader: The batches to train on.
        manager: The run's checkpoints.
        completion_metrics: The metrics of the generated completions.
        cursor: The position of the next batch in the data.
    """

    settings: RunConfig
    engine: BaseEngine
    method: TrainingMethod
    data: RunData
    loader: Loader | StreamLoader
    manager: CheckpointManager
    completion_metrics: CompletionMetrics
    cursor: Cursor = field(default_factory=Cursor)

    def __post_init__(self) -> None:
        config, held_out = self.config, self.data.held_out
        self._held_out: Loader | None = None
        if held_out is not None:
            # An evaluation uses every held-out sample once, so that its mean is exact.
            sampler = Sampler(held_out.sizes, weights=None, seed=0, shuffle=False)
            self._held_out = Loader(held_out, sampler, batch_size=self.settings.data.batch_size)
        self._run_metadata = {"config": asdict(self.settings), "method": self.method.name}
        self._peak_flops = _peak_flops(self.engine, config)
        self._resume()
        super().__post_init__()
        self._batches = self.loader.batches(self.cursor)

    @property
    def config(self) -> TrainerConfig:
        """The `trainer` settings."""
        return self.settings.trainer

    @property
    def checkpoint_root(self) -> str:
        """The folder or URL of the run's checkpoints."""
        return str(self.manager.root)

    @property
    def has_evaluation(self) -> bool:
        """Whether there are held-out samples."""
        return self._held_out is not None

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained."""
        return self.settings.model.lora.rank > 0

    # ---- steps -------------------------------------------------------------------------------------------------------

    def make_step(self) -> dict[str, Any]:
        """Train on the next batch; see the base class. Collective."""
        start = time.perf_counter()
        # Invalid streamed data end the run, but its last step is saved first.
        with self.saved_on(DrivetrainError, f"the data of step {self.step + 1}"):
            global_batch, following = next(self._batches)
            global_batch = global_batch.with_shard(self.engine)
        batch = self.method.batch(self.engine, global_batch, training=True)
        result = self.engine.train_batch(batch, self.method.loss)
        # Only after the step, so that a checkpoint after an error resumes with its batch.
        self.step, self.cursor = self.step + 1, following
        return self._record(result, time.perf_counter() - start)

    def _record(self, result: StepResult, seconds: float) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "shared_tokens": result.shared_tokens,
            "sequences": result.sequences,
            # Losses over pairs count pairs instead.
            **({"supervised": result.weights["nll"]} if "nll" in result.weights else {}),
            "micro_batches": result.micro_batches,
            "seconds": seconds,
            "tokens_per_s": result.tokens / seconds,
            "mfu": None if self._peak_flops is None else result.flops / seconds / self._peak_flops,
            "tflops": result.flops / seconds / 1e12,
            "peak_gib": result.peak_gib,
            "epoch": self.loader.epoch(self.cursor),
            "skipped": result.skipped,
            **result.terms,
            **result.metrics,
        }

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, stop: StopSignal) -> EvaluationResult | None:
        """Compute the exact loss and metrics over all held-out samples, and the metrics of the generated completions. Collective.

        Each loss term is its weighted sum over all samples divided by the total weight; each metric of the loss is its sum divided by
        the total count. Metrics of completions are means over the completions that are generated.

        Args:
            stop: The stop signal of the run.

        Returns:
            The evaluation, or None if the run was asked to stop during it.
        """
        assert self._held_out is not None
        sums: dict[str, float] = defaultdict(float)
        weights: dict[str, float] = defaultdict(float)
        hits: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        tokens = 0
        for samples in self._held_out.once():
            # An evaluation may take long, so ranks agree between batches on whether to stop.
            stop.exchange()
            if stop.is_requested:
                return None
            batch = self.method.batch(self.engine, samples.with_shard(self.engine), training=False)
            result = self.engine.forward_backward(batch, self.method.evaluation_loss, forward_only=True)
            tokens += result.tokens
            for term, weight in result.weights.items():
                # Terms are means over a batch, and batches have different weights: add the sums, and divide at the end.
                sums[term] += result.terms[term] * weight
                weights[term] += weight
            for name, count in result.counts.items():
                if count:
                    hits[name] += result.metrics[name] * count
                    counts[name] += count
        metrics = {"loss": sum(sums[t] / weights[t] for t in weights), **{n: hits[n] / counts[n] for n in counts}}
        completions = self._generate(stop)
        if completions is None:
            return None
        if completions:
            # Functions of the user run once; every rank gets the values, which decide about the best checkpoint.
            metrics |= self.ranks.run_on_rank0(lambda: self.completion_metrics.measure(completions))
        return EvaluationResult(metrics=metrics, tokens=tokens, completions=completions)

    def _generate(self, stop: StopSignal) -> list[HeldOutCompletion] | None:
        held_out = self.data.held_out
        assert held_out is not None
        # Take samples from across the entire file, since neighboring samples may belong to the same chat.
        count = min(self.config.eval_completions, len(held_out))
        samples = [held_out[i * len(held_out) // count][0] for i in range(count)]
        if not samples:
            return []
        budget, store = self.method.budget.tokens, held_out.store
        return generate_completions(
            self.engine, self.data.tokenizer, samples, self.config.eval_max_tokens, budget, stop, store
        )

    # ---- checkpoints and exports -------------------------------------------------------------------------------------

    def write_checkpoint(self, *, evaluation_due: bool, last: bool) -> None:
        """Save a checkpoint, in the background unless it is the last one. Collective."""
        best = self.early_stopping.best_step
        extra = {
            **self._run_metadata,
            "data": self.loader.state(self.cursor),
            "watch": self.early_stopping.state(),
            "evaluate": evaluation_due,
            "eval_digests": self._eval_digests,
        }
        self.manager.save(self.step, extra, keep=() if best is None else (best,), last=last)

    @property
    def _eval_digests(self) -> dict[str, str]:
        return {} if self.data.held_out is None else self.data.held_out.source_digests

    def restore_step(self, step: int) -> None:
        """Load the checkpoint of a step. Collective."""
        self.manager.restore_step(step)

    def export_model(self, folder: Path, *, adapters_only: bool) -> str:
        """Export the model or its adapters. Collective."""
        return str(export_hf(self.engine, folder, adapters="only" if adapters_only else "merged"))

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Collective."""
        self.manager.wait()

    def failure(self) -> Exception | None:
        """Return the error of a checkpoint that was written in the background, if any."""
        return self.manager.failure()

    # ---- resuming ----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Load the checkpoint that `trainer.resume` names, if there is one. Collective.

        Raises:
            CheckpointError: The checkpoint cannot be used, or was saved with different data.
            ConfigError: The run's folder contains later checkpoints, which the next `resume=auto` would prefer to those of this run.
        """
        setting = self.config.resume
        present = self.manager.present()
        restored = None
        if setting != "none":
            # Only `auto` skips damaged checkpoints; one that was named must load.
            restored = self.manager.restore_last() if setting == "auto" else self.manager.restore(setting)
        if restored is not None:
            checkpoint, state = restored
            self._check_same_run(checkpoint, state)
            self.step, self.cursor = state.step, self._restore_cursor(checkpoint, state)
            changed = self.loader.changed_sources(state.extra.get("data", {}))
            self.compare_data(changed, state.extra.get("eval_digests", {}), self._eval_digests)
            self.evaluates_first = bool(state.extra.get("evaluate"))
            steps = {(step_of(name) or (0, 0))[0] for name in present}
            self.early_stopping.restore(state.extra.get("watch", {}), steps, self.checkpoint_root)
            layout = "" if state.same_layout else " (different layout: new random state)"
            log.info("resumed from %s, after step %d%s", checkpoint, state.step, layout)
        check_no_later(self.checkpoint_root, present, setting, self.step)

    def _check_same_run(self, checkpoint: str, state: RestoredState) -> None:
        check_method(checkpoint, state.extra.get("method", self.method.name), self.method.name)
        # Compare the fingerprint of the first rank only; the copies of the model on other machines are not checked.
        fingerprint = self.ranks.run_on_rank0(lambda: self.engine.model_fingerprint)
        check_fingerprint(checkpoint, state.fingerprint, state.model, fingerprint, self.settings.model.path)
        saved_by = state.extra.get("config", {}).get("trainer", {}).get("output_dir")
        if self.config.resume == "auto" and saved_by is not None and Path(saved_by) != Path(self.config.output_dir):
            log.warning("%s was saved by the run in %s; this run resumes from it", checkpoint, saved_by)

    def _restore_cursor(self, checkpoint: str, state: RestoredState) -> Cursor:
        if "data" not in state.extra:
            log.warning(
                "%s records no position in the data, since another program wrote it; the data starts from the beginning",
                checkpoint,
            )
            return Cursor()
        try:
            return self.loader.restore(state.extra["data"], epochs=self.config.max_steps is None)
        except CheckpointError as e:
            raise CheckpointError(f"{checkpoint}: {e}") from e


@contextmanager
def open_run(
    config: RunConfig,
    method: TrainingMethod,
    metrics: CompletionMetrics,
    *,
    python: PythonData = NO_PYTHON,
    callbacks: Sequence[Callback] = (),
    is_dry: bool = False,
) -> Iterator[OfflineRun]:
    """Read the data, initialize the engine and resume; free everything after the block. Collective over all processes of the job.

    After an error the default process group is not destroyed if there are several processes, since the others may be waiting in it; end
    the process (`exit_process`).

    Args:
        config: The run's settings.
        method: The training method.
        metrics: The metrics of the generated completions.
        python: Rows in memory, and what is applied to every row.
        callbacks: Code that the training loop calls on every rank.
        is_dry: Whether to write nothing; folders are then neither created nor locked against other runs.

    Raises:
        DrivetrainError: A file, a row, the model or a checkpoint cannot be used; raised on all ranks.
    """
    trainer = config.trainer
    with process_group(trainer.timeout_minutes):
        engine = engine_class(config.engine.backend)(model=config.model, engine=config.engine, optim=config.optim)
        with collective_errors():
            engine.check()
        with nullcontext() if is_dry else locked_folders(trainer, TrainerRanks()):
            data = load_data(
                config.model,
                config.data,
                kind=method.kind,
                budget=method.budget,
                python=python,
                # The engine has a topology only once it is initialized.
                gather=lambda value, error=None: engine.topology.all_gather_object(value, error=error),
                broadcast=lambda value, error=None: engine.topology.broadcast_object(value, error=error),
            )
            datasets = [one for one in (data.source, data.held_out) if isinstance(one, TokenDataset)]
            # Before the engine is initialized, which reads the weights.
            if any(one.has_media for one in datasets) and not engine.capabilities.media:
                raise CapabilityError(
                    f"the data have images, video or audio, which engine.backend={config.engine.backend} does not support; use engine.backend=fsdp"
                )
            loader = _loader(config.data, data)
            steps = -(-len(loader) // config.data.batch_size) if isinstance(loader, Loader) else 0
            # The learning-rate schedule depends on the number of steps, which is only known once the data are read.
            engine.total_steps = total_steps = trainer.max_steps or trainer.epochs * steps
            for line in unused_settings(config.optim, total_steps):
                log.warning("%s", line)
            try:
                source = data.source if isinstance(data.source, TokenDataset) else None
                # Before the policy is built: a reference whose log-probabilities are cached is freed again by then.
                method.setup(engine, data.tokenizer, source, data.held_out)
                engine.initialize()
                announce(engine, config, data, loader, total_steps)
                digest = "" if data.held_out is None else data.held_out.digest
                with _manager(engine, trainer, is_dry=is_dry) as manager:
                    run = OfflineRun(
                        settings=config,
                        ranks=TrainerRanks(engine.topology.host),
                        early_stopping=EarlyStopping.of(trainer, evaluation_metrics(method, metrics), digest),
                        display=Display(
                            lines=Lines(metrics.names),
                            summary=Summary(total_steps),
                            plot_name="loss plot",
                            plot_file="loss.png",
                            panels=LOSS,
                            # A reward model writes no completions.
                            next_command=CHAT if method.can_generate else "",
                        ),
                        total_steps=total_steps,
                        callbacks=callbacks,
                        engine=engine,
                        method=method,
                        data=data,
                        loader=loader,
                        manager=manager,
                        completion_metrics=metrics,
                    )
                    # Only if a checkpoint before the last one is due, which is written in
                    # the background from these buffers.
                    if trainer.save_every and run.step + trainer.save_every < total_steps and not is_dry:
                        manager.prepare()
                    yield run
            finally:
                method.close()
                engine.close()


def evaluation_metrics(method: TrainingMethod, metrics: CompletionMetrics) -> dict[str, bool]:
    """Return the metrics of an evaluation, and for each whether lower is better."""
    return {**method.lower_is_better, **dict.fromkeys(metrics.names, False)}


def _loader(config: DataConfig, data: RunData) -> Loader | StreamLoader:
    if not isinstance(data.source, TokenDataset):
        warn_about_data(config, config.batch_size, None)
        return StreamLoader(data.source, batch_size=config.batch_size)
    sampler = Sampler(data.train.sizes, weights=config.weights, seed=config.seed, shuffle=config.shuffle)
    warn_about_data(config, config.batch_size, len(sampler))
    weights = config.weights
    if weights is not None and min(weights) * len(sampler) < sum(weights):
        log.warning(
            "data.weights=%s: with %d samples per epoch, at least one source gets no samples in some epochs",
            weights,
            len(sampler),
        )
    return Loader(data.train, sampler, batch_size=config.batch_size)


@contextmanager
def _manager(engine: BaseEngine, config: TrainerConfig, *, is_dry: bool) -> Iterator[CheckpointManager]:
    with CheckpointManager(
        engine,
        config.checkpoint_dir or Path(config.output_dir) / "checkpoints",
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        background=config.save_background and not is_dry,
        verify=config.verify_checksums,
    ) as manager:
        if not is_dry:
            manager.sweep()
        yield manager


def _peak_flops(engine: BaseEngine, config: TrainerConfig) -> float | None:
    """Return the peak FLOP/s of all devices together, or None if it is not known."""
    per_device, device = config.peak_tflops, engine.topology.device
    if per_device is None and device.type == "cuda":
        # Without a known peak, metrics have FLOP/s but no utilization.
        per_device = known_peak_tflops(torch.cuda.get_device_name(device), engine.config.precision.compute)
    return None if per_device is None else per_device * 1e12 * engine.topology.size
