"""Learning from preferences: the policy's loss, and the reference that it is compared with."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...engine.base import BaseEngine
from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...workers.losses.preference import BASELINE, KTOLoss, PreferenceLoss
from ...workers.losses.sequences import REFERENCE
from ..config.methods import ReferenceConfig
from ..config.runs import DPOConfig
from ..data.dataset import Dataset
from ..data.encode import Kind
from ..data.loader import GlobalBatch
from ..data.sample import Sample
from .base import PAIR_METRICS, Method
from .reference import Reference, build_reference, check_reference, log_probs_of, mode_of


class PreferenceMethod(Method):
    """DPO and its family.

    Args:
        config: of the run.
    """

    name = "DPO"
    lower_is_better: ClassVar[Mapping[str, bool]] = PAIR_METRICS

    def __init__(self, config: DPOConfig) -> None:
        super().__init__(config)
        self._config = config
        self.kind: Kind = "unpaired" if config.dpo.loss == "kto" else "pairs"
        self._loss = _loss_of(config)
        self._reference: Reference | None = None

    @property
    def loss(self) -> PreferenceLoss | KTOLoss:
        """As `dpo.loss` says."""
        return self._loss

    def check(self) -> None:
        """As every method; and what a reference cannot be."""
        super().check()
        config = self._config
        if self._loss.needs_reference:
            check_reference(config)
        elif config.reference != ReferenceConfig():
            raise ConfigError(f"reference.* is set with dpo.loss={config.dpo.loss}, which has no reference; unset it")
        if config.dpo.loss == "kto":
            if config.data.batch_size < 2:
                raise ConfigError(
                    f"data.batch_size={config.data.batch_size}: kto compares each answer with another one's of the batch; use at least 2"
                )
            if mode_of(config) == "cached":
                raise ConfigError(
                    "reference.mode=cached with dpo.loss=kto, which asks about answers to other prompts, new ones in every epoch; use model or base"
                )

    def setup(self, engine: BaseEngine, tokenizer: Any, samples: Dataset, held_out: Dataset | None) -> None:
        """Build the reference, or compute what it says."""
        if self._loss.needs_reference:
            every = [samples] if held_out is None else [samples, held_out]
            self._reference = build_reference(self._config, engine, every)

    def batch(self, engine: BaseEngine, drawn: GlobalBatch, *, training: bool) -> PackedBatch:
        """The documents, with what the reference thinks of them."""
        share = drawn.share_of(engine)
        if self._reference is None:
            return share.batch
        told = self._reference.log_probs(drawn, training=training)
        batch = share.batch.with_sequence_fields(**{REFERENCE: told[share.places]})
        if not isinstance(self._loss, KTOLoss):
            return batch
        others = mismatched(drawn, self._longest)
        baseline = torch.zeros(())
        if len(others):
            # z0 of equation 8: the mean over the batch, so that it is the same however the batch is cut.
            apart = log_probs_of(engine, others) - self._reference.log_probs(others)
            baseline = apart.mean().clamp(min=0.0)
        return batch.with_sequence_fields(
            **{BASELINE: torch.full((batch.num_sequences,), float(baseline), dtype=torch.float64)}
        )

    @property
    def _longest(self) -> int:
        sizes = self._config.engine.micro_batch
        multiple = max(self._config.engine.parallel.token_multiple, self._config.reference.parallel.token_multiple)
        least = min(sizes.max_tokens, sizes.infer_max_tokens or sizes.max_tokens)
        return min(least // multiple * multiple, self._config.data.max_length or least)

    @property
    def infers(self) -> bool:
        """Where there is a reference."""
        return self._loss.needs_reference

    @property
    def token_multiple(self) -> int:
        """Of the reference, where it has a layout of its own."""
        return self._config.reference.parallel.token_multiple

    def close(self) -> None:
        """Free the reference."""
        if self._reference is not None:
            self._reference.close()


def mismatched(drawn: GlobalBatch, longest: int) -> GlobalBatch:
    """Each prompt of a batch with the answer to another one, the nearest before it: what KTO measures the distance to the reference
    by. A batch that asks but one question has no such answers, and gives none.

    Args:
        drawn: single answers.
        longest: tokens of a document; an answer is cut where it would exceed it.
    """
    documents = [drawn.read(place) for place in range(len(drawn))]
    prompts = [tuple(document.ids[: _begin(document)]) for document in documents]
    found = []
    for i, document in enumerate(documents):
        # The two sides of a pair that was taken apart stand beside each other.
        other = next((documents[i - k] for k in range(1, len(documents)) if prompts[i - k] != prompts[i]), None)
        if other is None:
            continue
        prompt, answer = (_begin(document), _begin(other))
        ids = [*document.ids[:prompt], *other.ids[answer:]][:longest]
        supervised = ([False] * prompt + list(other.supervised[answer:]))[:longest]
        found.append(Sample(f"{document.name} with the answer of {other.name}", ids, supervised))
    return GlobalBatch(lengths=[len(s.ids) for s in found], read=lambda place: found[place])


def _begin(sample: Sample) -> int:
    """Where the answer begins."""
    return list(sample.supervised).index(True)


def _loss_of(config: DPOConfig) -> PreferenceLoss | KTOLoss:
    asked = config.dpo
    try:
        if asked.loss == "kto":
            return KTOLoss(
                beta=asked.beta, desirable_weight=asked.desirable_weight, undesirable_weight=asked.undesirable_weight
            )
        return PreferenceLoss(
            kind=asked.loss,
            beta=asked.beta,
            label_smoothing=asked.label_smoothing,
            gamma=asked.gamma,
            length_normalize=asked.length_normalize,
            sft_weight=asked.sft_weight,
        )
    except ConfigError as e:
        raise ConfigError(f"dpo.{e}") from e
