"""Preference learning: the loss of the policy, relative to a reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...engine.base import BaseEngine
from ...engine.errors import ConfigError
from ...engine.loss import Loss
from ...engine.packing.batch import PackedBatch
from ...losses.pairs import matched_quantiles
from ...losses.preference import BASELINE, KTOLoss, PreferenceLoss
from ...losses.sequences import MATCHED, REFERENCE
from ..config.methods import PreferenceConfig, ReferenceConfig
from ..config.runs import DPOConfig
from ..data.dataset import TokenDataset, micro_batch_budget
from ..data.encode import DataKind
from ..data.loader import GlobalBatch
from ..data.sample import MediaSpan, Sample
from .base import PAIR_METRICS, TrainingMethod
from .reference import ReferenceModel, build_reference, check_reference, log_probs_of, resolved_mode


class PreferenceMethod(TrainingMethod):
    """DPO and related methods.

    Args:
        config: The run's settings.
        loss: The loss to minimize, instead of the one that `dpo.loss` names.
    """

    name = "DPO"
    lower_is_better: ClassVar[Mapping[str, bool]] = PAIR_METRICS

    def __init__(self, config: DPOConfig, loss: Loss | None = None) -> None:
        super().__init__(config, loss)
        self._config = config
        self.kind: DataKind = "unpaired" if config.dpo.loss == "kto" else "pairs"
        self._loss: Any = loss or _loss_of(config)
        self._needs_reference = bool(getattr(self._loss, "needs_reference", True))
        self._reference: ReferenceModel | None = None

    @property
    def loss(self) -> Loss:
        """The loss that `dpo.loss` names, or that of a Python program."""
        return self._loss  # type: ignore[no-any-return]

    def check(self) -> None:
        """Check the settings as in the base class, and also those of the loss and the reference. Not collective.

        Raises:
            ConfigError: Settings contradict each other; the message names them.
        """
        super().check()
        config = self._config
        if self._needs_reference:
            check_reference(config)
        elif config.reference != ReferenceConfig():
            raise ConfigError(
                f"reference.* is set with dpo.loss={'+'.join(config.dpo.loss_weights) or config.dpo.loss}, which has no reference; unset it"
            )
        if config.dpo.loss == "kto":
            if config.data.batch_size < 2:
                raise ConfigError(
                    f"data.batch_size={config.data.batch_size}: kto compares each completion with another one in the "
                    "batch; use at least 2"
                )
            if resolved_mode(config) == "cached":
                raise ConfigError(
                    "reference.mode=cached with dpo.loss=kto, which needs the log-probabilities of new prompt-completion "
                    "combinations in every epoch; use model or base"
                )

    def setup(self, engine: BaseEngine, tokenizer: Any, samples: TokenDataset | None, held_out: TokenDataset | None) -> None:
        """Build the reference, or compute its log-probabilities. Collective."""
        if self._needs_reference:
            datasets = [dataset for dataset in (samples, held_out) if dataset is not None]
            self._reference = build_reference(self._config, engine, datasets)

    def batch(self, engine: BaseEngine, global_batch: GlobalBatch, *, training: bool) -> PackedBatch:
        """Return this rank's shard of the documents, with the reference's log-probabilities. Collective."""
        shard = global_batch.shard_of(engine)
        if self._reference is None:
            return shard.batch
        # `[D]`, for all documents of the global batch, on every rank; the shard's positions select its own.
        log_probs = self._reference.log_probs(global_batch, training=training)
        batch = shard.batch.with_sequence_fields(**{REFERENCE: log_probs[shard.positions]})
        if self.kind == "pairs":
            if not getattr(self._loss, "needs_matching", False):
                return batch
            # Ranks among all pairs of the global batch, so that they do not depend on how it is split.
            # Documents alternate between chosen and rejected.
            policy = log_probs_of(engine, global_batch, training=training)
            matched = matched_quantiles(policy[::2] - policy[1::2], log_probs[::2] - log_probs[1::2]).repeat_interleave(2)
            return batch.with_sequence_fields(**{MATCHED: matched[shard.positions]})
        mismatches = mismatched(global_batch, self._longest)
        baseline = torch.zeros(())
        if len(mismatches):
            # z0 of equation 8: the mean over the global batch, so that it does not depend on how the batch is split.
            log_ratios = log_probs_of(engine, mismatches) - self._reference.log_probs(mismatches)
            # A KL divergence is never negative, but this estimate of it may be.
            baseline = log_ratios.mean().clamp(min=0.0)
        return batch.with_sequence_fields(
            **{BASELINE: torch.full((batch.num_sequences,), float(baseline), dtype=torch.float64)}
        )

    @property
    def _longest(self) -> int:
        # These documents go through inference with both models, whose layouts may differ.
        usable, _ = micro_batch_budget(self._config.engine, infers=True, multiple=self.token_multiple)
        return min(usable, self._config.data.max_length or usable)

    @property
    def infers(self) -> bool:
        """Whether there is a reference."""
        return self._needs_reference

    @property
    def token_multiple(self) -> int:
        """The multiple that the reference requires if it has its own layout."""
        return self._config.reference.parallel.token_multiple

    def close(self) -> None:
        """Free the reference."""
        if self._reference is not None:
            self._reference.close()


def mismatched(global_batch: GlobalBatch, longest: int) -> GlobalBatch:
    """Combine each prompt of a batch with the completion of the nearest different prompt before it.

    KTO uses these documents to measure the distance to the reference. If all prompts of the batch are equal, there are none.

    Args:
        global_batch: A global batch of single completions.
        longest: The maximum number of tokens in a document; longer documents are truncated.
    """
    # Every rank reads the whole batch: a mismatched document consists of parts of two, which may be on different ranks.
    documents = [global_batch.read(position) for position in range(len(global_batch))]
    prompts = [_prompt(document) for document in documents]
    mismatches = []
    for i, document in enumerate(documents):
        # The two sides of a pair that was split have the same prompt and are next to each other.
        # `i - k` may be negative, which continues at the end of the batch.
        other = next((documents[i - k] for k in range(1, len(documents)) if prompts[i - k] != prompts[i]), None)
        if other is None:
            continue
        prompt, completion = (_begin(document), _begin(other))
        ids = [*document.ids[:prompt], *other.ids[completion:]][:longest]
        supervised = ([False] * prompt + list(other.supervised[completion:]))[:longest]
        name = f"{document.name} with the completion of {other.name}"
        mismatches.append(Sample(name, ids, supervised, media=prompts[i].media))
    return GlobalBatch(
        lengths=[len(s.ids) for s in mismatches], read=lambda position: mismatches[position], store=global_batch.store
    )


@dataclass(frozen=True)
class _Prompt:
    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...]


def _prompt(sample: Sample) -> _Prompt:
    """Return the part of a sample before the completion, with its media: images of the same size have equal tokens."""
    begin = _begin(sample)
    return _Prompt(tuple(sample.ids[:begin]), tuple(span for span in sample.media if span.last <= begin))


def _begin(sample: Sample) -> int:
    """Return the index of the completion's first token."""
    return list(sample.supervised).index(True)


