"""The Megatron-core engine: layouts, adapters, mixtures, states, and that it leaves nothing behind."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, LoraConfig, ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.checks import CHECKS
from drivetrain.engine.conformance.engine_factory import engine_factory
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import CapabilityError, ConfigError, ModelError, RemoteError, TopologyError
from drivetrain.engine.export import export_hf
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.mcore.model import padding_id
from drivetrain.engine.mcore.options import MCoreOptions
from drivetrain.engine.registry import engine_class
from drivetrain.engine.tiny_configs import tiny_model_config
from drivetrain.losses.sft import SFTLoss
from helpers import engines
from helpers.engines import close_to, share, steps, weights
from helpers.harness import run_ranks

FAST = OptimConfig(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=4)


def build(folder: Path | str, axes: dict[str, Any] | None = None, backend: str = "mcore", **settings: Any) -> BaseEngine:
    return engines.build(folder, backend=backend, parallel=ParallelConfig(**(axes or {})), **settings)


# ---- the contract ------------------------------------------------------------------------------------------------


def rank_checks(axes: dict[str, Any], names: list[str], family: str) -> None:
    with engine_factory("mcore", ParallelConfig(**axes), family) as made:
        for name in names:
            CHECKS[name](made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "axes", "family"),
    [
        (1, {}, "qwen3"),
        (2, {"dp_shard": 2}, "qwen2"),
        (2, {"tp": 2, "tp_sequence": True}, "qwen3"),
        (2, {"pp": 2}, "llama"),
        (4, {"tp": 2, "tp_sequence": True, "cp": 2, "ep": 2}, "qwen3_moe"),
    ],
)
def test_mcore_conforms(nproc: int, axes: dict[str, Any], family: str) -> None:
    run_ranks(rank_checks, nproc, axes, list(CHECKS), family)


def test_the_numbers_conform_with_tensor_parallelism() -> None:
    """A part of the checks, which needs a fraction of the time."""
    run_ranks(rank_checks, 2, {"tp": 2, "tp_sequence": True}, ["reference", "infer", "weights"], "qwen3")


def rank_families(axes: dict[str, Any], families: list[str]) -> None:
    for family in families:
        rank_checks(axes, ["reference", "weights"], family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "tp_sequence": True},
        {"pp": 2},
        {"cp": 2},
    ],
)
def test_families_with_windows_caps_sandwich_norms_and_latents_conform(axes: dict[str, Any]) -> None:
    run_ranks(rank_families, 2, axes, ["gemma", "gemma2", "gemma3_text", "deepseek_v3"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"tp": 2}, {"pp": 2}, {"cp": 2}],
)
def test_families_with_fused_matrices_partial_rotation_and_norms_at_the_end_conform(axes: dict[str, Any]) -> None:
    run_ranks(rank_families, 2, axes, ["smollm3", "phi3", "olmo3"])


STATE_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "tp_sequence": True}),
    (2, {"pp": 2}),
    (2, {"cp": 2}),
    (4, {"tp": 2, "tp_sequence": True, "cp": 2}),
    (4, {"tp": 2, "tp_sequence": True, "pp": 2}),
    (4, {"cp": 2, "pp": 2}),
]


@pytest.mark.parametrize("family", [pytest.param("qwen3_5_text", marks=pytest.mark.slow), "qwen3_next"])
def test_layers_with_state_equal_plain_transformers(family: str, tmp_path: Path, process_group: None) -> None:
    # One stores its projections in sections, the other by key head.
    made = save_tiny_model(tmp_path / "m", family)
    close_to(steps(build(made, {}), 2), engines.reference_steps(made, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "axes"), STATE_LAYOUTS)
def test_families_with_state_conform(nproc: int, axes: dict[str, Any]) -> None:
    run_ranks(rank_state_families, nproc, axes, ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"ep": 2}, {"tp": 2, "tp_sequence": True, "ep": 2}])
def test_mixtures_with_state_conform(axes: dict[str, Any]) -> None:
    run_ranks(rank_state_families, 2, axes, ["qwen3_next", "qwen3_5_moe_text"])


def rank_state_families(axes: dict[str, Any], families: list[str]) -> None:
    for family in families:
        rank_checks(axes, ["reference", "shared_prefixes", "weights"], family)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_layers_with_state_are_recomputed(recompute: Any, tmp_path: Path) -> None:
    made = save_tiny_model(tmp_path / "m", "qwen3_next")
    axes = {"tp": 2, "tp_sequence": True}
    same(run_ranks(rank_like_fsdp, 2, str(made), axes, {"recompute": recompute}, 2)[0])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2, "tp_sequence": True}, {"pp": 2}])
def test_mixtures_conform_without_expert_parallelism(axes: dict[str, Any]) -> None:
    # Whole experts on tensor-parallel ranks, which see different tokens of one sequence.
    run_ranks(rank_families, 2, axes, ["qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "gpt_oss"])


@pytest.mark.slow
def test_experts_shared_by_tensor_parallel_ranks_conform() -> None:
    run_ranks(rank_families, 2, {"tp": 2, "tp_sequence": True, "etp": 2}, ["qwen3_moe"])


# ---- silent bugs that would pass by the loss alone ---------------------------------------------------------------


def rank_unmarked(folder: str) -> float:
    import drivetrain.engine.mcore.build

    module: Any = drivetrain.engine.mcore.build
    real = module.param_shards_of

    def unmarked(*args: Any) -> Any:
        held = real(*args)
        for h in held:
            h.parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
        return held

    module.param_shards_of = unmarked
    engine = build(folder, {"tp": 2})
    got = steps(engine, 1)[0]
    engine.close()
    want = engines.reference_steps(folder, 1)[0]
    assert abs(got[0] - want[0]) < 1e-6 * want[0], "the loss does not show it"
    return abs(got[1] - want[1]) / want[1]


def test_unmarked_parameters_would_spoil_the_norm(folder: Path) -> None:
    assert run_ranks(rank_unmarked, 2, str(folder))[0] > 0.05


def rank_shared_steps(folder: str, root: str, shared: bool) -> float:
    """How far the second and third step after a resume are from an uninterrupted run's."""
    engine = build(folder, optim=FAST)
    steps(engine, 2)
    saved = engine.save_checkpoint(root, 2)
    want = steps(engine, 3)
    engine.close()
    engine = build(folder, optim=FAST)
    engine.load_checkpoint(saved)
    if shared:
        states: list[Any] = [s.state for s in engine._optimizer.shards.values()]  # type: ignore[attr-defined]
        for state in states:
            state["step"] = states[0]["step"]
    got = steps(engine, 3)
    engine.close()
    return max(abs(a[0] - b[0]) for a, b in zip(got, want, strict=True))


