"""Checking and resolving `model.path`."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ..errors import ModelError, first_line

log = logging.getLogger(__name__)

# Samples, because reading all weights of a large model takes minutes.
SAMPLES, SAMPLE_BYTES = 16, 4096
HUB_SECONDS = 10.0
"""The timeout in seconds after which the Hub counts as unreachable."""


def check_model_path(path: str) -> None:
    """Check that a path is a model folder or a Hugging Face name.

    Raises:
        ModelError: It is neither, or the folder is incomplete; the message says what is missing.
    """
    if not path:
        raise ModelError("model.path is not set; set it to a folder with config.json, tokenizer and safetensors files")
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            # What runs have trained comes first: a folder of a demo has its untrained model too.
            nested = [str(p.parent) for of in ("*/hf", "hf", "*") for p in sorted(Path(path).glob(f"{of}/config.json"))]
            nested = list(dict.fromkeys(nested))
            hint = f"; did you mean {' or '.join(nested[:5])}?" if nested else "; use a folder in Hugging Face format"
            raise ModelError(f"model.path={path} has no config.json{hint}")
    elif not _is_hub_name(path):
        raise ModelError(
            f"model.path={path} is not a folder; use a folder with config.json, or a Hugging Face name (org/name)"
        )
    elif not _is_cached(path) and (problem := hub_problem()):
        raise ModelError(
            f"model.path={path}: there is no such folder, no copy in the cache of the Hugging Face Hub, and the Hub cannot be reached from here "
            f"({problem}); check the path, or download the model and give its folder"
        )


def _is_hub_name(path: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    # The library also accepts names without an organization, but such a name is more often a mistyped folder.
    return "/" in path


def _is_cached(path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(path, "config.json"), str)


def hub_problem() -> str | None:
    """Return why the Hugging Face Hub cannot be reached; None if it responds.

    A single request is enough; huggingface_hub would retry for half a minute.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as e:  # raised by the HTTP library, which differs between versions of huggingface_hub
        return first_line(e).rstrip(".")
    return None


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep huggingface_hub from logging each attempt to reach the Hub, because the final failure raises an error anyway."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)


def reason(error: Exception, path: str, what: str) -> str:
    """Describe the problem with a model in one line, in terms of our settings.

    Args:
        error: The error of transformers.
        path: The value of `model.path`.
        what: The description of the problem for errors other than a damaged file, a missing folder or untrusted code.
    """
    text = first_line(error)
    if "trust_remote_code" in str(error):
        return "it contains Python code, which runs only with model.trust_remote_code=true; read the code first"
    if not Path(path).is_dir():
        return (
            "there is no such folder, and the Hugging Face Hub has no such model or cannot be reached from here; check the path, "
            "or download the model and give its folder"
        )
    for file in sorted(Path(path).glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            return f"{file.name} is damaged ({e}); copy it again"
    return f"{what}: {text}"


def fingerprint(path: str) -> str:
    """Return a fingerprint that identifies a model regardless of its location, from file sizes and samples of the weights.

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
                # Evenly spaced, from the first bytes of the file to the last.
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

    # Without weights in other formats, such as `.bin`, which engines do not read.
    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
