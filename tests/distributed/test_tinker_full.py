"""The training service that trains all weights (`--full`): the numbers of plain transformers, one model at a time, and what errors leave behind."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drivetrain.engine.config import OptimConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import WorkerError
from drivetrain.serve.tinker.model_operations import ModelOperations
from drivetrain.serve.tinker.sampler_weights import ModelSnapshots
from drivetrain.serve.tinker.training_group import FullTrainingGroup
from drivetrain.workers.roles.adapters import AdapterReply, AdapterRequest
from helpers.adapters import PlainModel
from helpers.tinker_replicas import LocalReplicas
from helpers.tinker_service import (
    Service,
    answer_of,
    body_of,
    datums,
    forward_backward,
    full_group_of,
    log_probs,
    running,
    sampler_of,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("process_group")
ADAM: dict[str, Any] = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
OPTIM = OptimConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=None)
FULL: dict[str, Any] = {"rank": 0, "seed": None}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "llama", vocab_size=300)


def serve(model: Path, *tests: Callable[[Service, Any], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run tests one after the other, each with a service that continues from the state of the one before."""

    async def run(test: Callable[[Service, Any], Coroutine[Any, Any, None]]) -> None:
        replicas = LocalReplicas(model, adapters=0)
        group = settings.pop("group", None) or full_group_of(model)
        options = {"replicas": replicas, "weights": ModelSnapshots(replicas, str(model)), "full": True, **settings}  # type: ignore[arg-type]
        try:
            async with running(model, model.parent / "state", group=group, **options) as service:
                await test(service, replicas)
        finally:
            replicas.close()

    for test in tests:
        asyncio.run(run(test))


def plain(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"tokens": one["tokens"], "targets": one["target_tokens"], "loss_weights": one["weights"]}
        for one in data
        if "weights" in one
    ]


async def train(service: Service, name: str, seq: int, data: list[dict[str, Any]], **params: float) -> tuple[float, float]:
    """Make a step; return the loss and the gradient norm."""
    answer = await service.result(await service.post("/forward_backward", forward_backward(name, seq, data)))
    step = await service.result(await service.step(name, seq + 1, **{**ADAM, **params}))
    return answer.metrics["loss:sum"], step["metrics"]["grad_norm:mean"]


def test_steps_are_those_of_plain_transformers_also_after_a_death(model: Path) -> None:
    """Two services after one another, the first of which ends between a pass and its optimizer step, with unsaved steps before."""
    reference, random = PlainModel(model), Random(0)
    data = [datums(random, 4) for _ in range(7)]
    names: list[str] = []

    def expected(number: int) -> tuple[float, float]:
        loss, _ = reference.forward_backward(plain(data[number]), "cross_entropy")
        return loss, reference.step(OPTIM)

    async def first(service: Service, _: Any) -> None:
        names.append(await service.model(await service.session(), **FULL))
        info = await service.post("/get_info", {"model_id": names[0]})
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        for number in range(3):
            assert await train(service, names[0], 2 * number + 1, data[number]) == pytest.approx(expected(number), rel=1e-4)
        await service.result(await service.post("/forward_backward", forward_backward(names[0], 7, data[3])))

    async def second(service: Service, _: Any) -> None:
        step = await service.result(await service.step(names[0], 8, **ADAM))
        assert step["metrics"]["grad_norm:mean"] == pytest.approx(expected(3)[1], rel=1e-4)
        assert step["metrics"]["step:unique"] == 4
        # What a snapshot is loaded from is what was trained, with the moments or without them.
        save = {"model_id": names[0], "seq_id": 9, "path": "state"}
        path = (await service.result(await service.post("/save_weights", save)))["path"]
        assert (await service.post("/weights_info", {"tinker_path": path}))["is_lora"] is False
        saved = {key: value.clone() for key, value in reference.model.state_dict().items()}
        assert await train(service, names[0], 10, data[4]) == pytest.approx(expected(4), rel=1e-4)
        fresh = PlainModel(model)
        fresh.model.load_state_dict(saved)
        for seq, with_moments in ((12, False), (15, True)):
            load = {"model_id": names[0], "seq_id": seq, "path": path, "optimizer": with_moments}
            assert (await service.result(await service.post("/load_weights", load)))["type"] == "load_weights"
            answer = await train(service, names[0], seq + 1, data[4])
            if with_moments:
                # It is where it was before the step with the moments was made.
                second_time = await train(service, names[0], seq + 3, data[5])
                assert second_time == pytest.approx(expected(5), rel=1e-4)
            else:
                loss, _ = fresh.forward_backward(plain(data[4]), "cross_entropy")
                assert answer == pytest.approx((loss, fresh.step(OPTIM)), rel=1e-4)

    serve(model, first, second, steps_per_save=2)


