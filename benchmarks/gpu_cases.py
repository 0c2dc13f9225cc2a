"""The cases of the GPU benchmark: models, workloads, settings, and the three parts in which they run."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import Qwen3Config

from drivetrain.engine.config import DType
from drivetrain.engine.loss import Loss
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.losses.preference import PreferenceLoss
from drivetrain.losses.reward import RewardLoss
from drivetrain.losses.sft import SFTLoss

Task = Literal["sft", "dpo", "rm"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the tokens that it trains on.

    Args:
        hidden, intermediate, layers, heads, kv_heads, head_size, vocabulary: The sizes from the model's card.
        tokens: The number of tokens in a micro-batch.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tokens: int

    def config(self) -> Qwen3Config:
        """Return the transformers config."""
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=max(self.tokens, 512),
            tie_word_embeddings=True,
        )


SHAPES = {
    "tiny": Shape(hidden=64, intermediate=192, layers=2, heads=4, kv_heads=2, head_size=16, vocabulary=512, tokens=256),
    "0.6B": Shape(
        hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_size=128, vocabulary=151936, tokens=16384
    ),
    "1.7B": Shape(
        hidden=2048, intermediate=6144, layers=28, heads=16, kv_heads=8, head_size=128, vocabulary=151936, tokens=8192
    ),
    "4B": Shape(
        hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8, head_size=128, vocabulary=151936, tokens=8192
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    Args:
        who: The engine, `bare` for a hand-written loop of the same kernels, or `trl`.
        model: A name in `SHAPES`.
        documents: The number of documents in a micro-batch, all of one length.
        task: The loss.
        recompute: `engine.recompute`.
        compiled: Whether layers are compiled.
        params: The dtype of the parameters; only TRL uses others than float32.
        options: More settings of the engine.
    """

    who: str
    model: str
    documents: int = 1
    task: Task = "sft"
    recompute: str = "none"
    compiled: bool = False
    params: DType = "float32"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def document(self) -> int:
        """The number of tokens in a document."""
        return SHAPES[self.model].tokens // self.documents

    @property
    def name(self) -> str:
        """The name in the table."""
        words = [self.who, self.model, f"{self.documents} x {self.document}", self.task]
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["compiled"] if self.compiled else []
        words += [f"{self.params} parameters"] if self.params != "float32" else []
        return ", ".join([*words, *(f"{k}={v}" for k, v in self.options.items())])


def cases(part: str, model: str) -> list[Case]:
    """Return the cases of a part, the most important first, since there may not be time for all."""
    if part == "fsdp":
        return [
            Case(who="fsdp", model=model, recompute="auto", compiled=True),
            Case(who="bare", model=model),
            Case(who="fsdp", model=model),
            Case(who="fsdp", model=model, recompute="selective", compiled=True),
            Case(who="fsdp", model=model, recompute="full", compiled=True),
            Case(who="fsdp", model=model, recompute="full"),
            Case(who="fsdp", model=model, documents=2, recompute="auto", compiled=True),
            Case(who="fsdp", model=model, documents=8, task="dpo", recompute="auto", compiled=True),
            Case(who="fsdp", model=model, documents=8, task="rm", recompute="auto", compiled=True),
            Case(who="trl", model=model, params="bfloat16"),
        ]
    return [
        Case(who="mcore", model=model, recompute="auto"),
        Case(who="mcore", model=model, recompute="selective"),
        Case(who="mcore", model=model, recompute="full"),
        Case(who="mcore", model=model, documents=2, recompute="auto"),
        Case(who="mcore", model=model, documents=8, task="dpo", recompute="auto"),
        Case(who="mcore", model=model, documents=8, task="rm", recompute="auto"),
    ]


def loss_of(task: Task) -> Loss:
    """Return the loss of a task."""
    losses: dict[str, Loss] = {"sft": SFTLoss(), "dpo": PreferenceLoss(), "rm": RewardLoss()}
    return losses[task]


def batch_of(case: Case, micro_batches: int, seed: int) -> PackedBatch:
    """Return random documents for a step of one rank."""
    g = torch.Generator().manual_seed(seed)
    count, vocabulary = case.documents * micro_batches, SHAPES[case.model].vocabulary
    texts = [torch.randint(0, vocabulary, (case.document,), generator=g).tolist() for _ in range(count)]
    if case.task == "sft":
        return from_lists(texts)
    fields: dict[str, Any] = {"chosen": [1.0, 0.0] * (count // 2)}
    if case.task == "dpo":
        # The sums of random tokens' log-probabilities under an untrained model.
        fields["reference_log_probs"] = [-10.0 * case.document] * count
    return from_lists(texts, sequence_fields=fields, group_ids=[i // 2 for i in range(count)])
