"""Models that take media on Megatron-core, against plain transformers, document by document."""

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

from drivetrain.engine.config import EngineConfig, LoraConfig, MicroBatchConfig, ModelConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.errors import ConfigError, ModelError, TopologyError
from drivetrain.engine.export import export_hf
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.mcore.options import MCoreOptions
from drivetrain.engine.mcore.state import boxes
from drivetrain.engine.packing.batch import IGNORE
from drivetrain.engine.registry import engine_class
from drivetrain.engine.tiny_media import MEDIA_FAMILIES, tiny_media_config
from drivetrain.losses.sft import SFTLoss
from helpers.harness import run_ranks
from helpers.media_steps import (
    OPTIM,
    Plain,
    are_equal,
    check_ranks,
    check_shared,
    compare,
    pack,
    rank_shared,
    save,
    steps_of,
)

MAIN = ["qwen2_5_vl", "qwen3_vl", "qwen2_audio"]
WITHOUT_BRIDGE = "gemma4"
OTHERS = [family for family in MEDIA_FAMILIES if family not in {*MAIN, WITHOUT_BRIDGE}]
SIZES = MicroBatchConfig(max_tokens=64)


def build(folder: Path, model: dict[str, Any] | None = None, **settings: Any) -> Any:
    config = EngineConfig(backend="mcore", micro_batch=SIZES, **settings)
    model_config = ModelConfig(path=str(folder), **(model or {}))
    return engine_class("mcore")(model=model_config, engine=config, optim=OPTIM).initialize()


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), *MAIN[1:]])
def test_packed_media_equal_plain_transformers(family: str, tmp_path: Path, process_group: None) -> None:
    for loss_off, norm_off in compare(save(tmp_path / "model", family), family, ParallelConfig(), "mcore"):
        assert loss_off <= 1e-6
        assert norm_off <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_the_other_families_equal_plain_transformers(family: str, tmp_path: Path, process_group: None) -> None:
    for loss_off, norm_off in compare(save(tmp_path / "model", family), family, ParallelConfig(), "mcore"):
        assert loss_off <= 1e-6
        assert norm_off <= 1e-5


def test_a_flat_range_is_split_into_boxes() -> None:
    for shape in ((), (5,), (3, 4), (3, 2, 4), (2, 1, 3, 2)):
        size = math.prod(shape)
        flat = torch.arange(size)
        for start in range(size + 1):
            for end in range(start, size + 1):
                split = boxes(start, end, shape)
                joined = [flat.view(shape)[box.within((0,) * len(shape))].flatten() for box in split]
                assert torch.equal(torch.cat(joined) if joined else flat[:0], flat[start:end])
                assert len(split) <= max(1, 2 * len(shape) - 1)


@pytest.mark.slow
def test_features_of_a_split_sequence(tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, {"tp": 2, "tp_sequence": True}, ["qwen3_vl"], "mcore")


LAYOUTS: list[dict[str, Any]] = [{}, {"cp": 2}, {"tp": 2}, {"tp": 2, "tp_sequence": True}, {"pp": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_media_on_two_ranks(parallel: dict[str, Any], tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, parallel, MAIN, "mcore")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"cp": 2}, {"tp": 2, "tp_sequence": True}, {"pp": 2}], ids=str)
def test_the_other_families_on_two_ranks(parallel: dict[str, Any], tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, parallel, OTHERS, "mcore")


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"tp": 2, "tp_sequence": True, "pp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "tp": 2, "tp_sequence": True}], ids=str
)
def test_media_on_four_ranks(parallel: dict[str, Any], tmp_path: Path) -> None:
    check_ranks(tmp_path, 4, parallel, MAIN, "mcore")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"ep": 2}, {"tp": 2, "tp_sequence": True, "etp": 2}], ids=str)
def test_experts_beside_an_encoder_on_two_ranks(parallel: dict[str, Any], tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, parallel, ["qwen3_vl_moe"], "mcore")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2, "tp_sequence": True}, {"pp": 2, "vpp": 2}], ids=str)
def test_tied_embeddings_and_interleaved_stages(parallel: dict[str, Any], tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": "vpp" not in parallel}
    check_ranks(tmp_path, 2, parallel, ["qwen2_5_vl"], "mcore", changes)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_take_features(recompute: str, tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, {"tp": 2, "tp_sequence": True}, MAIN, "mcore", recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2, "tp_sequence": True}, {"cp": 2}], ids=str)
