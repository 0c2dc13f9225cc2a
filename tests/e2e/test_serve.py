"""The service as a process, and clients of OpenAI's interface as they are."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import ConfigError
from drivetrain.generation.embeddings.config import EmbeddingConfig
from drivetrain.generation.embeddings.embedder import Embedder
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.generation.result import Generation
from drivetrain.serve.openai.settings import ServeSettings
from drivetrain.serve.openai.text import Texts
from helpers.server import Server, until
from helpers.texts import byte_tokenizer, save_text_model
from helpers.vision import image_uri, save_vision_model

PROMPT = "two plus two"
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]
KEY = {"authorization": "Bearer load-me"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    save_text_model(root / "weights" / "new", seed=1)
    (root / "weights" / "outside").symlink_to("/tmp")
    (root / "weights" / "empty").mkdir()
    save_text_model(root / "weights" / "bigger", num_hidden_layers=3)
    return save_text_model(root / "model")


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    folder = str(models.parent / "weights")
    with Server(models, "--weights-dir", folder, "--weights-key", "load-me", "--max-body-mib", "0.5") as found:
        yield found


def generated(models: Path, text: str | list[int], **options: Any) -> list[Generation]:
    """What a generator in this process gives."""
    ids = byte_tokenizer()(text)["input_ids"] if isinstance(text, str) else text
    config = RolloutConfig(model=ModelConfig(path=str(models)), generator="static")
    found: list[Generation] = build_generator(config).generate([ids], SamplingOptions(**options))[0]
    return found


def text_of(generation: Generation) -> str:
    return str(byte_tokenizer().decode(generation.response, skip_special_tokens=True))


def test_completions_are_those_of_a_generator(models: Path, server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "drivetrain"
    (greedy,) = generated(models, PROMPT, max_tokens=20, temperature=0.0)
    answer = client.completions.create(model="model", prompt=PROMPT, max_tokens=20, temperature=0, logprobs=0)
    assert answer.choices[0].text == text_of(greedy)
    assert answer.choices[0].finish_reason == greedy.finish_reason
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(greedy.log_probs, abs=1e-5)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), len(greedy.response))
    # Tokens in and out; several responses, drawn as by a generator.
    sampled = generated(models, [5, 6, 7], max_tokens=9, temperature=1.3, top_p=0.9, top_k=50, seed=3, samples=3)
    answer = client.completions.create(
        model="model",
        prompt=[5, 6, 7],
        max_tokens=9,
        temperature=1.3,
        top_p=0.9,
        seed=3,
        n=3,
        extra_body={"top_k": 50, "return_token_ids": True},
    )
    found: list[Any] = [choice.model_dump() for choice in answer.choices]
    assert [choice["token_ids"] for choice in found] == [one.response for one in sampled]
    assert [choice["index"] for choice in found] == [0, 1, 2]
    assert found[0]["prompt_token_ids"] == [5, 6, 7]
    assert set(found[0]["weight_versions"]) == {0}
    # Several prompts, of text or of tokens.
    several = client.completions.create(model="model", prompt=[PROMPT, "x"], max_tokens=20, temperature=0)
    assert [choice.text for choice in several.choices] == [
        text_of(greedy),
        text_of(generated(models, "x", max_tokens=20, temperature=0.0)[0]),
    ]
    assert len(client.completions.create(model="", prompt=[[5], [6]], max_tokens=2).choices) == 2


def test_chats_and_streams(models: Path, server: Server) -> None:
    client = server.client()
    (greedy,) = generated(models, f"<user>{PROMPT}<assistant>", max_tokens=24, temperature=0.0)
    whole = client.chat.completions.create(
        model="model", messages=CHAT, max_completion_tokens=24, temperature=0, logprobs=True
    )
    assert whole.choices[0].message.content == text_of(greedy)
    assert whole.choices[0].logprobs is not None
    assert [one.logprob for one in whole.choices[0].logprobs.content or []] == pytest.approx(greedy.log_probs, abs=1e-5)
    stream = client.chat.completions.create(
        model="model", messages=CHAT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text_of(greedy)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == greedy.finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(greedy.response)
    # Several responses in one stream, each with all of its tokens; and text in parts.
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(model="model", prompt=PROMPT, max_tokens=12, n=3, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    expected = generated(models, PROMPT, max_tokens=12, samples=3, seed=5)
    assert list(texts.values()) == [text_of(one) for one in expected]
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "plus two"}]}]
    again = client.chat.completions.create(model="model", messages=parts, max_tokens=24, temperature=0)
    assert again.choices[0].message.content == text_of(greedy)
    # Without a limit, up to the end of the model's positions.
    endless = client.chat.completions.create(model="model", messages=CHAT, extra_body={"ignore_eos": True}, seed=1)
    assert endless.usage is not None
    assert endless.usage.total_tokens == 512
    assert endless.choices[0].finish_reason == "length"


def test_stop_strings(models: Path, server: Server) -> None:
    client = server.client()
    text = text_of(generated(models, PROMPT, max_tokens=40, temperature=0.0)[0])
    for length in (1, 2, 4):
        stop = text[6 : 6 + length]
        expected = text[: text.index(stop)]
        options: dict[str, Any] = {
            "model": "model",
            "prompt": PROMPT,
            "max_tokens": 40,
            "temperature": 0,
            "stop": ["@@@@", stop],
        }
        answer = client.completions.create(**options)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"
        streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
        assert streamed == expected
    # The worker stops as well.
    deadline = time.monotonic() + 10
    while server.number("drivetrain_active_requests") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.number("drivetrain_active_requests") == 0
    (one,) = generated(models, PROMPT, max_tokens=40, temperature=0.0, stop_tokens=(100,))
    answer = client.completions.create(
        model="model", prompt=PROMPT, max_tokens=40, temperature=0, extra_body={"stop_token_ids": [100]}
    )
    assert answer.choices[0].text == text_of(one)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {"prompt": "x", "model": "gpt-9"}, 404, "the model 'gpt-9' is not served here; this is 'model'"),
        ("completions", {}, 400, "prompt: Field required"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "the prompt has 0 tokens"),
        ("completions", {"prompt": [5, 300]}, 400, "token ids from 5 to 300"),
        ("completions", {"prompt": [-1]}, 400, "greater than or equal to 0"),
        ("completions", {"prompt": "x" * 600}, 400, "the prompt has 600 tokens, which leaves no room for a completion in 512"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "temperature": "NaN"}, 400, "temperature"),
        ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
        ("completions", {"prompt": "x", "n": 1000}, 400, "1 prompts with n=1000: at most 128 completions are allowed"),
        ("completions", {"prompt": "x", "n": 2, "temperature": 0, "best_of": 2}, 400, "best_of"),
        ("completions", {"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias: this service does not support it"),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo"),
        ("completions", {"prompt": "x", "logprobs": 5}, 400, "logprobs"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0 needs a role and a content"),
        ("chat/completions", {"messages": CHAT, "chat_template": "{{ 7 * 7 }}"}, 400, "chat_template: this service does not"),
        ("chat/completions", {"messages": CHAT, "tools": [{}]}, 400, "tools: this service does not support it"),
        ("chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
            400,
            "images are accepted only as data URIs",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image_uri(1, 28, 28)}}]}]},
            400,
            "does not accept images",
        ),
        ("completions", {"prompt": "\ud800"}, 400, "a text is not valid Unicode"),
        ("completions", {"prompt": "x" * 300_000}, 400, "the text has 300000 characters, which cannot fit into 512 tokens"),
        ("completions", {"prompt": ["x"] * 200}, 400, "200 prompts with n=1: at most 128 completions are allowed"),
        ("completions", {"prompt": "x", "generation_config": "[]"}, 400, "generation_config is not a JSON object"),
        (
            "completions",
            {"prompt": "x", "generation_config": '{"temperature": "x"}'},
            400,
            "generation_config.temperature='x'",
        ),
        (
            "completions",
            {"prompt": "x", "generation_config": '{"repetition_penalty": 1.3}'},
            400,
            "repetition_penalty=1.3: this",
        ),
        ("embeddings", {"input": "x"}, 400, "this model generates text; serve an embedding model"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_bad_requests_have_one_clear_error(server: Server, path: str, body: dict[str, Any], status: int, message: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/{path}", content=json.dumps(body), headers=headers, timeout=30)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert httpx.post(f"{server.url}/completions", json={"prompt": "x", "max_tokens": 1}, timeout=30).status_code == 200


def test_who_may_ask_what(server: Server) -> None:
    ask = f"{server.url}/completions"
    body = {"prompt": "x", "max_tokens": 1}
    # Another name of this machine, as a web page that has its name point here would use it.
    port = server.root.rpartition(":")[2]
    assert httpx.post(ask, json=body, headers={"host": f"evil.example:{port}"}).status_code == 400
    assert httpx.post(ask, json=body, headers={"host": f"localhost:{port}"}).status_code == 200
    # What a web page can send without asking first; and no page is told that it may read answers.
    plain = httpx.post(ask, content=json.dumps(body), headers={"content-type": "text/plain", "origin": "http://evil.example"})
    assert plain.status_code == 400
    assert plain.json()["error"]["message"] == "send the header Content-Type: application/json"
    broken = httpx.post(ask, content="{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["message"] == "the body is not valid JSON"
    assert "access-control-allow-origin" not in httpx.post(ask, json=body, headers={"origin": "http://x"}).headers
    assert httpx.options(ask, headers={"origin": "http://x", "access-control-request-method": "POST"}).status_code == 405
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert httpx.get(server.root + path).status_code == 404
    # Too large, with and without saying so.
    assert httpx.post(ask, json={"prompt": "x" * 600_000}).status_code == 413
    assert httpx.post(ask, content=(b"x" * 1000 for _ in range(600))).status_code == 413


def test_new_weights_need_their_own_key_and_stay_below_their_folder(models: Path, server: Server) -> None:
    url = f"{server.root}/weights"
    assert httpx.post(url, json={"name": "new"}).status_code == 401
    assert httpx.post(url, json={"name": "new"}, headers={"authorization": "Bearer other"}).status_code == 401
    for name in (
        "",
        ".",
        "..",
        "../model",
        "/etc",
        "outside",
        "none",
        "https://example.org/x",
        "new/../../model",
        "a\0b",
        "x" * 5000,
    ):
        answer = httpx.post(url, json={"name": name}, headers=KEY)
        assert answer.status_code == 400, name
        assert "is not a folder below --weights-dir" in answer.json()["error"]["message"]
    for name, message in (("empty", "has neither model.safetensors"), ("bigger", "bigger is a different model: ")):
        answer = httpx.post(url, json={"name": name}, headers=KEY)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    client = server.client()
    options: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    more = {"return_token_ids": True}
    (old,) = generated(models, PROMPT, max_tokens=12, temperature=0.0)
    (new,) = generated(models.parent / "weights" / "new", PROMPT, max_tokens=12, temperature=0.0)
    # A link to the served model itself leads out of the folder.
    (models.parent / "weights" / "old").symlink_to(models)
    assert httpx.post(url, json={"name": "old"}, headers=KEY).status_code == 400
    (models.parent / "weights" / "old").unlink()
    save_text_model(models.parent / "weights" / "old")
    receipts = []
    for name, expected in (("new", new), ("old", old)):
        receipts.append(httpx.post(url, json={"name": name}, headers=KEY, timeout=60).json())
        choice: Any = client.completions.create(**options, extra_body=more).choices[0]
        assert choice.token_ids == expected.response
        assert set(choice.weight_versions) == {receipts[-1]["version"]}
    assert receipts[0]["xxh3_128"] != receipts[1]["xxh3_128"]
    assert receipts[1]["version"] == receipts[0]["version"] + 1
    assert (receipts[0]["workers"], receipts[0]["name"]) == (1, "new")


def test_a_client_that_goes_away_is_not_answered_further(server: Server) -> None:
    async def leave(stream: bool) -> None:
        client = server.async_client()
        options: dict[str, Any] = {
            "model": "model",
            "prompt": PROMPT,
            "max_tokens": 480,
            "n": 8,
            "extra_body": {"ignore_eos": True},
        }
        if stream:
            answer = await client.completions.create(**options, stream=True)
            async for _ in answer:
                break
            await answer.close()
        else:
            task = asyncio.create_task(client.completions.create(**options))
            await asyncio.sleep(0.3)
            task.cancel()
        await client.close()

    for stream in (True, False):
        before = server.number("drivetrain_generated_tokens_total")
        asyncio.run(leave(stream))
        deadline = time.monotonic() + 20
        while server.number("drivetrain_active_requests") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.number("drivetrain_active_requests") == 0
        assert server.number("drivetrain_generated_tokens_total") - before < 8 * 480


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_health_and_numbers_when_a_worker_dies(models: Path) -> None:
    with Server(models, "--restarts", "1", "--api-key", "one", "--api-key", "two") as server:
        for key in ("one", "two"):
            assert server.client(key).completions.create(model="model", prompt="x", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
            server.client("three").completions.create(model="model", prompt="x")
        assert httpx.get(f"{server.root}/metrics").status_code == 401
        assert httpx.get(f"{server.root}/health").json() == {"status": "ok"}
        headers = {"authorization": "Bearer one"}
        stream = server.client("one").completions.create(
            model="model", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        _kill_worker(server)
        with pytest.raises(openai.APIError, match="replica-0"):
            list(stream)
        deadline = time.monotonic() + 60
        while httpx.get(f"{server.root}/health").status_code == 503 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.client("one").completions.create(model="model", prompt="x", max_tokens=1).choices
        assert server.number("drivetrain_worker_restarts", **headers) == 1
        _kill_worker(server)
        until(lambda: httpx.get(f"{server.root}/health").status_code == 503)
        with pytest.raises(openai.InternalServerError) as found:
            server.client("one").completions.create(model="model", prompt="x", max_tokens=1)
        assert found.value.status_code == 503


def _kill_worker(server: Server) -> None:
    children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout.split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_weights_outlive_a_worker_and_a_signal_ends_the_service(models: Path) -> None:
    folder = str(models.parent / "weights")
    # A short path: it holds sockets.
    own = Path(tempfile.mkdtemp(prefix="served-"))
    settings = ("--host", "::1", "--weights-dir", folder, "--weights-key", "load-me")
    with Server(models, *settings, environment={"TMPDIR": str(own)}) as server:
        assert list(own.glob("drivetrain-*"))
        assert server.url.startswith("http://[::1]:")
        assert httpx.post(f"{server.root}/weights", json={"name": "new"}, headers=KEY, timeout=60).json()["version"] == 1
        _kill_worker(server)
        until(lambda: server.number("drivetrain_worker_restarts") == 1 and server.number("drivetrain_workers") == 1)
        options: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        choice: Any = server.client().completions.create(**options, extra_body={"return_token_ids": True}).choices[0]
        (new,) = generated(models.parent / "weights" / "new", PROMPT, max_tokens=12, temperature=0.0)
        assert choice.token_ids == new.response
        assert set(choice.weight_versions) == {1}
        # While a response is being streamed.
        stream = server.client().completions.create(
            model="", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        began = time.monotonic()
        server.process.terminate()
        assert server.process.wait(20) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 12
    assert not list(own.glob("drivetrain-*"))
    shutil.rmtree(own)


@pytest.mark.slow
def test_a_full_queue_is_told_at_once(models: Path) -> None:
    async def test(server: Server) -> list[Any]:
        client = server.async_client()
        options: dict[str, Any] = {"model": "model", "prompt": "x", "max_tokens": 300, "extra_body": {"ignore_eos": True}}
        found = await asyncio.gather(*(client.completions.create(**options) for _ in range(8)), return_exceptions=True)
        await client.close()
        return list(found)

    with Server(models, "--queue-size", "2", "--max-batch-size", "1") as server:
        found = asyncio.run(test(server))
        refused = [one for one in found if isinstance(one, openai.RateLimitError)]
        answered = [one for one in found if not isinstance(one, BaseException)]
        assert len(refused) + len(answered) == 8
        assert 2 <= len(answered) <= 4
        assert refused[0].response.headers["retry-after"] == "1"


@pytest.mark.slow
def test_embeddings_of_a_folder(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    prompts = {"prompts": {"q": "q: "}, "default_prompt_name": "q"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    texts = ["two plus two", "x", "a text that is longer than twenty bytes"]
    ids = [byte_tokenizer()("q: " + text)["input_ids"][:20] for text in texts]
    expected = Embedder(EmbeddingConfig(model=ModelConfig(path=str(folder)))).embed(ids)
    with Server(folder) as server:
        client = server.client()
        for encoding in ({}, {"encoding_format": "float"}):
            answer = client.embeddings.create(model="model", input=texts, **encoding)  # type: ignore[arg-type]
            found = torch.tensor([one.embedding for one in answer.data])
            assert torch.allclose(found, expected, atol=2e-6)
        tokens = client.embeddings.create(model="model", input=[5, 6, 7])
        assert tokens.usage.prompt_tokens == 3
        with pytest.raises(openai.BadRequestError, match="this model embeds texts; use /v1/embeddings"):
            client.completions.create(model="model", prompt="x")
        with pytest.raises(openai.BadRequestError, match=r"dimensions=8: the embeddings of this model have 64"):
            client.embeddings.create(model="model", input="x", dimensions=8)
        assert httpx.post(f"{server.url}/embeddings", json={"input": []}).status_code == 400


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_several_workers_and_other_engines(models: Path) -> None:
    (greedy,) = generated(models, PROMPT, max_tokens=12, temperature=0.0)
    for arguments in (["--replicas", "2"], ["--engine", "tensor_parallel", "--tp", "2"]):
        with Server(models, *arguments) as server:
            client = server.client()
            for _ in range(3):
                answer = client.completions.create(model="model", prompt=PROMPT, max_tokens=12, temperature=0)
                assert answer.choices[0].text == text_of(greedy)
            if "--replicas" in arguments:
                assert server.number("drivetrain_workers") == 2
                # One of them dies; the other one answers at once.
                children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True)
                os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
                until(lambda: server.number("drivetrain_workers") == 1)
                assert client.completions.create(model="model", prompt=PROMPT, max_tokens=2).choices


@pytest.mark.slow
def test_a_chat_in_the_terminal(models: Path, tmp_path: Path) -> None:
    (greedy,) = generated(models, f"<system>be brief<user>{PROMPT}<assistant>", max_tokens=6, temperature=0.0)
    words = [sys.executable, "-m", "drivetrain.cli", "chat", str(models), "--system-prompt", "be brief"]
    ran = subprocess.run(
        [*words, "max_new_tokens=6", "do_sample=False", "--", "--max-batch-size", "2"],
        # The answer is cut off, and is not to be continued.
        input=f"{PROMPT}\nn\n!exit\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "model was already loaded" in ran.stdout
    shown = "".join(c for c in text_of(greedy) if c.isalnum())
    assert shown in "".join(c for c in ran.stdout if c.isalnum())
    # Nothing is left behind.
    assert not subprocess.run(["pgrep", "-f", f"serve {models} --name"], capture_output=True, text=True).stdout
    missing = subprocess.run([*words[:4], str(tmp_path / "none")], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 1
    assert "does not exist; give a model folder, a run, a checkpoint" in missing.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines; give --api-key"),
        (["{model}", "--tp", "2"], "--tp 2 with --engine transformers, which uses one device; use --engine tensor_parallel"),
        (["{model}", "--quant", "int8"], "--quant int8 with --engine transformers; use --engine tensor_parallel"),
        (["{model}", "--weights-dir", "/tmp"], "--weights-dir needs --weights-key KEY"),
        (["{model}", "--weights-dir", "/none", "--weights-key", "k"], "--weights-dir /none is not a folder"),
        (["{model}", "--port", "70000"], "--port 70000; it must be from 1 to 65535"),
        (["{model}", "--replicas", "0"], "--replicas 0; it must be at least 1"),
        (["{model}/nothing"], "does not exist; give a model folder, a run, a checkpoint"),
        (["{model}/.."], "has no config.json"),
    ],
)
def test_settings_that_cannot_be_used_are_named_before_anything_loads(
    models: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from drivetrain.serve.openai.serve_command import main

    assert main([argument.replace("{model}", str(models)) for argument in arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_port_in_use_and_keys_that_no_header_carries(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from drivetrain.serve.openai.serve_command import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([str(models), "--port", str(port)]) == 1
    assert f"the address 127.0.0.1:{port} cannot be used: Address already in use" in capsys.readouterr().err
    for keys in (("",), ("schlüssel",)):
        with pytest.raises(ConfigError, match="a key is empty or has characters"):
            ServeSettings(name="m", api_keys=keys)
    with pytest.raises(ConfigError, match="--weights-key is one of the keys of --api-key"):
        ServeSettings(name="m", api_keys=("k",), weights_dir=Path("/tmp"), weights_key="k")
    assert "evil" not in ServeSettings(name="m", host="0.0.0.0", api_keys=("k",)).hosts()


def test_text_appears_only_when_it_is_certain(models: Path) -> None:
    texts = Texts(models)
    stream = texts.stream(["END", "EE"])
    ids = texts.encode("aé€🙂 ENEND after")
    given = [stream.add(token) for token in ids]
    assert "".join(given) == stream.text == "aé€🙂 EN"
    assert stream.stopped
    # No half of a character, and nothing that may be the beginning of a stop string.
    assert "\ufffd" not in "".join(given)
    cut = texts.stream([])
    assert "".join(cut.add(token) for token in texts.encode("€🙂")[:-1]) == "€"
    assert cut.end() == "\ufffd"
    held = texts.stream(["END"])
    assert "".join(held.add(token) for token in texts.encode("x EN")) == "x "
    assert held.end() == "EN"


@pytest.mark.slow
@pytest.mark.parametrize("engine", [(), ("--engine", "tensor_parallel", "--tp", "2")], ids=["continuous", "tensor_parallel"])
def test_images(engine: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = len(tokenizer) - 1
    save_vision_model(tmp_path / "model", "qwen3_vl", vocab_size=len(tokenizer), image_token=image)
    tokenizer.save_pretrained(tmp_path / "model")
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": image_uri(1, 84, 56)}}, {"type": "text", "text": PROMPT}]
    chat: list[Any] = [{"role": "user", "content": parts}]
    ids = tokenizer(f"<user><image>{PROMPT}<assistant>")["input_ids"]
    config = RolloutConfig(model=ModelConfig(path=str(tmp_path / "model")), generator="tensor_parallel")
    generator = build_generator(config)
    stream = generator.submit(ids, SamplingOptions(max_tokens=9, temperature=0.0), images=[image_uri(1, 84, 56)])
    list(stream)
    generator.close()
    with Server(tmp_path / "model", *engine) as server:
        options: dict[str, Any] = {"model": "model", "messages": chat, "max_tokens": 9, "temperature": 0}
        answer: Any = server.client().chat.completions.create(**options, extra_body={"return_token_ids": True})
        assert answer.choices[0].token_ids == stream.tokens
        assert answer.usage.prompt_tokens == len(stream.prompt) > len(ids)
        parts[0]["image_url"] = {"url": image_uri(2, 84, 56)}
        other: Any = server.client().chat.completions.create(**options, extra_body={"return_token_ids": True})
        assert other.choices[0].token_ids != stream.tokens
        # As many as fit behind the image, whose tokens a client does not know.
        del options["max_tokens"]
        longest: Any = server.client().chat.completions.create(**options, extra_body={"ignore_eos": True})
        assert longest.usage.total_tokens == 512
        parts[0]["image_url"] = {"url": "data:image/png;base64,AAAA"}
        with pytest.raises(openai.BadRequestError, match="image 0"):
            server.client().chat.completions.create(**options)
