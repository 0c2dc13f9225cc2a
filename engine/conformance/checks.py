"""The conformance checks that every backend must pass.

A check gets an `EngineFactory` that builds engines of the backend under test. It raises `ConformanceError`, with both numbers,
if the backend does not conform. All ranks run a check together.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import BaseEngine
from ..config import ModelConfig
from ..errors import BatchError, BudgetError, CapabilityError, ConfigError, NonFiniteError, RemoteError
from ..heads import HeadType, head_of
from ..hf.model import decoder_of
from ..loss import Loss, LossSums, OutputRequest, StepResult, TokenOutputs, loss_mask
from ..model_types import HEAD_PREFIX
from ..packing.batch import PackedBatch, media_fields
from ..packing.convert import from_lists
from ..registry import engine_class
from ..tiny_media import PLAIN, tiny_media_document
from .engine_factory import OPTIM, ConformanceError, EngineFactory, assert_close, assert_raises, assert_that, weights_of
from .reference import PlainReference
from .tiny import tiny_documents

MEDIA_FAMILY, MEDIA_EXPERTS = "qwen2_5_vl", "qwen3_vl_moe"
"""The families of the tiny model for the check with media: the default, and with experts split over ranks."""
LOSS_BOUND, NORM_BOUND = 1e-6, 1e-5
"""Maximum relative errors of loss and gradient norm, in float32, against plain Hugging Face."""
WEIGHT_BOUND = 1e-5
"""Maximum absolute difference of a parameter's elements after the steps, at lr 1e-4."""
RARE = 1e-4
"""Fraction of a parameter's elements that may differ by more, up to the size of one step. Adam's first step has the full size
even if a gradient is as small as eps and consists of rounding errors only; the affected elements depend on the processor."""


