"""The generator on vLLM, in the environment of `make setup-vllm`; without vLLM only what needs none."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.engine.config import LoraConfig, ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError, WorkerLostError
from drivetrain.engine.hf.adapter_weights import AdapterWeights
from drivetrain.generation.conformance.case import Case
from drivetrain.generation.conformance.checks import CHECKS
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.generation.result import Generation
from drivetrain.generation.token_scheduler import GenerationRequest
from drivetrain.generation.vllm.generator import VLLMGenerator
from drivetrain.generation.vllm.model import SAMPLER, check_version
from drivetrain.workers.roles.generator import RolloutWorker
from drivetrain.workers.supervision.supervisor import SupervisorSettings, start_model_worker
from helpers.adapter_samples import check_generator, saved_adapters
from helpers.search_path import python_path

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"max_batch_total_tokens": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vllm")
    save_tiny_model(root / "other", "qwen3", seed=1, head_dim=32)
    return save_tiny_model(root / "model", "qwen3", head_dim=32)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is installed; .*pip install 'vllm>=0.32,<0.33'"):
        check_version(version)
    check_version("0.32.0+cpu")


@pytest.mark.parametrize(
    ("tp", "processes", "message"),
    [(0, 1, "options.tp=0; it must be"), ("2", 1, "options.tp='2'; it must be"), (3, 2, "options.tp=3 .* in 2 processes")],
)
def test_models_fit_their_processes(tp: Any, processes: int, message: str) -> None:
    config = RolloutConfig(model=ModelConfig(path="unused"), generator="vllm", options={"tp": tp})
    with pytest.raises(ConfigError, match=message):
        VLLMGenerator.check(config, processes)
    VLLMGenerator.check(replace(config, options={"tp": 2}), 4)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_extra_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"generator=vllm needs vllm, which is not installed: pip install -e '\.\[vllm\]'"):
        build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator="vllm"))


@needs_vllm
def test_both_runners_of_vllm_load_the_sampler_and_draw_alike() -> None:
    """By vLLM's own loaders. A CPU only runs the first runner, so what the second one does each step is repeated here."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.sample.logits_processor.state import BatchUpdateBuilder
    from vllm.v1.worker.gpu.sample.logits_processor import (
        LogitsContext,
        build_custom_logits_processors,
        build_custom_logits_processors_params_validator,
    )

    none: Any = None
    engine: Any = SimpleNamespace(speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=4))
    names = ("device", "max_num_reqs", "vocab_size", "all_token_ids", "prompt_len", "prefill_len", "total_len")
    states: Any = SimpleNamespace(**dict.fromkeys(names))
    validate = build_custom_logits_processors_params_validator([SAMPLER])
    settings = {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "seed": 3, "begun": 2, "prompt": 7}
    params = SamplingParams(temperature=0.0, extra_args={"drivetrain": settings})
    validate(params)
    with pytest.raises(Exception, match="must have temperature 0"):
        validate(SamplingParams(temperature=1.0, extra_args={"drivetrain": settings}))
    (new,) = build_custom_logits_processors(engine, states, False, [SAMPLER])
    with pytest.raises(ValueError, match="speculative_config is set"):
        build_custom_logits_processors(SimpleNamespace(speculative_config=1), states, False, [SAMPLER])  # type: ignore[arg-type]
    old = list(build_logitsprocs(engine, torch.device("cpu"), False, False, [SAMPLER]).all)[-1]
    assert type(new) is type(old)

    output: list[int] = []
    update = BatchUpdateBuilder()
    update.added.append((0, params, None, output))
    old.update_state(update.get_and_reset(1))
    # Slot 2 had another request before, and slot 1 is not one of ours.
    assert new.add_request(2, SamplingParams(temperature=0.0, extra_args={"drivetrain": {**settings, "seed": 9}}))
    assert new.add_request(2, params)
    assert not new.add_request(1, SamplingParams(temperature=0.0))
    generator = torch.Generator().manual_seed(0)
    for step in range(70):
        logits = torch.randn(1, 50, generator=generator)
        other = torch.randn(1, 50, generator=generator)
        slots = np.array([1, 2] if step % 2 else [2, 1])
        context = LogitsContext(
            expanded_idx_mapping=torch.from_numpy(slots),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            expanded_local_pos=none,
            input_ids=none,
            pos=none,
            # Of the rows, and of those that only pad the batch.
            seq_lens_upper_bound_np=np.array([7 + step if slot == 2 else 30 for slot in slots] + [0, 0], dtype=np.int32),
        )
        rows = torch.cat([logits if slot == 2 else other for slot in slots])
        first, second = old.apply(logits.clone()), new.apply(rows, context)
        assert torch.equal(second[list(slots).index(2)], first[0])
        assert torch.equal(second[list(slots).index(1)], other[0])
        output.append(int(first.argmax()))
    assert len(set(output)) > 10


