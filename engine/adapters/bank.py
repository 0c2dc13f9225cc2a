"""The adapters of a model by their names, and those of the rows of the pass that is running."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ConfigError, ModelError
from ..ops.adapter_products import Factors, FactorSpan
from .config import AdapterConfig
from .slot import AdaptedLayer, AdapterSlot


@dataclass(frozen=True, kw_only=True)
class AdapterRows:
    """Rows of a pass that belong to one call of one adapter.

    Args:
        start: The first row.
        end: The row after the last one.
        adapter: The name of the adapter; None for the model without any.
        train: Whether gradients are added up.
        linear: Whether the loss is linear in its outputs, so that the head's gradient is known in advance.
    """

    start: int
    end: int
    adapter: str | None
    train: bool = False
    linear: bool = False


@dataclass(eq=False)
class RunningPass:
    """The rows of the pass that is running, on this rank: what the adapted layers read. One object for all layers of a model."""

    rows: tuple[AdapterRows, ...] = ()
    count: int = 0
    head: str = ""
    """The name of the head among the layers."""
    slots: Mapping[str, AdapterSlot] = field(default_factory=dict)
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    """Through which the backward pass reaches layers whose input requires no gradient."""

    def factors(self, rows: AdapterRows, layer: str, dtype: torch.dtype) -> Factors | None:
        """Return the factors of the adapter of rows for a layer; None if there is none."""
        return None if rows.adapter is None else self.slots[rows.adapter].factors(layer, dtype, train=rows.train)

    def spans(self, layer: str, x_ti: Tensor) -> list[FactorSpan]:
        """Return the rows with factors for a layer.

        Args:
            layer: The name of the layer.
            x_ti: Its input.

        Raises:
            ModelError: The input has other rows than the pass, so that nobody knows whose they are.
        """
        if self.rows and len(x_ti) != self.count:
            raise ModelError(
                f"{layer} is given {len(x_ti)} rows in a pass of {self.count}, so that adapters cannot tell their own; train adapters that "
                "leave out its target"
            )
        with_factors = [(one, self.factors(one, layer, x_ti.dtype)) for one in self.rows]
        return [FactorSpan(one.start, one.end, factors) for one, factors in with_factors if factors is not None]

    def expert_spans(self, layer: str, dtype: torch.dtype, experts_s: Tensor, tokens_s: Tensor) -> list[FactorSpan]:
        """Return the pairs of a token and its expert with that expert's factors. The pairs are in the order of experts, then of tokens.

        Args:
            layer: The name of the layer.
            dtype: The dtype of its input.
            experts_s: The expert of each pair.
            tokens_s: The row of each pair's token.
        """
        if not self.rows:
            return []
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
        running: What the layers read.
        device: Where adapters are held.
        most: How many there may be at a time.
        in_turns: Whether a pass has the rows of one adapter alone.
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
        """The names of the adapters, in the order in which they were created."""
        return tuple(self._slots)

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def __getitem__(self, name: str) -> AdapterSlot:
        if name not in self._slots:
            raise ConfigError(f"there is no adapter {name!r}; there are {', '.join(self._slots) or 'none'}")
        return self._slots[name]

    def create(self, name: str, config: AdapterConfig) -> AdapterSlot:
        """Create an adapter. It must be created on all ranks, which draw the same initial factors.

        Raises:
            ConfigError: There is one with this name, there are as many as there may be, or its settings do not fit the model.
        """
        if name in self._slots:
            raise ConfigError(f"there is an adapter {name!r} already; drop it first, or choose another name")
        self._check_room()
        slot = AdapterSlot(config, self.layers, self._device)
        self._slots[name] = slot
        return slot

    def put(self, name: str, slot: AdapterSlot) -> None:
        """Add an adapter, or put it in the place of another one.

        Raises:
            ConfigError: There are as many adapters as there may be.
        """
        if name not in self._slots:
            self._check_room()
        self._slots[name] = slot

    def _check_room(self) -> None:
        if len(self._slots) >= self._most:
            raise ConfigError(
                f"max_adapters={self._most}: there are as many adapters already; drop one first, or raise the number"
            )

    def drop(self, name: str) -> None:
        """Free an adapter.

        Raises:
            ConfigError: There is none with this name.
        """
        self[name]
        del self._slots[name]

    def select(self, rows: Sequence[AdapterRows], first: int, count: int) -> None:
        """Choose the adapters of the rows of the next pass.

        Args:
            rows: The rows of the complete pass, which do not overlap, in order.
            first: The first row of this rank's slice.
            count: The number of rows of the slice.
        """
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
