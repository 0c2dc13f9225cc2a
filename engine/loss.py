"""The interface between engine and loss: the outputs of a model's head, the `Loss` protocol, and the result of a step.

Axes: T tokens, K targets of each, N sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .errors import ConfigError
from .packing.batch import IGNORE, PackedBatch

TARGETS = "targets"
"""The token field of batches with several targets per token, `[T, K]` int64.

If present, the log-probabilities of these targets are computed instead of the label's.
"""
TOP_K = ("top_tokens", "top_log_probs")
"""The names of the outputs that `OutputRequest.top_k` requests."""
OUTPUTS = ("log_probs", "entropy", "values", "greedy", "sum_squared_probs", *TOP_K)
"""The names of the per-token outputs, in order."""


@dataclass(frozen=True, kw_only=True)
class OutputRequest:
    """The per-token outputs that the head has to compute.

    Args:
        log_probs: Whether to return the log-probability of the label.
        entropy: Whether to return the entropy of the next-token distribution, in nats.
        values: Whether to return the output of the value head.
        greedy: Whether to return the most likely next token.
        sum_squared_probs: Whether to return the sum of the squared probabilities of all next tokens.
        top_k: The number of most likely next tokens to return (`top_tokens`), with their log-probabilities (`top_log_probs`).
        temperature: The temperature; logits are divided by it first.
        routed_experts: Whether to return the experts that tokens are routed to, `[T, L, K]`, for all tokens. Not for losses, only for
            `BaseEngine.infer_batch`. See `ops.expert_routes`.
        others: The names of outputs of a head of another type; see `engine.heads`.
    """

    log_probs: bool = False
    entropy: bool = False
    values: bool = False
    greedy: bool = False
    sum_squared_probs: bool = False
    top_k: int = 0
    temperature: float = 1.0
    routed_experts: bool = False
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.others, str):
            raise ConfigError(f"OutputRequest(others={self.others!r}); give a tuple: ({self.others!r},)")
        if self.top_k < 0:
            raise ConfigError(f"OutputRequest(top_k={self.top_k}); it must be a number of tokens, or 0 for none")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the requested outputs of the head, in the order of `TokenOutputs`."""
        return (*(n for n in OUTPUTS if (self.top_k if n in TOP_K else getattr(self, n))), *self.others)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOutputs:
    """Per-token outputs of complete documents, independent of the parallel layout.

    Args:
        mask: `[T]` bool, the selected tokens. Outputs of all other tokens are 0 and carry no gradient.
        log_probs: `[T]` float, the log-probabilities of `labels`; `[T, K]` if each token has several targets (`HeadRequest.targets`).
        entropy: `[T]` float, the entropies in nats.
        values: `[T]` float, the outputs of the value head.
        greedy: `[T]` int64, the most likely next tokens' ids; they carry no gradient.
        sum_squared_probs: `[T]` float, the sums of the squares of the next tokens' probabilities; they carry no gradient.
        top_tokens: `[T, k]` int64, the ids of the most likely next tokens, the most likely first; they carry no gradient.
        top_log_probs: `[T, k]` float, their log-probabilities; they carry no gradient.
        others: Output name -> `[T, ...]` float, the outputs of a head of another type.
    """

    mask: Tensor
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    greedy: Tensor | None = None
    sum_squared_probs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: Tensor, outputs: Mapping[str, Tensor]) -> "TokenOutputs":
        """Create an instance from outputs by name.

        Args:
            mask: `[T]` bool, the selected tokens.
            outputs: Output name -> `[T, ...]`.
        """
        others = {name: value for name, value in outputs.items() if name not in OUTPUTS}
        return cls(mask=mask, **{name: value for name, value in outputs.items() if name in OUTPUTS}, others=others)

    def present(self) -> dict[str, Tensor]:
        """Return the requested outputs by name."""
        return {**{name: value for name in OUTPUTS if (value := getattr(self, name)) is not None}, **self.others}


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """The sums (never means) that a loss returns for one micro-batch.

    Args:
        terms: Term name -> scalar sum. The engine divides each sum by the term's global weight and adds up the quotients.
        metrics: Metric name -> (sum, count). The engine adds up both over micro-batches and ranks, and reports sum / count.
    """

    terms: Mapping[str, Tensor]
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