@dataclass(frozen=True)
class MeanNLL:
    """Mean negative log-likelihood, multiplied by `factor`, which a check can use to make it NaN."""

    factor: float = 1.0
    request: OutputRequest = OutputRequest(log_probs=True)
    linear: bool = True

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of supervised tokens."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of supervised tokens."""
        return {"nll": float(loss_mask(batch).sum())}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Return the sum over the micro-batch."""
        assert outputs.log_probs is not None
        total = -outputs.log_probs.sum() * self.factor
        return LossSums(terms={"nll": total}, metrics={"nll": (total.detach(), loss_mask(batch).sum())})


def check_reference(engine_factory: EngineFactory) -> None:
    """Check loss, gradient norm and parameters over five AdamW steps with clipping against plain Hugging Face."""
    with engine_factory.engine() as engine:
        _check_steps(engine_factory, engine, lambda step: tiny_documents(9, seed=step))


def check_shared_prefixes(engine_factory: EngineFactory) -> None:
    """Check the same, and outputs, for documents with common prefixes, which an engine with the capability computes once.

    Nine of the documents are three prefixes with three endings each, one is a prefix of another, and two are equal.
    """

    def families(step: int) -> list[list[int]]:
        beginnings, ends = tiny_documents(4, seed=step, longest=24)[1:], tiny_documents(9, seed=100 + step, longest=16)
        documents = [beginnings[i % 3] + ends[i] for i in range(9)]
        return [*documents, documents[4][:-1], beginnings[0][::-1], beginnings[0][::-1]]

    can = engine_class(engine_factory.backend).capabilities.shared_prefixes
    with engine_factory.engine(share_prefixes="on" if can else "auto") as engine:
        shared = [result.shared_tokens for result in _check_steps(engine_factory, engine, families)]
        assert_that(all(shared) if can else not any(shared), f"the numbers of shared tokens of five steps are {shared}")
    with engine_factory.engine(share_prefixes="on" if can else "auto", max_tokens=64, optim=None) as engine:
        documents = families(6)
        _check_outputs(engine_factory, engine, documents, engine_factory.indices(engine, documents)[::-1])


def check_media(engine_factory: EngineFactory) -> None:
    """Check steps with images in some documents, in only one, and in none, against plain Hugging Face.

    An engine without `Capabilities.media` must reject such a batch instead.
    """
    if not engine_class(engine_factory.backend).capabilities.media:
        with engine_factory.engine() as engine:
            batch = from_lists([[5, 6, 7]], media=media_fields([[{"pixel_values": torch.ones(1, 2)}]]))
            assert_raises(BatchError, lambda: engine.train_batch(batch, MeanNLL()), "a batch with media")
        return
    family = MEDIA_EXPERTS if engine_factory.parallel.ep > 1 else MEDIA_FAMILY
    with engine_factory.with_model(family) as factory, factory.engine() as engine:
        reference = PlainReference(factory.folder, OPTIM)
        # For each step, the sizes of the images in each document.
        steps: list[list[list[int]]] = [[[1], [], [2, 1], []], [[], [], [1], []], [[], [], [], []]]
        for step, sizes in enumerate(steps):
            drawn = [tiny_media_document(family, 10 * step + i, *size) for i, size in enumerate(sizes)]
            documents, items = [ids for ids, _ in drawn], [item for _, item in drawn]
            masks = [[token < PLAIN for token in ids] for ids in documents]
            indices = factory.indices(engine, documents)
            media = media_fields([items[i] for i in indices])
            batch = factory.pack(documents, indices, supervised=[masks[i] for i in indices], media=media)
            result = engine.train_batch(batch, MeanNLL())
            fields = [{name: field.values for name, field in media_fields([one]).items()} for one in items]
            expected = reference.step(documents, masks, fields)
            assert_close(f"loss of step {step} with media", result.loss, expected.loss, LOSS_BOUND)
            assert_close(
                f"gradient norm of step {step} with media", result.grad_norm or math.nan, expected.grad_norm, NORM_BOUND
            )


class MeanSquares:
    """The mean square of all outputs of a head, over all tokens."""

    linear = False

    def __init__(self, head: HeadType) -> None:
        self._names = tuple(head.outputs)
        values = self._names == ("values",)
        self.request = OutputRequest(values=values, others=() if values else self._names)

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of all tokens."""
        return torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.device)

    def weights(self, batch: PackedBatch) -> dict[str, float]:
        """Return the number of tokens."""
        return {"squares": float(batch.num_tokens)}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Return the sum over the micro-batch."""
        return LossSums(terms={"squares": torch.stack([x.square().sum() for x in outputs.present().values()]).sum()})


def check_model_types(engine_factory: EngineFactory) -> None:
    """Check a step of models with other heads, and their outputs, against the same head on top of plain Hugging Face's decoder.

    An engine must reject heads that `Capabilities.heads` lacks.
    """
    supported = engine_class(engine_factory.backend).capabilities.heads
    settings: dict[str, tuple[int, ...]] = {"value": (), "actions": (2, 3)}
    for name, shape in settings.items():
        model: dict[str, Any] = {"head": name, "head_shape": shape}
        if supported is not None and name not in supported:
            with engine_factory.engine() as engine:
                check = partial(engine.capabilities.check, engine.config, ModelConfig(path="m", **model), None)
                assert_raises(CapabilityError, check, f"model.head={name}")
            continue
        with engine_factory.engine(model=model) as engine:
            head_type = head_of(engine.model_config)
            assert head_type is not None
            documents = tiny_documents(7, seed=11)
            # The head is initialized at random, so the reference takes its weights from the engine.
            stored = {n: value for n, value in weights_of(engine).items() if n.startswith(HEAD_PREFIX)}
            result = engine.train_batch(engine_factory.share(engine, documents), MeanSquares(head_type))
            reference = PlainReference(engine_factory.folder, OPTIM)
            decoder = decoder_of(reference.model)
            head = head_type.module(decoder.config.hidden_size, torch.float32)
            head.load_state_dict({n.removeprefix(HEAD_PREFIX): value for n, value in stored.items()})
            loss = 0.0
            for document in documents:
                hidden = decoder(input_ids=torch.tensor([document]), use_cache=False).last_hidden_state[0]
                squares = torch.stack([x.square().sum() for x in head_type.compute(head, hidden).values()]).sum()
                one = squares / sum(map(len, documents))
                one.backward()
                loss += one.item()
            grads = [p.grad for p in [*decoder.parameters(), *head.parameters()] if p.grad is not None]
            norm = float(torch.stack([g.double().norm() for g in grads]).norm())
            assert_close(f"loss with model.head={name}", result.loss, loss, LOSS_BOUND)
            assert_close(f"gradient norm with model.head={name}", result.grad_norm or math.nan, norm, NORM_BOUND)


def _check_steps(
    engine_factory: EngineFactory, engine: BaseEngine, documents_of: Callable[[int], list[list[int]]]
) -> list[StepResult]:
    reference, results = PlainReference(engine_factory.folder, OPTIM), []
    for step in range(5):
        documents = documents_of(step)
        # Most tokens are supervised, but not all, so that a mask off by one token shows.
        masks = [[i % 5 > 0 for i in range(len(d))] for d in documents]
        indices = engine_factory.indices(engine, documents)
        batch = engine_factory.pack(documents, indices, supervised=[masks[i] for i in indices])
        result = engine.train_batch(batch, MeanNLL())
        expected = reference.step(documents, masks)
        assert_close(f"loss of step {step}", result.loss, expected.loss, LOSS_BOUND)
        assert_close(f"gradient norm of step {step}", result.grad_norm or math.nan, expected.grad_norm, NORM_BOUND)
        results.append(result)
    weights = weights_of(engine)
    for name, value in reference.weights().items():
        error = (weights[name] - value).abs()
        largest, beyond = float(error.max()), int((error > WEIGHT_BOUND).sum())
        assert_that(
            beyond <= max(RARE * error.numel(), 1) and largest <= OPTIM.lr,
            f"parameter {name} differs by {largest:.1e} after five steps, {beyond} of its {error.numel()} elements by more than "
            f"{WEIGHT_BOUND}",
        )
    return results


def _gradient(
    engine_factory: EngineFactory, documents: Sequence[Sequence[int]], assign: Callable[[int, int], list[int]], max_tokens: int
) -> tuple[float, float]:
    # A new engine for each case, so that all begin with the same weights.
    with engine_factory.engine(max_tokens=max_tokens) as engine:
        indices = assign(engine.topology.dp_rank, engine.topology.dp_size)
        result = engine.train_batch(engine_factory.pack(documents, indices), MeanNLL())
        return result.loss, result.grad_norm or math.nan


def check_partition(engine_factory: EngineFactory) -> None:
    """Check that the numbers do not depend on the token budget or on the order of the documents."""
    documents = tiny_documents(10, seed=1)

    def assign(rank: int, size: int) -> list[int]:
        return list(range(rank, len(documents), size))

    loss, norm = _gradient(engine_factory, documents, assign, 1024)
    # 64 tokens make many micro-batches, 1024 a single one on each rank.
    for budget, order in ((64, "as given"), (1024, "reversed")):
        ordered = assign if order == "as given" else (lambda rank, size: assign(rank, size)[::-1])
        other_loss, other_norm = _gradient(engine_factory, documents, ordered, budget)
        assert_close(f"loss with max_tokens={budget}, order {order}", other_loss, loss, LOSS_BOUND)
        assert_close(f"gradient norm with max_tokens={budget}, order {order}", other_norm, norm, NORM_BOUND)


def check_shares(engine_factory: EngineFactory) -> None:
    """Check that the numbers do not depend on how documents are distributed over ranks, even if some ranks have none."""
    documents = tiny_documents(8, seed=2)
    expected = PlainReference(engine_factory.folder, OPTIM).step(documents)
    all_indices = list(range(len(documents)))
    for case, assign in (
        ("distributed round-robin", lambda rank, size: all_indices[rank::size]),
        ("all on the last rank", lambda rank, size: all_indices if rank == size - 1 else []),
    ):
        loss, norm = _gradient(engine_factory, documents, assign, 64)
        assert_close(f"loss, {case}", loss, expected.loss, LOSS_BOUND)
        assert_close(f"gradient norm, {case}", norm, expected.grad_norm, NORM_BOUND)


def check_zero_weight(engine_factory: EngineFactory) -> None:
    """Check that a batch without supervised tokens raises an error that names its samples, and that the engine still works."""
    documents = tiny_documents(6, seed=3)
    with engine_factory.engine() as engine:
        indices = engine_factory.indices(engine, documents)
        unsupervised = engine_factory.pack(documents, indices, supervised=[[False] * len(documents[i]) for i in indices])
        error = assert_raises(BatchError, lambda: engine.train_batch(unsupervised, MeanNLL()), "a batch of weight zero")
        assert_that(
            not indices or "doc " in str(error), f"the error of a batch of weight zero does not name a sample: {error}"
        )
        result = engine.train_batch(engine_factory.pack(documents, indices), MeanNLL())
        assert_that(math.isfinite(result.loss), "the engine no longer trains after a batch of weight zero")


def check_budget(engine_factory: EngineFactory) -> None:
    """Check that a document over the token budget raises an error on all ranks, including those without the document."""
    documents = [*tiny_documents(4, seed=4), list(range(3, 103))]
    with engine_factory.engine(max_tokens=64) as engine:
        last = engine.topology.dp_rank == engine.topology.dp_size - 1
        batch = engine_factory.pack(documents, range(5) if last else range(4))
        error_type = BudgetError if last else RemoteError
        error = assert_raises(error_type, lambda: engine.train_batch(batch, MeanNLL()), "a document over the budget")
        for part in ("doc 4", "100", "64"):
            assert_that(part in str(error), f"the error of a document over the budget does not contain {part!r}: {error}")


def check_non_finite(engine_factory: EngineFactory) -> None:
    """Check that a NaN on one rank raises an error or skips the step on all ranks, and leaves the parameters unchanged."""
    documents = tiny_documents(6, seed=5)

    def nan_loss(engine: BaseEngine) -> Loss:
        # Only one data-parallel rank sees the NaN.
        return MeanNLL(factor=math.nan if engine.topology.dp_rank == 0 else 1.0)

    with engine_factory.engine() as engine:
        before = weights_of(engine)
        batch = engine_factory.share(engine, documents)
        assert_raises(NonFiniteError, lambda: engine.train_batch(batch, nan_loss(engine)), "a NaN loss with non_finite=raise")
        after = weights_of(engine)
        assert_that(
            all(torch.equal(before[n], after[n]) for n in before), "a step that raised an error changed the parameters"
        )
    with engine_factory.engine(non_finite="skip") as engine:
        batch = engine_factory.share(engine, documents)
        clean = engine.train_batch(batch, MeanNLL())
        before = weights_of(engine)
        result = engine.train_batch(batch, nan_loss(engine))
        assert_that(result.skipped and not clean.skipped, "a NaN loss with non_finite=skip was not reported as skipped")
        assert_that(engine.step == 1, f"a skipped step advanced the schedule to step {engine.step}")
        after = weights_of(engine)
        assert_that(all(torch.equal(before[n], after[n]) for n in before), "a skipped step changed the parameters")
        again = engine.train_batch(batch, MeanNLL())
        assert_that(math.isfinite(again.loss) and not again.skipped, "the engine no longer trains after a skipped step")


def check_infer(engine_factory: EngineFactory) -> None:
    """Check that outputs are in the caller's order and equal to those of each document computed separately."""
    with engine_factory.engine(max_tokens=32, optim=None) as engine:
        documents = tiny_documents(7, seed=6)
        # Reversed, so that outputs have to be put back into the caller's order.
        _check_outputs(engine_factory, engine, documents, engine_factory.indices(engine, documents)[::-1])


