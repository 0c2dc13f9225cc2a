"""A small client of the protocol that gives the checks control over what the official client hides, such as sequence numbers and retries."""

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .. import messages

Send = Callable[[str, str, bytes, dict[str, str]], tuple[int, str, bytes]]
"""Sends a request with a method, a path, a body and headers; returns the status, the content type and the body of the response."""
Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""
PREFIX = "/api/v1"
SECONDS = 120.0
"""Seconds after which a request or a result times out."""


class ServiceConformanceError(AssertionError):
    """A service does not conform to the protocol; the message describes the difference."""


def expect(condition: bool, message: str) -> None:
    """Raise a ServiceConformanceError unless a condition holds."""
    if not condition:
        raise ServiceConformanceError(message)


def expect_close(got: Sequence[float], expected: Sequence[float], what: str, tolerance: float = 1e-4) -> None:
    """Raise a ServiceConformanceError unless two sequences agree within a tolerance.

    Args:
        got: The numbers of the service.
        expected: The expected numbers.
        what: What the numbers are, for messages.
        tolerance: The tolerance, absolute for expected numbers up to 1 and relative above.
    """
    expect(len(got) == len(expected), f"{what}: {len(got)} numbers, not {len(expected)}")
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        expect(abs(a - b) <= tolerance * max(1.0, abs(b)), f"{what}: number {number} is {a:.6g}, not {b:.6g}")


