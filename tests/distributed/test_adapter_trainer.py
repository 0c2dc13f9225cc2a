"""Several adapters on one frozen model: the numbers of plain transformers and peft, and the same bits in any company."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain.checkpoint_tools import merge
from drivetrain.engine.adapter_checkpoint import adapter_config_of
from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.adapters.config import AdapterConfig
from drivetrain.engine.call_trainer import TrainingCall, TrainingCallResult
from drivetrain.engine.config import LoraConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import CapabilityError, CheckpointError, ConfigError, DrivetrainError, NonFiniteError
from drivetrain.engine.hf.lora import as_peft_stores
from drivetrain.engine.loss import LossSums, OutputRequest, TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.losses.token_sums import FORMULAS, TokenSumLoss
from helpers.adapters import Document, PlainAdapter, bank_engine, call, config, documents, packed
from helpers.engines import build
from helpers.harness import run_ranks

pytestmark = pytest.mark.usefixtures("process_group")
OPTIM = OptimConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=1.0)
ALL = ("attention", "mlp", "unembedding")


def done(results: list[TrainingCallResult]) -> list[TrainingCallResult]:
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def close(a: float, b: float, relative: float = 1e-5) -> None:
    assert abs(a - b) <= relative * max(1.0, abs(b)), (a, b)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3_next", "gemma2"))],
)
def test_numbers_are_those_of_plain_transformers_and_peft(tmp_path: Path, family: str) -> None:
    """Ten steps of three adapters with different ranks, targets, losses and settings of every step, in passes that they share."""
    folder = save_tiny_model(tmp_path / "model", family)
    engine = bank_engine(folder, micro_batch=MicroBatchConfig(max_tokens=64))
    try:
        trainer = AdapterTrainer(engine)
        # peft does not adapt a shared expert beside fused ones.
        every = ("attention", "unembedding") if family == "qwen3_next" else ALL
        settings = {"a": config(4, every, 1), "b": config(2, ("attention",), 2), "c": config(7, ("unembedding",), 3)}
        for name, one in settings.items():
            trainer.create(name, one)
        plain = {name: PlainAdapter(folder, trainer, name) for name in settings}
        losses, random = list(FORMULAS), Random(0)
        for step in range(10):
            chosen = {name: losses[(step + i) % len(losses)] for i, name in enumerate(settings)}
            batches = [(name, chosen[name], documents(random, 3, chosen[name])) for name in (*settings, "a")]
            # Tokens with several targets, of which there may be other numbers in other calls.
            loss_of = losses[step % 5]
            batches += [(name, loss_of, documents(random, 2, loss_of, targets=count)) for name, count in (("b", 3), ("a", 2))]
            results = done(trainer.forward_backward([call(name, batch, loss) for name, loss, batch in batches]))
            for (name, loss_name, batch), result in zip(batches, results, strict=True):
                loss, log_probs = plain[name].forward_backward(batch, loss_name)
                close(result.loss, loss)
                assert result.log_probs is not None
                torch.testing.assert_close(result.log_probs.double(), torch.cat(log_probs), rtol=1e-5, atol=1e-5)
            optim = OptimConfig(
                lr=1e-3 * (1 + step), betas=(0.9, 0.9 + 0.01 * step), weight_decay=0.05 * step, clip_grad_norm=3.0
            )
            for name in settings:
                close(trainer.optim_step(name, optim).grad_norm, plain[name].step(optim), 1e-4)
        for name in settings:
            for layer, factor, kind, value in trainer.bank[name].tensors():
                if kind == "value":
                    expected = plain[name].parameters[layer, factor].detach()
                    stored = as_peft_stores(f"{layer}.lora_{'A' if factor == 'down' else 'B'}.weight", value).double()
                    torch.testing.assert_close(stored, expected, rtol=1e-3, atol=2e-4)
    finally:
        engine.close()


# ---- the same bits in any company ------------------------------------------------------------------------------------


def requests(seed: int) -> list[list[list[Document]]]:
    """What one adapter is asked in three steps of two or three calls, some with several targets of each token, which share no pass."""
    random = Random(seed)
    steps = ((0, 0), (0, 0, 3), (0, 3, 0))
    return [[documents(random, random.randrange(1, 5), targets=count) for count in counts] for counts in steps]


def state(trainer: AdapterTrainer, name: str) -> list[Tensor]:
    saved = trainer.bank[name].state_dict()
    return [saved[kind] for kind in ("value", "exp_avg", "exp_avg_sq")]


def shard(trainer: AdapterTrainer, of_call: list[Document]) -> list[Document]:
    topology = trainer.engine.topology
    mine = balance([len(document["tokens"]) for document in of_call], topology.dp_size)[topology.dp_rank]
    return [of_call[i] for i in mine]


def alone(trainer: AdapterTrainer, settings: AdapterConfig) -> tuple[list[Tensor], list[Any]]:
    """The state of an adapter that is trained with nobody else, and what its calls were answered."""
    trainer.create("alone", settings)
    answers = []
    for step in requests(7):
        for one in step:
            (result,) = done(trainer.forward_backward([call("alone", shard(trainer, one))]))
            answers.append((result.loss, result.log_probs))
        trainer.optim_step("alone", OPTIM)
    found = state(trainer, "alone")
    trainer.drop("alone")
    return found, answers


def mixed(trainer: AdapterTrainer, settings: AdapterConfig, random: Random) -> tuple[list[Tensor], list[Any]]:
    """The same among calls of others, in any order and divided over passes in any way; one of the others is not finite."""
    others = {f"other{i}": config(random.choice((1, 2, 5)), random.choice((ALL, ("mlp",))), i) for i in range(3)}
    trainer.create("mine", settings)
    for name, other in others.items():
        trainer.create(name, other)
    trainer.bank["other0"].values[:] = float("nan")
    answers: list[Any] = []

    def run(calls: list[TrainingCall]) -> None:
        for one, result in zip(calls, done(trainer.forward_backward(calls)), strict=True):
            if one.adapter == "mine":
                answers.append((result.loss, result.log_probs))

    for step in requests(7):
        waiting = [call("mine", shard(trainer, one)) for one in step]
        calls: list[TrainingCall] = []
        while waiting:
            if random.random() < 0.4:
                calls.append(waiting.pop(0))
            else:
                name = random.choice(list(others))
                loss = random.choice(("cross_entropy", "ppo", "gspo"))
                count = random.choice((0, 0, 3, 5)) * (loss != "gspo")
                batch = documents(random, random.randrange(1, 6), loss, targets=count)
                calls.append(call(name, shard(trainer, batch), loss))
            if random.random() < 0.2:
                run(calls)
                calls = []
        run(calls)
        if random.random() < 0.5:
            trainer.optim_step("other1", OPTIM)
        trainer.optim_step("mine", OPTIM)
    found = state(trainer, "mine")
    for name in ("mine", *others):
        trainer.drop(name)
    return found, answers


def same(a: tuple[list[Tensor], list[Any]], b: tuple[list[Tensor], list[Any]]) -> bool:
    (states_a, answers_a), (states_b, answers_b) = a, b
    equal = all(torch.equal(x, y) for x, y in zip(states_a, states_b, strict=True))
    for (loss_a, probs_a), (loss_b, probs_b) in zip(answers_a, answers_b, strict=True):
        equal &= loss_a == loss_b and (probs_a is None if probs_b is None else torch.equal(probs_a, probs_b))
    return equal


def mixtures(folder: str, count: int, invariant: bool, parallel: ParallelConfig | None = None) -> int:
    """How many of a number of random mixtures change a bit of an adapter's trajectory."""
    engine = bank_engine(
        folder, invariant=invariant, micro_batch=MicroBatchConfig(max_tokens=512), parallel=parallel or ParallelConfig()
    )
    try:
        trainer = AdapterTrainer(engine)
        settings = config(3, ALL, 5)
        expected = alone(trainer, settings)
        assert not torch.equal(expected[0][0], torch.zeros_like(expected[0][0]))
        random = Random(1)
        return sum(not same(mixed(trainer, settings, random), expected) for _ in range(count))
    finally:
        engine.close()


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_the_bits_of_an_adapter_are_the_same_in_random_mixtures(tmp_path: Path, count: int) -> None:
    assert mixtures(str(save_tiny_model(tmp_path / "model", "qwen3")), count, True) == 0


