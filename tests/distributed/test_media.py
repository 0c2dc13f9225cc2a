"""Images and videos in packed batches against plain transformers, document by document."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.engine.config import EngineConfig, LoraConfig, MicroBatchConfig, ModelConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_model
from drivetrain.engine.errors import DrivetrainError, ModelError
from drivetrain.engine.export import export_hf
from drivetrain.engine.hf.media import FAMILIES
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.packing.batch import IGNORE, MediaField
from drivetrain.engine.packing.convert import from_lists, to_padded
from drivetrain.engine.registry import engine_class
from drivetrain.engine.tiny_media import (
    AUDIO,
    IMAGE,
    MEDIA_FAMILIES,
    tiny_media_config,
)
from drivetrain.losses.sft import SFTLoss
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from helpers.harness import run_ranks
from helpers.media_steps import (
    OPTIM,
    Document,
    Plain,
    are_equal,
    check_ranks,
    check_shared,
    compare,
    document,
    optim_of,
    pack,
    rank_shared,
    save,
    steps_of,
    supervised,
)

SLOWLY = (
    "gemma3",
    "gemma4",
    "qwen2_5_omni_thinker",
    "qwen2_vl",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "idefics3",
    "internvl",
    "glmasr",
)


def test_lists_agree() -> None:
    assert set(FAMILIES) == set(MEDIA_FAMILIES)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f in SLOWLY else []) for f in MEDIA_FAMILIES],
)
def test_packed_media_equal_plain_transformers(family: str, tmp_path: Path, process_group: None) -> None:
    for loss_off, norm_off in compare(save(tmp_path / "model", family), family, ParallelConfig()):
        assert loss_off <= 1e-6
        assert norm_off <= 1e-5


GEMMA4 = {
    "E4B": ({"use_bidirectional_attention": None, "attention_k_eq_v": False}, {}),
    "26B-A4B": (
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {"audio_config": None},
    ),
    "31B": ({"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}, {"audio_config": None}),
    "audio alone": ({"use_bidirectional_attention": None}, {"vision_config": None}),
}
"""The changes to the tiny config that make it one like a published size: to the decoder, and to the whole."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.slow if size in ("E4B", "31B") else []) for size in GEMMA4]
)
def test_sizes_of_gemma4_equal_plain_transformers(size: str, tmp_path: Path, process_group: None) -> None:
    decoder, whole = GEMMA4[size]
    config: Any = tiny_media_config("gemma4", {"text_config": decoder, **whole})
    model, g = tiny_model(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            # Bounds of clipped layers, the scale of layers and of features: a model has them, though none is trained.
            if name.endswith(("_min", "_max")):
                buffer.fill_(-2.0 if name.endswith("_min") else 2.0)
            elif name.endswith(("std_bias", "std_scale", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape, generator=g) * 0.1)
    model.save_pretrained(tmp_path)
    optim = optim_of("gemma4")
    engine = engine_class("fsdp")(
        model=ModelConfig(path=str(tmp_path)), engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64)), optim=optim
    ).initialize()
    plain = Plain(tmp_path, optim)
    kinds = [kind for kind in ("image", "video", "audio") if kind in engine._root.media.modalities]  # type: ignore[attr-defined]
    # The id of audio among text: transformers takes it for padding, whether there is an encoder of audio or not.
    stray: Document = ([5, 6, AUDIO, 7, 8], [])
    for step in range(2):
        documents = [document("gemma4", 50 * step + i, 1, 2, kind=kind) for i, kind in enumerate(kinds)]
        documents += [document("gemma4", 50 * step + 9), *([] if "audio" in kinds else [stray])]
        got = engine.train_batch(pack(documents), SFTLoss())
        assert are_equal((got.loss, got.grad_norm), plain.step_of(documents))
    engine.close()


TWO_RANKS = ["qwen3_vl"]


@pytest.mark.parametrize("parallel", [pytest.param({}, marks=pytest.mark.slow), {"cp": 2}], ids=str)
def test_media_on_two_ranks(parallel: dict[str, int], tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, parallel, TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"cp": 2}], ids=str)
def test_the_other_families_on_two_ranks(parallel: dict[str, int], tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, parallel, [family for family in MEDIA_FAMILIES if family not in TWO_RANKS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{}, {"cp": 4}, {"dp_replicate": 2, "cp": 2}, {"dp_replicate": 4, "dp_shard": 1}], ids=str
)
def test_all_families_on_four_ranks(parallel: dict[str, int], tmp_path: Path) -> None:
    check_ranks(tmp_path, 4, parallel, list(MEDIA_FAMILIES))


