"""What every engine must hold, as checks that any backend can run against itself.

A check gets a `EngineFactory` that builds engines of the backend under test, and raises `ConformanceError` with both numbers. All
ranks run it together.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import BaseEngine
from ..errors import BatchError, BudgetError, ConfigError, NonFiniteError, RemoteError
from ..loss import Loss, LossSums, OutputRequest, TokenOutputs, loss_mask
from ..packing.batch import PackedBatch
from .engine_factory import OPTIM, ConformanceError, EngineFactory, holds, near, raises, weights_of
from .reference import Reference
from .tiny import tiny_documents

LOSS_BOUND, NORM_BOUND = 1e-6, 1e-5
"""Relative, float32, against plain Hugging Face."""
WEIGHT_BOUND = 1e-5
"""Absolute difference of a parameter's elements after the steps, at lr 1e-4."""
RARE = 1e-4
"""Share of a parameter's elements that may be further off, by as much as one step moves them: Adam's first step makes a whole
step of a gradient as small as eps, whose every digit is rounding (which elements those are depends on the processor)."""


@dataclass(frozen=True)
class MeanNLL:
    """Mean negative log-likelihood; `factor` lets a check spoil it."""

    factor: float = 1.0
    request: OutputRequest = OutputRequest(log_probs=True)
    linear: bool = True

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Their number."""
        return {"nll": float(loss_mask(batch).sum())}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Sum over the micro-batch."""
        assert outputs.log_probs is not None
        total = -outputs.log_probs.sum() * self.factor
        return LossSums(terms={"nll": total}, metrics={"nll": (total.detach(), loss_mask(batch).sum())})


def check_reference(bench: EngineFactory) -> None:
    """Loss, gradient norm and parameters over five AdamW steps with clipping, against plain Hugging Face."""
    reference = Reference(bench.folder, OPTIM)
    with bench.engine() as engine:
        for step in range(5):
            documents = tiny_documents(9, seed=step)
            masks = [[i % 3 > 0 for i in range(len(d))] for d in documents]
            mine = bench.indices(engine, documents)
            batch = bench.pack(documents, mine, supervised=[masks[i] for i in mine])
            got = engine.train_batch(batch, MeanNLL())
            want = reference.step(documents, masks)
            near(f"loss of step {step}", got.loss, want.loss, LOSS_BOUND)
            near(f"gradient norm of step {step}", got.grad_norm or math.nan, want.grad_norm, NORM_BOUND)
        weights = weights_of(engine)
        for name, value in reference.weights().items():
            off = (weights[name] - value).abs()
            most, share = float(off.max()), float((off > WEIGHT_BOUND).float().mean())
            holds(
                share <= max(RARE, 1 / off.numel()) and most <= OPTIM.lr,
                f"parameter {name} is off by {most:.1e} after five steps, {100 * share:.2g}% of it by more than {WEIGHT_BOUND}",
            )


def _gradient(
    bench: EngineFactory, documents: Sequence[Sequence[int]], deal: Callable[[int, int], list[int]], max_tokens: int
) -> tuple[float, float]:
    with bench.engine(max_tokens=max_tokens) as engine:
        mine = deal(engine.topology.dp_rank, engine.topology.dp_size)
        result = engine.train_batch(bench.pack(documents, mine), MeanNLL())
        return result.loss, result.grad_norm or math.nan


def check_partition(bench: EngineFactory) -> None:
    """The same numbers for any token budget and any order of the documents."""
    documents = tiny_documents(10, seed=1)

    def deal(rank: int, size: int) -> list[int]:
        return list(range(rank, len(documents), size))

    loss, norm = _gradient(bench, documents, deal, 1024)
    for budget, order in ((64, "as given"), (1024, "reversed")):
        turned = deal if order == "as given" else (lambda rank, size: deal(rank, size)[::-1])
        other_loss, other_norm = _gradient(bench, documents, turned, budget)
        near(f"loss with max_tokens={budget}, order {order}", other_loss, loss, LOSS_BOUND)
        near(f"gradient norm with max_tokens={budget}, order {order}", other_norm, norm, NORM_BOUND)


