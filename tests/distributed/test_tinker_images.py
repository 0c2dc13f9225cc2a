"""Images in the requests of the training service: trained and sampled as by plain transformers, and what is refused."""

import asyncio
import base64
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultimodalLM

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.hf.config import read_config
from drivetrain.engine.hf.media import media_config
from drivetrain.engine.tiny_media import END, IMAGE, START
from drivetrain.generation.images import PromptImages
from drivetrain.serve.tinker import messages
from drivetrain.serve.tinker.payloads import dense_size
from helpers.media import png, save_media_model
from helpers.tinker_replicas import LocalReplicas
from helpers.tinker_service import (
    Service,
    answer_of,
    body_of,
    forward_backward,
    group_of,
    log_probs,
    running,
    sampler_of,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("process_group")
FAMILY = "qwen3_vl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_media_model(tmp_path / "model", FAMILY)


def serve(model: Path, test: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        replicas = LocalReplicas(model)
        try:
            options = {"build": group_of(model), "replicas": replicas, **settings}
            async with running(model, model.parent / "state", **options) as service:
                await test(service)
        finally:
            replicas.close()

    asyncio.run(run())


def image_chunk(content: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(content).decode(), "format": "png", **options}


def text_chunk(*tokens: int) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(tokens)}


class Plain:
    """The log-probabilities of plain transformers in float64, of a text with images."""

    def __init__(self, folder: Path) -> None:
        settings = ModelConfig(path=str(folder))
        whole = media_config(settings, read_config(settings))
        assert whole is not None
        self._images = PromptImages(settings, whole)
        self._model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()

    def tokens(self, *parts: list[int] | bytes) -> list[int]:
        return [token for part in parts for token in (self._images.process(part)[0] if isinstance(part, bytes) else part)]

    def log_probs(self, *parts: list[int] | bytes, completion: list[int] | None = None) -> torch.Tensor:
        fields: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            for name, value in (self._images.process(part)[1] if isinstance(part, bytes) else {}).items():
                fields.setdefault(name, []).append(value.double() if value.is_floating_point() else value)
        ids = torch.tensor([[*self.tokens(*parts), *(completion or [])]])
        media = {name: torch.cat(values) for name, values in fields.items()}
        with torch.no_grad():
            output = self._model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == IMAGE).int(),
                use_cache=False,
                **media,
            )
        result: torch.Tensor = output.logits[0].log_softmax(-1)
        return result


def test_datums_and_prompts_with_images(model: Path) -> None:
    plain = Plain(model)
    small, large = png(16, 16, seed=1), png(32, 16, seed=2)
    parts: list[list[int] | bytes] = [[20, 21, START], small, [END, 22, START], large, [END, 23, 24]]
    length = len(plain.tokens(*parts))
    targets = [(7 * i) % 200 for i in range(length)]
    datum = {"tokens": parts, "target_tokens": targets, "weights": [1.0] * length}
    text = {"tokens": [30, 31, 32], "target_tokens": [31, 32, 33], "weights": [1.0] * 3}

    async def test(service: Service) -> None:
        session = await service.session()
        trained = await service.model(session)
        answer = await service.result(await service.post("/forward_backward", forward_backward(trained, 1, [datum, text])))
        expected = plain.log_probs(*parts).gather(1, torch.tensor(targets)[:, None])[:, 0]
        got = log_probs(answer)
        np.testing.assert_allclose(got[:length], expected, rtol=1e-5, atol=1e-5)
        # Without the images the numbers are others.
        assert abs(float(plain.log_probs([20, 21])[-1, 5]) - float(plain.log_probs([START], small)[-1, 5])) > 1e-3
        assert len(got) == length + 3
        step = await service.result(await service.step(trained, 2))
        assert step["metrics"]["grad_norm:mean"] > 0
        again = await service.result(
            await service.post("/forward_backward", forward_backward(trained, 3, [datum], forward_only=True))
        )
        assert again.metrics["loss:sum"] < -float(expected.sum())

        sampler = await sampler_of(service, session, 0)
        chunks = [
            text_chunk(20, START),
            image_chunk(small, expected_tokens=len(plain.tokens(small))),
            text_chunk(END, 25),
        ]
        prompt: list[list[int] | bytes] = [[20, START], small, [END, 25]]
        body = body_of(
            sampler, 0, chunks, prompt_logprobs=True, topk_sample_logprobs=2, params={"max_tokens": 3, "temperature": 1.0}
        )
        sampled = await answer_of(service, await service.post("/asample", body))
        assert not isinstance(sampled, dict), sampled
        ids = plain.tokens(*prompt)
        of_prompt = np.frombuffer(sampled.prompt_logprobs, dtype="<f4")
        predicted = plain.log_probs(*prompt)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        # The tokens of the image are not predicted.
        is_text = [i for i, token in enumerate(ids) if i and token != IMAGE]
        assert np.isnan(of_prompt[[i for i in range(len(ids)) if i not in is_text]]).all()
        np.testing.assert_allclose(of_prompt[is_text], predicted[[i - 1 for i in is_text]], rtol=1e-5, atol=1e-5)
        (completion,) = tokens_of(sampled)
        whole = plain.log_probs(*prompt, completion=completion)
        expected_of = [float(whole[len(ids) - 1 + i, token]) for i, token in enumerate(completion)]
        got_of = np.frombuffer(sampled.sequences[0].logprobs, dtype="<f4")
        np.testing.assert_allclose(got_of, expected_of, rtol=1e-4, atol=1e-4)
        # A prompt may end with an image.
        ends = body_of(sampler, 1, [text_chunk(20, START), image_chunk(small)], prompt_logprobs=True)
        answer = await answer_of(service, await service.post("/asample", ends))
        assert np.isnan(np.frombuffer(answer.prompt_logprobs, dtype="<f4")).sum() == 1 + len(plain.tokens(small))

    serve(model, test)


