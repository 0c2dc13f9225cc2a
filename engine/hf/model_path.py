"""Checking and resolving `model.path`. Imports no torch."""

import logging
import re
from pathlib import Path

import xxhash

from ..errors import ModelError

log = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 16, 4096

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_model_path(path: str) -> None:
    """Check that a path is a model folder or a Hugging Face name.

    Raises:
        ModelError: It is neither, or the folder is incomplete; the message says what is missing.
    """
    if not path:
        raise ModelError("model.path is not set; set it to a folder with config.json, tokenizer and safetensors files")
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            nested = next((p.parent for p in sorted(Path(path).glob("*/config.json"))), None)
            hint = f"; did you mean {nested}?" if nested else "; use a folder in Hugging Face format"
            raise ModelError(f"model.path={path} has no config.json{hint}")
    elif not _HUB_NAME.fullmatch(path) or path.startswith("."):
        raise ModelError(
            f"model.path={path} is not a folder; use a folder with config.json, or a Hugging Face name (org/name)"
        )


def fingerprint(path: str) -> str:
    """Return a fingerprint that identifies a model wherever its folder is, from file sizes and samples of the weights.

    Args:
        path: The value of `model.path`; a Hub name is its own fingerprint.
    """
    if not Path(path).is_dir():
        return path
    digest = xxhash.xxh3_128()
    for file in sorted(Path(path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as handle:
            for i in range(SAMPLES):
                handle.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()


def resolve_folder(path: str) -> Path:
    """Return the local folder of a model; a Hub name is downloaded with huggingface_hub."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).parent.is_dir() and Path(path).parent != Path():
        log.warning("there is no folder %s; looking for a model of this name on the Hugging Face Hub", path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
