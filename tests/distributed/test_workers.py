"""Workers on engines, alone and in local groups: the same numbers in every form, every layout, and as plain float64."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.errors import BatchError, ConfigError, DrivetrainError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.losses.policy import PolicyLoss
from drivetrain.losses.preference import PreferenceLoss
from drivetrain.losses.sft import SFTLoss
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.base import WorkerConfig
from drivetrain.workers.roles.batch_adapters import adapt_batch
from drivetrain.workers.roles.critic import CriticConfig, CriticWorker
from drivetrain.workers.roles.dispatch import MiniBatches, assign_mini_batches, assign_rows
from drivetrain.workers.roles.reference import ReferenceWorker, ReferenceWorkerConfig
from drivetrain.workers.roles.reward import FunctionRewardConfig, FunctionRewardSample, FunctionRewardWorker, RewardWorker
from helpers.engines import build
from helpers.harness import run_ranks
from helpers.hybridflow import EXAMPLES, Plain, example, expected, logs, values
from helpers.preferences import Pair, pair_loss

EXAMPLE = example()
ROWS = json.loads((EXAMPLES / "rollouts.json").read_text())
ENGINE = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=64))
OPTIM = OptimConfig(lr=1e-3, betas=(0.9, 0.999))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = EXAMPLE.make_models(tmp_path_factory.mktemp("models"))
    return folder


def policy(models: Path, name: str = "policy") -> ModelConfig:
    return ModelConfig(path=str(models / name), head="value" if name == "reward" else "lm")


def padded_data(*, uids: bool = False) -> dict[str, Any]:
    data: dict[str, Any] = EXAMPLE.read_rollouts(EXAMPLES / "rollouts.json")
    return data if uids else {name: value for name, value in data.items() if name != "uids"}


def rows_of(padded: torch.Tensor) -> list[list[float]]:
    return [padded[i, : len(row["response"])].tolist() for i, row in enumerate(ROWS)]


def nested(rows: list[Any], dtype: torch.dtype = torch.int64) -> Any:
    return torch.nested.nested_tensor([torch.tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)


# ---- one process --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
def test_log_probs_and_values_are_those_of_plain_models_in_every_form(models: Path) -> None:
    actor = ActorWorker(ActorConfig(model=policy(models), engine=ENGINE, optim=OPTIM)).initialize()
    critic = CriticWorker(CriticConfig(model=policy(models, "reward"), engine=ENGINE, optim=OPTIM)).initialize()
    reward = RewardWorker(WorkerConfig(model=policy(models, "reward"), engine=ENGINE)).initialize()
    plain, scorer = (
        Plain(models / "policy", AutoModelForCausalLM),
        Plain(models / "reward", AutoModelForSequenceClassification),
    )
    with torch.no_grad():
        wanted = [logs(plain.model, row) for row in ROWS]
        worth = [values(scorer.model, row) for row in ROWS]
    data = padded_data()
    got = actor.compute_log_probs(data, entropy=True)
    found = critic.compute_values(data)["values"]
    for i, (lp, entropy) in enumerate(wanted):
        assert rows_of(got["log_probs"])[i] == pytest.approx(lp.tolist(), abs=2e-6)
        assert rows_of(got["entropy"])[i] == pytest.approx(entropy.tolist(), abs=2e-6)
        assert rows_of(found)[i] == pytest.approx(worth[i][:-1].tolist(), abs=2e-6)
    assert reward.compute_rewards(data)["rewards"].tolist() == pytest.approx([float(v[-1]) for v in worth], abs=2e-6)
    padding = adapt_batch(data)
    assert not got["log_probs"][~padding.where].any()  # type: ignore[attr-defined]
    # The other forms give the same numbers to the bit.
    jagged = TensorDict(
        {"input_ids": nested([r["prompt"] + r["response"] for r in ROWS]), "responses": nested([r["response"] for r in ROWS])},
        batch_size=[len(ROWS)],
    )
    told = actor.compute_log_probs(jagged)["log_probs"]
    assert [t.tolist() for t in told.unbind()] == rows_of(got["log_probs"])
    packed = actor.compute_log_probs(padding.batch)["log_probs"]
    assert torch.equal(padding.tokens(packed), got["log_probs"])
    # At another temperature they are others, and right.
    warm = ActorWorker(
        ActorConfig(model=policy(models), engine=ENGINE, optim=OPTIM, loss=PolicyLoss(temperature=2.0))
    ).initialize()
    row = ROWS[0]
    with torch.no_grad():
        z = plain.model(input_ids=torch.tensor([row["prompt"] + row["response"]])).logits[0, len(row["prompt"]) - 1 : -1] / 2
    other = z.log_softmax(-1).gather(1, torch.tensor(row["response"])[:, None])[:, 0]
    assert rows_of(warm.compute_log_probs(data)["log_probs"])[0] == pytest.approx(other.tolist(), abs=2e-6)
    reference = ReferenceWorker(ReferenceWorkerConfig(model=policy(models), engine=ENGINE, temperature=2.0)).initialize()
    assert torch.equal(reference.compute_log_probs(data)["reference_log_probs"], warm.compute_log_probs(data)["log_probs"])
    for worker in (actor, critic, reward, warm, reference):
        worker.close()


@pytest.mark.usefixtures("process_group")
def test_a_padded_and_a_packed_update_are_one(models: Path) -> None:
    found = []
    for form in ("padded", "packed", "jagged"):
        actor = ActorWorker(ActorConfig(model=policy(models), engine=ENGINE, optim=OPTIM)).initialize()
        data = padded_data()
        old = actor.compute_log_probs(data)["log_probs"]
        advantages = torch.linspace(-1, 1, old.numel()).view_as(old)
        batch: Any = {**data, "old_log_probs": old, "advantages": advantages}
        if form == "packed":
            batch = adapt_batch(batch).batch
        elif form == "jagged":
            batch = TensorDict(
                {
                    "input_ids": nested([r["prompt"] + r["response"] for r in ROWS]),
                    "responses": (answers := nested([r["response"] for r in ROWS])),
                    "old_log_probs": torch.nested.nested_tensor_from_jagged(
                        nested(rows_of(old), torch.float32).values(), answers.offsets()
                    ),
                    "advantages": torch.nested.nested_tensor_from_jagged(
                        nested(rows_of(advantages), torch.float32).values(), answers.offsets()
                    ),
                },
                batch_size=[len(ROWS)],
            )
        steps = [list(range(6)), list(range(6, 12)), [0, 3, 9]]
        found.append([(r.loss, r.grad_norm) for r in actor.update(batch, steps)])
        actor.close()
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3


@pytest.mark.usefixtures("process_group")
def test_checkpoints_rest_and_weights_go_through_the_engine(models: Path, tmp_path: Path) -> None:
    config = ActorConfig(model=policy(models), engine=ENGINE, optim=OPTIM)
    actor = ActorWorker(config).initialize()
    data = padded_data()
    old = actor.compute_log_probs(data)["log_probs"]
    batch = {**data, "old_log_probs": old, "advantages": torch.ones_like(old)}
    actor.to("disk")
    actor.update(batch)
    folder = actor.save_checkpoint(tmp_path, 1)
    again = ActorWorker(config).initialize()
    assert again.load_checkpoint(folder) == 1
    assert [r.loss for r in again.update(batch)] == [r.loss for r in actor.update(batch)]
    with actor.weights() as left, again.weights() as right:
        assert all(torch.equal(a[1], b[1]) for a, b in zip(left, right, strict=True))
    actor.close()
    again.close()


def reward_by_length(answers: Any) -> list[float]:
    return [float(len(a.response)) for a in answers]


def reward_too_few(answers: Any) -> list[float]:
    return [0.0]


@pytest.mark.usefixtures("process_group")
def test_a_reward_may_be_a_function(models: Path) -> None:
    seen: list[FunctionRewardSample] = []

    def count(answers: Any) -> list[float]:
        seen.extend(answers)
        return reward_by_length(answers)

    worker = FunctionRewardWorker(FunctionRewardConfig(function=count, tokenizer=str(models / "policy"))).initialize()
    assert worker.compute_rewards(padded_data(uids=True))["rewards"].tolist() == [float(len(r["response"])) for r in ROWS]
    assert (seen[0].prompt, seen[0].response) == (ROWS[0]["prompt"], ROWS[0]["response"])
    assert seen[0].fields == {"uids": float(ROWS[0]["group"])}
    assert seen[0].prompt_text.startswith("<user>")
    assert seen[0].response_text.isdigit()
    # What tensors do not hold goes beside them.
    columns = {"solution": [f"solution {i}" for i in range(len(ROWS))]}
    seen.clear()
    worker.compute_rewards(padded_data(uids=True), columns=columns)
    assert [a.fields["solution"] for a in seen] == columns["solution"]
    for given, message in (
        ({"solution": ["x"]}, "column 'solution' has 1 entries for 12 rows"),
        ({"solution": "x" * 12}, "column 'solution' is a str"),
        ({"uids": ["x"] * 12}, "'uids' is both a column and a field of the batch"),
    ):
        with pytest.raises(BatchError, match=message):
            worker.compute_rewards(padded_data(uids=True), columns=given)  # type: ignore[arg-type]
    single = FunctionRewardConfig(function=lambda some: 1.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(BatchError, match="returned a float; it must return one reward per completion"):
        FunctionRewardWorker(single).initialize().compute_rewards(padded_data(uids=True))
    for wrong, message in ((None, "returned None for"), (float("nan"), "returned nan for"), ("good", "returned 'good' for")):
        strange = FunctionRewardConfig(function=lambda some, value=wrong: [value for _ in some])  # type: ignore[misc]
        with pytest.raises(BatchError, match=message):
            FunctionRewardWorker(strange).initialize().compute_rewards(padded_data(uids=True))
    with pytest.raises(BatchError, match="returned 1 rewards for 12 completions"):
        FunctionRewardWorker(FunctionRewardConfig(function=reward_too_few)).initialize().compute_rewards(
            padded_data(uids=True)
        )


def test_roles_refuse_models_that_cannot_play_them(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.head=lm: CriticWorker needs model.head=value"):
        CriticWorker(CriticConfig(model=policy(models), engine=ENGINE, optim=OPTIM))
    with pytest.raises(ConfigError, match=r"ActorWorker is trained and needs optim"):
        ActorWorker(ActorConfig(model=policy(models), engine=ENGINE))
    with pytest.raises(ConfigError, match=r"ReferenceWorker is never trained"):
        ReferenceWorker(ReferenceWorkerConfig(model=policy(models), engine=ENGINE, optim=OPTIM))
    headless = RewardWorker(WorkerConfig(model=replace(policy(models), head="value"), engine=ENGINE))
    with pytest.raises(ConfigError, match=r"has no reward head \(score.weight\)"):
        headless.check()
    RewardWorker(WorkerConfig(model=policy(models, "reward"), engine=ENGINE)).check()


# ---- what is refused before anything is changed -------------------------------------------------------------------------


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    with worker.weights() as stream:
        return {name: tensor.clone() for name, tensor in stream}


def rank_update_with_a_bad_step(models: str, backend: str, bad: str) -> tuple[str, bool, int]:
    """An update whose third step cannot be made, for what stands in the last rank's share alone."""
    engine = replace(ENGINE, backend=backend)
    actor = ActorWorker(ActorConfig(model=policy(Path(models)), engine=engine, optim=OPTIM)).initialize()
    data = {name: value[:6] for name, value in padded_data().items()}
    old = actor.compute_log_probs(data)["log_probs"]
    batch = {**data, "old_log_probs": old, "advantages": torch.ones_like(old)}
    before, step = weights_of(actor), actor.engine.step
    steps = [[0, 1], [2, 3], [4, 5]]
    topology = actor.engine.topology
    if topology.rank == topology.size - 1:
        if bad == "nan":
            batch["advantages"][5, 0] = float("nan")
        elif bad == "id":
            batch["input_ids"] = batch["input_ids"].clone()
            batch["input_ids"][4, -batch["responses"].shape[1] - 1] = 99
        elif bad == "row":
            steps[2] = [4, 6]
        elif bad == "count":
            steps.append([0])
        elif bad == "shape":
            batch["advantages"] = batch["advantages"][:, 1:]
        elif bad == "field":
            batch["advantage"] = batch["advantages"]
    told = ""
    try:
        actor.update(batch, steps)
    except DrivetrainError as e:
        told = str(e)
    after = weights_of(actor)
    same = all(torch.equal(before[name], after[name]) for name in before)
    made = actor.engine.step - step
    actor.close()
    return told, same, made