@pytest.mark.slow
def test_a_step_that_was_refused_is_not_made_after_a_death_either(model: Path) -> None:
    reference, data, names = PlainModel(model), datums(Random(7), 3), []

    async def first(service: Service, _: Any) -> None:
        names.append(await service.model(await service.session(), **FULL))
        await service.result(await service.post("/forward_backward", forward_backward(names[0], 1, data)))
        refused = await service.result(await service.step(names[0], 2, **{**ADAM, "learning_rate": 100.0}))
        assert "learning_rate" in refused["error"]

    async def second(service: Service, _: Any) -> None:
        reference.forward_backward(plain(data), "cross_entropy")
        step = await service.result(await service.step(names[0], 3, **ADAM))
        # The gradient is still there: the refused step has not used it.
        assert step["metrics"]["grad_norm:mean"] == pytest.approx(reference.step(OPTIM), rel=1e-4)

    serve(model, first, second)


@pytest.mark.slow
def test_a_place_is_free_when_a_session_has_ended(model: Path) -> None:
    """Models are created one after the other, each while the session of the one before ends with a request that waits."""

    async def test(service: Service, _: Any) -> None:
        session = await service.session()
        name = await service.model(session, **FULL)
        for _round in range(4):
            body = forward_backward(name, 2, datums(Random(1), 2))
            await service.post("/forward_backward", body)
            following = await service.session()
            path, key = f"/api/v1/sessions/{session}/finish", {"x-api-key": "tml-a-key-of-a-test"}

            async def create(session: str = following) -> str:
                # From the moment on at which the place is free.
                while service.training._queues:
                    await asyncio.sleep(0)
                return await service.model(session, **FULL)

            _, name = await asyncio.gather(service.http.post(path, json={}, headers=key), create())
            session = following

    serve(model, test)


def test_one_model_at_a_time_and_no_adapters(model: Path) -> None:
    async def test(service: Service, _: Any) -> None:
        session = await service.session()
        name = await service.model(session, **FULL)
        body = {"session_id": session, "base_model": "tiny", "lora_config": {"rank": 0}}
        other = await service.result(await service.post("/create_model", {**body, "model_seq_id": 1}))
        assert "a model is being trained already" in other["error"]
        for number, lora in ((2, {"rank": 4}), (3, {"rank": 0, "train_mlp": False})):
            refused = await service.result(
                await service.post("/create_model", {**body, "model_seq_id": number, "lora_config": lora})
            )
            assert "trains all weights of the model (--full)" in refused["error"]
        finish = await service.http.post(
            f"/api/v1/sessions/{session}/finish", json={}, headers={"x-api-key": "tml-a-key-of-a-test"}
        )
        assert finish.status_code == 204
        # The next model begins where the first did, not where it ended.
        data = datums(Random(1), 3)
        del name
        second = await service.model(await service.session(), **FULL)
        first_loss, _ = PlainModel(model).forward_backward(plain(data), "cross_entropy")
        assert (await train(service, second, 1, data))[0] == pytest.approx(first_loss, rel=1e-5)

    serve(model, test)


async def failing_loss(service: Service, session: str) -> str:
    """Create a loss that fails for documents of fewer than 17 tokens, which have no such row; return its id."""
    nodes = [
        {"op": "placeholder", "name": "p", "target": "logprobs", "args": []},
        {"op": "call_function", "name": "t", "target": "operator.getitem", "args": [{"ref": "p"}, 16]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "t"}, {"dict": {}}]}]},
    ]
    loss = {
        "session_id": session,
        "custom_loss_seq_id": 0,
        "name": "one",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }
    return str((await service.result(await service.post("/create_custom_loss", loss)))["loss_id"])


LONG_AND_SHORT = [{"tokens": [1] * n, "target_tokens": [2] * n} for n in (20, 3)]