def _check_outputs(
    engine_factory: EngineFactory, engine: BaseEngine, documents: Sequence[Sequence[int]], indices: Sequence[int]
) -> None:
    reference = PlainReference(engine_factory.folder, OPTIM)
    batch = engine_factory.pack(documents, indices)
    request = OutputRequest(log_probs=True, entropy=True, sum_squared_probs=True, top_k=3, temperature=0.7)
    outputs = engine.infer_batch(batch, request)
    all_tokens = torch.ones(batch.num_tokens, dtype=torch.bool)
    greedy = engine.infer_batch(batch, OutputRequest(greedy=True), tokens=all_tokens)["greedy"]
    for position, i in enumerate(indices):
        start, end = batch.bounds[position], batch.bounds[position + 1]
        expected = reference.log_probs(documents[i], temperature=0.7).detach()
        actual = outputs["log_probs"][start : end - 1]
        error = float((actual - expected).abs().max()) if len(expected) else 0.0
        assert_that(error <= 1e-4, f"log-probabilities of document {i} differ by {error:.1e}")
        assert_that(
            float(outputs["log_probs"][end - 1]) == 0.0,
            "the last token of a document has a log-probability, although it has no next token",
        )
        distribution = torch.log_softmax(reference.logits(documents[i])[:-1] / 0.7, -1)
        entropy = -(distribution.exp() * distribution).sum(-1).detach()
        error = float((outputs["entropy"][start : end - 1] - entropy).abs().max()) if len(entropy) else 0.0
        assert_that(error <= 1e-4, f"entropy of document {i} differs by {error:.1e}")
        squares = (2 * distribution).exp().sum(-1).detach()
        error = float((outputs["sum_squared_probs"][start : end - 1] - squares).abs().max()) if len(squares) else 0.0
        assert_that(error <= 1e-5, f"the sum of squared probabilities of document {i} differs by {error:.1e}")
        top = distribution.detach().gather(1, outputs["top_tokens"][start : end - 1])
        # If several tokens are equally likely, any of them may be returned.
        for expected in (distribution.detach().topk(3, -1).values, outputs["top_log_probs"][start : end - 1]):
            error = float((top - expected).abs().max()) if len(top) else 0.0
            assert_that(
                error <= 1e-4, f"the most likely tokens of document {i}, or their log-probabilities, differ by {error:.1e}"
            )
        likeliest = reference.logits(documents[i]).argmax(-1)
        assert_that(torch.equal(greedy[start:end], likeliest), f"the most likely tokens of document {i} differ")


