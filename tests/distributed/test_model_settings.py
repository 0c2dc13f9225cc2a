"""What the settings change about a model: frozen parameters, added tokens; what they cannot; what a model costs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain.engine.config import LoraConfig, ModelConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents, tiny_model
from drivetrain.engine.errors import CapabilityError, ModelError
from drivetrain.engine.export import export_hf
from drivetrain.engine.flops import ModelShape, known_peak_tflops, pairs
from drivetrain.engine.hf.tokenizer import load_tokenizer
from drivetrain.engine.hf.weights import WeightFolder, check_head
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.tiny_configs import tiny_model_config
from drivetrain.losses.sft import SFTLoss
from drivetrain.trainers.sft import main
from drivetrain.trainers.tasks.addition import make_tokenizer
from helpers.engines import OPTIM, build, close_to, share, steps, weights
from helpers.harness import run_ranks
from helpers.runs import words

# ---- frozen parameters -----------------------------------------------------------------------------------------------

FROZEN = ("model.embed_tokens.*", "model.layers.0.*", "*.k_proj.weight")


def frozen_reference(folder: str | Path, patterns: Sequence[str]) -> PlainReference:
    from fnmatch import fnmatchcase

    reference = PlainReference(folder, OPTIM)
    for name, parameter in reference.model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, p) for p in patterns))
    return reference


def rank_frozen(
    folder: str, patterns: tuple[str, ...], axes: dict[str, Any]
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    engine = build(folder, model={"freeze": patterns}, parallel=ParallelConfig(**axes))
    found = steps(engine)
    after = weights(engine)
    # Frozen parameters are saved and come back, without moments.
    saved = engine.save_checkpoint(Path(folder).parent / "checkpoints", 3)
    more = steps(engine, 1)
    engine.load_checkpoint(saved)
    assert steps(engine, 1) == more
    engine.close()
    return found, after


@pytest.mark.parametrize(
    ("nproc", "axes"), [(1, {}), pytest.param(2, {"dp_shard": 2}, marks=pytest.mark.slow), (2, {"cp": 2})]
)
@pytest.mark.parametrize("patterns", [FROZEN, ("model.*",)], ids=["some", "all_but_the_head"])
def test_frozen_parameters_stay_and_the_others_train_as_in_plain_hugging_face(
    nproc: int, axes: dict[str, Any], patterns: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    reference = frozen_reference(folder, patterns)
    want = [reference.step(tiny_documents(8, seed=s)) for s in range(3)]
    before = PlainReference(folder, OPTIM).weights()
    for found, after in run_ranks(rank_frozen, nproc, str(folder), patterns, axes):
        close_to(found, [(w.loss, w.grad_norm) for w in want])
        for name, parameter in reference.model.named_parameters():
            assert torch.equal(after[name], before[name]) == (not parameter.requires_grad), name
            assert (after[name] - parameter.detach()).abs().max() <= 1e-5


@pytest.mark.usefixtures("process_group")
def test_patterns_that_freeze_nothing_or_everything_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    with pytest.raises(
        ModelError, match=r"'model.embed_token.weight' matches no parameter.*did you mean 'model.embed_tokens.weight'"
    ):
        build(folder, model={"freeze": ("model.embed_token.weight",)})
    with pytest.raises(ModelError, match="leaves nothing to train"):
        build(folder, model={"freeze": ("*",)})
    with pytest.raises(ModelError, match=r"model.freeze=.* with model.lora.rank=2: with adapters"):
        build(folder, model={"freeze": ("*",), "lora": LoraConfig(rank=2)})


# ---- added tokens ----------------------------------------------------------------------------------------------------


def with_tokenizer(folder: Path, **overrides: Any) -> Path:
    """A tiny model with the demo's tokenizer of 16 words, and as many rows."""
    save_tiny_model(folder, "qwen3", vocab_size=16, **overrides)
    make_tokenizer().save_pretrained(folder)
    return folder


DOCUMENTS = [[3, 16, 4, 5, 17], [17, 2, 16, 9, 8, 7, 6], [1, 2, 3]]


