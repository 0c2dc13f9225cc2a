"""A warning about rows that the tokenizer cannot read: most of their tokens are its unknown token or its padding token."""

import logging
from collections.abc import Sequence
from random import Random
from typing import Any

from .dataset import TokenDataset
from .sample import Sample

log = logging.getLogger(__name__)

MOST_SAMPLES, MOST_TOKENS = 200, 500_000
"""Sampling ends at either of these numbers."""


def warn_about_unknown_tokens(dataset: TokenDataset, tokenizer: Any, setting: str) -> None:
    """Warn if some of a dataset's rows consist mostly of tokens that stand for text that the tokenizer does not have.

    A bounded number of samples is read, chosen at random, the same ones in every run.

    Args:
        dataset: The samples.
        tokenizer: The tokenizer that made them.
        setting: The setting that names their sources, for the message.
    """
    unknown = _unknown_tokens(tokenizer)
    if not unknown or not len(dataset):
        return
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    checked, tokens, affected = 0, 0, list[tuple[str, float]]()
    # A range is sampled without building a list of all indices. The seed is fixed, so that the warning does not come
    # and go.
    for index in Random(0).sample(range(len(dataset)), min(MOST_SAMPLES, len(dataset))):
        documents = dataset[index]
        checked += 1
        tokens += sum(len(document.ids) for document in documents)
        # A sample counts by its worst document: in a pair, one unreadable side is enough.
        name, share = max(((one.name, _share(one, unknown, ends)) for one in documents), key=lambda pair: pair[1])
        if share > 0.5:
            affected.append((name, share))
        if tokens >= MOST_TOKENS:
            break
    if affected:
        name, share = affected[0]
        of_all = "" if checked == len(dataset) else f" taken at random from {len(dataset)}"
        log.warning(
            "%s: in %d of %d samples%s (%.0f%%), most tokens are %s, with which the tokenizer replaces text that it does not have; for "
            "example, %.0f%% of %s. The model cannot learn that text: use another model, whose tokenizer has it (model.path), or other "
            "columns (data.columns)",
            setting,
            len(affected),
            checked,
            of_all,
            100 * len(affected) / checked,
            " or ".join(repr(token) for token in unknown.values()),
            100 * share,
            name,
        )


def _unknown_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the ids and texts of the tokens that replace text, without those that also begin or end a text."""
    tokens = {tokenizer.unk_token_id: tokenizer.unk_token, tokenizer.pad_token_id: tokenizer.pad_token}
    return {i: str(text) for i, text in tokens.items() if i not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id)}


def _share(document: Sample, unknown: dict[int, str], ends: set[int | None]) -> float:
    """Return the share of unknown tokens in a document or, if it is larger, in the part that is learned."""

    def share(ids: Sequence[int]) -> float:
        # Tokens at the ends stand for no text. In a short document they would lower the share.
        counted = [i for i in ids if i not in ends]
        return sum(i in unknown for i in counted) / max(1, len(counted))

    learned = [i for i, is_learned in zip(document.ids, document.supervised, strict=True) if is_learned]
    # A readable prompt may be much longer than its unreadable completion, and only the completion is learned.
    return max(share(document.ids), share(learned))