def test_images_of_a_shared_prompt_are_encoded_once(parallel: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen3_vl")
    found = run_ranks(rank_shared, 2, str(folder), "qwen3_vl", ParallelConfig(**parallel), "mcore")[0]
    if "tp" in parallel:
        # Both ranks encode all.
        found = {share: (*numbers[:3], numbers[3] // 2) for share, numbers in found.items()}
    check_shared(folder, "qwen3_vl", found)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*MAIN, "glmasr"])
def test_16_bits_are_close_to_the_other_engine(family: str, tmp_path: Path, process_group: None) -> None:
    folder, precision = save(tmp_path / "model", family), PrecisionConfig(params="float32", compute="bfloat16")
    models: list[dict[str, Any]] = [{}, {"lora": LoraConfig(rank=2)}]
    for model in models:
        steps: dict[str, list[float]] = {}
        for backend in ("fsdp", "mcore"):
            config = EngineConfig(backend=backend, micro_batch=SIZES, precision=precision)
            model_config = ModelConfig(path=str(folder), **model)
            engine = engine_class(backend)(model=model_config, engine=config, optim=OPTIM).initialize()
            results = [engine.train_batch(pack(documents), SFTLoss()) for documents in steps_of(family)[:2]]
            steps[backend] = [number for result in results for number in (result.loss, result.grad_norm or 0.0)]
            engine.close()
        assert steps["mcore"] == pytest.approx(steps["fsdp"], rel=0.01)


def one_step(folder: Path, family: str, model: dict[str, Any], **settings: Any) -> tuple[float, float, list[str]]:
    """Loss and gradient norm of a step, and the stored names of what is trained."""
    engine = build(folder, model, **settings)
    result = engine.train_batch(pack(steps_of(family)[0]), SFTLoss())
    shards = engine._built.param_shards
    trained = [stored.name for shard in shards if shard.parameter.requires_grad for stored in shard.stored_slices]
    engine.close()
    return result.loss, result.grad_norm, trained


@pytest.mark.slow
def test_frozen_encoders_and_values(tmp_path: Path, process_group: None) -> None:
    family = "qwen3_vl"
    folder = save(tmp_path / "model", family)
    plain = Plain(folder)
    plain.model.model.visual.requires_grad_(False)
    expected = plain.step_of(steps_of(family)[0])
    for pattern, recompute in (("encoders", "none"), ("*.visual.*", "full")):
        loss, norm, trained = one_step(
            folder, family, {"freeze": (pattern,)}, options=MCoreOptions(overlap_grad_reduce=True), recompute=recompute
        )
        assert are_equal((loss, norm), expected)
    assert trained
    assert not any(".visual." in name for name in trained)
    engine = build(folder, {"head": "value"})
    documents = steps_of(family)[0]
    values = engine.infer_batch(pack(documents), OutputRequest(log_probs=False, values=True))["values"]
    with engine.named_weights() as stream:
        score = dict(stream)["score.weight"]
    engine.close()
    plain = Plain(folder)
    plain.model.lm_head = torch.nn.Identity()
    rows = torch.cat([plain.logits_of(ids, items) @ score[0] for ids, items in documents])
    torch.testing.assert_close(values, rows, rtol=1e-4, atol=1e-5)


TARGETS = {"text": ("*.language_model.*.q_proj",), "encoder": ("*.visual.*", "*.audio_tower.*"), "all": ("all-linear",)}


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        ("qwen3_vl", "all"),
        *(
            pytest.param(family, adapted, marks=pytest.mark.slow)
            for family in MAIN
            for adapted in TARGETS
            if (family, adapted) != ("qwen3_vl", "all")
        ),
    ],
)
def test_adapters_load_in_peft(family: str, adapted: str, tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", family)
    targets = tuple(t for t in TARGETS[adapted] if ("audio" in t) == ("audio" in family) or adapted != "encoder")
    engine = build(folder, {"lora": LoraConfig(rank=2, alpha=64, targets=targets)})
    documents = steps_of(family)[0]
    for _ in range(2):
        engine.train_batch(pack(documents), SFTLoss())
    export_hf(engine, tmp_path / "merged")
    export_hf(engine, tmp_path / "adapter", adapters="only")
    log_probs = engine.infer_batch(pack(documents), OutputRequest(log_probs=True))["log_probs"]
    with engine.disable_adapter():
        base = engine.infer_batch(pack(documents), OutputRequest(log_probs=True))["log_probs"]
    shards = [s.name for shard in engine._built.param_shards if shard.parameter.requires_grad for s in shard.stored_slices]
    engine.close()
    decoder = [name for name in shards if ".language_model." in name]
    assert all(".lora_" in name for name in shards)
    assert bool(decoder) == (adapted != "encoder")
    assert (len(decoder) < len(shards)) == (adapted != "text")
    loaded = Plain(folder)
    loaded.model = PeftModel.from_pretrained(loaded.model, str(tmp_path / "adapter"))
    for plain, computed in ((Plain(tmp_path / "merged"), log_probs), (loaded, log_probs), (Plain(folder), base)):
        torch.testing.assert_close(computed, log_probs_of(plain, documents), rtol=1e-4, atol=1e-4)
    assert (log_probs - base).abs().max() > 1e-3


def log_probs_of(plain: Plain, documents: Any) -> torch.Tensor:
    rows = []
    for ids, items in documents:
        logits = plain.logits_of(ids, items)[:-1]
        rows += [*(-F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")).tolist(), 0.0]
    labels = torch.cat([pack([one]).labels for one in documents])
    return torch.tensor(rows).masked_fill(labels == IGNORE, 0.0)


def rank_hop(folder: str, family: str, out: str, backend: str, parallel: ParallelConfig, first: int) -> tuple[float, float]:
    """Take two steps from those of a checkpoint, if there is one, and save."""
    config = EngineConfig(backend=backend, micro_batch=SIZES, parallel=parallel)
    engine = engine_class(backend)(model=ModelConfig(path=folder), engine=config, optim=OPTIM).initialize()
    if first:
        engine.load_checkpoint(Path(out) / f"step-{first:08d}")
    rank, size = engine.topology.dp_rank, engine.topology.dp_size
    for step in (first, first + 1):
        documents = steps_of(family)[step]
        each = -(-len(documents) // size)
        result = engine.train_batch(pack(documents[rank * each : (rank + 1) * each]), SFTLoss())
    engine.save_checkpoint(out, first + 2)
    engine.close()
    assert result.grad_norm is not None
    return result.loss, result.grad_norm


@pytest.mark.slow
@pytest.mark.parametrize("family", MAIN)
def test_a_run_moves_between_engines_with_its_encoders(family: str, tmp_path: Path) -> None:
    """The optimizer's state of encoders too; the fourth step has no media, and leaves it alone."""
    folder, plain = save(tmp_path / "model", family), None
    plain = Plain(folder)
    expected = [plain.step_of(documents) for documents in steps_of(family)[:4]]
    out = str(tmp_path / "checkpoints")
    layouts = {"fsdp": ParallelConfig(), "mcore": ParallelConfig(tp=2, tp_sequence=True)}
    for backends in (("fsdp", "mcore"), ("mcore", "fsdp")):
        for first, backend in zip((0, 2), backends, strict=True):
            found = run_ranks(rank_hop, 2, str(folder), family, out, backend, layouts[backend], first)[0]
            assert are_equal(found, expected[first + 1])
    # Spread over data-parallel ranks, which hold parts of convolutions with five axes.
    for first, layout in ((0, ParallelConfig()), (2, ParallelConfig(pp=2))):
        assert are_equal(run_ranks(rank_hop, 2, str(folder), family, out, "mcore", layout, first)[0], expected[first + 1])


@pytest.mark.parametrize("backend", [pytest.param("fsdp", marks=pytest.mark.slow), "mcore"])
def test_frozen_encoders_are_out_of_the_graph_of_recomputed_layers(backend: str, tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", "internvl")
    config = EngineConfig(backend=backend, micro_batch=SIZES, recompute="full")
    model = ModelConfig(path=str(folder), freeze=("encoders",))
    engine = engine_class(backend)(model=model, engine=config, optim=OPTIM).initialize()
    family = engine.media.family  # type: ignore[union-attr]
    features: list[torch.Tensor] = []
    encode = family.encode

    def kept(*args: Any) -> torch.Tensor:
        features.append(encode(*args))
        return features[-1]

    family.encode = kept  # type: ignore[method-assign]
    engine.train_batch(pack(steps_of("internvl")[0]), SFTLoss())
    engine.close()
    assert features
    assert not any(one.requires_grad for one in features)


def test_a_closed_engine_leaves_nothing_in_memory(tmp_path: Path, process_group: None) -> None:
    engine = build(save(tmp_path / "model", "qwen3_vl"))
    engine.train_batch(pack(steps_of("qwen3_vl")[0]), SFTLoss())
    parameters = [weakref.ref(shard.parameter) for shard in engine._built.param_shards]
    engine.close()
    del engine
    gc.collect()
    assert not [one for one in parameters if one() is not None]


def test_what_cannot_run_is_refused(tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", "qwen3_vl")
    with pytest.raises(ConfigError, match=r"overlap_grad_reduce=true with qwen3_vl, .* or model.freeze=\[encoders\]"):
        build(folder, options=MCoreOptions(overlap_grad_reduce=True))
    with pytest.raises(ModelError, match=f"model family '{WITHOUT_BRIDGE}_text' has no bridge"):
        build(save(tmp_path / WITHOUT_BRIDGE, WITHOUT_BRIDGE))
    omni = tiny_media_config("qwen2_5_omni_thinker").get_text_config()
    omni.save_pretrained(tmp_path / "part")
    with pytest.raises(ModelError, match="whose decoder is qwen2_5_omni_text, but not of a family that takes media here"):
        build(tmp_path / "part", {"init": "random"})
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no encoders"):
        build(save(tmp_path / "text", "qwen3"), {"freeze": ("encoders",)})


def rank_stages(folder: str) -> str:
    try:
        build(Path(folder), parallel=ParallelConfig(pp=4))
    except TopologyError as e:
        return str(e)
    return ""


@pytest.mark.slow
def test_stages_that_end_before_the_last_deepstack_layer(tmp_path: Path) -> None:
    for message in run_ranks(rank_stages, 4, str(save(tmp_path / "model", "qwen3_vl"))):
        assert "engine.parallel.pp=4 leaves 1 of the 4 layers on the first stage of qwen3_vl, whose first 2 layers" in message
        assert "the largest possible pp x vpp is 2" in message