@pytest.mark.slow
def test_a_shared_step_count_would_part_a_resumed_run(folder: Path, tmp_path: Path) -> None:
    assert run_ranks(rank_shared_steps, 1, str(folder), str(tmp_path / "a"), False)[0] == 0.0
    assert run_ranks(rank_shared_steps, 1, str(folder), str(tmp_path / "b"), True)[0] > 1e-5


# ---- several engines ---------------------------------------------------------------------------------------------


def rank_in_turns(folder: str) -> list[list[tuple[float, float]]]:
    from megatron.core import parallel_state

    before = (torch.cuda.current_device, parallel_state._TENSOR_MODEL_PARALLEL_GROUP)
    made = [build(folder, axes) for axes in ({"tp": 2}, {"pp": 2, "vpp": 2}, {"dp_shard": 2}, {"pp": 2})]
    made.append(build(folder, {"dp_shard": 2}, "fsdp"))
    found: list[list[tuple[float, float]]] = [[] for _ in made]
    for step in range(3):
        for engine, results in zip(made, found, strict=True):
            result = engine.train_batch(share(engine, tiny_documents(8, seed=step)), SFTLoss())
            results.append((result.loss, result.grad_norm or 0.0))
    for engine in made:
        engine.close()
    assert before == (torch.cuda.current_device, parallel_state._TENSOR_MODEL_PARALLEL_GROUP), "something was left behind"
    return found


@pytest.mark.slow
def test_engines_of_different_layouts_train_in_turns(folder: Path) -> None:
    want = engines.reference_steps(folder)
    for results in run_ranks(rank_in_turns, 2, str(folder)):
        for got in results:
            close_to(got, want)


def rank_subset(folder: str) -> list[tuple[float, float]]:
    mine = [0, 1] if dist.get_rank() < 2 else [2, 3]
    engine = build(folder, {"tp": 2} if mine == [0, 1] else {"pp": 2}, ranks=mine)
    found = steps(engine, 2)
    engine.close()
    return found