def send_to(url: str) -> Send:
    """Return a function that sends requests to a service.

    Args:
        url: The address of the service, without /api/v1.
    """
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def send(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        # Each request has a new connection, because the service may close an idle one at any time.
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
        tokens: The token ids of the input.
        targets: The target of each token.
        fields: The other tensors by name, each with one number per token.
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
        """The concatenated log-probabilities of all datums."""
        return [p for of_datum in self.log_probs for p in of_datum]


class Connection:
    """A session of a user.

    Args:
        send: Sends a request to the service.
        key: The API key of the user.
        base: The name of the base model.
        full: Whether to train all weights of one model at a time (rank 0), instead of adapters.
        decode: Returns the text of tokens; None if the tokenizer of the model is not available.
    """

    def __init__(self, send: Send, key: str, base: str, *, full: bool = False, decode: Decode | None = None) -> None:
        self._send, self._key, self.base, self._full, self.decode = send, key, base, full, decode
        self._models = self._samplers = 0
        self.session = str(
            self.post("/create_session", {"tags": [], "sdk_version": "0.38.0", "type": "create_session"})["session_id"]
        )

    def finish(self) -> None:
        """End the session, so that the service frees its models."""
        self.request("POST", f"/sessions/{self.session}/finish", b'{"reason": {"type": "success"}}')

    def request(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, str, bytes]:
        """Send a request; return the status, the content type and the body of the response.

        Args:
            method: The HTTP method.
            path: The path behind /api/v1.
            body: The body.
            kind: The content type of the body.
        """
        return self._send(method, PREFIX + path, body, {"x-api-key": self._key, "content-type": kind, "accept": "*/*"})

    def post(self, path: str, body: Any) -> Any:
        """Send a JSON request; return the JSON response.

        Raises:
            ServiceConformanceError: The status is not 200.
        """
        status, _, answer = self.request("POST", path, json.dumps(body).encode())
        expect(status == 200, f"POST {path} returned status {status} instead of 200: {answer[:300]!r}")
        return json.loads(answer)

    def result(self, future: Any) -> Any:
        """Wait for the result of a request; return a serialized protobuf message, or parsed JSON.

        Args:
            future: The response to the request, with its `request_id`.

        Raises:
            ServiceConformanceError: The result is not available within `SECONDS`, or a response has an unexpected status.
        """
        body = json.dumps({"request_id": future["request_id"], "allow_metadata_only": False}).encode()
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS:
            status, kind, answer = self.request("POST", "/retrieve_future", body)
            # The service waits before it responds with 408 (not available yet), so the client does not have to.
            if status == 408:
                continue
            expect(status == 200, f"retrieve_future returned status {status} instead of 200 or 408: {answer[:300]!r}")
            if kind.startswith("application/x-protobuf"):
                return answer
            result = json.loads(answer)
            if result.get("type") != "try_again":
                return result
        raise ServiceConformanceError(f"request {future['request_id']} has no result after {SECONDS:.0f} s")

    # ---- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def model(self, path: str | None = None, *, optimizer: bool = True) -> Iterator["Model"]:
        """Create a model, from a checkpoint if `path` is passed. All weights are freed afterward, so that the next model can be trained."""
        # The protocol has no request that ends a model; it ends with its session.
        session = Connection(self._send, self._key, self.base, full=True) if self._full else self
        try:
            yield session.create() if path is None else session.load(path, optimizer=optimizer)
        finally:
            if self._full:
                session.finish()

    def create(self, seed: int = 1) -> "Model":
        """Create a model with a new adapter of rank 8, or with all weights."""
        rank = 0 if self._full else 8
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
        expect("model_id" in created, f"the result of creating a model has no model_id: {created}")
        return Model(self, str(created["model_id"]))

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def sampler(self, path: str | None = None) -> "SamplerHandle":
        """Create a sampler of a checkpoint, or of the base model if `path` is None."""
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
    """A model in training.

    Args:
        connection: The session that it belongs to.
        name: The id of the model.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name, self._seq = connection, name, 0

    def number(self) -> int:
        """Return the sequence number of the next request, and count it as used."""
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
        """Send a forward_backward request; return its future.

        Args:
            data: The datums.
            loss: The name of the loss.
            seq: The sequence number; None for the next one.
            forward_only: Whether to compute no gradients.
            config: The settings of the loss.
        """
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
        expect(status == 200, f"forward_backward returned status {status} instead of 200: {answer[:300]!r}")
        return json.loads(answer)

    def passed(self, future: Any) -> Passed:
        """Wait for the result of a pass, and return it."""
        answer = self.connection.result(future)
        expect(isinstance(answer, bytes), f"a pass failed: {answer}")
        output = messages.ForwardBackwardOutput.FromString(answer)
        expect("loss:sum" in output.metrics, f"the metrics lack loss:sum: {dict(output.metrics)}")
        log_probs: list[list[float]] = []
        for record in output.loss_fn_outputs:
            tensor = record.fields["logprobs"]
            # Offsets are in bytes, and each number has 4 bytes.
            values, offsets = np.frombuffer(tensor.data, dtype="<f4"), np.frombuffer(tensor.offsets, dtype="<i8") // 4
            log_probs += [values[a:b].tolist() for a, b in pairwise(offsets.tolist())]
        return Passed(float(output.metrics["loss:sum"]), log_probs)

    def run(self, data: Sequence[Datum], loss: str = "cross_entropy", **options: Any) -> Passed:
        """Send a forward_backward request, and wait for its result."""
        return self.passed(self.send(data, loss, **options))

    def accepts(self, data: Sequence[Datum], loss: str) -> bool:
        """Return whether the service has a loss. The model cannot be used afterward, because the refusal may not count as a request."""
        try:
            self.run(data, loss, forward_only=True)
        except ServiceConformanceError:
            return False
        return True

    def step(self, *, wait: bool = True, seq: int | None = None, **params: float) -> Any:
        """Send an optim_step request; return its result, or its future if `wait` is false.

        Args:
            wait: Whether to wait for the result.
            seq: The sequence number; None for the next one.
            params: Adam's settings that differ from the defaults.
        """
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
        """Save a checkpoint of the model; return its path.

        Args:
            name: The name of the checkpoint.
            sampler: Whether to save it for samplers, without the moments.
        """
        path = "/save_weights_for_sampler" if sampler else "/save_weights"
        body = {"model_id": self.name, "seq_id": self.number(), "path": name, "type": path[1:]}
        answer = self.connection.result(self.connection.post(path, body))
        expect("path" in answer, f"{path[1:]} failed: {answer}")
        return str(answer["path"])


@dataclass(frozen=True)
class SampledCompletion:
    """A completion.

    Args:
        tokens: The token ids.
        log_probs: The log-probability of each token.
        stopped: Whether it ended at a stop token or text, rather than at `max_tokens`.
    """

    tokens: list[int]
    log_probs: list[float]
    stopped: bool


class SamplerHandle:
    """A sampler.

    Args:
        connection: The session that it belongs to.
        name: The id of the sampler.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name, self._seq = connection, name, 0

    def send(self, prompt: Sequence[int], *, samples: int = 1, prompt_log_probs: bool = False, **params: Any) -> Any:
        """Send a request for completions of a prompt; return its future.

        Args:
            prompt: The token ids of the prompt.
            samples: The number of completions.
            prompt_log_probs: Whether to compute the log-probabilities of the prompt.
            params: The sampling parameters that differ from the defaults.
        """
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
        expect(len(ids) == samples, f"asample returned {len(ids)} sample_sequence_ids for num_samples={samples}")
        return future

    def sampled(self, future: Any, samples: int = 1) -> tuple[list[SampledCompletion], list[float]]:
        """Wait for the result of `send` with this number of completions, and return it as `sample` does."""
        answer = self.connection.result(future)
        expect(isinstance(answer, bytes), f"a sample request failed: {answer}")
        response = messages.SampleResponse.FromString(answer)
        completions = [
            SampledCompletion(
                np.frombuffer(one.tokens, dtype="<i4").tolist(),
                np.frombuffer(one.logprobs, dtype="<f4").tolist(),
                one.stop_reason == messages.STOP,
            )
            for one in response.sequences
        ]
        expect(len(completions) == samples, f"there are {len(completions)} completions for num_samples={samples}")
        return completions, np.frombuffer(response.prompt_logprobs, dtype="<f4").tolist()

    def sample(
        self, prompt: Sequence[int], *, samples: int = 1, **options: Any
    ) -> tuple[list[SampledCompletion], list[float]]:
        """Sample completions of a prompt.

        Args:
            prompt: The token ids of the prompt.
            samples: The number of completions.
            options: The other arguments of `send`.

        Returns:
            The completions, and the log-probabilities of the prompt; these are empty if they were not requested.
        """
        return self.sampled(self.send(prompt, samples=samples, **options), samples)

    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of all tokens of a prompt except the first."""
        _, numbers = self.sample(tokens, prompt_log_probs=True, max_tokens=1)
        expect(len(numbers) == len(tokens), f"there are {len(numbers)} log-probabilities for a prompt of {len(tokens)} tokens")
        return numbers[1:]
