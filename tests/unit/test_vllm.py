"""What the generator on vLLM decides, without vLLM: how tokens are drawn in its batch, and which weights it takes."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.generation.options import SamplingOptions
from drivetrain.generation.sampling import Draw, UniformNumbers, sample_tokens
from drivetrain.generation.vllm.draws import KEY, RequestDraws
from drivetrain.generation.vllm.model import CompletedWeights
from drivetrain.generation.weight_values import all_finite, common_dtype

V = 50


@dataclass
class Request:
    """A request as vLLM has it: its prompt, to which the tokens of an interrupted response belong, and what was drawn since."""

    seed: int
    prompt: int
    begun: int = 0
    options: SamplingOptions = SamplingOptions(temperature=1.3, top_p=0.9, top_k=20)
    output: list[int] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        o = self.options
        settings = {"temperature": o.temperature, "top_p": o.top_p, "top_k": o.top_k, "seed": self.seed}
        return {KEY: {**settings, "begun": self.begun, "prompt": self.prompt}}

    def expected(self, logits: Tensor) -> tuple[int, float]:
        uniform = UniformNumbers(self.seed)[self.begun + len(self.output)] if self.options.temperature else 0.0
        tokens, log_probs = sample_tokens(logits[None], [Draw(self.options, uniform)])
        return tokens[0], log_probs[0]


@pytest.mark.parametrize("by_length", [False, True])
def test_tokens_in_the_batch_of_vllm_are_those_of_all_generators(by_length: bool) -> None:
    """Whether the runner hands over the tokens of a request or its length, and in whatever order its batch is."""
    generator = torch.Generator().manual_seed(0)
    draws = RequestDraws()
    greedy = SamplingOptions(temperature=0.0)
    # One that continues an interrupted response; the middle slot has a request of somebody else.
    running = {0: Request(3, 7), 2: Request(4, 9, begun=5), 3: Request(5, 2, options=greedy)}
    for slot, request in running.items():
        assert draws.begin(slot, request.arguments, request.output)
    assert not draws.begin(1, {"other": 1})
    assert not draws.begin(1, None)
    for step in range(70):
        if step == 4:
            # The slot is used again, and must not go on with the numbers of the request before.
            draws.end([0])
            running[0] = Request(6, 4)
            assert draws.begin(0, running[0].arguments, running[0].output)
        order = [2, 0, 3, 1] if by_length and step % 2 else [0, 1, 2, 3]
        logits = torch.randn(4, V, generator=generator) * 3
        before = logits.clone()
        lengths = [running[s].prompt + len(running[s].output) if s in running else 1 for s in order]
        after = draws.choose(logits, order, [*lengths, 0, 0] if by_length else None)
        for row, slot in enumerate(order):
            if slot == 1:
                assert torch.equal(after[row], before[row])
                continue
            token, log_prob = running[slot].expected(before[row])
            assert int(after[row].argmax()) == token
            assert float(after[row, token]) == pytest.approx(log_prob, abs=1e-6)
            assert int((after[row] > -torch.inf).sum()) == 1
            running[slot].output.append(token)


def test_the_rows_of_vllm_at_the_edges() -> None:
    draws, logits = RequestDraws(), torch.randn(2, V, generator=torch.Generator().manual_seed(1))
    assert draws.choose(logits, [0, 1]) is logits
    first, second = Request(1, 100), Request(2, 100)
    draws.begin(0, first.arguments, first.output)
    draws.begin(1, second.arguments, second.output)
    # Half of a prompt: a token is asked for, and dropped.
    assert int((draws.choose(logits.clone(), [0, 1], [50, 100]) > -torch.inf).sum()) == 2
    # The first runner moves and swaps its rows; fewer of them may be computed than there are.
    draws.move(0, 1, swap=True)
    assert int(draws.choose(logits.clone(), [0])[0].argmax()) == second.expected(logits[0])[0]
    draws.move(1, 0, swap=False)
    moved = draws.choose(logits.clone(), [0, 1])
    assert int(moved[0].argmax()) == first.expected(logits[0])[0]
    assert torch.equal(moved[1], logits[1])
    # NaN must be seen by whoever reads the log-probability.
    broken = draws.choose(torch.full((1, V), torch.nan), [0])
    assert not bool(torch.isfinite(broken).any())
    draws.end([0, 1, 7])
    assert draws.choose(logits, [0, 1]) is logits
    assert draws.choose(torch.empty(0, V), []).shape == (0, V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_found(dtype: torch.dtype) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert all_finite(values)
    assert all_finite(torch.full((2,), torch.finfo(dtype).max, dtype=dtype))
    assert all_finite(values[:0])
    assert all_finite(torch.arange(3))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 1234, -1):
            damaged = values.clone().view(-1)
            damaged[place] = wrong
            assert not all_finite(damaged.view(3, 1000))
    assert not all_finite(torch.tensor(torch.nan, dtype=dtype))
    # Weights are sent as this only if all have it.
    assert common_dtype([values, values]) == str(dtype).removeprefix("torch.")
    assert common_dtype([values, values.double()]) == common_dtype([]) == ""


def test_a_stream_that_fails_is_completed_for_vllm() -> None:
    """Whose engine could not continue after a part of a set, and would have to be built anew on all ranks."""
    weights = {name: torch.ones(2) for name in "abc"}
    missing = {**dict.fromkeys("abc", (2,)), "head": (5, 2)}

    def stream(fails_after: int) -> Any:
        for number, (name, tensor) in enumerate(weights.items()):
            if number == fails_after:
                raise ConnectionError("it ended")
            del missing[name]
            yield name, tensor

    completed = CompletedWeights(stream(1), missing, "head")
    loaded = dict(completed)
    assert list(loaded) == ["a", "b", "c"]
    assert [bool(tensor.any()) for tensor in loaded.values()] == [True, False, False]
    assert isinstance(completed.error, ConnectionError)
    missing = {**dict.fromkeys("abc", (2,)), "head": (5, 2)}
    whole = CompletedWeights(stream(3), missing)
    assert list(dict(whole)) == ["a", "b", "c"]
    assert whole.error is None