def test_an_error_takes_nothing_of_earlier_requests_with_it(model: Path) -> None:
    """Gradients of before a loss that fails in the middle, weights of before a damaged checkpoint, and a step that is not finite."""

    async def test(service: Service, _: Any) -> None:
        session = await service.session()
        name = await service.model(session, **FULL)
        reference, random = PlainModel(model), Random(2)
        first, second = datums(random, 3), datums(random, 2)
        loss = await failing_loss(service, session)
        await service.result(await service.post("/forward_backward", forward_backward(name, 1, first)))
        failed = await service.result(
            await service.post("/forward_backward", forward_backward(name, 2, LONG_AND_SHORT, "custom", loss_id=loss))
        )
        assert "error" in failed, failed
        reference.forward_backward(plain(first), "cross_entropy")
        step = await service.result(await service.step(name, 3, **ADAM))
        assert step["metrics"]["grad_norm:mean"] == pytest.approx(reference.step(OPTIM), rel=1e-4)
        infinite = [{**datum, "weights": [3e38] * len(datum["weights"])} for datum in second]
        await service.result(await service.post("/forward_backward", forward_backward(name, 4, infinite)))
        assert "not finite" in (await service.result(await service.step(name, 5, **ADAM)))["error"]
        path = (await service.result(await service.post("/save_weights", {"model_id": name, "seq_id": 6, "path": "x"})))[
            "path"
        ]
        (row,) = service.database.read("SELECT folder FROM checkpoints")
        for file in Path(row["folder"]).rglob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-100])
        load = {"model_id": name, "seq_id": 7, "path": path, "optimizer": True}
        assert "error" in await service.result(await service.post("/load_weights", load))
        expected, _ = reference.forward_backward(plain(second), "cross_entropy")
        assert await train(service, name, 8, second) == pytest.approx((expected, reference.step(OPTIM)), rel=1e-4)

    serve(model, test)


def test_samples_come_from_the_weights_that_were_asked_for(model: Path) -> None:
    """Snapshots and the base by turns, log-probabilities of prompts, and a sampler that is started again, which has the base."""
    prompt = [5, 6, 7, 8]

    async def test(service: Service, replicas: LocalReplicas) -> None:
        session = await service.session()
        name = await service.model(session, **FULL)
        samplers = {"base": await sampler_of(service, session, 0)}
        folders = {"base": model}
        for number in (1, 2):
            await train(service, name, 3 * number - 2, datums(Random(number), 4), learning_rate=0.1)
            save = {"model_id": name, "seq_id": 3 * number, "sampling_session_seq_id": number}
            saved = await service.result(await service.post("/save_weights_for_sampler", save))
            samplers[f"step {number}"] = saved["sampling_session_id"]
            (row,) = service.database.read("SELECT folder FROM samplers WHERE id = ?", saved["sampling_session_id"])
            folders[f"step {number}"] = Path(row["folder"])
        expected = {}
        for which, folder in folders.items():
            lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
            ids = torch.tensor([prompt])
            with torch.no_grad():
                p = lm(input_ids=ids).logits[0].log_softmax(-1)
            greedy = lm.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 4:].tolist()
            expected[which] = greedy, [float(p[i, prompt[i + 1]]) for i in range(3)]
        assert len({tuple(greedy) for greedy, _ in expected.values()}) == 3
        options = {"prompt_logprobs": True, "params": {"temperature": 0.0}}
        order = ["base", "step 1", "step 2", "step 1", "base", "step 2"]
        futures = [
            await service.post("/asample", body_of(samplers[which], seq, prompt, **options)) for seq, which in enumerate(order)
        ]

        async def compare(which: str, future: Any) -> None:
            answer = await answer_of(service, future)
            greedy, of_prompt = expected[which]
            assert not isinstance(answer, dict), answer
            assert tokens_of(answer) == [greedy], which
            scores = torch.frombuffer(bytearray(answer.prompt_logprobs), dtype=torch.float32)[1:].tolist()
            assert scores == pytest.approx(of_prompt, abs=1e-5)

        for which, future in zip(order, futures, strict=True):
            await compare(which, future)
        # A worker that is started again has version 0, and says so with every token.
        await compare("step 2", await service.post("/asample", body_of(samplers["step 2"], 9, prompt, **options)))
        await replicas.acall("load_folder", str(model), 0)
        for seq, which in ((10, "step 2"), (11, "base")):
            await compare(which, await service.post("/asample", body_of(samplers[which], seq, prompt, **options)))
        state = await service.result(await service.post("/save_weights", {"model_id": name, "seq_id": 7, "path": "x"}))
        body = {"session_id": session, "sampling_session_seq_id": 9, "model_path": state["path"]}
        assert "save_weights_for_sampler" in (await service.post("/create_sampling_session", body, status=400))["detail"]
        answer = await service.post("/forward_backward", forward_backward(name, 8, datums(Random(5), 1)))
        assert log_probs(await service.result(answer))

    serve(model, test)


