"""Biases of routers follow the loads of experts, counted over the whole batch in every layout, as published (arXiv:2408.15664)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import LoraConfig, MicroBatchConfig, OptimConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.losses.sft import SFTLoss
from helpers.engines import build, weights
from helpers.harness import run_ranks
from helpers.routes import documents_of, routes_of, with_routes

OPTIM = OptimConfig(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
RATE = 0.05
"""So large that some tokens soon go elsewhere."""
STEPS = 3
BIASES = ("e_score_correction_bias", "expert_bias")


def reference(folder: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor], list[float]]:
    """Loss and gradient norm of each step, the biases at the end, and by how much the most loaded experts exceed the mean."""
    plain = PlainReference(folder, OPTIM)
    routers = [m for m in plain.model.modules() if "router" in type(m).__name__.lower()]
    biases = [b for n, b in plain.model.named_buffers() if n.endswith(BIASES)]
    assert len(biases) == len(routers) > 0
    chosen: list[list[Tensor]] = [[] for _ in routers]
    for i, router in enumerate(routers):
        router.register_forward_hook(lambda module, args, output, i=i: chosen[i].append(output[2].flatten()))
    results, violations = [], []
    for step in range(STEPS):
        for found in chosen:
            found.clear()
        done = plain.step(documents_of(step))
        results.append((done.loss, done.grad_norm))
        over = 0.0
        for bias, found in zip(biases, chosen, strict=True):
            loads = torch.cat(found).bincount(minlength=len(bias)).double()
            bias += (RATE * (loads.mean() - loads).sign()).to(bias.dtype)
            over += float(loads.max() / loads.mean() - 1) / len(routers)
        violations.append(over)
    stored = plain.weights()
    return results, {name: value for name, value in stored.items() if name.endswith(BIASES)}, violations


def run(folder: str, settings: dict[str, Any]) -> tuple[list[tuple[float, ...]], dict[str, Tensor]]:
    engine = build(folder, optim=OPTIM, model={"router_bias_update_rate": RATE}, share_prefixes="on", **settings)
    results = [train(engine, step) for step in range(STEPS)]
    exported = {name: value for name, value in weights(engine).items() if name.endswith(BIASES)}
    engine.close()
    return results, exported


def train(engine: BaseEngine, step: int) -> tuple[float, ...]:
    documents = documents_of(step)
    topology = engine.topology
    mine = balance([len(d) for d in documents], topology.dp_size, groups=[i % 2 for i in range(6)] + [2, 3])[topology.dp_rank]
    result = engine.train_batch(from_lists([documents[i] for i in mine]), SFTLoss())
    assert result.grad_norm is not None
    return result.loss, result.grad_norm, result.metrics["expert_max_violation"]


def check(found: tuple[list[tuple[float, ...]], dict[str, Tensor]], folder: Path) -> None:
    results, biases = found
    expected, expected_biases, violations = reference(folder)
    for (loss, norm, violation), (want_loss, want_norm), want in zip(results, expected, violations, strict=True):
        assert abs(loss - want_loss) <= 1e-6 * want_loss, (results, expected)
        assert abs(norm - want_norm) <= 1e-5 * want_norm, (results, expected)
        assert violation == pytest.approx(want, abs=1e-9)
    assert biases.keys() == expected_biases.keys()
    for name, bias in biases.items():
        torch.testing.assert_close(bias, expected_biases[name], rtol=0, atol=1e-6)
        assert bias.abs().max() >= RATE / 2


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("backend", "family", "settings"),
    [
        pytest.param("fsdp", "deepseek_v3", {"recompute": "full"}),
        pytest.param("mcore", "deepseek_v3", {}, marks=pytest.mark.slow),
        pytest.param("mcore", "glm4_moe", {"recompute": "full"}, marks=pytest.mark.slow),
        *(pytest.param("fsdp", f, {}, marks=pytest.mark.slow) for f in ("glm4_moe", "minimax_m2", "lfm2_moe", "kimi_linear")),
        pytest.param("fsdp", "deepseek_v3", {"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_biases_equal_those_of_plain_transformers(tmp_path: Path, backend: str, family: str, settings: dict[str, Any]) -> None:
    folder = save_tiny_model(tmp_path, family)
    check(run(str(folder), {"backend": backend, **settings}), folder)


@pytest.mark.parametrize(
    ("backend", "nproc", "parallel"),
    [
        pytest.param("fsdp", 2, {"dp_shard": 2}),
        pytest.param("fsdp", 4, {"dp_replicate": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("mcore", 2, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("mcore", 4, {"tp": 2, "tp_sequence": True, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("mcore", 2, {"ep": 2}, marks=pytest.mark.slow),
    ],
)
def test_loads_are_those_of_all_ranks(tmp_path: Path, backend: str, nproc: int, parallel: dict[str, Any]) -> None:
    folder = save_tiny_model(tmp_path, "deepseek_v3", num_hidden_layers=4)
    settings = {"backend": backend, "parallel": ParallelConfig(**parallel), "micro_batch": MicroBatchConfig(max_tokens=64)}
    for found in run_ranks(run, nproc, str(folder), settings):
        check(found, folder)


@pytest.mark.usefixtures("process_group")
def test_replayed_routes_do_not_count_and_biases_are_saved(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "deepseek_v3")
    after = []
    for replay in (False, True):
        engine = build(folder, optim=OPTIM, model={"router_bias_update_rate": RATE})
        documents = documents_of(0)
        batch = from_lists(documents)
        if replay:
            batch = with_routes(documents, [routes_of(d, 1, 4, 2) for d in documents])
        engine.train_batch(batch, SFTLoss())
        after.append({n: b for n, b in weights(engine).items() if n.endswith(BIASES)})
        # Evaluation changes nothing.
        engine.forward_backward(batch, SFTLoss(), forward_only=True)
        saved = engine.save_checkpoint(tmp_path / f"checkpoint-{replay}", 1)
        engine.close()
        other = build(folder, optim=OPTIM, model={"router_bias_update_rate": RATE})
        other.load_checkpoint(saved)
        for name, bias in weights(other).items():
            assert not name.endswith(BIASES) or torch.equal(bias, after[-1][name])
        other.close()
    assert all(torch.equal(bias, after[1][name]) for name, bias in after[0].items())


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_small_steps_are_not_lost_in_16_bits(tmp_path: Path, backend: str) -> None:
    folder = save_tiny_model(tmp_path, "deepseek_v3")
    precision = PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
    engine = build(folder, backend=backend, optim=OPTIM, model={"router_bias_update_rate": 1e-4}, precision=precision)
    before = {layer: bias.clone() for layer, bias in engine.router_biases().items()}
    engine.train_batch(from_lists(documents_of(0)), SFTLoss())
    for layer, bias in engine.router_biases().items():
        assert bias.dtype == torch.float32
        assert set(((bias - before[layer]) / 1e-4).round().tolist()) <= {-1.0, 0.0, 1.0}
        assert not torch.equal(bias, before[layer])
    engine.close()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("family", "model", "message"),
    [
        ("qwen3", {}, "the routers of qwen3 have no bias"),
        ("qwen3_moe", {}, "the routers of qwen3_moe have no bias"),
        ("deepseek_v3", {"lora": {"rank": 4}}, "with adapters"),
    ],
)
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("mcore", marks=pytest.mark.slow)])
def test_models_without_biases_are_refused(
    tmp_path: Path, backend: str, family: str, model: dict[str, Any], message: str
) -> None:
    folder = save_tiny_model(tmp_path, family)
    settings = {"lora": LoraConfig(**model["lora"])} if model else {}
    with pytest.raises(ConfigError, match=message):
        build(folder, backend=backend, model={"router_bias_update_rate": RATE, **settings})
