"""Completions of tickets in the controller's memory. A checkpoint stores those that its next steps train on.

All those that were generated with weights older than its own are among them, because nothing could generate them again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ...engine.errors import BatchError, CheckpointError
from ...engine.ops.expert_routes import ROUTED_EXPERTS
from ...engine.packing.batch import PackedBatch
from ...generation.result import Generation
from .batch_file import batch_from, tensors_of
from .completions import Completion, EpisodeRecord, decoded
from .prompts import Prompts


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptCompletions:
    """The completions of a ticket's prompt, in the controller's memory.

    Args:
        batch: The documents, each the prompt with a completion, and their fields.
        rows: The completions.
    """

    batch: PackedBatch
    rows: tuple[Completion, ...]

    def resumable(self, max_tokens: int) -> list[Generation]:
        """Return the completions of a cancelled call, for the generator to continue.

        Args:
            max_tokens: The number of tokens after which a completion ends.
        """
        generations = generations_of(self.batch, [len(row.prompt.ids) for row in self.rows])
        return [
            replace(one, finish_reason="aborted") if row.is_unfinished(max_tokens) else one
            for one, row in zip(generations, self.rows, strict=True)
        ]


def generations_of(batch: PackedBatch, prompts: Sequence[int]) -> list[Generation]:
    """Return the completions of a generator's batch.

    Args:
        batch: The batch; each document is a prompt with its completion.
        prompts: The number of tokens of each prompt.
    """
    fields, generations = batch.token_fields, []
    finished = batch.sequence_fields["finished"].tolist()
    for size, (begin, end), ended in zip(prompts, pairwise(batch.bounds), finished, strict=True):
        # Values of a token are stored at the position that predicts it.
        predicting = slice(begin + size - 1, end - 1)
        generations.append(
            Generation(
                prompt=batch.input_ids[begin : begin + size].tolist(),
                response=batch.input_ids[begin + size : end].tolist(),
                log_probs=fields["rollout_log_probs"][predicting].tolist(),
                versions=fields["versions"][predicting].tolist(),
                finish_reason="stop" if ended else "length",
                routed_experts=fields[ROUTED_EXPERTS][begin:end] if ROUTED_EXPERTS in fields else None,
            )
        )
    return generations


def to_bytes(kept: Mapping[int, KeptCompletions]) -> bytes:
    """Return completions as the contents of a safetensors file.

    Args:
        kept: The completions by the number of their ticket; at least one.
    """
    batch = PackedBatch.concat([one.batch for one in kept.values()])
    numbers = torch.tensor([number for number, one in kept.items() for _ in one.rows], dtype=torch.int64)
    episodes = [None if row.episode is None else _as_json(row) for one in kept.values() for row in one.rows]
    about = {"extra_fields": json.dumps(sorted(batch.extra_fields)), "episodes": json.dumps(episodes)}
    return save({**tensors_of(batch), "numbers": numbers}, metadata=about)


def from_bytes(data: bytes, prompts: Prompts, tokenizer: Any) -> dict[int, KeptCompletions]:
    """Return the completions of a file, whose bytes are known to be those that were written.

    Args:
        data: The contents of the file.
        prompts: The prompts of the run.
        tokenizer: The tokenizer of the policy.

    Raises:
        CheckpointError: They are completions of other prompts, or in another format.
    """
    try:
        tensors = load(data)
        # safetensors' `load` returns no metadata; they are in the header, whose length is in the first 8 bytes.
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        numbers: list[int] = tensors.pop("numbers").tolist()
        batch = batch_from(tensors, json.loads(about["extra_fields"]))
        versions, finished = batch.token_fields["versions"], batch.sequence_fields["finished"]
        # Checkpoints from before environments were supported have no episode.
        episodes = json.loads(about.get("episodes", "null")) or [None] * len(numbers)
        records = [None if one is None else EpisodeRecord.from_json(one["record"]) for one in episodes]
    except (KeyError, TypeError, ValueError, BatchError, SafetensorError) as e:
        raise CheckpointError(f"its completions are malformed: {type(e).__name__}: {e}") from e
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        rows.setdefault(number, []).append(row)
    kept = {}
    for number, chosen in rows.items():
        # Of a prompt, only the tokens are stored; everything else follows from the number of the ticket and the data.
        row_prompt, completions = prompts.of_ticket(number), []
        for row in chosen:
            begin, end = batch.bounds[row], batch.bounds[row + 1]
            ids: list[int] = batch.input_ids[begin:end].tolist()
            record, prompt = records[row], row_prompt
            if record is not None and record.own_prompt:
                prompt = replace(prompt, ids=ids[: episodes[row]["prompt"]])
            # Detects that the data have changed since the checkpoint was saved.
            if ids[: len(prompt.ids)] != prompt.ids:
                raise CheckpointError(
                    f"it has completions of another prompt than {prompt.name}, so the data have changed; use the same data, or start over from "
                    "the exported model in another trainer.output_dir"
                )
            tokens = ids[len(prompt.ids) :]
            answer = tokens if record is None else tokens[slice(*record.last_span)]
            completions.append(
                Completion(
                    prompt=prompt,
                    group=number,
                    tokens=tokens,
                    text=decoded(tokenizer, answer),
                    episode=record,
                    finished=bool(finished[row]),
                    # -1 marks tokens that were not generated.
                    versions=tuple(sorted({*versions[begin:end].unique_consecutive().tolist()} - {-1})),
                )
            )
        kept[number] = KeptCompletions(batch=batch.select(chosen), rows=tuple(completions))
    return kept


def _as_json(row: Completion) -> dict[str, Any]:
    assert row.episode is not None
    return {"prompt": len(row.prompt.ids), "record": asdict(row.episode)}


def digest_of(data: bytes) -> str:
    """Return the digest of a file's contents, for its name."""
    return hashlib.sha256(data).hexdigest()
