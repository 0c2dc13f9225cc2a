"""Merging the adapters of a run into its base model, block by block."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..engine.checkpoint.hf_folder import ADAPTER_STEM, CONFIGS, Entry
from ..engine.checkpoint.tensor_slices import TensorSlice
from ..engine.errors import CheckpointError
from ..engine.hf.names import PEFT_PREFIX, peft_shape, tied_copies
from ..engine.model_types import HEAD_PREFIX
from .expert_adapters import adapted_experts, is_expert_factor, read_as_peft
from .plan import DTYPES, FLOATS
from .sources import CheckpointSource, FolderSource
from .streaming import BlockBuffer


class AdapterBlocks:
    """The adapters and the modules trained with them, under peft's names, as they are stored.

    Args:
        adapters: The checkpoint of the run.
        files: The model files of the checkpoint: the PEFT settings.
    """

    def __init__(self, adapters: CheckpointSource, files: Mapping[str, bytes]) -> None:
        self._source = adapters
        # A value head is also trained with the adapters, but it is not a part of the language model that they belong to.
        self._names = {
            name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name: name
            for name in adapters.entries
            if not name.startswith(HEAD_PREFIX)
        }
        settings = json.loads(files.get(CONFIGS[ADAPTER_STEM], b"{}"))
        # peft expects a tied head under its own name, too; both names read the same stored tensor.
        self._names |= {copy: self._names[name] for copy, name in tied_copies(self._names, settings).items()}
        self.entries: dict[str, Entry] = {
            ours: (adapters.entries[name][0], peft_shape(ours, adapters.entries[name][1]))
            for ours, name in self._names.items()
        }

    def block(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """See `Blocks`."""
        stored = self._names[name]
        if is_expert_factor(stored, self._source.entries[stored]):
            return read_as_peft(self._source, stored, part, room)
        out = room.take("copied", self._source.entries[stored][0], part.length)
        self._source.read(stored, part, out)
        return out


class MergedAdapters:
    """The blocks of the base model with the adapter products added in float32, exactly as the engines merge them.

    Args:
        adapters: The checkpoint of the run.
        base: The base model of the run.
        files: The model files of the checkpoint: the PEFT settings, and the config of the merged model.

    Raises:
        CheckpointError: An adapter has no layer in the base, its factors do not fit that layer, or the PEFT settings are
            missing or not supported.
    """

    def __init__(self, adapters: CheckpointSource, base: FolderSource, files: Mapping[str, bytes]) -> None:
        self._adapters, self._base = adapters, base
        try:
            settings = json.loads(files.get(CONFIGS[ADAPTER_STEM], b"null"))
            # With these, the product of the two factors times one scale is not what was trained.
            unknown = [k for k in ("use_dora", "rank_pattern", "alpha_pattern") if settings.get(k)]
            rank = int(settings["r"])
            # Rank-stabilized LoRA divides by the square root of the rank.
            self._scale = float(settings["lora_alpha"]) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
            self._transposed = bool(settings.get("fan_in_fan_out"))
            self._dtype = DTYPES[adapters.manifest.data["engine"]["precision"]["params"]]
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as e:
            raise CheckpointError(
                f"{adapters.label} does not record how its adapters are scaled ({CONFIGS[ADAPTER_STEM]}): {type(e).__name__} "
                f"{e}"
            ) from e
        if unknown:
            raise CheckpointError(f"{adapters.label}: merging is not supported with {unknown[0]}={settings[unknown[0]]}")
        own_entries = {n: e for n, e in adapters.entries.items() if not n.startswith(PEFT_PREFIX)}
        # A head of another type is trained alongside the adapters and replaces the base model's own head.
        replaced = ("lm_head.", HEAD_PREFIX) if any(n.startswith(HEAD_PREFIX) for n in own_entries) else ()
        base_entries = {n: e for n, e in base.entries.items() if not n.startswith(replaced)}
        self._own_names = set(own_entries)
        self.entries: dict[str, Entry] = {
            **{n: (self._dtype if dtype in FLOATS else dtype, shape) for n, (dtype, shape) in base_entries.items()},
            **own_entries,
        }
        self._pairs = {}
        self._embeddings: set[str] = set()
        self._experts = adapted_experts(adapters.entries, base)
        factor = re.compile(rf"{re.escape(PEFT_PREFIX)}(.*)\.lora_(embedding_)?A(\.weight)?")
        for name, entry in adapters.entries.items():
            match = factor.fullmatch(name)
            # Factors of experts have a third axis, and are found by `adapted_experts`.
            if match is None or is_expert_factor(name, entry):
                continue
            self._pairs[f"{match[1]}.weight"] = (
                name,
                name.replace(".lora_A", ".lora_B").replace("embedding_A", "embedding_B"),
            )
            if match[2]:
                self._embeddings.add(f"{match[1]}.weight")
        missing = sorted((set(self._pairs) | set(self._experts)) - set(base_entries))
        if missing:
            raise CheckpointError(
                f"{base.label} has no {missing[0]}, which {adapters.label} adapts ({len(missing)} such layers in total); use "
                "the model that the run started from"
            )
        self._check_shapes()

    def _check_shapes(self) -> None:
        for name, (down, up) in self._pairs.items():
            shape = self._base.entries[name][1]
            if len(shape) != 2:
                raise CheckpointError(
                    f"{self._base.label}: {name} has shape {list(shape)}, so it is not a matrix that can be adapted"
                )
            # Layers with `fan_in_fan_out` (GPT-2's Conv1D) and embeddings store the transpose of a linear layer's
            # matrix.
            rows, columns = reversed(shape) if self._is_transposed(name) else shape
            a, b = self._adapters.entries[down][1], self._adapters.entries.get(up, ("", ()))[1]
            if len(a) != 2 or a != (a[0], columns) or b != (rows, a[0]):
                raise CheckpointError(
                    f"{self._base.label}: {name} has shape {list(shape)}, but its adapter factors have {list(a)} and "
                    f"{list(b)}; use the model that the run started from"
                )

    def block(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """See `Blocks`."""
        from ..engine.checkpoint.local_shards import as_tensor, raw

        if name in self._own_names:
            out = room.take("own", self._adapters.entries[name][0], part.length)
            self._adapters.read(name, part, out)
            return out
        old_dtype, new_dtype = self._base.entries[name][0], self.entries[name][0]
        stored = room.take("base", old_dtype, part.length)
        self._base.read(name, part, stored)
        # Nothing to add and nothing to cast, so the bytes are passed on.
        if name not in self._pairs and name not in self._experts and old_dtype == new_dtype:
            return stored
        out = as_tensor(room.take("merged", new_dtype, part.length), new_dtype)
        # Cast to the dtype that the run trained in before adding, as the engines do when they merge.
        out.copy_(as_tensor(stored, old_dtype))
        if name in self._experts:
            out.copy_(
                out.float()
                + self._experts[name].delta(part, self._scale, lambda factor, box: self._expert_factor(factor, box, room))
            )
        elif name in self._pairs:
            out.copy_(out.float() + self._delta(name, part, room))
        return raw(out)

    def _is_transposed(self, name: str) -> bool:
        return self._transposed or name in self._embeddings

    def _delta(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """Compute the rows of an adapter product that belong to a part of a weight."""
        from ..engine.ops.lora import adapter_product

        down, up = self._pairs[name]
        # A block is a range of rows of the weight. It needs only those rows of B, but all of A.
        rows = slice(part.offset[0], part.offset[0] + part.length[0])
        # The rows of a transposed weight are columns of the product, so A is cut instead of B.
        if self._is_transposed(name):
            return adapter_product(self._factor(up, None, room), self._factor(down, None, room)[:, rows], self._scale).T
        return adapter_product(self._factor(up, rows, room), self._factor(down, None, room), self._scale)

    def _factor(self, name: str, rows: slice | None, room: BlockBuffer) -> Any:
        shape = self._adapters.entries[name][1]
        part = TensorSlice((rows.start if rows else 0, 0), (rows.stop - rows.start if rows else shape[0], shape[1]))
        return self._read(name, part, room)

    def _expert_factor(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        shape = self._adapters.entries[name][1]
        return self._read(
            name, replace(part, length=tuple(n if n >= 0 else size for n, size in zip(part.length, shape, strict=True))), room
        )

    def _read(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        from ..engine.checkpoint.local_shards import as_tensor

        dtype = self._adapters.entries[name][0]
        # Separate memory for A and B, because a product needs both at the same time.
        out = room.take("A" if ".lora_A" in name or name.endswith("_A") else "B", dtype, part.length)
        self._adapters.read(name, part, out)
        return as_tensor(out, dtype)
