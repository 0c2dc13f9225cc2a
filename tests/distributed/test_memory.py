"""What an engine keeps in memory: against its estimate, and between micro-batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from drivetrain.engine import base as base_module
from drivetrain.engine.config import LoraConfig, MicroBatchConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.fsdp import compile as compile_module
from drivetrain.engine.fsdp import engine as engine_module
from drivetrain.engine.fsdp.memory import memory_needs
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.fsdp.torch_private import unsharded_gradients
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.resolve import USABLE
from drivetrain.engine.torch_private import storage_key
from drivetrain.losses.sft import SFTLoss
from helpers.engines import OPTIM, build
from helpers.harness import run_ranks

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("backend", "mode", "family", "compute"),
    [
        ("fsdp", "none", "llama", "float32"),
        ("fsdp", "none", "qwen3", "bfloat16"),
        ("mcore", "none", "llama", "float32"),
        ("mcore", "selective", "llama", "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fsdp", "none", "llama", "bfloat16"),
                ("fsdp", "none", "qwen3", "float32"),
                ("mcore", "none", "qwen3", "bfloat16"),
                ("mcore", "selective", "qwen3", "float32"),
            )
        ),
    ],
)
def test_activations_are_about_what_is_estimated(
    backend: str, mode: Any, family: str, compute: Any, tmp_path: Path, process_group: None
) -> None:
    tokens = 512
    engine: Any = build(
        save_tiny_model(tmp_path / "model", family, **WIDE),
        backend=backend,
        recompute=mode,
        precision=PrecisionConfig(compute=compute),
        micro_batch=MicroBatchConfig(max_tokens=tokens),
    )
    batch = from_lists([[3 + (7 * i + j) % 50 for i in range(tokens // 4)] for j in range(4)])
    known = {storage_key(p) for p in engine.state_tensors("params")}
    kept: dict[int, Tensor] = {}
    measured: list[int] = []
    forward_step = engine.forward_step

    def keep(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in known:
            kept[storage_key(tensor)] = tensor
        return tensor

    def after_forward(*args: Any) -> Any:
        done = forward_step(*args)
        # Megatron frees what it computes again.
        measured.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
        return done

    engine.forward_step = after_forward
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward(batch, SFTLoss())
    assert 0.7 < engine.memory_needs().activations[mode] / measured[0] < 1.4
    engine.close()


def needs_of_two(*args: Any, **settings: Any) -> Any:
    """What a rank of two needs, whose unsharded gradients are not those of its parameters."""
    return memory_needs(*args, **{**settings, "ranks": 2})


@pytest.mark.slow
def test_auto_follows_the_memory_of_the_device(tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", **WIDE)
    memory = 2.0**40
    monkeypatch.setattr(base_module, "free_bytes", lambda device, size: memory)
    monkeypatch.setattr(engine_module, "memory_needs", needs_of_two)

    def started() -> Any:
        return build(
            folder,
            recompute="auto",
            # What is computed in another format than it is stored in has gathered copies, and unsharded gradients.
            precision=PrecisionConfig(compute="bfloat16"),
            micro_batch=MicroBatchConfig(max_tokens=1024),
        )

    engine = started()
    needs = engine.memory_needs()
    assert needs.unsharded_gradients == 4 * engine.model_shape.parameters_trained
    engine.close()
    for mode, each in (("none", False), ("none", True), ("selective", True), ("full", True)):
        memory = 1.001 * needs.total(mode, reduce_each=each) / USABLE  # type: ignore[arg-type]
        engine = started()
        assert (engine.config.recompute, engine.config.options.reduce_each_micro_batch) == (mode, each)
        assert f"recompute={mode}" in engine.memory_estimate
        assert ("every micro-batch" in engine.memory_estimate) == each
        assert "may not fit" not in engine.memory_estimate
        engine.close()
    memory *= 0.9
    engine = started()
    assert "may not fit" in engine.memory_estimate
    # Layers that are compiled, and recompute outside of compiled code, save next to nothing by selective recomputation.
    monkeypatch.setattr(compile_module, "RECOMPUTES_INSIDE", False)
    engine.config = replace(engine.config, compile=True, recompute="auto")
    needs = engine.memory_needs()
    engine.resolve_auto(1.001 * needs.total("selective", reduce_each=True) / USABLE)
    assert engine.config.recompute == "full"
    assert len(engine.describe_settings()) == 2
    engine.config = replace(engine.config, recompute="selective")
    assert "takes as long as full recomputation with transformers" in engine.describe_settings()[-1]
    engine.close()


@pytest.mark.parametrize(
    ("precision", "lora", "wrapped"),
    [
        (PrecisionConfig(), 0, False),
        (PrecisionConfig(compute="bfloat16"), 0, True),
        # Only the format of reduction, or that of the adapters, differs.
        (PrecisionConfig(params="bfloat16", compute="bfloat16"), 2, True),
        (PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="bfloat16"), 0, False),
    ],
)
def test_the_estimate_knows_whether_fsdp_copies_parameters(
    precision: PrecisionConfig, lora: int, wrapped: bool, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"lora": LoraConfig(rank=lora)} if lora else {}
    # Parameters in 16 bits are not trained without adapters.
    optim = OPTIM if lora or precision.params == "float32" else None
    engine: Any = build(save_tiny_model(tmp_path / "model", "qwen3"), precision=precision, model=settings, optim=optim)
    assert isinstance(engine._root, FSDPModule) is wrapped
    assert engine.memory_needs().unsharded_gradients == 0
    monkeypatch.setattr(engine_module, "memory_needs", needs_of_two)
    assert (engine.memory_needs().unsharded_gradients > 0) is wrapped
    engine.close()


def rank_gradients(folder: str, settings: list[Any]) -> list[list[int]]:
    found = []
    for each in settings:
        engine: Any = build(
            folder,
            parallel=ParallelConfig(dp_shard=2),
            micro_batch=MicroBatchConfig(max_tokens=16),
            options=FSDPOptions(reduce_each_micro_batch=each),
        )
        counts: list[int] = []
        backward = engine.run_backward

        def counted(scalar: Any, micro_batch: Any, engine: Any = engine, backward: Any = backward, into: Any = counts) -> None:
            backward(scalar, micro_batch)
            into.append(sum(t.numel() for t in unsharded_gradients(engine._root)))

        engine.run_backward = counted
        engine.train_batch(from_lists([list(range(i, i + 12)) for i in (3, 4, 5)]), SFTLoss())
        found.append([counts[0] / engine.model_shape.parameters_trained, counts[-1]])
        engine.close()
    return found


def test_unsharded_gradients_are_not_kept_if_they_are_reduced_each_time(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    for kept, reduced, automatic in run_ranks(rank_gradients, 2, str(folder), [False, True, "auto"]):
        assert kept == [1, 0]
        assert reduced == [0, 0]
        # There is memory enough for a tiny model.
        assert automatic == [1, 0]