def test_two_engines_work_side_by_side_on_halves_of_the_ranks(folder: Path) -> None:
    want = engines.reference_steps(folder, 2)
    for got in run_ranks(rank_subset, 4, str(folder)):
        close_to(got, want)


def test_the_stand_in_for_cuda_ends_with_its_scope() -> None:
    from drivetrain.engine.mcore.cpu import cuda_calls_use_cpu

    before = torch.cuda.current_device
    with cuda_calls_use_cpu():
        assert torch.empty(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).cuda().device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).to("cuda").device.type == "cpu"
    assert torch.cuda.current_device is before
    assert torch.zeros(1).type() == "torch.FloatTensor"


# ---- settings ----------------------------------------------------------------------------------------------------


def rank_like_fsdp(folder: str, axes: dict[str, Any], settings: dict[str, Any], count: int) -> tuple[Any, ...]:
    """What a setting gives on both engines."""
    found = []
    for backend, layout in (("fsdp", {}), ("mcore", axes)):
        with contextlib.closing(build(folder, layout, backend, **settings)) as engine:
            found.append((steps(engine, count), weights(engine)))
    return tuple(found)


def same(found: tuple[Any, ...], weight: float = 1e-5) -> None:
    (want, before), (got, after) = found
    close_to(got, want)
    assert before.keys() == after.keys()
    for name in before:
        assert (before[name] - after[name]).abs().max() <= weight, name


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        {"tp": 2, "tp_sequence": True},
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
    ],
)
def test_adapters_are_pefts(axes: dict[str, Any], folder: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8.0)
    same(run_ranks(rank_like_fsdp, 2, str(folder), axes, {"model": {"lora": lora}}, 3)[0])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2, "tp_sequence": True}, {"pp": 2}, {"dp_shard": 2}])
def test_modules_beside_adapters_are_trained_in_full(axes: dict[str, Any], tmp_path: Path) -> None:
    for tied, modules in ((False, ("embed_tokens", "lm_head", "norm")), (True, ("embed_tokens",))):
        folder = save_tiny_model(tmp_path / f"{tied}", "llama", tie_word_embeddings=tied)
        lora = LoraConfig(rank=4, alpha=8.0, modules_to_save=modules)
        same(run_ranks(rank_like_fsdp, 2, str(folder), axes, {"model": {"lora": lora}}, 3)[0])


@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "tp_sequence": True},
        *(pytest.param(axes, marks=pytest.mark.slow) for axes in ({"tp": 2}, {"pp": 2}, {"cp": 2})),
    ],
)
def test_lookups_of_the_padding_token_give_its_row_no_gradient(axes: dict[str, Any], tmp_path: Path) -> None:
    # The end token is the padding token of many models; tied, the head still gives its row a gradient.
    folder = save_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True, pad_token_id=2)
    same(run_ranks(rank_like_fsdp, 2, str(folder), axes, {}, 2)[0])


@pytest.mark.parametrize(("token", "row"), [(None, None), (0, 0), (255, 255), (-1, 255)])
def test_padding_row_is_that_of_transformers(token: int | None, row: int | None) -> None:
    config = tiny_model_config("llama", pad_token_id=token)
    assert padding_id(config) == row
    assert AutoModelForCausalLM.from_config(config).get_input_embeddings().padding_idx == row


@pytest.mark.slow
def test_adapters_of_some_layers_alone(folder: Path) -> None:
    lora = LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))
    same(run_ranks(rank_like_fsdp, 2, str(folder), {"tp": 2}, {"model": {"lora": lora}}, 3)[0])


def rank_drops(folder: str, sequence: bool) -> dict[str, Tensor]:
    axes = {"tp": 2, "tp_sequence": sequence}
    with contextlib.closing(build(folder, axes, model={"lora": LoraConfig(rank=4, dropout=0.5)}, optim=FAST)) as engine:
        steps(engine)
        held: Any = engine._built.param_shards  # type: ignore[attr-defined]
        return {h.name: h.parameter.detach().clone() for h in held if h.adapter and not h.parameter.tensor_model_parallel}


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_factors_that_ranks_share_stay_equal_under_dropout(sequence: bool, folder: Path) -> None:
    one, other = run_ranks(rank_drops, 2, str(folder), sequence)
    assert one
    assert all(torch.equal(one[n], other[n]) for n in one)


