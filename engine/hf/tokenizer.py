"""The tokenizer of a run: the tokenizer of the model folder, with the tokens and the chat template from the settings."""

from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer

from ..config import ModelConfig
from ..errors import ModelError
from .model_path import check_model_path, quiet_hub, reason

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer of a model and apply the settings to it.

    Raises:
        ModelError: There is no usable tokenizer, or the chat template cannot be read.
    """
    path = model.path
    check_model_path(path)
    if Path(path).is_dir() and not any((Path(path) / f).is_file() for f in TOKENIZER_FILES):
        raise ModelError(
            f"model.path={path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy its files next to config.json"
        )
    try:
        with quiet_hub():
            tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as e:  # transformers may raise anything on a damaged file
        raise ModelError(f"model.path={path}: {reason(e, path, 'it has no usable tokenizer')}") from e
    if not tokenizer.is_fast:
        raise ModelError(
            f"model.path={path}: {type(tokenizer).__name__} has no fast version, which is needed to locate tokens in the text"
        )
    if not all(model.added_tokens):
        raise ModelError("model.added_tokens has an empty token; remove it")
    # Tokens that the tokenizer already has, for example from an earlier run, stay unchanged.
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in model.added_tokens], special_tokens=True)
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = Path(model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ModelError(f"model.chat_template={model.chat_template} cannot be read: {e}") from e
    return tokenizer