def test_without_invariant_the_bits_depend_on_company(tmp_path: Path) -> None:
    assert mixtures(str(save_tiny_model(tmp_path / "model", "qwen3")), 5, False) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "qwen3_next"])
def test_the_bits_of_other_families_are_the_same_too(tmp_path: Path, family: str) -> None:
    assert mixtures(str(save_tiny_model(tmp_path / "model", family)), 4, True) == 0


@pytest.mark.slow
def test_the_bits_are_the_same_on_two_data_parallel_ranks(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    assert run_ranks(mixtures, 2, folder, 3, True) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "count"), [({}, 100), ({"dp_replicate": 2, "dp_shard": 1}, 25)])
def test_the_bits_are_the_same_in_many_mixtures_on_shards_and_replicas(
    tmp_path: Path, layout: dict[str, Any], count: int
) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    assert run_ranks(mixtures, 2, folder, count, True, ParallelConfig(**layout)) == [0, 0]


def differences_in_company(folder: str, settings: dict[str, Any], count: int) -> tuple[float, float]:
    """The largest relative differences of an adapter in random mixtures from the same adapter alone: of its answers, and of its state."""
    engine = bank_engine(folder, micro_batch=MicroBatchConfig(max_tokens=512), **settings)
    try:
        trainer = AdapterTrainer(engine)
        mine = config(3, ("attention", "mlp", "unembedding"), 5)
        states, answers = alone(trainer, mine)
        random = Random(1)
        of_answers, of_states = [0.0], [0.0]
        for _ in range(count):
            other_states, other_answers = mixed(trainer, mine, random)
            of_states += [float((one - other).norm() / one.norm()) for one, other in zip(states, other_states, strict=True)]
            for (loss, log_probs), (other_loss, other_log_probs) in zip(answers, other_answers, strict=True):
                of_answers.append(abs(loss - other_loss) / max(1.0, abs(loss)))
                if log_probs is not None and len(log_probs):
                    of_answers.append(float((log_probs - other_log_probs).abs().max() / log_probs.abs().max()))
        return max(of_answers), max(of_states)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "layout"), [("fsdp", {"cp": 2}), ("mcore", {"tp": 2}), ("mcore", {"cp": 2})])
