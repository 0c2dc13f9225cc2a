"""The size up to which documents can share a micro-batch without changing each other's numbers: `EngineConfig.invariant`."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import ConfigError
from ..hf.config import logit_transform
from ..hf.experts import expert_adapters, expert_modules, use_grouped_experts, use_invariant_experts
from ..hf.shape import experts_of
from ..hf.state_layers import has_state, reset_states_between_documents
from ..loss import OUTPUTS, OutputRequest
from ..ops.invariance import ROWS, PassSizes, find_pass_sizes, padded_rows
from ..ops.packed_context import PackedContext
from ..parallel.topology import Topology
from ..rank_slice import RankSlice
from .attention import IMPLEMENTATION
from .families import check_family
from .packed_model import PackedModel

MOST_ROWS = 512
"""The largest micro-batch that is tried."""
ALONE = PassSizes(ROWS, 0)
"""Each document gets its own micro-batch."""


def pass_sizes(root: PackedModel, topology: Topology | None = None) -> PassSizes:
    """Return the micro-batch sizes for sharing by documents; `ALONE` if they cannot share. Collective over the topology.

    Tries products and attention. Recurrent layers, encoders of media, adapters of experts and third-party experts combine several tokens
    in other ways, so documents of models with these do not share micro-batches.

    Args:
        root: The model.
        topology: The ranks that must agree, which may have different processors; None for only this process.
    """
    # Experts that transformers does not dispatch cannot be run on a fixed number of rows.
    foreign_experts = experts_of(root.lm.config) is not None and not expert_modules(root)
    if root.media is not None or has_state(root.lm) or expert_adapters(root) or foreign_experts:
        return ALONE
    names = ("log_probs", "entropy") if root.head is None else tuple(root.head.outputs)
    request = OutputRequest(
        **{name: True for name in names if name in OUTPUTS}, others=tuple(name for name in names if name not in OUTPUTS)
    )
    vocabulary: int = root.lm.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    factors = _adapter_factors(root)

    def run(tokens: Tensor) -> Tensor:
        # No padding, because the tested size is exactly this number of tokens.
        part = whole_documents([1] * len(tokens), tokens, tokens, request)
        if root.running is not None:
            # A pass may have documents of several calls, so gradients must not depend on the other rows either.
            return _with_input_gradients(root, part)
        outputs = root(part)
        numbers = [outputs[name].double().reshape(len(tokens), -1) for name in names]
        # An untrained adapter adds nothing, whatever its first product is, so use random factors.
        return torch.cat([*numbers, *(F.linear(_states(tokens, factor), factor).double() for factor in factors)], 1)

    def everywhere(holds: bool) -> bool:
        return holds if topology is None else all(topology.all_gather_object(holds))

    with torch.no_grad():
        return find_pass_sizes(vocabulary, MOST_ROWS, run, everywhere) or ALONE


def _with_input_gradients(root: PackedModel, part: RankSlice) -> Tensor:
    """Return the log-probability of each token, and the gradient of their sum with respect to the first layer's input, `[T, 1 + H]`."""
    inputs: list[Tensor] = []

    def capture(module: Any, args: Any, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[0]

    handle = root.lm.get_input_embeddings().register_forward_hook(capture)
    try:
        with torch.enable_grad():
            log_probs = root(part)["log_probs"]
            log_probs.sum().backward()
    finally:
        handle.remove()
    assert inputs[0].grad is not None
    return torch.cat([log_probs.detach()[:, None], inputs[0].grad.view(len(log_probs), -1)], 1).double()


def whole_documents(
    lengths: Sequence[int], tokens: Tensor, targets: Tensor, request: OutputRequest, multiple: int = 1
) -> RankSlice:
    """Return documents that one rank computes in full, with all outputs of all tokens.

    Equivalent to `RankSlice.from_micro_batch` for a micro-batch.

    Args:
        lengths: The number of tokens in each document.
        tokens: `[T]`, the token ids.
        targets: `[T]`, the tokens whose log-probabilities are computed.
        request: The outputs to compute.
        multiple: The number of tokens is padded to a multiple of this.
    """
    padding = padded_rows(len(tokens), multiple) - len(tokens)
    lengths = [*lengths, *([padding] if padding else [])]
    bounds = (0, *accumulate(lengths))
    context = PackedContext(bounds=bounds, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), by_position=True)
    return RankSlice(
        input_ids=F.pad(tokens, (0, padding)),
        position_ids=context.positions,
        context=context,
        selected=torch.arange(bounds[-1]),
        targets=F.pad(targets, (0, padding)),
        outputs=request,
        expected=None,
        real_tokens=len(tokens),
        mask=torch.ones_like(tokens, dtype=torch.bool),
    )


def _adapter_factors(root: PackedModel) -> list[Tensor]:
    """Return a random matrix for each shape of a factor of an adapter."""
    shapes = {(tuple(p.shape), p.dtype) for name, p in root.named_parameters() if ".lora_" in name and p.dim() == 2}
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in sorted(shapes, key=str)]


def _states(tokens: Tensor, factor: Tensor) -> Tensor:
    """Return inputs of a factor that are determined by the tokens."""
    # An arbitrary function that gives every token a row of its own.
    columns = torch.arange(factor.shape[1])
    return torch.sin(tokens[:, None] * 0.37 + columns * 1.7).to(factor.dtype)


class WholeModel:
    """An unsharded transformers model with the forward pass of an engine with `EngineConfig.invariant`.

    Args:
        lm: The model, which must not be used otherwise afterward.
        config: Its config.
        path: Its folder, for messages.

    Raises:
        ModelError: Packed attention is not correct for the family.
        ConfigError: The outputs of a token depend on the tokens after it.
    """

    def __init__(self, lm: Any, config: PreTrainedConfig, path: str) -> None:
        check_family(config, allow_unverified=False)
        reset_states_between_documents(lm)
        use_grouped_experts(lm)
        use_invariant_experts(lm)
        lm.set_attn_implementation(IMPLEMENTATION)
        self._root = PackedModel(lm, head=None, transform=logit_transform(config), router=None)
        self._root.eval()
        self._multiple, self.size = pass_sizes(self._root)
        """The maximum document length up to which every prefix has bitwise the same numbers."""
        if not self.size:
            raise ConfigError(
                f"{path} cannot be computed exactly on this processor with {torch.get_num_threads()} threads: a token's outputs depend on "
                "the number of tokens (as in recurrent layers), or on its row; try OMP_NUM_THREADS=1, or another generator"
            )

    def next_token(self, tokens: Sequence[int], temperature: float, choose: Callable[[Tensor], int]) -> tuple[int, float]:
        """Return the token that follows a document, and its log-probability.

        Args:
            tokens: The document, of at most `size` tokens.
            temperature: The temperature of the log-probability: logits are divided by it first.
            choose: Returns a token, given the logits `[V]`.
        """
        ids = torch.tensor(tokens)
        request = OutputRequest(log_probs=True, temperature=temperature)
        part = whole_documents([len(ids)], ids, torch.zeros_like(ids), request, self._multiple)
        return self._root.next_token(part, len(ids) - 1, choose)
