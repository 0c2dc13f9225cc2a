"""A response is the same to the bit in any company: `RolloutConfig.invariant`."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.ops.invariance import PassSizes
from drivetrain.generation import continuous
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from helpers.harness import run_ranks

FAMILIES = ["llama", "gemma3_text", "qwen3_moe"]
Response = tuple[list[int], list[float]]


def build(folder: Path | str, generator: str = "continuous", **settings: Any) -> BaseGenerator:
    sizes = {"max_batch_total_tokens": 2048, "max_batch_size": 24, "invariant": True}
    return build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), generator=generator, **{**sizes, **settings}))


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(250) for _ in range(count)]


PROMPTS = [tokens(Random(length), length) for length in (1, 31, 33, 90)]


def responses(generator: BaseGenerator, random: Random, company: int) -> list[Response]:
    """The responses to `PROMPTS`, submitted at random times among others that come, end and are cancelled."""
    others = [("other", tokens(random, random.choice((1, 2, 17, 32, 64, 130)))) for _ in range(company)]
    arrivals = [*others, *((f"mine-{i}", prompt) for i, prompt in enumerate(PROMPTS))]
    random.shuffle(arrivals)
    mine: dict[str, Any] = {}
    ids: list[Any] = []
    while arrivals or generator.waiting or generator.running:
        for _ in range(min(random.choice((0, 1, 1, 3, 20)), len(arrivals))):
            name, prompt = arrivals.pop()
            options = SamplingOptions(max_tokens=40, temperature=1.0, ignore_eos=True, seed=5)
            if name == "other":
                options = SamplingOptions(
                    max_tokens=random.randint(1, 60), temperature=random.choice((0.0, 1.3)), seed=len(ids)
                )
                ids.append(generator.submit(prompt, options, row=len(ids)).id)
            else:
                mine[name] = generator.submit(prompt, options, row=0)
        if ids and random.random() < 0.1:
            generator.cancel(random.choice(ids))
        generator.step()
    return [(mine[f"mine-{i}"].tokens, mine[f"mine-{i}"].log_probs) for i in range(len(PROMPTS))]


def alone(generator: BaseGenerator) -> list[Response]:
    options = SamplingOptions(max_tokens=40, temperature=1.0, ignore_eos=True, seed=5)
    streams = []
    for prompt in PROMPTS:
        streams.append(generator.submit(prompt, options, row=0))
        while not streams[-1].ended:
            generator.step()
    return [(stream.tokens, stream.log_probs) for stream in streams]


def differences(generator: BaseGenerator, compositions: int) -> int:
    reference = alone(generator)
    assert all(len(taken) == 40 for taken, _ in reference)
    random = Random(0)
    return sum(responses(generator, random, random.choice((0, 1, 5, 20, 40))) != reference for _ in range(compositions))


@pytest.mark.parametrize(
    ("family", "generator", "compositions"),
    [
        *((family, "continuous", 3) for family in ("llama", "qwen3_moe")),
        ("llama", "static", 2),
        *(
            pytest.param(
                family,
                generator,
                100 if family in (*FAMILIES, "qwen3") else 20,
                marks=[pytest.mark.slow, pytest.mark.timeout(900)],
            )
            for family in (*FAMILIES, "qwen3", "gpt_oss", "gemma2", "qwen3_next")
            for generator in ("static", "continuous")
        ),
        *(
            pytest.param(family, "continuous", 5, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for family in ("falcon_h1", "jamba", "lfm2", "minimax", "qwen3_5_text")
        ),
    ],
)
def test_a_response_is_the_same_in_any_company(tmp_path: Path, family: str, generator: str, compositions: int) -> None:
    built = build(save_tiny_model(tmp_path, family), generator)
    assert differences(built, compositions) == 0
    built.close()


@pytest.mark.parametrize(
    "control",
    [
        "rows by the number of tokens",
        *(pytest.param(control, marks=pytest.mark.slow) for control in ("chunks by company", "without", "rows of experts")),
    ],
)
def test_the_comparison_sees(tmp_path: Path, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}
    if control == "without":
        settings = {"invariant": False}
    elif control == "rows by the number of tokens":
        monkeypatch.setattr(continuous, "pad_pass", lambda inputs, count, multiple: None)
    elif control == "rows of experts":
        monkeypatch.setattr(continuous, "use_invariant_experts", lambda model: None)
        # The trial would notice.
        monkeypatch.setattr(continuous, "invariant_pass_sizes", lambda model, path: PassSizes(16, 128))
    built = build(save_tiny_model(tmp_path, "qwen3_moe" if control == "rows of experts" else "llama"), **settings)
    if control == "chunks by company":
        whole: Any = continuous.prepare_step

        def cut_anywhere(*args: Any) -> Any:
            return whole(*args[:-1], None)

        monkeypatch.setattr(continuous, "prepare_step", cut_anywhere)
    assert differences(built, 2) > 0
    built.close()


def test_the_trial_refuses_what_depends_on_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor's library added in another order in every seventh row."""
    folder, linear = save_tiny_model(tmp_path, "llama"), torch.nn.functional.linear

    def by_row(x: Any, *args: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        odd = torch.arange(len(flat)).remainder(7)[:, None] * 1e-7
        return linear((flat * (1 + odd)).view_as(x), *args)

    monkeypatch.setattr(torch.nn.functional, "linear", by_row)
    with pytest.raises(
        ConfigError, match=r"invariant=true cannot hold for .* on this processor with \d+ threads.*OMP_NUM_THREADS=1"
    ):
        build(folder)


@pytest.mark.slow
def test_passes_are_no_larger_than_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor's library added in another order from 64 rows on."""
    folder, linear, largest = save_tiny_model(tmp_path, "llama"), torch.nn.functional.linear, 0

    def other_order(x: Any, *args: Any) -> Any:
        nonlocal largest
        rows = x[..., 0].numel()
        largest = max(largest, rows)
        return linear(x, *args) * (1 + 1e-6 * (rows // 64))

    monkeypatch.setattr(torch.nn.functional, "linear", other_order)
    built = build(folder)
    largest = 0
    assert differences(built, 2) == 0
    assert largest == 48
    built.close()


def rank_threads(folder: str) -> int:
    torch.set_num_threads(2)
    built = build(folder)
    found = differences(built, 1)
    built.close()
    return found


@pytest.mark.slow
def test_it_holds_with_two_threads(tmp_path: Path) -> None:
    assert run_ranks(rank_threads, 1, str(save_tiny_model(tmp_path, "llama")), timeout_s=240) == [0]


@pytest.mark.slow
def test_a_request_waits_until_the_cache_has_room_for_all_of_it(tmp_path: Path) -> None:
    built = build(save_tiny_model(tmp_path, "llama"), max_batch_total_tokens=256)
    options = SamplingOptions(max_tokens=80, ignore_eos=True, seed=1)
    streams = [built.submit(PROMPTS[1], options, row=row) for row in range(5)]
    running = set()
    while not all(stream.ended for stream in streams):
        built.step()
        running.add(len(built.running))
    assert max(running) == 2
    assert all(stream.error is None for stream in streams)
    built.close()


def test_a_conversation_goes_on_as_if_it_were_new(tmp_path: Path) -> None:
    """Pages of a response were computed token by token, as those of a prompt are not."""
    built = build(save_tiny_model(tmp_path, "llama"))
    options = SamplingOptions(max_tokens=70, ignore_eos=True, seed=5)
    ((first,),) = built.generate([PROMPTS[1]], options)
    prompt = PROMPTS[1] + first.response
    before = built.stats().prefill_tokens
    ((second,),) = built.generate([prompt], options)
    assert built.stats().prefill_tokens - before == len(prompt)
    built.drop_caches()
    ((anew,),) = built.generate([prompt], options)
    assert (second.response, second.log_probs) == (anew.response, anew.log_probs)
    built.close()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"generator": "tensor_parallel"}, "invariant=true with generator=tensor_parallel.*use continuous or static"),
    ],
)
def test_where_it_cannot_hold_it_is_refused(tmp_path: Path, family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(save_tiny_model(tmp_path, family), **settings)


def test_it_is_refused_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(save_tiny_model(tmp_path, "llama"))
    monkeypatch.setattr(built._lm, "device", torch.device("cuda", 0))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"invariant=true for .* on cuda:0: on this device the order of summation"):
        built._find_pass_sizes()  # type: ignore[attr-defined]
    built.close()


def test_the_page_can_be_typed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "invariance.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0].replace("MODEL", str(save_tiny_model(tmp_path, "llama"))), names)
    assert len(names["alone"].response) == 8 or names["alone"].finish_reason == "stop"
    names["generator"].close()