def rank_added(folder: str, out: str, axes: dict[str, Any]) -> tuple[float, float]:
    engine = build(folder, model={"added_tokens": ("<a>", "<b>")}, parallel=ParallelConfig(**axes))
    export_hf(engine, f"{out}/start")
    mine = range(engine.topology.dp_rank, 3, engine.topology.dp_size)
    result = engine.train_batch(from_lists([DOCUMENTS[i] for i in mine]), SFTLoss())
    export_hf(engine, f"{out}/end")
    engine.close()
    assert result.grad_norm is not None
    return result.loss, result.grad_norm


@pytest.mark.parametrize(
    ("nproc", "axes"), [(1, {}), pytest.param(4, {"dp_shard": 4}, marks=pytest.mark.slow), (2, {"cp": 2})]
)
@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_begin_as_the_mean_and_train(nproc: int, axes: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = with_tokenizer(tmp_path / "model", tie_word_embeddings=tied)
    ((loss, norm), *_) = run_ranks(rank_added, nproc, str(folder), str(tmp_path), axes)
    old: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    for was, now in (
        (old.get_input_embeddings().weight, start.get_input_embeddings().weight),
        (old.get_output_embeddings().weight, start.get_output_embeddings().weight),
    ):
        assert now.shape == (18, was.shape[1])
        assert torch.equal(now[:16], was)
        torch.testing.assert_close(now[16:], was.mean(0).expand(2, -1))
    want = PlainReference(tmp_path / "start", OPTIM).step(DOCUMENTS)
    close_to([(loss, norm)], [(want.loss, want.grad_norm)])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "end")
    assert tokenizer("3<a><b>", add_special_tokens=False)["input_ids"][1:] == [16, 17]


