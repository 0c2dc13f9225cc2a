"""Adapters that are trained side by side, and plain transformers with peft that they are compared with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.adapters.config import AdapterConfig
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.call_trainer import CallTrainer, TrainingCall
from drivetrain.engine.config import OptimConfig
from drivetrain.engine.hf.lora import as_peft_stores
from drivetrain.engine.hf.names import expert_factor
from drivetrain.engine.packing.batch import PackedBatch, media_fields
from drivetrain.engine.packing.microbatch import balance
from drivetrain.losses.token_sums import TokenSumLoss
from helpers.engines import build

Document = dict[str, Any]
"""The lists `tokens`, `targets` and, by the name of the field, what a loss reads, all of one length; and the items of `media`, if any."""
MEDIA = "media"
ADAM = OptimConfig(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=1.0)
ALL = ("attention", "mlp", "unembedding")


def bank_engine(folder: Path | str, adapters: int = 8, **settings: Any) -> BaseEngine:
    return build(folder, model={"max_adapters": adapters}, optim=None, **settings)


def documents(
    random: Random, count: int, loss: str = "cross_entropy", longest: int = 40, vocabulary: int = 250, targets: int = 0
) -> list[Document]:
    """Documents with targets of any kind, several of each token unless `targets` is 0, weights of any sign, and a few tokens without a weight."""
    result: list[Document] = []
    for _ in range(count):
        length = random.choice((1, 2, 15, 16, 17, longest))

        def filled(draw: Callable[[], Any], length: int = length) -> list[Any]:
            return [[draw() for _ in range(targets)] if targets else draw() for _ in range(length)]

        document: Document = {
            "tokens": [random.randrange(vocabulary) for _ in range(length)],
            "targets": filled(lambda: random.randrange(vocabulary)),
        }
        if loss == "cross_entropy":
            document["loss_weights"] = filled(lambda: random.choice((0.0, 1.0, 0.25, -0.5)))
        else:
            document["old_log_probs"] = filled(lambda: -6 + random.random())
            document["advantages"] = filled(lambda: random.choice((0.0, 1.0, -0.7)))
        if loss == "gspo":
            document["sequence_ratio_mask"] = [float(random.random() < 0.8) for _ in range(length)]
        result.append(document)
    return result


def packed(documents: Sequence[Document]) -> PackedBatch:
    lengths = [len(document["tokens"]) for document in documents]

    def flat(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for document in documents for value in document[name]], dtype=dtype)

    fields = [name for name in documents[0] if name not in ("tokens", "targets", MEDIA)]
    targets = flat("targets", torch.int64)
    several = {"targets": targets} if targets.dim() == 2 else {}
    return PackedBatch(
        input_ids=flat("tokens", torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        labels=targets[:, 0] if several else targets,
        token_fields={**{name: flat(name, torch.float32) for name in fields}, **several},
        media=media_fields([document.get(MEDIA, ()) for document in documents]),
        free_labels=True,
    )


def call(
    adapter: str | None, documents: Sequence[Document] | None, loss: str = "cross_entropy", *, forward_only: bool = False
) -> TrainingCall:
    batch = packed(documents) if documents else None
    return TrainingCall(adapter=adapter, batch=batch, loss=TokenSumLoss(loss), forward_only=forward_only)


class PlainModel:
    """A model of plain transformers in float64, trained document by document.

    Args:
        folder: The model.
    """

    def __init__(self, folder: Path | str) -> None:
        torch.manual_seed(0)
        self.model = self.load(folder)
        # The model's own dropout has no place in the comparison.
        self.model.eval()
        self._optimizer: torch.optim.AdamW | None = None

    def load(self, folder: Path | str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )

    def logits(self, document: Document) -> Tensor:
        logits: Tensor = self.model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0]
        return logits

    def trained(self) -> list[tuple[torch.nn.Parameter, bool]]:
        """The parameters that are trained, and whether weight decay applies to each."""
        return [(parameter, parameter.dim() > 1) for parameter in self.model.parameters()]

    def forward_backward(self, documents: Sequence[Document], loss: str) -> tuple[float, list[Tensor]]:
        """Add the gradients of a call; return its loss and the log-probabilities of each document."""
        total, found = 0.0, []
        for document in documents:
            targets = torch.tensor(document["targets"])
            p = (
                torch.log_softmax(self.logits(document).double(), -1)
                .gather(1, targets.view(len(targets), -1))
                .view(targets.shape)
            )
            fields = {k: torch.tensor(v, dtype=torch.float64) for k, v in document.items() if k != MEDIA}
            value = plain_loss(loss, p, fields)
            value.backward()
            total += float(value.detach())
            found.append(p.detach())
        return total, found

    def step(self, optim: OptimConfig) -> float:
        trained = self.trained()
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(
                [{"params": [p for p, d in trained if d == decayed]} for decayed in (True, False)]
            )
        for group, decays in zip(self._optimizer.param_groups, (True, False), strict=True):
            group.update(lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay if decays else 0.0)
        for parameter, _ in trained:
            # A step without gradients is one with zeros.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        most = float("inf") if optim.clip_grad_norm is None else optim.clip_grad_norm
        norm = torch.nn.utils.clip_grad_norm_([parameter for parameter, _ in trained], most)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


class PlainAdapter(PlainModel):
    """An adapter of plain transformers and peft in float64, trained document by document.

    Args:
        folder: The model.
        trainer: A trainer with an adapter of the same settings, whose factors it begins with.
        name: The name of that adapter.
    """

    def __init__(self, folder: Path | str, trainer: AdapterTrainer, name: str) -> None:
        super().__init__(folder)
        slot = trainer.bank[name]
        adapted = [layer for layer, factor, kind, _ in slot.tensors() if kind == "value" and factor == "down"]
        config = PeftLoraConfig(
            r=slot.config.rank,
            lora_alpha=slot.config.alpha,  # type: ignore[arg-type]
            target_modules=[layer for layer in adapted if ".experts." not in layer],
            target_parameters=[layer for layer in adapted if ".experts." in layer],
            lora_dropout=0.0,
        )
        self.model = get_peft_model(self.model, config)
        self.model.eval()
        self.parameters: dict[tuple[str, str], torch.nn.Parameter] = {}
        for layer, factor, kind, value in slot.tensors():
            if kind != "value":
                continue
            name_of = {"down": "lora_A", "up": "lora_B"}[factor]
            stored = f"base_model.model.{layer}.{name_of}.weight"
            if ".experts." in layer:
                experts, _, matrix = layer.rpartition(".")
                stored = expert_factor(experts, matrix, name_of)
            parameter = self.model.get_parameter(stored.replace(".weight", ".default.weight"))
            with torch.no_grad():
                parameter.copy_(as_peft_stores(stored, value))
            self.parameters[layer, factor] = parameter

    def trained(self) -> list[tuple[torch.nn.Parameter, bool]]:
        return [(parameter, True) for parameter in self.parameters.values()]


def plain_loss(name: str, p: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    """The loss of one document by the published formulas, written once more."""
    if name == "cross_entropy":
        return -(x["loss_weights"] * p).sum()
    a, q = x["advantages"], x["old_log_probs"]
    if name == "gspo":
        mask = x["sequence_ratio_mask"]
        s = ((((p - q).detach() * mask).sum() / max(float(mask.sum()), 1.0)) + p - p.detach()).exp()
        return -torch.minimum(s * a, s.clamp(0.8, 1.2) * a).sum()
    r = (p - q).exp()
    return {
        "importance_sampling": lambda: -(r * a).sum(),
        "ppo": lambda: -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum(),
        "cispo": lambda: -(r.clamp(0.0, 4.0).detach() * p * a).sum(),
        "dro": lambda: -(p * a - 0.05 / 2 * (p - q) ** 2).sum(),
    }[name]()


def config(rank: int = 4, targets: Sequence[str] = ("attention", "mlp"), seed: int = 0) -> AdapterConfig:
    return AdapterConfig(rank=rank, targets=tuple(targets), seed=seed)


def own_share(trainer: CallTrainer, of_call: list[Document]) -> tuple[list[Document], list[int]]:
    """This rank's documents of a call, and their places in it."""
    topology = trainer.engine.topology
    mine = balance([len(document["tokens"]) for document in of_call], topology.dp_size)[topology.dp_rank]
    return [of_call[i] for i in mine], mine