def check_shares(bench: EngineFactory) -> None:
    """The same numbers for any way to deal documents to ranks, ranks without any included."""
    documents = tiny_documents(8, seed=2)
    want = Reference(bench.folder, OPTIM).step(documents)
    everything = list(range(len(documents)))
    for what, deal in (
        ("dealt in turn", lambda rank, size: everything[rank::size]),
        ("all on the last rank", lambda rank, size: everything if rank == size - 1 else []),
    ):
        loss, norm = _gradient(bench, documents, deal, 64)
        near(f"loss, {what}", loss, want.loss, LOSS_BOUND)
        near(f"gradient norm, {what}", norm, want.grad_norm, NORM_BOUND)


def check_zero_weight(bench: EngineFactory) -> None:
    """A global batch without supervised tokens is an error that names its samples; the engine goes on afterwards."""
    documents = tiny_documents(6, seed=3)
    with bench.engine() as engine:
        mine = bench.indices(engine, documents)
        nothing = bench.pack(documents, mine, supervised=[[False] * len(documents[i]) for i in mine])
        error = raises(BatchError, lambda: engine.train_batch(nothing, MeanNLL()), "a batch of weight zero")
        holds(not mine or "doc " in str(error), f"the error of a batch of weight zero names no sample: {error}")
        result = engine.train_batch(bench.pack(documents, mine), MeanNLL())
        holds(math.isfinite(result.loss), "after a batch of weight zero the engine no longer trains")


def check_budget(bench: EngineFactory) -> None:
    """A document over the budget is an error on every rank, also on those that do not have it."""
    documents = [*tiny_documents(4, seed=4), list(range(3, 103))]
    with bench.engine(max_tokens=64) as engine:
        last = engine.topology.dp_rank == engine.topology.dp_size - 1
        batch = bench.pack(documents, range(5) if last else range(4))
        kinds = BudgetError if last else RemoteError
        error = raises(kinds, lambda: engine.train_batch(batch, MeanNLL()), "a document over the budget")
        for part in ("doc 4", "100", "64"):
            holds(part in str(error), f"the error of a document over the budget does not say {part!r}: {error}")


def check_non_finite(bench: EngineFactory) -> None:
    """raise: an error and untouched parameters; skip: no step, counted. Every rank decides alike."""
    documents = tiny_documents(6, seed=5)

    def spoiled(engine: BaseEngine) -> Loss:
        # One data-parallel rank alone sees the NaN.
        return MeanNLL(factor=math.nan if engine.topology.dp_rank == 0 else 1.0)

    with bench.engine() as engine:
        before = weights_of(engine)
        batch = bench.share(engine, documents)
        raises(NonFiniteError, lambda: engine.train_batch(batch, spoiled(engine)), "a NaN loss under non_finite=raise")
        after = weights_of(engine)
        holds(all(torch.equal(before[n], after[n]) for n in before), "a refused step changed the parameters")
    with bench.engine(non_finite="skip") as engine:
        batch = bench.share(engine, documents)
        clean = engine.train_batch(batch, MeanNLL())
        before = weights_of(engine)
        result = engine.train_batch(batch, spoiled(engine))
        holds(result.skipped and not clean.skipped, "a NaN loss under non_finite=skip was not counted as skipped")
        holds(engine.step == 1, f"a skipped step moved the schedule to step {engine.step}")
        after = weights_of(engine)
        holds(all(torch.equal(before[n], after[n]) for n in before), "a skipped step changed the parameters")
        again = engine.train_batch(batch, MeanNLL())
        holds(math.isfinite(again.loss) and not again.skipped, "after a skipped step the engine no longer trains")


