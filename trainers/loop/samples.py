"""Answers to held-out samples while training, to be read: greedy, by the engine's own forward pass.

The whole text goes through the model for every token: no cache to build for a model that is sharded for training. Meant for
a handful of short answers, on any engine and any layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.base import BaseEngine
from ...engine.loss import OutputRequest
from ...engine.packing.convert import from_lists
from ..data.sample import Sample
from .signals import StopSignal


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model says, and what it should.

    Args:
        name: of the sample.
        prompt: up to the first supervised token.
        answer: the model's.
        wanted: the supervised tokens.
    """

    name: str
    prompt: str
    answer: str
    wanted: str


def answers(
    engine: BaseEngine, tokenizer: Any, samples: Sequence[Sample], most: int, budget: int, stop: StopSignal
) -> list[Answer]:
    """Greedy answers. Collective; every rank passes the same samples and gets all answers, as far as they came before a rank
    was asked to stop.

    Args:
        engine: initialised.
        tokenizer: the model's.
        samples: with something supervised.
        most: tokens of an answer, at most.
        budget: tokens of a micro-batch: an answer ends where its text would exceed it.
        stop: the run's.
    """
    topology = engine.topology
    mine = range(topology.dp_rank, len(samples), topology.dp_size)
    texts = {i: list(samples[i].ids[: _first_target(samples[i])]) for i in mine}
    prompts = {i: len(text) for i, text in texts.items()}
    open_ = dict.fromkeys(texts, True)
    ends = {i: _ends(tokenizer, samples[i]) for i in mine}
    request = OutputRequest(greedy=True)
    for _ in range(most):
        going = [i for i in texts if open_[i] and len(texts[i]) < budget]
        # All ranks together, also those whose own answers are complete: the forward pass is collective.
        run_metadata = topology.all_gather_object((bool(going), stop.requested_here))
        if not any(more for more, _ in run_metadata) or any(asked for _, asked in run_metadata):
            break
        batch = from_lists([texts[i] for i in going])
        last = torch.zeros(batch.num_tokens, dtype=torch.bool)
        last[batch.cu_seqlens[1:].long() - 1] = True
        found = engine.infer_batch(batch, request, tokens=last)["greedy"][last].tolist()
        for i, token in zip(going, found, strict=True):
            texts[i].append(int(token))
            open_[i] = token not in ends[i]
    said = {i: tokenizer.decode(text[prompts[i] :]) for i, text in texts.items()}
    every: dict[int, str] = {}
    for part in topology.all_gather_object(said if topology.is_output_rank else {}):
        every |= part
    return [
        Answer(
            name=sample.name,
            prompt=tokenizer.decode(sample.ids[: _first_target(sample)]),
            answer=every[i],
            wanted=tokenizer.decode([t for t, s in zip(sample.ids, sample.supervised, strict=True) if s]),
        )
        for i, sample in enumerate(samples)
    ]


def _ends(tokenizer: Any, sample: Sample) -> set[int]:
    """Tokens that end an answer: end of sequence, and the special token, if any, that ends the wanted answer's turn."""
    special = set(tokenizer.all_special_ids)
    turn = [t for t, s in zip(sample.ids, sample.supervised, strict=True) if s and t in special]
    return {tokenizer.eos_token_id, *turn[-1:]}


def _first_target(sample: Sample) -> int:
    # A sample that is supervised from its first token on, a text, is begun by that token.
    return max(1, next(i for i, s in enumerate(sample.supervised) if s and i > 0))
