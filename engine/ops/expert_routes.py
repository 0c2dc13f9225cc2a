"""The experts of a micro-batch's tokens, recorded in one forward pass and replayed in another ("routing replay").

When the experts of an earlier pass are replayed, such as the generator's, a router still computes their weights from its own scores. Only
its choice is replaced (R3, arXiv:2510.11370). Balancing losses use the router's own choice.

Axes: T tokens of a batch, t tokens of a rank, L layers with experts, K experts of a token, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BatchError, ModelError
from ..packing.batch import PackedBatch, is_integer
from .packed_context import context_of

ROUTED_EXPERTS = "routed_experts"
"""The name of the batch field and of the output of an engine: `[T, L, K]` integers, -1 for tokens that the router chooses experts for."""
FREE = -1


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """The routers of a model.

    Args:
        layers: The number of layers with experts, L.
        per_token: The number of experts of a token, K.
        experts: The number of experts of a layer, E.
        biased: Whether each router adds a bias to its scores only to choose experts; gradients do not train it.
    """

    layers: int
    per_token: int
    experts: int
    biased: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class _Choice:
    """The choice of one layer: its tokens' experts, how many replayed ones its router would not have chosen, and its own counts."""

    chosen_tk: Tensor | None
    differing: Tensor | None
    replayed: Tensor | None
    counts_e: Tensor | None


class ExpertRoutes:
    """The experts of the tokens of one rank in one micro-batch, for all layers.

    Args:
        layers: The number of layers with experts in the model, L; a pipeline stage has only some of them.
        replayed_tlk: `[t, L, K]`, the experts to route to; None if the routers choose.
        counted_t: `[t]` int64, the number of document tokens per token, to count the routers' own choices; None to not count.
        experts: The number of experts, for the counts.
        records: Whether `chosen` will be called.
    """

    def __init__(
        self,
        layers: int,
        replayed_tlk: Tensor | None = None,
        *,
        counted_t: Tensor | None = None,
        experts: int = 0,
        records: bool = True,
    ) -> None:
        self._replayed_tlk, self._counted_t, self._experts, self._records = replayed_tlk, counted_t, experts, records
        self._layers = layers
        # Stored by layer instead of added up, because a recomputed layer chooses again.
        self._choices: dict[int, _Choice] = {}

    def choose(self, own_tk: Tensor, layer: int) -> Tensor:
        """Return the experts `[t, K]` int64 that tokens are routed to in a layer.

        Args:
            own_tk: The router's own choice, `[t, K]` int64.
            layer: The index of the layer among the layers with experts.
        """
        chosen, differing, replayed, counts_e = own_tk, None, None, None
        if self._counted_t is not None:
            # The router's own choice is counted, not the replayed one, because the biases balance the router.
            rows_r = self._counted_t.repeat_interleave(own_tk.shape[1])
            counts_e = rows_r.new_zeros(self._experts).scatter_add_(0, own_tk.flatten(), rows_r)
        if self._replayed_tlk is not None:
            replayed_tk = self._replayed_tlk[:, layer].long()
            is_free = replayed_tk < 0
            chosen = torch.where(is_free, own_tk, replayed_tk)
            # Compared as sets: the order of a token's experts does not matter.
            is_own = (replayed_tk.unsqueeze(-1) == own_tk.unsqueeze(-2)).any(-1)
            differing, replayed = (~(is_own | is_free)).sum(), (~is_free).sum()
        kept_tk = chosen.detach() if self._records else None
        self._choices[layer] = _Choice(chosen_tk=kept_tk, differing=differing, replayed=replayed, counts_e=counts_e)
        return chosen

    def counts(self) -> Tensor:
        """Return the number of this rank's tokens that each router's own choice sends to each expert, `[L, E]` int64."""
        assert self._counted_t is not None
        counts_le = self._counted_t.new_zeros(self._layers, self._experts)
        for layer, choice in self._choices.items():
            assert choice.counts_e is not None
            counts_le[layer] = choice.counts_e
        return counts_le

    def chosen(self, layers: Sequence[int]) -> Tensor:
        """Return the experts that tokens were routed to, `[t, L, K]` int32; `FREE` in the layers of other pipeline stages.

        Args:
            layers: The indices of this stage's layers among the layers with experts.

        Raises:
            ModelError: A layer has not made its choice.
        """
        self.check(layers)
        recorded = {layer: choice.chosen_tk for layer, choice in self._choices.items() if choice.chosen_tk is not None}
        first = recorded[layers[0]]
        out = first.new_full((first.shape[0], self._layers, first.shape[1]), FREE, dtype=torch.int32)
        for layer in layers:
            out[:, layer] = recorded[layer].int()
        return out

    def check(self, layers: Sequence[int]) -> None:
        """Check that every router has called `choose`.

        Raises:
            ModelError: A router has not, so its choice was neither recorded nor replaced.
        """
        silent = [layer for layer in layers if layer not in self._choices]
        if silent:
            raise ModelError(
                f"the routers of the layers with experts {silent} do not choose by torch.topk over all experts, so routes can be "
                f"neither recorded nor replayed; set rl.routing_replay=off, and leave out the field {ROUTED_EXPERTS}"
            )

    def differing(self) -> tuple[Tensor, Tensor] | None:
        """Return the number of replayed experts that the routers would not have chosen, and the number of all, over this rank's layers.

        None if nothing is replayed. Both are scalars on the device.
        """
        if self._replayed_tlk is None:
            return None
        none = torch.zeros((), dtype=torch.long, device=self._replayed_tlk.device)
        choices = self._choices.values()
        differing = torch.stack([none, *(choice.differing for choice in choices if choice.differing is not None)]).sum()
        replayed = torch.stack([none, *(choice.replayed for choice in choices if choice.replayed is not None)]).sum()
        return differing, replayed


