"""Adapters that take turns in the layers of Megatron-core, in every layout, against plain transformers with peft."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from drivetrain.engine.adapter_checkpoint import adapter_config_of
from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.config import MicroBatchConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import CapabilityError, ConfigError
from drivetrain.engine.packing.microbatch import balance
from helpers.adapters import Document, PlainAdapter, bank_engine, call, config, documents
from helpers.harness import run_ranks

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=1.0)
ALL = ("attention", "mlp", "unembedding")


def shard(trainer: AdapterTrainer, of_call: list[Document]) -> tuple[list[Document], list[int]]:
    topology = trainer._engine.topology
    mine = balance([len(document["tokens"]) for document in of_call], topology.dp_size)[topology.dp_rank]
    return [of_call[i] for i in mine], mine


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
        trainer, random, worst = AdapterTrainer(engine), Random(3), 0.0
        trainer.create("a", config(4, ALL, 1))
        trainer.create("b", config(2, ("attention",), 2))
        plain = {name: PlainAdapter(folder, trainer, name) for name in ("a", "b")}

        def compare(found: float, expected: float) -> None:
            nonlocal worst
            worst = max(worst, abs(found - expected) / max(1.0, abs(expected)))

        for count in (5, 1, 3):
            # A call of one document leaves the other data-parallel ranks without any.
            parts = [
                ("a", "cross_entropy", documents(random, count)),
                ("b", "ppo", documents(random, 1, "ppo")),
                ("b", "cross_entropy", documents(random, count, targets=3)),
                ("a", "importance_sampling", documents(random, 2, "importance_sampling")),
            ]
            shards = [shard(trainer, batch) for _, _, batch in parts]
            calls = [call(name, mine, loss) for (name, loss, _), (mine, _) in zip(parts, shards, strict=True)]
            results = trainer.forward_backward(calls)
            for (name, loss, batch), (_, mine), result in zip(parts, shards, results, strict=True):
                assert result.error is None, result.error
                expected, log_probs = plain[name].forward_backward(batch, loss)
                compare(result.loss, expected)
                if mine and result.log_probs is not None and engine.topology.is_last_stage:
                    difference = result.log_probs.double() - torch.cat([log_probs[i] for i in mine])
                    worst = max(worst, float(difference.abs().max()))
            for name in ("a", "b"):
                compare(trainer.optim_step(name, OPTIM).grad_norm, plain[name].step(OPTIM))
        # The frozen model is not changed by whose turn it was last.
        document = documents(random, 1)
        (alone,) = trainer.forward_backward([call(None, shard(trainer, document)[0], forward_only=True)])
        trainer.create("c", config(2, ALL, 3))
        (fresh,) = trainer.forward_backward([call("c", shard(trainer, document)[0], forward_only=True)])
        # An adapter that has learned nothing adds nothing.
        compare(alone.loss, fresh.loss)
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
        (result,) = trainer.forward_backward([call("b", shard(trainer, documents(Random(5), 3))[0])])
        return [result.loss, trainer.optim_step("b", OPTIM).grad_norm, float(trainer.bank["b"].values.double().square().sum())]
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