class Flaky(FullTrainingGroup):
    """A group whose first call of several pieces fails after it has changed the gradients."""

    has_failed = False

    async def forward_backward(self, requests: Sequence[AdapterRequest]) -> list[AdapterReply]:
        replies = await super().forward_backward(requests)
        if len(requests) > 1 and not self.has_failed:
            self.has_failed = True
            raise WorkerError("no memory was left")
        return replies


@pytest.mark.slow
def test_an_error_that_passes_leaves_the_gradients_of_all_requests(model: Path) -> None:
    """Those of a request before it, and each of its own pieces once."""
    group = Flaky(full_group_of(model).build)

    async def test(service: Service, _: Any) -> None:
        name = await service.model(await service.session(), **FULL)
        random, reference = Random(3), PlainModel(model)
        first = datums(random, 2)
        many = [{"tokens": [n % 250] * 110, "target_tokens": [7] * 110, "weights": [0.01] * 110} for n in range(40)]
        await service.result(await service.post("/forward_backward", forward_backward(name, 1, first)))
        answer = await service.result(await service.post("/forward_backward", forward_backward(name, 2, many)))
        assert group.has_failed
        expected = [reference.forward_backward(plain(data), "cross_entropy")[0] for data in (first, many)]
        assert answer.metrics["loss:sum"] == pytest.approx(expected[1], rel=1e-4)
        step = await service.result(await service.step(name, 3, **ADAM))
        assert step["metrics"]["grad_norm:mean"] == pytest.approx(reference.step(OPTIM), rel=1e-4)

    serve(model, test, group=group)


@pytest.mark.slow
def test_a_model_whose_state_is_damaged_ends_alone(model: Path) -> None:
    async def test(service: Service, _: Any) -> None:
        session = await service.session()
        name = await service.model(session, **FULL)
        await train(service, name, 1, datums(Random(4), 2))
        (row,) = service.database.read("SELECT saved_folder FROM models")
        for file in Path(row["saved_folder"]).rglob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-100])
        body = forward_backward(name, 3, LONG_AND_SHORT, "custom", loss_id=await failing_loss(service, session))
        assert "error" in await service.result(await service.post("/forward_backward", body))
        for _ in range(100):
            if service.database.read("SELECT 1 FROM models WHERE state = 'closed'"):
                break
            await asyncio.sleep(0.05)
        await service.post("/forward_backward", forward_backward(name, 4, datums(Random(4), 1)), status=404)
        assert await service.model(await service.session(), **FULL)

    serve(model, test, steps_per_save=1)


def test_an_id_that_is_taken_while_weights_are_saved_is_an_error_of_the_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_size = ModelOperations._checked_size

    async def test(service: Service, _: Any) -> None:
        session = await service.session()
        name = await service.model(session, **FULL)

        def taken_meanwhile(self: ModelOperations, folder: str, owner: str, freed: int) -> int:
            sql = "INSERT INTO samplers (id, session, owner, base, path, folder) VALUES (?, ?, ?, 'tiny', NULL, '')"
            service.database.execute((sql, (f"{session}:sample:5", session, owner))).result()
            return checked_size(self, folder, owner, freed)

        monkeypatch.setattr(ModelOperations, "_checked_size", taken_meanwhile)
        save = {"model_id": name, "seq_id": 1, "sampling_session_seq_id": 5}
        assert (
            "use a new sampling_session_seq_id for each"
            in (await service.result(await service.post("/save_weights_for_sampler", save)))["error"]
        )
        assert (await train(service, name, 2, datums(Random(6), 1)))[1] > 0

    serve(model, test)
