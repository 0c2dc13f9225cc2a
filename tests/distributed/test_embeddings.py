"""Embeddings: plain transformers' own of each text alone; the folders of sentence-transformers; service by a worker."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import tiny_model
from drivetrain.engine.errors import ConfigError, ModelError, WorkerError
from drivetrain.engine.tiny_configs import tiny_model_config
from drivetrain.generation.embeddings.config import EmbeddingConfig
from drivetrain.generation.embeddings.embedder import Embedder
from drivetrain.generation.embeddings.folder import read_folder
from drivetrain.generation.embeddings.text_scheduler import EmbeddingsScheduler
from drivetrain.generation.scheduler import Ended, SchedulerSettings
from drivetrain.workers.roles.embedder import EmbeddingWorker
from drivetrain.workers.supervision.supervisor import start_model_worker

TEXTS = [[5, 6, 7], [9], [(i * 7) % 250 for i in range(40)], [200, 100], [3] * 17, [5, 6, 7]]
TOLERANCE = 2e-6
_REORDERED = [("", "x.Transformer"), ("", "x.Normalize"), ("1_Pooling", "x.Pooling")]
ENCODER = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embeddings")
    for family in ("qwen3", "llama"):
        tiny_model(tiny_model_config(family)).save_pretrained(root / family)
    for family in ("bert", "xlm-roberta"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModel.from_config(AutoConfig.for_model(family, **ENCODER))
            for parameter in model.parameters():
                parameter.data += torch.randn_like(parameter) * 0.05
        model.save_pretrained(root / family)
    return root


def embedder(folder: Path, **more: Any) -> Embedder:
    return Embedder(EmbeddingConfig(model=ModelConfig(path=str(folder)), **more))


def reference(folder: Path, text: list[int], pooling: str, *, normalize: bool = True) -> Tensor:
    """The text alone, through plain transformers."""
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(input_ids=torch.tensor([text])).last_hidden_state[0]
    row = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling]
    return nn.functional.normalize(row, dim=-1) if normalize else row


def sentence_transformers(folder: Path, to: Path, pooling: dict[str, Any], *more: dict[str, Any]) -> Path:
    """The folder of a model, with the files of sentence-transformers beside it."""
    import shutil

    shutil.copytree(folder, to)
    (to / "1_Pooling").mkdir()
    (to / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        *more,
    ]
    (to / "modules.json").write_text(json.dumps(modules))
    return to


@pytest.mark.parametrize(
    "family",
    ["qwen3", pytest.param("llama", marks=pytest.mark.slow), "bert", pytest.param("xlm-roberta", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_an_embedding_is_that_of_the_text_alone(folders: Path, family: str, pooling: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        assert embedder(folders / family, pooling=pooling, dtype=dtype).packs == (family in ("qwen3", "llama"))
    for more in ({}, {"target_tokens_per_batch": 45}, {"max_batch_size": 1}):
        model = embedder(folders / family, pooling=pooling, normalize=False, **more)
        assert model.packs == (family in ("qwen3", "llama"))
        found = model.embed(TEXTS)
        for text, row in zip(TEXTS, found, strict=True):
            expected = reference(folders / family, text, pooling, normalize=False)
            assert float((row - expected).abs().max() / expected.abs().max()) <= TOLERANCE
    normalized = embedder(folders / family, pooling=pooling).embed(TEXTS)
    assert normalized.norm(dim=-1).tolist() == pytest.approx([1.0] * len(TEXTS), abs=1e-6)
    assert torch.allclose(normalized[2], reference(folders / family, TEXTS[2], pooling), atol=TOLERANCE)


def test_the_control_of_the_test_above(folders: Path) -> None:
    """With a cache, packed texts see those before them."""
    model: Any = embedder(folders / "qwen3", normalize=False)
    forward = model._model.forward
    model._model.forward = lambda **inputs: forward(**{**inputs, "use_cache": True})
    expected = reference(folders / "qwen3", TEXTS[3], "last", normalize=False)
    row = model.embed(TEXTS[2:4])[1]
    assert float((row - expected).abs().max()) > 0.01


def test_a_folder_of_its_own_says_how_it_embeds(folders: Path, tmp_path: Path) -> None:
    """Files as the library writes them, old and new."""
    normalize = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("qwen3", {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ("bert", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ("bert", {"pooling_mode": "mean", "include_prompt": True}, "mean"),
    ]
    for i, (family, pooling, expected) in enumerate(cases):
        for modules in ([], [normalize]):
            folder = sentence_transformers(folders / family, tmp_path / f"{i}{len(modules)}", pooling, *modules)
            (row,) = embedder(folder).embed([TEXTS[2]])
            want = reference(folders / family, TEXTS[2], expected, normalize=bool(modules))
            assert torch.allclose(row, want, rtol=TOLERANCE, atol=TOLERANCE)
    # Without these files: the last token of a language model, the mean of another.
    assert torch.allclose(
        embedder(folders / "qwen3").embed(TEXTS)[2], reference(folders / "qwen3", TEXTS[2], "last"), atol=TOLERANCE
    )
    assert torch.allclose(
        embedder(folders / "bert").embed(TEXTS)[2], reference(folders / "bert", TEXTS[2], "mean"), atol=TOLERANCE
    )


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_a_linear_layer_behind_the_pooling(folders: Path, tmp_path: Path, activation: str) -> None:
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense.Dense"}
    folder = sentence_transformers(folders / "bert", tmp_path / "m", {"pooling_mode_mean_tokens": True}, dense)
    (folder / "2_Dense").mkdir()
    settings = {"in_features": 64, "out_features": 8, "bias": True, "activation_function": f"torch.nn.modules.{activation}"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(settings))
    weight, bias = torch.randn(8, 64), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    (row,) = embedder(folder).embed([TEXTS[0]])
    expected = weight @ reference(folders / "bert", TEXTS[0], "mean", normalize=False) + bias
    assert torch.allclose(row, expected.tanh() if activation == "Tanh" else expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules.json": "{}"}, "is not a list of modules with idx, path and type"),
        ({"modules.json": "["}, "modules.json cannot be read: .*; the file is damaged"),
        ({"modules.json": []}, "has the modules none; supported are Transformer, Pooling"),
        ({"modules.json": [{"idx": 0, "path": "", "type": "x.Transformer"}]}, "has the modules Transformer; supported are"),
        (
            {"modules.json": [{"idx": i, "path": p, "type": t} for i, (p, t) in enumerate(_REORDERED)]},
            "has the modules Transformer, Normalize, Pooling; supported are",
        ),
        ({"modules.json": [{"idx": "a", "path": "", "type": "x.Transformer"}]}, "is not a list of modules with idx"),
        ({"sentence_bert_config.json": {"max_seq_length": "12"}}, "max_seq_length='12' is not a number of tokens"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case=true is not supported"),
        ({"1_Pooling/config.json": []}, "is not a JSON object; the file is damaged"),
        ({"config.json": {"model_type": "t5"}}, "cannot be loaded for embeddings|cannot be used for embeddings"),
        ({"model.safetensors": "short"}, "cannot be loaded for embeddings: SafetensorError"),
        ({"modules.json": [{"idx": 0, "path": "", "type": "x.CNN"}]}, "a module of type x.CNN is not supported"),
        ({"modules.json": [{"idx": 0, "path": "../..", "type": "x.Transformer"}]}, "is outside of the folder"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "the pooling pooling_mode_max_tokens is not supported"),
        ({"1_Pooling/config.json": {"pooling_mode": ["mean", "cls"]}}, "the pooling mean, cls is not supported"),
        ({"1_Pooling/config.json": {}}, "the pooling none is not supported"),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "q"}},
            "default_prompt_name='q' is not among its prompts",
        ),
    ],
)
def test_what_a_folder_asks_for_in_vain_is_named(folders: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = sentence_transformers(folders / "bert", tmp_path / "m", {"pooling_mode_mean_tokens": True})
    for name, content in change.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=message):
        embedder(folder)


def test_prompts_and_lengths_of_a_folder(folders: Path, tmp_path: Path) -> None:
    folder = sentence_transformers(folders / "bert", tmp_path / "m", {"pooling_mode_mean_tokens": True})
    prompts = {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    found = read_folder(folder)
    assert (found.prompt, found.max_tokens, found.pooling, found.normalize) == ("query: ", 64, "mean", False)


@pytest.mark.parametrize(("family", "room"), [("bert", 80), ("xlm-roberta", 78), ("qwen3", 256)])
def test_texts_that_cannot_be_embedded_are_refused(folders: Path, family: str, room: int) -> None:
    model = embedder(folders / family)
    assert model.embed([[5] * room]).shape == (1, 64)
    for text, message in (
        ([], "the text has 0 tokens"),
        ([5, 256], "token ids from 5 to 256"),
        ([-1], "token ids from -1 to -1"),
        ([5] * (room + 1), f"the text has {room + 1} tokens, and .* has {room} positions; truncate it"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.embed([[5], text])
    assert model.embed([]).shape[0] == 0


def test_weights_that_give_nan_and_folders_without_weights(folders: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folders / "bert", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "encoder.layer.0.output.dense.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks 1 tensors, {name}"):
        embedder(tmp_path / "m")
    save_file({**tensors, name: tensors[name] * float("nan")}, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="computes NaN or infinity"):
        embedder(tmp_path / "m").embed([[5]])
    with pytest.raises(ModelError, match="cannot be loaded for embeddings"):
        embedder(tmp_path)
    for wrong in ({"pooling": "max"}, {"dtype": "float16"}, {"max_batch_size": 0}, {"target_tokens_per_batch": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            EmbeddingConfig(model=ModelConfig(), **wrong)  # type: ignore[arg-type]


class CountingModel:
    """Stands for an embedding model: it counts its batches, and cannot embed a 9."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def check(self, tokens: list[int]) -> None:
        if not tokens:
            raise ConfigError("nothing to embed")

    def embed(self, texts: list[list[int]]) -> Tensor:
        self.batches.append(len(texts))
        if any(9 in text for text in texts):
            raise MemoryError("a nine")
        return torch.tensor([[float(sum(text))] for text in texts])


