"""Routes for mixtures of experts, and plain transformers with its routers forced to follow them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.config import OptimConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import tiny_documents
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists


def documents_of(step: int) -> list[list[int]]:
    """Prompts with three answers each, and documents of their own."""
    prompts, answers = tiny_documents(3, seed=step, longest=24)[1:], tiny_documents(8, seed=50 + step, longest=16)
    return [prompts[i % 2] + answers[i] for i in range(6)] + answers[6:]


def routes_of(document: Sequence[int], layers: int, experts: int, per_token: int, *, salt: int = 0, free: int = 7) -> Tensor:
    """Random routes `[L, layers, K]` that depend on the tokens so far, as a prompt's do; every `free`-th token has none."""
    rows = []
    for i in range(len(document)):
        g = torch.Generator().manual_seed((hash(tuple(document[: i + 1])) + salt) % 2**32)
        rows.append(torch.stack([torch.randperm(experts, generator=g)[:per_token] for _ in range(layers)]))
    routes = torch.stack(rows)
    if free:
        routes[free - 1 :: free] = -1
    return routes.to(torch.int16)


def with_routes(documents: Sequence[Sequence[int]], routes: Sequence[Tensor], **options: Any) -> PackedBatch:
    """A batch of documents that go to these experts."""
    return from_lists(documents, **options).with_fields(routed_experts=torch.cat(list(routes)))


def _softmax_of_all(scores: Tensor, chosen: Tensor, config: Any) -> Tensor:
    weights = scores.softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if config.norm_topk_prob else weights


def _softmax_of_chosen(scores: Tensor, chosen: Tensor, config: Any) -> Tensor:
    return scores.gather(-1, chosen).softmax(-1)


def _sigmoid(scores: Tensor, chosen: Tensor, config: Any) -> Tensor:
    weights = scores.sigmoid().gather(-1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


WEIGHTS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "qwen3_moe": _softmax_of_all,
    "qwen3_next": _softmax_of_all,
    "gpt_oss": _softmax_of_chosen,
    "deepseek_v3": _sigmoid,
    "glm4_moe": _sigmoid,
}
"""The weights of chosen experts by the formulas of the papers, from the router's scores before any function."""


class RoutedReference(PlainReference):
    """Plain transformers whose routers are told their experts by hooks."""

    def __init__(self, folder: Path | str, optim: OptimConfig) -> None:
        super().__init__(folder, optim)
        self.routes: dict[tuple[int, ...], Tensor] = {}
        self._current: Tensor | None = None
        config = self.model.config
        routers = [m for m in self.model.modules() if "router" in type(m).__name__.lower()]
        self.count, self.per_token = len(routers), config.num_experts_per_tok
        for number, router in enumerate(routers):
            router.register_forward_hook(self._hook(number, WEIGHTS[config.model_type]))

    def _hook(self, number: int, weights: Callable[[Tensor, Tensor, Any], Tensor]) -> Callable[..., Any]:
        def replace(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            scores, _, own = output
            if self._current is None:
                return output
            chosen = torch.where(self._current[:, number] < 0, own, self._current[:, number].long())
            return scores, weights(scores, chosen, self.model.config).to(output[1].dtype), chosen

        return replace

    def logits(self, document: Sequence[int], media: Any = None) -> Tensor:
        self._current = self.routes.get(tuple(document))
        return super().logits(document, media)
