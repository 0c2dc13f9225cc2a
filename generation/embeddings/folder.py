"""The embedding settings of a model's folder, from its sentence-transformers files."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.errors import ModelError
from .config import Pooling

_POOLINGS: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_ORDER = re.compile(r"Transformer Pooling( Dense)*( Normalize)?")
_ACTIVATIONS = ("Identity", "Tanh")


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after the pooling.

    Args:
        folder: The folder with its weights.
        activation: The activation after it: `Identity` or `Tanh`.
        bias: Whether it has a bias.
    """

    folder: Path
    activation: str
    bias: bool


@dataclass(frozen=True, kw_only=True)
class EmbeddingFolder:
    """The embedding settings of a folder.

    Args:
        model: The folder of the transformers model.
        pooling: The pooling; None if not specified.
        normalize: Whether embeddings are normalized; None if not specified.
        dense: The linear layers, in order.
        max_tokens: The number of tokens to which texts are truncated; None if not specified.
        prompt: The text that is prepended to every text.
    """

    model: Path
    pooling: Pooling | None = None
    normalize: bool | None = None
    dense: tuple[DenseLayer, ...] = ()
    max_tokens: int | None = None
    prompt: str = ""


def read_folder(folder: Path) -> EmbeddingFolder:
    """Read the files of sentence-transformers in a folder, if there are any.

    Raises:
        ModelError: A file is damaged, or requires something that is not supported; the message names it.
    """
    if not (folder / "modules.json").is_file():
        return EmbeddingFolder(model=folder)
    model, pooling, normalize, dense = folder, None, False, []
    kinds: list[str] = []
    prompts = _read(folder / "config_sentence_transformers.json", {})
    prompt = _prompt(folder, prompts)
    for module in sorted(_modules(folder), key=lambda module: module["idx"]):
        # Classes have moved between modules of the library; their names have not.
        kind, place = str(module["type"]).rpartition(".")[2], folder / str(module["path"])
        settings = _read(place / "config.json", {}) if kind != "Transformer" else {}
        kinds.append(kind)
        if kind == "Transformer":
            model = place
        elif kind == "Pooling":
            pooling = _pooling(place, settings)
            if prompt and not settings.get("include_prompt", True):
                raise ModelError(f"{place}/config.json: include_prompt=false with a default prompt is not supported")
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            # The defaults are those of sentence-transformers: a layer has a bias and Tanh, and the prompt is part of
            # the pooling.
            activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
            if activation not in _ACTIVATIONS:
                raise ModelError(
                    f"{place}/config.json: the activation {activation} is not supported; only {', '.join(_ACTIVATIONS)}"
                )
            dense.append(DenseLayer(place, activation, bool(settings.get("bias", True))))
        else:
            raise ModelError(
                f"{folder}/modules.json: a module of type {module['type']} is not supported; only Transformer, Pooling, Dense, "
                "Normalize"
            )
    # In another order, the same modules would compute something else.
    if not _ORDER.fullmatch(" ".join(kinds)):
        raise ModelError(
            f"{folder}/modules.json has the modules {', '.join(kinds) or 'none'}; supported are Transformer, Pooling, any number of "
            "Dense, and Normalize, in this order"
        )
    sentence = _read(model / "sentence_bert_config.json", {})
    limit = sentence.get("max_seq_length")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ModelError(f"{model}/sentence_bert_config.json: max_seq_length={limit!r} is not a number of tokens")
    if sentence.get("do_lower_case"):
        raise ModelError(
            f"{model}/sentence_bert_config.json: do_lower_case=true is not supported; use a tokenizer that does so"
        )
    return EmbeddingFolder(
        model=model, pooling=pooling, normalize=normalize, dense=tuple(dense), max_tokens=limit, prompt=prompt
    )


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = _read(folder / "modules.json", [])
    needed = {"idx", "path", "type"}
    if not isinstance(modules, list) or not all(
        isinstance(one, dict) and needed <= one.keys() and isinstance(one["idx"], int) for one in modules
    ):
        raise ModelError(f"{folder}/modules.json is not a list of modules with idx, path and type; the file is damaged")
    for module in modules:
        # The folder may be a download: its files must not make this process read others.
        if not (folder / str(module["path"])).resolve().is_relative_to(folder.resolve()):
            raise ModelError(f"{folder}/modules.json names {module['path']!r}, which is outside of the folder")
    return modules


def _pooling(place: Path, settings: dict[str, Any]) -> Pooling:
    modes = settings.get("pooling_mode")
    if modes is None:
        # Older versions wrote one boolean for each mode. Several at once would be concatenated, which is refused below.
        modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{place}/config.json: the pooling {', '.join(map(str, modes)) or 'none'} is not supported; only one of last token, "
            "mean and cls"
        )
    return _POOLINGS[modes[0]]


def _prompt(folder: Path, settings: dict[str, Any]) -> str:
    name = settings.get("default_prompt_name")
    if name is None:
        return ""
    prompts = settings.get("prompts") or {}
    if name not in prompts:
        raise ModelError(f"{folder}/config_sentence_transformers.json: default_prompt_name={name!r} is not among its prompts")
    return str(prompts[name])


def _read(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} cannot be read: {e}; the file is damaged") from e
    if isinstance(default, dict) and not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; the file is damaged")
    return content
