"""Adapters that take turns in the layers of Megatron-core, in every layout, against plain transformers with peft."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from drivetrain.engine.adapter_checkpoint import adapter_config_of
from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.config import MicroBatchConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import CapabilityError, ConfigError
from helpers.adapters import ADAM, bank_engine, call, config, documents, own_share, worst_difference
from helpers.harness import run_ranks


def trained(folder: str, layout: dict[str, Any], recompute: str, root: str) -> float:
    """Train two adapters and compare each answer; return the largest relative difference. The last state is saved."""
    engine = bank_engine(
        folder,
        backend="mcore",
        parallel=ParallelConfig(**layout),
        recompute=recompute,
        micro_batch=MicroBatchConfig(max_tokens=64),
    )
    try:
        trainer = AdapterTrainer(engine)
        worst = worst_difference(trainer, folder)
        trainer.save("a", root)
        return worst
    finally:
        engine.close()


def loaded(folder: str, backend: str, layout: dict[str, Any], checkpoint: str) -> list[float]:
    engine = bank_engine(folder, backend=backend, parallel=ParallelConfig(**layout))
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("b", adapter_config_of(checkpoint))
        trainer.load("b", checkpoint)
        (result,) = trainer.forward_backward([call("b", own_share(trainer, documents(Random(5), 3))[0])])
        return [result.loss, trainer.optim_step("b", ADAM).grad_norm, float(trainer.bank["b"].values.double().square().sum())]
    finally:
        engine.close()


LAYOUTS: list[tuple[str, int, dict[str, Any], str]] = [
    ("llama", 2, {"tp": 2}, "none"),
    ("llama", 2, {"pp": 2}, "none"),
    ("llama", 2, {"cp": 2}, "full"),
    ("llama", 4, {"tp": 2, "tp_sequence": True}, "full"),
    ("llama", 4, {"tp": 2, "pp": 2}, "none"),
    ("qwen3_moe", 2, {"ep": 2}, "none"),
    ("qwen3_moe", 2, {"tp": 2, "tp_sequence": True, "etp": 2}, "none"),
    ("qwen3_moe", 4, {"tp": 2, "tp_sequence": True, "ep": 2}, "none"),
]


@pytest.mark.parametrize(
    ("family", "nproc", "layout", "recompute"),
    [LAYOUTS[0], *(pytest.param(*layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])],
    ids=lambda value: str(value),
)
def test_every_layout_has_the_numbers_of_plain_transformers_and_peft(
    tmp_path: Path, family: str, nproc: int, layout: dict[str, Any], recompute: str
) -> None:
    folder, root = str(save_tiny_model(tmp_path / "model", family)), str(tmp_path / "saved")
    worst = run_ranks(trained, nproc, folder, layout, recompute, root)
    assert max(worst) < 2e-5
    # What it has saved goes on on another engine as on this one.
    checkpoint = f"{root}/step-00000003"
    (expected,) = run_ranks(loaded, 1, folder, "fsdp", {}, checkpoint)
    for numbers in run_ranks(loaded, nproc, folder, "mcore", layout, checkpoint):
        assert numbers == pytest.approx(expected, rel=1e-5)


def refusals(tied: str, mixture: str) -> list[str]:
    messages = []
    engine = bank_engine(tied, backend="mcore")
    try:
        AdapterTrainer(engine).create("a", config(2, ("unembedding",)))
    except ConfigError as e:
        messages.append(str(e))
    finally:
        engine.close()
    try:
        bank_engine(mixture, backend="mcore")
    except CapabilityError as e:
        messages.append(str(e))
    return messages


def test_what_cannot_be_adapted(tmp_path: Path) -> None:
    """A head that is the embeddings, and parts of experts that peft has no files for."""
    tied = save_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    mixture = save_tiny_model(tmp_path / "mixture", "qwen3_next")
    ((of_head, of_experts),) = run_ranks(refusals, 1, str(tied), str(mixture))
    assert "the model has no adaptable layers of unembedding" in of_head
    assert "model.max_adapters=8 with engine.backend=mcore" in of_experts