def rank_incomplete(folder: str) -> str:
    try:
        build(folder, {"pp": 2}, optim=None)
    except (ModelError, RemoteError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def test_a_tensor_that_one_stage_misses_is_everybodys_error(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    del stored["model.layers.3.mlp.up_proj.weight"]
    save_file(stored, str(tmp_path / "m" / "model.safetensors"))
    first, last = run_ranks(rank_incomplete, 2, str(tmp_path / "m"))
    assert first.startswith("RemoteError: rank 1 failed: ModelError")
    assert "layers.3.mlp.up_proj" in last


@pytest.mark.slow
def test_adapters_under_full_recomputation(folder: Path) -> None:
    settings = {"model": {"lora": LoraConfig(rank=4)}, "recompute": "full"}
    same(run_ranks(rank_like_fsdp, 1, str(folder), {}, settings, 3)[0])


def test_random_weights_are_equal_on_both_engines(tmp_path: Path) -> None:
    made = save_tiny_model(tmp_path / "m", "qwen3_moe", tie_word_embeddings=True)
    axes = {"tp": 2, "tp_sequence": True, "ep": 2}
    same(run_ranks(rank_like_fsdp, 2, str(made), axes, {"model": {"init": "random"}}, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", [0.5])
def test_the_balancing_loss_is_fsdps(coefficient: float, tmp_path: Path) -> None:
    made = save_tiny_model(tmp_path / "m", "qwen3_moe")
    settings = {"model": {"router_aux_loss_coef": coefficient}}
    for axes in ({"tp": 2, "tp_sequence": True}, {"cp": 2}):
        # A micro-batch is the same on both: fsdp's two ranks would be two micro-batches.
        found = run_ranks(rank_one_share, 2, str(made), axes, settings)[0]
        same(found)


def rank_one_share(folder: str, axes: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, ...]:
    found = []
    for backend, layout in (("fsdp", {"cp": 2}), ("mcore", axes)):
        with contextlib.closing(build(folder, layout, backend, **settings)) as engine:
            found.append((steps(engine, 2), weights(engine)))
    return tuple(found)


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "full"},
        pytest.param({"recompute": "selective"}, marks=pytest.mark.slow),
        {"options": MCoreOptions(overlap_grad_reduce=True, bucket_size=4000)},
    ],
)
def test_settings_that_change_no_number(settings: dict[str, Any], folder: Path) -> None:
    got = run_ranks(rank_steps, 2, str(folder), {"dp_shard": 2}, settings)[0]
    close_to(got, engines.reference_steps(folder))


def rank_steps(folder: str, axes: dict[str, Any], settings: dict[str, Any]) -> list[tuple[float, float]]:
    with contextlib.closing(build(folder, axes, **settings)) as engine:
        return steps(engine)


def rank_accumulates(folder: str) -> tuple[float, float]:
    options = MCoreOptions(overlap_grad_reduce=True, bucket_size=4000)
    documents = tiny_documents(8, seed=0)
    total = {"nll": float(sum(len(d) - 1 for d in documents))}
    with contextlib.closing(build(folder, {"dp_shard": 2}, options=options)) as engine, engine.train_mode():
        engine.zero_grad()
        for half in (documents[:5], documents[5:]):
            engine.forward_backward(share(engine, half), SFTLoss(), total_weights=total)
        return engine.optimizer_step().grad_norm or 0.0, engines.reference_steps(folder, 1)[0][1]


def test_overlapped_reduction_accumulates_over_calls(folder: Path) -> None:
    got, want = run_ranks(rank_accumulates, 2, str(folder))[0]
    assert abs(got - want) <= 1e-5 * want


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
]


def rank_ropes(folders: list[str]) -> list[Any]:
    found = []
    for folder in folders:
        with contextlib.closing(build(folder)) as engine:
            found.append((steps(engine, 1), engines.reference_steps(folder, 1)))
    return found


def test_scaled_rotary_embeddings(tmp_path: Path) -> None:
    folders = [
        str(save_tiny_model(tmp_path / r["rope_type"], "llama", rope_parameters={"rope_theta": 10000.0, **r})) for r in ROPES
    ]
    # Settings for all layers, which transformers keeps beside those of each kind of layers, and does not read.
    flat = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    folders.append(str(save_tiny_model(tmp_path / "flat", "olmo3", rope_parameters=flat)))
    for got, want in run_ranks(rank_ropes, 1, folders)[0]:
        close_to(got, want)


BY_LENGTH: list[dict[str, Any]] = [
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
    },
]


