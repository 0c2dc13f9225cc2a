"""The sources of models to serve: a model, a run, or a checkpoint."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..engine.errors import ConfigError
from ..engine.hf.model_path import check_model_path, resolve_folder

EXPORT = "hf"
"""The folder of a run's exported model."""


@contextmanager
def model_folder(source: str, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield the Hugging Face folder to serve. A checkpoint is merged into a temporary folder.

    Args:
        source: A model folder, a Hub name, the folder of a run, or a checkpoint.
        say: Called with a message before a slow step.

    Raises:
        ConfigError: The source does not exist.
        ModelError: The source is another kind of folder.
        CheckpointError: The checkpoint is damaged.
    """
    path = Path(source)
    # A name on the Hub is owner/name. If the folder before the slash exists here, a mistyped path is more likely.
    if not path.exists() and (source.count("/") != 1 or path.parent.is_dir()):
        raise ConfigError(
            f"{source} does not exist; give a model folder, a run, a checkpoint, or the name of a model on the Hub (owner/name)"
        )
    if (path / "config.json").is_file():
        yield path
    elif (path / EXPORT / "config.json").is_file():
        yield path / EXPORT
    elif (path / "checkpoints").is_dir() or (path / "manifest.json").is_file():
        from .merging import merge

        # It lives as long as the context: the model is read, and may be mapped, from it.
        with tempfile.TemporaryDirectory(prefix="drivetrain-serve-") as folder:
            say(f"merging {source}")
            merge(path, Path(folder) / "model")
            yield Path(folder) / "model"
    else:
        check_model_path(source)
        yield resolve_folder(source)


def is_embedding_model(folder: Path) -> bool:
    """Return whether a folder holds a model that embeds texts, instead of one that generates."""
    if (folder / "modules.json").is_file():
        return True
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    names = config.get("architectures") or [""]
    return not any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names)
