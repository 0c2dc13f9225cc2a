"""Adapters train as peft's do, document by document without packing: of linear layers, experts, heads and embeddings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.config import LoraConfig, ParallelConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import ModelError
from drivetrain.engine.export import export_hf
from drivetrain.engine.loss import OutputRequest
from helpers.engines import OPTIM, build, close_to, share, steps
from helpers.harness import run_ranks

FAST = replace(OPTIM, lr=1e-2)
VOCABULARY = {"targets": ("all-linear", "embed_tokens", "lm_head")}


def peft_model(folder: str | Path, adapter: str | Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, str(adapter), is_trainable=True)


def rank_lora(folder: str, out: str, lora: LoraConfig, settings: dict[str, Any]) -> dict[str, Any]:
    settings = {**settings, "parallel": ParallelConfig(**settings.get("parallel", {})), "model": {"lora": lora}, "optim": FAST}
    engine = build(folder, **settings)
    export_hf(engine, f"{out}/start", adapters="only")
    documents = tiny_documents(8, seed=0)
    request = OutputRequest(log_probs=True)
    base = engine.infer_batch(share(engine, documents), request)["log_probs"]
    found = steps(engine)
    trained = engine.infer_batch(share(engine, documents), request)["log_probs"]
    with engine.disable_adapter():
        again = engine.infer_batch(share(engine, documents), request)["log_probs"]
    saved = engine.save_checkpoint(f"{out}/checkpoints", 3)
    more = steps(engine, 1)
    engine.close()
    engine = build(folder, **settings)
    engine.load_checkpoint(saved)
    resumed = steps(engine, 1)
    engine.load_checkpoint(saved)
    export_hf(engine, f"{out}/adapter", adapters="only")
    export_hf(engine, f"{out}/merged")
    engine.close()
    return {
        "steps": found,
        "disabled_from_base": float((base - again).abs().max()),
        "training_changed": not torch.equal(base, trained),
        "resumed": more == resumed,
    }


def check(folder: Path, out: Path, lora: LoraConfig, settings: dict[str, Any], nproc: int = 1) -> None:
    found = run_ranks(rank_lora, nproc, str(folder), str(out), lora, settings)
    # Modules that are trained in full stay trained without the adapters. Compiled layers, and the memory layout of embeddings, round
    # in other ways with adapters that add zeros.
    assert all((f["disabled_from_base"] <= 2e-6) != bool(lora.modules_to_save) for f in found), found
    assert all(f["training_changed"] and f["resumed"] for f in found), found
    model = peft_model(folder, out / "start")
    trainable = [p for p in model.parameters() if p.requires_grad]
    reference = PlainReference(folder, FAST)
    reference.model = model
    reference.optimizer = torch.optim.AdamW(trainable, lr=1e-2, betas=OPTIM.betas, weight_decay=OPTIM.weight_decay)
    want = [reference.step(tiny_documents(8, seed=s)) for s in range(3)]
    close_to(found[0]["steps"], [(w.loss, w.grad_norm) for w in want])
    exported = PlainReference(folder, OPTIM)
    exported.model = peft_model(folder, out / "adapter").eval()
    merged = PlainReference(out / "merged", OPTIM)
    plain = PlainReference(folder, OPTIM)
    for document in tiny_documents(4, seed=9)[1:]:
        want_lp = reference.log_probs(document)
        torch.testing.assert_close(exported.log_probs(document), want_lp, rtol=0, atol=2e-4)
        torch.testing.assert_close(merged.log_probs(document), want_lp, rtol=0, atol=2e-4)
        assert (plain.log_probs(document) - want_lp).abs().max() > 1e-3
    assert not (out / "merged" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("nproc", "axes", "lora"),
    [
        pytest.param(1, {"backend": "mcore"}, VOCABULARY, marks=pytest.mark.slow),
        pytest.param(2, {"backend": "mcore", "tp": 2}, VOCABULARY, marks=pytest.mark.slow),
        pytest.param(4, {"backend": "mcore", "tp": 2, "tp_sequence": True, "pp": 2}, VOCABULARY, marks=pytest.mark.slow),
        pytest.param(2, {"backend": "mcore", "cp": 2}, VOCABULARY, marks=pytest.mark.slow),
        (1, {}, {}),
        pytest.param(2, {}, {}, marks=pytest.mark.slow),
        (2, {"cp": 2}, {}),
        pytest.param(1, {}, {"modules_to_save": ("embed_tokens", "lm_head")}, marks=pytest.mark.slow),
        pytest.param(2, {}, {"modules_to_save": ("lm_head", "layers.1.mlp.down_proj")}, marks=pytest.mark.slow),
        (1, {}, VOCABULARY),
        pytest.param(2, {"cp": 2}, {"targets": ("q_proj", "embed_tokens", "lm_head"), "dropout": 0.0}, marks=pytest.mark.slow),
        pytest.param(2, {}, {"targets": ("lm_head",)}, marks=pytest.mark.slow),
    ],
)
def test_lora_trains_as_peft_does(nproc: int, axes: dict[str, Any], lora: dict[str, Any], tmp_path: Path) -> None:
    # A vocabulary that tensor parallelism does not divide.
    folder = save_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=False, vocab_size=257)
    parallel = {name: value for name, value in axes.items() if name != "backend"}
    settings = {"backend": axes.get("backend", "fsdp"), "parallel": parallel}
    check(folder, tmp_path, LoraConfig(rank=3, alpha=12.0, **lora), settings, nproc)


@pytest.mark.parametrize(
    ("family", "nproc", "settings", "lora"),
    [
        ("qwen3_moe", 1, {}, {}),
        pytest.param("qwen3_moe", 1, {"backend": "mcore"}, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 1, {"backend": "mcore", "recompute": "selective"}, {}, marks=pytest.mark.slow),
        pytest.param(
            "mixtral", 1, {"backend": "mcore", "recompute": "full"}, {"targets": ("experts",)}, marks=pytest.mark.slow
        ),
        pytest.param(
            "gpt_oss",
            4,
            {"backend": "mcore", "parallel": {"tp": 2, "tp_sequence": True, "ep": 2, "pp": 2}},
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_moe",
            2,
            {"backend": "mcore", "parallel": {"tp": 2, "tp_sequence": True, "etp": 2}},
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_moe",
            4,
            {"backend": "mcore", "parallel": {"tp": 2, "tp_sequence": True, "etp": 2, "dp_shard": 2}},
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_moe", 4, {"backend": "mcore", "parallel": {"cp": 2, "ep": 2, "dp_shard": 2}}, {}, marks=pytest.mark.slow
        ),
        pytest.param("gpt_oss", 1, {"compile": True}, {"targets": ("experts",), "rslora": True}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", 1, {"recompute": "full"}, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", 1, {"recompute": "selective"}, {"targets": ("*.layers.1.*.experts",)}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, {"parallel": {"ep": 2}}, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, {"parallel": {"dp_shard": 2}}, {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 4, {"parallel": {"ep": 2, "cp": 2}}, {}, marks=pytest.mark.slow),
    ],
)
def test_experts_are_adapted_as_by_peft(
    family: str, nproc: int, settings: dict[str, Any], lora: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    check(folder, tmp_path, LoraConfig(rank=3, alpha=12.0, **{"targets": ("all-linear", "experts"), **lora}), settings, nproc)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        ("qwen3_moe", {"targets": ("experts",), "dropout": 0.1}, "no dropout for adapters of experts; set it to 0"),
        (
            "qwen3",
            {"targets": ("experts",)},
            "names experts, which is not an adaptable layer of Qwen3ForCausalLM; .* embed_tokens",
        ),
        ("llama", {"targets": ("lm_head",)}, "with model.head=value, which replaces the language-model head"),
        ("qwen2", {"targets": ("embed_tokens",)}, "both the embeddings and the head .*modules_to_save"),
    ],
)
def test_what_cannot_be_adapted_is_refused(family: str, lora: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, family, tie_word_embeddings=family == "qwen2")
    head = "value" if "model.head" in message else "lm"
    with pytest.raises(ModelError, match=message):
        build(str(folder), model={"lora": LoraConfig(rank=2, **lora), "head": head})
