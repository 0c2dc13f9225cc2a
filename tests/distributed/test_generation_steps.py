"""Generation steps by frames: what controllers in any language send, what goes wrong, and the controller that ships."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError, WorkerError, WorkerLostError
from drivetrain.engine.hf.weights import stored_weights
from drivetrain.generation.conformance.__main__ import main as conformance
from drivetrain.generation.conformance.checks import CHECKS
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.workers.protocol.comm_id import mint
from drivetrain.workers.supervision.child_process import ChildProcess
from drivetrain.workers.tensor_parallel import ranks
from drivetrain.workers.tensor_parallel.generator import TensorParallelGenerator
from helpers.controller import Worker
from helpers.search_path import TESTS, python_path
from helpers.vision import image_uri, prompt_with, save_vision_model

GREEDY = SamplingOptions(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    save_tiny_model(root / "gpt2", "gpt2")
    return save_tiny_model(root / "model", "qwen3")


def meet(*workers: Worker) -> None:
    found, listener = mint()
    listener.close()
    replies = ask({"op": "init", "comm_id": found.hex()}, *workers)
    assert replies == [{"op": "init_ok"}] * len(workers)


def ask(frame: dict[str, Any], *workers: Worker) -> list[dict[str, Any]]:
    for worker in workers:
        worker.send(frame)
    return [worker.receive() for worker in workers]


def loading(folder: Path, model_id: str = "m", **more: Any) -> dict[str, Any]:
    return {
        "op": "load_dense_shard",
        "model_id": model_id,
        "config_json": (folder / "config.json").read_text(),
        "safetensors_paths": [str(file) for file in sorted(folder.glob("*.safetensors"))],
        "quant": None,
        **more,
    }


def step(tokens: list[int], offset: int, model_id: str = "m") -> dict[str, Any]:
    return {"op": "generate_step", "model_id": model_id, "tokens": tokens, "offset": offset}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Worker]]:
    """Two workers that have met; tests leave them alive, with no model."""
    with Worker(0, 2) as first, Worker(1, 2) as second:
        meet(first, second)
        yield [first, second]


def kinds(replies: list[dict[str, Any]]) -> list[str]:
    return [reply.get("kind", reply["op"]) for reply in replies]


def test_a_controller_loads_steps_rolls_back_and_unloads(folder: Path, pair: list[Worker]) -> None:
    assert kinds(ask(step([5], 0), *pair)) == ["model_not_loaded"] * 2
    assert kinds(ask({"op": "clear_kv_cache", "model_id": "m"}, *pair)) == ["model_not_loaded"] * 2
    for name in ("m", "n"):
        assert ask(loading(folder, name), *pair) == [{"op": "load_dense_shard_ok"}] * 2
    # Several models, in turns; a second one under the same id is refused, and changes nothing.
    assert kinds(ask(loading(folder), *pair)) == ["already_loaded"] * 2
    ok = [{"op": "generate_step_ok"}] * 2
    assert ask(step([5, 6, 7], 0), *pair) == ok
    assert ask(step([5, 6, 7], 0, "n"), *pair) == ok
    assert ask(step([8], 3), *pair) == ok
    assert ask(step([9, 9], 2), *pair) == ok
    replies = ask(step([5], 9), *pair)
    assert kinds(replies) == ["bad_request"] * 2
    assert replies[0]["message"] == "offset=9 is beyond the 4 tokens in the cache; send those before it first"
    for tokens, message in (
        ([], "tokens is empty"),
        ([256], "tokens are from 256 to 256; the model only has those below 256"),
    ):
        replies = ask(step(tokens, 0), *pair)
        assert kinds(replies) == ["bad_request"] * 2
        assert message in replies[0]["message"]
    assert ask(step([5], 4), *pair) == ok
    assert ask({"op": "clear_kv_cache", "model_id": "m"}, *pair) == [{"op": "kv_cache_cleared"}] * 2
    assert kinds(ask(step([5], 1), *pair)) == ["bad_request"] * 2
    for name in ("m", "n"):
        assert ask({"op": "unload_model", "model_id": name}, *pair) == [{"op": "unloaded"}] * 2
    assert kinds(ask({"op": "unload_model", "model_id": "m"}, *pair)) == ["model_not_loaded"] * 2


def test_different_tokens_on_the_ranks_are_noticed_before_the_forward_pass(folder: Path, pair: list[Worker]) -> None:
    ask(loading(folder), *pair)
    ask(step([5, 6], 0), *pair)
    for first, second in ((step([7], 2), step([8], 2)), (step([7], 2), step([7], 1))):
        pair[0].send(first)
        pair[1].send(second)
        replies = [worker.receive() for worker in pair]
        assert kinds(replies) == ["forward_failed"] * 2
        assert "rank 0 and rank 1 were sent different tokens or offsets, so no rank ran the step" in replies[0]["message"]
    # One that is refused on one rank alone does not leave the other one waiting.
    pair[0].send(step([7], 2))
    pair[1].send(step([999], 2))
    replies = [worker.receive() for worker in pair]
    assert kinds(replies) == ["forward_failed", "bad_request"]
    assert replies[0]["echo"]
    # The caches are as before.
    assert kinds(ask(step([7], 2), *pair)) == ["generate_step_ok"] * 2
    ask({"op": "unload_model", "model_id": "m"}, *pair)


def test_a_model_that_cannot_be_loaded_is_loaded_by_no_rank(folder: Path, pair: list[Worker], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    for frame, kind, message in (
        (loading(folder, safetensors_paths=[]), "load_failed", "0 safetensors files in 0 folders"),
        (loading(folder, safetensors_paths=[str(tmp_path / "none.safetensors")]), "load_failed", "none.safetensors"),
        (loading(damaged), "load_failed", "model.safetensors"),
        (
            loading(folder.parent / "gpt2", safetensors_paths=loading(folder)["safetensors_paths"]),
            "unsupported_arch",
            "no plan",
        ),
        (loading(folder.parent / "gpt2"), "unsupported_arch", "transformers has no plan by which the layers of gpt2"),
        (loading(folder, config_json='{"model_type":"no_such"}'), "unsupported_arch", "model_type=no_such is not supported"),
        (loading(folder, config_json="{"), "bad_request", "config_json is not JSON"),
        (loading(folder, quant="q5k"), "load_failed", "quant='q5k': there is no such quantization here; there is int8"),
    ):
        replies = ask(frame, *pair)
        assert kinds(replies) == [kind] * 2, replies
        assert message in replies[0]["message"]
    # A rank that fails alone: the other one has loaded its part, and drops it.
    config = json.loads((folder / "config.json").read_text())
    pair[0].send(loading(folder))
    pair[1].send(loading(folder, config_json=json.dumps({**config, "intermediate_size": 100})))
    replies = [worker.receive() for worker in pair]
    assert kinds(replies) == ["load_failed"] * 2
    assert [bool(reply.get("echo")) for reply in replies] == [True, False]
    assert "according to config.json; they do not belong together" in replies[1]["message"]
    assert kinds(ask(loading(folder), *pair)) == ["load_dense_shard_ok"] * 2
    assert kinds(ask(step([5, 6], 0), *pair)) == ["generate_step_ok"] * 2
    ask({"op": "unload_model", "model_id": "m"}, *pair)


def test_images_by_frames(folder: Path, pair: list[Worker], tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "qwen3_vl", "qwen3_vl")
    assert kinds(ask(loading(model), *pair)) == ["load_dense_shard_ok"] * 2
    ask(loading(folder, "text"), *pair)
    # 3 x 2 merged patches of 28 pixels.
    tokens = [token for one in prompt_with(1) for token in ([one] * 6 if one == 250 else [one])]
    images = [image_uri(1, 84, 56)]

    def frame(**more: Any) -> dict[str, Any]:
        return {
            "op": "generate_step_with_images",
            "model_id": "m",
            "tokens": tokens,
            "offset": 0,
            "image_token_id": 250,
            "image_data_uris": images,
            "chunk_size": 4,
            **more,
        }

    assert kinds(ask(frame(), *pair)) == ["generate_step_ok"] * 2
    assert kinds(ask(step([5], len(tokens)), *pair)) == ["generate_step_ok"] * 2
    for wrong, kind, message in (
        ({"image_data_uris": images * 2}, "bad_request", "6 image tokens (id 250), but its images have 12"),
        ({"image_data_uris": ["https://x/y.png"]}, "bad_request", "is a URL; only data URIs and bytes are accepted here"),
        ({"image_token_id": 7}, "bad_request", "1 image tokens (id 7), but its images have 6"),
        (
            {"model_id": "text"},
            "unsupported_arch",
            "qwen3 sees no images in generation steps; only qwen2_5_vl and qwen3_vl do",
        ),
        ({"offset": 99}, "bad_request", "offset=99 is beyond"),
        ({"chunk_size": 0}, "bad_request", "chunk_size"),
    ):
        replies = ask(frame(**wrong), *pair)
        assert kinds(replies) == [kind] * 2, replies
        assert message in replies[0]["message"]
    # Other images on one rank.
    pair[0].send(frame())
    pair[1].send(frame(image_data_uris=[image_uri(2, 84, 56)]))
    assert kinds([worker.receive() for worker in pair]) == ["forward_failed"] * 2
    for name in ("m", "text"):
        ask({"op": "unload_model", "model_id": name}, *pair)


@pytest.mark.parametrize("kind", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_or_wedged_in_a_step(folder: Path, kind: signal.Signals) -> None:
    """The other rank is told by its connection, or ends by its watchdog; a new group loads and steps."""
    with Worker(0, 2, "--watchdog", "generate_step=4") as first, Worker(1, 2) as second:
        meet(first, second)
        ask(loading(folder), first, second)
        second.process.send_signal(kind)
        first.send(step([5, 6], 0))
        reply = first.receive(30)
        assert reply["op"] == "error"
        if kind == signal.SIGKILL:
            assert reply["kind"] == "forward_failed"
        else:
            assert reply["kind"] == "watchdog"
            assert "rank 0 of 2 made no progress in generate_step" in reply["message"]
            assert first.process.wait(30) == 70
        second.process.kill()


# ---- the controller that ships ----------------------------------------------------------------------------------------------


def controller(folder: Path, **options: Any) -> TensorParallelGenerator:
    model = ModelConfig(path=str(folder))
    return TensorParallelGenerator(RolloutConfig(model=model, generator="tensor_parallel", options={"tp": 2, **options}))


def plain(folder: Path, prompt: list[int]) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[int] = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None)[
        0
    ].tolist()
    return found[len(prompt) :]


def test_buffers_that_are_stored_with_the_weights_are_read(tmp_path: Path) -> None:
    """The bias by which DeepSeek-V3's routers choose, from the folder and with new weights."""
    folder = save_tiny_model(tmp_path / "model", "deepseek_v3")
    unbiased = plain(folder, [5, 6, 7])
    file = folder / "model.safetensors"
    first, second = load_file(file), load_file(file)
    (name,) = (name for name in first if name.endswith("e_score_correction_bias"))
    first[name] = torch.linspace(-3, 3, len(first[name]))
    second[name] = first[name].flip(0)
    save_file(first, file, metadata={"format": "pt"})
    expected = plain(folder, [5, 6, 7])
    generator = controller(folder, tp=1)
    try:
        ((answer,),) = generator.generate([[5, 6, 7]], GREEDY)
        assert answer.response == expected != unbiased
        generator.load_weights(second.items())
        save_file(second, file, metadata={"format": "pt"})
        ((answer,),) = generator.generate([[5, 6, 7]], GREEDY)
        assert answer.response == plain(folder, [5, 6, 7]) != expected
    finally:
        generator.close()


