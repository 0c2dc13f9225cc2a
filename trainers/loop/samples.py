"""Completions for held-out samples during training, for people to read, decoded greedily with the engine's own forward pass.

The full text is forwarded again for every token, so a model that is sharded for training needs no KV cache. This is meant for a
handful of short completions, on any engine and layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch

from ...engine.base import BaseEngine
from ...engine.loss import OutputRequest
from ...engine.packing.convert import from_lists
from ...media.store import MediaStore
from ..data.media import fields_of
from ..data.sample import Sample
from .signals import StopSignal


@dataclass(frozen=True, kw_only=True)
class HeldOutCompletion:
    """The model's completion for a held-out sample, and the expected completion.

    Args:
        name: The name of the sample.
        prompt: The text up to the first supervised token.
        completion: The model's completion.
        expected: The expected completion: the text of the first supervised tokens, which in a chat are its first assistant turn; empty if
            there is none.
        rewards: The value of each reward by name, if the completion was scored.
        plain_prompt: The prompt without special tokens.
        plain_completion: The completion without special tokens.
        plain_expected: The expected completion without special tokens.
    """

    name: str
    prompt: str
    completion: str
    expected: str = ""
    rewards: Mapping[str, float] | None = None
    plain_prompt: str = ""
    plain_completion: str = ""
    plain_expected: str = ""

    @property
    def rewards_text(self) -> str:
        """The rewards as text."""
        return ", ".join(f"{name} {value:.3g}" for name, value in (self.rewards or {}).items()) or "none"

    def record(self) -> dict[str, Any]:
        """Return the fields that are set, for a file or a table."""
        fields = {"name": self.name, "prompt": self.prompt, "completion": self.completion}
        return fields | ({"expected": self.expected} if self.rewards is None else {"rewards": dict(self.rewards)})


def generate_completions(
    engine: BaseEngine,
    tokenizer: Any,
    samples: Sequence[Sample],
    most: int,
    budget: int,
    stop: StopSignal,
    store: MediaStore | None = None,
) -> list[HeldOutCompletion] | None:
    """Generate greedy completions. Collective.

    Every rank passes the same samples and gets all completions; None if a rank was asked to stop before they were complete.

    Args:
        engine: The initialized engine.
        tokenizer: The tokenizer of the model.
        samples: The samples, each with supervised tokens.
        most: The maximum number of tokens in a completion.
        budget: The maximum number of tokens in a micro-batch; a completion ends when its text would exceed it, or the model's positions.
        stop: The stop signal of the run.
        store: The store of processed media; None if the model takes no media.
    """
    topology = engine.topology
    longest = min(budget, engine.model_shape.positions or budget)
    local_indices = range(topology.dp_rank, len(samples), topology.dp_size)
    # Each data-parallel rank completes every n-th sample. Its texts grow by one token per pass.
    texts = {i: list(samples[i].ids[: _first_target(samples[i])]) for i in local_indices}
    prompts = {i: len(tokens) for i, tokens in texts.items()}
    open_ = dict.fromkeys(texts, True)
    ends = {i: _ends(tokenizer, samples[i]) for i in local_indices}
    asked = {i: _prompt(samples[i]) for i in local_indices}
    # Greedy, so that texts of different steps differ only because of the weights.
    request = OutputRequest(greedy=True)
    for _ in range(most):
        active = [i for i in texts if open_[i] and len(texts[i]) < longest]
        # Ranks whose own completions are finished also take part, since the forward pass is collective.
        rank_states = topology.all_gather_object((bool(active), stop.is_requested_here))
        if any(stop_requested for _, stop_requested in rank_states):
            return None
        if not any(active_elsewhere for active_elsewhere, _ in rank_states):
            break
        media = None if store is None else fields_of([asked[i] for i in active], store)
        batch = from_lists([texts[i] for i in active], media=media)
        # Only the last position of each text predicts a new token, so outputs are computed for no other one.
        last = torch.zeros(batch.num_tokens, dtype=torch.bool)
        last[batch.cu_seqlens[1:].long() - 1] = True
        next_tokens = engine.infer_batch(batch, request, tokens=last)["greedy"][last].tolist()
        for i, token in zip(active, next_tokens, strict=True):
            texts[i].append(int(token))
            open_[i] = token not in ends[i]
    local_completions = {i: tokens[prompts[i] :] for i, tokens in texts.items()}
    all_completions: dict[int, list[int]] = {}
    # Ranks that share a data-parallel shard have the same completions; one of them contributes.
    for part in topology.all_gather_object(local_completions if topology.is_output_rank else {}):
        all_completions |= part
    return [
        HeldOutCompletion(
            name=sample.name,
            **{name: tokenizer.decode(ids) for name, ids in _parts(sample, all_completions[i]).items()},
            **{
                f"plain_{name}": tokenizer.decode(ids, skip_special_tokens=True)
                for name, ids in _parts(sample, all_completions[i]).items()
            },
        )
        for i, sample in enumerate(samples)
    ]


def _parts(sample: Sample, completion: Sequence[int]) -> dict[str, Sequence[int]]:
    return {"prompt": sample.ids[: _first_target(sample)], "completion": completion, "expected": _first_completion(sample)}


def _prompt(sample: Sample) -> Sample:
    """Return the part of a sample before its first target."""
    end = _first_target(sample)
    media = tuple(span for span in sample.media if span.last <= end)
    return replace(sample, ids=sample.ids[:end], supervised=sample.supervised[:end], media=media)


def _ends(tokenizer: Any, sample: Sample) -> set[int]:
    """Return the tokens that end a completion: EOS, and the special token, if any, that ends the turn of the expected completion."""
    special = set(tokenizer.all_special_ids)
    # A template may end turns with a token other than EOS; the expected completion has it as its last special token.
    turn = [t for t, s in zip(sample.ids, sample.supervised, strict=True) if s and t in special]
    return {tokenizer.eos_token_id, *turn[-1:]}


def _first_completion(sample: Sample) -> list[int]:
    """Return the first run of consecutive supervised tokens."""
    start = _first_target(sample) if not sample.supervised[0] else 0
    return [
        token for token, _ in takewhile(lambda pair: pair[1], zip(sample.ids[start:], sample.supervised[start:], strict=True))
    ]


def _first_target(sample: Sample) -> int:
    # A plain text is supervised from its first token, which then serves as the prompt.
    return max(1, next(i for i, s in enumerate(sample.supervised) if s and i > 0))
