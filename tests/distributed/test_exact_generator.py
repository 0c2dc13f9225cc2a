"""Generation by the actor's own forward pass, and how near the other generators come to the actor's numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.ops import kernels
from drivetrain.engine.packing.convert import from_lists
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from helpers.engines import build

pytestmark = pytest.mark.usefixtures("process_group")
PROMPTS = [[random.randrange(250) for _ in range(length)] for length, random in ((n, Random(n)) for n in (1, 20, 60, 95))]


@contextmanager
def built(folder: Path, generator: str, **settings: Any) -> Iterator[BaseGenerator]:
    config = RolloutConfig(model=ModelConfig(path=str(folder)), generator=generator, max_batch_total_tokens=2048, **settings)
    made = build_generator(config)
    try:
        yield made
    finally:
        made.close()


def gaps(folder: Path, generator: BaseGenerator, temperature: float = 1.0) -> tuple[int, float]:
    """How many responses have other log-probabilities than the actor's of the whole documents, and by how much at most, relative to them."""
    options = SamplingOptions(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    responses = [answers[0] for answers in generator.generate(PROMPTS, options)]
    others = [[1] * 7, [2] * 130]
    batch = from_lists([*others[:1], *(p + r.response for p, r in zip(PROMPTS, responses, strict=True)), *others[1:]])
    engine = build(folder, optim=None, invariant=True)
    try:
        request = OutputRequest(log_probs=True, temperature=temperature or 1.0)
        computed = engine.infer_batch(batch, request)["log_probs"].split(batch.lengths)[1:-1]
    finally:
        engine.close()
    differing, largest = 0, 0.0
    for prompt, response, log_probs in zip(PROMPTS, responses, computed, strict=True):
        of_actor = log_probs[len(prompt) - 1 : -1]
        of_sampler = torch.tensor(response.log_probs)
        differing += not torch.equal(of_actor, of_sampler)
        largest = max(largest, float(((of_actor - of_sampler).abs() / of_actor.abs().clamp(min=1)).max()))
    return differing, largest


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("llama", 0.7),
        pytest.param("qwen3_moe", 1.0, marks=pytest.mark.slow),
        *(pytest.param(family, 1.0, marks=pytest.mark.slow) for family in ("gemma2", "gpt_oss", "qwen3", "gemma3_text")),
        pytest.param("llama", 0.0, marks=pytest.mark.slow),
    ],
)
def test_log_probabilities_are_the_actor_s_to_the_bit(tmp_path: Path, family: str, temperature: float) -> None:
    folder = save_tiny_model(tmp_path, family)
    with built(folder, "exact") as generator:
        assert gaps(folder, generator, temperature) == (0, 0.0)


@pytest.mark.slow
def test_with_two_threads(tmp_path: Path) -> None:
    folder, before = save_tiny_model(tmp_path, "llama"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with built(folder, "exact") as generator:
            assert gaps(folder, generator) == (0, 0.0)
    finally:
        torch.set_num_threads(before)


def test_attention_over_whole_documents_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_length(q: Any, k: Any, v: Any, scale: float, window: Any, softcap: Any, sinks: Any) -> Any:
        return kernels._explicit(q, k, v, scale, window, softcap, sinks, None)

    monkeypatch.setattr(kernels, "_by_position", by_length)
    folder = save_tiny_model(tmp_path, "llama")
    with built(folder, "exact") as generator:
        assert gaps(folder, generator)[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "generator"),
    [
        *(
            (family, name)
            for family in ("llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
            for name in ("static", "continuous")
        ),
    ],
)
def test_the_actor_s_log_probabilities_are_the_sampler_s(tmp_path: Path, family: str, generator: str) -> None:
    folder = save_tiny_model(tmp_path, family)
    with built(folder, generator, invariant=True) as made:
        _, largest = gaps(folder, made)
        assert largest <= 1e-6


@pytest.mark.slow
def test_new_weights_are_used(tmp_path: Path) -> None:
    first, second = (save_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1))
    engine = build(second, optim=None, invariant=True)
    with built(first, "exact") as generator:
        with engine.named_weights() as weights:
            generator.load_weights(weights, version=1)
        engine.close()
        assert gaps(second, generator) == (0, 0.0)


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be computed exactly on this processor .* recurrent layers"):
        build_generator(
            RolloutConfig(model=ModelConfig(path=str(save_tiny_model(tmp_path / "a", "qwen3_next"))), generator="exact")
        )
    with built(save_tiny_model(tmp_path / "b", "llama"), "exact") as generator:
        most = generator.limits().tokens
        with pytest.raises(ConfigError, match=rf"generator=exact takes up to {most} with this model on this processor"):
            generator.submit([1], SamplingOptions(max_tokens=most))
