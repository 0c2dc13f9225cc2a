"""The mapping from parameters in memory to tensors on disk.

transformers 5 fuses a mixture's experts in memory (`experts.gate_up_proj [E, 2I, H]`) and stores them separately
(`experts.3.up_proj.weight [I, H]`); some families also rename tensors. The rules are transformers' own conversion mapping,
read as data.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from ..checkpoint.tensor_slices import StoredSlice, TensorSlice, whole
from ..errors import ModelError


class DiskLayout:
    """The mapping for one model.

    Args:
        model: The model, on any device; only its family matters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # Changes of prefixes cannot be derived from a bare model; files that transformers saves do not have them either.
        transforms = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        # In reverse order, as for the inverse of a composition.
        self._back = [t.reverse_transform() for t in reversed(transforms) if isinstance(t, WeightRenaming)]
        self._forward: list[WeightTransform] = [
            t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)
        ]
        # The sizes of the projections, by which a convolution over several of them is cut into its parts.
        self._rows = {name: len(parameter) for name, parameter in model.named_parameters() if name.endswith("_proj.weight")}

    def stored_slices(self, name: str, shape: Sequence[int]) -> list[StoredSlice]:
        """Return the stored slices that a parameter consists of.

        Args:
            name: The name of the parameter in a plain transformers model.
            shape: The global shape of the parameter.

        Raises:
            ModelError: There is no rule for the family's layout of the parameter on disk.
        """
        for converter in self._converters:
            target = _literal(converter.target_patterns[0])
            if name.endswith(target):
                return self._fused(name, tuple(shape), converter, target)
        return [StoredSlice(self.renamed(name), tuple(shape), whole(shape))]

    def canonical(self, disk_name: str) -> str:
        """Return the name that `stored_slices` would give to a tensor called `disk_name` in a folder."""
        name = disk_name
        for renaming in self._forward:
            name, _ = renaming.rename_source_key(name)
        return self.renamed(name)

    def renamed(self, name: str) -> str:
        """Return the name on disk of a tensor that is stored as it is, given its name in a plain transformers model."""
        for renaming in self._back:
            name, _ = renaming.rename_source_key(name)
        return name

    def _transposed(self, name: str, shape: tuple[int, ...], converter: WeightConverter) -> list[StoredSlice]:
        op: Any = converter.operations[0]
        if sorted(axis % len(shape) for axis in (op.dim0, op.dim1)) != [len(shape) - 2, len(shape) - 1]:
            raise ModelError(
                f"{name} is stored with its axes {op.dim0} and {op.dim1} exchanged; drivetrain has no rule for this family yet"
            )
        # transformers decides by the shape whether to transpose a tensor, so it never transposes a square one.
        stored = shape if op.check_dims and shape[-1] == shape[-2] else (*shape[:-2], shape[-1], shape[-2])
        return [StoredSlice(self.renamed(name), stored, whole(shape), transposed=stored != shape or not op.check_dims)]

    def _joined(self, name: str, shape: tuple[int, ...], sources: Sequence[str], target: str) -> list[StoredSlice]:
        """Return the stored convolutions of queries, keys and values, each with the rows of its projection."""
        stem = name[: -len(target)]
        rows = [self._rows.get(stem + source.replace("_conv1d.", "_proj."), 0) for source in sources]
        if sum(rows) != shape[0]:
            raise ModelError(f"{name} has {shape[0]} rows, but the projections that it convolves have {rows}")
        return [
            StoredSlice(
                self.renamed(stem + source), (n, *shape[1:]), TensorSlice((end - n, *(0,) * len(shape[1:])), (n, *shape[1:]))
            )
            for source, n, end in zip(sources, rows, accumulate(rows), strict=True)
        ]

    def _fused(self, name: str, shape: tuple[int, ...], converter: WeightConverter, target: str) -> list[StoredSlice]:
        if [type(op) for op in converter.operations] == [Transpose]:
            return self._transposed(name, shape, converter)
        operations = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
        sources = [_literal(pattern) for pattern in converter.source_patterns]
        if operations == [(Concatenate, 0)] and all("_conv1d." in source for source in sources):
            return self._joined(name, shape, sources, target)
        # The rest are experts: separate on disk (`MergeModulelist`), and in memory possibly gate and up in one
        # (`Concatenate`).
        supported = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
        if len(converter.target_patterns) != 1 or operations not in supported or (len(operations) == 1 and len(sources) != 1):
            steps = ", ".join(op.__name__ for op, _ in operations)
            raise ModelError(f"{name} is stored with {steps} of {sources}; drivetrain has no rule for this family yet")
        if shape[1] % len(sources):
            raise ModelError(f"{name} has {shape[1]} rows, which is not divisible by its {len(sources)} parts on disk")
        rows, inner_shape = shape[1] // len(sources), shape[2:]
        stem = name[: -len(target)]
        return [
            StoredSlice(
                self.renamed(stem + pattern.replace("*", str(expert))),
                (rows, *inner_shape),
                TensorSlice((expert, part * rows, *(0,) * len(inner_shape)), (1, rows, *inner_shape)),
                dropped=1,
            )
            for expert in range(shape[0])
            for part, pattern in enumerate(sources)
        ]


def _literal(pattern: str) -> str:
    """Return the text that a pattern stands for; some families escape its dots."""
    return pattern.replace("\\", "")
