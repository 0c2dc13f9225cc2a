"""A base model with a run's adapters added into its weights, block by block."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..engine.checkpoint.hf_folder import ADAPTER_STEM, CONFIGS, Entry
from ..engine.checkpoint.tensor_slices import TensorSlice
from ..engine.errors import CheckpointError
from ..engine.hf.names import PEFT_PREFIX
from .plan import DTYPES, FLOATS
from .sources import CheckpointSource, FolderSource
from .streaming import BlockBuffer


class MergedAdapters:
    """The base model's blocks with the adapters' products added, in float32 on the way, as the engines merge them.

    Args:
        adapters: checkpoint of the run.
        base: its base model.
        files: of the checkpoint: peft's settings, and the config that the result will have.

    Raises:
        CheckpointError: an adapter without a layer in the base, or settings that are not the checkpoint's.
    """

    def __init__(self, adapters: CheckpointSource, base: FolderSource, files: Mapping[str, bytes]) -> None:
        self._adapters, self._base = adapters, base
        try:
            settings = json.loads(files.get(CONFIGS[ADAPTER_STEM], b"null"))
            unknown = [k for k in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if settings.get(k)]
            self._scale = float(settings["lora_alpha"]) / int(settings["r"])
            self._transposed = bool(settings.get("fan_in_fan_out"))
            self._dtype = DTYPES[adapters.manifest.data["engine"]["precision"]["params"]]
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as e:
            raise CheckpointError(
                f"{adapters.label} does not say how its adapters are scaled ({CONFIGS[ADAPTER_STEM]}): {type(e).__name__} {e}"
            ) from e
        if unknown:
            raise CheckpointError(f"{adapters.label}: {unknown[0]}={settings[unknown[0]]} is not known to merge")
        own = {n: e for n, e in adapters.entries.items() if not n.startswith(PEFT_PREFIX)}
        # A value head is trained beside the adapters, in the place of the base's own head.
        heads = {"lm_head.weight", "score.weight"} if "score.weight" in own else set()
        kept = {n: e for n, e in base.entries.items() if n not in heads}
        self._own = set(own)
        self.entries: dict[str, Entry] = {
            **{n: (self._dtype if dtype in FLOATS else dtype, shape) for n, (dtype, shape) in kept.items()},
            **own,
        }
        self._pairs = {}
        factor = re.compile(rf"{re.escape(PEFT_PREFIX)}(.*)\.lora_A\.weight")
        for name in adapters.entries:
            found = factor.fullmatch(name)
            if found is not None:
                self._pairs[f"{found[1]}.weight"] = (name, name.replace(".lora_A.", ".lora_B."))
        missing = sorted(set(self._pairs) - set(kept))
        if missing:
            raise CheckpointError(
                f"{base.label} has no {missing[0]}, which {adapters.label} adapts ({len(missing)} such layers); give the model that "
                "the run began with"
            )
        self._check_shapes()

    def _check_shapes(self) -> None:
        for name, (down, up) in self._pairs.items():
            shape = self._base.entries[name][1]
            if len(shape) != 2:
                raise CheckpointError(f"{self._base.label}: {name} is {list(shape)}, no matrix that could be adapted")
            rows, columns = reversed(shape) if self._transposed else shape
            a, b = self._adapters.entries[down][1], self._adapters.entries.get(up, ("", ()))[1]
            if len(a) != 2 or a != (a[0], columns) or b != (rows, a[0]):
                raise CheckpointError(
                    f"{self._base.label}: {name} is {list(shape)}, but its adapter's factors are {list(a)} and {list(b)}; give the "
                    "model that the run began with"
                )

    def block(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """See `Blocks`."""
        from ..engine.checkpoint.local_shards import as_tensor, raw

        if name in self._own:
            out = room.take("own", self._adapters.entries[name][0], part.length)
            self._adapters.read(name, part, out)
            return out
        was, becomes = self._base.entries[name][0], self.entries[name][0]
        stored = room.take("base", was, part.length)
        self._base.read(name, part, stored)
        if name not in self._pairs and was == becomes:
            return stored
        out = as_tensor(room.take("merged", becomes, part.length), becomes)
        # First the format that the run trained in, then the sum: as an engine that merges does.
        out.copy_(as_tensor(stored, was))
        if name in self._pairs:
            out.copy_(out.float() + self._delta(name, part, room))
        return raw(out)

    def _delta(self, name: str, part: TensorSlice, room: BlockBuffer) -> Any:
        """Rows of the product of an adapter's factors."""
        from ..engine.ops.lora import adapter_product

        down, up = self._pairs[name]
        rows = slice(part.offset[0], part.offset[0] + part.length[0])
        if self._transposed:
            return adapter_product(self._factor(up, None, room), self._factor(down, None, room)[:, rows], self._scale).T
        return adapter_product(self._factor(up, rows, room), self._factor(down, None, room), self._scale)

    def _factor(self, name: str, rows: slice | None, room: BlockBuffer) -> Any:
        from ..engine.checkpoint.local_shards import as_tensor

        dtype, shape = self._adapters.entries[name]
        part = TensorSlice((rows.start if rows else 0, 0), (rows.stop - rows.start if rows else shape[0], shape[1]))
        out = room.take(name[-13:], dtype, part.length)
        self._adapters.read(name, part, out)
        return as_tensor(out, dtype)
