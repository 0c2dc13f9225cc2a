"""Decoders with gated DeltaNet layers, and the rules for splitting these by heads over tensor-parallel ranks.

A rank's projection has the rows of queries, keys, values, gates, rates and decays of its heads, in this order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint.tensor_slices import StoredSlice, TensorSlice
from .decoder import Decoder, DeltaNet, read_decoder
from .rules import ColumnParallel, Replicated, RowParallel, Rule, Shape, TensorPart


def read_delta_decoder(config: Any, **different: Any) -> Decoder:
    """Read a decoder with gated DeltaNet layers from a config with Qwen's setting names; `different` are the fields that differ."""
    return read_decoder(
        config,
        supported=("partial_rotary_factor",),
        **{
            # The norms of these families multiply by 1 + weight, like Gemma's.
            "norm_offset": 1.0,
            "qk_norm": "head",
            "output_gate": True,
            # Set here, because `layer_types` says which layers are linear: neither windows nor kinds of rotary
            # embeddings.
            "windows": (None,) * config.num_hidden_layers,
            "rotary": ("",) * config.num_hidden_layers,
            "delta": DeltaNet(
                key_heads=config.linear_num_key_heads,
                value_heads=config.linear_num_value_heads,
                key_dim=config.linear_key_head_dim,
                value_dim=config.linear_value_head_dim,
                taps=config.linear_conv_kernel_dim,
                layers=tuple(kind == "linear_attention" for kind in config.layer_types),
            ),
            **different,
        },
    )


def _row_counts(net: DeltaNet) -> tuple[int, int, int, int, int, int]:
    """Return the number of rows of each kind in the unsharded model."""
    return net.key_size, net.key_size, net.value_size, net.value_size, net.value_heads, net.value_heads


@dataclass(frozen=True)
class HeadRows:
    """Rows that belong to heads, in sections of one kind, as Qwen3.5 stores them.

    Args:
        stored: The module of each kind of rows; None for kinds that the parameter does not have. Kinds of one module are adjacent in it.
    """

    stored: tuple[str | None, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules, without duplicates."""
        return tuple(dict.fromkeys(module for module in self.stored if module is not None))

    def of(self, module: str) -> "HeadRows":
        """Return the rule for the rows of one of the modules."""
        return replace(self, stored=tuple(module if other == module else None for other in self.stored))

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return a stored slice for each kind of rows."""
        assert decoder.delta is not None
        counts = _row_counts(decoder.delta)
        # For each tensor on disk, the rows of all its kinds, and below, how many of them belong to earlier kinds.
        totals = {
            module: sum(n for n, other in zip(counts, self.stored, strict=True) if other == module) for module in self.modules
        }
        # `at` is the row in the local parameter.
        at, before = 0, dict.fromkeys(self.modules, 0)
        slices = []
        for count, module in zip(counts, self.stored, strict=True):
            if module is None:
                continue
            rows = count // part.size
            name = names[self.modules.index(module)]
            slices.append(_slice(name, totals[module], shape, at, rows, before[module] + part.rank * rows))
            at, before[module] = at + rows, before[module] + count
        return slices


@dataclass(frozen=True)
class GroupedHeadRows:
    """Rows that belong to heads, grouped by key head, as Qwen3-Next stores them.

    Args:
        qkvz: The module with queries, keys, values and gates; None if the parameter does not have them.
        ba: The module with rates and decays; None if the parameter does not have them.
    """

    qkvz: str | None
    ba: str | None

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules."""
        return tuple(module for module in (self.qkvz, self.ba) if module is not None)

    def of(self, module: str) -> "GroupedHeadRows":
        """Return the rule for the rows of one of the modules."""
        return GroupedHeadRows(module if module == self.qkvz else None, module if module == self.ba else None)

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return a stored slice for each kind of rows of each of the rank's key heads, in their order on disk."""
        assert decoder.delta is not None
        net = decoder.delta
        heads, counts = net.key_heads // part.size, list(_row_counts(net))
        at = 0
        slices: list[StoredSlice] = []
        # The first four kinds of rows are in one module on disk, rates and decays in the other.
        for module, kinds in ((self.qkvz, slice(0, 4)), (self.ba, slice(4, 6))):
            if module is None:
                continue
            # Also for values and gates: a key head owns the value heads that use it, so these rows are next to it on
            # disk.
            per_head = [count // net.key_heads for count in counts[kinds]]
            name = names[self.modules.index(module)]
            for head in range(heads):
                # On disk, rows are ordered by key head and then by kind; in the parameter, by kind and then by head.
                row = (part.rank * heads + head) * sum(per_head)
                for kind, count in enumerate(per_head):
                    local = at + heads * sum(per_head[:kind]) + head * count
                    slices.append(_slice(name, net.key_heads * sum(per_head), shape, local, count, row))
                    row += count
            at += heads * sum(per_head)
        return slices


def _slice(name: str, total: int, shape: Shape, at: int, rows: int, first: int) -> StoredSlice:
    inner = shape[1:]
    zeros = (0,) * len(inner)
    return StoredSlice(name, (total, *inner), TensorSlice((at, *zeros), (rows, *inner)), (first, *zeros))


@dataclass(frozen=True)
class GatedQKVParallel:
    """Query, gate, key and value in one matrix: a group's query heads, their gates, its key head, its value head.

    On disk, each query head is followed by its gate.
    """

    query: str
    key: str
    value: str

    @property
    def modules(self) -> tuple[str, ...]:
        """The three modules: query with gate, key and value."""
        return (self.query, self.key, self.value)

    def is_split(self, dimensions: int) -> bool:
        """Return True: the module is always split."""
        return True

    def stored_slices(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> list[StoredSlice]:
        """Return the stored slices of each of the rank's groups."""
        return list(self._of_groups(names, shape, part, decoder))

    def _of_groups(self, names: tuple[str, ...], shape: Shape, part: TensorPart, decoder: Decoder) -> Iterator[StoredSlice]:
        query, key, value = names
        size, per_group = decoder.head_dim, decoder.heads // decoder.kv_heads
        groups = decoder.kv_heads // part.size
        for local in range(groups):
            group, at = part.rank * groups + local, local * (2 * per_group + 2) * size
            for head in range(per_group):
                # On disk, a query head is next to its gate; in the parameter, a group's queries precede its gates.
                first = 2 * (group * per_group + head) * size
                yield _slice(query, 2 * decoder.heads * size, shape, at + head * size, size, first)
                yield _slice(query, 2 * decoder.heads * size, shape, at + (per_group + head) * size, size, first + size)
            at += 2 * per_group * size
            for i, name in enumerate((key, value)):
                yield _slice(name, decoder.kv_heads * size, shape, at + i * size, size, group * size)


GATED_ATTENTION: dict[str, Rule] = {
    "self_attention.linear_qkv": GatedQKVParallel("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
}

DELTA_NET: dict[str, Rule] = {
    # Only queries, keys and values are convolved.
    "self_attention.conv1d": HeadRows((*["linear_attn.conv1d"] * 3, None, None, None)),
    # One number per value head.
    "self_attention.A_log": ColumnParallel("linear_attn.A_log"),
    "self_attention.dt_bias": ColumnParallel("linear_attn.dt_bias"),
    "self_attention.norm": Replicated("linear_attn.norm"),
    "self_attention.out_proj": RowParallel("linear_attn.out_proj"),
}
