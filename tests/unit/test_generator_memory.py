"""How large a generator's cache is, and what vLLM is told of its GPU, for GPUs that are not there."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError
from drivetrain.generation import memory
from drivetrain.generation.memory import (
    GIB,
    TOKENS_WITHOUT_GPU,
    GeneratorMemoryNeeds,
    GpuMemory,
    memory_needs,
    tokens_that_fit,
    utilization,
    with_cache_size,
)
from drivetrain.generation.options import RolloutConfig
from drivetrain.generation.vllm.model import gpu_arguments
from drivetrain.serve.openai.replicas import gpus_of_replicas
from drivetrain.trainers.config.rl import GroupConfig, GRPOConfig, RolloutSettings
from drivetrain.trainers.data.prompts import Prompt, PromptSet
from drivetrain.trainers.rl.prompts import Prompts, most_tokens
from drivetrain.trainers.rl.roles import rollout_config
from drivetrain.workers.roles.generator import RolloutWorker

# An 8B model in bfloat16 with 36 layers of 8 key/value heads of 128, for 256 responses of up to 40,960 tokens.
NEEDS = GeneratorMemoryNeeds(parameters=16 * GIB, per_token=147_456, workspace=5 * GIB, most_tokens=256 * 40_960)
ALONE = GpuMemory(free=79 * GIB, total=80 * GIB)
# Beside a trained 8B model on 8 GPUs: 12.3 GB of parameters and moments, and contexts.
SHARED = GpuMemory(free=64 * GIB, total=80 * GIB)
BARE = RolloutConfig(model=ModelConfig(path="unused"), generator="vllm")


@pytest.mark.parametrize("gpu", [ALONE, SHARED])
def test_a_cache_fills_what_is_free_and_vllm_finds_its_share(gpu: GpuMemory) -> None:
    tokens = tokens_that_fit(gpu, NEEDS, "it")
    used = NEEDS.parameters + NEEDS.workspace + tokens * NEEDS.per_token
    assert 0.85 * gpu.free < used <= gpu.free - GIB
    # vLLM starts only if this much is free, and claims nothing beyond it.
    share = utilization(gpu, NEEDS, tokens, "it")
    assert share * gpu.total == pytest.approx(min(used, gpu.free - GIB))
    assert utilization(gpu, NEEDS, 32768, "it") * gpu.total == pytest.approx(25.5 * GIB)


def test_a_cache_is_no_larger_than_it_can_be_used() -> None:
    assert tokens_that_fit(ALONE, replace(NEEDS, most_tokens=20_000), "it") == 20_000
    # The model's config does not say how long it may be.
    assert tokens_that_fit(ALONE, replace(NEEDS, most_tokens=0), "it") > 100_000
    assert tokens_that_fit(ALONE, replace(NEEDS, per_token=0), "it") == TOKENS_WITHOUT_GPU
    # A model of a few positions has no use for the least that is worth a start.
    assert tokens_that_fit(ALONE, replace(NEEDS, most_tokens=64), "it") == 64


@pytest.mark.parametrize("free", [0, 16, 21])
def test_what_does_not_fit_is_refused_with_its_sizes(free: int) -> None:
    gpu = GpuMemory(free=free * GIB, total=80 * GIB)
    with pytest.raises(
        ConfigError, match=rf"fewer than 1024 tokens fit: of 80\.0 GiB on the GPU {free}\.0 GiB are free, .*16\.0 GiB"
    ):
        tokens_that_fit(gpu, NEEDS, "it")
    with pytest.raises(ConfigError, match=r"max_batch_total_tokens=32768 needs 4\.5 GiB\. Lower it.*gpu_memory_utilization"):
        utilization(gpu, NEEDS, 32768, "it")


def test_versions_that_no_machine_can_hold_are_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "qwen3")
    config = RolloutConfig(model=ModelConfig(path=str(tmp_path)), max_batch_total_tokens=64, held_versions=4)
    room = 3 * memory_needs(replace(config, dtype="float32")).parameters
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes: float(room))
    memory.check_held_versions(replace(config, dtype="float32"))
    memory.check_held_versions(replace(config, dtype="float32", held_versions=1))
    room -= 1
    monkeypatch.setattr("drivetrain.workers.roles.generator.build_generator", lambda config: pytest.fail("it was loaded"))
    message = r"held_versions=4: 3 versions of the weights of .* need [\d.]+ GiB, and this machine has [\d.]+ GiB\. Lower it"
    with pytest.raises(ConfigError, match=message):
        RolloutWorker(replace(config, dtype="float32")).initialize()


def test_the_arguments_of_vllm_on_a_gpu() -> None:
    config = replace(BARE, max_batch_total_tokens=32768)
    alone = gpu_arguments(config, ALONE, NEEDS, tp=1, joined=False)
    assert alone == {
        "num_gpu_blocks_override": 2049,
        "block_size": 16,
        "enable_sleep_mode": True,
        "gpu_memory_utilization": pytest.approx(25.5 / 80),
    }
    # What the user sets stays, also where the estimate would refuse it.
    own = replace(config, options={"gpu_memory_utilization": 0.3})
    assert "gpu_memory_utilization" not in gpu_arguments(own, GpuMemory(free=0, total=GIB), NEEDS, tp=1, joined=False)
    for visible, joined, expected in ((1, True, True), (8, True, False), (8, False, False), (2, True, False)):
        arguments = gpu_arguments(config, replace(ALONE, visible=visible), NEEDS, tp=2, joined=joined)
        assert arguments.get("disable_custom_all_reduce", False) is expected


def test_sizes_are_chosen_before_a_generator_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2, num_key_value_heads=2, head_dim=16)
    config = RolloutConfig(model=ModelConfig(path=str(folder)), max_batch_total_tokens=0, max_batch_size=4)
    needs = memory_needs(config)
    assert needs.per_token == 2 * 2 * 2 * 16 * 4
    assert memory_needs(replace(config, options={"tp": 2})).per_token == needs.per_token // 2
    assert memory_needs(replace(config, options={"tp": 4})).per_token == needs.per_token // 2
    assert memory_needs(replace(config, dtype="bfloat16")).parameters == needs.parameters // 2
    # What is gathered from it.
    assert memory_needs(replace(config, generator="continuous")).per_token > needs.per_token
    assert with_cache_size(config).max_batch_total_tokens == TOKENS_WITHOUT_GPU
    seen: list[Any] = []

    def gpu(devices: range) -> GpuMemory:
        seen.append(devices)
        return ALONE

    monkeypatch.setattr(memory, "gpu_memory", gpu)
    assert with_cache_size(config).max_batch_total_tokens == needs.most_tokens
    assert with_cache_size(replace(config, max_batch_total_tokens=77)).max_batch_total_tokens == 77
    with_cache_size(replace(config, options={"tp": 2}))
    assert [list(devices) for devices in seen] == [[], [0, 1]]
    worker = RolloutWorker(config).initialize()
    assert worker.config.max_batch_total_tokens == worker.generator.config.max_batch_total_tokens == needs.most_tokens
    assert worker.state_bytes()["cache"] == needs.most_tokens * needs.per_token
    worker.close()
    (Path(config.model.path) / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"model\.path=.*config\.json"):
        memory_needs(config)


@pytest.mark.parametrize(
    ("group", "tokens", "expected"),
    [
        (GroupConfig(), None, TOKENS_WITHOUT_GPU),
        (GroupConfig(pools={"rollout": 2}), None, 0),
        (GroupConfig(pools={"critic": 2}), None, TOKENS_WITHOUT_GPU),
        (GroupConfig(offload="host"), None, 0),
        (GroupConfig(offload="host"), 500, 500),
    ],
)
def test_a_generator_fills_a_gpu_that_it_has_to_itself(group: GroupConfig, tokens: int | None, expected: int) -> None:
    config = GRPOConfig(group=group, rollout=RolloutSettings(max_batch_total_tokens=tokens))
    assert rollout_config(config).max_batch_total_tokens == expected
    # With what all answers of a call can need: no more than that, and never more than before.
    least = min(expected, 2048) if tokens is None else tokens
    assert rollout_config(config, 2048).max_batch_total_tokens == least
    assert rollout_config(config, 10**9).max_batch_total_tokens == expected


@pytest.mark.parametrize(
    ("settings", "held_out", "expected"),
    [
        # Whole pages of 256 tokens for each answer, with the token that begins the next page: 100 and 155 + 1, then 100 and 156 + 1.
        (["rollout.max_tokens=155"], None, 8 * 256),
        (["rollout.max_tokens=156"], None, 8 * 512),
        (["rollout.max_batch_size=3"], None, 3 * 512),
        # Evaluations answer all held-out prompts together, of which one is longer.
        (["rl.eval_samples=2"], [10] * 5, 10 * 512),
        ([], [400], 8 * 768),
    ],
)
def test_no_answer_of_a_step_waits_for_room(settings: list[str], held_out: list[int] | None, expected: int) -> None:
    def prompts(lengths: list[int]) -> Any:
        return PromptSet([[Prompt(name="", content="", ids=[3] * length) for length in lengths]], ["prompts"])

    config = GRPOConfig.parse("data.batch_size=2", "rl.group_size=4", "rollout.max_tokens=256", *settings)
    data = Prompts(train=prompts([1, 100, 7]), order=cast(Any, None), held_out=prompts(held_out) if held_out else None)
    assert most_tokens(config, data) == expected


@pytest.mark.parametrize(
    ("count", "replicas", "devices", "cache_is_given", "expected"),
    [
        (0, 3, 1, False, []),
        (4, 1, 2, False, []),
        (4, 2, 2, False, ["4,5", "6,7"]),
        (3, 2, 1, True, ["4", "5"]),
        (2, 3, 1, True, []),
        (2, 3, 1, False, "--replicas 3 with 1 GPUs each on a machine with 2: .*--max-batch-total-tokens"),
    ],
)
def test_replicas_get_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, count: int, replicas: int, devices: int, cache_is_given: bool, expected: list[str] | str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            gpus_of_replicas(replicas, devices, cache_is_given=cache_is_given)
    else:
        assert gpus_of_replicas(replicas, devices, cache_is_given=cache_is_given) == expected
