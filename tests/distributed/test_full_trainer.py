"""All weights trained by calls: the numbers of plain transformers with the settings of each step, in every layout."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from drivetrain.engine.call_trainer import TrainingCall
from drivetrain.engine.config import MicroBatchConfig, OptimConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, NonFiniteError
from drivetrain.engine.full_trainer import FullWeightTrainer
from drivetrain.engine.loss import LossSums, OutputRequest
from drivetrain.engine.registry import is_installed
from drivetrain.losses.token_sums import FORMULAS
from helpers.adapters import PlainModel, call, documents, own_share, packed
from helpers.engines import build
from helpers.harness import run_ranks

OPTIM = OptimConfig(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=1.0)


def full_engine(folder: Path | str, **settings: Any) -> Any:
    model = settings.pop("model", {})
    return build(
        folder,
        model={"router_aux_loss_coef": 0.0, **model} if "moe" in str(folder) else model,
        optim=OptimConfig(lr=1e-5),
        precision=PrecisionConfig(params="float32", compute="float32", reduce="float32"),
        micro_batch=MicroBatchConfig(max_tokens=64),
        **settings,
    )


def worst_difference(trainer: FullWeightTrainer, folder: str, steps: int = 4) -> float:
    """Train beside plain transformers; the largest difference of a loss, a log-probability or a gradient norm, relative if above 1."""
    plain, random, worst, losses = PlainModel(folder), Random(0), 0.0, list(FORMULAS)
    topology = trainer.engine.topology

    def compare(computed: float, expected: float) -> None:
        nonlocal worst
        worst = max(worst, abs(computed - expected) / max(1.0, abs(expected)))

    for step in range(steps):
        # The gradients of several calls add up; the last step has none.
        for count, targets in ((3, 0), (1, 0), (2, 3)) if step < steps - 1 else ():
            loss = losses[(step + count) % len(losses)] if not targets else "cross_entropy"
            batch = documents(random, count, loss, targets=targets)
            mine, places = own_share(trainer, batch)
            (result,) = trainer.forward_backward([call("m", mine, loss)])
            assert result.error is None, result.error
            expected, log_probs = plain.forward_backward(batch, loss)
            compare(result.loss, expected)
            if mine and result.log_probs is not None and topology.is_last_stage:
                found = torch.cat([log_probs[i] for i in places])
                worst = max(worst, float((result.log_probs.double() - found).abs().max()))
            # One that only evaluates adds nothing.
            trainer.forward_backward([call("m", mine, loss, forward_only=True)])
        optim = OptimConfig(
            lr=1e-3 * (1 + step), betas=(0.9, 0.9 + 0.02 * step), eps=1e-6, weight_decay=0.1 * step, clip_grad_norm=3.0
        )
        outcome = trainer.optim_step(optim)
        assert outcome.step == step + 1
        compare(outcome.grad_norm, plain.step(optim))
    batch = documents(random, 3)
    (result,) = trainer.forward_backward([call("m", own_share(trainer, batch)[0], forward_only=True)])
    compare(result.loss, plain.forward_backward(batch, "cross_entropy")[0])
    return worst


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_numbers_are_those_of_plain_transformers(family: str, tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / family, family)
    engine = full_engine(folder)
    assert worst_difference(FullWeightTrainer(engine, "m"), str(folder)) < 2e-5
    engine.close()


def rank_difference(folder: str, settings: dict[str, Any]) -> float:
    engine = full_engine(folder, **settings)
    try:
        return worst_difference(FullWeightTrainer(engine, "m"), folder)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        pytest.param(2, {"parallel": ParallelConfig(cp=2)}, marks=pytest.mark.slow),
        pytest.param(1, {"backend": "mcore"}, marks=pytest.mark.slow),
        pytest.param(4, {"backend": "mcore", "parallel": ParallelConfig(tp=2, pp=2)}, marks=pytest.mark.slow),
    ],
)
def test_every_layout_has_these_numbers(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    if not is_installed(settings.get("backend", "fsdp")):
        pytest.skip("Megatron-core is not installed")
    folder = save_tiny_model(tmp_path / "model", "llama")
    assert max(run_ranks(rank_difference, ranks, str(folder), settings)) < 2e-5


class Failing:
    """A loss that always raises an error."""

    request = OutputRequest(log_probs=True)
    linear = False

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"loss": 1.0}

    def __call__(self, outputs: Any, batch: Any) -> LossSums:
        raise RuntimeError("no such loss")


def test_a_loss_that_fails_drops_the_gradients_and_nothing_else(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    engine, random = full_engine(folder), Random(1)
    trainer = FullWeightTrainer(engine, "m")
    batch = documents(random, 2)
    trainer.forward_backward([call("m", batch)])
    failed, sound = trainer.forward_backward(
        [TrainingCall(adapter="m", batch=packed(batch), loss=Failing()), call("m", batch)]  # type: ignore[arg-type]
    )
    assert "no such loss" in str(failed.error)
    assert sound.error is None
    plain = PlainModel(folder)
    # The call before is gone, the one beside it is not.
    plain.forward_backward(batch, "cross_entropy")
    assert trainer.optim_step(OPTIM).grad_norm == pytest.approx(plain.step(OPTIM), rel=1e-5)
    wrong, unknown = (TrainingCall(adapter=name, batch=packed(batch), loss=call("m", batch).loss) for name in ("other", None))
    assert "'other'" in str(trainer.forward_backward([wrong])[0].error)
    assert trainer.forward_backward([unknown])[0].error is not None
    engine.close()


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_changes_nothing(policy: str, tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    engine = full_engine(folder, non_finite=policy)
    trainer, (document,) = FullWeightTrainer(engine, "m"), documents(Random(2), 1)
    before = trainer.forward_backward([call("m", [document], forward_only=True)])[0].loss
    trainer.forward_backward([call("m", [{**document, "loss_weights": [float("nan")] * len(document["tokens"])}])])
    with pytest.raises(NonFiniteError, match="it was dropped"):
        trainer.optim_step(OPTIM)
    assert trainer.forward_backward([call("m", [document], forward_only=True)])[0].loss == before
    assert trainer.optim_step(OPTIM).grad_norm == 0
    with pytest.raises(ConfigError, match="sgd"):
        trainer.optim_step(OptimConfig(name="sgd"))
    engine.close()


def test_engines_that_train_something_else_are_refused(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    engine = full_engine(folder, model={"router_aux_loss_coef": 0.1})
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.1"):
        FullWeightTrainer(engine, "m")
    engine.close()
