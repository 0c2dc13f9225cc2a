"""The result of generation, and its conversion to the padded format of RL frameworks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generated response.

    Args:
        prompt: The token ids of the prompt.
        response: The token ids of the response, including the stop token that ended it.
        log_probs: The log-probability of each response token at the sampling temperature (1 if that is 0), before top_p and
            top_k.
        versions: The version of the weights that made each response token.
        finish_reason: Why the response ended: `stop` for a stop token, `length` for the length limit, `aborted` if it was
            cancelled.
        routed_experts: `[prompt and response, L, K]` int16, the experts that the tokens went to in each layer with experts, if
            `RolloutConfig.return_routed_experts` asks for them; -1 for the last token, which was not processed, and others that were not.
    """

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    routed_experts: Tensor | None = None

    @property
    def finished(self) -> bool:
        """Whether a stop token ended the response."""
        return self.finish_reason == "stop"


def to_padded(generations: Sequence[Generation], pad: int = 0) -> dict[str, Any]:
    """Convert responses to the padded format of RL frameworks: prompts padded on the left, responses on the right.

    Args:
        generations: B generated responses.
        pad: The token id of padding.

    Returns:
        `input_ids` and `attention_mask` `[B, P + R]`, `responses`, `response_mask` and `rollout_log_probs` `[B, R]`.
    """
    rows, p = len(generations), max((len(g.prompt) for g in generations), default=0)
    r = max((len(g.response) for g in generations), default=0)
    ids, mask = torch.full((rows, p + r), pad, dtype=torch.int64), torch.zeros(rows, p + r, dtype=torch.int64)
    log_probs = torch.zeros(rows, r)
    for row, g in enumerate(generations):
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
