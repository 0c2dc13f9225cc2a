"""A run that begins on one engine and goes on with the other is the run that either would have made alone."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import LoraConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.losses.sft import SFTLoss
from drivetrain.trainers.sft import main
from helpers.engines import build, close_to, share
from helpers.harness import run_ranks
from helpers.runs import make_task, records, words

OPTIM = OptimConfig(lr=3e-4, weight_decay=0.1, schedule="cosine", warmup_steps=3)
HALF = 5


def train(engine: BaseEngine, numbers: range) -> list[tuple[float, float]]:
    found = []
    for number in numbers:
        result = engine.train_batch(share(engine, tiny_documents(8, seed=number)), SFTLoss())
        assert result.grad_norm is not None
        found.append((result.loss, result.grad_norm))
    return found


def rank_moves(folder: str, root: str, fsdp: dict[str, Any], mcore: dict[str, Any], model: dict[str, Any]) -> Any:
    """Ten steps on either engine, and five on each, both ways; with the learning rates of the second half."""

    def made(backend: str) -> Any:
        axes = fsdp if backend == "fsdp" else mcore
        parallel = ParallelConfig(**axes)
        engine = build(folder, backend=backend, parallel=parallel, model=model, optim=OPTIM, total_steps=2 * HALF)
        return contextlib.closing(engine)

    straight, moved = {}, {}
    for first, second in (("fsdp", "mcore"), ("mcore", "fsdp")):
        with made(first) as engine:
            found = train(engine, range(HALF))
            saved = engine.save_checkpoint(f"{root}/{first}", HALF)
            straight[first] = found + train(engine, range(HALF, 2 * HALF))
        with made(second) as engine:
            engine.load_checkpoint(saved)
            assert engine.step == HALF
            moved[first, second] = found + train(engine, range(HALF, 2 * HALF))
    return straight, moved


@pytest.mark.parametrize(
    ("family", "fsdp", "mcore", "model"),
    [
        pytest.param("qwen3", {"cp": 2}, {"tp": 2, "tp_sequence": True}, {}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"dp_shard": 2}, {"pp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"ep": 2}, {"tp": 2, "tp_sequence": True, "ep": 2}, {}, marks=pytest.mark.slow),
        ("llama", {"dp_replicate": 2}, {"tp": 2}, {"lora": LoraConfig(rank=4, alpha=8.0)}),
        pytest.param("qwen3_moe", {"dp_shard": 2}, {"pp": 2}, {"lora": LoraConfig(rank=4, alpha=8.0)}, marks=pytest.mark.slow),
        pytest.param(
            "phi3", {"cp": 2}, {"tp": 2}, {"lora": LoraConfig(rank=4, alpha=8.0, rslora=True)}, marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3_moe",
            {"ep": 2},
            {"tp": 2, "tp_sequence": True, "etp": 2},
            {"lora": LoraConfig(rank=4, alpha=8.0, targets=("experts", "embed_tokens", "lm_head"))},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt_oss",
            {"dp_shard": 2},
            {"pp": 2},
            {"lora": LoraConfig(rank=4, alpha=8.0, targets=("experts",))},
            marks=pytest.mark.slow,
        ),
        pytest.param("smollm3", {"dp_shard": 2}, {"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("olmo3", {"dp_shard": 2}, {"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {"dp_shard": 2}, {"tp": 2, "tp_sequence": True}, {}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"dp_shard": 2}, {"pp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"dp_shard": 2}, {"tp": 2, "tp_sequence": True}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"cp": 2}, {"tp": 2, "tp_sequence": True}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", {"dp_shard": 2}, {"pp": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_next",
            {"dp_shard": 2},
            {"tp": 2, "tp_sequence": True},
            {"lora": LoraConfig(rank=4, alpha=8.0, targets=("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"))},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_5_text", {"dp_shard": 2}, {"tp": 2}, {"lora": LoraConfig(rank=4, alpha=8.0)}, marks=pytest.mark.slow
        ),
    ],
)
def test_five_steps_on_each_engine_are_ten_on_either(
    family: str, fsdp: dict[str, Any], mcore: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    # A vocabulary that tensor parallelism does not divide, and tied embeddings that pipeline stages share.
    folder = save_tiny_model(tmp_path / "model", family, vocab_size=257, tie_word_embeddings=family == "qwen2")
    straight, moved = run_ranks(rank_moves, 2, str(folder), str(tmp_path), fsdp, mcore, model)[0]
    close_to(straight["mcore"], straight["fsdp"], loss=1e-5, norm=1e-5)
    for found in moved.values():
        for alone in straight.values():
            close_to(found, alone, loss=1e-5, norm=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("fsdp", "mcore"), ("mcore", "fsdp")])
def test_a_trainers_run_goes_on_with_the_other_engine(
    first: str, second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "drivetrain")
    make_task(tmp_path)
    settings = ["trainer.save_every=5", "trainer.loggers=[jsonl]", "trainer.max_steps=10", "optim.schedule=cosine"]
    straight = tmp_path / "straight"
    assert main(words(tmp_path, *settings, f"engine.backend={first}", f"trainer.output_dir={straight}")) == 0
    # As if stopped after step 5; the rest of the epoch, the next one's order and the schedule go on where they were.
    resumed = [f"trainer.resume={straight / 'checkpoints' / 'step-00000005'}", f"trainer.output_dir={tmp_path / 'moved'}"]
    assert main(words(tmp_path, *settings, f"engine.backend={second}", *resumed)) == 0
    assert "resumed from" in caplog.text
    want, got = records(straight)[5:], records(tmp_path / "moved")
    assert [r["step"] for r in got] == [6, 7, 8, 9, 10]
    for name in ("lr", "tokens", "epoch"):
        assert [r[name] for r in got] == [r[name] for r in want]
    close_to([(r["loss"], r["grad_norm"]) for r in got], [(r["loss"], r["grad_norm"]) for r in want], loss=1e-5, norm=1e-5)