@needs_vllm
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("check", CHECKS)
def test_it_does_what_the_interface_says(tmp_path: Path, check: str, tied: bool) -> None:
    CHECKS[check](Case(tmp_path, {"generator": "vllm", **SETTINGS}, "llama" if tied else "qwen3", tie_word_embeddings=tied))


@needs_vllm
@pytest.mark.parametrize("check", CHECKS)
def test_its_server_does_what_the_interface_says(tmp_path: Path, check: str) -> None:
    CHECKS[check](Case(tmp_path, {"generator": "vllm_server", **SETTINGS}, "llama", tie_word_embeddings=True))


# What depends on the layers of a family.
FAMILY_CHECKS = [
    "greedy",
    "log_probs",
    "stops",
    "streams",
    "cancel",
    "pause",
    "weights_in_flight",
    "incomplete_weights",
    "prompts",
]


@needs_vllm
@pytest.mark.parametrize("check", FAMILY_CHECKS)
def test_mixtures_do_what_the_interface_says(tmp_path: Path, check: str) -> None:
    """On a CPU vLLM keeps experts in a layout of their own, into which new ones have to be brought."""
    # Its kernel pads other sizes, and cannot take new weights then.
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64}
    CHECKS[check](Case(tmp_path, {"generator": "vllm", **SETTINGS}, "qwen3_moe", **sizes))


