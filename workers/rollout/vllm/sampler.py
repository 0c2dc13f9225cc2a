"""Drivetrain's sampling as a logits processor of vLLM, so that every generator draws alike.

vLLM then has one token to choose from, and reports its logit, which is set to the log-probability. That is the model's at the request's
temperature before top_p and top_k, which vLLM itself cannot report: its processed log-probabilities are those after the filters.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ..options import SamplingOptions
from ..sampling import Draw, UniformNumbers, choose

KEY = "drivetrain"
"""The name of a request's settings among the additional arguments of its sampling parameters."""


class _Row:
    def __init__(self, settings: dict[str, Any], output: list[int]) -> None:
        self._options = SamplingOptions(temperature=settings["temperature"], top_p=settings["top_p"], top_k=settings["top_k"])
        self._uniform, self._begun, self._output = UniformNumbers(settings["seed"]), settings["begun"], output

    def draw(self) -> Draw:
        position = self._begun + len(self._output)
        return Draw(self._options, self._uniform[position] if self._options.temperature else 0.0)


class DrivetrainSampler(LogitsProcessor):
    """Chooses the tokens of requests that carry settings; see `VLLMGenerator`. Others are left alone."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check that vLLM itself takes the most likely token of requests that carry settings."""
        if KEY in (sampling_params.extra_args or {}) and sampling_params.temperature:
            raise ValueError(f"a request with settings of {KEY} must have temperature 0")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return that the most likely token changes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and move."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            settings = (params.extra_args or {}).get(KEY)
            if settings is None:
                self._rows.pop(index, None)
            else:
                self._rows[index] = _Row(settings, output)
        for source, target, direction in batch_update.moved:
            first, second = self._rows.pop(source, None), self._rows.pop(target, None)
            if first is not None:
                self._rows[target] = first
            if direction == MoveDirectionality.SWAP and second is not None:
                self._rows[source] = second

    def apply(self, logits: Tensor) -> Tensor:
        """Leave one token to choose from in the rows `[B, V]` of requests that carry settings."""
        indices = [index for index in sorted(self._rows) if index < len(logits)]
        if not indices:
            return logits
        rows = torch.tensor(indices, device=logits.device)
        chosen, log_probs = choose(logits[rows], [self._rows[index].draw() for index in indices])
        only = torch.full_like(logits[rows], -torch.inf).scatter_(1, chosen[:, None], log_probs[:, None].to(logits.dtype))
        return logits.index_copy_(0, rows, only)
