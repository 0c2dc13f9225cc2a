"""The training service over its routes: order, repetition, errors, limits, and beginning anew after a death, to the bit."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from peft import PeftModel
from transformers import AutoModelForCausalLM

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import WorkerLostError
from drivetrain.serve.tinker.training_group import TrainingGroup
from helpers.tinker_service import KEY, Service, datums, forward_backward, group_of, log_probs, running

pytestmark = pytest.mark.usefixtures("process_group")
OTHER = "tml-another-key-of-a-test"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "llama", vocab_size=300)


def serve(model: Path, test: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        async with running(model, model.parent / "state", **settings) as service:
            await test(service)

    asyncio.run(run())


def test_a_run_with_all_its_requests(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        assert name == f"{session}:train:0"
        info = await service.post("/get_info", {"model_id": name})
        assert (info["model_data"]["model_name"], info["lora_rank"], info["is_lora"]) == ("tiny", 4, True)
        data, losses = datums(Random(0), 4), []
        for step in range(3):
            answer = await service.result(await service.post("/forward_backward", forward_backward(name, 2 * step + 1, data)))
            losses.append(answer.metrics["loss:sum"])
            # The sum, by the log-probabilities that came with it, for every position.
            expected = -sum(p * w for p, w in zip(log_probs(answer), [w for d in data for w in d["weights"]], strict=True))
            assert losses[-1] == pytest.approx(expected, rel=1e-5)
            record = answer.loss_fn_outputs[0]
            offsets = np.frombuffer(record.fields["logprobs"].offsets, dtype="<i8").tolist()
            assert [b - a for a, b in pairwise(offsets)] == [4 * len(d["tokens"]) for d in data]
            done = await service.result(await service.step(name, 2 * step + 2))
            assert done["metrics"]["grad_norm:mean"] > 0
        assert losses[2] < losses[0]
        saved = await service.result(await service.post("/save_weights", {"model_id": name, "seq_id": 7, "path": "last"}))
        path = f"tinker://{name}/weights/last"
        assert saved == {"type": "save_weights", "path": path}
        again = await service.result(await service.post("/save_weights", {"model_id": name, "seq_id": 8, "path": "last"}))
        assert "already" in again["error"]
        assert (await service.post("/weights_info", {"tinker_path": path}))["lora_rank"] == 4
        runs = await service.get("/training_runs?limit=5")
        assert [run["training_run_id"] for run in runs["training_runs"]] == [name]
        assert runs["training_runs"][0]["last_checkpoint"]["tinker_path"] == path
        listed = await service.get(f"/training_runs/{name}/checkpoints")
        assert [one["checkpoint_id"] for one in listed["checkpoints"]] == ["weights/last"]
        # A new model from it goes on as the first one does.
        load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        other = await service.post("/load_weights", load)
        assert (await service.result(other))["type"] == "load_weights"
        both = [
            await service.result(await service.post("/forward_backward", forward_backward(which, seq, data)))
            for which, seq in ((name, 9), (other["model_id"], 1))
        ]
        assert log_probs(both[0]) == pytest.approx(log_probs(both[1]), rel=1e-6)
        # A session that ends takes its models with it, and leaves its checkpoints.
        response = await service.http.post(
            f"/api/v1/sessions/{session}/finish", json={}, headers={"x-api-key": "tml-a-key-of-a-test"}
        )
        assert response.status_code == 204
        await service.post("/forward_backward", forward_backward(name, 10, data), status=404)
        await service.post("/session_heartbeat", {"session_id": session}, status=410)
        assert (await service.get("/checkpoints"))["cursor"]["total_count"] == 1

    serve(model, test)


def test_a_model_is_created_once_however_often_it_is_asked_for_at_the_same_time(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        for number in range(6):
            body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 2}}
            created = await asyncio.gather(*(service.post("/create_model", body) for _ in range(4)))
            assert all(one == created[0] for one in created)
            assert (await service.result(created[0]))["type"] == "create_model"
        # A copy does not count as another model.
        assert (
            "already has 6 adapters, and the maximum is --max-adapters=6;"
            in (await service.result(await service.post("/create_model", {**body, "model_seq_id": 6})))["error"]
        )

    serve(model, test, max_adapters=6)


def test_requests_run_in_the_order_of_their_numbers_and_once(model: Path) -> None:
    """As the client sends them: the chunks of a batch in any order, the first one last, each twice, and the next step before they are done."""

    async def test(service: Service) -> None:
        session = await service.session()
        one, other = await service.model(session, 0), await service.model(session, 1)
        data = datums(Random(1), 6)
        whole = await service.post("/forward_backward", forward_backward(one, 1, data))
        futures = {}
        for seq in (4, 3, 2, 1):
            body = forward_backward(other, seq, data[2 * seq - 2 : 2 * seq])
            if seq == 4:
                futures[seq] = await service.step(other, 4)
            else:
                futures[seq] = await service.post("/forward_backward", body)
                assert await service.post("/forward_backward", body) == futures[seq]
        expected = await service.result(whole)
        step = await service.result(await service.step(one, 2))
        parts = [await service.result(futures[seq]) for seq in (1, 2, 3)]
        assert sum(part.metrics["loss:sum"] for part in parts) == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
        assert [p for part in parts for p in log_probs(part)] == pytest.approx(log_probs(expected), rel=1e-5)
        # Chunks add up, none counts twice.
        got = (await service.result(futures[4]))["metrics"]["grad_norm:mean"]
        assert got == pytest.approx(step["metrics"]["grad_norm:mean"], rel=1e-5)
        # Another request under a number that was used is refused, and the one that was first stands.
        await service.post("/forward_backward", forward_backward(other, 2, data[:1]), status=400)
        await service.post("/optim_step", {"model_id": other, "seq_id": 0}, status=400)

    serve(model, test)


def test_a_wrong_request_says_so_in_its_result_and_holds_up_nobody(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        good = datums(Random(2), 2)
        wrong: list[tuple[bytes, str]] = [
            (forward_backward(name, 1, good, "stable_reinforce"), "formula is not published"),
            (forward_backward(name, 2, good, "ppo"), "datum 0 has the loss_fn_input 'weights'"),
            (
                forward_backward(name, 3, [{k: v for k, v in good[0].items() if k != "weights"}]),
                "lacks the loss_fn_input 'weights'",
            ),
            (
                forward_backward(name, 4, [{**good[0], "target_tokens": [10**6] * len(good[0]["tokens"])}]),
                "target_tokens has the token id",
            ),
            (forward_backward(name, 5, [{**good[0], "weights": [1.0] * 99}]), "one number per token of model_input"),
            (forward_backward(name, 6, [{**good[0], "weights": [float("nan")] * len(good[0]["tokens"])}]), "not finite"),
            (forward_backward(name, 7, []), "data is empty"),
            (
                forward_backward(name, 8, datums(Random(0), 1, "ppo"), "ppo", clip_low_threshold=3.0),
                "above clip_high_threshold",
            ),
            (
                forward_backward(name, 9, [{"tokens": [1] * 200, "target_tokens": [1] * 200, "weights": [1.0] * 200}]),
                "more than the maximum of 128",
            ),
        ]
        futures = [await service.post("/forward_backward", body) for body, _ in wrong]
        futures.append(await service.step(name, 10, grad_clip_norm=-1.0))
        futures.append(
            await service.post(
                "/load_weights", {"model_id": name, "seq_id": 11, "path": "tinker://x/weights/y", "optimizer": True}
            )
        )
        futures.append(await service.post("/save_weights", {"model_id": name, "seq_id": 12, "path": "../../etc"}))
        inflight = {"model_id": name, "seq_id": 13, "sampling_session_seq_id": 0, "kind": "live"}
        futures.append(await service.post("/save_weights_for_sampler", inflight))
        last = await service.post("/forward_backward", forward_backward(name, 14, good))
        for future, message in zip(
            futures,
            [
                *(m for _, m in wrong),
                "grad_clip_norm=-1.0",
                "there is no checkpoint",
                "begin with a letter or a digit",
                "use snapshot or inflight",
            ],
            strict=True,
        ):
            answer = await service.result(future)
            assert message in answer["error"], answer
            assert answer["category"] == "user"
        fresh = await service.model(session, 1)
        alone = await service.result(await service.post("/forward_backward", forward_backward(fresh, 1, good)))
        assert (await service.result(last)).metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-6)
        norms = [
            (await service.result(await service.step(which, seq)))["metrics"]["grad_norm:mean"]
            for which, seq in ((name, 15), (fresh, 2))
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    serve(model, test)


def test_tokens_with_several_targets(model: Path) -> None:
    """Each of them with a weight of its own, in matrices that may be sparse: what the same targets are in a datum of their own each."""

    async def test(service: Service) -> None:
        session, random = await service.session(), Random(4)
        flat = datums(random, 2)
        wide: list[dict[str, Any]] = []
        for length in (9, 17):
            wide.append(
                {
                    "tokens": [random.randrange(250) for _ in range(length)],
                    "target_tokens": [[random.choice((0, 0, 7, 199)) for _ in range(4)] for _ in range(length)],
                    "weights": [[random.choice((0.0, 0.0, 0.5, -1.0)) for _ in range(4)] for _ in range(length)],
                }
            )
        mixed = [flat[0], *wide, flat[1]]
        answers, norms = [], []
        for number, sparse in enumerate((False, True)):
            name = await service.model(session, number)
            answers.append(
                await service.result(await service.post("/forward_backward", forward_backward(name, 1, mixed, sparse=sparse)))
            )
            norms.append((await service.result(await service.step(name, 2)))["metrics"]["grad_norm:mean"])
        assert answers[0] == answers[1]
        assert norms[0] == norms[1]
        assert [list(r.fields["logprobs"].trailing_shape) for r in answers[0].loss_fn_outputs] == [[], [4], []]
        columns = [
            {"tokens": datum["tokens"], **{k: [row[i] for row in datum[k]] for k in ("target_tokens", "weights")}}
            for datum in wide
            for i in range(4)
        ]
        name = await service.model(session, 2)
        apart = [flat[0], *columns, flat[1]]
        expected = await service.result(await service.post("/forward_backward", forward_backward(name, 1, apart)))
        assert answers[0].metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        assert (await service.result(await service.step(name, 2)))["metrics"]["grad_norm:mean"] == pytest.approx(
            norms[0], rel=1e-4
        )
        of_columns = np.asarray(log_probs(expected)[len(flat[0]["tokens"]) : -len(flat[1]["tokens"])])
        transposed = [of_columns[: 4 * 9].reshape(4, 9).T, of_columns[4 * 9 :].reshape(4, 17).T]
        got = np.frombuffer(answers[0].loss_fn_outputs[1].fields["logprobs"].data, dtype="<f4")
        np.testing.assert_allclose(got, np.concatenate([part.ravel() for part in transposed]), rtol=1e-5, atol=1e-5)
        gspo = [{**datum, "logprobs": datum["weights"], "advantages": datum["weights"]} for datum in wide]
        for datum in gspo:
            datum["sequence_ratio_mask"] = datum.pop("weights")
        refused = await service.post("/forward_backward", forward_backward(name, 3, gspo, "gspo"))
        assert "takes one target of each token" in (await service.result(refused))["error"]

    serve(model, test)


def test_a_loss_that_the_client_has_traced(model: Path) -> None:
    """It has the numbers of the loss that it is, in one pass, and metrics joined over datums and pieces."""
    ref = {name: {"ref": name} for name in ("p", "w", "t", "s", "u")}
    nodes = [
        {"op": "placeholder", "name": "p", "target": "logprobs"},
        {"op": "placeholder", "name": "w", "target": "weights"},
        {"op": "call_function", "name": "t", "target": "operator.mul", "args": [ref["p"], ref["w"]]},
        {"op": "call_method", "name": "s", "target": "sum", "args": [ref["t"]]},
        {"op": "call_function", "name": "u", "target": "operator.neg", "args": [ref["s"]]},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [ref["u"], {"dict": {"custom/a:sum": ref["u"], "custom/b:mean": ref["s"]}}]}],
        },
    ]

    async def test(service: Service) -> None:
        session, other = await service.session(), await service.session()
        inputs = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
        body = {
            "session_id": session,
            "custom_loss_seq_id": 0,
            "name": "nll",
            "inputs": inputs,
            "graph": {"format": 1, "nodes": nodes},
        }
        created = await service.post("/create_custom_loss", body)
        answer = await service.result(created)
        assert answer["type"] == "create_custom_loss"
        assert await service.post("/create_custom_loss", body) == created
        await service.post("/create_custom_loss", {**body, "name": "other"}, status=400)
        bad = [nodes[0], {"op": "call_function", "name": "x", "target": "os.system", "args": ["true"]}, nodes[-1]]
        wrong = {**body, "custom_loss_seq_id": 1, "graph": {"format": 1, "nodes": bad}}
        refused = await service.result(await service.post("/create_custom_loss", wrong))
        assert "os.system" in refused["error"]
        assert refused["category"] == "user"
        # What was refused is not kept, but that it was; and of what was not, only what is read of it.
        assert await service.result(await service.post("/create_custom_loss", wrong)) == refused
        await service.post("/create_custom_loss", {**wrong, "name": "other"}, status=400)
        third = {**body, "custom_loss_seq_id": 2, "notes": "x" * 2**16}
        await service.result(await service.post("/create_custom_loss", third))
        stored = {row["id"]: row["loss"] for row in service.database.read("SELECT id, loss FROM losses")}
        assert stored.pop(f"{session}:loss:1:refused") == ""
        assert {key: json.loads(loss)["graph"]["nodes"] for key, loss in stored.items()} == {
            f"{session}:loss:{number}": nodes for number in (0, 2)
        }
        assert all(len(loss) < 2**12 for loss in stored.values())
        large = {**body, "custom_loss_seq_id": 3, "notes": "x" * 2**20}
        answer_of = await service.post("/create_custom_loss", large, status=413)
        assert "more than the limit of 1048576; trace a smaller function" in answer_of["detail"]
        one, two, foreign = await service.model(session, 0), await service.model(session, 1), await service.model(other, 0)
        data = [{**datum, "weights": [w * 2 for w in datum["weights"]]} for datum in datums(Random(3), 5)]
        for datum in datums(Random(4), 1):
            data.append({**datum, "tokens": datum["tokens"] * 20, **{k: datum[k] * 20 for k in ("target_tokens", "weights")}})
        custom = [{**datum, "unread": datum["weights"]} for datum in data]
        named = forward_backward(one, 1, data)
        traced = forward_backward(two, 1, custom, "custom", loss_id=answer["loss_id"])
        expected, found = [await service.result(await service.post("/forward_backward", body)) for body in (named, traced)]
        assert log_probs(found) == log_probs(expected)
        assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
        assert found.metrics["custom/a:sum"] == pytest.approx(found.metrics["loss:sum"], rel=1e-6)
        assert found.metrics["custom/b:mean"] == pytest.approx(-found.metrics["loss:sum"] / len(data), rel=1e-6)
        norms = [(await service.result(await service.step(name, 2)))["metrics"]["grad_norm:mean"] for name in (one, two)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        for name, seq, rows, loss_id, message in (
            (two, 3, custom, "other", "loss_id='other' is not a loss of this session"),
            (foreign, 1, custom, answer["loss_id"], "of this session"),
            (two, 4, [{"tokens": [1], "target_tokens": [1]}], answer["loss_id"], "lacks the loss_fn_input 'weights'"),
            (two, 5, [{"tokens": [1], "target_tokens": [1], "weights": [[1.0]]}], answer["loss_id"], "declares rank 1"),
            (two, 6, [{"tokens": [1], "target_tokens": [[1]], "weights": [1.0]}], answer["loss_id"], "of rank 1"),
            (two, 7, custom, f"{session}:loss:1", "is not a loss of this session"),
        ):
            asked = forward_backward(name, seq, rows, "custom", loss_id=loss_id)
            answer_of = await service.result(await service.post("/forward_backward", asked))
            assert message in answer_of["error"], answer_of

    serve(model, test)


def test_an_exported_checkpoint_is_downloaded_in_the_form_of_peft(model: Path) -> None:
    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        await service.post("/forward_backward", forward_backward(name, 1, datums(Random(0), 2)))
        await service.step(name, 2)
        saved = await service.result(
            await service.post("/save_weights_external", {"model_id": name, "seq_id": 3, "path": "out"})
        )
        assert saved["path"] == f"tinker://{name}/external_weights/out"
        await service.result(await service.post("/save_weights", {"model_id": name, "seq_id": 4, "path": "own"}))
        route = f"/training_runs/{name}/checkpoints/external_weights/out/external_weights_urls"
        answer = await service.get(route)
        assert {"adapter_model.safetensors", "adapter_config.json"} <= set(answer["urls"])
        folder = model.parent / "downloaded"
        folder.mkdir()
        for file, url in answer["urls"].items():
            response = await service.http.get(url)
            assert response.status_code == 200
            (folder / file).write_bytes(response.content)
        data = datums(Random(5), 1)
        theirs = await service.result(
            await service.post("/forward_backward", forward_backward(name, 5, data, forward_only=True))
        )
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), folder)
        with torch.no_grad():
            logits = adapted(input_ids=torch.tensor([data[0]["tokens"]])).logits[0].log_softmax(-1)
        ours = logits.gather(1, torch.tensor(data[0]["target_tokens"])[:, None])[:, 0]
        assert log_probs(theirs) == pytest.approx(ours.tolist(), rel=1e-5, abs=1e-5)
        # The address is for this file of this checkpoint, and the route for its owner.
        url = answer["urls"]["adapter_config.json"]
        for wrong in (url.replace("adapter_config.json", "..%2Fmanifest.json"), url.replace("/downloads/", "/downloads/x")):
            assert (await service.http.get(wrong)).status_code == 404
        await service.get(route, key=OTHER, status=404)
        await service.get(route.replace("/external_weights/out/", "/weights/own/"), status=400)
        # Asking again does not make more addresses, and those of others end when it is no longer public.
        assert await service.get(route) == answer
        publish = "/api/v1" + route.replace("external_weights_urls", "publish")
        assert (await service.http.post(publish, headers={"x-api-key": KEY})).status_code == 204
        theirs_url = (await service.get(route, key=OTHER))["urls"]["adapter_config.json"]
        assert theirs_url != url
        assert (await service.http.get(theirs_url)).status_code == 200
        assert (await service.http.delete(publish, headers={"x-api-key": KEY})).status_code == 204
        assert [(await service.http.get(one)).status_code for one in (theirs_url, url)] == [404, 200]

    serve(model, test)


def test_a_gradient_that_is_not_finite_is_said_and_dropped(model: Path) -> None:
    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        data = datums(Random(0), 1, "importance_sampling")
        data[0]["logprobs"] = [-300.0] * len(data[0]["tokens"])
        data[0]["advantages"] = [1.0] * len(data[0]["tokens"])
        answer = await service.result(
            await service.post("/forward_backward", forward_backward(name, 1, data, "importance_sampling"))
        )
        # Ratios are not truncated.
        assert answer.metrics["loss:sum"] == -float("inf")
        assert "was dropped" in (await service.result(await service.step(name, 2)))["error"]
        assert (await service.result(await service.step(name, 3)))["metrics"]["grad_norm:mean"] == 0.0

    serve(model, test)


def test_keys_see_nothing_of_each_other(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        saved = await service.post("/save_weights", {"model_id": name, "seq_id": 1, "path": "mine"})
        await service.result(saved)
        path = f"tinker://{name}/weights/mine"
        theirs = await service.session(OTHER)
        await service.post("/get_info", {"model_id": name}, key=OTHER, status=404)
        await service.post("/retrieve_future", saved, key=OTHER, status=404)
        await service.post("/forward_backward", forward_backward(name, 2, datums(Random(0), 1)), key=OTHER, status=404)
        await service.post(
            "/create_model", {"session_id": session, "model_seq_id": 5, "base_model": "tiny"}, key=OTHER, status=404
        )
        await service.post(
            "/create_sampling_session",
            {"session_id": theirs, "sampling_session_seq_id": 0, "model_path": path},
            key=OTHER,
            status=404,
        )
        assert (await service.get("/training_runs", key=OTHER))["training_runs"] == []
        await service.get(f"/training_runs/{name}", key=OTHER, status=404)
        publish = f"/api/v1/training_runs/{name}/checkpoints/weights/mine/publish"
        assert (await service.http.post(publish, headers={"x-api-key": OTHER})).status_code == 404
        assert (await service.http.post(publish, headers={"x-api-key": "tml-a-key-of-a-test"})).status_code == 204
        # What is public may be loaded, but not changed.
        load = {"session_id": theirs, "model_seq_id": 0, "path": path, "optimizer": False}
        assert "error" not in await service.result(await service.post("/load_weights", load, key=OTHER), key=OTHER)
        assert (await service.http.delete(publish.removesuffix("/publish"), headers={"x-api-key": OTHER})).status_code == 404
        # Keys are not kept.
        text = b"".join(file.read_bytes() for file in (model.parent / "state").glob("service.sqlite*"))
        assert b"tml-" not in text

    serve(model, test)


def test_limits(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        await service.model(session, 0)
        await service.model(session, 1)
        body = {"session_id": session, "model_seq_id": 2, "base_model": "tiny", "lora_config": {"rank": 2}}
        answer = await service.result(await service.post("/create_model", body))
        assert "--max-adapters-per-key" in answer["error"]
        for config, message in (
            ({"base_model": "gpt-5"}, "this service has tiny"),
            ({"lora_config": {"rank": 0}}, "rank=0"),
            ({"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}}, "nothing to train"),
            ({"optimizer_config": {"type": "dimuon"}}, "supports adam only"),
        ):
            other = await service.session(OTHER)
            answer = await service.result(
                await service.post("/create_model", {**body, "session_id": other, **config}, key=OTHER), key=OTHER
            )
            assert message in answer["error"]
        name = f"{session}:train:0"
        big = forward_backward(name, 1, [{"tokens": [1] * 100, "target_tokens": [1] * 100, "weights": [1.0] * 100}] * 30)
        packed = zstandard.ZstdCompressor().compress(big)
        assert len(packed) < 2000
        zstd: Any = {"content-encoding": "zstd"}
        future = await service.post("/forward_backward", packed, **zstd)
        assert (await service.result(future)).metrics["loss:sum"] > 0
        # A few bytes that become many.
        bomb = zstandard.ZstdCompressor().compress(bytes(10 * 2**20))
        assert len(bomb) < 5000
        await service.post("/forward_backward", bomb, status=413, **zstd)
        await service.post("/forward_backward", packed[:50], status=400, **zstd)
        await service.post("/forward_backward", b"\xff" * 100, status=400)
        await service.post("/forward_backward", bytes(3 * 2**20), status=413)
        await service.post("/create_session", b"{", status=422)
        await service.post("/create_session", {}, key="sk-wrong", status=401)
        # Requests that no step has used are kept up to a limit.
        for seq in range(2, 40):
            response = await service.http.post(
                "/api/v1/forward_backward",
                content=forward_backward(
                    name, seq, [{"tokens": [1] * 100, "target_tokens": [1] * 100, "weights": [1.0] * 100}] * 30
                ),
                headers={"x-api-key": "tml-a-key-of-a-test"},
            )
            if response.status_code == 429:
                break
        assert response.status_code == 429
        assert "--max-queued-mib" in response.text

    serve(model, test, max_adapters_per_key=2, max_body_mib=2.0, max_queued_mib=0.5)


def test_a_silent_session_ends_and_frees_what_waits(model: Path) -> None:
    """Requests behind a number that never comes are answered when the session is over."""

    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        stuck = await service.post("/forward_backward", forward_backward(name, 3, datums(Random(0), 1)))
        answer = await service.result(stuck)
        assert "the session has ended" in answer["error"]
        for _ in range(100):
            if await service.training._group.call("adapter_names") == []:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the adapter is still there")

    serve(model, test, session_s=0.5)


# ---- beginning anew --------------------------------------------------------------------------------------------------


class MortalGroup(TrainingGroup):
    """A group that dies before or after calls that a random number chooses."""

    def __init__(self, build: Callable[[], Any], seed: int) -> None:
        super().__init__(build)
        self.random, self.deaths = Random(seed), 0
        self.left = self.random.randrange(2, 12)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.left -= method != "adapter_names"
        dies = self.left < 0
        if dies:
            # So far apart that no request meets too many of them.
            self.left = self.random.randrange(12, 30)
        if dies and self.random.random() < 0.5:
            self.deaths += 1
            raise WorkerLostError("killed before a call")
        result = await super().call(method, *args, **options)
        if dies:
            self.deaths += 1
            raise WorkerLostError("killed after a call")
        return result


async def tenant(service: Service, session: str, number: int, seed: int, begin: int = 0) -> list[Any]:
    """What a model is answered in four steps of two requests and a save; from a step on, with what is before repeated."""
    random, answers = Random(seed), []
    name = await service.model(session, number, seed=seed)
    seq = 1
    for step in range(4):
        bodies = [
            forward_backward(name, seq + i, datums(random, 2, loss), loss) for i, loss in enumerate(("cross_entropy", "ppo"))
        ]
        futures = [await service.post("/forward_backward", body) for body in bodies]
        futures.append(await service.step(name, seq + 2))
        futures.append(await service.post("/save_weights", {"model_id": name, "seq_id": seq + 3, "path": f"step-{step}"}))
        seq += 4
        if step >= begin:
            for future in futures:
                answer = await service.result(future)
                assert not (isinstance(answer, dict) and "error" in answer), answer
                answers.append(
                    (answer.metrics["loss:sum"], log_probs(answer)) if hasattr(answer, "loss_fn_outputs") else answer
                )
    return answers


def without_names(answers: list[Any]) -> list[Any]:
    return [answer.get("metrics", answer["type"]) if isinstance(answer, dict) else answer for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_processes_that_die_between_and_inside_requests_change_no_bit(model: Path, seed: int) -> None:
    async def run(group: TrainingGroup, state: str) -> list[Any]:
        async with running(model, model.parent / state, group=group, steps_per_save=2) as service:
            session = await service.session()
            both = await asyncio.gather(tenant(service, session, 0, 5), tenant(service, session, 1, 6))
            return [without_names(answers) for answers in both]

    expected = asyncio.run(run(TrainingGroup(group_of(model, invariant=True)), "undisturbed"))
    mortal = MortalGroup(group_of(model, invariant=True), seed)
    got = asyncio.run(run(mortal, "disturbed"))
    assert mortal.deaths
    assert got == expected


def test_a_service_that_is_killed_goes_on_to_the_bit(model: Path) -> None:
    """The client repeats what it has sent, as it does when a connection breaks: nothing is lost, and nothing is done twice."""
    build = group_of(model, invariant=True)

    async def whole() -> list[Any]:
        async with running(model, model.parent / "whole", build=build, steps_per_save=2) as service:
            return without_names(await tenant(service, await service.session(), 0, 5))

    async def first() -> str:
        async with running(model, model.parent / "killed", build=build, steps_per_save=2) as service:
            session = await service.session()
            task = asyncio.create_task(tenant(service, session, 0, 5, begin=99))
            await asyncio.sleep(0.4)
            task.cancel()
            return session

    async def then(session: str) -> list[Any]:
        async with running(model, model.parent / "killed", build=build, steps_per_save=2) as service:
            return without_names(await tenant(service, session, 0, 5))

    expected = asyncio.run(whole())
    session = asyncio.run(first())
    assert asyncio.run(then(session)) == expected


@pytest.mark.slow
def test_a_request_under_which_processes_die_again_and_again_is_given_up(model: Path) -> None:
    class Poisoned(TrainingGroup):
        async def forward_backward(self, requests: Any) -> Any:
            if any(20 in request.batch.input_ids for request in requests):
                raise WorkerLostError("killed")
            return await super().forward_backward(requests)

    async def test(service: Service) -> None:
        session = await service.session()
        bad, good = await service.model(session, 0), await service.model(session, 1)
        poison = [{"tokens": [20], "target_tokens": [1], "weights": [1.0]}]
        futures = [await service.post("/forward_backward", forward_backward(bad, 1, poison))]
        futures.append(await service.post("/forward_backward", forward_backward(good, 1, datums(Random(9), 2))))
        assert "died repeatedly while this request was computed" in (await service.result(futures[0]))["error"]
        assert (
            await service.result(
                await service.post(
                    "/forward_backward", forward_backward(bad, 2, [{"tokens": [3], "target_tokens": [1], "weights": [1.0]}])
                )
            )
        ).metrics["loss:sum"] > 0
        await service.result(futures[1])

    serve(model, test, group=Poisoned(group_of(model)))