@needs_vllm
@pytest.mark.parametrize("check", FAMILY_CHECKS)
def test_layers_with_state_do_what_the_interface_says(tmp_path: Path, check: str) -> None:
    """In bfloat16, the only format of vLLM's kernels for a CPU, with heads of the sizes that they take."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    sizes |= {"intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    # Each token goes to all experts: rounding would send some elsewhere than the reference does.
    sizes |= {"num_experts_per_tok": 4}
    CHECKS[check](Case(tmp_path, {"generator": "vllm", "dtype": "bfloat16", **SETTINGS}, "qwen3_next", **sizes))


@needs_vllm
@pytest.mark.parametrize("check", ["greedy", "weights_in_flight"])
@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
def test_over_processes_of_vllm(tmp_path: Path, name: str, check: str) -> None:
    settings = {"generator": name, "options": {"tp": 2}, **SETTINGS}
    CHECKS[check](Case(tmp_path, settings, "llama", tie_word_embeddings=True))


@needs_vllm
def test_a_server_that_dies_comes_back_with_the_last_weights(folder: Path) -> None:
    prompt, options = [5, 6, 7], SamplingOptions(max_tokens=200, temperature=0.0, ignore_eos=True)
    config = RolloutConfig(model=ModelConfig(path=str(folder)), generator="vllm_server", **SETTINGS)
    plain = build_generator(RolloutConfig(model=ModelConfig(path=str(folder.parent / "other")), **SETTINGS))
    ((expected,),) = plain.generate([prompt], options)
    generator: Any = build_generator(config)
    try:
        generator.load_weights(load_file(folder.parent / "other" / "model.safetensors").items())
        stream = generator.submit(prompt, options)
        next(stream)
        first = generator.server.pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="vLLM's server ended with code -9; last output"):
            list(stream)
        ((answer,),) = generator.generate([prompt], options)
        assert answer.response == expected.response
        assert generator.server.pid != first
        # Between two steps: what was running fails, and what comes then does not.
        running = generator.submit(prompt, options)
        next(running)
        os.kill(generator.server.pid, signal.SIGKILL)
        generator._server.wait(10)
        fresh = generator.submit(prompt, options)
        with pytest.raises(WorkerLostError, match="ended with code -9"):
            list(running)
        assert [token.token for token in fresh] == expected.response
    finally:
        generator.close()


@needs_vllm
@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
def test_adapters_come_alone(folder: Path, name: str) -> None:
    options = SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True)
    model = ModelConfig(path=str(folder), lora=LoraConfig(rank=2))
    shapes = AdapterWeights(model, torch.float32, torch.device("cpu")).shapes
    random = torch.Generator().manual_seed(0)
    adapters = [(factor, torch.randn(shape, generator=random) / 4) for factor, shape in shapes.items()]
    made: list[list[Generation]] = []
    for kind in ("static", name):
        generator = build_generator(RolloutConfig(model=model, generator=kind, **SETTINGS))
        try:
            ((before,),) = generator.generate([[5, 6, 7]], options)
            generator.load_adapters(iter(adapters), version=3)
            ((after,),) = generator.generate([[5, 6, 7]], options)
            made.append([before, after])
        finally:
            generator.close()
    for plain, other in zip(*made, strict=True):
        assert plain.response == other.response
        assert plain.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert plain.versions == other.versions
    assert made[0][0].response != made[0][1].response


@needs_vllm
def test_adapters_side_by_side(folder: Path, tmp_path: Path, process_group: None) -> None:
    """Also one that is dropped and one that is replaced while responses are under way, which keep what they began with."""
    with saved_adapters(folder, tmp_path) as saved:
        check_generator(saved, "vllm", tolerance=1e-4, **SETTINGS)
        _, folders, _ = saved
        config = RolloutConfig(
            model=ModelConfig(path=str(folder)), generator="vllm", max_adapters=1, options={"max_lora_rank": 8}, **SETTINGS
        )
        generator = build_generator(config)
        try:
            options = SamplingOptions(max_tokens=6, seed=1, ignore_eos=True, adapter="x")
            generator.load_adapter("x", folders["a"])
            expected = generator.generate([[4, 5]], options)[0][0]
            stream = generator.submit([4, 5], options)
            assert generator.load_adapter("x", folders["b"]) == 2
            other = generator.submit([4, 5], options)
            generator.drop_adapter("x")
            assert generator.adapter_names() == []
            while generator.step():
                pass
            assert stream.result().response == expected.response
            assert stream.result().versions == [1] * 6
            assert other.result().versions == [2] * 6
            assert other.result().log_probs != expected.log_probs
            assert generator.load_adapter("y", folders["a"]) == 1
        finally:
            generator.close()
        generator = build_generator(replace(config, options={"max_lora_rank": 1}))
        try:
            with pytest.raises(ConfigError, match=r"rank 4, more than options.max_lora_rank=1"):
                generator.load_adapter("x", folders["a"])
        finally:
            generator.close()


def _cut(complete: Any, stream: Any) -> Any:
    return ((name, tensor[:3] if name.endswith("q_proj.weight") else tensor) for name, tensor in complete(stream))


@needs_vllm
@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
def test_a_load_that_fails_inside_vllm_can_be_made_good(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, options = [5, 6, 7], SamplingOptions(max_tokens=12, temperature=0.0)
    plain = build_generator(RolloutConfig(model=ModelConfig(path=str(folder.parent / "other")), **SETTINGS))
    ((expected,),) = plain.generate([prompt], options)
    weights = load_file(folder.parent / "other" / "model.safetensors")
    generator: Any = build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator=name, **SETTINGS))
    try:
        # It is right until it has been checked.
        for way in ("checked", "completed"):
            monkeypatch.setattr(generator._model, way, partial(_cut, getattr(generator._model, way)))
        with pytest.raises((ModelError, RuntimeError, AssertionError)):
            generator.load_weights(weights.items())
        with pytest.raises(ModelError):
            generator.generate([prompt], options)
        monkeypatch.undo()
        generator.load_weights(weights.items())
        ((answer,),) = generator.generate([prompt], options)
        assert answer.response == expected.response
    finally:
        generator.close()
    with pytest.raises((ConfigError, AttributeError)):
        generator.generate([prompt], options)


@needs_vllm
def test_arguments_that_the_server_refuses_are_named(folder: Path) -> None:
    config = RolloutConfig(
        model=ModelConfig(path=str(folder)), generator="vllm_server", options={"no_such_setting": 1}, **SETTINGS
    )
    with pytest.raises(ConfigError, match=r"(?s)ended with code 2.*--no-such-setting"):
        build_generator(config)


@needs_vllm
def test_a_server_ends_with_the_process_that_started_it(folder: Path) -> None:
    program = f"""
import os, time
from drivetrain.engine.config import ModelConfig
from drivetrain.generation.options import RolloutConfig
from drivetrain.generation.registry import build_generator
if __name__ == "__main__":
    generator = build_generator(RolloutConfig(model=ModelConfig(path={str(folder)!r}), generator="vllm_server", max_batch_total_tokens=4096))
    print(generator.server.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _group_of(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _group_of(controller: int) -> list[str]:
    return subprocess.run(["pgrep", "-g", str(controller)], capture_output=True, text=True).stdout.split()


@needs_vllm
def test_all_generators_draw_alike(folder: Path) -> None:
    prompts = [[5, 6, 7], [9], [200, 100], [3] * 40]
    options = SamplingOptions(max_tokens=16, temperature=1.3, top_p=0.9, top_k=60, samples=3, seed=5)
    found = []
    for name in ("static", "continuous", "vllm", "vllm_server"):
        generator = build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator=name, **SETTINGS))
        found.append([[a.response for a in some] for some in generator.generate(prompts, options)])
        generator.close()
    assert found[0] == found[1] == found[2] == found[3]


