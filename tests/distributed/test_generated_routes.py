"""Generators say which experts the tokens of a mixture went to, in batches, in parts of prompts and after new weights."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator, generator_class
from drivetrain.generation.routes import RequestRoutes
from drivetrain.generation.vllm.model import VLLMModel

PROMPTS = [[5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11], [3] * 40, [5, 6, 7, 8]]
OPTIONS = SamplingOptions(max_tokens=9, samples=3, seed=1)
TIGHT = {"target_tokens_per_batch": 16, "max_batch_size": 3, "max_batch_total_tokens": 256}


def build(folder: Path, generator: str, **settings: Any) -> BaseGenerator:
    config: dict[str, Any] = {"max_batch_total_tokens": 2048, "return_routed_experts": True, **settings}
    return build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator=generator, **config))


class Plain:
    """The routes of plain transformers."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._found: list[Tensor] = []
        for module in self.model.modules():
            if "router" in type(module).__name__.lower():
                module.register_forward_hook(lambda module, args, output: self._found.append(output[2]))

    def routes(self, tokens: list[int]) -> Tensor:
        self._found.clear()
        with torch.no_grad():
            self.model(torch.tensor([tokens]), use_cache=False)
        return torch.stack(self._found, 1)


def check(plain: Plain, tokens: list[int], routes: Tensor | None, known: int | None = None) -> None:
    """Compare, token by token, the sets of experts; whatever is not known is -1."""
    assert routes is not None
    known = len(tokens) - 1 if known is None else known
    expected = plain.routes(tokens)
    assert routes.shape == expected.shape
    assert routes.dtype == torch.int16
    assert torch.equal(routes[:known].long().sort(-1).values, expected[:known].sort(-1).values)
    assert (routes[known:] == -1).all()


@pytest.mark.parametrize(
    ("family", "generator", "settings"),
    [
        pytest.param("qwen3_moe", "static", {}),
        pytest.param("qwen3_moe", "continuous", TIGHT),
        pytest.param("qwen3_moe", "static", {"max_batch_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "continuous", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "static", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "static", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "continuous", TIGHT, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "continuous", {}, marks=pytest.mark.slow),
    ],
)
def test_routes_are_those_of_plain_transformers(tmp_path: Path, family: str, generator: str, settings: dict[str, Any]) -> None:
    folder = save_tiny_model(tmp_path, family)
    plain, made = Plain(folder), build(folder, generator, **settings)
    for prompt, answers in zip(PROMPTS, made.generate(PROMPTS, OPTIONS), strict=True):
        for answer in answers:
            check(plain, prompt + answer.response, answer.routed_experts)
    model = weakref.ref(made._lm.model)  # type: ignore[attr-defined]
    made.close()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("generator", ["static", "continuous"])
def test_tokens_keep_the_routes_of_the_weights_that_drew_their_successors(tmp_path: Path, generator: str) -> None:
    folder, other = save_tiny_model(tmp_path / "a", "qwen3_moe"), save_tiny_model(tmp_path / "b", "qwen3_moe", seed=1)
    before, made = Plain(folder), build(folder, generator)
    stream = made.submit(PROMPTS[0], replace(OPTIONS, max_tokens=12, ignore_eos=True, samples=1))
    cancelled = made.submit(PROMPTS[2], OPTIONS)
    for _ in range(4):
        made.step()
    count = len(stream.tokens)
    assert 0 < count < 12
    made.cancel(cancelled.id)
    check(before, PROMPTS[2] + cancelled.tokens, cancelled.result().routed_experts)
    after = Plain(other)
    made.load_weights(load_file(other / "model.safetensors").items())
    list(stream)
    tokens, routes = PROMPTS[0] + stream.tokens, stream.result().routed_experts
    assert routes is not None
    first = len(PROMPTS[0]) + count - 1
    assert torch.equal(routes[:first].long().sort(-1).values, before.routes(tokens)[:first].sort(-1).values)
    assert torch.equal(routes[first:-1].long().sort(-1).values, after.routes(tokens)[first:-1].sort(-1).values)
    made.close()


def test_dense_models_and_other_generators_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=r"qwen3\) has no experts"):
        build(folder, "static")
    config = RolloutConfig(model=ModelConfig(path=str(folder)), generator="tensor_parallel", return_routed_experts=True)
    with pytest.raises(ConfigError, match="does not report expert routing"):
        generator_class("tensor_parallel").check(config, 1)


def test_unknown_routes_are_free() -> None:
    routes = RequestRoutes()
    assert routes.of(3) is None
    routes.add(1, torch.ones(9, 1, 2, dtype=torch.int16)[3:5])
    routes.add(2, torch.full((2, 1, 2), 3, dtype=torch.int16))
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in routes._parts), "a step's tensor is kept"
    found = routes.of(5)
    assert found is not None
    assert found[:, 0, 0].tolist() == [-1, 1, 1, 3, -1]


def test_routes_of_vllm_are_those_of_layers_with_experts(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "deepseek_v3")
    model = object.__new__(VLLMModel)
    model._text, model._config = AutoConfig.from_pretrained(folder), RolloutConfig(model=ModelConfig(path=str(folder)))
    # The first of its two layers is dense.
    routes = torch.arange(3 * 2 * 2).view(3, 2, 2)
    assert torch.equal(model.routes_of(routes.numpy()), routes[:, 1:].short())
    assert torch.equal(model.routes_of(routes[:, :1]), routes[:, :1].short())
    with pytest.raises(ModelError, match=r"the experts of 3 layers, but .* has 2 layers, 1 of them with experts"):
        model.routes_of(routes.view(3, 2, 2).repeat(1, 2, 1)[:, :3])
