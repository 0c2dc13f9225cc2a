"""The promise: the same batches give the same loss and gradient norm on every engine and every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.trainers.parity import FSDP, MCORE, MCORE_MOE, Job, Row, judge, parse_row, table
from drivetrain.trainers.parity_rows import make_reference, run_row
from harness import run_ranks

DENSE = ("llama", "qwen2", "qwen3", "mistral")
MATRIX = [
    *((f"fsdp:{axes}", DENSE) for axes in FSDP),
    *((f"mcore:{axes}", DENSE) for axes in MCORE),
    *((f"{row}", ("qwen3_moe",)) for row in ("fsdp:dp_shard=2,ep=2", *(f"mcore:{axes}" for axes in MCORE_MOE))),
]


def rank_reference(job: Job) -> None:
    make_reference(job)
    # make_reference ends the default group; the harness ends it too.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    rows = [parse_row("fsdp", model) for model in (*DENSE, "qwen3_moe")]
    made = Job(
        folder=str(tmp_path_factory.mktemp("parity")),
        data=None,
        rows=rows,
        steps=5,
        dtype="float32",
        batch_size=12,
        max_tokens=192,
    )
    run_ranks(rank_reference, 1, made)
    return made


def rank_rows(job: Job, rows: list[Row]) -> list[dict[str, Any]]:
    return [run_row(job, row) for row in rows]


def references(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(job.folder) / "references.json").read_text())
    return found


@pytest.mark.parametrize(("word", "models"), MATRIX)
def test_row_agrees_with_plain_hugging_face(word: str, models: tuple[str, ...], job: Job) -> None:
    rows = [parse_row(word, model) for model in models]
    results = run_ranks(rank_rows, rows[0].nproc, job, rows)[0]
    judged = [judge(row, result, references(job)[row.model], "float32") for row, result in zip(rows, results, strict=True)]
    assert all(told["ok"] for told in judged), "\n".join(table(judged, references(job)))
