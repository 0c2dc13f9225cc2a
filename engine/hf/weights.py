"""Weights for a sharded model: slices read from safetensors, or drawn from the seed. Never a whole model in one process."""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoint.local_shards import LocalShard, read_part
from ..checkpoint.rng import seed_all
from ..checkpoint.safetensors_io import TensorFiles
from ..checkpoint.storage import LocalStore
from ..checkpoint.tensor_slices import TensorSlice
from ..config import ModelConfig
from ..errors import CheckpointError, ModelError
from ..torch_private import persistent_buffers, replace_tensor
from .lora import init_adapter
from .model import HFModel
from .model_path import resolve_folder
from .names import hf_name

MEAN_ROWS = 4096
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OTHER_HEADS = ("score.", "classifier.")
"""What transformers calls the heads of models that are not language models."""


class WeightFolder:
    """The tensors of a Hugging Face folder, under canonical names.

    Args:
        folder: with `model.safetensors`, or an index and its shards.
        canonical: from a name in the folder to the one that the model's layout has for it.

    Raises:
        ModelError: no safetensors files.
    """

    def __init__(self, folder: Path, canonical: Callable[[str], str]) -> None:
        self.folder = folder
        self._files = TensorFiles(LocalStore(folder, links=True))
        index = folder / INDEX
        if index.is_file():
            stored: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (folder / SINGLE).is_file():
            stored = dict.fromkeys(self._files.arrays(SINGLE), SINGLE)
        else:
            raise ModelError(
                f"model.path={folder} has neither {SINGLE} nor {INDEX}; convert its weights to "
                "safetensors, or set model.init=random"
            )
        for file in sorted(set(stored.values())):
            if Path(file).name != file or not (folder / file).is_file():
                raise ModelError(f"{index} names {file!r}, which is not in the folder; the model is incomplete")
        self._where = {canonical(key): (file, key) for key, file in stored.items()}

    @property
    def names(self) -> list[str]:
        """Of all tensors, canonical."""
        return list(self._where)

    def find(self, name: str, prefix: str) -> tuple[str, str] | None:
        """File and key of a tensor; a folder saved from a bare backbone lacks the backbone's prefix."""
        return self._where.get(name) or self._where.get(name.removeprefix(f"{prefix}."))

    def fill(self, piece: LocalShard, at: tuple[str, str], *, grown: bool = False) -> None:
        """Read the slice that a piece needs.

        Args:
            piece: to fill.
            at: file and key.
            grown: the tensor may have more rows than the file's; they become the mean of the file's.

        Raises:
            ModelError: the tensor has another shape, or numbers that are not finite.
        """
        file, key = at
        try:
            shape = self._files.array(file, key).shape
        except CheckpointError as e:
            raise ModelError(str(e)) from e
        box = TensorSlice(piece.offset, tuple(piece.data.shape))
        rows = total = len(piece.data) if piece.data.dim() else 1
        if grown and shape[1:] == piece.shape[1:] and shape[0] < piece.shape[0]:
            rows = min(rows, max(0, shape[0] - piece.offset[0]))
            box = TensorSlice(piece.offset, (rows, *piece.data.shape[1:]))
        elif shape != piece.shape:
            raise ModelError(
                f"{key} is {list(shape)} in {self.folder / file}, but {list(piece.shape)} by config.json; they do not belong together"
            )
        with torch.no_grad():
            target = piece.data[:rows] if piece.data.dim() else piece.data
            if target.numel():
                read_part(self._files, file, key, box, target)
            if not _finite(target):
                raise ModelError(
                    f"{key} in {self.folder / file} has numbers that are not finite (NaN or infinity); the weights are damaged"
                )
            if rows < total:
                mean = self._mean_row(file, key, shape)
                piece.data[rows:] = mean[
                    tuple(slice(o, o + n) for o, n in zip(piece.offset[1:], piece.data.shape[1:], strict=True))
                ]

    def _mean_row(self, file: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """The mean of a tensor's rows: a new token begins as the average one (Hewitt 2021, "Initializing new word embeddings")."""
        total = torch.zeros(shape[1:], dtype=torch.float64)
        for start in range(0, shape[0], MEAN_ROWS):
            rows = min(MEAN_ROWS, shape[0] - start)
            part = torch.empty(rows, *shape[1:], dtype=torch.float64)
            read_part(self._files, file, key, TensorSlice((start, *(0 for _ in shape[1:])), tuple(part.shape)), part)
            total += part.sum(0)
        return total / shape[0]


def stored_names(path: str) -> frozenset[str]:
    """Names of the tensors that a model's folder holds, as it calls them.

    Raises:
        ModelError: no safetensors files.
    """
    return frozenset(WeightFolder(resolve_folder(path), str).names)


def check_head(names: Collection[str], model: ModelConfig) -> None:
    """Refuse a folder whose head the settings would drop.

    Args:
        names: of the tensors in the folder.
        model: settings.

    Raises:
        ModelError: it is a reward model or another classifier, and is to be a language model.
    """
    if model.head == "lm" and (lost := sorted(name for name in names if name.startswith(OTHER_HEADS))):
        raise ModelError(
            f"model.path={model.path} is a reward model or another classifier (it has {lost[0]}), and a language model (model.head=lm) would "
            "be made of it without that head; give a language model. Reward models and critics (model.head=value) take this one"
        )


def check_stored_head(model: ModelConfig) -> None:
    """`check_head` of a local folder that has weights. Reads names alone.

    Raises:
        ModelError: see `check_head`.
    """
    folder = Path(model.path)
    if model.init == "weights" and any((folder / name).is_file() for name in (INDEX, SINGLE)):
        check_head(stored_names(model.path), model)


def _finite(tensor: Tensor) -> bool:
    """Whether all numbers are. By their sum, which NaN and infinity spoil: asking each would double the memory for a moment."""
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return math.isfinite(float(tensor.sum(dtype=wide)))


def load_weights(
    pieces: Iterable[LocalShard],
    weights: WeightFolder,
    prefix: str,
    *,
    optional: Callable[[str], bool],
    grown: Collection[str] = (),
) -> set[str]:
    """Fill this rank's pieces from a folder.

    Args:
        pieces: boxes of values, as views.
        weights: the folder.
        prefix: of the backbone's names.
        optional: whether a tensor may be missing: a new head, a new adapter.
        grown: tensors that may have more rows than the file's, for added tokens.

    Returns:
        names of the optional tensors that were missing.

    Raises:
        ModelError: tensors are missing.
    """
    missing, fresh = [], set()
    for piece in pieces:
        at = weights.find(piece.name, prefix)
        if at is not None:
            weights.fill(piece, at, grown=piece.name in grown)
        elif optional(piece.name):
            fresh.add(piece.name)
        else:
            missing.append(piece.name)
    if missing:
        raise ModelError(
            f"model.path={weights.folder} lacks {len(missing)} tensors that config.json asks for, {', '.join(missing[:3])} "
            "among them; the folder and the config do not belong together"
        )
    return fresh


def init_random(meta_model: HFModel, seed: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Random weights that depend on the seed and on names alone: equal in every layout and on every engine.

    One module at a time is made whole on the CPU and initialised by the family's own `_init_weights`.

    Args:
        meta_model: the model, on the meta device.
        seed: `engine.seed`.
        wanted: whether to draw a parameter, by its name in `meta_model`.

    Yields:
        name in `meta_model`, and the tensor.
    """
    for module_name, module in meta_model.named_modules():
        own = [*module.named_parameters(recurse=False), *persistent_buffers(module)]
        names = {n: f"{module_name}.{n}" if module_name else n for n, _ in own}
        chosen = [n for n, _ in own if wanted(names[n])]
        if not chosen:
            continue
        meta = {n: t for n, t in own if t.is_meta}
        with torch.random.fork_rng(devices=[]):
            for n, t in meta.items():
                real = torch.zeros(t.shape, dtype=t.dtype)
                replace_tensor(module, n, nn.Parameter(real, requires_grad=False) if isinstance(t, nn.Parameter) else real)
            digest = hashlib.sha256(hf_name(f"{module_name}.").name.encode()).digest()
            seed_torch(seed, digest)
            if ".lora_" in names[chosen[0]]:
                for n in chosen:
                    init_adapter(names[n], getattr(module, n))
            else:
                meta_model.lm._init_weights(module)
        for n in chosen:
            yield names[n], getattr(module, n).detach()
        for n, t in meta.items():
            replace_tensor(module, n, t)


def seed_torch(seed: int, digest: bytes) -> None:
    """Seed torch's CPU generator from a seed and a name's digest."""
    torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(digest + str(seed).encode()).digest()[:7], "big"))


def seed_ranks(seed: int, rank: int) -> None:
    """Seed dropout: each rank differently, so that they do not drop alike."""
    seed_all(seed, rank)