def test_company_changes_less_than_a_millionth_elsewhere(tmp_path: Path, backend: str, layout: dict[str, Any]) -> None:
    """In layouts without `engine.invariant`, where products of other shapes round differently."""
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    settings = {"backend": backend, "parallel": ParallelConfig(**layout)}
    for of_answers, of_states in run_ranks(differences_in_company, 2, folder, settings, 4):
        assert of_answers < 1e-6
        # AdamW divides by the root of the second moment, so that factors with tiny gradients differ by more.
        assert of_states < 5e-6


# ---- layouts ---------------------------------------------------------------------------------------------------------


def trajectory(folder: str, layout: dict[str, Any], counts: tuple[int, ...]) -> list[float]:
    """Losses and norms of two adapters, with so many documents in each call."""
    engine = bank_engine(folder, parallel=ParallelConfig(**layout), micro_batch=MicroBatchConfig(max_tokens=64))
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("a", config(4, ALL, 1))
        trainer.create("b", config(2, ("unembedding",), 2))
        random, numbers = Random(3), []
        for count in counts:
            batches = [
                ("a", "cross_entropy", documents(random, count)),
                ("b", "ppo", documents(random, 1, "ppo")),
                ("b", "cross_entropy", documents(random, count, targets=3)),
            ]
            calls = [call(name, shard(trainer, batch), loss) for name, loss, batch in batches]
            numbers += [result.loss for result in done(trainer.forward_backward(calls))]
            numbers += [trainer.optim_step(name, OPTIM).grad_norm for name in ("a", "b")]
        return numbers
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [(2, {}), (2, {"cp": 2}), (2, {"dp_replicate": 2, "dp_shard": 1}), pytest.param(4, {"cp": 2}, marks=pytest.mark.slow)],
)
def test_every_layout_has_the_same_numbers(tmp_path: Path, nproc: int, layout: dict[str, int]) -> None:
    """Calls of one document leave a rank without any, and an adapter of the head alone reaches no layer."""
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    counts = (6, 1, 3)
    expected = trajectory(folder, {}, counts)
    for numbers in run_ranks(trajectory, nproc, folder, layout, counts):
        for a, b in zip(numbers, expected, strict=True):
            close(a, b, 2e-5)


