"""What a model's head returns, what a loss says of itself, and what a step reports.

Axes: T tokens, N sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .packing.batch import IGNORE, PackedBatch


@dataclass(frozen=True, kw_only=True)
class OutputRequest:
    """Which per-token numbers the head is to return.

    Args:
        log_probs: log-probability of the label.
        entropy: entropy of the next-token distribution, in nats.
        values: the value head's number.
        greedy: the most likely next token.
        temperature: logits are divided by it first.
    """

    log_probs: bool = False
    entropy: bool = False
    values: bool = False
    greedy: bool = False
    temperature: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """The outputs asked for, in the order of `TokenOutputs`."""
        return tuple(n for n in ("log_probs", "entropy", "values", "greedy") if getattr(self, n))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOutputs:
    """Per-token outputs of whole documents, whatever the parallel layout.

    Args:
        mask: `[T]` bool, the tokens that were asked for. Elsewhere the outputs are 0 and carry no gradient.
        log_probs: `[T]` float, log-probability of `labels`.
        entropy: `[T]` float, nats.
        values: `[T]` float.
        greedy: `[T]` int64, token ids; they carry no gradient.
    """

    mask: Tensor
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    greedy: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        """The outputs that were asked for, by name."""
        found = {"log_probs": self.log_probs, "entropy": self.entropy, "values": self.values, "greedy": self.greedy}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """What a loss returns for one micro-batch: sums, never means.

    Args:
        terms: additive term -> scalar sum. The engine divides each by its global weight and adds them up.
        metrics: name -> (sum, count); the engine adds both over micro-batches and ranks, and divides.
    """

    terms: Mapping[str, Tensor]
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


class Loss(Protocol):
    """A loss over packed documents. Implementations are pure: the same outputs and batch give the same sums.

    One that has the attributes `token_fields` and `sequence_fields`, collections of names, says with them which fields of a batch it
    has heard of; others, but for the batch's passengers, are then refused.
    """

    @property
    def request(self) -> OutputRequest:
        """The outputs it needs."""
        ...

    @property
    def linear(self) -> bool:
        """Whether every term is linear in the outputs. The head then computes its gradient in the forward pass."""
        ...

    def tokens(self, batch: PackedBatch) -> Tensor:
        """`[T]` bool: the tokens whose outputs it needs. The head runs on no other."""
        ...

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """The weight of each additive term: supervised tokens, pairs, ... Added up over the global batch."""
        ...

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """The sums of one micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, the same on every rank.

    Args:
        loss: the global batch's loss: sum over terms of sum / weight.
        terms: the same by term; `router_aux` (mean over micro-batches) is reported here and not part of `loss`.
        metrics: the loss's metrics, each sum / count over the global batch.
        weights: global weight of each term.
        counts: what each metric was divided by.
        grad_norm: 2-norm of the whole gradient before clipping; None without an optimizer step.
        skipped: the step was left out because the loss or the gradient was not finite.
        lr: learning rate the step was made with.
        tokens: tokens in the global batch.
        sequences: documents in the global batch.
        micro_batches: micro-batches of each rank.
        flops: that the global batch needs, as `flops.ModelShape` counts.
        peak_gib: memory of the rank that has used most so far: of its GPU, or of its process where there is none.
    """

    loss: float
    terms: Mapping[str, float]
    metrics: Mapping[str, float]
    weights: Mapping[str, float]
    counts: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    skipped: bool = False
    lr: float | None = None
    tokens: int = 0
    sequences: int = 0
    micro_batches: int = 0
    flops: float = 0.0
    peak_gib: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRequest:
    """What a backend's `forward_step` is asked for.

    Args:
        outputs: which numbers.
        mask: `[T]` bool, of which tokens.
        expected: output name -> `[T]`, the gradient that the backward pass will bring, where it is known beforehand.
    """

    outputs: OutputRequest
    mask: Tensor
    expected: Mapping[str, Tensor] | None = None


def loss_mask(batch: PackedBatch) -> Tensor:
    """`[T]` bool: the tokens whose next token is supervised."""
    return batch.labels != IGNORE


def combine(sums: LossSums, weights: Mapping[str, float]) -> Tensor:
    """The part of the global loss that these sums make: sum over terms of sum / weight."""
    parts = [value / weights[name] for name, value in sums.terms.items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def expected_gradient(loss: Loss, batch: PackedBatch, mask: Tensor, weights: Mapping[str, float]) -> dict[str, Tensor] | None:
    """The gradient of the global loss by each output, for a loss that is linear in them; None for any other.

    Taken from the loss itself at outputs of zero: a linear loss has the same gradient everywhere.
    """
    if not loss.linear:
        return None
    names = [name for name in loss.request.names if name != "greedy"]
    zeros = {name: torch.zeros(batch.num_tokens, device=batch.device, requires_grad=True) for name in names}
    with torch.enable_grad():
        total = combine(loss(TokenOutputs(mask=mask, **zeros), batch), weights)
    if not total.requires_grad:
        return None
    gradients = torch.autograd.grad(total, list(zeros.values()), allow_unused=True)
    return {name: torch.zeros_like(zeros[name]) if g is None else g for name, g in zip(zeros, gradients, strict=True)}
