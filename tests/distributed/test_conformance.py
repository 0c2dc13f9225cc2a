"""The engine against the contract, and the contract's checks against engines that are broken on purpose."""

import contextlib
import io
import math
import unittest.mock
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from drivetrain.engine.config import ParallelConfig
from drivetrain.engine.conformance import __main__ as command
from drivetrain.engine.conformance.checks import CHECKS
from drivetrain.engine.conformance.engine_factory import ConformanceError, engine_factory
from drivetrain.engine.errors import DrivetrainError
from drivetrain.engine.fsdp.engine import FSDPEngine
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.loss import StepResult, TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.registry import BackendSpec, register, unregister
from drivetrain.engine.step import MicroBatchConsumer
from drivetrain.engine.step_plan import MicroBatch
from helpers.harness import run_ranks

slow = pytest.mark.slow
LAYOUTS = [
    (1, {}),
    pytest.param(2, {}, marks=slow),
    pytest.param(2, {"cp": 2}, marks=slow),
    pytest.param(4, {}, marks=slow),
    pytest.param(4, {"cp": 4}, marks=slow),
    pytest.param(4, {"cp": 2}, marks=slow),
    pytest.param(2, {"dp_replicate": 2}, marks=slow),
    pytest.param(4, {"dp_replicate": 2}, marks=slow),
    pytest.param(4, {"dp_replicate": 2, "cp": 2}, marks=slow),
]


def rank_checks(axes: dict[str, Any], names: list[str], family: str, options: Any = None) -> None:
    with engine_factory("fsdp", ParallelConfig(**axes), family, options) as made:
        for name in names:
            CHECKS[name](made)


@pytest.mark.parametrize(("nproc", "axes"), LAYOUTS)
def test_fsdp_conforms(nproc: int, axes: dict[str, Any]) -> None:
    run_ranks(rank_checks, nproc, axes, list(CHECKS), "qwen3", timeout_s=200)


@slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2"])
def test_fsdp_conforms_with_other_families(family: str) -> None:
    run_ranks(rank_checks, 2, {}, ["reference", "weights", "infer", "checkpoint"], family)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "axes"),
    [
        (2, {"dp_shard": 2, "ep": 2}),
        (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    ],
)
def test_fsdp_conforms_with_experts_over_ranks(nproc: int, axes: dict[str, Any]) -> None:
    # Fillers of one token leave ranks whose experts nobody chose.
    run_ranks(rank_checks, nproc, axes, [*CHECKS] if nproc == 2 else ["reference", "weights", "checkpoint"], "qwen3_moe")


def test_fsdp_conforms_with_every_axis() -> None:
    run_ranks(rank_checks, 4, {"dp_replicate": 2, "cp": 2}, ["reference", "weights", "checkpoint"], "qwen3")


@pytest.mark.slow
def test_fsdp_conforms_without_resharding() -> None:
    options = FSDPOptions(reshard_after_forward=False, reduce_each_micro_batch=True)
    run_ranks(rank_checks, 2, {}, ["modes", "aborted", "checkpoint"], "qwen3", options)


class _Wrapped:
    def __init__(self, consumer: MicroBatchConsumer) -> None:
        self._consumer, self.request, self.take_routes = consumer, consumer.request, consumer.take_routes
        self.records_routes, self.counts_experts = consumer.records_routes, consumer.counts_experts


class _Rescaled(_Wrapped):
    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        assert outputs.log_probs is not None
        share = 40.0 / max(1.0, float(outputs.mask.sum()))
        return self._consumer(micro_batch, TokenOutputs(mask=outputs.mask, log_probs=outputs.log_probs * share), aux)


class NoGlobalWeight(FSDPEngine):
    """Divides by the micro-batch's own weight, as frameworks do that average averages."""

    def run_micro_batches(self, micro_batches: Any, consumer: Any, *, backward: bool) -> None:
        super().run_micro_batches(micro_batches, _Rescaled(consumer), backward=backward)