def preference_loss(settings: PreferenceConfig, temperature: float = 1.0) -> PreferenceLoss:
    """Return the loss over pairs that the settings name.

    Args:
        settings: The settings.
        temperature: The divisor of the logits.

    Raises:
        ConfigError: The settings do not name a loss over pairs, or a number is out of range.
    """
    if settings.loss == "kto":
        raise ConfigError("dpo.loss=kto does not compare pairs of completions; use sigmoid, ipo or hinge")
    try:
        return PreferenceLoss(
            kind=settings.loss,
            loss_weights=dict(settings.loss_weights) or None,
            tau=settings.tau,
            divergence=settings.divergence,
            alpha=settings.alpha,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
            gamma=settings.gamma,
            length_normalize=settings.length_normalize,
            sft_weight=settings.sft_weight,
            temperature=temperature,
        )
    except ConfigError as e:
        raise ConfigError(f"dpo.{e}") from e


def _loss_of(config: DPOConfig) -> PreferenceLoss | KTOLoss:
    settings = config.dpo
    if settings.loss != "kto":
        return preference_loss(settings)
    try:
        return KTOLoss(
            beta=settings.beta, desirable_weight=settings.desirable_weight, undesirable_weight=settings.undesirable_weight
        )
    except ConfigError as e:
        raise ConfigError(f"dpo.{e}") from e
