"""Trainers on rows with images, from files to a model, against plain transformers, document by document."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForMultimodalLM, AutoTokenizer

from drivetrain.cli import main as drivetrain
from drivetrain.engine.config import ModelConfig, OptimConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.hf.tokenizer import load_tokenizer
from drivetrain.engine.tiny_media import IMAGE
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.encode import encode_row
from drivetrain.trainers.data.media import MediaReader, fields_of
from drivetrain.trainers.dpo import main as dpo
from drivetrain.trainers.rm import main as rm
from drivetrain.trainers.sft import main as sft
from helpers.media import movie, picture, png, save_media_model, wav
from helpers.runs import records

FAMILY = "qwen2_5_vl"
Side = list[dict[str, Any]]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, pictures, and rows of which half have some: 0, 1 or 2."""
    folder = tmp_path_factory.mktemp("task")
    save_media_model(folder / "model", FAMILY)
    (folder / "data").mkdir()
    for i in range(8):
        (folder / "data" / f"{i}.png").write_bytes(png(16 + 8 * (i % 3), 16 + 8 * (i % 2), i))
    rows = [{"messages": [*asked(i), {"role": "assistant", "content": f"{i} of them"}]} for i in range(16)]
    pairs = [{"prompt": asked(i), "chosen": answer(f"{i} good"), "rejected": answer("bad")} for i in range(16)]
    for name, content in (("sft", rows), ("dpo", pairs)):
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


