"""Weights for a sharded model: slices read from safetensors, or drawn from the seed. No process loads the full model."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import logging as bars

from ..checkpoint.local_shards import LocalShard, read_part
from ..checkpoint.rng import seed_all
from ..checkpoint.safetensors_io import TensorFiles
from ..checkpoint.storage import LocalStore
from ..checkpoint.tensor_slices import TensorSlice
from ..config import ModelConfig
from ..errors import CheckpointError, ModelError
from ..model_types import HEAD_PREFIX, LM
from ..torch_private import persistent_buffers, replace_tensor
from .lora import init_adapter
from .model import HFModel
from .model_path import resolve_folder
from .names import hf_name

MEAN_ROWS = 4096
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OTHER_HEADS = ("score.", "classifier.")
"""The name prefixes of heads in transformers models that are not language models."""


_CONVOLUTION = re.compile(r"\b([qkv])_conv1d\.")


class WeightFolder:
    """The tensors of a Hugging Face folder, under canonical names.

    Args:
        folder: The folder with `model.safetensors`, or with an index and its files.
        canonical: A function that converts a name in the folder to the name in the model's layout.
        files: The names of the files, for a folder without an index; None takes them from the index.

    Raises:
        ModelError: There are no safetensors files, or a file is missing or damaged.
    """

    def __init__(self, folder: Path, canonical: Callable[[str], str], files: Sequence[str] | None = None) -> None:
        self.folder = folder
        self._files = TensorFiles(LocalStore(folder, links=True))
        index = folder / INDEX
        if files is not None:
            stored = self._keys_of(files)
        elif index.is_file():
            stored = json.loads(index.read_text())["weight_map"]
        elif (folder / SINGLE).is_file():
            stored = dict.fromkeys(self._files.arrays(SINGLE), SINGLE)
        else:
            raise ModelError(
                f"model.path={folder} has neither {SINGLE} nor {INDEX}; convert its weights to "
                "safetensors, or set model.init=random"
            )
        for file in sorted(set(stored.values())):
            # An index may come from elsewhere, and must not lead outside the folder.
            if Path(file).name != file or not (folder / file).is_file():
                raise ModelError(f"{index} names {file!r}, which is not in the folder; the model is incomplete")
        self._where = {canonical(key): (file, key) for key, file in stored.items()}

    @classmethod
    def of_files(cls, files: Sequence[str | Path], canonical: Callable[[str], str]) -> Self:
        """Return the tensors of some files, which are in one folder.

        Raises:
            ModelError: There are no files, they are in several folders, or one is missing or damaged.
        """
        folders = {Path(file).parent for file in files}
        if len(folders) != 1:
            raise ModelError(f"{len(files)} safetensors files in {len(folders)} folders; give all files of one folder")
        return cls(folders.pop(), canonical, [Path(file).name for file in files])

    def _keys_of(self, files: Sequence[str]) -> dict[str, str]:
        keys_by_name: dict[str, str] = {}
        for file in files:
            try:
                keys = self._files.arrays(file)
            except (CheckpointError, OSError) as e:
                raise ModelError(f"{self.folder / file} cannot be read: {e}") from e
            for key in keys:
                if key in keys_by_name:
                    raise ModelError(f"{key} is in {keys_by_name[key]} and in {file}; the files do not belong together")
                keys_by_name[key] = file
        return keys_by_name

    @property
    def names(self) -> list[str]:
        """The canonical names of all tensors."""
        return list(self._where)

    @property
    def places(self) -> list[tuple[str, str]]:
        """The file and key of all tensors."""
        return list(self._where.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by canonical name."""
        return {name: self._files.array(file, key).shape for name, (file, key) in self._where.items()}

    def find(self, name: str, prefix: str) -> tuple[str, str] | None:
        """Return the file and key of a tensor, or None. In a folder saved from a bare backbone, names lack the backbone's prefix."""
        return self._where.get(name) or self._where.get(name.removeprefix(f"{prefix}."))

    def fill(self, piece: LocalShard, at: tuple[str, str], *, grown: bool = False) -> None:
        """Read the slice that a local shard needs.

        Args:
            piece: The local shard to fill.
            at: The file and key of the tensor.
            grown: Whether the tensor may have more rows than in the file; these become the mean of the rows in the file.

        Raises:
            ModelError: The tensor has another shape, or values that are not finite.
        """
        file, key = at
        try:
            shape = self._files.array(file, key).shape
        except CheckpointError as e:
            raise ModelError(str(e)) from e
        if piece.transposed and shape != piece.shape and shape == piece.as_in_memory().shape:
            # The order in which transformers saves the tensor; it reads both orders.
            piece = piece.as_in_memory()
        tensor_slice = TensorSlice(piece.offset, tuple(piece.data.shape))
        # A different shape is accepted in two cases: the vocabulary has grown, so that only the first `rows` rows are
        # in the file, or a convolution is stored in parts of equal size.
        rows = total = len(piece.data) if piece.data.dim() else 1
        if grown and shape[1:] == piece.shape[1:] and shape[0] < piece.shape[0]:
            rows = min(rows, max(0, shape[0] - piece.offset[0]))
            tensor_slice = TensorSlice(piece.offset, (rows, *piece.data.shape[1:]))
        elif shape != piece.shape and (parts := self._equal_parts(key, piece.shape)):
            self._fill_from_parts(piece, parts)
            return
        elif shape != piece.shape:
            raise ModelError(
                f"{key} is {list(shape)} in {self.folder / file}, but {list(piece.shape)} according to "
                f"{'model.head' if piece.name.startswith(HEAD_PREFIX) else 'config.json'}; they do not belong together"
            )
        with torch.no_grad():
            target = piece.data[:rows] if piece.data.dim() else piece.data
            if target.numel():
                read_part(self._files, file, key, tensor_slice, target)
            if not _finite(target):
                raise ModelError(
                    f"{key} in {self.folder / file} has values that are not finite (NaN or infinity); the weights are damaged"
                )
            if rows < total:
                mean = self._mean_row(file, key, shape)
                piece.data[rows:] = mean[
                    tuple(slice(o, o + n) for o, n in zip(piece.offset[1:], piece.data.shape[1:], strict=True))
                ]

    def _equal_parts(self, key: str, shape: tuple[int, ...]) -> list[tuple[str, str, int]]:
        """Return file, key and rows of the convolutions of queries, keys and values, if they are stored in parts of equal size.

        transformers 5.23 stores one convolution of all three this way (OLMo-Hybrid), regardless of the sizes of the three, and joins the
        parts when it loads them.
        """
        match = _CONVOLUTION.search(key)
        if match is None:
            return []
        keys = [f"{key[: match.start(1)]}{letter}{key[match.end(1) :]}" for letter in "qkv"]
        at = {stored: file for file, stored in self._where.values()}
        if any(other not in at for other in keys):
            return []
        parts = [(at[other], other, self._files.array(at[other], other).shape[0]) for other in keys]
        rows = [count for _, _, count in parts]
        cut = [len(part) for part in torch.empty(sum(rows)).chunk(3)]
        # Queries and keys have the same size.
        fits = sum(rows) > 2 * shape[0] if match[1] != "v" else sum(rows) > shape[0] and (sum(rows) - shape[0]) % 2 == 0
        return parts if rows == cut and fits else []

    def _fill_from_parts(self, piece: LocalShard, parts: Sequence[tuple[str, str, int]]) -> None:
        total, rows = sum(count for _, _, count in parts), piece.shape[0]
        letter = _CONVOLUTION.search(piece.name)
        assert letter is not None
        # The first row of the piece in the concatenation of all parts, each of which then contributes its rows.
        first = {"q": 0, "k": rows, "v": total - rows}[letter[1]] + piece.offset[0]
        end, at = first + len(piece.data), 0
        for file, key, count in parts:
            start, stop = max(first, at), min(end, at + count)
            if start < stop:
                target = piece.data[start - first : stop - first]
                inner = tuple(target.shape[1:])
                box = TensorSlice((start - at, *piece.offset[1:]), (stop - start, *inner))
                read_part(self._files, file, key, box, target)
                if not _finite(target):
                    raise ModelError(
                        f"{key} in {self.folder / file} has values that are not finite (NaN or infinity); the weights are damaged"
                    )
            at += count

    def fill_all(self, pieces: Iterable[LocalShard], prefix: str) -> list[str]:
        """Read the slices that local shards need; return the names of those that are not in the folder.

        Args:
            pieces: The local shards to fill.
            prefix: The prefix of the backbone's names.

        Raises:
            ModelError: A tensor has another shape, or values that are not finite.
        """
        missing = []
        for piece in pieces:
            at = self.find(piece.name, prefix)
            if at is None:
                missing.append(piece.name)
            else:
                self.fill(piece, at)
        return missing

    def _mean_row(self, file: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """Return the mean of a tensor's rows, the initial value of new tokens (Hewitt 2021, "Initializing new word embeddings")."""
        # In float64, because a float32 sum over a whole vocabulary loses digits; in blocks, so that only a part of
        # the matrix is held in it.
        total = torch.zeros(shape[1:], dtype=torch.float64)
        for start in range(0, shape[0], MEAN_ROWS):
            rows = min(MEAN_ROWS, shape[0] - start)
            part = torch.empty(rows, *shape[1:], dtype=torch.float64)
            read_part(self._files, file, key, TensorSlice((start, *(0 for _ in shape[1:])), tuple(part.shape)), part)
            total += part.sum(0)
        return total / shape[0]


def stored_names(path: str) -> frozenset[str]:
    """Return the names of the tensors in a model's folder, as stored there.

    Raises:
        ModelError: There are no safetensors files.
    """
    return frozenset(WeightFolder(resolve_folder(path), str).names)


def stored_weights(path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's folder under their names there, file by file. They are views of the files.

    Raises:
        ModelError: There are no safetensors files, or one is damaged.
    """
    folder = WeightFolder(resolve_folder(path), str)
    keys_by_file: dict[str, list[str]] = {}
    for file, key in folder.places:
        keys_by_file.setdefault(file, []).append(key)
    for file, keys in sorted(keys_by_file.items()):
        try:
            with safe_open(folder.folder / file, framework="pt") as stored:
                for key in keys:
                    yield key, stored.get_tensor(key)
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{folder.folder / file} cannot be read: {e}; the model is damaged") from e


def check_head(names: Collection[str], model: ModelConfig) -> None:
    """Check that the settings do not drop a folder's head.

    Args:
        names: The names of the tensors in the folder.
        model: The model settings.

    Raises:
        ModelError: It is a reward model or another classifier, but the settings request a language model.
    """
    if model.head == LM and (lost := sorted(name for name in names if name.startswith(OTHER_HEADS))):
        raise ModelError(
            f"model.path={model.path} is a reward model or another classifier (it has {lost[0]}); as a language model "
            "(model.head=lm) it would lose that head. Use a language model here; this one needs the model.head that it was trained with, "
            "which is value for reward models and critics"
        )


def check_stored_head(model: ModelConfig) -> None:
    """Run `check_head` on a local folder that has weights. Reads only names.

    Raises:
        ModelError: See `check_head`.
    """
    folder = Path(model.path)
    if model.init == "weights" and any((folder / name).is_file() for name in (INDEX, SINGLE)):
        check_head(stored_names(model.path), model)


def _finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. A scalar may be infinite, as the bounds of clipping layers are.

    The sum is enough, because NaN and infinity propagate to it; testing each value would temporarily double the memory.
    """
    if not tensor.dim():
        return not math.isnan(float(tensor))
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return math.isfinite(float(tensor.sum(dtype=wide)))


def load_weights(
    local_shards: Iterable[LocalShard],
    weights: WeightFolder,
    prefix: str,
    *,
    optional: Callable[[str], bool],
    grown: Collection[str] = (),
) -> set[str]:
    """Fill this rank's local shards from a folder.

    Args:
        local_shards: The local shards of the values, as views.
        weights: The folder of the weights.
        prefix: The prefix of the backbone's names.
        optional: A function that returns whether a tensor may be missing, such as that of a new head or a new adapter.
        grown: The names of the tensors that may have more rows than in the file, for added tokens.

    Returns:
        The names of the optional tensors that were missing.

    Raises:
        ModelError: Required tensors are missing.
    """
    missing, fresh = [], set()
    for shard in local_shards:
        at = weights.find(shard.name, prefix)
        if at is not None:
            weights.fill(shard, at, grown=shard.name in grown)
        elif optional(shard.name):
            fresh.add(shard.name)
        else:
            missing.append(shard.name)
    # A head of another type has other names: its tensors would count as new, and be drawn at random.
    heads = sorted(name for name in weights.names if name.startswith(HEAD_PREFIX))
    if heads and (new := sorted(name for name in fresh if name.startswith(HEAD_PREFIX))):
        raise ModelError(
            f"model.path={weights.folder} has a different head than model.head: it has {', '.join(heads[:3])} instead of {new[0]}; set "
            "model.head and model.head_shape to what it was trained with"
        )
    if missing:
        raise ModelError(
            f"model.path={weights.folder} lacks {len(missing)} tensors that config.json requires, including "
            f"{', '.join(missing[:3])}; the folder and the config do not belong together"
        )
    return fresh


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers from drawing a progress bar while it loads weights, because every process of a group would draw one."""
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()


def init_random(meta_model: HFModel, seed: int, is_needed: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yield random weights that depend only on the seed and the names: they are equal in every layout and on every engine.

    One module at a time is materialized in full on the CPU and initialized by the family's own `_init_weights`.

    Args:
        meta_model: The model on the meta device.
        seed: The value of `engine.seed`.
        is_needed: A function that returns whether to draw a parameter, given its name in `meta_model`.

    Yields:
        The name in `meta_model` and the tensor.
    """
    initial = _initial_head(meta_model, seed)
    for module_name, module in meta_model.named_modules():
        tensors = [*module.named_parameters(recurse=False), *persistent_buffers(module)]
        names = {n: f"{module_name}.{n}" if module_name else n for n, _ in tensors}
        chosen = [n for n, _ in tensors if is_needed(names[n])]
        if not chosen:
            continue
        meta = {n: t for n, t in tensors if t.is_meta}
        with torch.random.fork_rng(devices=[]):
            for n, t in meta.items():
                real = initial.get(names[n], torch.zeros(t.shape, dtype=t.dtype))
                replace_tensor(module, n, nn.Parameter(real, requires_grad=False) if isinstance(t, nn.Parameter) else real)
            # A seed for each module, so that a rank that needs only some modules draws the same numbers for them.
            digest = hashlib.sha256(hf_name(f"{module_name}.").name.encode()).digest()
            seed_torch(seed, digest)
            if ".lora_" in names[chosen[0]]:
                for n in chosen:
                    init_adapter(names[n], getattr(module, n))
            else:
                meta_model.lm._init_weights(module)
        for n in chosen:
            yield names[n], getattr(module, n).detach()
        # Back to the meta device, so that at most one module has memory at a time.
        for n, t in meta.items():
            replace_tensor(module, n, t)


def _initial_head(meta_model: HFModel, seed: int) -> dict[str, Tensor]:
    """Return the initial parameters of a head of another type, by name in the model."""
    if meta_model.head is None:
        return {}
    with torch.random.fork_rng(devices=[]):
        seed_torch(seed, hashlib.sha256(HEAD_PREFIX.encode()).digest())
        module = meta_model.head.module(meta_model.lm.config.get_text_config().hidden_size, meta_model.lm.dtype)
    return {f"{HEAD_PREFIX}{name}": parameter.detach() for name, parameter in module.named_parameters()}


def seed_torch(seed: int, digest: bytes) -> None:
    """Seed torch's CPU generator from a seed and the digest of a name."""
    torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(digest + str(seed).encode()).digest()[:7], "big"))


def seed_ranks(seed: int, rank: int) -> None:
    """Seed the generators for dropout, differently on each rank, so that ranks drop different elements."""
    seed_all(seed, rank)