@pytest.mark.parametrize("family", ["qwen3_vl", *(pytest.param(f, marks=pytest.mark.slow) for f in ("smolvlm", "internvl"))])
def test_images_of_a_shared_prompt_are_encoded_once(family: str, tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", family)
    check_shared(folder, family, rank_shared(str(folder), family, ParallelConfig()))


@pytest.mark.slow
def test_images_of_a_shared_prompt_on_two_ranks(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2_5_vl")
    found = run_ranks(rank_shared, 2, str(folder), "qwen2_5_vl", ParallelConfig(cp=2))[0]
    check_shared(folder, "qwen2_5_vl", found)


def rank_bad(folder: str) -> list[str]:
    """The errors of batches that are wrong on the second rank alone."""
    engine = engine_class("fsdp")(
        model=ModelConfig(path=folder), engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64)), optim=OPTIM
    ).initialize()
    good, rank, errors = pack([document("qwen2_5_vl", 1, 1)]), engine.topology.dp_rank, []
    narrow = replace(
        good, media={**good.media, "pixel_values": MediaField(values=torch.zeros(16, 95), counts=torch.tensor([16]))}
    )
    stray = from_lists([[5, IMAGE, 7]], names=["b.jsonl:3"])
    for bad in (narrow, stray):
        try:
            engine.train_batch(bad if rank else good, SFTLoss())
        except DrivetrainError as e:
            errors.append(str(e))
    engine.train_batch(good, SFTLoss())
    engine.close()
    return errors


def test_bad_media_of_one_rank_are_told_on_all(tmp_path: Path) -> None:
    for narrow, stray in run_ranks(rank_bad, 2, str(save(tmp_path / "model", "qwen2_5_vl"))):
        assert "pixel_values has the shape [16, 95]; it must be [M, 96]" in narrow
        assert "b.jsonl:3 has 1 image tokens (id 250), but 0 images" in stray


