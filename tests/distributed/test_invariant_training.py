"""Training passes in which the numbers of a document do not depend on the others: `EngineConfig.invariant`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine import rank_slice, step_plan
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, LoraConfig, MicroBatchConfig, ModelConfig, ParallelConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import CapabilityError
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss
from helpers.engines import OPTIM, build, close_to
from helpers.harness import run_ranks

pytestmark = pytest.mark.usefixtures("process_group")
LOG_PROBS = OutputRequest(log_probs=True, entropy=True)


@contextmanager
def built(folder: Path | str, **settings: Any) -> Iterator[BaseEngine]:
    sizes = {"micro_batch": MicroBatchConfig(max_tokens=700), "invariant": True}
    engine = build(folder, **{**sizes, **settings})
    try:
        yield engine
    finally:
        engine.close()


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(250) for _ in range(count)]


def documents(random: Random, count: int) -> list[list[int]]:
    return [tokens(random, random.choice((2, 3, 15, 16, 17, 33, 64, 100, 170, 230))) for _ in range(count)]


def outputs(engine: BaseEngine, batch: list[list[int]], *, as_in_training: bool = False) -> list[list[Tensor]]:
    """The log-probabilities and entropies of each document."""
    packed = from_lists(batch)
    found = engine.infer_batch(packed, LOG_PROBS, as_in_training=as_in_training)
    return [list(values) for values in zip(*(found[name].split(packed.lengths) for name in found), strict=True)]


def differing(engine: BaseEngine, compositions: int) -> int:
    """In how many random batches a document has other outputs than alone."""
    random = Random(0)
    mine = [tokens(Random(length), length) for length in (2, 31, 97, 200)]
    alone = [outputs(engine, [document])[0] for document in mine]
    found = 0
    for n in range(compositions):
        batch = [*((None, document) for document in documents(random, random.randrange(12))), *enumerate(mine)]
        random.shuffle(batch)
        computed = outputs(engine, [document for _, document in batch], as_in_training=n % 2 == 0)
        own = [(number, values) for (number, _), values in zip(batch, computed, strict=True) if number is not None]
        found += any(not torch.equal(a, b) for number, values in own for a, b in zip(values, alone[number], strict=True))
    return found


@pytest.mark.parametrize(
    ("family", "compositions"),
    [
        ("llama", 5),
        ("qwen3_moe", 3),
        *(
            pytest.param(family, 100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for family in ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_next", "llama4_text")
        ),
    ],
)
def test_outputs_are_those_of_the_document_alone(tmp_path: Path, family: str, compositions: int) -> None:
    with built(save_tiny_model(tmp_path, family), optim=None) as engine:
        assert differing(engine, compositions) == 0


@pytest.mark.slow
def test_values_of_a_critic_are_those_of_the_document_alone(tmp_path: Path) -> None:
    with built(save_tiny_model(tmp_path, "llama"), model={"head": "value"}, optim=None) as engine:
        assert engine.invariant_size
        batch = documents(Random(3), 9)
        request = OutputRequest(values=True)
        together = engine.infer_batch(packed := from_lists(batch), request)["values"].split(packed.lengths)
        alone = [engine.infer_batch(from_lists([document]), request)["values"] for document in batch]
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def gradients(engine: BaseEngine, calls: list[list[list[int]]], counted: int) -> dict[str, Tensor]:
    """The gradient of one of several calls in one batch, of which the others have no loss."""
    batch = [(number, document) for number, call in enumerate(calls) for document in call]
    Random(len(batch)).shuffle(batch)
    # In its order, whatever is between.
    own = iter(calls[counted])
    batch = [(number, next(own) if number == counted else document) for number, document in batch]
    packed = from_lists(
        [document for _, document in batch],
        call_ids=[number for number, _ in batch],
        token_fields={"loss_weights": [[float(number == counted)] * len(document) for number, document in batch]},
    )
    engine.zero_grad()
    engine.forward_backward(packed, SFTLoss(), total_weights=dict.fromkeys(SFTLoss().weights(packed), 1.0))
    return {name: p.grad.clone() for name, p in engine._root.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def other_gradients(engine: BaseEngine, compositions: int) -> int:
    random, found = Random(1), 0
    call = documents(random, 6)
    alone = gradients(engine, [call], 0)
    assert all(bool(value.any()) for value in alone.values())
    for _ in range(compositions):
        calls = [documents(random, random.randrange(1, 5)) for _ in range(random.randrange(1, 4))]
        position = random.randrange(len(calls) + 1)
        among_others = gradients(engine, [*calls[:position], call, *calls[position:]], position)
        found += any(not torch.equal(alone[name], among_others[name]) for name in alone)
    return found


@pytest.mark.parametrize(
    ("family", "compositions"),
    [
        ("llama", 4),
        *(
            pytest.param(family, 100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for family in ("llama", "gemma2", "qwen3_moe", "qwen3_next")
        ),
    ],
)
def test_the_gradient_of_a_call_does_not_depend_on_other_calls(tmp_path: Path, family: str, compositions: int) -> None:
    with built(save_tiny_model(tmp_path, family)) as engine:
        assert other_gradients(engine, compositions) == 0


@pytest.mark.parametrize(
    "control",
    ["without", "rows by the number of tokens", pytest.param("calls in one pass", marks=pytest.mark.slow)],
)
def test_the_comparison_sees(tmp_path: Path, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    if control == "rows by the number of tokens":
        monkeypatch.setattr(rank_slice, "padded_rows", lambda count, multiple: count)
    with built(folder, invariant=control != "without") as engine:
        if control == "calls in one pass":
            whole: Any = step_plan.invariant_partition
            monkeypatch.setattr(
                step_plan, "invariant_partition", lambda *args, calls, **options: whole(*args, calls=None, **options)
            )
            assert differing(engine, 3) == 0
            assert other_gradients(engine, 3) > 0
        else:
            assert differing(engine, 3) > 0


def test_sums_in_another_order_are_seen(tmp_path: Path) -> None:
    with built(save_tiny_model(tmp_path, "llama")) as engine:
        call = documents(Random(1), 12)
        forward, backward = gradients(engine, [call], 0), gradients(engine, [call[::-1]], 0)
        assert any(not torch.equal(forward[name], backward[name]) for name in forward)


def equals_plain(folder: Path, parallel: ParallelConfig, lora: LoraConfig) -> None:
    reference = PlainReference(folder, OPTIM)
    with built(folder, parallel=parallel, model={"lora": lora}) as engine:
        for step in range(2):
            whole = tiny_documents(9, seed=step)
            rank, size = engine.topology.dp_rank, engine.topology.dp_size
            result = engine.train_batch(from_lists(whole[rank::size]), SFTLoss())
            assert result.grad_norm is not None
            if not lora.rank:
                done = reference.step(whole)
                close_to([(result.loss, result.grad_norm)], [(done.loss, done.grad_norm)])
        # The adapter has learned, so that its products count.
        assert differing(engine, 3) == 0 or size > 1


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gpt_oss", "qwen3_moe"))]
)
def test_a_step_equals_plain_transformers(tmp_path: Path, family: str) -> None:
    equals_plain(save_tiny_model(tmp_path, family), ParallelConfig(), LoraConfig())


@pytest.mark.slow
def test_adapters_that_have_learned(tmp_path: Path) -> None:
    equals_plain(save_tiny_model(tmp_path, "llama"), ParallelConfig(), LoraConfig(rank=4))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ParallelConfig(dp_shard=2), ParallelConfig(dp_replicate=2)])
def test_ranks_share_the_documents(tmp_path: Path, layout: ParallelConfig) -> None:
    run_ranks(equals_plain, 2, save_tiny_model(tmp_path, "llama"), layout, LoraConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": ParallelConfig(cp=2)}, r"engine.invariant=true with engine.parallel.cp=2"),
        ({"parallel": ParallelConfig(ep=2)}, r"engine.invariant=true with engine.parallel.ep=2"),
        ({"backend": "mcore"}, r"engine.invariant=true: backend 'mcore' does not support it"),
        ({"compile": True}, r"engine.invariant=true with engine.compile=true"),
        ({"share_prefixes": "on"}, r"engine.invariant=true with engine.share_prefixes=on"),
    ],
)
def test_what_cannot_hold_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    config = EngineConfig(invariant=True, **settings)
    engine = engine_class(config.backend)(
        model=ModelConfig(path=str(save_tiny_model(tmp_path, "llama"))), engine=config, optim=OPTIM
    )
    with pytest.raises(CapabilityError, match=message):
        engine.check()


def test_documents_of_one_call_share_passes(tmp_path: Path) -> None:
    """As far as rows agree; calls never do."""
    with built(save_tiny_model(tmp_path, "llama")) as engine:
        size = engine.invariant_size
        assert size is not None
        assert size >= 128
        batch = from_lists([[1] * 60] * 4, call_ids=[0, 1, 0, 1])
        plan = engine._planner.plan(batch, SFTLoss(), training=True)
        assert plan.parts == [[0, 2], [1, 3]]


def test_where_rows_differ_each_document_has_a_pass_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor's library added in another order from 16 rows on."""
    linear = torch.nn.functional.linear

    def other_order(x: Tensor, *args: Any) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        grows = torch.arange(len(flat), device=x.device).remainder(7)[:, None] * 1e-7 * flat.shape[0]
        return linear((flat * (1 + grows)).view_as(x), *args)

    monkeypatch.setattr(torch.nn.functional, "linear", other_order)
    with built(save_tiny_model(tmp_path, "llama")) as engine:
        assert engine.invariant_size == 0
        assert engine._planner.plan(from_lists([[1, 2]] * 4), SFTLoss(), training=True).parts == [[0], [1], [2], [3]]
        assert differing(engine, 3) == 0
