"""Adapters that go to a generator alone: what it then computes with is, to the bit, what an engine with them would have sent whole."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.config import EngineConfig, LoraConfig, MicroBatchConfig, ModelConfig, OptimConfig, PrecisionConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError
from drivetrain.engine.hf.adapter_weights import AdapterWeights
from drivetrain.engine.packing.convert import from_lists
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.generator import RolloutWorker
from helpers.engines import build, steps

pytestmark = pytest.mark.usefixtures("process_group")

OPTIONS = SamplingOptions(max_tokens=6, samples=2, seed=4, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 3]]
VOCABULARY = {"targets": ("all-linear", "embed_tokens", "lm_head")}
Stream = list[tuple[str, Tensor]]


def trained(folder: Path, lora: dict[str, Any], backend: str = "fsdp", **precision: Any) -> tuple[ModelConfig, Stream, Stream]:
    """What an engine with trained adapters streams: all weights, and the adapters alone."""
    adapters = LoraConfig(rank=3, alpha=12.0, **lora)
    more: Any = {"precision": PrecisionConfig(**precision)} if precision else {}
    engine: Any = build(str(folder), backend=backend, model={"lora": adapters}, **more)
    try:
        steps(engine, 2)
        with engine.named_weights() as stream:
            full = [(name, tensor.clone()) for name, tensor in stream]
        with engine.named_weights(adapters="only") as stream:
            alone = [(name, tensor.clone()) for name, tensor in stream]
    finally:
        engine.close()
    return ModelConfig(path=str(folder), lora=adapters), full, alone


@pytest.mark.parametrize(
    ("family", "lora", "backend", "dtype", "changes"),
    [
        ("qwen3", {}, "fsdp", "float32", {}),
        ("qwen3", VOCABULARY, "fsdp", "bfloat16", {"tie_word_embeddings": False}),
        ("qwen3", {"modules_to_save": ("embed_tokens", "norm")}, "fsdp", "float32", {}),
        pytest.param(
            "qwen3",
            {"rslora": True, "targets": ("q_proj", "*.layers.1.mlp.down_proj")},
            "mcore",
            "float32",
            {},
            marks=pytest.mark.slow,
        ),
        ("qwen3_moe", {"targets": ("all-linear", "experts")}, "fsdp", "float32", {}),
        pytest.param("qwen3_moe", {"targets": ("all-linear", "experts")}, "mcore", "float32", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"targets": ("q_proj", "experts")}, "fsdp", "float32", {}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, "fsdp", "float32", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {}, "fsdp", "float32", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, "fsdp", "float32", {}, marks=pytest.mark.slow),
    ],
)
def test_they_are_added_as_the_engine_adds_them(
    tmp_path: Path, family: str, lora: dict[str, Any], backend: str, dtype: str, changes: dict[str, Any]
) -> None:
    folder = save_tiny_model(tmp_path / "model", family, **changes)
    precision = {} if dtype == "float32" else {"params": dtype, "compute": dtype}
    model, full, alone = trained(folder, lora, backend, **precision)
    source = AdapterWeights(model, getattr(torch, dtype), torch.device("cpu"))
    assert source.nbytes == sum(tensor.numel() * tensor.element_size() for _, tensor in alone)
    whole = dict(source.merged(iter(alone), complete=True))
    expected = dict(full)
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(whole[name], tensor.to(whole[name].dtype)), name
    part = dict(source.merged(iter(alone), complete=False))
    before = dict(AdapterWeights(model, getattr(torch, dtype), torch.device("cpu")).merged(zeros(alone), complete=True))
    saved = tuple(f".{module}" for module in lora.get("modules_to_save", ())) or ("nothing",)
    changed = {
        name for name in expected if not torch.equal(before[name], whole[name]) or name.removesuffix(".weight").endswith(saved)
    }
    assert changed <= part.keys() < expected.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())


def zeros(alone: Stream) -> Iterator[tuple[str, Tensor]]:
    return ((name, torch.zeros_like(tensor) if "lora_" in name else tensor) for name, tensor in alone)


def answers(generator: BaseGenerator) -> list[tuple[list[int], list[float]]]:
    return [(one.response, one.log_probs) for ones in generator.generate(PROMPTS, OPTIONS) for one in ones]


@pytest.mark.parametrize(
    "name", ["continuous", *(pytest.param(name, marks=pytest.mark.slow) for name in ("static", "exact", "tensor_parallel"))]
)
def test_a_generator_goes_on_with_them(tmp_path: Path, name: str) -> None:
    """From its folder's weights, from others, after weights that it lost, and after adapters that are not the model's."""
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    model, full, alone = trained(folder, {"modules_to_save": ("embed_tokens",)})
    other = [(n, tensor * 1.5) for n, tensor in full]
    config = RolloutConfig(model=model, generator=name, max_batch_total_tokens=2048)
    generator = build_generator(config)
    try:
        first = answers(generator)
        generator.load_weights(iter(full), version=1)
        expected = answers(generator)
        assert first != expected
        read: list[int] = []
        copy_part = generator.copy_part
        generator.copy_part = lambda weights: (read.append(1), copy_part(weights))  # type: ignore[method-assign,assignment,func-returns-value]
        for version, before in enumerate(("whole", "adapters", "lost", "absent", "wrong", "discarded"), 2):
            if before == "whole":
                generator.load_weights(iter(other))
                assert answers(generator) != expected
            elif before == "lost":
                with pytest.raises(ModelError, match="NaN or infinity"):
                    generator.load_adapters((n, tensor * float("nan")) for n, tensor in alone)
            elif before == "absent":
                generator.to("absent")
                generator.to("device")
            elif before == "wrong":
                with pytest.raises(
                    ModelError, match=r"1 of \d+ tensors are missing \(base_model\..*\), 1 are unknown \(other\)"
                ):
                    generator.load_adapters([("other", torch.zeros(1)), *alone[1:]])
                with pytest.raises(ModelError, match=r"is \[1\], but according to model\.lora it is"):
                    generator.load_adapters([(alone[0][0], torch.zeros(1)), *alone[1:]])
            elif before == "discarded":
                generator.discard_weights("for a test")
            generator.load_adapters(iter(alone), version=version)
            assert answers(generator) == expected, before
            assert generator.version == version
        # Only where the weights below them are known to be those of the folder: once, and where they were wrong in some way.
        assert len(read) == (0 if name == "tensor_parallel" else 3)
    finally:
        generator.close()


@pytest.mark.parametrize(
    ("base", "dtype"),
    [("bfloat16", "float32"), pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow), ("float32", "bfloat16")],
)
def test_all_weights_are_those_of_a_policy_in_another_dtype(tmp_path: Path, base: str, dtype: str) -> None:
    """Those without adapters too, which a policy in 16 bits has rounded."""
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    precision = {} if base == "float32" else {"params": base, "compute": base}
    model, full, alone = trained(folder, {}, **precision)
    generator: Any = build_generator(RolloutConfig(model=model, generator="static", dtype=dtype, base_dtype=base))
    try:
        generator.load_weights(iter(full))
        expected = {name: parameter.clone() for name, parameter in generator._lm.model.named_parameters()}
    finally:
        generator.close()
    generator = build_generator(RolloutConfig(model=model, generator="static", dtype=dtype, base_dtype=base))
    try:
        for _ in range(2):
            generator.load_adapters(iter(alone))
            for name, parameter in generator._lm.model.named_parameters():
                assert torch.equal(parameter, expected[name]), name
    finally:
        generator.close()


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    generator = build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator="static"))
    assert generator.adapter_bytes() == 0
    with pytest.raises(ModelError, match=r"model\.lora\.rank=0, so .* has no adapters to receive separately"):
        generator.load_adapters([])
    generator.close()


@pytest.mark.parametrize("weight_sync", ["tcp", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_group_sends_them_with_receipts(tmp_path: Path, weight_sync: Any) -> None:
    """To a pool of its own, whose weights are of 16 bits; and the way back from what cannot be."""
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    model = ModelConfig(path=str(folder), lora=LoraConfig(rank=3))
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64))
    actor = ActorConfig(model=model, engine=engine, optim=OptimConfig(lr=1e-1))
    rollout = RolloutConfig(model=model, dtype="bfloat16", generator="continuous")
    plain = RolloutConfig(model=ModelConfig(path=str(folder)))
    roles = {
        "actor": RoleSpec(worker=ActorWorker, config=actor),
        "rollout": RoleSpec(worker=RolloutWorker, config=rollout, pool="answers"),
        "other": RoleSpec(worker=RolloutWorker, config=plain, pool="answers"),
        "rounded": RoleSpec(worker=RolloutWorker, config=replace(rollout, base_dtype="bfloat16"), pool="answers"),
    }
    with ProcessWorkerGroup(roles, pools={"main": 1, "answers": 1}, weight_sync=weight_sync) as group:
        batch = from_lists(PROMPTS * 2, token_fields={"advantages": [[1.0] * 3, [-1.0] * 2] * 2})
        batch = batch.with_fields(old_log_probs=group["actor"].compute_log_probs(batch)["log_probs"])
        first = group["rollout"].generate(PROMPTS, OPTIONS)
        for _ in range(2):
            group["actor"].update(batch)
        whole = group.sync_weights("actor", "rollout", version=1)
        expected = group["rollout"].generate(PROMPTS, OPTIONS)
        alone = group.sync_weights("actor", "rollout", version=1, adapters=True, keep=1)
        assert group["rollout"].generate(PROMPTS, OPTIONS) == expected
        assert [[one.log_probs for one in ones] for ones in expected] != [[one.log_probs for one in ones] for ones in first]
        assert (alone.tensors, alone.bytes) == (2 * 7 * 2, group["rollout"].adapter_bytes())
        assert alone.sent_bytes < whole.sent_bytes
        # As they were, whatever the actor has now.
        group["actor"].update(batch)
        again = group.sync_weights("actor", "rollout", version=1, adapters=True, keep=1, resend=True)
        assert (again.tensors, again.bytes) == (alone.tensors, alone.bytes)
        assert group["rollout"].generate(PROMPTS, OPTIONS) == expected
        with pytest.raises(ConfigError, match=r"model\.lora of the target is LoraConfig\(rank=0,"):
            group.sync_weights("actor", "other", version=1, adapters=True)
        with pytest.raises(ConfigError, match="base_dtype of the target is bfloat16, and that of the source float32"):
            group.sync_weights("actor", "rounded", version=1, adapters=True)
        group["other"].generate(PROMPTS, OPTIONS)
        for more in ({"eta": 0.5}, {"changes": True}):
            with pytest.raises(ConfigError, match="sending only adapters replaces the previous ones"):
                group.sync_weights("actor", "rollout", version=2, adapters=True, **more)  # type: ignore[arg-type]