def check_routes(batch: PackedBatch, routers: RouterShape | None) -> None:
    """Check the field `routed_experts` of a batch, if there is one.

    Raises:
        BatchError: The model has no routers that can replay, or the field has a wrong shape or unknown experts.
    """
    routes = batch.token_fields.get(ROUTED_EXPERTS)
    if routes is None:
        return
    if routers is None:
        raise BatchError(
            f"the batch has {ROUTED_EXPERTS}, but the model has no experts whose routers could replay them; leave it out "
            "(rl.routing_replay=off)"
        )
    shape = (batch.num_tokens, routers.layers, routers.per_token)
    if tuple(routes.shape) != shape or not is_integer(routes):
        raise BatchError(
            f"{ROUTED_EXPERTS} is {list(routes.shape)} {routes.dtype}; this model's is {list(shape)} integers: tokens, layers with "
            "experts, experts of a token"
        )
    if not routes.numel():
        return
    low, high = torch.stack(routes.long().aminmax()).tolist()
    if low < FREE or high >= routers.experts:
        raise BatchError(
            f"{ROUTED_EXPERTS} holds {low if low < FREE else high}; experts are numbered from 0 to {routers.experts - 1}, and {FREE} "
            "leaves a token to the router"
        )
    # Sorted, so that an expert that occurs twice is next to itself.
    ordered = routes.long().sort(-1).values
    is_free = ordered == FREE
    wrong = (is_free.any(-1) & ~is_free.all(-1)) | ((ordered.diff(dim=-1) == 0) & ~is_free[..., 1:]).any(-1)
    if wrong.any():
        token, layer = wrong.nonzero()[0].tolist()
        raise BatchError(
            f"{ROUTED_EXPERTS} of token {token} in layer {layer} is {routes[token, layer].tolist()}; a token goes to "
            f"{routers.per_token} different experts, or all of them are {FREE}"
        )


def route_numbers(batch: PackedBatch, ids: Tensor) -> Tensor:
    """Return numbers `[T]` int64 on the host to compare tokens by: equal only if ids and replayed experts are equal.

    The numbers are sums of products with random odd numbers modulo 2**64. Different rows collide in one case of 2**57.

    Args:
        batch: The batch; its field has been checked.
        ids: `[T]` int64, the ids, or other numbers to compare tokens by.
    """
    routes_tlk = batch.token_fields[ROUTED_EXPERTS].cpu()
    _, layers, per_token = routes_tlk.shape
    # The same random numbers on all ranks.
    g = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (layers * per_token + 1,), generator=g) * 2 + 1
    numbers = ids.cpu() * factors[-1]
    for layer, factors_k in enumerate(factors[:-1].split(per_token)):
        numbers += (routes_tlk[:, layer].long() * factors_k).sum(-1)
    return numbers


@torch.library.custom_op("drivetrain::choose_experts", mutates_args=())
def choose_experts(own_tk: Tensor, handle: Tensor) -> Tensor:
    """Return the experts that tokens are routed to, from `ExpertRoutes.choose` of the micro-batch that a handle refers to.

    Args:
        own_tk: The router's own choice, `[t, K]` int64.
        handle: `[2]` int64 on the host: `PackedContext.handle`, and the index of the layer among the layers with experts. With a plain
            number as the index, each layer would get its own compiled graph.
    """
    routes = context_of(handle).routes
    if routes is None:
        return own_tk.clone()
    chosen = routes.choose(own_tk, int(handle.numpy()[1]))
    return chosen.clone() if chosen is own_tk else chosen


@choose_experts.register_fake
def _choose_experts_shape(own_tk: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(own_tk)