def check_infer(bench: EngineFactory) -> None:
    """Log-probabilities in the caller's order, equal to those of each document alone; entropy within its range."""
    documents = tiny_documents(7, seed=6)
    reference = Reference(bench.folder, OPTIM)
    with bench.engine(max_tokens=32, optim=None) as engine:
        mine = bench.indices(engine, documents)[::-1]
        batch = bench.pack(documents, mine)
        found = engine.infer_batch(batch, OutputRequest(log_probs=True, entropy=True, temperature=0.7))
        every = torch.ones(batch.num_tokens, dtype=torch.bool)
        greedy = engine.infer_batch(batch, OutputRequest(greedy=True), tokens=every)["greedy"]
        for place, i in enumerate(mine):
            start, end = batch.bounds[place], batch.bounds[place + 1]
            want = reference.log_probs(documents[i], temperature=0.7).detach()
            got = found["log_probs"][start : end - 1]
            off = float((got - want).abs().max()) if len(want) else 0.0
            holds(off <= 1e-4, f"log-probabilities of document {i} are off by {off:.1e}")
            holds(
                float(found["log_probs"][end - 1]) == 0.0,
                "the last token of a document has no next token, but a log-probability",
            )
            distribution = torch.log_softmax(reference.logits(documents[i])[:-1] / 0.7, -1)
            entropy = -(distribution.exp() * distribution).sum(-1).detach()
            off = float((found["entropy"][start : end - 1] - entropy).abs().max()) if len(entropy) else 0.0
            holds(off <= 1e-4, f"entropy of document {i} is off by {off:.1e}")
            likeliest = reference.logits(documents[i]).argmax(-1)
            holds(torch.equal(greedy[start:end], likeliest), f"the likeliest tokens of document {i} are others")


def check_weights(bench: EngineFactory) -> None:
    """named_weights yields what the folder holds, bit for bit, as announced by weight_shapes."""
    from safetensors.torch import load_file

    with bench.engine() as engine:
        found = weights_of(engine)
        shapes = engine.weight_shapes()
    stored = {k: v for file in bench.folder.glob("*.safetensors") for k, v in load_file(file).items()}
    holds(list(found) == list(shapes), "named_weights and weight_shapes disagree on names or order")
    holds(set(found) == set(stored), f"named_weights differs from the folder in {sorted(set(found) ^ set(stored))[:4]}")
    for name, value in stored.items():
        holds(torch.equal(found[name], value), f"{name} is not what the folder holds")
        holds(shapes[name] == (value.dtype, tuple(value.shape)), f"weight_shapes is wrong about {name}: {shapes[name]}")


def check_modes(bench: EngineFactory) -> None:
    """Modes do not nest crosswise, and an evaluation leaves no trace."""
    documents = tiny_documents(6, seed=7)
    with bench.engine() as engine:
        batch = bench.share(engine, documents)
        with engine.eval_mode():
            raises(ConfigError, lambda: engine.train_batch(batch, MeanNLL()), "train_batch inside eval_mode")
        evaluated = engine.forward_backward(batch, MeanNLL(), forward_only=True)
        before = weights_of(engine)
        trained = engine.train_batch(batch, MeanNLL())
        near("loss of an evaluation and of the step after it", evaluated.loss, trained.loss, LOSS_BOUND)
        reference = Reference(bench.folder, OPTIM).step(documents)
        near("gradient norm after an evaluation", trained.grad_norm or math.nan, reference.grad_norm, NORM_BOUND)
        changed = weights_of(engine)
        holds(any(not torch.equal(before[n], changed[n]) for n in before), "a step changed no parameter")


def check_accumulation(bench: EngineFactory) -> None:
    """Two forward_backward calls with the total of their weights make the step of one call."""
    documents = tiny_documents(8, seed=8)
    reference = Reference(bench.folder, OPTIM).step(documents)
    total = {"nll": float(sum(len(d) - 1 for d in documents))}
    with bench.engine() as engine, engine.train_mode():
        engine.zero_grad()
        losses = [
            engine.forward_backward(bench.share(engine, half), MeanNLL(), total_weights=total).loss
            for half in (documents[:5], documents[5:])
        ]
        result = engine.optimizer_step()
        near("loss over two calls", sum(losses), reference.loss, LOSS_BOUND)
        near("gradient norm over two calls", result.grad_norm or math.nan, reference.grad_norm, NORM_BOUND)


