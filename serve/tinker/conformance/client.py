"""A small client of the protocol, which shows what the client of the registry hides: numbers of requests, repetitions, orders."""

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .. import messages

Send = Callable[[str, str, bytes, dict[str, str]], tuple[int, str, bytes]]
"""Sends a request: the method, the path, the body and headers; returns the status, the type of the answer and the answer."""
PREFIX = "/api/v1"
SECONDS = 120.0
"""For how many seconds a result may take."""


class ServiceConformanceError(AssertionError):
    """A service does not do what the protocol means; the message says how."""


def expect(condition: bool, message: str) -> None:
    """Raise a ServiceConformanceError unless a condition holds."""
    if not condition:
        raise ServiceConformanceError(message)


def expect_close(got: Sequence[float], expected: Sequence[float], what: str, tolerance: float = 1e-4) -> None:
    """Raise a ServiceConformanceError unless numbers agree, relative to those beyond 1."""
    expect(len(got) == len(expected), f"{what}: {len(got)} numbers, not {len(expected)}")
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        expect(abs(a - b) <= tolerance * max(1.0, abs(b)), f"{what}: number {number} is {a:.6g}, not {b:.6g}")


def send_to(url: str) -> Send:
    """Return what sends requests to a service."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def send(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        # A new connection each time: there is none that the service could have closed in between.
        connection = kind(parts.hostname or "", parts.port, timeout=SECONDS)
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers.get("content-type", ""), response.read()
        finally:
            connection.close()

    return send


@dataclass(frozen=True)
class Datum:
    """A datum.

    Args:
        tokens: The tokens of its input.
        targets: The target of each.
        fields: The other tensors, one number for each token.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    fields: dict[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Passed:
    """The result of a forward or backward pass.

    Args:
        loss: The metric `loss:sum`.
        log_probs: The log-probabilities of each datum.
    """

    loss: float
    log_probs: list[list[float]]

    @property
    def all(self) -> list[float]:
        """All log-probabilities, one datum after the other."""
        return [p for of_datum in self.log_probs for p in of_datum]


class Connection:
    """A user of a service, with a session.

    Args:
        send: Sends requests.
        key: The user's key.
        base: The name of the model.
    """

    def __init__(self, send: Send, key: str, base: str) -> None:
        self._send, self._key, self.base = send, key, base
        self._models = self._samplers = 0
        self.session = str(
            self.post("/create_session", {"tags": [], "sdk_version": "0.38.0", "type": "create_session"})["session_id"]
        )

    def finish(self) -> None:
        """End the session, and free what it has."""
        self.request("POST", f"/sessions/{self.session}/finish", b'{"reason": {"type": "success"}}')

    def request(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, str, bytes]:
        """Send a request."""
        return self._send(method, PREFIX + path, body, {"x-api-key": self._key, "content-type": kind, "accept": "*/*"})

    def post(self, path: str, body: Any) -> Any:
        """Send a request in JSON that must be accepted; return its answer."""
        status, _, answer = self.request("POST", path, json.dumps(body).encode())
        expect(status == 200, f"POST {path} is answered with {status}: {answer[:300]!r}")
        return json.loads(answer)

    def result(self, future: Any) -> Any:
        """Return the result of a request: a message, or a mapping.

        Raises:
            ServiceConformanceError: There is none in time.
        """
        body = json.dumps({"request_id": future["request_id"], "allow_metadata_only": False}).encode()
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS:
            status, kind, answer = self.request("POST", "/retrieve_future", body)
            # A service waits by itself before it answers 408, so there is no pause before the next try.
            if status == 408:
                continue
            expect(status == 200, f"retrieve_future is answered with {status}: {answer[:300]!r}")
            if kind.startswith("application/x-protobuf"):
                return answer
            result = json.loads(answer)
            if result.get("type") != "try_again":
                return result
        raise ServiceConformanceError(f"there is no result after {SECONDS:.0f} s")

    # ---- training ----------------------------------------------------------------------------------------------------

    def create(self, rank: int = 8, seed: int = 1) -> "Model":
        """Create a model."""
        body = {
            "session_id": self.session,
            "model_seq_id": self._models,
            "base_model": self.base,
            "lora_config": {"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "type": "create_model",
        }
        self._models += 1
        return self._new(self.result(self.post("/create_model", body)))

    def load(self, path: str, *, optimizer: bool) -> "Model":
        """Create a model from a checkpoint."""
        body = {
            "session_id": self.session,
            "model_seq_id": self._models,
            "path": path,
            "optimizer": optimizer,
            "type": "load_weights",
        }
        self._models += 1
        return self._new(self.result(self.post("/load_weights", body)))

    def _new(self, created: Any) -> "Model":
        expect("model_id" in created, f"no model was created: {created}")
        return Model(self, str(created["model_id"]))

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def sampler(self, path: str | None = None) -> "SamplerHandle":
        """Create a sampler of a checkpoint, or of the model alone."""
        source = {"base_model": self.base} if path is None else {"model_path": path}
        body = {
            "session_id": self.session,
            "sampling_session_seq_id": self._samplers,
            "type": "create_sampling_session",
            **source,
        }
        self._samplers += 1
        return SamplerHandle(self, str(self.post("/create_sampling_session", body)["sampling_session_id"]))


class Model:
    """A model that is trained.

    Args:
        connection: Whose it is.
        name: Its id.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name, self._seq = connection, name, 0

    def number(self) -> int:
        """Return the number of the next request."""
        self._seq += 1
        return self._seq

    def send(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        *,
        seq: int | None = None,
        forward_only: bool = False,
        **config: float,
    ) -> Any:
        """Send a forward or backward pass; return its future."""
        request = messages.ForwardBackwardRequest(
            model_id=self.name, seq_id=self.number() if seq is None else seq, loss_fn=loss, forward_only=forward_only
        )
        for datum in data:
            one = request.data.add()
            one.model_input.add().encoded_text.tokens = np.asarray(datum.tokens, dtype="<i4").tobytes()
            targets = one.loss_fn_inputs["target_tokens"]
            targets.dense, targets.dtype = np.asarray(datum.targets, dtype="<i8").tobytes(), messages.INT64
            targets.shape.append(len(datum.targets))
            for name, values in datum.fields.items():
                tensor = one.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = np.asarray(values, dtype="<f4").tobytes(), messages.FLOAT32
                tensor.shape.append(len(values))
        for name, value in config.items():
            request.loss_fn_config_v2[name].number = value
        body = request.SerializeToString()
        status, _, answer = self.connection.request("POST", "/forward_backward", body, "application/x-protobuf")
        expect(status == 200, f"forward_backward is answered with {status}: {answer[:300]!r}")
        return json.loads(answer)

    def passed(self, future: Any) -> Passed:
        """Return the result of a pass."""
        answer = self.connection.result(future)
        expect(isinstance(answer, bytes), f"a pass failed: {answer}")
        output = messages.ForwardBackwardOutput.FromString(answer)
        expect("loss:sum" in output.metrics, f"the metrics lack loss:sum: {dict(output.metrics)}")
        log_probs: list[list[float]] = []
        for record in output.loss_fn_outputs:
            tensor = record.fields["logprobs"]
            # Offsets are in bytes, of 4 for each number.
            values, offsets = np.frombuffer(tensor.data, dtype="<f4"), np.frombuffer(tensor.offsets, dtype="<i8") // 4
            log_probs += [values[a:b].tolist() for a, b in pairwise(offsets.tolist())]
        return Passed(float(output.metrics["loss:sum"]), log_probs)

    def run(self, data: Sequence[Datum], loss: str = "cross_entropy", **options: Any) -> Passed:
        """Send a pass and return its result."""
        return self.passed(self.send(data, loss, **options))

    def step(self, *, wait: bool = True, seq: int | None = None, **params: float) -> Any:
        """Make an optimizer step; return its result, or its future."""
        adam = {
            "learning_rate": 1e-2,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
            **params,
        }
        number = self.number() if seq is None else seq
        future = self.connection.post(
            "/optim_step", {"model_id": self.name, "seq_id": number, "adam_params": adam, "type": "optim_step"}
        )
        if not wait:
            return future
        answer = self.connection.result(future)
        expect("error" not in answer, f"optim_step failed: {answer}")
        return answer

    def save(self, name: str, *, sampler: bool = False) -> str:
        """Save the model; return the path."""
        path = "/save_weights_for_sampler" if sampler else "/save_weights"
        body = {"model_id": self.name, "seq_id": self.number(), "path": name, "type": path[1:]}
        answer = self.connection.result(self.connection.post(path, body))
        expect("path" in answer, f"{path[1:]} failed: {answer}")
        return str(answer["path"])


@dataclass(frozen=True)
class SampledResponse:
    """A response.

    Args:
        tokens: Its tokens.
        log_probs: Their log-probabilities.
        stopped: Whether it ended at what it was to stop at.
    """

    tokens: list[int]
    log_probs: list[float]
    stopped: bool


class SamplerHandle:
    """A sampler.

    Args:
        connection: Whose it is.
        name: Its id.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name, self._seq = connection, name, 0

    def sample(
        self, prompt: Sequence[int], *, samples: int = 1, prompt_log_probs: bool = False, **params: Any
    ) -> tuple[list[SampledResponse], list[float]]:
        """Return responses and, if asked for, the log-probabilities of the prompt."""
        body = {
            "num_samples": samples,
            "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 8, "temperature": 1.0, "stop": [], **params},
            "sampling_session_id": self.name,
            "seq_id": self._seq,
            "prompt_logprobs": prompt_log_probs,
            "type": "sample",
        }
        self._seq += 1
        future = self.connection.post("/asample", body)
        ids = future.get("sample_sequence_ids", [])
        expect(len(ids) == samples, f"asample gives {len(ids)} sample_sequence_ids for {samples} samples")
        answer = self.connection.result(future)
        expect(isinstance(answer, bytes), f"a sample failed: {answer}")
        response = messages.SampleResponse.FromString(answer)
        responses = [
            SampledResponse(
                np.frombuffer(one.tokens, dtype="<i4").tolist(),
                np.frombuffer(one.logprobs, dtype="<f4").tolist(),
                one.stop_reason == messages.STOP,
            )
            for one in response.sequences
        ]
        expect(len(responses) == samples, f"{len(responses)} responses instead of {samples}")
        return responses, np.frombuffer(response.prompt_logprobs, dtype="<f4").tolist()

    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first."""
        _, numbers = self.sample(tokens, prompt_log_probs=True, max_tokens=1)
        expect(len(numbers) == len(tokens), f"{len(numbers)} log-probabilities of {len(tokens)} tokens")
        return numbers[1:]