@pytest.mark.usefixtures("process_group")
def test_spare_rows_are_used_before_embeddings_grow(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny_model(folder, "qwen3", vocab_size=17)
    make_tokenizer().save_pretrained(folder)
    for tokens, rows in ((("<a>",), 17), (("<a>", "<b>"), 18)):
        engine = build(folder, model={"added_tokens": tokens})
        assert engine.weight_shapes()["model.embed_tokens.weight"][1] == (rows, 64)
        engine.close()
    with pytest.raises(ModelError, match=r"model.added_tokens=\['<a>'\] with model.lora.rank=2"):
        build(folder, model={"added_tokens": ("<a>",), "lora": LoraConfig(rank=2)})
    # Without asking, other rows than the config's are damage.
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"vocab_size": 17', '"vocab_size": 20'))
    with pytest.raises(ModelError, match=r"is \[17, 64\] .* but \[20, 64\] according to config.json"):
        build(folder)


def test_a_template_of_ones_own_is_used_and_exported(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=str(tmp_path / "mine.jinja")))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "7"}], tokenize=False) == "7"
    with pytest.raises(ModelError, match=r"model.chat_template=nowhere cannot be read"):
        load_tokenizer(ModelConfig(path=str(folder), chat_template="nowhere"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(ModelConfig(path=str(folder)))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
def test_quantised_models_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    with pytest.raises(CapabilityError, match=r"model.quantization=nf4: QLoRA is not supported by backend 'fsdp'"):
        build(folder, model={"quantization": "nf4"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelError, match=r"has quantized weights \(quantization_config: mxfp4\)"):
        build(folder)


def rank_damaged(folder: str) -> str:
    try:
        build(folder)
    except Exception as e:
        return str(e)
    return "loaded"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_on_every_rank(value: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "model", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][-1, -1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for told in run_ranks(rank_damaged, 2, str(folder)):
        assert f"{name} in" in told
        assert "not finite" in told


# ---- what the head says of the next token ----------------------------------------------------------------------------


def rank_greedy(folder: str, cp: int) -> list[bool]:
    engine = build(folder, parallel=ParallelConfig(cp=cp))
    reference = PlainReference(folder, OPTIM)
    documents = tiny_documents(6, seed=0)
    batch = share(engine, documents)
    found = engine.infer_batch(batch, OutputRequest(greedy=True), tokens=torch.ones(batch.num_tokens, dtype=torch.bool))
    want = torch.cat(
        [
            reference.logits(batch.input_ids[a:b].tolist()).argmax(-1)
            for a, b in zip(batch.bounds, batch.bounds[1:], strict=False)
        ]
    )
    loss = SFTLoss(request=OutputRequest(log_probs=True, greedy=True))
    result = engine.forward_backward(batch, loss, forward_only=True)
    hits = (want == batch.labels)[batch.labels >= 0].double().mean()
    # The greedy tokens of a training step change nothing about its gradient.
    norms = [engine.train_batch(batch, tried).grad_norm for tried in (loss,)]
    assert norms[0] == pytest.approx(reference.step(documents).grad_norm, rel=1e-5)
    engine.close()
    return [bool(torch.equal(found["greedy"], want)), abs(result.metrics["accuracy"] - float(hits)) < 1e-9]


@pytest.mark.parametrize("cp", [1, 2])
def test_greedy_tokens_and_accuracy_are_those_of_whole_logits(cp: int, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "gemma2")
    for answers in run_ranks(rank_greedy, cp, str(folder), cp):
        assert all(answers)


# ---- what a model costs ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "gpt2", "mixtral"])
def test_flops_are_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    """Eager attention computes every pair of a document, a causal count about half: that part is put in by hand."""
    from torch.utils.flop_counter import FlopCounterMode

    config = tiny_model_config(family)
    folder = save_tiny_model(tmp_path / "model", family)
    engine = build(folder)
    shape, length = engine.model_shape, 24
    engine.close()
    model: Any = tiny_model(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=torch.arange(3, 3 + length)[None], use_cache=False).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
    causal = sum(width * pairs(length, window) for width, window in shape.attention)
    every = sum(width for width, _ in shape.attention) * length * length
    ours = shape.flops([length], length, training=False) + 2 * (every - causal)
    # Rotary tables are a product of a few numbers, which nobody counts.
    assert ours == pytest.approx(forward, rel=2e-3)
    ours = shape.flops([length], length, training=True) + 6 * (every - causal)
    assert ours == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_pairs_by_counting() -> None:
    for length in range(1, 9):
        for window in (None, 1, 3, 8, 20):
            seen = sum(1 for q in range(length) for k in range(q + 1) if window is None or q - k < window)
            assert pairs(length, window) == seen


def test_frozen_weights_cost_less() -> None:
    dense = ModelShape(weights=100, trained=100, head=10, head_trained=10, attention=((4, None),))
    assert dense.flops([2], 1, training=True) == 3 * dense.flops([2], 1, training=False)
    adapters = ModelShape(weights=100, trained=0, head=10, head_trained=0, attention=((4, None),))
    assert adapters.flops([2], 1, training=True) == 2 * 2 * (100 * 2 + 10) + 3 * 2 * 4 * 3
    assert dense.attention_ratio == pytest.approx(4 / 200)


def test_known_devices() -> None:
    assert known_peak_tflops("NVIDIA H200", "bfloat16") == 989.0
    assert known_peak_tflops("NVIDIA H100 PCIe", "bfloat16") == 756.0
    assert known_peak_tflops("NVIDIA H200", "float32") is None
    assert known_peak_tflops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312.0
    for other in ("NVIDIA RTX A1000", "NVIDIA RTX A4000", "Some card"):
        assert known_peak_tflops(other, "bfloat16") is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_a_reward_model_is_not_trained_as_a_language_model(
    backend: str, tied: bool, tmp_path: Path, process_group: None
) -> None:
    plain = save_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=tied)
    reward = build(plain, model={"head": "value"})
    folder = export_hf(reward, tmp_path / "reward")
    reward.close()
    with pytest.raises(
        ModelError, match=r"is a reward model or another classifier \(it has score.weight\); as a language model"
    ):
        build(folder, backend=backend)
    # Where its config does not tell, and no name was read before the weights were, as with a model of the Hub.
    weights = WeightFolder(folder, str)
    with pytest.raises(ModelError, match=r"it has score.weight"):
        check_head(weights.names, ModelConfig(path="org/name"))
    build(folder, backend=backend, model={"head": "value"}).close()
    build(folder, backend=backend, model={"init": "random"}).close()


def test_sft_refuses_a_reward_model_before_it_reads_data(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = task / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "score.weight": torch.zeros(1, next(iter(tensors.values())).shape[-1])}, file)
    assert main(words(task, "data.train=[/nowhere.jsonl]")) == 1
    assert "it has score.weight" in capfd.readouterr().err


# ---- modules beside adapters -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_modules_to_save_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "untied", "llama", tie_word_embeddings=False)
    tied = save_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    mixture = save_tiny_model(tmp_path / "mixture", "qwen3_moe")
    with pytest.raises(ModelError, match=r"with model.head=value, which replaces the language-model head"):
        build(folder, model={"lora": LoraConfig(rank=2, modules_to_save=("lm_head",)), "head": "value"})
    for where, lora, told in (
        (
            folder,
            LoraConfig(rank=2, modules_to_save=("lm_haed",)),
            r"names 'lm_haed', which is not a module .*; did you mean 'lm_head'",
        ),
        (folder, LoraConfig(rank=2, modules_to_save=("rotary_emb",)), r"names 'rotary_emb', which is not a module"),
        (
            folder,
            LoraConfig(rank=2, modules_to_save=("layers.0",), targets=("q_proj",)),
            r"has a module with adapted layers|no adapter",
        ),
        (folder, LoraConfig(modules_to_save=("lm_head",)), r"with model.lora.rank=0, where the whole model is trained"),
        (
            mixture,
            LoraConfig(rank=2, modules_to_save=("experts",)),
            r"names 'experts', which has experts fused into one tensor",
        ),
        (tied, LoraConfig(rank=2, modules_to_save=("lm_head",)), r"is that of the input embeddings \(tie_word_embeddings\)"),
    ):
        with pytest.raises(ModelError, match=told):
            build(where, model={"lora": lora})


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("tied", [True, False])
def test_modules_beside_adapters_are_stored_in_float32_and_saved(tied: bool, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=tied)
    lora = LoraConfig(rank=2, modules_to_save=("embed_tokens",) if tied else ("lm_head",))
    precision = PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")
    engine = build(folder, model={"lora": lora}, precision=precision, optim=replace(OPTIM, lr=1e-6))
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    before = weights(engine)[name].clone()
    assert before.dtype == torch.float32
    steps(engine, 1)
    # In bfloat16 so small an update would be rounded away.
    change = (weights(engine)[name] - before).abs()
    assert 0 < float(change.max()) < 1e-5
    # And they are in checkpoints, unlike the weights under adapters.
    saved, after = engine.save_checkpoint(str(tmp_path / "checkpoints"), 1), weights(engine)[name].clone()
    steps(engine, 1)
    assert not torch.equal(weights(engine)[name], after)
    engine.load_checkpoint(saved)
    assert torch.equal(weights(engine)[name], after)
    engine.close()


@pytest.mark.usefixtures("process_group")
def test_added_tokens_are_learned_beside_adapters(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"the rows of the new tokens would not be trained"):
        build(folder, model={"added_tokens": ("<a>",), "lora": LoraConfig(rank=2, modules_to_save=("lm_head",))})
    with pytest.raises(ModelError, match=r"train its embeddings too \(model.lora.modules_to_save\)"):
        build(folder, model={"added_tokens": ("<a>",), "lora": LoraConfig(rank=2)})
    lora = LoraConfig(rank=2, modules_to_save=("embed_tokens", "lm_head"))
    engine = build(folder, model={"added_tokens": ("<a>", "<b>"), "lora": lora}, optim=replace(OPTIM, lr=1e-2))
    before = weights(engine)["model.embed_tokens.weight"].clone()
    assert any(len(before) - 1 in document for document in DOCUMENTS)
    engine.train_batch(from_lists(DOCUMENTS), SFTLoss())
    assert not torch.equal(weights(engine)["model.embed_tokens.weight"][-1], before[-1])
    engine.close()