def events_of(scheduler: Any) -> Iterator[Ended]:
    while scheduler.wait_s() == 0.0:
        yield from scheduler.run()


def test_the_scheduler_batches_what_waits_and_finds_the_text_that_fails() -> None:
    model: Any = CountingModel()
    scheduler = EmbeddingsScheduler(model, SchedulerSettings(queue_size=8), max_texts=4, max_tokens=6)
    texts = [[1], [2, 2, 2, 2, 2, 2, 2], [], [9], [4], [5], [6], [7]]
    for number, text in enumerate(texts):
        assert scheduler.put(number, text)
    # Full; and what was cancelled does not come back.
    assert not scheduler.put(99, [1])
    assert scheduler.cancel(6)
    assert not scheduler.cancel(99)
    found = {event.id: event for event in events_of(scheduler)}
    assert sorted(found) == list(range(8))
    assert {number: float(event.result) for number, event in found.items() if event.error is None} == {
        0: 1.0, 1: 14.0, 4: 4.0, 5: 5.0, 7: 7.0
    }  # fmt: skip
    assert [type(found[number].error).__name__ for number in (2, 3, 6)] == [
        "ConfigError",
        "MemoryError",
        "RequestCancelledError",
    ]
    # One alone, one too long for a batch, then four of which one fails.
    assert model.batches == [1, 1, 4, 2, 1, 1, 2]
    # The first one of an idle model waits for others.
    patient = EmbeddingsScheduler(model, SchedulerSettings(max_wait_ms=5000), 4, 6)
    assert patient.wait_s() is None
    patient.put(1, [1])
    assert 4.0 < (patient.wait_s() or 0.0) <= 5.0
    patient.cancel(1)
    assert patient.wait_s() == 0.0


def test_a_worker_embeds_many_texts_together(folders: Path) -> None:
    expected = embedder(folders / "qwen3").embed(TEXTS)

    async def test() -> None:
        config = EmbeddingConfig(model=ModelConfig(path=str(folders / "qwen3")))
        async with start_model_worker(EmbeddingWorker, config) as queue:
            rows = await asyncio.gather(*(queue.embed(text) for text in TEXTS))
            assert torch.allclose(torch.stack(rows), expected, atol=TOLERANCE)
            with pytest.raises(WorkerError, match="the text has 0 tokens"):
                await queue.embed([])

    asyncio.run(test())


def test_a_group_embeds(folders: Path) -> None:
    worker = EmbeddingWorker(EmbeddingConfig(model=ModelConfig(path=str(folders / "llama"))))
    with pytest.raises(ConfigError, match="not initialized"):
        worker.embed(TEXTS)
    found = worker.initialize().embed(TEXTS)["embeddings"]
    assert torch.allclose(found, embedder(folders / "llama").embed(TEXTS))
    worker.close()