@pytest.fixture(scope="module")
def scored(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a head that scores."""
    folder = tmp_path_factory.mktemp("scored") / "model"
    shutil.copytree(task / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({**tensors, "score.weight": score_head()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def score_head() -> torch.Tensor:
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(7)) * 0.1


def answer(text: str) -> Side:
    return [{"role": "assistant", "content": text}]


def pictures_of(row: int) -> list[int]:
    return [] if row % 2 else [row % 8, (row + 3) % 8][: 1 + row % 4 // 2]


def asked(row: int) -> Side:
    parts = [{"type": "image", "image": f"{i}.png"} for i in pictures_of(row)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": f"how many in {row}?"}]}]


def words(task: Path, run: Path, data: str, *more: str) -> list[str]:
    return [
        f"model.path={task / 'model'}",
        f"data.train=[{task / 'data' / data}.jsonl]",
        f"data.cache_dir={run.parent / 'cache'}",
        "data.batch_size=8",
        "data.shuffle=false",
        "engine.micro_batch.max_tokens=192",
        "optim.lr=1e-4",
        "optim.weight_decay=0",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        "trainer.max_steps=2",
        f"trainer.output_dir={run}",
        *more,
    ]


class Plain:
    """Transformers alone: its image processor, its tokenizer, its model, one document at a time."""

    def __init__(self, task: Path, *, head: bool = False) -> None:
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(task / "model", dtype=torch.float32).train()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(task / "model")
        self.images: Any = AutoImageProcessor.from_pretrained(task / "model", backend="pil")
        if head:
            self.model.lm_head = torch.nn.Linear(64, 1, bias=False)
            self.model.lm_head.weight = torch.nn.Parameter(score_head())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, betas=(0.9, 0.95))

    def log_probs(self, row: int, text: str) -> torch.Tensor:
        """The log-probabilities of an answer's tokens and of the one that ends it."""
        logits, answered = self.outputs(row, text)
        result: torch.Tensor = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(answered)[:, None])[:, 0]
        return result

    def score(self, row: int, text: str) -> torch.Tensor:
        """The score at the last token."""
        return self.outputs(row, text)[0][-1, 0]

    def outputs(self, row: int, text: str) -> tuple[torch.Tensor, list[int]]:
        """The head's outputs from the last token of the prompt on, and the tokens of the answer."""
        fields: dict[str, Any] = {}
        if numbers := pictures_of(row):
            drawn = [picture(16 + 8 * (i % 3), 16 + 8 * (i % 2), i) for i in numbers]
            fields = dict(self.images(images=drawn, return_tensors="pt"))
        content = "".join("<|vision_start|><|image_pad|><|vision_end|>" for _ in numbers)
        prompt = f"<|user|>{content}how many in {row}?<end><|assistant|>"
        ids: list[int] = []
        counts = iter([int(grid.prod()) // 4 for grid in fields.get("image_grid_thw", [])])
        for token in self.tokenizer(prompt)["input_ids"]:
            ids += [token] * (next(counts) if token == IMAGE else 1)
        answered = self.tokenizer(f"{text}<end>")["input_ids"]
        tokens = torch.tensor([[*ids, *answered]])
        if fields:
            fields["mm_token_type_ids"] = (tokens == IMAGE).int()
        return self.model(input_ids=tokens, use_cache=False, **fields).logits[0, len(ids) - 1 :], answered

    def step(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def sft_steps(task: Path) -> list[tuple[float, float]]:
    plain, steps = Plain(task), []
    for first in (0, 8):
        count = sum(len(plain.tokenizer(f"{i} of them<end>")["input_ids"]) for i in range(first, first + 8))
        loss = 0.0
        for i in range(first, first + 8):
            one = -plain.log_probs(i, f"{i} of them").sum() / count
            one.backward()
            loss += float(one.detach())
        steps.append((loss, plain.step()))
    return steps


def dpo_steps(task: Path) -> list[tuple[float, float]]:
    plain, fixed, steps = Plain(task), Plain(task), []
    for first in (0, 8):
        loss = 0.0
        for i in range(first, first + 8):
            sides = [plain.log_probs(i, text).sum() for text in (f"{i} good", "bad")]
            with torch.no_grad():
                reference = [fixed.log_probs(i, text).sum() for text in (f"{i} good", "bad")]
            one = -F.logsigmoid(0.5 * (sides[0] - reference[0] - sides[1] + reference[1])) / 8
            one.backward()
            loss += float(one.detach())
        steps.append((loss, plain.step()))
    return steps


def rm_steps(task: Path) -> list[tuple[float, float]]:
    """Bradley-Terry, with the head that `scored` writes."""
    plain, steps = Plain(task, head=True), []
    for first in (0, 8):
        loss = 0.0
        for i in range(first, first + 8):
            one = -F.logsigmoid(plain.score(i, f"{i} good") - plain.score(i, "bad")) / 8
            one.backward()
            loss += float(one.detach())
        steps.append((loss, plain.step()))
    return steps


def check(run: Path, steps: Sequence[tuple[float, float]]) -> None:
    rows = [r for r in records(run) if r.get("split") != "eval"]
    assert len(rows) == len(steps)
    for row, (loss, norm) in zip(rows, steps, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=2e-6, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=2e-5)


def test_sft_on_pictures_equals_plain_transformers(task: Path, tmp_path: Path) -> None:
    more = (
        f"data.eval=[{task / 'data' / 'sft.jsonl'}]",
        "trainer.eval_every=2",
        "trainer.eval_completions=2",
        "trainer.eval_max_tokens=4",
    )
    assert sft(words(task, tmp_path / "run", "sft", *more)) == 0
    check(tmp_path / "run", sft_steps(task))
    # The held-out loss and completions have the pictures too: greedy tokens of plain transformers with the exported weights.
    plain = Plain(task)
    plain.model = AutoModelForMultimodalLM.from_pretrained(tmp_path / "run" / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        every = torch.cat([plain.log_probs(i, f"{i} of them") for i in range(16)])
    evaluated = next(r for r in records(tmp_path / "run") if r.get("split") == "eval")
    assert evaluated["loss"] == pytest.approx(-float(every.mean()), rel=1e-5)
    assert (tmp_path / "run" / "hf" / "preprocessor_config.json").is_file()


@pytest.mark.slow
def test_dpo_on_pictures_equals_plain_transformers(task: Path, tmp_path: Path) -> None:
    assert dpo(words(task, tmp_path / "run", "dpo", "dpo.beta=0.5")) == 0
    steps = dpo_steps(task)
    assert steps[0][0] == pytest.approx(math.log(2), rel=1e-5)
    check(tmp_path / "run", steps)


def on_two_processes(trainer: str, settings: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli", trainer, "--nproc", "2", *settings],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "layout"),
    [("sft", "cp=2"), ("sft", "dp_shard=2"), ("dpo", "dp_shard=2"), ("rm", "cp=2"), ("rm", "dp_shard=2")],
)
def test_two_processes_give_the_numbers_of_plain_transformers(
    task: Path, scored: Path, tmp_path: Path, trainer: str, layout: str
) -> None:
    more = {"sft": [], "dpo": ["dpo.beta=0.5"], "rm": [f"model.path={scored}"]}[trainer]
    data = "sft" if trainer == "sft" else "dpo"
    on_two_processes(trainer, words(task, tmp_path / "run", data, f"engine.parallel.{layout}", *more))
    check(tmp_path / "run", {"sft": sft_steps, "dpo": dpo_steps, "rm": rm_steps}[trainer](task))


@pytest.mark.slow
def test_adapters_learn_alike_on_one_process_and_on_two(task: Path, tmp_path: Path) -> None:
    settings = ["model.lora.rank=2", "model.lora.targets=[*.visual.*.qkv,*.q_proj]", "trainer.max_steps=2"]
    assert sft(words(task, tmp_path / "one", "sft", *settings)) == 0
    alone = [(r["loss"], r["grad_norm"]) for r in records(tmp_path / "one") if r.get("split") != "eval"]
    assert alone[0][0] == pytest.approx(sft_steps(task)[0][0], rel=2e-6)
    for layout in ("cp=2", "dp_shard=2"):
        on_two_processes("sft", words(task, tmp_path / layout, "sft", f"engine.parallel.{layout}", *settings))
        check(tmp_path / layout, alone)


def test_data_show_tells_sizes_and_tokens(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(task / "data" / "sft.jsonl")
    words_of_show = ["show", file, "--model", str(task / "model"), "--no-png", f"data.cache_dir={tmp_path}"]
    assert drivetrain(["data", *words_of_show]) == 0
    told = capsys.readouterr().out
    assert "image of 16 x 16 pixels: 4 tokens" in told
    assert "<|user|><|vision_start|>[image]<|vision_end|>how many in 0?<end><|assistant|>«0 of them<end>»" in told
    assert "images       12, with " in told
    assert "duplicates   0 (0.0%) equal an earlier one" in told


def test_a_broken_row_ends_a_run_before_weights_are_read(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [*asked(0), *answer("1")]}) + "\n")

    def no_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("safetensors.safe_open", no_weights)
    assert sft([*words(task, tmp_path / "run", "sft"), f"data.train=[{file}]"]) == 1
    told = capfd.readouterr().err
    assert f"{file}:1: message 1: the image '0.png' cannot be read (No such file or directory): {tmp_path / '0.png'}" in told


@pytest.mark.slow
def test_a_reward_model_on_pictures_equals_plain_transformers(task: Path, scored: Path, tmp_path: Path) -> None:
    assert rm(words(task, tmp_path / "run", "dpo", f"model.path={scored}")) == 0
    check(tmp_path / "run", rm_steps(task))
    assert (tmp_path / "run" / "hf" / "preprocessor_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_omni_thinker", "gemma4"])
def test_sft_on_images_videos_and_audio_equals_plain_transformers(family: str, tmp_path: Path) -> None:
    """Of the fields and tokens whose equality with the families' own processors has tests of its own."""
    folder = save_media_model(tmp_path / "model", family)
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(png(16 + 8 * i, 16, i))
        (tmp_path / f"{i}.mp4").write_bytes(movie(20 + 10 * i))
        (tmp_path / f"{i}.wav").write_bytes(wav(0.5 + 0.3 * i))
    endings = {"image": "png", "video": "mp4", "audio": "wav"}
    kinds = [["image"], ["video"], ["audio"], [], ["audio", "image"], ["video"], ["image", "audio"], []]
    rows = []
    for i, kinds_of_row in enumerate(kinds):
        parts = [{"type": kind, kind: f"{i % 2}.{endings[kind]}"} for kind in kinds_of_row]
        content = [*parts, {"type": "text", "text": f"what is {i}?"}]
        rows.append({"messages": [{"role": "user", "content": content}, *answer(f"{i} of them")]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={folder}", f"data.train=[{tmp_path / 'rows.jsonl'}]", "engine.micro_batch.max_tokens=1024"]
    settings += ["data.max_frames=4", "data.batch_size=4"]
    assert sft(words(tmp_path, tmp_path / "run", "rows", *settings)) == 0
    model = ModelConfig(path=str(folder))
    data = DataConfig(cache_dir=str(tmp_path / "other"), max_frames=4)
    reader = MediaReader.of(model, data, load_tokenizer(model), tmp_path / "other")
    assert reader is not None
    plain, steps = PlainReference(folder, OptimConfig(lr=1e-4, weight_decay=0, betas=(0.9, 0.95), clip_grad_norm=1.0)), []
    at = str(tmp_path / "rows.jsonl")
    samples = [
        encode_row(reader.tokenizer, row, f"{at}:{i + 1}", data, "completions", None, reader)[0] for i, row in enumerate(rows)
    ]
    assert [len(sample.media) for sample in samples] == [len(one) for one in kinds]
    for first in (0, 4):
        some = samples[first : first + 4]
        fields = [{name: field.values for name, field in fields_of([one], reader.store).items()} for one in some]
        step = plain.step([one.ids for one in some], [one.supervised for one in some], fields)
        steps.append((step.loss, step.grad_norm))
    check(tmp_path / "run", steps)
