"""A training service in the test's own process, asked over its routes, and requests as the protocol has them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.hf.config import read_config
from drivetrain.engine.hf.media import media_config
from drivetrain.serve.tinker import messages
from drivetrain.serve.tinker.app import PREFIX, TrainingApp
from drivetrain.serve.tinker.chunks import ModelImages
from drivetrain.serve.tinker.database import Database
from drivetrain.serve.tinker.futures import Futures
from drivetrain.serve.tinker.passes import Passes
from drivetrain.serve.tinker.sampler_weights import AdapterSnapshots, SamplerWeights
from drivetrain.serve.tinker.sampling import SamplingService
from drivetrain.serve.tinker.settings import TrainingServiceSettings
from drivetrain.serve.tinker.training import Training
from drivetrain.serve.tinker.training_group import ROLE, FullTrainingGroup, TrainingGroup
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.adapters import AdapterWorker
from drivetrain.workers.roles.base import WorkerConfig
from drivetrain.workers.roles.full_training import FullTrainingWorker

KEY = "tml-a-key-of-a-test"
VOCABULARY = 300


def group_of(folder: Path, *, invariant: bool = False, adapters: int = 8) -> Callable[[], Any]:
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=128), invariant=invariant)
    config = WorkerConfig(model=ModelConfig(path=str(folder), max_adapters=adapters), engine=engine)
    return lambda: LocalWorkerGroup({ROLE: RoleSpec(worker=AdapterWorker, config=config)})


def full_group_of(folder: Path) -> FullTrainingGroup:
    """A group that trains all weights of the model."""
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=128))
    config = WorkerConfig(model=ModelConfig(path=str(folder)), engine=engine, optim=OptimConfig(lr=1e-5))
    return FullTrainingGroup(lambda: LocalWorkerGroup({ROLE: RoleSpec(worker=FullTrainingWorker, config=config)}))


class Service:
    """A service that is running, and a client of it.

    Args:
        training: What trains.
        http: The client.
        database: The database.
        sampling: What samples.
        cleanup: What ends silent sessions from time to time.
    """

    def __init__(
        self,
        training: Training,
        http: httpx.AsyncClient,
        database: Database,
        sampling: SamplingService,
        cleanup: "asyncio.Task[None]",
    ) -> None:
        self.training, self.http, self.database = training, http, database
        self.sampling, self.cleanup = sampling, cleanup

    async def post(self, path: str, body: Any, *, key: str = KEY, status: int = 200, **headers: str) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(PREFIX + path, content=content, headers={"x-api-key": key, **headers})
        assert response.status_code == status, (response.status_code, response.text)
        return response.json() if response.headers.get("content-type", "").endswith("json") else response.content

    async def get(self, path: str, *, key: str = KEY, status: int = 200) -> Any:
        response = await self.http.get(PREFIX + path, headers={"x-api-key": key})
        assert response.status_code == status, (response.status_code, response.text)
        return response.json()

    async def result(self, future: Any, *, key: str = KEY) -> Any:
        """The result of a request, decoded if it is protobuf."""
        for _ in range(100):
            headers = {"x-api-key": key}
            content = json.dumps({"request_id": future["request_id"], "allow_metadata_only": True})
            response = await self.http.post(f"{PREFIX}/retrieve_future", content=content, headers=headers)
            if response.status_code == 408:
                continue
            assert response.status_code == 200, response.text
            if response.headers["content-type"] == "application/x-protobuf":
                return messages.ForwardBackwardOutput.FromString(response.content)
            return response.json()
        raise AssertionError("there is no result")

    async def session(self, key: str = KEY) -> str:
        return str((await self.post("/create_session", {"tags": [], "type": "create_session"}, key=key))["session_id"])

    async def model(self, session: str, number: int = 0, *, key: str = KEY, **lora: Any) -> str:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 1, **lora},
        }
        created = await self.post("/create_model", body, key=key)
        answer = await self.result(created, key=key)
        assert answer == {"type": "create_model", "model_id": created["model_id"]}, answer
        return str(created["model_id"])

    async def step(self, model: str, seq: int, *, key: str = KEY, **params: float) -> Any:
        adam = {"learning_rate": 1e-2, "eps": 1e-8, **params}
        return await self.post("/optim_step", {"model_id": model, "seq_id": seq, "adam_params": adam}, key=key)


@asynccontextmanager
async def running(
    folder: Path,
    state: Path,
    *,
    build: Callable[[], Any] | None = None,
    group: TrainingGroup | None = None,
    replicas: Any = None,
    weights: SamplerWeights | None = None,
    sampling_class: type[SamplingService] = SamplingService,
    training_class: type[Training] = Training,
    **settings: Any,
) -> AsyncIterator[Service]:
    """Run a service until the end of the block, which ends it as a kill would: nothing is told to anybody."""
    state.mkdir(parents=True, exist_ok=True)
    options = TrainingServiceSettings(models={"tiny": folder}, state=state, **{"poll_s": 2.0, **settings})
    database = Database(state / "service.sqlite")
    futures = Futures(database)
    group = group or TrainingGroup(build or group_of(folder))
    app: list[TrainingApp] = []
    model = ModelConfig(path=str(folder))
    images = ModelImages(model, media_config(model, read_config(model)))
    images.load()
    passes = Passes(database, VOCABULARY, 128, images)
    training = training_class(options, database, futures, group, passes, lambda *of: app[0].arguments(*of))
    sampling = sampling_class(
        database,
        futures,
        replicas,
        training.scoring,
        None,
        256,
        VOCABULARY,
        weights or AdapterSnapshots(replicas, 4),
        images,
        longest=128,
        most_bytes=options.max_queued_mib * 2**20,
    )
    app.append(TrainingApp(options, database, futures, training, sampling, lambda: 7))
    await group.start()
    house = asyncio.create_task(app[0].clean_periodically(0.2))
    try:
        await training.start()
        await sampling.start()
        transport = httpx.ASGITransport(app[0].build())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield Service(training, http, database, sampling, house)
    finally:
        house.cancel()
        await sampling.close()
        await training.close()
        await group.close()
        database.close()


def datums(random: Random, count: int, loss: str = "cross_entropy") -> list[dict[str, Any]]:
    """Datums as lists: `tokens` and the `loss_fn_inputs` of a loss."""
    result: list[dict[str, Any]] = []
    for _ in range(count):
        length = random.choice((1, 2, 9, 16, 17, 30))
        datum: dict[str, Any] = {
            "tokens": [random.randrange(250) for _ in range(length)],
            "target_tokens": [random.randrange(250) for _ in range(length)],
        }
        if loss == "cross_entropy":
            datum["weights"] = [random.choice((0.0, 1.0, -0.5)) for _ in range(length)]
        else:
            datum |= {
                "logprobs": [-5.0 - random.random() for _ in range(length)],
                "advantages": [random.random() for _ in range(length)],
            }
        result.append(datum)
    return result


def forward_backward(
    model: str,
    seq: int,
    data: Sequence[dict[str, Any]],
    loss: str = "cross_entropy",
    *,
    forward_only: bool = False,
    sparse: bool = False,
    **config: float | str,
) -> bytes:
    """The body of a request, with matrices as sparse ones if they are to be."""
    request = messages.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for datum in data:
        one = request.data.add()
        # Of text alone, or of text and the files of images.
        for part in datum["tokens"] if isinstance(datum["tokens"][0], list | bytes) else [datum["tokens"]]:
            chunk = one.model_input.add()
            if isinstance(part, bytes):
                chunk.image.data, chunk.image.format = part, "png"
            else:
                chunk.encoded_text.tokens = np.asarray(part, dtype="<i4").tobytes()
        for name, values in datum.items():
            if name == "tokens":
                continue
            tensor = one.loss_fn_inputs[name]
            ids = name == "target_tokens"
            array = np.asarray(values, dtype="<i8" if ids else "<f4")
            tensor.dtype = messages.INT64 if ids else messages.FLOAT32
            tensor.shape.extend(array.shape)
            if sparse and array.ndim == 2:
                rows, columns = array.nonzero()
                tensor.sparse_csr.values = array[rows, columns].tobytes()
                starts = np.searchsorted(rows, np.arange(len(array) + 1))
                tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = (
                    part.astype("<i8").tobytes() for part in (starts, columns)
                )
            else:
                tensor.dense = array.tobytes()
    for name, value in config.items():
        if isinstance(value, str):
            request.loss_fn_config_v2[name].text = value
        else:
            request.loss_fn_config_v2[name].number = value
    body: bytes = request.SerializeToString()
    return body


def log_probs(answer: Any) -> list[float]:
    """All log-probabilities of an answer, one datum after the other."""
    return [float(v) for record in answer.loss_fn_outputs for v in np.frombuffer(record.fields["logprobs"].data, dtype="<f4")]


async def sampler_of(service: Service, session: str, number: int, path: str | None = None) -> str:
    source = {"base_model": "tiny"} if path is None else {"model_path": path}
    body = {"session_id": session, "sampling_session_seq_id": number, **source}
    return str((await service.post("/create_sampling_session", body))["sampling_session_id"])


def body_of(sampler: str, seq: int, prompt: list[Any], **options: Any) -> dict[str, Any]:
    """The body of a sample request: its prompt is tokens, or chunks as the protocol has them."""
    params = {"max_tokens": 4, "temperature": 1.0, "stop": [], **options.pop("params", {})}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": prompt if isinstance(prompt[0], dict) else [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": params,
        "num_samples": 1,
        **options,
    }


async def answer_of(service: Service, future: Any) -> Any:
    """The result of a sample request: a message, or an error."""
    for _ in range(60):
        content = json.dumps({"request_id": future["request_id"]})
        response = await service.http.post("/api/v1/retrieve_future", content=content, headers={"x-api-key": KEY})
        if response.status_code == 200:
            is_message = response.headers["content-type"] == "application/x-protobuf"
            return messages.SampleResponse.FromString(response.content) if is_message else response.json()
    raise AssertionError("there is no result")


def tokens_of(answer: Any) -> list[list[int]]:
    return [np.frombuffer(one.tokens, dtype="<i4").tolist() for one in answer.sequences]
