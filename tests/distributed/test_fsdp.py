"""What the FSDP engine can do beside the contract: adapters, heads, memory, precision, mixtures, seeds, several engines."""

import copy
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import (
    LoraConfig,
    OffloadConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
)
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents, tiny_model
from drivetrain.engine.errors import CapabilityError, ConfigError, ModelError, RemoteError, TopologyError
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.loss import LossSums, TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.tiny_configs import tiny_model_config
from drivetrain.losses.sft import SFTLoss
from helpers.engines import OPTIM, build, close_to, reference_steps, share, steps, weights
from helpers.harness import run_ranks

# ---- settings that must change nothing -------------------------------------------------------------------------------

SAME = [
    {"recompute": "full"},
    {"recompute": "selective"},
    {"offload": OffloadConfig(params="host")},
    {"offload": OffloadConfig(optimizer="host")},
    {"options": FSDPOptions(reshard_after_forward=False)},
    {"options": FSDPOptions(reduce_each_micro_batch=True)},
    {"precision": PrecisionConfig(params="float64", compute="float64", reduce="float64")},
    {"deterministic": True},
]


def rank_same(folder: str, settings: list[dict[str, Any]], axes: dict[str, Any]) -> list[list[tuple[float, float]]]:
    found = []
    for chosen in settings:
        engine = build(folder, parallel=ParallelConfig(**axes), **chosen)
        found.append(steps(engine))
        engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("axes", [pytest.param({}, marks=pytest.mark.slow), {"cp": 2}])
