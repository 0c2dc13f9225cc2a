"""A rank's view of a micro-batch: a contiguous slice of its tokens, and the conversion of its outputs back to full documents.

Axes: T tokens of the micro-batch, t tokens of this rank's slice, S selected tokens of the slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .hf.media_family import MediaFamily
from .loss import HeadRequest, OutputRequest, TokenOutputs, loss_mask
from .media import EncoderExchange, select_items, share_items
from .ops.expert_routes import FREE, ROUTED_EXPERTS, ExpertRoutes, RouterShape
from .ops.invariance import padded_rows
from .ops.packed_context import PackedContext, block_numbers
from .ops.ulysses import exchange_rows, gather_tokens, slice_tokens
from .packing.batch import IGNORE, Kind
from .parallel.topology import Topology
from .step_plan import MicroBatch

PADDING_DOCUMENT = 128
"""The number of tokens in a padding document. Short, because the cost of attention is quadratic in the length."""


def padded_size(tokens: int, topology: Topology) -> int:
    """Return the padded size of a micro-batch, in tokens: each rank's slice must be a multiple of the alignment."""
    multiple = topology.token_multiple * topology.token_alignment
    return tokens + -tokens % multiple


def computed_tokens(micro_batch: MicroBatch) -> int:
    """Return the number of computed tokens in a micro-batch, without padding."""
    return micro_batch.batch.num_tokens if micro_batch.layout is None else micro_batch.layout.bounds[-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderInput:
    """A rank's encoder input for one kind of media, and the features that replace placeholder tokens in its slice.

    Args:
        fields: The fields of its items, or of a blank one if it has none.
        is_blank: Whether this rank has no items. The features of the blank item are unused, so the encoder's gradient is zero.
        share: The exchange of features with the ranks that share the sequence; None without context parallelism.
        index: `[S]` int64, without an exchange: the feature of each placeholder token; None for all features, in order.
    """

    fields: Mapping[str, Tensor]
    is_blank: bool
    share: EncoderExchange | None
    index: Tensor | None = None

    def features_of_slice(self, encoded: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return the features of this slice's placeholder tokens, given the features that this rank has encoded.

        Args:
            encoded: `[F, W]`.
            group: The ranks that share the sequence.
        """
        if self.is_blank:
            # Keep the encoder in the graph with a zero gradient, so that its backward pass enters the same collectives as on other ranks.
            encoded = encoded[:0]
        if self.share is not None and group is not None:
            sent = exchange_rows(encoded.index_select(0, self.share.sent), self.share.send, self.share.receive, group)
            return sent.index_select(0, self.share.order)
        return encoded if self.index is None else encoded.index_select(0, self.index)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSlice:
    """A rank's slice of a packed micro-batch, after the micro-batch is padded to a multiple that the layout requires.

    Args:
        input_ids: `[t]`, the token ids.
        position_ids: `[t]` or `[A, t]`, the positions within each document.
        context: The boundaries of all documents or segments, including the padding document, and the context-parallel group.
        selected: `[S]` int64, the indices of the selected tokens in the slice.
        targets: `[S]` int64, the labels of the selected tokens; `[S, K]` if each has several targets.
        outputs: The outputs to compute.
        expected: Output name -> `[S, ...]`, the gradient that the backward pass will pass to that output; None if not known in
            advance.
        real_tokens: The number of real tokens, which come first in the slice; the rest is padding.
        mask: `[T]` bool, the selected tokens of the micro-batch.
        origin: `[T]` int64, the computed token of each token of the micro-batch; None if every token is computed.
        media: The encoder input of each kind of media that any rank has in the step.
    """

    input_ids: Tensor
    position_ids: Tensor
    context: PackedContext
    selected: Tensor
    targets: Tensor
    outputs: OutputRequest
    expected: Mapping[str, Tensor] | None
    real_tokens: int
    mask: Tensor
    origin: Tensor | None = None
    media: Mapping[Kind, EncoderInput] = field(default_factory=dict)

    @classmethod
    def from_micro_batch(
        cls,
        micro_batch: MicroBatch,
        request: HeadRequest,
        topology: Topology,
        *,
        padded_tokens: int | None = None,
        family: MediaFamily | None = None,
        encodes: bool = True,
        routers: RouterShape | None = None,
        records_routes: bool = False,
        counts_experts: bool = False,
        row_multiple: int | None = None,
    ) -> "RankSlice":
        """Return this rank's slice.

        Args:
            micro_batch: The micro-batch.
            request: The outputs that the head has to compute.
            topology: The engine's topology.
            padded_tokens: The number of tokens to which unsupervised documents pad the micro-batch; `padded_size` if None.
            family: The model's handling of media; None if it supports none.
            encodes: Whether this rank holds the encoders.
            routers: The model's routers; None if it has none.
            records_routes: Whether to record the experts that tokens are routed to.
            counts_experts: Whether to count the tokens that each router sends to each expert.
            row_multiple: With `EngineConfig.invariant`, the number of rows is padded to a multiple of this; else None.
        """
        batch, group, layout = micro_batch.batch, topology.cp, micro_batch.layout
        # The entropy and the most likely next token exist for every token, but a log-probability only for tokens with a label.
        mask = request.mask & loss_mask(batch) if request.outputs.log_probs else request.mask
        ids, positions, labels = batch.input_ids, batch.position_ids, batch.labels
        bounds, cu_seqlens, parents = batch.bounds, batch.cu_seqlens, None
        padded_mask, expected = mask, request.expected
        if request.targets is not None:
            # Documents with several targets per token do not share prefixes.
            assert layout is None
            labels = request.targets
        # From the tokens of documents to the computed tokens of shared prefixes.
        if layout is not None:
            ids, positions = ids[layout.index], positions[..., layout.index]
            # A computed token that several documents share is selected, and has a target, if any of its tokens has. Their targets
            # are equal.
            padded_mask = mask.new_zeros(layout.tokens, dtype=torch.long).index_add(0, layout.origin, mask.long()) > 0
            # The maximum, because IGNORE is below every token id.
            labels = labels.new_full((layout.tokens,), IGNORE).scatter_reduce(0, layout.origin, labels, "amax")
            # The gradients of all documents that share a token add up, as they would in the backward pass.
            if expected is not None:
                expected = {
                    k: v.new_zeros(layout.tokens).index_add(0, layout.origin, v.masked_fill(~mask, 0.0))
                    for k, v in expected.items()
                }
            bounds, parents = layout.bounds, layout.parents
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(ids.device, non_blocking=True)
        tokens = bounds[-1]
        if row_multiple is not None:
            # The head gets as many rows as the rest of the model.
            padded_tokens, padded_mask = padded_rows(tokens, row_multiple), torch.ones_like(mask)
            expected = None if expected is None else {k: v.masked_fill(_along(~mask, v), 0.0) for k, v in expected.items()}
        padding = (padded_size(tokens, topology) if padded_tokens is None else padded_tokens) - tokens
        # Padding at the end, as unsupervised documents of zeros.
        if padding:
            ids, labels = _extend(ids, padding), _extend(labels, padding)
            padded_mask = torch.cat([padded_mask, padded_mask.new_full((padding,), row_multiple is not None)])
            added = torch.arange(padding, device=ids.device) % PADDING_DOCUMENT
            positions = torch.cat([positions, added.expand(*positions.shape[:-1], -1)], -1)
            expected = None if expected is None else {k: _extend(v, padding) for k, v in expected.items()}
            # Padding is cut into short documents; only the last may be shorter than the others.
            ends = (*range(tokens + PADDING_DOCUMENT, tokens + padding, PADDING_DOCUMENT), tokens + padding)
            bounds = (*bounds, *ends)
            cu_seqlens = torch.cat([cu_seqlens, torch.tensor(ends, dtype=torch.int32).to(ids.device, non_blocking=True)])
            parents = None if parents is None else (*parents, *(-1 for _ in ends))
        blocks: Tensor | None = None
        in_blocks = () if family is None else family.block_kinds
        if family is not None and any(kind in in_blocks and items.rows for kind, items in micro_batch.media.items()):
            tokens_in_blocks = torch.tensor([family.tokens[kind] for kind in in_blocks])
            in_block = torch.isin(ids, tokens_in_blocks.to(ids.device, non_blocking=True))
            blocks = block_numbers(in_block, cu_seqlens)
        selected = slice_tokens(padded_mask, group).nonzero()[:, 0]
        size = (tokens + padding) // topology.parallel.cp
        positions = slice_tokens(positions, group)
        routes: ExpertRoutes | None = None
        if routers is not None:
            routes = _routes(micro_batch, routers, topology, tokens + padding, records=records_routes, counts=counts_experts)
        return cls(
            input_ids=slice_tokens(ids, group),
            position_ids=positions,
            context=PackedContext(
                bounds=bounds,
                cu_seqlens=cu_seqlens,
                cp_group=group,
                parents=parents,
                blocks=blocks,
                blocks_in_windows=family is not None and family.blocks_in_windows,
                positions=positions if positions.dim() == 1 else None,
                routes=routes,
                by_position=row_multiple is not None,
            ),
            selected=selected,
            # A selected token may have no label, if no log-probability of it is used. IGNORE would be out of range as
            # an index into the vocabulary.
            targets=slice_tokens(labels, group, 0)[selected].clamp_min(0),
            outputs=request.outputs,
            expected=None if expected is None else {k: slice_tokens(v, group, 0)[selected] for k, v in expected.items()},
            real_tokens=0 if micro_batch.is_dummy else max(0, min(size, tokens - topology.cp_rank * size)),
            mask=mask,
            origin=None if layout is None else layout.origin,
            media={} if family is None or not encodes else _encoder_inputs(micro_batch, family, topology, size),
        )

    def gather_outputs(self, outputs: Mapping[str, Tensor]) -> TokenOutputs:
        """Convert outputs `[S]` of the selected tokens to outputs of complete documents. Collective over `Topology.cp`."""
        gathered = {name: self._of_documents(value) for name, value in outputs.items()}
        return TokenOutputs.of(self.mask, gathered)

    def gather_routes(self, layers: Sequence[int], tp: ProcessGroup | None = None) -> Tensor:
        """Return the experts of the tokens of complete documents, `[T, L, K]` int32. Collective over `Topology.cp` and `tp`.

        Args:
            layers: The indices of this rank's layers among all layers with experts.
            tp: The ranks that share the tokens of this slice; None if this rank has them all.

        Raises:
            ModelError: A router did not record its choices.
        """
        assert self.context.routes is not None
        full = gather_tokens(gather_tokens(self.context.routes.chosen(layers), tp), self.context.cp_group)
        return full[: len(self.mask)] if self.origin is None else full[self.origin]

    def _of_documents(self, value: Tensor) -> Tensor:
        # Back to one row per token of the slice, so that slices of all ranks have the same size and can be gathered.
        slots = value.new_zeros(len(self.input_ids), *value.shape[1:])
        full = gather_tokens(slots.index_put((self.selected,), value), self.context.cp_group)
        of_batch = full[: len(self.mask)] if self.origin is None else full[self.origin]
        if self.origin is None and not self.context.by_position:
            return of_batch
        # Only some of the tokens that share a computed token may be selected, and more than the selected ones may be computed.
        return of_batch.masked_fill(_along(~self.mask, full), 0)


def _routes(
    micro_batch: MicroBatch, routers: RouterShape, topology: Topology, tokens: int, *, records: bool, counts: bool
) -> ExpertRoutes | None:
    """Return the recorder of routes for a micro-batch padded to `tokens`, which may also replay or count; None if not needed."""
    replayed = micro_batch.batch.token_fields.get(ROUTED_EXPERTS)
    if replayed is None and not records and not counts:
        return None

    def of_rank(x: Tensor, fill: int) -> Tensor:
        padding = x.new_full((tokens - len(x), *x.shape[1:]), fill)
        # The slice of this rank and, with sequence parallelism, its part of the slice.
        part = slice_tokens(torch.cat([x, padding]), topology.cp, 0)
        return part.chunk(topology.parallel.tp)[topology.tp_rank] if topology.parallel.tp_sequence else part

    layout, counted = micro_batch.layout, None
    if counts:
        ones = torch.ones_like(micro_batch.batch.input_ids) * (not micro_batch.is_dummy)
        # A token that several documents share is counted once per document.
        each = ones if layout is None else ones.new_zeros(layout.tokens).index_add(0, layout.origin, ones)
        counted = of_rank(each, 0)
    if replayed is not None:
        # An unsigned dtype cannot represent the padding value.
        signed = replayed if replayed.dtype.is_signed else replayed.int()
        replayed = of_rank(signed if layout is None else signed[layout.index], FREE)
    return ExpertRoutes(routers.layers, replayed, counted_t=counted, experts=routers.experts, records=records)


def _encoder_inputs(micro_batch: MicroBatch, family: MediaFamily, topology: Topology, tokens: int) -> dict[Kind, EncoderInput]:
    inputs: dict[Kind, EncoderInput] = {}
    device = micro_batch.batch.device
    for kind, items in micro_batch.media.items():
        share: EncoderExchange | None = None
        chosen: Sequence[int] = range(len(items.rows))
        if topology.cp is not None:
            share = share_items(items, topology.cp_rank, topology.parallel.cp, tokens).to(device)
            chosen = share.items
        selected = select_items(items, family.modalities[kind], chosen) if chosen else family.blank(kind)
        media = family.trimmed(kind, selected)
        on_device = {name: value.to(device, non_blocking=True) for name, value in media.items()}
        # With an exchange, `share.order` already puts the features into the order of the tokens.
        index = None if share is not None or items.index is None else items.index.to(device, non_blocking=True)
        inputs[kind] = EncoderInput(fields=on_device, is_blank=not chosen, share=share, index=index)
    return inputs


def _extend(x: Tensor, tokens: int) -> Tensor:
    return torch.cat([x, x.new_zeros(tokens, *x.shape[1:])])


def _along(mask: Tensor, values: Tensor) -> Tensor:
    """Reshape a mask `[T]` to broadcast over values `[T, ...]`."""
    return mask.view(-1, *[1] * (values.dim() - 1))