@needs_vllm
def test_weights_in_flight_through_a_worker(folder: Path) -> None:
    """In a process of its own, with a request running and another one paused."""
    prompt = [(7 * i + 3) % 250 for i in range(65)]
    options = SamplingOptions(max_tokens=100, temperature=0.0, ignore_eos=True)
    config = RolloutConfig(model=ModelConfig(path=str(folder)), generator="vllm", **SETTINGS)

    async def test() -> None:
        async with start_model_worker(RolloutWorker, config, SupervisorSettings(start_s=300)) as queue:
            flying = queue.stream(GenerationRequest(prompt=prompt, options=options))
            read = [await anext(flying) for _ in range(3)]
            await queue.acall("pause")
            waiting = queue.stream(GenerationRequest(prompt=prompt, options=options))
            assert await queue.acall("load_folder", str(folder.parent / "other"), version=5) == 5
            await queue.acall("resume")
            read += await flying.read()
            fresh = await waiting.read()
            count = sum(token.version == 0 for token in read)
            assert 3 <= count < 100
            assert {token.version for token in read[count:]} == {5}
            old, new = (
                build_generator(RolloutConfig(model=ModelConfig(path=str(path)), **SETTINGS))
                for path in (folder, folder.parent / "other")
            )
            ((before,),) = old.generate([prompt], replace(options, max_tokens=count))
            ((after,),) = new.generate([prompt + before.response], replace(options, max_tokens=100 - count))
            assert [token.token for token in read] == before.response + after.response
            ((alone,),) = new.generate([prompt], options)
            assert [token.token for token in fresh] == alone.response

    asyncio.run(test())


def forget_shared_memory() -> None:
    # On a CPU ranks share memory whose name is the same in all runs of an external launcher, and which a killed run leaves behind; an
    # engine that is built anew has the next number.
    for left in Path("/dev/shm").glob("-tp:*-cpushm_*"):
        left.unlink()


@needs_vllm
def test_over_the_ranks_of_torchrun(folder: Path, tmp_path: Path) -> None:
    from helpers.vllm_ranks import OPTIONS, PROMPTS

    forget_shared_memory()
    other = folder.parent / "other"
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "helpers.vllm_ranks", str(folder), str(other)]
    ran = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    forget_shared_memory()
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    for path, answers in zip((folder, other), found[0], strict=True):
        plain = build_generator(RolloutConfig(model=ModelConfig(path=str(path)), **SETTINGS))
        assert answers == [[a.response for some in plain.generate(PROMPTS, options) for a in some] for options in OPTIONS]


@needs_vllm
@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.generator=vllm"],
        ["rollout.generator=vllm_server"],
        ["rollout.generator=vllm", "group.nproc=2"],
        ["rollout.generator=vllm", "group.pools={rollout: 2}"],
        ["rollout.generator=vllm", "group.pools={rollout: 2}", "rollout.options.tp=2"],
    ],
)
def test_a_policy_learns_from_its_answers(tmp_path: Path, settings: list[str]) -> None:
    from helpers.rl_runs import make_task, records, train

    forget_shared_memory()
    make_task(tmp_path)
    more = ["trainer.max_steps=2", "trainer.export_hf=false", "rollout.max_batch_total_tokens=4096", "group.kind=process"]
    train(tmp_path, tmp_path / "static", *more)
    train(tmp_path, tmp_path / "vllm", *more, *settings)
    for found, expected in zip(records(tmp_path / "vllm"), records(tmp_path / "static"), strict=True):
        for name in ("loss", "grad_norm", "reward", "length"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)
        assert found["log_prob_gap_max"] < 1e-5


@needs_vllm
def test_over_http(tmp_path: Path) -> None:
    from helpers.server import Server
    from helpers.texts import save_text_model

    model = save_text_model(tmp_path / "model", head_dim=32)
    expected = build_generator(RolloutConfig(model=ModelConfig(path=str(model)), **SETTINGS)).generate(
        [[5, 6, 7]], SamplingOptions(max_tokens=9, temperature=1.2, seed=3, samples=2)
    )
    with Server(model, "--engine", "vllm", "--max-batch-total-tokens", "4096") as server:
        answer: Any = server.client().completions.create(
            model="model",
            prompt=[5, 6, 7],
            max_tokens=9,
            temperature=1.2,
            seed=3,
            n=2,
            extra_body={"return_token_ids": True},
        )
        assert [choice.token_ids for choice in answer.choices] == [one.response for one in expected[0]]