BAD = {
    "nan": r"advantages is nan at token \d+ in row 5",
    "id": r"token \d+ of row 4 has the id 99; the model has embeddings for the ids 0 to \d+",
    "row": "steps contains row 6; this rank's shard has rows 0 to 5",
    "count": "the ranks have 3, 4 optimizer steps to run",
    "shape": r"advantages is \[6, \d\]; it must be \[6, \d\]",
    "field": "the batch has the field 'advantage', which is never read; did you mean 'advantages'",
}


@pytest.mark.parametrize(
    "bad", [bad if bad in ("nan", "count", "none") else pytest.param(bad, marks=pytest.mark.slow) for bad in [*BAD, "none"]]
)
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("mcore", marks=pytest.mark.slow)])
def test_all_steps_of_an_update_are_checked_before_the_first_is_made(models: Path, backend: str, bad: str) -> None:
    for told, same, made in run_ranks(rank_update_with_a_bad_step, 2, str(models), backend, bad):
        if bad == "none":
            # The control.
            assert (told, same, made) == ("", False, 3)
        else:
            assert re.search(BAD[bad], told)
            assert same
            assert made == 0


@pytest.mark.usefixtures("process_group")
def test_ids_outside_the_vocabulary_are_one_error_with_row_and_id(models: Path) -> None:
    data = padded_data()
    wrong = {name: value.clone() for name, value in data.items()}
    wrong["input_ids"][3, -data["responses"].shape[1] - 1] = -1
    roles = {name: role for name, role in EXAMPLE.roles_on("fsdp", models, ParallelConfig()).items() if name != "critic"}
    with LocalWorkerGroup(roles) as group:
        for call in (group["actor"].compute_log_probs, group["reference"].compute_log_probs, group["reward"].compute_rewards):
            with pytest.raises(
                BatchError, match=r"token \d+ of row 3 has the id -1; the model has embeddings for the ids 0 to"
            ):
                call(wrong)
        packed = from_lists([[3, 4], [5, 10**9]])
        with pytest.raises(BatchError, match="token 1 of sequence 1 has the id 1000000000"):
            group["actor"].compute_log_probs(packed)
        narrow = {name: value.int() if not value.is_floating_point() else value for name, value in data.items()}
        assert torch.equal(
            group["actor"].compute_log_probs(narrow)["log_probs"], group["actor"].compute_log_probs(data)["log_probs"]
        )