# ---- wrong calls -----------------------------------------------------------------------------------------------------


def wrong_call_on_one_rank(folder: str) -> list[str]:
    engine = bank_engine(folder)
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("a", config())
        batch = documents(Random(0), 1)
        bad = call("a", batch, "ppo" if engine.topology.rank == 1 else "cross_entropy")
        results = trainer.forward_backward([bad, call("a", batch), call("a", None)])
        with pytest.raises(DrivetrainError):
            trainer.create("b", config(100_00 if engine.topology.rank == 0 else 4))
        return [str(result.error) for result in results]
    finally:
        engine.close()


def test_a_call_that_is_wrong_on_one_rank_is_wrong_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(wrong_call_on_one_rank, 2, str(save_tiny_model(tmp_path / "model", "llama")))
    assert first == second
    assert "loss ppo reads old_log_probs" in first[0]
    assert first[1] == "None"
    assert "no documents" in first[2]


class FailsOnNegative(TokenSumLoss):
    """A loss that can only be computed of zeros, and says so when it is too late to ask."""

    linear = False

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        assert outputs.log_probs is not None
        if batch.num_tokens and float(outputs.log_probs.min()) < 0:
            raise ValueError("negative")
        return super().__call__(outputs, batch)


def calls_of_two(folder: str, settings: dict[str, Any], fails: bool) -> tuple[list[str], list[float], list[float]]:
    """Errors, losses and gradient norms of calls of two adapters, all at once with one that fails, or one after another without it."""
    engine = bank_engine(folder, **settings)
    try:
        trainer = AdapterTrainer(engine)
        random = Random(1)
        for name, seed in (("a", 1), ("b", 2)):
            trainer.create(name, config(seed=seed))
        first, second, several = documents(random, 4), documents(random, 2), documents(random, 2, targets=2)
        done(trainer.forward_backward([call("a", second), call("b", second)]))
        calls = [call("b", first), call("a", first), call("a", second), call("b", several)]
        if fails:
            # Only rank 0 has documents of it, and it is in another pass than the calls before it.
            shard = packed(several) if engine.topology.dp_rank == 0 else None
            calls.insert(2, TrainingCall(adapter="a", batch=shard, loss=FailsOnNegative("cross_entropy")))
            results = trainer.forward_backward(calls)
        else:
            results = [result for one in calls for result in trainer.forward_backward([one])]
        norms = [trainer.optim_step(name, OPTIM).grad_norm for name in ("a", "b")]
        return [str(result.error) for result in results], [result.loss for result in results], norms
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("nproc", "settings"),
    [(1, {}), (2, {}), pytest.param(2, {"backend": "mcore", "parallel": ParallelConfig(tp=2)}, marks=pytest.mark.slow)],
)
def test_a_loss_that_fails_in_its_pass_fails_alone(tmp_path: Path, nproc: int, settings: dict[str, Any]) -> None:
    """Neither other adapters nor other calls of its own adapter have a gradient twice or not at all, and no rank is left waiting."""
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    _, losses, norms = run_ranks(calls_of_two, nproc, folder, settings, False)[0]
    for messages, with_it, norms_with_it in run_ranks(calls_of_two, nproc, folder, settings, True):
        assert [message == "None" for message in messages] == [True, True, False, True, True]
        assert "FailsOnNegative cannot be computed of this batch: ValueError: negative" in messages[2]
        assert [with_it[i] for i in (0, 1, 3, 4)] == pytest.approx(losses, rel=1e-5)
        assert norms_with_it == pytest.approx(norms, rel=1e-5)