class OverstatesNorm(FSDPEngine):
    """Reports a norm that is one per cent too large."""

    def reduce_and_clip(self, max_norm: float | None) -> float:
        return super().reduce_and_clip(max_norm) * 1.01


class TrainsPaddingRow(FSDPEngine):
    """Gives the row of the padding token the gradient of its lookups, as an embedding without `padding_idx`."""

    def initialize(self) -> Self:
        super().initialize()
        lm: Any = self._root.lm
        lm.get_input_embeddings().padding_idx = None
        return self


class DoublesRate(FSDPEngine):
    """Steps with twice the learning rate."""

    def update_parameters(self, lr: float) -> None:
        super().update_parameters(lr * 2)


class IgnoresBudget(FSDPEngine):
    def forward_backward(self, batch: PackedBatch, loss: Any, **options: Any) -> StepResult:
        object.__setattr__(self.config.micro_batch, "max_tokens", 10_000)
        return super().forward_backward(batch, loss, **options)


class SwallowsNaN(FSDPEngine):
    def reduce_and_clip(self, max_norm: float | None) -> float:
        self._finite = True
        norm = super().reduce_and_clip(max_norm)
        return norm if math.isfinite(norm) else 1.0


class WrongOrder(FSDPEngine):
    def infer_batch(self, batch: PackedBatch, outputs: Any, **options: Any) -> dict[str, Tensor]:
        found = super().infer_batch(batch, outputs, **options)
        return {name: value.roll(1) for name, value in found.items()}


class MisordersTopTokens(FSDPEngine):
    def infer_batch(self, batch: PackedBatch, outputs: Any, **options: Any) -> dict[str, Tensor]:
        found = super().infer_batch(batch, outputs, **options)
        return {name: value.roll(1, -1) if name == "top_tokens" else value for name, value in found.items()}


class RoundsWeights(FSDPEngine):
    @contextlib.contextmanager
    def named_weights(self, **options: Any) -> Iterator[Any]:
        with super().named_weights(**options) as stream:
            yield ((name, value.bfloat16().to(value.dtype)) for name, value in stream)


class KeepsGradients(FSDPEngine):
    def drop_gradients(self) -> None:
        if self.step == 0 and self._optimizer is not None:
            for parameter in self._root.parameters():
                parameter.grad = torch.ones_like(parameter)


class ForgetsParents(FSDPEngine):
    def forward_step(self, micro_batch: MicroBatch, *args: Any) -> Any:
        layout = micro_batch.layout
        if layout is not None:
            layout = replace(layout, parents=(-1,) * len(layout.parents))
        return super().forward_step(replace(micro_batch, layout=layout), *args)


class AllowsAnyMode(FSDPEngine):
    @contextlib.contextmanager
    def _entered(self, mode: Any) -> Iterator[None]:
        self.set_training(mode == "train")
        yield
        self.set_training(False)


class AveragesCalls(FSDPEngine):
    def forward_backward(self, batch: PackedBatch, loss: Any, **options: Any) -> StepResult:
        options.pop("total_weights", None)
        return super().forward_backward(batch, loss, **options)


class LosesMoments(FSDPEngine):
    def restore_optimizer(self, scalars: Any) -> None:
        super().restore_optimizer(scalars)
        assert self._optimizer is not None
        for name in self._optimizer._views:
            self._optimizer.moments(name)["exp_avg"].zero_()


class RemembersAbortedSteps(FSDPEngine):
    def zero_grad(self) -> None:
        for parameter in self._root.parameters() if self._mode is None else ():
            parameter.grad = None


class IgnoresEmptyBatch(FSDPEngine):
    def forward_backward(self, batch: PackedBatch, loss: Any, **options: Any) -> StepResult:
        return super().forward_backward(batch, loss, **{**options, "total_weights": {"nll": 1.0}})


