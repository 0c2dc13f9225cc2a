"""The root module that FSDP wraps: backbone and head together, so that the root's gathered parameters serve both.

Axes: T tokens of the packed sequence (this rank's slice under context parallelism), S tokens whose output is requested,
H hidden size.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..adapters.bank import RunningPass
from ..errors import ModelError
from ..heads import HeadType, compute_outputs
from ..hf.lora import head_adapter
from ..hf.media_family import MediaFamily
from ..hf.model import HFModel, decoder_of
from ..hf.routers import follow
from ..ops.adapter_products import FactorSpan, head_adapters
from ..ops.expert_routes import RouterShape
from ..ops.head_regions import HeadRegions
from ..ops.linear_head import HeadAdapter, LogitTransform, final_logits, linear_head
from ..ops.packed_context import PackedContext
from ..ops.router import RouterSettings, balancing_loss
from ..packing.batch import Kind
from ..rank_slice import EncoderInput, RankSlice


class PackedModel(HFModel):
    """A transformers decoder and the head of `model.head`.

    Args:
        lm: The causal language model on the meta device, with its adapters, if any, already inside.
        head: The type of the head that replaces the language-model head; None keeps the latter.
        transform: The transform of the logits.
        router: The settings of the router's balancing loss; None if the loss is off.
        media: The model's handling of media; None if it supports none.
        routers: The routers, if their choices can be recorded and replayed.
        running: The running pass of several adapters that share the model; None without these.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        head: HeadType | None,
        transform: LogitTransform,
        router: RouterSettings | None,
        media: MediaFamily | None = None,
        routers: RouterShape | None = None,
        running: RunningPass | None = None,
    ) -> None:
        super().__init__(lm, head=head)
        self.transform = transform
        self.router = router
        self.media = media
        self.routers = routers
        self.running = running
        self._follows = False
        self.compute: torch.dtype | None = None
        """The dtype that encoders compute in; None for the dtype of their input."""
        self.head_regions: HeadRegions | None = None
        """The compiled computation of the head on its logits; None if the model is not compiled."""
        self.layer_context: Callable[[], AbstractContextManager[None]] = nullcontext
        """What layers run in; set for compiled ones."""

    def forward(
        self,
        part: RankSlice,
    ) -> dict[str, Tensor]:
        """Compute the outputs of the selected tokens.

        Returns:
            Output name -> `[S]`, and `router_aux` (a scalar) if the balancing loss is on.
        """
        result = self._decode(part)
        outputs = self._head(result.last_hidden_state[0].index_select(0, part.selected), part)
        if self.router is not None:
            if not result.router_logits:
                raise ModelError("a router loss is requested, but the models of this family return no router logits")
            outputs["router_aux"] = balancing_loss(result.router_logits, self.router, part.real_tokens, part.context.cp_group)
        return outputs

    def next_token(self, part: RankSlice, last: int, choose: Callable[[Tensor], int]) -> tuple[int, float]:
        """Choose the token that follows a row of the slice. All rows of the slice must be selected.

        Args:
            part: The slice.
            last: The row.
            choose: Returns a token, given the logits `[V]`.

        Returns:
            The token, and its log-probability as `forward` computes it.
        """
        hidden_th = self._decode(part).last_hidden_state[0]
        head = self.lm.get_output_embeddings()
        # Chosen from logits first; then the head runs with this token as the target, so that its log-probability is
        # computed as in training.
        token = choose(final_logits(hidden_th, head.weight, getattr(head, "bias", None), self.transform)[last])
        targets = part.targets.clone()
        targets[last] = token
        log_probs = self._head(hidden_th, replace(part, targets=targets))["log_probs"]
        return token, float(log_probs[last])

    def _decode(self, part: RankSlice) -> Any:
        """Run the model without its head and return its output."""
        self._follow(part.context)
        router = {} if self.router is None else {"output_router_logits": True}
        backbone: Any = decoder_of(self.lm)
        ids = part.input_ids if self.media is None else self.media.text_ids(part.input_ids)
        inputs: dict[str, Any] = {"input_ids": ids.unsqueeze(0)}
        if self.media is not None and part.media:
            features = {kind: self._encode(kind, one, part) for kind, one in part.media.items()}
            if self.media.takes_outputs:
                backbone = self.base
                inputs["mm_encoder_outputs"] = {kind: self.media.encoded(one) for kind, one in features.items()}
            else:
                embeddings = self._embed(part, ids, features).unsqueeze(0)
                inputs = {"inputs_embeds": embeddings, **self.media.decoder_arguments(self.base, ids)}
        with self.layer_context():
            result = backbone(
                **inputs,
                position_ids=part.position_ids.unsqueeze(-2),
                use_cache=False,
                packed=part.context,
                **router,
            )
        if result.last_hidden_state.grad_fn is not None:
            # Compiled layers refer to the boundaries by a handle, which must be valid until the backward pass.
            result.last_hidden_state.grad_fn.metadata["packed"] = part.context
        return result

    def _follow(self, context: PackedContext) -> None:
        """Make the routers record or replay in this forward pass and in its recomputation, if requested."""
        if self._follows or context.routes is not None:
            self._follows = context.routes is not None
            follow(self.lm, context.handle if self._follows else None)

    def _embed(self, part: RankSlice, ids: Tensor, features: Mapping[Kind, Tensor]) -> Tensor:
        """Return the embeddings `[T, H]` of ids, with placeholder tokens replaced by features."""
        assert self.media is not None
        embeddings: Tensor = self.lm.get_input_embeddings()(ids)
        for kind, one in features.items():
            # Features are in the order of their tokens, which is the order in which `masked_scatter` takes them.
            mask = (part.input_ids == self.media.tokens[kind]).unsqueeze(-1)
            embeddings = embeddings.masked_scatter(mask, one.to(embeddings.dtype))
        return embeddings

    def _encode(self, kind: Kind, media: EncoderInput, part: RankSlice) -> Tensor:
        """Return the features of this slice's placeholder tokens."""
        assert self.media is not None
        values = self.media.modalities[kind].values
        fields = media.fields
        if self.compute is not None:
            # Not all families convert the dtype of their encoder's input.
            fields = {**fields, values: fields[values].to(self.compute)}
        return media.features_of_slice(self.media.encode(self.base, kind, fields), part.context.cp_group)

    def _head(self, hidden_sh: Tensor, part: RankSlice) -> dict[str, Tensor]:
        if self.head is not None and self.score is not None:
            return compute_outputs(self.head, self.score, hidden_sh, part.outputs.names)
        if self.running is not None:
            return self._head_of_adapters(hidden_sh, part, self.running)
        head = self.lm.get_output_embeddings()
        return self._outputs(hidden_sh, part, slice(None), head_adapter(head, hidden_sh), expected=True)

    def _head_of_adapters(self, hidden_sh: Tensor, part: RankSlice, running: RunningPass) -> dict[str, Tensor]:
        """Compute the outputs adapter by adapter, each with its own update of the head's weight."""
        # There is padding between the rows of adapters and after them.
        edges = sorted({0, len(part.input_ids), *(edge for one in running.rows for edge in (one.start, one.end))})
        ends = torch.searchsorted(part.selected, torch.tensor(edges, device=part.selected.device)).tolist()
        of_start = {one.start: one for one in running.rows}
        runs = [(of_start.get(edge), start, end) for edge, start, end in zip(edges, ends, ends[1:], strict=False)]
        spans: dict[int, FactorSpan] = {}
        for number, (one, start, end) in enumerate(runs):
            if (
                one is not None
                and start < end
                and (factors := running.factors(one, running.head, hidden_sh.dtype)) is not None
            ):
                spans[number] = FactorSpan(start, end, factors)
        adapters = dict(zip(spans, head_adapters(hidden_sh, list(spans.values()), running.anchor), strict=True))
        outputs = [
            self._outputs(
                hidden_sh[start:end],
                part,
                slice(start, end),
                adapters.get(number),
                expected=one is not None and one.linear,
            )
            for number, (one, start, end) in enumerate(runs)
        ]
        return {name: torch.cat([one[name] for one in outputs]) for name in outputs[0]}

    def _outputs(
        self, hidden_sh: Tensor, part: RankSlice, rows: slice, adapter: HeadAdapter | None, *, expected: bool
    ) -> dict[str, Tensor]:
        head = self.lm.get_output_embeddings()
        gradients = part.expected if expected else None
        head_outputs = linear_head(
            hidden_sh,
            head.weight,
            part.targets[rows],
            bias_v=getattr(head, "bias", None),
            adapter=adapter,
            transform=self.transform,
            temperature=part.outputs.temperature,
            entropy=part.outputs.entropy,
            greedy=part.outputs.greedy,
            sum_squared_probs=part.outputs.sum_squared_probs,
            top_k=part.outputs.top_k,
            expected=None if gradients is None else {name: value[rows] for name, value in gradients.items()},
            regions=self.head_regions,
        )
        return {name: value for name, value in head_outputs._asdict().items() if name in part.outputs.names}
