"""The experts of a layer by permutations and grouped products, against transformers' loop over experts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain.engine.hf.experts import IMPLEMENTATION, expert_modules
from drivetrain.engine.tiny_configs import tiny_model_config


def outputs_and_gradients(module: Any, implementation: str, tokens: int) -> list[Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(tokens, 64, requires_grad=True)
    weights = torch.rand(tokens, 2, requires_grad=True)
    chosen = torch.rand(tokens, 4).argsort(-1)[:, :2]
    module.config._experts_implementation = implementation
    module.zero_grad()
    output = module(hidden, chosen, weights)
    (output * torch.randn(output.shape)).sum().backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in (hidden, weights, *module.parameters())]
    return [output.detach(), *gradients]


# With one token, two experts have no rows; with none, all have none.
@pytest.mark.parametrize("tokens", [1, 17, 0])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_equal_a_loop_over_experts(family: str, tokens: int) -> None:
    torch.manual_seed(0)
    (_, module), *_ = expert_modules(AutoModelForCausalLM.from_config(tiny_model_config(family), dtype=torch.float32))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if tokens:
        expected = outputs_and_gradients(module, "eager", tokens)
        for one, other in zip(outputs_and_gradients(module, IMPLEMENTATION, tokens), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            assert other.abs().max() > 0
    else:
        assert outputs_and_gradients(module, IMPLEMENTATION, 0)[0].shape == (0, 64)
