"""Adapters that take turns in the layers of Megatron-core, in every layout, against plain transformers with peft."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from drivetrain.engine.adapter_checkpoint import adapter_config_of
from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.config import MicroBatchConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import CapabilityError, ConfigError
from helpers.adapters import ADAM, ALL, bank_engine, call, config, documents, own_share, worst_difference
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


def frozen_state(folder: str, backend: str, layout: dict[str, Any], root: str, other: str | None) -> dict[str, Any]:
    """Train an adapter, and stream what the engine then has; load another engine's checkpoint, or other weights; save, and stream again."""
    engine = bank_engine(folder, backend=backend, parallel=ParallelConfig(**layout))

    def streamed() -> dict[str, Tensor]:
        with engine.named_weights() as stream:
            return {name: tensor.clone() for name, tensor in stream}

    try:
        trainer = AdapterTrainer(engine)
        trainer.create("a", config(4, ALL, 1))
        batch = documents(Random(5), 3)
        trainer.forward_backward([call("a", batch)])
        trainer.optim_step("a", ADAM)
        before = streamed()
        if other is None:
            engine.load_weights((name, 2 * tensor) for name, tensor in before.items())
        else:
            engine.load_checkpoint(other)
        with engine.named_weights(adapters="only") as stream:
            only = [name for name, _ in stream]
        with engine.disable_adapter():
            results = trainer.forward_backward([call(name, batch, forward_only=True) for name in (None, "a")])
        return {
            "before": before,
            "after": streamed(),
            "shapes": engine.weight_shapes(),
            "only": [only, engine.weight_shapes(adapters="only")],
            "losses": [result.loss for result in results],
            "checkpoint": engine.save_checkpoint(root, step=1),
        }
    finally:
        engine.close()


def same_tensors(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(tensor.equal(others[name]) for name, tensor in tensors.items())


def contents(checkpoint: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The tensors of a checkpoint with their shapes and dtypes, and the files beside them."""
    folder = Path(checkpoint)
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    described = {
        name: (entry["shape"], {kind: of_kind["dtype"] for kind, of_kind in entry["kinds"].items()})
        for name, entry in tensors.items()
    }
    return described, {path.name: path.read_bytes() for path in (folder / "model").iterdir()}


@pytest.mark.parametrize(("nproc", "layout"), [(1, {}), pytest.param(2, {"tp": 2}, marks=pytest.mark.slow)], ids=["one", "tp"])
def test_checkpoints_and_streams_have_the_frozen_model_alone(tmp_path: Path, nproc: int, layout: dict[str, Any]) -> None:
    """Those of either engine are the same to the bit, and load on the other one and back."""
    folder = save_tiny_model(tmp_path / "model", "llama")
    stored = load_file(folder / "model.safetensors")
    doubled = {name: 2 * tensor for name, tensor in stored.items()}
    (first,) = run_ranks(frozen_state, 1, str(folder), "fsdp", {}, str(tmp_path / "first"), None)
    turns = run_ranks(frozen_state, nproc, str(folder), "mcore", layout, str(tmp_path / "turns"), first["checkpoint"])
    (back,) = run_ranks(frozen_state, 1, str(folder), "fsdp", {}, str(tmp_path / "back"), turns[0]["checkpoint"])
    own_weights = run_ranks(frozen_state, nproc, str(folder), "mcore", layout, str(tmp_path / "weights"), None)
    for state in (first, *turns, back, *own_weights):
        assert same_tensors(state["before"], stored)
        assert same_tensors(state["after"], doubled)
        assert state["shapes"] == first["shapes"]
        assert state["only"] == [[], {}]
        assert state["losses"] == pytest.approx(first["losses"], rel=1e-5)
        assert contents(state["checkpoint"]) == contents(first["checkpoint"])


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