@pytest.mark.usefixtures("process_group")
def test_documents_beyond_the_models_positions_are_warned_of_once(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    actor = ActorWorker(
        ActorConfig(model=policy(models), engine=replace(ENGINE, micro_batch=MicroBatchConfig(max_tokens=4096)), optim=OPTIM)
    ).initialize()
    positions = actor.engine.model_shape.positions
    assert positions is not None
    long = from_lists([[3] * 2 * positions])
    actor.compute_log_probs(from_lists([[3] * positions]))
    assert "positions" not in caplog.text
    for _ in range(2):
        actor.compute_log_probs(long)
    assert caplog.text.count(f"is longer than the {positions} positions that {models / 'policy'} supports") == 1
    assert f"{2 * positions} tokens" in caplog.text
    actor.close()


def test_roles_of_a_group_have_one_temperature(models: Path) -> None:
    roles = EXAMPLE.roles_on("fsdp", models, ParallelConfig())
    warm = replace(roles["reference"], config=replace(roles["reference"].config, temperature=0.7))
    with pytest.raises(ConfigError, match=r"at different temperatures \(actor: 1, reference: 0.7\)"):
        LocalWorkerGroup({**roles, "reference": warm})


@pytest.mark.usefixtures("process_group")
def test_what_one_role_declares_rides_along_for_the_others(models: Path) -> None:
    roles = EXAMPLE.roles_on("fsdp", models, ParallelConfig())
    roles = {
        name: replace(roles[name], config=replace(roles[name].config, extra_fields=())) for name in ("actor", "reference")
    }
    roles["actor"] = replace(roles["actor"], config=replace(roles["actor"].config, extra_fields=("uid",)))
    roles["words"] = RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=reward_by_length))
    data = {**padded_data(), "uid": [f"prompt {i}" for i in range(len(ROWS))]}
    with LocalWorkerGroup(roles) as group:
        assert group["actor"].compute_log_probs(data)["log_probs"].any()
        assert group["reference"].compute_log_probs(data)["reference_log_probs"].any()
        assert group["words"].compute_rewards(data)["rewards"].tolist() == [float(len(r["response"])) for r in ROWS]
    alone = FunctionRewardWorker(FunctionRewardConfig(function=reward_by_length, extra_fields=("uid",))).initialize()
    assert alone.compute_rewards(data)["rewards"].shape == (len(ROWS),)