class SeesBlackImages(FSDPEngine):
    def forward_backward(self, batch: PackedBatch, loss: Any, **options: Any) -> StepResult:
        pixels = batch.media.get("pixel_values")
        media = {} if pixels is None else {"pixel_values": replace(pixels, values=torch.zeros_like(pixels.values))}
        return super().forward_backward(replace(batch, media={**batch.media, **media}), loss, **options)


class _FirstActionAlone(_Wrapped):
    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        repeated = {name: value[:, :1].expand_as(value) for name, value in outputs.others.items()}
        return self._consumer(micro_batch, replace(outputs, others=repeated), aux)


class RepeatsTheFirstAction(FSDPEngine):
    """Returns the first action of each chunk in the place of all."""

    def run_micro_batches(self, micro_batches: Any, consumer: Any, *, backward: bool) -> None:
        super().run_micro_batches(micro_batches, _FirstActionAlone(consumer), backward=backward)


BROKEN: dict[str, list[type[FSDPEngine]]] = {
    "reference": [NoGlobalWeight, OverstatesNorm, TrainsPaddingRow, DoublesRate, KeepsGradients],
    "shared_prefixes": [ForgetsParents],
    "media": [SeesBlackImages],
    "model_types": [RepeatsTheFirstAction],
    "partition": [NoGlobalWeight],
    "shares": [NoGlobalWeight],
    "zero_weight": [IgnoresEmptyBatch],
    "budget": [IgnoresBudget],
    "non_finite": [SwallowsNaN],
    "infer": [WrongOrder, MisordersTopTokens],
    "weights": [RoundsWeights],
    "modes": [AllowsAnyMode],
    "accumulation": [AveragesCalls],
    "aborted": [RemembersAbortedSteps],
    "checkpoint": [LosesMoments],
}


def test_every_check_has_a_control() -> None:
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize(("check", "engine"), [(c, e) for c, engines in BROKEN.items() for e in engines])
def test_check_finds_a_broken_engine(check: str, engine: type[FSDPEngine], process_group: None) -> None:
    # The registry resolves `module:attribute`; this test module stands in sys.modules under its own name.
    register("broken", BackendSpec(engine=f"{__name__}:{engine.__name__}"))
    try:
        with engine_factory("broken") as made, pytest.raises(ConformanceError):
            CHECKS[check](made)
    finally:
        unregister("broken")


REFUSED = {
    ("fsdp", "cpu=2"): "'cpu=2' is not an axis with a size",
    ("fsdp", "tp_sequence=2"): "'tp_sequence=2' is not an axis with a size",
    ("nothing",): "unknown",
    # One error, and not that of every check.
    ("fsdp", "tp=2"): "tp=2",
}


def rank_command(runs: list[tuple[str, ...]], broken: str) -> list[tuple[str, str]]:
    """What the command prints, and the error that it ends with, where a check fails."""

    def fails(_: Any) -> None:
        raise ConformanceError("a tensor is missing")

    told = []
    for words in runs:
        out, error = io.StringIO(), ""
        with (
            contextlib.redirect_stdout(out),
            unittest.mock.patch("sys.argv", ["drivetrain conformance", *words]),
            unittest.mock.patch.dict(command.CHECKS, {broken: fails}),
        ):
            try:
                assert command.main() == 0
            except DrivetrainError as e:
                error = str(e)
        told.append((out.getvalue(), error))
    return told


def test_the_command_tells_which_checks_failed() -> None:
    runs = [("fsdp", "--only", "weights", "infer")]
    *refused, failed = run_ranks(rank_command, 1, [*REFUSED, *runs], "weights")[0]
    for (told, error), expected in zip(refused, REFUSED.values(), strict=True):
        assert expected in error
        assert not told
    assert "FAIL  weights        rank 0: a tensor is missing" in failed[0]
    assert failed[0].splitlines()[-1] == "1 checks passed, 1 failed, on 1 processes with cpu"
    assert failed[1] == "1 of 2 checks failed"
