"""The result of generation, and its conversion to the padded format of RL frameworks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..engine.ops.expert_routes import FREE, ROUTED_EXPERTS
from ..engine.packing.batch import PackedBatch
from ..engine.packing.convert import from_lists

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generated completion.

    Args:
        prompt: The token ids of the prompt.
        response: The token ids of the completion, including the stop token that ended it.
        log_probs: The log-probability of each completion token at the sampling temperature (1 if that is 0), before top_p and
            top_k.
        versions: The version of the weights that generated each completion token.
        finish_reason: Why the completion ended: `stop` for a stop token, `length` for the length limit, `aborted` if it was
            cancelled.
        routed_experts: `[prompt and response, L, K]` int16, the experts that the tokens were routed to in each layer with experts, if
            `RolloutConfig.return_routed_experts` is set; -1 for tokens that were not processed, such as the last one.
        sampled: Whether each completion token was sampled by the policy, rather than written by an environment; None if all were.
    """

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    routed_experts: Tensor | None = None
    sampled: list[bool] | None = None

    @property
    def finished(self) -> bool:
        """Whether a stop token ended the completion."""
        return self.finish_reason == "stop"


def to_batch(generations: Sequence[Generation]) -> PackedBatch:
    """Return prompts with their completions as a batch. Loss is computed on the tokens that the policy has sampled.

    Args:
        generations: The completions.

    Returns:
        The batch with the token fields `rollout_log_probs`, `versions` (-1 where the token was not generated) and, if known, the expert
        routes, and the sequence field `finished`. A token's values are stored where the token is predicted.
    """
    batch = from_lists(
        [[*g.prompt, *g.response] for g in generations],
        supervised=[[False] * len(g.prompt) + (g.sampled or [True] * len(g.response)) for g in generations],
        # A token's value is stored one position earlier, where it is predicted; so the last position has none.
        token_fields={"rollout_log_probs": [[0.0] * (len(g.prompt) - 1) + [*g.log_probs, 0.0] for g in generations]},
    )
    if routes := [g.routed_experts for g in generations if g.routed_experts is not None]:
        # An aborted completion may have no tokens.
        unknown = routes[0].new_full((1, *routes[0].shape[1:]), FREE)
        routes = [
            unknown.expand(len(g.prompt) + len(g.response), -1, -1) if g.routed_experts is None else g.routed_experts
            for g in generations
        ]
        batch = batch.with_fields(**{ROUTED_EXPERTS: torch.cat(routes)})
    versions = [v for g in generations for v in [*[-1] * (len(g.prompt) - 1), *(g.versions or [-1] * len(g.response)), -1]]
    return batch.with_fields(versions=torch.tensor(versions, dtype=torch.int64)).with_sequence_fields(
        finished=torch.tensor([g.finished for g in generations], dtype=torch.bool)
    )


def to_padded(generations: Sequence[Generation], pad: int = 0) -> dict[str, Any]:
    """Convert completions to the padded format of RL frameworks: prompts padded on the left, completions on the right.

    Args:
        generations: B generated completions.
        pad: The token id of padding.

    Returns:
        `input_ids` and `attention_mask` `[B, P + R]`, `responses`, `response_mask` and `rollout_log_probs` `[B, R]`.
    """
    rows, p = len(generations), max((len(g.prompt) for g in generations), default=0)
    r = max((len(g.response) for g in generations), default=0)
    ids, mask = torch.full((rows, p + r), pad, dtype=torch.int64), torch.zeros(rows, p + r, dtype=torch.int64)
    log_probs = torch.zeros(rows, r)
    for row, g in enumerate(generations):
        # Column p is the first token of every completion.
        begin, end = p - len(g.prompt), p + len(g.response)
        ids[row, begin:end] = torch.tensor([*g.prompt, *g.response])
        mask[row, begin:end] = 1
        log_probs[row, : len(g.response)] = torch.tensor(g.log_probs)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "responses": ids[:, p:],
        "response_mask": mask[:, p:],
        "rollout_log_probs": log_probs,
    }