@pytest.mark.usefixtures("process_group")
def test_an_update_at_another_temperature_is_refused(models: Path) -> None:
    actor = ActorWorker(ActorConfig(model=policy(models), engine=ENGINE, optim=OPTIM)).initialize()
    with pytest.raises(ConfigError, match=r"loss.temperature=2.0: the actor's log-probabilities are computed at 1.0"):
        actor.update(padded_data(), loss=PolicyLoss(temperature=2.0))
    actor.close()


@pytest.mark.usefixtures("process_group")
def test_a_misspelt_field_of_a_packed_batch_is_refused_by_the_engine(models: Path) -> None:
    engine = build(models / "policy")
    batch = from_lists([[3, 4, 5], [6, 7]], token_fields={"loss_weight": [[1, 1, 0], [1, 1]]})
    before = engine.step
    with pytest.raises(BatchError, match="the field 'loss_weight', which is never read; did you mean 'loss_weights'"):
        engine.train_batch(batch, SFTLoss())
    assert engine.step == before
    engine.train_batch(batch.with_extra_fields("loss_weight"), SFTLoss())
    assert engine.step == before + 1
    engine.close()


# ---- who works on what --------------------------------------------------------------------------------------------------


def test_mini_batches_cover_every_epoch_and_keep_groups_together() -> None:
    groups = [0, 0, 1, 1, 2, 2, 2, 3]
    steps = MiniBatches(size=4, epochs=3, shuffle=True, seed=5).steps(groups)
    at = 0
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < len(groups):
            seen += steps[at]
            at += 1
        assert sorted(seen) == list(range(8))
    assert at == len(steps)
    for step in steps:
        inside = [groups[i] for i in step]
        assert all(inside.count(g) == groups.count(g) for g in inside)
        assert len(step) <= 4
    assert steps == MiniBatches(size=4, epochs=3, shuffle=True, seed=5).steps(groups)
    assert steps != MiniBatches(size=4, epochs=3, shuffle=True, seed=6).steps(groups)
    first, second = (MiniBatches(size=1, epochs=2, shuffle=True, seed=5).steps(list(range(9)))[at : at + 9] for at in (0, 9))
    assert first != second
    assert MiniBatches().steps(groups) == [list(range(8))]
    assert [len(s) for s in MiniBatches(size=3).steps(list(range(8)))] == [3, 3, 2]
    with pytest.raises(ConfigError, match="size=0"):
        MiniBatches(size=0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_and_steps_come_back_in_order(ranks: int) -> None:
    lengths = [4, 10, 2, 5, 5, 3, 8]
    shares = assign_rows(lengths, None, ranks, 1e-3)
    assert sorted(i for own in shares.rows for i in own) == list(range(7))
    plan = MiniBatches(size=3, epochs=2, shuffle=True)
    deal = assign_mini_batches(lengths, None, ranks, 1e-3, plan)
    assert deal.steps is not None
    for number, step in enumerate(plan.steps(list(range(7)))):
        together = sorted(deal.rows[r][place] for r in range(ranks) for place in deal.steps[r][number])
        assert together == step


# ---- groups of processes ------------------------------------------------------------------------------------------------


def assert_close(got: dict[str, Any], wanted: dict[str, list[tuple[float, float]]]) -> None:
    for name, steps in wanted.items():
        assert len(got[name]) == len(steps)
        for record, (loss, norm) in zip(got[name], steps, strict=True):
            assert record["loss"] == pytest.approx(loss, rel=5e-6, abs=1e-6), name
            assert record["grad_norm"] == pytest.approx(norm, rel=5e-5), name


@pytest.fixture(scope="module")
def float64(models: Path) -> dict[str, list[tuple[float, float]]]:
    return expected(models, ROWS, EXAMPLE.STEPS.steps(list(range(len(ROWS)))))


def rank_example(models: str, backend: str, parallel: dict[str, Any]) -> Any:
    with LocalWorkerGroup(EXAMPLE.roles_on(backend, Path(models), ParallelConfig(**parallel))) as group:
        return EXAMPLE.run(group)


@pytest.mark.parametrize(
    ("backend", "nproc", "parallel"),
    [
        ("fsdp", 1, {}),
        pytest.param("fsdp", 2, {}, marks=pytest.mark.slow),
        ("mcore", 2, {"tp": 2}),
        pytest.param("mcore", 2, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp", 4, {"cp": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_ppo_and_a_grpo_step_equal_plain_float64(
    models: Path, float64: dict[str, Any], backend: str, nproc: int, parallel: dict[str, Any]
) -> None:
    for got in run_ranks(rank_example, nproc, str(models), backend, parallel):
        assert_close(got, float64)


def test_the_comparison_sees_another_step(models: Path, float64: dict[str, Any]) -> None:
    """The control: answers in another order of mini-batches."""
    other = expected(models, ROWS, MiniBatches(size=4, epochs=2).steps(list(range(len(ROWS)))))
    with pytest.raises(AssertionError):
        assert_close({k: [{"loss": a, "grad_norm": b} for a, b in v] for k, v in other.items()}, float64)


def rank_layouts(models: str) -> Any:
    """Roles of different layouts and backends in one process group."""
    roles = EXAMPLE.roles_on("fsdp", Path(models), ParallelConfig())
    mixed = EXAMPLE.roles_on("mcore", Path(models), ParallelConfig(tp=2))
    with LocalWorkerGroup({**roles, "reference": mixed["reference"], "critic": mixed["critic"]}) as group:
        return EXAMPLE.run(group)


@pytest.mark.slow
def test_roles_of_different_layouts_share_processes(models: Path, float64: dict[str, Any]) -> None:
    for got in run_ranks(rank_layouts, 2, str(models)):
        assert_close(got, float64)


def rank_preferences(models: str, backend: str, parallel: dict[str, Any]) -> list[tuple[float, float]]:
    """Two steps of DPO: a reference role and an actor, over the recorded answers, the first of every two as the better one."""
    roles = EXAMPLE.roles_on(backend, Path(models), ParallelConfig(**parallel))
    actor = replace(roles["actor"], config=replace(roles["actor"].config, loss=PreferenceLoss(beta=0.5)))
    with LocalWorkerGroup({"actor": actor, "reference": roles["reference"]}) as group:
        data = padded_data()
        data["chosen"] = torch.tensor([1.0, 0.0] * (len(ROWS) // 2))
        data["group_ids"] = torch.arange(len(ROWS)) // 2
        data |= group["reference"].compute_log_probs(data)
        return [(r.loss, r.grad_norm) for _ in range(2) for r in group["actor"].update(data)]


@pytest.mark.parametrize(
    ("backend", "nproc", "parallel"),
    [("fsdp", 2, {}), pytest.param("mcore", 2, {"tp": 2}, marks=pytest.mark.slow)],
)
def test_preferences_in_workers_equal_plain_float64(models: Path, backend: str, nproc: int, parallel: dict[str, Any]) -> None:
    sides = [(row["prompt"] + row["response"], len(row["prompt"])) for row in ROWS]
    pairs = [Pair(chosen, rejected, 0.0) for chosen, rejected in zip(sides[::2], sides[1::2], strict=True)]
    plain = Plain(models / "policy", AutoModelForCausalLM)
    reference = Plain(models / "reference", AutoModelForCausalLM).model
    wanted = [plain.step(pair_loss("sigmoid", plain.model, reference, pairs, beta=0.5)[0]) for _ in range(2)]
    for got in run_ranks(rank_preferences, nproc, str(models), backend, parallel):
        for one, other in zip(got, wanted, strict=True):
            assert one == pytest.approx(other, rel=2e-5)
    # Control: the better answers as the worse ones.
    swapped = [Pair(pair.rejected, pair.chosen, 0.0) for pair in pairs]
    first = pair_loss("sigmoid", Plain(models / "policy", AutoModelForCausalLM).model, reference, swapped, beta=0.5)[0]
    assert float(first.detach()) != pytest.approx(wanted[0][0], rel=1e-3)


def rank_function_fails(models: str) -> str:
    role = RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=fails_on_long))
    with LocalWorkerGroup({"reward": role}) as group:
        try:
            group["reward"].compute_rewards(padded_data())
        except Exception as e:
            found = f"{type(e).__name__}: {e}"
        texts = from_lists([[1, 2, 3, 4], [3, 4], [5, 6, 7]])
        good = group["reward"].compute_rewards(texts, columns={"worth": ["1", "2", "3"]})["rewards"]
        assert good.tolist() == [1.0, 2.0, 3.0]
    return found


def fails_on_long(answers: Any) -> list[float]:
    if any(a.response == ROWS[0]["response"] and a.prompt == ROWS[0]["prompt"] for a in answers):
        raise ValueError("no such answer")
    return [float(a.fields.get("worth", 1)) for a in answers]


def test_an_error_of_one_rank_is_everybodys_and_the_group_goes_on(models: Path) -> None:
    told = run_ranks(rank_function_fails, 2, str(models))
    assert sorted(t.partition(":")[0] for t in told) == ["RemoteError", "ValueError"]
    assert all("no such answer" in t for t in told)


@pytest.mark.usefixtures("process_group")
def test_what_a_group_cannot_call_is_refused(models: Path) -> None:
    role = RoleSpec(worker=FunctionRewardWorker, config=FunctionRewardConfig(function=reward_by_length))
    with LocalWorkerGroup({"reward": role}) as group:
        with pytest.raises(ConfigError, match=r"there is no role 'critic'; the roles are reward"):
            group["critic"]
        with pytest.raises(ConfigError, match=r"has no method 'score' that a group can call; it has compute_rewards"):
            group["reward"].score()
        with pytest.raises(ConfigError, match="there is no role 'actor'"):
            group.sync_weights("actor", "reward")
        with pytest.raises(ConfigError, match="FunctionRewardWorker, the worker of 'reward', has no method weights"):
            group.sync_weights("reward", "reward")
        with pytest.raises(ConfigError, match="there is no role 'x'"):
            group.call("x", "to", "disk")
        with pytest.raises(ConfigError, match="needs a batch"):
            group["reward"].compute_rewards()
        with pytest.raises(BatchError, match="column 'worth' has 1 entries for 12 rows"):
            group["reward"].compute_rewards(padded_data(), columns={"worth": ["1"]})
        with pytest.raises(ConfigError, match=r"mini_batches=2; give MiniBatches\(size=...\)"):
            group["reward"].compute_rewards(padded_data(), mini_batches=2)
        with pytest.raises(ConfigError, match="mini_batches applies to updates only"):
            group["reward"].compute_rewards(padded_data(), mini_batches=MiniBatches())
    with pytest.raises(ConfigError, match="at least one role"):
        LocalWorkerGroup({})
    with pytest.raises(ConfigError, match="use ProcessWorkerGroup or RayWorkerGroup"):
        LocalWorkerGroup({"a": role, "b": replace(role, pool="other")})


@pytest.mark.usefixtures("process_group")
def test_the_programs_of_the_page(models: Path) -> None:
    """docs/workers.md's, as they stand there."""
    page = (EXAMPLES.parent / "docs" / "workers.md").read_text()
    parts = [part.split("```")[0].replace("MODEL", str(models / "policy")) for part in page.split("```python\n")[1:]]
    # The others are excerpts.
    programs = [part for part in parts if "LocalWorkerGroup(" in part]
    assert len(programs) == 2
    found: list[dict[str, Any]] = []
    for program in programs:
        found.append({})
        exec(compile(program, "docs/workers.md", "exec"), found[-1])
    assert found[0]["result"].grad_norm > 0
    assert found[0]["data"]["old_log_probs"].shape == (2, 3)
    assert len(found[1]["results"]) == 2
    assert torch.allclose(found[1]["data"]["old_log_probs"], found[1]["data"]["rollout_log_probs"], atol=1e-4)
