"""Models with layers that carry a state: recomputation, compilation, adapters, shared prefixes, and what is refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drivetrain.engine.config import LoraConfig, MicroBatchConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ModelError, TopologyError
from drivetrain.engine.fsdp import build as build_module
from drivetrain.engine.fsdp.attention import IMPLEMENTATION
from drivetrain.engine.fsdp.compile import compile_model
from drivetrain.engine.hf.state_layers import check_context_parallelism, reset_states_between_documents
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.tiny_configs import WITH_STATE, tiny_model_config
from drivetrain.losses.sft import SFTLoss
from helpers.engines import OPTIM, build, close_to, reference_steps, steps, weights
from helpers.harness import run_ranks

# A delta rule, Mamba 2 with shared blocks, Mamba, a short convolution.
LENGTH = 40
KINDS = ("qwen3_next", "zamba2", "jamba", "lfm2")


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("recompute", [pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_recomputation_changes_no_number(family: str, recompute: Any, tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    close_to(steps(build(folder, recompute=recompute), 2), reference_steps(folder, 2))


def rank_recomputation(folder: str, recompute: Any) -> list[tuple[float, float]]:
    return steps(build(folder, recompute=recompute), 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["zamba2", "kimi_linear"])
def test_recomputation_of_sharded_layers_changes_no_number(family: str, tmp_path: Path) -> None:
    """The blocks that Zamba's layers have in common are gathered again in the backward pass of each layer."""
    folder = save_tiny_model(tmp_path / "model", family)
    close_to(run_ranks(rank_recomputation, 2, str(folder), "full")[0], reference_steps(folder, 2))


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "falcon_h1" else pytest.mark.slow) for f in (*WITH_STATE, "llama4_text")]
)
def test_computation_in_bfloat16_is_near_that_in_float32(family: str, tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    precision = PrecisionConfig(params="float32", compute="bfloat16")
    close_to(steps(build(folder, precision=precision), 2), reference_steps(folder, 2), loss=5e-3, norm=0.1)


def rank_uneven(folder: str) -> list[tuple[float, float]]:
    return steps(build(folder), 2)


@pytest.mark.slow
def test_convolutions_in_parts_of_equal_size_are_read_by_sharded_ranks(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "olmo_hybrid", linear_value_head_dim=32)
    close_to(run_ranks(rank_uneven, 2, str(folder))[0], reference_steps(folder, 2))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*KINDS, "llama4_text"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_change_no_number(
    family: str, recompute: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process_group: None
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(build_module, "compile_model", partial(compile_model, backend="aot_eager"))
    folder = save_tiny_model(tmp_path / "model", family)
    close_to(steps(build(folder, compile=True, recompute=recompute), 3), reference_steps(folder, 3))


@pytest.mark.parametrize("family", ["qwen3_next", *(pytest.param(f, marks=pytest.mark.slow) for f in WITH_STATE[1:])])
def test_adapters_train_packed_as_alone(family: str, tmp_path: Path, process_group: None) -> None:
    """All documents in one micro-batch, and each in one of its own, where no state can pass from one to the next."""
    folder = save_tiny_model(tmp_path / "model", family)
    found = []
    for budget in (512, LENGTH):
        engine = build(folder, model={"lora": LoraConfig(rank=4)}, micro_batch=MicroBatchConfig(max_tokens=budget))
        results = []
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            documents = torch.randint(3, 250, (5, LENGTH), generator=g).tolist()
            result = engine.train_batch(from_lists(documents), SFTLoss())
            assert result.grad_norm is not None
            results.append((result.loss, result.grad_norm))
        found.append((results, weights(engine, adapters="only")))
        engine.close()
    (packed, ours), (alone, theirs) = found
    close_to(packed, alone)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-6)


def test_adapters_that_would_have_no_effect_are_refused(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "nemotron_h")
    with pytest.raises(ModelError, match="names out_proj: transformers passes its weights to a kernel"):
        build(folder, model={"lora": LoraConfig(rank=2, targets=("in_proj", "out_proj"))})


def test_models_without_documents_and_with_caches_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_model_config("qwen3_next"), attn_implementation=IMPLEMENTATION)
    reset_states_between_documents(model)
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ModelError, match="does not pass its arguments down to Qwen3NextGatedDeltaNet"):
        model(input_ids=ids, use_cache=False)
    layer = model.model.layers[0].linear_attn
    with pytest.raises(ModelError, match="Qwen3NextGatedDeltaNet got cache_params; packed sequences have neither"):
        layer(torch.zeros(1, 3, 64), packed=object(), cache_params=object())
    with pytest.raises(ModelError, match="got 2 rows; packed sequences are one row"):
        layer(torch.zeros(2, 3, 64), packed=object())


def test_context_parallelism_that_splits_no_heads_is_refused() -> None:
    def model_of(family: str) -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_model_config(family))
        reset_states_between_documents(model)
        return model

    check_context_parallelism(model_of("nemotron_h"), "nemotron_h", 8)
    check_context_parallelism(model_of("jamba"), "jamba", 1)
    with pytest.raises(TopologyError, match="cp=2 with jamba: each channel of JambaMambaMixer depends on all others"):
        check_context_parallelism(model_of("jamba"), "jamba", 2)
    with pytest.raises(
        TopologyError, match=r"cp=8 does not divide the 4 heads of Qwen3NextGatedDeltaNet .* use one of 1, 2, 4"
    ):
        check_context_parallelism(model_of("qwen3_next"), "qwen3_next", 8)


def rank_groups(folder: str) -> list[tuple[float, float]]:
    return steps(build(folder, parallel=ParallelConfig(cp=2)), 2)


def test_a_group_that_context_parallelism_cannot_split_is_repeated(tmp_path: Path) -> None:
    """One group of B and C for all heads, whose norm spans the heads of both ranks."""
    folder = save_tiny_model(tmp_path / "model", "nemotron_h", n_groups=1)
    close_to(run_ranks(rank_groups, 2, str(folder))[0], reference_steps(folder, 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_long_documents_equal_plain_transformers(seed: int, tmp_path: Path, process_group: None) -> None:
    """Documents around the size of a chunk, and of several."""
    folder = save_tiny_model(tmp_path / "model", "qwen3_5_text", seed=seed)
    lengths = (1, 63, 64, 65, 200)
    g = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, 250, (n,), generator=g).tolist() for n in lengths]
    engine = build(folder, micro_batch=MicroBatchConfig(max_tokens=512), optim=replace(OPTIM, lr=1e-3))
    reference = PlainReference(folder, replace(OPTIM, lr=1e-3))
    for _ in range(5):
        got, want = engine.train_batch(from_lists(documents), SFTLoss()), reference.step(documents)
        assert got.grad_norm is not None
        close_to([(got.loss, got.grad_norm)], [(want.loss, want.grad_norm)])
    engine.close()