def check_weights(engine_factory: EngineFactory) -> None:
    """Check that `named_weights` yields the tensors in the model folder, bit for bit, with the metadata of `weight_shapes`."""
    from safetensors.torch import load_file

    with engine_factory.engine() as engine:
        weights = weights_of(engine)
        shapes = engine.weight_shapes()
    stored = {k: v for file in engine_factory.folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert_that(list(weights) == list(shapes), "named_weights and weight_shapes differ in names or order")
    assert_that(
        set(weights) == set(stored), f"named_weights differs from the folder in {sorted(set(weights) ^ set(stored))[:4]}"
    )
    for name, value in stored.items():
        assert_that(torch.equal(weights[name], value), f"{name} differs from the tensor in the folder")
        assert_that(shapes[name] == (value.dtype, tuple(value.shape)), f"weight_shapes is wrong about {name}: {shapes[name]}")


def check_modes(engine_factory: EngineFactory) -> None:
    """Check that different modes cannot be nested, and that an evaluation has no effect on the next step."""
    documents = tiny_documents(6, seed=7)
    with engine_factory.engine() as engine:
        batch = engine_factory.share(engine, documents)
        with engine.eval_mode():
            assert_raises(ConfigError, lambda: engine.train_batch(batch, MeanNLL()), "train_batch inside eval_mode")
        evaluated = engine.forward_backward(batch, MeanNLL(), forward_only=True)
        before = weights_of(engine)
        trained = engine.train_batch(batch, MeanNLL())
        assert_close("loss of an evaluation and of the step after it", evaluated.loss, trained.loss, LOSS_BOUND)
        reference = PlainReference(engine_factory.folder, OPTIM).step(documents)
        assert_close("gradient norm after an evaluation", trained.grad_norm or math.nan, reference.grad_norm, NORM_BOUND)
        changed = weights_of(engine)
        assert_that(any(not torch.equal(before[n], changed[n]) for n in before), "a step did not change any parameter")


def check_accumulation(engine_factory: EngineFactory) -> None:
    """Check that two `forward_backward` calls with the total of their weights give the same step as one call."""
    documents = tiny_documents(8, seed=8)
    reference = PlainReference(engine_factory.folder, OPTIM).step(documents)
    total = {"nll": float(sum(len(d) - 1 for d in documents))}
    with engine_factory.engine() as engine, engine.train_mode():
        engine.zero_grad()
        losses = [
            engine.forward_backward(engine_factory.share(engine, half), MeanNLL(), total_weights=total).loss
            for half in (documents[:5], documents[5:])
        ]
        result = engine.optimizer_step()
        assert_close("loss over two calls", sum(losses), reference.loss, LOSS_BOUND)
        assert_close("gradient norm over two calls", result.grad_norm or math.nan, reference.grad_norm, NORM_BOUND)


@dataclass
class FailsOnce:
    """A loss that raises an error in its second micro-batch."""

    calls: int = 0
    inner: MeanNLL = field(default_factory=MeanNLL)
    linear: bool = False

    @property
    def request(self) -> OutputRequest:
        """The outputs that the loss needs: log-probabilities."""
        return self.inner.request

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of supervised tokens."""
        return self.inner.tokens(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return the number of supervised tokens."""
        return self.inner.weights(batch)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Return the sums of the micro-batch; raise an error in the second call."""
        self.calls += 1
        # In the second one, the gradient of the first is already accumulated.
        if self.calls == 2:
            raise KeyError("a field that this micro-batch lacks")
        return self.inner(outputs, batch)


def check_aborted(engine_factory: EngineFactory) -> None:
    """Check that an error in the loss is raised on all ranks, and that no partial gradient reaches the next step."""
    documents = tiny_documents(16, seed=11)
    expected = PlainReference(engine_factory.folder, OPTIM).step(documents)
    with engine_factory.engine(max_tokens=64) as engine:
        batch = engine_factory.share(engine, documents)
        fails = engine.topology.dp_rank == 0
        # Only the last pipeline stage has outputs, so only it evaluates the loss.
        error_type = KeyError if fails and engine.topology.is_last_stage else RemoteError
        assert_raises(error_type, lambda: engine.train_batch(batch, FailsOnce() if fails else MeanNLL()), "a loss that raises")
        # A NaN that no optimizer step has used must not reach the next step either.
        engine.forward_backward(batch, MeanNLL(factor=math.nan))
        try:
            result = engine.train_batch(batch, MeanNLL())
        except NonFiniteError as e:
            raise ConformanceError(f"an aborted step made the next one fail: {e}") from e
        assert_close("loss after an aborted step", result.loss, expected.loss, LOSS_BOUND)
        assert_close("gradient norm after an aborted step", result.grad_norm or math.nan, expected.grad_norm, NORM_BOUND)


def check_checkpoint(engine_factory: EngineFactory) -> None:
    """Check that the steps after loading a checkpoint equal those after saving it, bit for bit."""
    with tempfile.TemporaryDirectory() as temporary:
        root = [temporary]
        dist.broadcast_object_list(root)
        with engine_factory.engine() as engine:
            first, second = (engine_factory.share(engine, tiny_documents(6, seed=s)) for s in (9, 10))
            engine.train_batch(first, MeanNLL())
            # An evaluation in between must not leave anything behind that breaks saving.
            engine.forward_backward(second, MeanNLL(), forward_only=True)
            folder = engine.save_checkpoint(root[0], 1, {"cursor": 6})
            # Two steps, because the first loss does not depend on the state of the optimizer.
            expected = [engine.train_batch(second, MeanNLL()) for _ in range(2)]
            final = weights_of(engine)
        with engine_factory.engine() as engine:
            restored = engine.load_checkpoint(folder)
            assert_that(
                restored.extra == {"cursor": 6} and restored.step == 1, f"the trainer's state was restored as {restored}"
            )
            results = [engine.train_batch(second, MeanNLL()) for _ in range(2)]
            for step, (a, b) in enumerate(zip(results, expected, strict=True)):
                assert_that(
                    (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr), f"step {step} after loading: {a}, expected {b}"
                )
            resumed = weights_of(engine)
        assert_that(all(torch.equal(resumed[n], final[n]) for n in final), "parameters after resuming are not bit-equal")
        dist.barrier()


CHECKS: dict[str, Callable[[EngineFactory], None]] = {
    "reference": check_reference,
    "shared_prefixes": check_shared_prefixes,
    "media": check_media,
    "model_types": check_model_types,
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
"""Name -> check, in the order that they run in."""