@pytest.mark.slow
@pytest.mark.usefixtures("real_commands")
def test_the_controller_survives_its_ranks(folder: Path, tmp_path: Path) -> None:
    expected = plain(folder, [5, 6, 7])
    generator = controller(folder)
    try:
        ((answer,),) = generator.generate([[5, 6, 7]], GREEDY)
        assert answer.response == expected
        # What a prompt has in common with the last one is in the cache.
        before = generator.stats().prefill_tokens
        ((other,),) = generator.generate([[5, 6, 8]], GREEDY)
        assert other.response == plain(folder, [5, 6, 8])
        assert generator.stats().prefill_tokens - before == 1
        ranks: Any = generator._ranks
        # As in a kernel of NCCL, which waits for a rank that has ended until its communicator is aborted.
        aborted, execute = threading.Event(), ranks.local.execute

        def execute_beside_a_dying_rank(request: Any) -> Any:
            # Between two requests the controller would notice the death, and start the ranks anew without an error.
            os.kill(ranks._processes[0].pid, signal.SIGKILL)
            return execute(request) if aborted.wait(60) else None

        ranks._abort = aborted.set
        ranks.local.execute = execute_beside_a_dying_rank
        running, waiting = generator.submit([5, 6, 7], GREEDY), generator.submit([5, 6, 7], GREEDY)
        with pytest.raises((WorkerLostError, WorkerError), match="tp-rank-1 was killed by SIGKILL"):
            list(running)
        assert aborted.is_set()
        # The next one starts the ranks anew, and so do new weights while the model is on the host.
        assert [token.token for token in waiting] == expected
        aborted.clear()
        generator._ranks._abort = aborted.set  # type: ignore[union-attr]
        generator.to("host")
        assert not generator._ranks.local.models  # type: ignore[union-attr]
        generator.load_weights(stored_weights(str(folder)))
        assert not generator._ranks.local.models  # type: ignore[union-attr]
        generator.to("device")
        ((again,),) = generator.generate([[5, 6, 7]], GREEDY)
        assert (again.response, set(again.versions)) == (expected, {1})
    finally:
        generator.close()
    with pytest.raises(ConfigError, match="this generator was closed"):
        list(generator.submit([5], GREEDY))
    # Nothing is left of it, nor of one that cannot be built. Ranks that end because they are asked to are not aborted.
    assert not aborted.is_set()
    assert not {"RANK", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} & set(os.environ)
    assert not dist.is_initialized()
    config = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    with pytest.raises(ModelError, match="they do not belong together"):
        controller(tmp_path / "other")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("real_commands")