def test_an_error_of_the_engine_leaves_all_gradients_as_they_were(
    trainer: AdapterTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(1)
    for name in ("a", "b"):
        trainer.create(name, config())
        done(trainer.forward_backward([call(name, documents(random, 2))]))
    before = {name: grads.clone() for name in ("a", "b") if (grads := trainer.bank[name].grads) is not None}
    assert len(before) == 2
    run, count = trainer._run, 0

    def fails_in_the_second_pass(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        run(*args, **kwargs)
        if count == 2:
            raise RuntimeError("lost")

    monkeypatch.setattr(trainer, "_run", fails_in_the_second_pass)
    with pytest.raises(RuntimeError, match="lost"):
        trainer.forward_backward([call("a", documents(random, 2)), call("b", documents(random, 2, targets=2))])
    assert count == 2
    for name, grads in before.items():
        torch.testing.assert_close(trainer.bank[name].grads, grads, rtol=0, atol=0)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    engine = bank_engine(save_tiny_model(tmp_path / "model", "llama"), 2)
    yield AdapterTrainer(engine)
    engine.close()


def test_wrong_calls_change_nothing_and_the_others_go_on(trainer: AdapterTrainer) -> None:
    trainer.create("a", config())
    good, long = documents(Random(0), 2), documents(Random(0), 1)
    for values in long[0].values():
        values.extend(values * 200)
    beyond = [{**good[0], "targets": [10**6] * len(good[0]["tokens"])}]
    results = trainer.forward_backward(
        [call("nobody", good), call("a", good, "ppo"), call("a", good), call("a", long), call("a", beyond), call(None, good)]
    )
    messages = [str(result.error) for result in results]
    expected = [
        "there is no adapter 'nobody'",
        "reads old_log_probs",
        "None",
        "a document has",
        "labels are from",
        "has nothing to train",
    ]
    for message, pattern in zip(messages, expected, strict=True):
        assert pattern in message
    gradient = trainer.bank["a"].grads
    trainer.create("b", config())
    done(trainer.forward_backward([call("b", good)]))
    assert gradient is not None
    torch.testing.assert_close(gradient, trainer.bank["b"].grads)


def test_forward_only_leaves_gradients_alone_and_has_the_same_log_probs(trainer: AdapterTrainer) -> None:
    trainer.create("a", config(4, ALL))
    batch = documents(Random(0), 4)
    (trained,) = done(trainer.forward_backward([call("a", batch)]))
    before = trainer.bank["a"].grads
    assert before is not None
    before = before.clone()
    evaluated, base = done(
        trainer.forward_backward([call("a", batch, forward_only=True), call(None, batch, forward_only=True)])
    )
    assert torch.equal(before, trainer.bank["a"].grads)  # type: ignore[arg-type]
    assert evaluated.log_probs is not None
    assert trained.log_probs is not None
    assert base.log_probs is not None
    torch.testing.assert_close(evaluated.log_probs, trained.log_probs, rtol=1e-6, atol=1e-6)
    # B is zero, so that an adapter that has not learned anything changes nothing.
    torch.testing.assert_close(base.log_probs, trained.log_probs, rtol=1e-6, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(trainer: AdapterTrainer) -> None:
    trainer.create("a", config())
    batch = documents(Random(0), 1)
    before = trainer.bank["a"].values.clone()
    batch[0]["loss_weights"] = [1e38, *batch[0]["loss_weights"][1:]]
    done(trainer.forward_backward([call("a", batch)] * 2))
    trainer.bank["a"].grads[0] = float("inf")  # type: ignore[index]
    with pytest.raises(NonFiniteError, match="dropped"):
        trainer.optim_step("a", OPTIM)
    assert torch.equal(before, trainer.bank["a"].values)
    assert trainer.optim_step("a", OPTIM).grad_norm == 0.0


def test_a_ratio_that_overflows_is_not_hidden(trainer: AdapterTrainer) -> None:
    """Ratios are not truncated: the loss is infinite, and the step says so. A bound, or an advantage of zero, keeps it finite."""
    trainer.create("a", config())
    batch = documents(Random(0), 1, "ppo")
    length = len(batch[0]["tokens"])
    batch[0]["old_log_probs"] = [-200.0] * length
    for advantage, loss, finite in (
        (1.0, "importance_sampling", False),
        (1.0, "ppo", True),
        (-1.0, "ppo", False),
        (0.0, "importance_sampling", True),
    ):
        batch[0]["advantages"] = [advantage] * length
        (result,) = done(trainer.forward_backward([call("a", batch, loss)]))
        assert bool(torch.isfinite(torch.tensor(result.loss))) == finite
        if finite:
            trainer.optim_step("a", OPTIM)
        else:
            with pytest.raises(NonFiniteError):
                trainer.optim_step("a", OPTIM)


def test_saved_state_goes_on_to_the_bit(trainer: AdapterTrainer) -> None:
    random = Random(0)
    batches = [documents(random, 2) for _ in range(4)]
    trainer.create("a", config(seed=3))

    def steps(name: str, which: list[list[Document]]) -> None:
        for batch in which:
            done(trainer.forward_backward([call(name, batch)]))
            trainer.optim_step(name, OPTIM)

    steps("a", batches[:2])
    saved = trainer.bank["a"].state_dict()
    steps("a", batches[2:])
    trainer.create("b", config(seed=9))
    done(trainer.forward_backward([call("b", batches[0])]))
    trainer.bank["b"].load_state_dict(saved)
    steps("b", batches[2:])
    assert all(torch.equal(x, y) for x, y in zip(state(trainer, "a"), state(trainer, "b"), strict=True))
    assert trainer.bank["b"].step_count == 4
    # Without its moments an adapter begins anew.
    trainer.bank["b"].load_state_dict({k: v for k, v in saved.items() if "exp" not in k})
    assert trainer.bank["b"].step_count == 0
    assert float(state(trainer, "b")[1].abs().sum()) == 0
    trainer.drop("b")
    trainer.create("c", config(rank=2))
    with pytest.raises(ConfigError, match="same rank and targets"):
        trainer.bank["c"].load_state_dict(saved)


def test_adapters_that_cannot_be_created(trainer: AdapterTrainer) -> None:
    trainer.create("a", config())
    for name, settings, message in (
        ("a", config(), "already"),
        ("b", config(rank=10_000), "exceeds the smallest input or output size"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.create(name, settings)
    trainer.create("b", config())
    with pytest.raises(ConfigError, match="max_adapters=2"):
        trainer.create("c", config())
    with pytest.raises(ConfigError, match="no adapter 'c'"):
        trainer.drop("c")
    with pytest.raises(ConfigError, match=r"optim\.name=sgd"):
        trainer.optim_step("a", OptimConfig(name="sgd"))
    for wrong in ({"rank": 0}, {"targets": ()}, {"targets": ("experts",)}, {"alpha": 0.0}, {"seed": -1}):
        with pytest.raises(ConfigError):
            AdapterConfig(**wrong)


@pytest.mark.parametrize(
    ("model", "engine", "optim"),
    [
        ({}, {}, OptimConfig()),
        ({"lora": LoraConfig(rank=2)}, {}, None),
        ({"head": "value"}, {}, None),
        ({"freeze": ("*",)}, {}, None),
        ({}, {"compile": True}, None),
        ({}, {"parallel": ParallelConfig(ep=2)}, None),
    ],
)
def test_settings_that_have_no_place_beside_several_adapters(
    tmp_path: Path, model: dict[str, Any], engine: dict[str, Any], optim: OptimConfig | None
) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    with pytest.raises(CapabilityError, match="max_adapters=2"):
        build(folder, model={"max_adapters": 2, **model}, optim=optim, **engine)


def test_an_engine_without_adapters_has_no_trainer(tmp_path: Path) -> None:
    engine = build(save_tiny_model(tmp_path / "model", "llama"), optim=None)
    with pytest.raises(ConfigError, match="max_adapters=0"):
        AdapterTrainer(engine)
    engine.close()
    with pytest.raises(ConfigError, match="max_adapters=-1"):
        ModelConfig(max_adapters=-1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("stable_reinforce", {}, "there is no loss"),
        ("ppo", {"beta": 1.0}, "no setting 'beta'"),
        ("ppo", {"clip_low_threshold": 2.0}, "above clip_high_threshold"),
        ("dro", {"beta": float("nan")}, "finite"),
    ],
)
def test_losses_that_there_are_not(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenSumLoss(name, settings)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def trained_and_saved(folder: str, root: str) -> None:
    engine = bank_engine(folder)
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("a", config(4, ("attention", "mlp"), 1))
        for step in range(2):
            done(trainer.forward_backward([call("a", shard(trainer, documents(Random(step), 3)))]))
            trainer.optim_step("a", OPTIM)
        done(trainer.forward_backward([call("a", shard(trainer, documents(Random(9), 2)))]))
        trainer.save("a", root)
    finally:
        engine.close()


def loaded(folder: str, checkpoint: str) -> list[float]:
    engine = bank_engine(folder)
    try:
        trainer = AdapterTrainer(engine)
        trainer.create("b", adapter_config_of(checkpoint))
        trainer.load("b", checkpoint)
        assert trainer.bank["b"].grads is None
        (result,) = done(trainer.forward_backward([call("b", shard(trainer, documents(Random(5), 3)))]))
        return [result.loss, trainer.optim_step("b", OPTIM).grad_norm, float(trainer.bank["b"].values.double().square().sum())]
    finally:
        engine.close()


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_moe", "gpt2"))]
)
def test_a_checkpoint_goes_on_in_any_layout_in_peft_and_as_a_run_of_its_own(tmp_path: Path, family: str) -> None:
    folder, root = str(save_tiny_model(tmp_path / "model", family)), str(tmp_path / "saved")
    run_ranks(trained_and_saved, 2, folder, root)
    checkpoint = f"{root}/step-00000002"
    one = loaded(folder, checkpoint)
    for numbers in run_ranks(loaded, 2, folder, checkpoint):
        for a, b in zip(numbers, one, strict=True):
            close(a, b, 1e-5)
    # peft reads what the tools make of it, and has the same log-probabilities.
    exported = tmp_path / "peft"
    merge(checkpoint, exported, adapters="only")
    documents_of_test = documents(Random(6), 3)
    engine = bank_engine(folder)
    trainer = AdapterTrainer(engine)
    trainer.create("a", adapter_config_of(checkpoint))
    trainer.load("a", checkpoint)
    (expected,) = done(trainer.forward_backward([call("a", documents_of_test, forward_only=True)]))
    engine.close()
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    model = PeftModel.from_pretrained(base, exported).eval()
    assert expected.log_probs is not None
    found = []
    for document in documents_of_test:
        logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0].double()
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(document["targets"])[:, None])[:, 0].detach())
    torch.testing.assert_close(expected.log_probs.double(), torch.cat(found), rtol=1e-5, atol=1e-5)
    # An engine that has this adapter alone goes on from it too.
    saved = json.loads((Path(checkpoint) / "manifest.json").read_text())["model"]["lora"]
    settings = LoraConfig(rank=saved["rank"], alpha=saved["alpha"], targets=tuple(saved["targets"]))
    engine = build(folder, model={"lora": settings}, optim=OPTIM)
    assert engine.load_checkpoint(checkpoint).step == 2
    assert engine.optimizer_scalars()["step"].popitem()[1] == 2
    batch = from_lists([[int(token) for token in document["tokens"]] for document in documents_of_test])
    log_probs = engine.infer_batch(batch, OutputRequest(log_probs=True))["log_probs"]
    engine.close()
    for document, part in zip(documents_of_test, log_probs.split(batch.lengths), strict=True):
        logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0, :-1].double()
        targets = torch.tensor(document["tokens"])[1:, None].long()
        expected_of = torch.log_softmax(logits, -1).gather(1, targets)[:, 0].detach()
        torch.testing.assert_close(part[:-1].double(), expected_of, rtol=1e-5, atol=1e-5)


def test_checkpoints_of_other_models_and_adapters_are_refused(tmp_path: Path) -> None:
    folder, root = str(save_tiny_model(tmp_path / "model", "llama")), str(tmp_path / "saved")
    trained_and_saved(folder, root)
    other = save_tiny_model(tmp_path / "other", "llama", seed=3)
    engine = bank_engine(other)
    trainer = AdapterTrainer(engine)
    trainer.create("a", config(4, ("attention", "mlp"), 1))
    with pytest.raises(CheckpointError, match="of another model"):
        trainer.load("a", f"{root}/step-00000002")
    engine.close()
    engine = bank_engine(folder)
    trainer = AdapterTrainer(engine)
    for name, settings, message in (
        ("rank", config(3, ("attention", "mlp")), "is \\[3, "),
        ("targets", config(4, ("mlp",)), "tensors that the model does not have"),
        ("alpha", AdapterConfig(rank=4, alpha=8.0, targets=("attention", "mlp")), "alpha=32.0, but the adapter has alpha=8.0"),
    ):
        trainer.create(name, settings)
        with pytest.raises(CheckpointError, match=message):
            trainer.load(name, f"{root}/step-00000002")
    engine.close()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        adapter_config_of(tmp_path)