def test_memory_settings_change_no_number(axes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    want = reference_steps(folder)
    for got in run_ranks(rank_same, 2, str(folder), SAME, axes)[0]:
        close_to(got, want)


def test_bfloat16_is_within_the_references_own_distance(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    exact = PlainReference(folder, OPTIM).step(tiny_documents(8, seed=0))
    rough = PlainReference(folder, OPTIM, torch.bfloat16).step(tiny_documents(8, seed=0))
    loss_bound = 4 * abs(rough.loss - exact.loss) / exact.loss + 1e-4
    norm_bound = 4 * abs(rough.grad_norm - exact.grad_norm) / exact.grad_norm + 1e-3
    for precision in (
        PrecisionConfig(params="float32", compute="bfloat16", reduce="float32"),
        PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32"),
    ):
        # Parameters in 16 bits are not trained.
        trains = precision.params == "float32"
        engine = build(folder, precision=precision, optim=OPTIM if trains else None)
        result = engine.forward_backward(share(engine, tiny_documents(8, seed=0)), SFTLoss(), forward_only=not trains)
        assert result.loss != exact.loss
        assert abs(result.loss - exact.loss) / exact.loss < loss_bound
        if trains:
            norm = engine.optimizer_step(result).grad_norm
            assert norm is not None
            assert abs(norm - exact.grad_norm) / exact.grad_norm < norm_bound
        assert {v.dtype for v in weights(engine).values()} == {getattr(torch, precision.params)}
        engine.close()


# ---- loading, seeds, ties --------------------------------------------------------------------------------------------


def rank_ties(folder: str) -> tuple[list[str], list[tuple[float, float]]]:
    engine = build(folder)
    found = steps(engine)
    names = list(weights(engine))
    engine.close()
    return names, found


def test_tied_embeddings_train_as_one_parameter(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    names, found = run_ranks(rank_ties, 2, str(folder))[0]
    close_to(found, reference_steps(folder))
    assert "lm_head.weight" not in names


def test_sharded_files_are_read(tmp_path: Path, process_group: None) -> None:
    one, many = (save_tiny_model(tmp_path / n, "qwen3_moe", shard_size=s) for n, s in (("one", "5GB"), ("many", "100KB")))
    assert len(list(many.glob("*.safetensors"))) > 3
    engines = [build(f, optim=None) for f in (one, many)]
    a, b = (weights(e) for e in engines)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


def rank_random(folder: str, axes: dict[str, Any], model: dict[str, Any]) -> dict[str, Tensor]:
    engine = build(folder, model={"init": "random", **model}, parallel=ParallelConfig(**axes), seed=7)
    found = weights(engine)
    if model:
        found |= weights(engine, adapters="only")
    engine.close()
    return found


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3", "gpt2"))]
)
def test_random_weights_depend_on_the_seed_alone(family: str, tmp_path: Path) -> None:
    config = tiny_model_config(family, tie_word_embeddings=False)
    config.save_pretrained(tmp_path)
    one = run_ranks(rank_random, 1, str(tmp_path), {}, {})[0]
    for nproc, axes in ((2, {}), (4, {"dp_replicate": 2})):
        for other in run_ranks(rank_random, nproc, str(tmp_path), axes, {}):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[k], other[k]) for k in one)
    # As the family itself would draw them: same spread, same zeros and ones.
    plain = tiny_model(config)
    with torch.no_grad():
        for module in plain.modules():
            plain._init_weights(module)
    sizes = {n: float(p.std()) for n, p in plain.named_parameters() if p.dim() > 1 and n in one}
    assert sizes
    for name, spread in sizes.items():
        assert float(one[name].std()) == pytest.approx(spread, rel=0.2), name
    norms = [n for n in one if "norm" in n and n.endswith("weight")]
    assert all(torch.equal(one[n], torch.ones_like(one[n])) for n in norms)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, process_group: None) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up_proj" not in k}, file)
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*layers\.1\.mlp\.up_proj\.weight"):
        build(folder)
    save_file({**tensors, "model.norm.weight": torch.zeros(3)}, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[3\] .* but \[64\] according to config.json"):
        build(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors"):
        build(folder)


def rank_one_sees_no_file(folders: list[str]) -> str:
    try:
        build(folders[dist.get_rank()])
    except (ModelError, RemoteError) as e:
        return f"{type(e).__name__}: {e}"
    return "nothing raised"


def test_an_error_of_one_rank_is_everybodys(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").unlink()
    found = run_ranks(rank_one_sees_no_file, 2, [str(folder), str(broken)])
    assert found[1].startswith("ModelError: ")
    assert found[0].startswith("RemoteError: rank 1 failed: ModelError")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"parallel": ParallelConfig(tp=2)}, CapabilityError, r"engine.parallel.tp=2: backend 'fsdp' supports the axes cp"),
        ({"parallel": ParallelConfig(cp=2)}, TopologyError, r"needs a multiple of 2 processes, but the world size is 1"),
        ({"parallel": ParallelConfig(dp_shard=3)}, TopologyError, r"requires 3 processes .* but the world size is 1"),
        ({"offload": OffloadConfig(params="disk")}, CapabilityError, r"engine.offload.params=disk"),
        ({"precision": PrecisionConfig(params="bfloat16", compute="float32")}, CapabilityError, r"precision.params=bfloat16"),
        (
            {"precision": PrecisionConfig(params="bfloat16", compute="bfloat16")},
            CapabilityError,
            r"params=bfloat16 with model.lora.rank=0: .*set engine.precision.params=float32 and .*or train adapters",
        ),
        ({"precision": PrecisionConfig(reduce="float16")}, CapabilityError, r"precision.reduce=float16"),
        ({"model": {"lora": LoraConfig(rank=4, targets=("nope",))}}, ModelError, r"targets names nope"),
        ({"model": {"lora": LoraConfig(rank=-1)}}, ModelError, r"rank=-1"),
        ({"model": {"router_aux_loss_coef": 0.1}}, ModelError, r"is not a mixture of experts"),
        ({"optim": OptimConfig(schedule="cosine")}, ConfigError, r"optim.schedule=cosine needs a known number of steps"),
    ],
)
def test_what_cannot_work_is_refused(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, process_group: None
) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    with pytest.raises(error, match=message):
        build(folder, **change)