def test_a_rank_that_dies_at_its_start_is_noticed_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(ChildProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(ranks, "ChildProcess", Dies)
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match="tp-rank-1 was killed by SIGKILL"):
        controller(folder, tp=2, start_s=120)
    assert time.monotonic() - began < 60


def test_the_controller_takes_images(tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path / "model", "qwen2_5_vl")
    generator = controller(folder, tp=1)
    images = [image_uri(1, 84, 56), image_uri(2, 56, 112)]
    alone = [generator.submit(prompt_with(1), GREEDY, images=[image]) for image in images]
    both = generator.submit(prompt_with(2), GREEDY, images=images)
    found = [[token.token for token in stream] for stream in (*alone, both)]
    assert [len(tokens) for tokens in found] == [10] * 3
    assert found[0] != found[1]
    again = generator.submit(prompt_with(1), GREEDY, images=images[:1])
    assert [token.token for token in again] == found[0]
    with pytest.raises(ConfigError, match=r"the prompt has 1 image tokens \(id 250\) for 2 images"):
        generator.submit(prompt_with(1), GREEDY, images=images)
    generator.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"size": 2},
            "options.size is unknown to generator=tensor_parallel; it has quant, start_s, timeout_s, tp, watchdog_s",
        ),
        ({"tp": 0}, "tp=0; it must be an integer of at least 1"),
        ({"tp": "2"}, "tp='2'; it must be an integer of at least 1"),
    ],
)
def test_options_of_the_controller_are_checked(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        controller(folder, **options)


@pytest.mark.slow
def test_weights_of_8_bits(folder: Path) -> None:
    """In a process that finds torchao, which transformers would import in all others."""
    found = Path(sys.prefix) / "torchao"
    if not found.is_dir():
        pytest.skip(f"needs torchao in {found}, where .ci/setup installs it")
    environment = {**os.environ, "PYTHONPATH": python_path(TESTS, found), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "helpers.quantized", str(folder)]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    for size, numbers in json.loads(ran.stdout.splitlines()[-1]).items():
        # As close as rounding to 8 bits leaves them, on any number of ranks; and smaller.
        assert numbers["cosine"] > 0.9995, size
        assert numbers["difference"] > 1e-4, "the weights are not quantized"
        assert numbers["bytes"] < 0.5 * numbers["bytes_in_float32"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tied", [False, True])
def test_the_controller_conforms(tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    # What depends on the head, which is tied or not; the rest once.
    checks = ["greedy", "log_probs", "weights_in_flight", "incomplete_weights"]
    if tied:
        checks += ["stops", "streams", "cancel", "pause", "prompts", "places", "shared_prompts"]
    words = ["tensor_parallel", "options.tp=2", *(["--tied"] if tied else []), "--only", *checks]
    assert conformance(words) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_controller_conforms_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tensor_parallel", "--only", *(name for name in CHECKS if name not in ("frequencies", "seeds"))]
    assert conformance(words) == 0, capsys.readouterr().out