class Loss(Protocol):
    """A loss over packed documents. Implementations must be pure: the same outputs and batch give the same sums.

    A loss may declare the batch fields that it reads with two optional attributes, `token_fields` and `sequence_fields`, which
    are collections of names. The engine then rejects a batch that has any other field, except for the batch's extra fields.
    """

    @property
    def request(self) -> OutputRequest:
        """The per-token outputs that the loss needs."""
        ...

    @property
    def linear(self) -> bool:
        """Whether every term is linear in the outputs. If so, the head computes its gradient during the forward pass."""
        ...

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return a `[T]` bool mask of the tokens whose outputs the loss needs. The head skips all others."""
        ...

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the weight of each term (supervised tokens, pairs, ...), which the engine adds up over the global batch."""
        ...

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Return the sums of one micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The results of a step, the same on every rank.

    Args:
        loss: The loss of the global batch: sum over terms of sum / weight.
        terms: The loss by term. `router_aux` (mean over micro-batches) is reported here, but is not part of `loss`.
        metrics: The metrics of the loss, each sum / count over the global batch.
        weights: The global weight of each term.
        counts: The count that each metric was divided by.
        grad_norm: The 2-norm of the full gradient before clipping; None before `optimizer_step`.
        skipped: Whether the optimizer step was skipped because the loss or the gradient was not finite.
        lr: The learning rate of the step; None before `optimizer_step`.
        tokens: The number of tokens in the global batch.
        sequences: The number of documents in the global batch.
        micro_batches: The number of micro-batches on each rank.
        shared_tokens: The number of tokens that were not computed, because another document shares them as a prefix.
        flops: The FLOPs that the global batch needs, as counted by `flops.ModelShape`.
        peak_gib: The peak memory so far of the rank that has used most, in GiB: GPU memory, or the process's memory without a
            GPU.
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
    shared_tokens: int = 0
    flops: float = 0.0
    peak_gib: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRequest:
    """The outputs that a backend's `forward_step` has to return for one micro-batch.

    Args:
        outputs: The outputs to compute.
        mask: `[T]` bool, the tokens for which to compute them.
        targets: `[T, K]` int64, the tokens whose log-probabilities to compute; None for the labels.
        expected: Output name -> `[T, ...]`, the gradient that the backward pass will pass to that output; None if not known in
            advance.
    """

    outputs: OutputRequest
    mask: Tensor
    targets: Tensor | None = None
    expected: Mapping[str, Tensor] | None = None


def loss_mask(batch: PackedBatch) -> Tensor:
    """Return a `[T]` bool mask of the tokens whose next token is supervised."""
    return batch.labels != IGNORE


def output_shape(name: str, batch: PackedBatch) -> torch.Size:
    """Return the shape of an output with one number per token: `[T]`, or `[T, K]` for log-probabilities of several targets."""
    several = name == "log_probs" and TARGETS in batch.token_fields
    return batch.token_fields[TARGETS].shape if several else batch.input_ids.shape


def combine(sums: LossSums, weights: Mapping[str, float]) -> Tensor:
    """Return the contribution of these sums to the global loss: sum over terms of sum / weight."""
    parts = [value / weights[name] for name, value in sums.terms.items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def expected_gradient(loss: Loss, batch: PackedBatch, mask: Tensor, weights: Mapping[str, float]) -> dict[str, Tensor] | None:
    """Return the gradient of the global loss with respect to each output if the loss is linear in them, otherwise None.

    A linear loss has the same gradient everywhere, so the loss is differentiated at outputs of zero.
    """
    if not loss.linear or loss.request.others:
        return None
    names = [name for name in loss.request.names if name in ("log_probs", "entropy", "values")]
    zeros = {name: torch.zeros(output_shape(name, batch), device=batch.device, requires_grad=True) for name in names}
    with torch.enable_grad():
        total = combine(loss(TokenOutputs.of(mask, zeros), batch), weights)
    # `autograd.grad` raises an error if the total depends on no output.
    if not total.requires_grad:
        return None
    gradients = torch.autograd.grad(total, list(zeros.values()), allow_unused=True)
    return {name: torch.zeros_like(zeros[name]) if g is None else g for name, g in zip(zeros, gradients, strict=True)}