@pytest.mark.parametrize(
    ("axis", "size", "family", "is_named"),
    [
        ("tp", 2, "llama", True),
        ("pp", 2, "llama", True),
        # Another size would do, as the error of that backend says.
        ("tp", 64, "llama", True),
        ("tp", 2, "apertus", False),
    ],
)
def test_an_axis_of_another_backend_is_refused_with_its_name(
    axis: str, size: Any, family: str, is_named: bool, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    with pytest.raises(CapabilityError) as raised:
        build(folder, parallel=ParallelConfig(**{axis: size}))
    way_out = f"use one of those, or engine.backend=mcore, which supports {axis} for this model"
    assert (way_out in str(raised.value)) is is_named
    assert str(raised.value).startswith(f"engine.parallel.{axis}={size}: backend 'fsdp' supports the axes cp, ")


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_longest_document_is_refused(rope: str, tmp_path: Path, process_group: None) -> None:
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    if rope == "dynamic":
        # HunYuan's factor, which fixes the frequencies; this family does not read it.
        parameters["alpha"] = 1000.0
    else:
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    tiny_model_config("llama", rope_parameters=parameters).save_pretrained(tmp_path)
    way_out = {
        "dynamic": "rope_type in config.json to default, which is the same up to max_position_embeddings=256 tokens",
        "longrope": "max_position_embeddings in config.json to 128",
    }
    with pytest.raises(ModelError, match=f"rope_type={rope} .* set {way_out[rope]}.*engine.backend=mcore"):
        build(tmp_path)


def test_a_deterministic_engine_leaves_torch_as_it_was(tmp_path: Path, process_group: None) -> None:
    engine = build(save_tiny_model(tmp_path / "model", "llama"), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    engine.close()
    assert not torch.are_deterministic_algorithms_enabled()


def test_adapters_of_a_16_bit_model_are_float32(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    bf16 = PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")
    engine = build(folder, model={"lora": LoraConfig(rank=4)}, precision=bf16, optim=replace(OPTIM, lr=1e-2))
    batch = share(engine, tiny_documents(8, seed=0))
    losses = [engine.train_batch(batch, SFTLoss()).loss for _ in range(6)]
    assert losses[-1] < losses[0] - 0.01
    assert {v.dtype for v in weights(engine, adapters="only").values()} == {torch.float32}
    assert {v.dtype for v in weights(engine).values()} == {torch.bfloat16}
    optimizer: Any = engine._optimizer  # type: ignore[attr-defined]
    assert {m.dtype for n in optimizer._views for m in optimizer.moments(n).values()} == {torch.float32}
    engine.close()


def read_some(engine: BaseEngine, most: int) -> int:
    """Read weights, and fail after some of them."""
    read = 0
    with engine.named_weights() as stream:
        for _ in stream:
            read += 1
            if read == most:
                break
        raise RuntimeError(read)


def rank_stops_reading(folder: str) -> int:
    engine = build(folder, optim=None)
    with pytest.raises(RuntimeError) as stopped:
        read_some(engine, 1 if dist.get_rank() == 0 else 1000)
    engine.close()
    return int(str(stopped.value))


def test_a_rank_that_stops_reading_weights_stops_nobody(tmp_path: Path) -> None:
    first, second = run_ranks(rank_stops_reading, 2, str(save_tiny_model(tmp_path / "model", "llama")))
    assert first == 1
    assert second > 10


def rank_wrong_heads(folder: str) -> str:
    with pytest.raises(TopologyError, match=r"cp=4 does not divide the 6 attention heads of llama .*use one of 1, 2, 3, 6"):
        build(folder, parallel=ParallelConfig(cp=4))
    return "refused"


def test_heads_that_cp_does_not_divide_are_refused(tmp_path: Path) -> None:
    # A config alone: the refusal comes before weights are looked for.
    tiny_model_config("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3).save_pretrained(tmp_path)
    assert run_ranks(rank_wrong_heads, 4, str(tmp_path)) == ["refused"] * 4


# ---- several engines in one process ----------------------------------------------------------------------------------


def rank_two_engines(folder: str) -> list[list[tuple[float, float]]]:
    engines = [
        build(folder),
        build(folder, parallel=ParallelConfig(cp=2)),
        build(folder, parallel=ParallelConfig(dp_replicate=2)),
    ]
    found: list[list[tuple[float, float]]] = [[] for _ in engines]
    for step in range(3):
        for engine, rows in zip(engines, found, strict=True):
            result = engine.train_batch(share(engine, tiny_documents(8, seed=step)), SFTLoss())
            rows.append((result.loss, result.grad_norm or 0.0))
    for engine in engines:
        engine.close()
    return found


def test_engines_of_different_layouts_take_turns(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    want = reference_steps(folder)
    for got in run_ranks(rank_two_engines, 2, str(folder))[0]:
        close_to(got, want)


def rank_subsets(folder: str) -> list[tuple[float, float]]:
    ranks = (0, 1) if dist.get_rank() < 2 else (2, 3)
    found = []
    for _ in range(2):  # built twice: a second engine on the same ranks must not meet the first one's groups
        engine = build(folder, ranks=ranks, parallel=ParallelConfig(cp=2) if ranks == (0, 1) else ParallelConfig())
        found = steps(engine)
        engine.close()
    return found


@pytest.mark.slow
def test_engines_on_parts_of_the_ranks(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    want = reference_steps(folder)
    for got in run_ranks(rank_subsets, 4, str(folder)):
        close_to(got, want)


@dataclass(frozen=True)
class InfiniteLoss(SFTLoss):
    linear: bool = False

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        sums = super().__call__(outputs, batch)
        return LossSums(terms={name: term * torch.inf for name, term in sums.terms.items()})


def test_a_skipped_step_leaves_no_gradient_behind(tmp_path: Path, process_group: None) -> None:
    engine = build(save_tiny_model(tmp_path / "model", "llama"), non_finite="skip")
    optimizer: Any = engine._optimizer  # type: ignore[attr-defined]
    batch = share(engine, tiny_documents(4, seed=0))
    assert engine.train_batch(batch, InfiniteLoss()).skipped
    assert all(view.grad is None for view in optimizer._views.values())
    assert not engine.train_batch(batch, SFTLoss()).skipped
    engine.close()


@pytest.mark.slow
def test_peak_memory_of_a_load_is_a_shard(tmp_path: Path) -> None:
    """A model is never whole in one process: four ranks load it, each growing by far less than its size."""
    config = copy.deepcopy(
        tiny_model_config("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=8192)
    )
    config.save_pretrained(tmp_path / "model")
    tiny_model(config).save_pretrained(tmp_path / "model")
    size = sum(f.stat().st_size for f in (tmp_path / "model").glob("*.safetensors"))
    assert size > 200e6
    grown = run_ranks(rank_memory, 4, str(tmp_path / "model"))
    assert max(grown) < 0.6 * size


def rank_memory(folder: str) -> float:
    # Warm up on a tiny model, so that what code and libraries take is not counted.
    small = Path(folder).parent / "small"
    if dist.get_rank() == 0:
        save_tiny_model(small, "llama")
    dist.barrier()
    build(small, optim=None).close()
    before = anonymous()
    engine = build(folder, optim=None)
    grown = anonymous() - before
    engine.close()
    return grown


def anonymous() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024.0 for line in file if line.startswith("RssAnon"))


def test_repository_root_is_no_import_path() -> None:
    done = subprocess.run(
        ["python3", "-c", "import engine.config"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert done.returncode != 0
    assert "attempted relative import" in done.stderr


# ---- clipping -----------------------------------------------------------------------------------------------------------


CLIPS = (0.25, 1.3, None)


def clipped_to(clip: float | None) -> OptimConfig:
    # With so large an eps, Adam's step grows with the gradient: that it is clipped shows in the weights.
    return replace(OPTIM, lr=1e-2, eps=1.0, clip_grad_norm=clip)


def rank_clipped(folder: str, backend: str, parallel: dict[str, Any]) -> Any:
    found = []
    for clip in CLIPS:
        engine = build(folder, backend=backend, optim=clipped_to(clip), parallel=ParallelConfig(**parallel))
        found.append((steps(engine, 2), weights(engine)))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("backend", "parallel"),
    [
        pytest.param("fsdp", {}, marks=pytest.mark.slow),
        ("fsdp", {"cp": 2}),
        pytest.param("mcore", {}, marks=pytest.mark.slow),
        pytest.param("mcore", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_clipped_to_what_the_settings_say(backend: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    plain = {}
    for clip in (*CLIPS, 1.0):
        reference = PlainReference(folder, clipped_to(clip))
        done = [reference.step(tiny_documents(8, seed=s)) for s in range(2)]
        # Before clipping the norm is larger than all of the bounds.
        assert min(step.grad_norm for step in done) > 1.35
        plain[clip] = done, reference.weights()
    for found in run_ranks(rank_clipped, 2, str(folder), backend, parallel):
        for clip, (made, kept) in zip(CLIPS, found, strict=True):
            close_to(made, [(step.loss, step.grad_norm) for step in plain[clip][0]])
            off, other = (max(float((kept[n] - plain[c][1][n]).abs().max()) for n in kept) for c in (clip, 1.0))
            assert off < 1e-6
            # The control: clipped to 1 whatever the settings say, they would be elsewhere.
            assert other > 1e-5


# ---- frozen numbers in more digits than are computed with ---------------------------------------------------------------


def rank_frozen_in_16_bits(folder: str, root: str) -> Any:
    frozen = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight")
    options: dict[str, Any] = {
        "backend": "mcore",
        "model": {"freeze": (*frozen, "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight")},
        "precision": PrecisionConfig(params="float32", compute="bfloat16"),
    }
    engine = build(folder, **options)
    steps(engine, 1)
    saved = engine.save_checkpoint(root, 1)
    first = weights(engine)
    engine.load_checkpoint(saved)
    second = weights(engine)
    engine.close()
    return {name: (first[name], second[name]) for name in frozen}


def test_a_frozen_parameter_that_the_ranks_do_not_divide_is_kept_to_its_last_number(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    stored = PlainReference(folder, OPTIM).weights()
    for found in run_ranks(rank_frozen_in_16_bits, 3, str(folder), str(tmp_path / "c")):
        for name, (first, second) in found.items():
            # Three ranks do not divide its 64, or 8192, numbers.
            assert stored[name].numel() % 3
            assert torch.equal(first, stored[name]), name
            assert torch.equal(second, stored[name]), name
