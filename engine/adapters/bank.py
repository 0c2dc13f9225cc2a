"""The adapters of a model, and the assignment of the rows of a pass to adapters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ConfigError, ModelError, NoAdapterError, TooManyAdaptersError
from ..ops.adapter_products import Factors, FactorSpan
from .config import AdapterConfig
from .slot import AdaptedLayer, AdapterSlot


@dataclass(frozen=True, kw_only=True)
class AdapterRows:
    """Rows of a pass that belong to one call of one adapter.

    Args:
        start: The first row.
        end: The row after the last one.
        adapter: The name of the adapter; None for the frozen model without an adapter.
        train: Whether gradients are accumulated.
        linear: Whether the loss is linear in the outputs, so that the head's gradient is known in advance.
    """

    start: int
    end: int
    adapter: str | None
    train: bool = False
    linear: bool = False


@dataclass(eq=False)
class RunningPass:
    """The rows of the current pass on this rank, which the adapted layers read. All layers of a model share one object."""

    rows: tuple[AdapterRows, ...] = ()
    """The rows of each call, in order."""
    count: int = 0
    """The number of rows."""
    head: str = ""
    """The layer name of the head."""
    slots: Mapping[str, AdapterSlot] = field(default_factory=dict)
    """The adapters by name."""
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    """The scalar that lets the backward pass reach layers whose input requires no gradient."""

    def factors(self, rows: AdapterRows, layer: str, dtype: torch.dtype) -> Factors | None:
        """Return the factors of the rows' adapter for a layer; None if the rows have no adapter, or it does not adapt the layer."""
        return None if rows.adapter is None else self.slots[rows.adapter].factors(layer, dtype, train=rows.train)

    def spans(self, layer: str, x_ti: Tensor) -> list[FactorSpan]:
        """Return the spans of rows that have factors for a layer.

        Args:
            layer: The name of the layer.
            x_ti: `[T, I]`, the input of the layer.

        Raises:
            ModelError: The input has a different number of rows than the pass, so its rows cannot be assigned to adapters.
        """
        if self.rows and len(x_ti) != self.count:
            raise ModelError(
                f"{layer} received {len(x_ti)} rows in a pass of {self.count}, so its rows cannot be assigned to adapters; train adapters "
                "without its target"
            )
        with_factors = [(one, self.factors(one, layer, x_ti.dtype)) for one in self.rows]
        return [FactorSpan(one.start, one.end, factors) for one, factors in with_factors if factors is not None]

    def expert_spans(self, layer: str, dtype: torch.dtype, experts_s: Tensor, tokens_s: Tensor) -> list[FactorSpan]:
        """Return the spans of token-expert pairs that have factors, with the factors of their expert.

        Args:
            layer: The name of the layer.
            dtype: The dtype of the layer's input.
            experts_s: `[S]`, the expert of each pair. Pairs are ordered by expert, then by token.
            tokens_s: `[S]`, the row of each pair's token.
        """
        if not self.rows:
            return []
        # Edges divide the rows of the pass into regions, each with one adapter. The pairs of an expert and a region are
        # contiguous, because tokens ascend within an expert.
        edges = sorted({edge for one in self.rows for edge in (one.start, one.end)})
        of_region = {edges.index(one.start) + 1: one for one in self.rows}
        # Region n begins with edge n - 1.
        regions_s = torch.bucketize(tokens_s, torch.tensor(edges, device=tokens_s.device), right=True)
        keys, counts = torch.unique_consecutive(experts_s * (len(edges) + 1) + regions_s, return_counts=True)
        spans: list[FactorSpan] = []
        start = 0
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            expert, region = divmod(key, len(edges) + 1)
            one = of_region.get(region)
            if one is not None and one.adapter is not None:
                factors = self.slots[one.adapter].factors(layer, dtype, train=one.train, expert=expert)
                spans += [] if factors is None else [FactorSpan(start, start + count, factors)]
            start += count
        return spans


class AdapterBank:
    """The adapters of a model.

    Args:
        layers: The layers that can be adapted.
        running: The assignment of rows to adapters, which the layers read.
        device: The device of the adapters.
        most: The maximum number of adapters at a time (`model.max_adapters`).
        in_turns: Whether each pass has the rows of only one adapter.
    """

    def __init__(
        self,
        layers: Sequence[AdaptedLayer],
        running: RunningPass,
        device: torch.device,
        most: int,
        *,
        in_turns: bool = False,
    ) -> None:
        self.layers, self._running, self._device, self._most = tuple(layers), running, device, most
        self.in_turns = in_turns
        self._slots: dict[str, AdapterSlot] = {}
        running.slots = self._slots
        running.anchor = torch.zeros((), device=device, requires_grad=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of their creation."""
        return tuple(self._slots)

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def __getitem__(self, name: str) -> AdapterSlot:
        if name not in self._slots:
            raise NoAdapterError(f"there is no adapter {name!r}; there are {', '.join(self._slots) or 'none'}")
        return self._slots[name]

    def create(self, name: str, config: AdapterConfig) -> AdapterSlot:
        """Create an adapter. Must be called on all ranks, which draw the same initial factors.

        Raises:
            ConfigError: The name is taken, the maximum number is reached, or the settings do not fit the model.
        """
        if name in self._slots:
            raise ConfigError(f"an adapter {name!r} already exists; drop it first, or choose another name")
        self._check_room()
        slot = AdapterSlot(config, self.layers, self._device)
        self._slots[name] = slot
        return slot

    def put(self, name: str, slot: AdapterSlot) -> None:
        """Add an adapter, or replace the one with the same name.

        Raises:
            ConfigError: The maximum number of adapters is reached.
        """
        if name not in self._slots:
            self._check_room()
        self._slots[name] = slot

    def _check_room(self) -> None:
        if len(self._slots) >= self._most:
            raise TooManyAdaptersError(
                f"there are {len(self._slots)} adapters, which is the maximum (model.max_adapters={self._most}); drop one first, or raise the "
                "maximum"
            )

    def drop(self, name: str) -> None:
        """Free an adapter.

        Raises:
            ConfigError: There is no adapter with this name.
        """
        # Raises the error that lists the names.
        self[name]
        del self._slots[name]

    def select(self, rows: Sequence[AdapterRows], first: int, count: int) -> None:
        """Assign the rows of the next pass to adapters.

        Args:
            rows: The rows of the complete pass, in order and without overlap.
            first: The first row of this rank's slice.
            count: The number of rows in this rank's slice.
        """
        # Shifted to the coordinates of this rank's slice. Calls outside of the slice become empty and are dropped below.
        clipped = [
            AdapterRows(
                start=max(one.start - first, 0),
                end=min(one.end - first, count),
                adapter=one.adapter,
                train=one.train,
                linear=one.linear,
            )
            for one in rows
        ]
        self._running.count = count
        self._running.rows = tuple(one for one in clipped if one.start < one.end)
        for one in self._running.rows:
            if one.adapter is not None and one.train:
                self[one.adapter].require_gradients()
