"""Where a generator's parameters and cache are, what vLLM is told to bring them elsewhere, and what only CUDA needs."""

import itertools
from typing import Any

import pytest
import torch

from drivetrain.engine import torch_private
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.parallel import process_groups
from drivetrain.generation.placement import GeneratorPlacement
from drivetrain.generation.sampling import cumulative_by_products
from drivetrain.generation.vllm.model import sleep_calls

AWAKE, LOADING = GeneratorPlacement(), GeneratorPlacement("device", "absent")
HOST, ABSENT = GeneratorPlacement("host", "absent"), GeneratorPlacement("absent", "absent")


@pytest.mark.parametrize(
    ("start", "place", "part", "end"),
    [
        (AWAKE, "host", None, HOST),
        (AWAKE, "absent", None, ABSENT),
        (AWAKE, "absent", "cache", LOADING),
        (AWAKE, "host", "parameters", HOST),
        (HOST, "device", None, AWAKE),
        (HOST, "device", "parameters", LOADING),
        (HOST, "absent", None, ABSENT),
        (LOADING, "device", "cache", AWAKE),
        (LOADING, "device", "parameters", LOADING),
        (AWAKE, "device", "parameters", AWAKE),
        (ABSENT, "device", "parameters", LOADING),
    ],
)
def test_moves(start: GeneratorPlacement, place: str, part: str | None, end: GeneratorPlacement) -> None:
    assert start.moved(place, part) == end


@pytest.mark.parametrize(
    ("start", "place", "part", "message"),
    [
        (AWAKE, "disk", None, r"to\('disk'\): a rollout model can be on 'device' or 'host', or 'absent'"),
        (AWAKE, "host", "optimizer", "the parts of a rollout model are 'parameters' and 'cache'"),
        (AWAKE, "host", "cache", "a cache is not kept on the host; use 'absent'"),
        (HOST, "device", "cache", "while the parameters are on the host"),
        (ABSENT, "device", "cache", "while the parameters are absent"),
        (ABSENT, "host", None, "while the parameters are absent; load them on the device first"),
    ],
)
def test_moves_that_are_refused(start: GeneratorPlacement, place: str, part: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start.moved(place, part)


class SleepingEngine:
    """vLLM's rules of sleep, as its executor and its core have them in 0.32."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.weights_kept = True
        self.paused = False

    def sleep(self, level: int) -> None:
        self.paused = True
        if level:
            # With the weights asleep it only logs a warning; a cache that is asleep is left as it is.
            assert "weights" not in self.asleep
            self.asleep, self.weights_kept = {"weights", "kv_cache"}, level == 1

    def wake_up(self, tags: list[str] | None = None) -> None:
        assert self.asleep
        assert set(tags or self.asleep) <= self.asleep
        self.asleep -= set(tags or self.asleep)
        self.paused = bool(self.asleep)

    def release_kv_cache_memory(self) -> None:
        assert self.paused
        assert not self.asleep
        self.asleep = {"kv_cache"}


@pytest.mark.parametrize(
    ("present", "target"),
    [moves for moves in itertools.product((AWAKE, LOADING, HOST, ABSENT), repeat=2) if moves != (ABSENT, HOST)],
)
def test_vllm_sleeps_and_wakes_by_its_rules(present: GeneratorPlacement, target: GeneratorPlacement) -> None:
    engine: Any = SleepingEngine()
    for method, arguments in sleep_calls(AWAKE, present):
        getattr(engine, method)(**arguments)
    for method, arguments in sleep_calls(present, target):
        getattr(engine, method)(**arguments)
        # No cache comes to the device on the way to somewhere else.
        if present.cache == target.cache == "absent":
            assert "kv_cache" in engine.asleep
    asleep = {"weights"} if target.parameters != "device" else set()
    assert engine.asleep == asleep | ({"kv_cache"} if target.cache == "absent" else set())
    assert engine.paused == (target != AWAKE)
    if target.parameters == "host":
        assert engine.weights_kept


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_is_configured_unless_the_user_has(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch_private, "set_expandable_segments", calls.append)
    monkeypatch.setattr(process_groups, "_expandable", False)
    with process_groups.fixed_segments():
        assert calls == []
    for name in process_groups.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "garbage_collection_threshold:0.8")
    process_groups.configure_allocator()
    with pytest.raises(KeyError), process_groups.fixed_segments():
        raise KeyError
    assert calls == ([True, False, True] if variable is None else [])


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000, 151_936])
def test_cumulative_sums_by_products(size: int) -> None:
    # torch has no deterministic kernel of cumsum on CUDA, and refuses it in deterministic mode.
    values = torch.rand(3, size, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(cumulative_by_products(values), values.cumsum(-1), rtol=1e-12, atol=1e-14)