@dataclass
class FailsOnce:
    """A loss that raises in its second micro-batch."""

    calls: int = 0
    inner: MeanNLL = field(default_factory=MeanNLL)
    linear: bool = False

    @property
    def request(self) -> OutputRequest:
        """Log-probabilities."""
        return self.inner.request

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Supervised tokens."""
        return self.inner.tokens(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Their number."""
        return self.inner.weights(batch)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Raises the second time."""
        self.calls += 1
        if self.calls == 2:
            raise KeyError("a field that this micro-batch lacks")
        return self.inner(outputs, batch)


def check_aborted(bench: EngineFactory) -> None:
    """A loss that raises on one rank is an error on all, and its half of a gradient does not reach the next step."""
    documents = tiny_documents(16, seed=11)
    want = Reference(bench.folder, OPTIM).step(documents)
    with bench.engine(max_tokens=64) as engine:
        batch = bench.share(engine, documents)
        fails = engine.topology.dp_rank == 0
        # Of a pipeline's stages only the last has outputs to evaluate a loss on.
        kinds = KeyError if fails and engine.topology.is_last_stage else RemoteError
        raises(kinds, lambda: engine.train_batch(batch, FailsOnce() if fails else MeanNLL()), "a loss that raises")
        engine.forward_backward(batch, MeanNLL(factor=math.nan))
        try:
            result = engine.train_batch(batch, MeanNLL())
        except NonFiniteError as e:
            raise ConformanceError(f"a step that was given up made the next one fail: {e}") from e
        near("loss after an aborted step", result.loss, want.loss, LOSS_BOUND)
        near("gradient norm after an aborted step", result.grad_norm or math.nan, want.grad_norm, NORM_BOUND)


def check_checkpoint(bench: EngineFactory) -> None:
    """A step after loading equals the step after saving, bit for bit, optimizer state included."""
    with tempfile.TemporaryDirectory() as made:
        root = [made]
        dist.broadcast_object_list(root)
        with bench.engine() as engine:
            first, second = (bench.share(engine, tiny_documents(6, seed=s)) for s in (9, 10))
            engine.train_batch(first, MeanNLL())
            # An evaluation in between must leave nothing behind that saving trips over.
            engine.forward_backward(second, MeanNLL(), forward_only=True)
            folder = engine.save_checkpoint(root[0], 1, {"cursor": 6})
            want = [engine.train_batch(second, MeanNLL()) for _ in range(2)]
            final = weights_of(engine)
        with bench.engine() as engine:
            restored = engine.load_checkpoint(folder)
            holds(restored.extra == {"cursor": 6} and restored.step == 1, f"the trainer's state came back as {restored}")
            got = [engine.train_batch(second, MeanNLL()) for _ in range(2)]
            for step, (a, b) in enumerate(zip(got, want, strict=True)):
                holds(
                    (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr), f"step {step} after loading: {a}, expected {b}"
                )
            resumed = weights_of(engine)
        holds(all(torch.equal(resumed[n], final[n]) for n in final), "parameters after resuming are not bit-equal")
        dist.barrier()


CHECKS: dict[str, Callable[[EngineFactory], None]] = {
    "reference": check_reference,
    "partition": check_partition,
    "shares": check_shares,
    "zero_weight": check_zero_weight,
    "budget": check_budget,
    "non_finite": check_non_finite,
    "infer": check_infer,
    "weights": check_weights,
    "modes": check_modes,
    "accumulation": check_accumulation,
    "aborted": check_aborted,
    "checkpoint": check_checkpoint,
}
"""Name -> check, in the order they run."""