class Recorder(TorchDispatchMode):
    """Records the collectives of this rank: kind and sizes; of exchanges, whose sizes differ between ranks, the kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls.append((name, () if "alltoall" in name else tuple(t.numel() for t in tensors)))
        return func(*args, **(kwargs or {}))


def rank_collectives(folder: str, family: str) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    config = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64))
    engine = engine_class("fsdp")(model=ModelConfig(path=folder), engine=config, optim=OPTIM).initialize()
    rank, found = engine.topology.dp_rank, {}
    *_, other = engine._root.media.modalities  # type: ignore[attr-defined]
    for name, first, second in (
        ("none", [], []),
        ("images on one", ["image"], []),
        ("images on all", ["image"], ["image"]),
        ("another kind on each", ["image"], [other]),
        ("another kind on all", [other], [other]),
        ("both kinds on one", ["image", other], []),
        ("both kinds on all", [other, "image"], ["image", other]),
        ("more micro-batches on one", ["image"] * 8, [other]),
    ):
        kinds = (first, second)[rank]
        documents = [document(family, 40 + rank), *(document(family, i, 1, kind=kind) for i, kind in enumerate(kinds))]
        with Recorder() as recorder:
            engine.train_batch(pack(documents), SFTLoss())
        found[name] = recorder.calls
    engine.close()
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_omni_thinker", marks=pytest.mark.slow)])
def test_collectives_are_equal_whatever_media_the_ranks_have(family: str, tmp_path: Path) -> None:
    """Images and videos, and images and audio."""
    folder = save(tmp_path / "model", family)
    one, other = run_ranks(rank_collectives, 2, str(folder), family)
    assert len(one) == 8
    assert one == other
    assert one["both kinds on one"] == one["both kinds on all"]
    # What has no media does not run the encoders.
    assert 0 < len(one["none"]) < len(one["images on one"]) < len(one["both kinds on one"])


def rank_blank(folder: str) -> list[float]:
    """The gradient norm, without and with NaN as what the encoder of the rank without images returns."""
    engine = engine_class("fsdp")(
        model=ModelConfig(path=folder), engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64)), optim=OPTIM
    ).initialize()
    rank = engine.topology.dp_rank
    batch = pack([document("qwen2_5_vl", 7 + rank, *([] if rank else [1]))])

    def norm() -> float:
        engine.zero_grad()
        with engine.train_mode():
            engine.forward_backward(batch, SFTLoss())
            return engine.reduce_and_clip(None)

    norms = [norm()]
    if rank == 1:
        visual = engine._root.base.visual  # type: ignore[attr-defined]

        def spoil(module: Any, args: Any, output: Any) -> Any:
            output.pooler_output = output.pooler_output + float("nan")
            return output

        visual.register_forward_hook(spoil)
    norms.append(norm())
    engine.close()
    return norms


def test_what_a_rank_without_images_encodes_has_no_gradient(tmp_path: Path) -> None:
    (before, spoiled), _ = run_ranks(rank_blank, 2, str(save(tmp_path / "model", "qwen2_5_vl")))
    assert before == spoiled > 0


def one_step(
    folder: Path, model: dict[str, Any], engine: dict[str, Any], documents: Sequence[Document]
) -> tuple[float, float, list[str]]:
    """Loss and gradient norm of a step, and the names of what is trained."""
    config = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64), **engine)
    built: Any = engine_class("fsdp")(model=ModelConfig(path=str(folder), **model), engine=config, optim=OPTIM).initialize()
    result = built.train_batch(pack(documents), SFTLoss())
    trained = [name for name, parameter in built._root.named_parameters() if parameter.requires_grad]
    built.close()
    return result.loss, result.grad_norm, trained


@pytest.mark.slow
def test_settings_of_models_that_take_media(tmp_path: Path, process_group: None) -> None:
    folder, family = save(tmp_path / "model", "qwen3_vl"), "qwen3_vl"
    documents = steps_of(family)[0]
    loss, norm, trained = one_step(folder, {}, {}, documents)
    for mode in ("full", "selective"):
        again, other, _ = one_step(folder, {}, {"recompute": mode}, documents)
        assert are_equal((again, other), (loss, norm))
    plain = Plain(folder)
    plain.model.model.visual.requires_grad_(False)
    expected = plain.step_of(documents)
    for pattern in ("encoders", "model.visual.*"):
        again, other, rest = one_step(folder, {"freeze": (pattern,)}, {}, documents)
        assert are_equal((again, other), expected)
        assert other < norm * 0.999
        assert set(trained) - set(rest) == {name for name in trained if ".visual." in name}
    for targets, inside, outside in (
        (("*.visual.*",), ".visual.", ".language_model."),
        (("*.language_model.*.q_proj",), ".language_model.", ".visual."),
    ):
        again, _, adapted = one_step(folder, {"lora": LoraConfig(rank=2, targets=targets)}, {}, documents)
        assert again == pytest.approx(loss, rel=1e-6)
        assert adapted
        assert all(inside in name and outside not in name and ".lora_" in name for name in adapted)
    with pytest.raises(ModelError, match=r"model.lora.modules_to_save.* stores .*embed_tokens.weight under another name"):
        one_step(save(tmp_path / "other", "internvl"), {"lora": LoraConfig(rank=2, modules_to_save=("embed_tokens",))}, {}, [])
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no encoders"):
        one_step(save_tiny_model(tmp_path / "text", "qwen3"), {"freeze": ("encoders",)}, {}, [])
    with pytest.raises(ModelError, match=r"model.lora.targets names \*.audio.\*, which is not an adaptable layer"):
        one_step(folder, {"lora": LoraConfig(rank=2, targets=("*.audio.*",))}, {}, documents)


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2_audio", "gemma4", "qwen2_5_vl", "smolvlm"))],
)
def test_adapters_of_all_linear_layers_load_in_peft(family: str, tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", family)
    engine: Any = engine_class("fsdp")(
        model=ModelConfig(path=str(folder), lora=LoraConfig(rank=2)),
        engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64)),
        optim=OPTIM,
    ).initialize()
    documents = steps_of(family)[0]
    engine.train_batch(pack(documents), SFTLoss())
    export_hf(engine, tmp_path / "merged")
    export_hf(engine, tmp_path / "adapter", adapters="only")
    log_probs = engine.infer_batch(pack(documents), OutputRequest(log_probs=True))["log_probs"]
    adapted = {name for name, _ in engine._root.named_parameters() if ".lora_A." in name}
    engine.close()
    convolutions = {n for n, m in Plain(folder).model.named_modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Conv3d)}
    assert convolutions or family == "qwen2_audio"
    assert not any(name.removeprefix("lm.").startswith(tuple(convolutions)) for name in adapted if convolutions)
    loaded = Plain(folder)
    loaded.model = PeftModel.from_pretrained(loaded.model, str(tmp_path / "adapter"))
    for plain in (Plain(tmp_path / "merged"), loaded):
        found = []
        for ids, items in documents:
            logits = plain.logits_of(ids, items)[:-1]
            found += [*(-F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")).tolist(), 0.0]
        labels = torch.cat([pack([one]).labels for one in documents])
        expected = torch.tensor(found).masked_fill(labels == IGNORE, 0.0)
        torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)


def test_a_value_model_reads_images_and_is_exported(tmp_path: Path, process_group: None) -> None:
    family = "qwen2_5_vl"
    folder = save(tmp_path / "model", family)
    (folder / "preprocessor_config.json").write_text("{}")
    engine = engine_class("fsdp")(
        model=ModelConfig(path=str(folder), head="value"), engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64))
    ).initialize()
    documents = steps_of(family)[0]
    values = engine.infer_batch(pack(documents), OutputRequest(log_probs=False, values=True))["values"]
    export_hf(engine, tmp_path / "hf")
    engine.close()
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        score = file.get_tensor("score.weight")
    plain = Plain(folder)
    plain.model.lm_head = torch.nn.Identity()
    expected = torch.cat([plain.logits_of(ids, items) @ score[0] for ids, items in documents])
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "hf" / "preprocessor_config.json").is_file()


def rank_export(folder: str, family: str, out: str) -> tuple[float, float]:
    """Train two steps, export, and save; return the loss of the next one."""
    config = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64), parallel=ParallelConfig(cp=2))
    engine = engine_class("fsdp")(model=ModelConfig(path=folder), engine=config, optim=optim_of(family)).initialize()
    for documents in steps_of(family)[:2]:
        engine.train_batch(pack(documents), SFTLoss())
    export_hf(engine, Path(out) / "hf")
    engine.save_checkpoint(Path(out) / "checkpoints", 2)
    after = engine.train_batch(pack(steps_of(family)[2]), SFTLoss())
    engine.close()
    assert after.grad_norm is not None
    return after.loss, after.grad_norm


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gemma4"])
def test_a_trained_model_is_exported_and_resumed_with_its_encoders(family: str, tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", family)
    loss, norm = run_ranks(rank_export, 2, str(folder), family, str(tmp_path))[0]
    plain = Plain(folder, optim_of(family))
    for documents in steps_of(family)[:2]:
        plain.step_of(documents)
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        if family == "qwen3_vl_moe":
            # As the models on the Hub have them, and other programs read them: [experts, hidden, 2 x inner].
            assert file.get_slice("model.language_model.layers.0.mlp.experts.gate_up_proj").get_shape() == [4, 64, 96]
        else:
            # The bounds of its layers, which are no parameters, and without limits here.
            assert file.get_tensor("model.audio_tower.layers.0.self_attn.q_proj.input_max") == float("inf")
    exported = Plain(tmp_path / "hf")
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(exported.model.state_dict()[name], value, rtol=1e-4, atol=1e-4)
    assert are_equal(exported.step_of(steps_of(family)[2]), (loss, norm), 10)
    # On one process.
    engine = engine_class("fsdp")(
        model=ModelConfig(path=str(folder)),
        engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64)),
        optim=optim_of(family),
    ).initialize()
    engine.load_checkpoint(next((tmp_path / "checkpoints").glob("step-*")))
    resumed = engine.train_batch(pack(steps_of(family)[2]), SFTLoss())
    assert are_equal((resumed.loss, resumed.grad_norm), (loss, norm))
    engine.close()


@pytest.mark.slow
def test_workers_read_images_from_a_batch_and_from_their_stores(tmp_path: Path) -> None:
    family = "qwen3_vl"
    folder = save(tmp_path / "model", family)
    documents = steps_of(family)[0]
    batch = pack(documents)
    role = RoleSpec(
        worker=ActorWorker,
        config=ActorConfig(
            model=ModelConfig(path=str(folder)), engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64)), optim=OPTIM
        ),
    )
    with ProcessWorkerGroup({"actor": role}, pools={"main": 2}) as group:
        costs = group.rank_infos("actor")[0].media_costs
        assert costs.keys() == {"pixel_values", "pixel_values_videos"}
        assert min(costs.values()) > 0
        direct = group["actor"].compute_log_probs(batch)["log_probs"]
        ref = group["actor"].compute_log_probs(group.data.put(batch))
        stored = group.data.get(ref, ["log_probs"])["log_probs"]
        # As verl's controller holds them: rows padded on the right, and the media of each beside them.
        ids, mask = to_padded(batch)
        learned = torch.zeros_like(mask).masked_scatter(
            mask, torch.tensor([s for ids, _ in documents for s in supervised(ids)])
        )
        learned[:, 0] = False
        rows = [
            {name: torch.cat([item[name] for item in items]) for name in items[0]} if items else None for _, items in documents
        ]
        padded = {"input_ids": ids, "attention_mask": mask, "response_mask": learned, "multi_modal_inputs": rows}
        answered = group["actor"].compute_log_probs(padded)["log_probs"]
    plain, expected = Plain(folder), []
    for tokens, items in documents:
        expected += [
            *(-F.cross_entropy(plain.logits_of(tokens, items)[:-1], torch.tensor(tokens[1:]), reduction="none")).tolist(),
            0.0,
        ]
    log_probs = torch.tensor(expected).masked_fill(batch.labels == IGNORE, 0.0)
    for found in (direct, stored):
        torch.testing.assert_close(found, log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(answered[learned], log_probs[batch.labels != IGNORE], rtol=1e-5, atol=1e-5)