def test_images_that_cannot_be_used_fail_their_own_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = png(16, 16)
    read: list[int] = []
    process = PromptImages.process

    def counted(self: PromptImages, image: str | bytes) -> Any:
        result = process(self, image)
        read.append(len(result[0]))
        return result

    monkeypatch.setattr(PromptImages, "process", counted)

    async def test(service: Service) -> None:
        session = await service.session()
        trained = await service.model(session)
        sampler = await sampler_of(service, session, 0)
        cases = [
            (
                [text_chunk(1), image_chunk(good), image_chunk(b"no image")],
                "image 1 of the prompt: the image (bytes) is not an image",
            ),
            ([text_chunk(1), image_chunk(good, format="gif")], "format 'gif'; send png or jpeg"),
            ([text_chunk(1), image_chunk(good, expected_tokens=3)], "expected_tokens=3"),
            ([text_chunk(1), {**image_chunk(good), "data": "%%%"}], "not base64"),
            ([text_chunk(1), {"type": "dmel"}], "a chunk of dmel"),
            ([text_chunk(1, IMAGE), image_chunk(good)], "image tokens"),
            (
                [text_chunk(1), image_chunk(good, override_dimensions={"width": 3, "height": 3})],
                "override_dimensions, which is not",
            ),
            ([text_chunk(1), *[image_chunk(good)] * 1000], "the maximum is 256; send fewer or smaller images"),
            ([text_chunk(*[1] * 125), image_chunk(good)], "the prompt has 129 tokens, but the service"),
        ]
        for number, (chunks, message) in enumerate(cases):
            body = body_of(sampler, number, chunks, prompt_logprobs=True)
            answer = await answer_of(service, await service.post("/asample", body))
            assert isinstance(answer, dict), answer
            assert message in answer["error"], answer
        # Too many alternatives are refused for good, instead of being called for again later.
        body = body_of(sampler, 100, [1, 2, 3], prompt_alt_tokens_k=9000)
        assert "more than 8192" in (await service.post("/asample", body, status=400))["detail"]
        # No more images are processed than fit.
        assert max(read) == 4
        assert len(read) < 100
        read.clear()
        parts = [[1, 2], b"damaged", [3]]
        damaged = {"tokens": parts, "target_tokens": [1] * 9, "weights": [1.0] * 9}
        answer = await service.result(await service.post("/forward_backward", forward_backward(trained, 1, [damaged])))
        assert "image 0 of datum 0" in answer["error"]
        assert not read
        # Those behind it are computed.
        text = {"tokens": [1, 2], "target_tokens": [2, 3], "weights": [1.0, 1.0]}
        answer = await service.result(await service.post("/forward_backward", forward_backward(trained, 2, [text])))
        assert answer.metrics["loss:sum"] > 0

    serve(model, test)


def test_an_image_counts_as_much_as_it_takes_when_it_is_processed() -> None:
    body = forward_backward("m", 1, [{"tokens": [[1], png(200, 100), [2]], "target_tokens": [1], "weights": [1.0]}])
    damaged = forward_backward("m", 1, [{"tokens": [[1], b"x", [2]], "target_tokens": [1], "weights": [1.0]}])
    request, other = (messages.ForwardBackwardRequest.FromString(one) for one in (body, damaged))
    assert dense_size(request) - dense_size(other) == 24 * 200 * 100