def worst_difference(trainer: AdapterTrainer, folder: str) -> float:
    """Train two adapters, and each beside plain peft; the largest difference of a loss, a log-probability or a gradient norm.

    Losses and norms are compared in relation to the expected one, where that is more than 1.
    """
    random, worst = Random(3), 0.0
    trainer.create("a", config(4, ALL, 1))
    trainer.create("b", config(2, ("attention",), 2))
    plain = {name: PlainAdapter(folder, trainer, name) for name in ("a", "b")}

    def compare(computed: float, expected: float) -> None:
        nonlocal worst
        worst = max(worst, abs(computed - expected) / max(1.0, abs(expected)))

    for count in (5, 1, 3):
        # A call of one document leaves the other data-parallel ranks without any.
        parts = [
            ("a", "cross_entropy", documents(random, count)),
            ("b", "ppo", documents(random, 1, "ppo")),
            ("b", "cross_entropy", documents(random, count, targets=3)),
            ("a", "importance_sampling", documents(random, 2, "importance_sampling")),
        ]
        shards = [own_share(trainer, batch) for _, _, batch in parts]
        calls = [call(name, mine, loss) for (name, loss, _), (mine, _) in zip(parts, shards, strict=True)]
        results = trainer.forward_backward(calls)
        for (name, loss, batch), (_, mine), result in zip(parts, shards, results, strict=True):
            assert result.error is None, result.error
            expected, log_probs = plain[name].forward_backward(batch, loss)
            compare(result.loss, expected)
            if mine and result.log_probs is not None and trainer.engine.topology.is_last_stage:
                difference = result.log_probs.double() - torch.cat([log_probs[i] for i in mine])
                worst = max(worst, float(difference.abs().max()))
        for name in ("a", "b"):
            compare(trainer.optim_step(name, ADAM).grad_norm, plain[name].step(ADAM))
    # The frozen model is not changed by whose turn it was last.
    document = documents(random, 1)
    (alone,) = trainer.forward_backward([call(None, own_share(trainer, document)[0], forward_only=True)])
    trainer.create("c", config(2, ALL, 3))
    (fresh,) = trainer.forward_backward([call("c", own_share(trainer, document)[0], forward_only=True)])
    # An adapter that has learned nothing adds nothing.
    compare(alone.loss, fresh.loss)
    return worst
