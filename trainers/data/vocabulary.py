"""A check that two models read the same tokens."""

from ...engine.config import ModelConfig
from ...engine.errors import ConfigError, DrivetrainError
from ...engine.hf.config import read_config
from ...engine.hf.tokenizer import load_tokenizer


def check_same_vocabulary(policy: ModelConfig, other: ModelConfig, setting: str) -> None:
    """Check that another model has the tokenizer of the policy.

    Args:
        policy: The policy.
        other: The other model.
        setting: The setting that names the other model, for messages.

    Raises:
        ConfigError: Its tokenizer differs, or it has none.
    """
    try:
        others = load_tokenizer(other)
    except DrivetrainError as e:
        raise ConfigError(f"{setting}={other.path}: {e}") from e
    tokenizer = load_tokenizer(policy)
    policy_vocab, other_vocab = tokenizer.get_vocab(), others.get_vocab()
    if policy_vocab != other_vocab:
        differing = sorted(
            token for token in policy_vocab.keys() | other_vocab.keys() if policy_vocab.get(token) != other_vocab.get(token)
        )
        raise ConfigError(
            f"{setting}={other.path} has a different tokenizer ({len(others)} tokens) than model.path={policy.path} "
            f"({len(tokenizer)}; {len(differing)} differ, for example {differing[0]!r}): the same text would become different tokens; "
            "use a model with the tokenizer of the policy"
        )
    # Embeddings may have more rows than there are tokens, since some models pad them, but not fewer.
    vocab_size = read_config(other).vocab_size
    if vocab_size < len(tokenizer):
        raise ConfigError(
            f"{setting}={other.path} has embeddings for {vocab_size} tokens, but the tokenizer has {len(tokenizer)}; use a model that "
            "covers them all"
        )