def rank_ropes_by_length(folder: str, axes: dict[str, Any]) -> tuple[Any, Any]:
    # transformers keeps the frequencies of the longest document so far, until one comes that is short: each long one follows one.
    documents = [tiny_documents(2, seed=i, longest=n)[1] for i, n in enumerate((7, 50, 9, 23, 11, 40))]
    with contextlib.closing(build(folder, axes)) as engine:
        got = engine.train_batch(share(engine, documents), SFTLoss())
    want = PlainReference(folder, engines.OPTIM).step(documents)
    return (got.loss, got.grad_norm), (want.loss, want.grad_norm)


@pytest.mark.parametrize("axes", [{"tp": 2, "tp_sequence": True}, {"cp": 2}])
@pytest.mark.parametrize("rope", BY_LENGTH, ids=lambda r: str(r["rope_type"]))
def test_documents_are_rotated_by_their_own_length(rope: dict[str, Any], axes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama", max_position_embeddings=16, rope_parameters={"rope_theta": 1e4, **rope})
    for got, want in run_ranks(rank_ropes_by_length, 2, str(folder), axes):
        close_to([got], [want])


def rank_value_head(folder: str, axes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    found = []
    for backend, layout in (("fsdp", {}), ("mcore", axes)):
        with contextlib.closing(build(folder, layout, backend, model={"head": "value"}, optim=None)) as engine:
            documents = tiny_documents(6, seed=3)
            batch = share(engine, documents)
            mine = engine.infer_batch(batch, OutputRequest(values=True))["values"]
            # fsdp's two ranks have two shares; what is compared is each rank's own documents, alone.
            whole = engines.from_lists(documents[:1])
            found.append(engine.infer_batch(whole, OutputRequest(values=True))["values"])
            assert len(mine) == batch.num_tokens
    return found[0], found[1]


@pytest.mark.parametrize("axes", [{"tp": 2, "tp_sequence": True}, {"pp": 2}])
def test_value_head(axes: dict[str, Any], folder: Path) -> None:
    for want, got in run_ranks(rank_value_head, 2, str(folder), axes):
        assert (want - got).abs().max() < 1e-5
        assert want.abs().max() > 1e-3


def rank_bfloat16(folder: str, axes: dict[str, Any]) -> tuple[Any, torch.dtype]:
    precision = PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
    with contextlib.closing(build(folder, axes, precision=precision)) as engine:
        return steps(engine), next(iter(weights(engine).values())).dtype


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_format_allows(folder: Path) -> None:
    exact = engines.reference_steps(folder)
    rounded = PlainReference(folder, engines.OPTIM, compute=torch.bfloat16)
    known = [rounded.step(tiny_documents(8, seed=s)) for s in range(3)]
    loss = 3 * max(abs(k.loss - e[0]) / e[0] for k, e in zip(known, exact, strict=True))
    norm = 3 * max(abs(k.grad_norm - e[1]) / e[1] for k, e in zip(known, exact, strict=True))
    for axes in ({"tp": 2, "tp_sequence": True}, {"dp_shard": 2}):
        got, dtype = run_ranks(rank_bfloat16, 2, str(folder), axes)[0]
        close_to(got, exact, loss=loss, norm=norm)
        assert dtype == torch.float32, "the trained numbers are exported, not their 16-bit copies"


def rank_adapter_export(folder: str, out: str) -> tuple[float, float]:
    with contextlib.closing(build(folder, {"tp": 2}, model={"lora": LoraConfig(rank=4, alpha=8.0)}, optim=FAST)) as engine:
        batch = engines.from_lists(tiny_documents(3, seed=9))
        before = engine.infer_batch(batch, OutputRequest(log_probs=True))["log_probs"]
        steps(engine, 3)
        export_hf(engine, f"{out}/adapter", adapters="only")
        export_hf(engine, f"{out}/merged")
        trained = engine.infer_batch(batch, OutputRequest(log_probs=True))["log_probs"]
        with engine.disable_adapter():
            plain = engine.infer_batch(batch, OutputRequest(log_probs=True))["log_probs"]
    if dist.get_rank() == 0:
        torch.save({"trained": trained}, f"{out}/outputs.pt")
    return float((plain - before).abs().max()), float((trained - before).abs().max())


@pytest.mark.slow
def test_exported_adapters_load_in_peft(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    off, effect = run_ranks(rank_adapter_export, 2, str(folder), str(tmp_path))[0]
    assert off < 1e-6, "without its adapter the model is the base again"
    assert effect > 1e-3
    trained = torch.load(tmp_path / "outputs.pt", weights_only=True)["trained"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for model in (
        PeftModel.from_pretrained(base, tmp_path / "adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        model.eval()
        start = 0
        for document in tiny_documents(3, seed=9):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([document])).logits[0]
            want = logits[:-1].log_softmax(-1).gather(1, torch.tensor(document[1:], dtype=torch.long)[:, None])[:, 0]
            assert torch.allclose(trained[start : start + len(want)], want, atol=1e-5)
            start += len(document)


# ---- bad input ---------------------------------------------------------------------------------------------------


def refused(folder: Path, axes: dict[str, Any], model: dict[str, Any] | None = None) -> Any:
    """Checked without a process group: no rank is started, no weight is read."""
    settings = ParallelConfig(**{"dp_shard": 1, **axes})
    engine = engine_class("mcore")(
        model=ModelConfig(path=str(folder), **(model or {})), engine=EngineConfig(backend="mcore", parallel=settings)
    )
    engine.check()


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tp": 4}, r"tp=4 is more than the 2 key/value heads.*largest possible is 2"),
        ({"pp": 3}, r"pp=3 does not divide the 4 layers.*1, 2, 4"),
        ({"pp": 2, "vpp": 4}, r"pp=2 x vpp=4 does not divide the 4 layers"),
        ({"vpp": 2}, r"vpp=2 with pp=1"),
        ({"cp": 3}, r"cp=3 does not divide the 8 attention heads"),
        ({"tp": 2, "cp": 8}, r"cp=8 does not divide the 4 attention heads that tp=2 leaves"),
        ({"tp_sequence": True}, r"tp_sequence=true with tp=1"),
        ({"ep": 2}, r"ep=2, but qwen3 is not a mixture"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(axes: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(TopologyError, match=message):
        refused(folder, axes)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"ep": 3, "dp_shard": 3}, r"ep=3 does not divide the 4 experts"),
        ({"ep": 2}, r"ep=2 x etp=1 does not divide the 1 ranks of a pipeline stage"),
        ({"tp": 2}, r"without tp_sequence on a mixture"),
        ({"dp_shard": 2, "etp": 2}, r"etp=2 .*on the CPU: ranks would gather unequal"),
    ],
)
def test_experts_that_do_not_fit_are_refused(axes: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = save_tiny_model(tmp_path / "m", "qwen3_moe")
    with pytest.raises(TopologyError, match=message):
        refused(made, axes)


def test_models_and_settings_that_it_has_not_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'gpt_neox' has no bridge"):
        refused(save_tiny_model(tmp_path / "a", "gpt_neox"), {})
    with pytest.raises(TopologyError, match=r"engine.parallel.etp=2 with gpt_oss, whose experts have biases"):
        refused(save_tiny_model(tmp_path / "c", "gpt_oss"), {"tp": 2, "tp_sequence": True, "etp": 2})
    moe = save_tiny_model(tmp_path / "b", "qwen3_moe")
    with pytest.raises(CapabilityError, match=r"balancing loss .*pp=2"):
        refused(moe, {"pp": 2}, {"router_aux_loss_coef": 0.1})
    with pytest.raises(CapabilityError, match="dp_replicate=2"):
        refused(folder, {"dp_replicate": 2})


def test_a_missing_megatron_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine import registry

    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[mcore\]'"):
        engine_class("mcore")


def rank_freezes(folder: str) -> str:
    try:
        build(folder, model={"freeze": ("*.q_proj.weight",)})
    except ModelError as e:
        return str(e)
    return ""


def rank_adapts(folder: str, targets: tuple[str, ...]) -> str:
    try:
        build(folder, model={"lora": LoraConfig(rank=4, targets=targets)})
    except ModelError as e:
        return str(e)
    return ""


def test_a_target_without_a_parallel_layer_is_refused(tmp_path: Path) -> None:
    made = str(save_tiny_model(tmp_path / "m", "deepseek_v3"))
    assert "q_a_proj cannot be adapted by engine.backend=mcore" in run_ranks(rank_adapts, 1, made, ("q_a_proj", "o_proj"))[0]
    assert run_ranks(rank_adapts, 1, made, ("q_b_proj", "o_proj"))[0] == ""


def rank_keeps_precision(folder: str, root: str) -> dict[str, Any]:
    """What a 16-bit computation leaves of weights that are not trained: in exports, in checkpoints, merged."""
    precision = PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
    found: dict[str, Any] = {}
    with contextlib.closing(build(folder, {"tp": 2}, precision=precision, model={"freeze": ("*embed*",)})) as engine:
        steps(engine, 1)
        found["frozen"] = weights(engine)["model.embed_tokens.weight"]
        saved = engine.save_checkpoint(root, 1)
        trained = weights(engine)
    with contextlib.closing(build(folder, {"dp_shard": 2}, precision=precision, optim=None)) as engine:
        engine.load_checkpoint(saved)
        found["loaded"] = all(torch.equal(trained[n], v) for n, v in weights(engine).items())
    with contextlib.closing(build(folder, {"dp_shard": 2}, precision=precision, model={"lora": LoraConfig(rank=4)})) as engine:
        # B is zero still: what is merged in is nothing.
        found["merged"] = weights(engine)
    return found


def test_what_is_not_trained_keeps_its_precision(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    base = load_file(folder / "model.safetensors")
    found = run_ranks(rank_keeps_precision, 2, str(folder), str(tmp_path))[0]
    assert torch.equal(found["frozen"], base["model.embed_tokens.weight"])
    assert found["loaded"]
    assert all(torch.equal(found["merged"][n], v) for n, v in base.items())


def rank_bfloat16_adapters(folder: str) -> tuple[set[torch.dtype], set[torch.dtype]]:
    precision = PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")
    with contextlib.closing(build(folder, {"tp": 2}, precision=precision, model={"lora": LoraConfig(rank=4)})) as engine:
        steps(engine, 1)
        return {v.dtype for v in weights(engine).values()}, {v.dtype for v in weights(engine, adapters="only").values()}


def test_adapters_of_a_16_bit_base_are_float32(folder: Path) -> None:
    assert run_ranks(rank_bfloat16_adapters, 2, str(folder))[0] == ({torch.bfloat16}, {torch.float32})


@pytest.mark.slow
def test_a_pipeline_stage_may_be_frozen_whole(folder: Path) -> None:
    last = ("model.norm*", "lm_head*", "model.layers.2.*", "model.layers.3.*")
    same(run_ranks(rank_like_fsdp, 2, str(folder), {"pp": 2}, {"model": {"freeze": last}}, 2)[0])


def rank_refused(folder: str, axes: dict[str, Any]) -> str:
    try:
        build(folder, axes)
    except (TopologyError, ModelError) as e:
        return str(e)
    return ""


def test_what_the_ranks_find_out_together_is_refused_alike(folder: Path, tmp_path: Path) -> None:
    moe = str(save_tiny_model(tmp_path / "moe", "qwen3_moe"))
    biased = str(save_tiny_model(tmp_path / "biased", "llama", mlp_bias=True))
    for made, axes, message in (
        (moe, {"ep": 4}, "engine.parallel.ep=4 x etp=1 does not divide the 2 ranks"),
        (str(folder), {"ep": 2}, "qwen3 is not a mixture"),
        (biased, {"pp": 2}, "the bridge of llama to Megatron-core does not fit this model: the model has model.layers.0.mlp"),
    ):
        assert all(message in told for told in run_ranks(rank_refused, 2, made, axes)), message


@pytest.mark.parametrize(
    ("family", "switch", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_settings_that_it_would_ignore_are_refused(family: str, switch: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        refused(save_tiny_model(tmp_path / "m", family, **switch), {})


def test_mixtures_are_checked_before_the_number_of_processes_is_known(tmp_path: Path) -> None:
    made = save_tiny_model(tmp_path / "m", "qwen3_moe")
    config = EngineConfig(backend="mcore", parallel=ParallelConfig(ep=2))
    engine_class("mcore")(model=ModelConfig(path=str(made)), engine=config).check()


def test_half_a_matrix_cannot_be_frozen(folder: Path) -> None:
    assert "q_proj" in run_ranks(rank_freezes, 1, str(folder))[0]


@pytest.mark.slow
def test_frozen_parameters_stay(folder: Path) -> None:
    settings = {"model": {"freeze": ("*.self_attn.*", "model.embed_tokens.weight")}}
    same(run_ranks(rank_like_fsdp, 2, str(folder), {"tp": 2}, settings, 3)[0])
