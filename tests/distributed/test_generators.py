"""Generators: what their interface promises, on every implementation; what happens when they fail."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.cli import main
from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError
from drivetrain.engine.tiny_configs import WITH_STATE
from drivetrain.generation.conformance.__main__ import main as conformance
from drivetrain.generation.conformance.__main__ import parse_settings
from drivetrain.generation.conformance.case import Case, GeneratorConformanceError
from drivetrain.generation.conformance.checks import CHECKS
from drivetrain.generation.generator import BaseGenerator
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.paged_attention import attend
from drivetrain.generation.registry import build_generator
from drivetrain.generation.scheduler import SchedulerSettings
from drivetrain.generation.states import RequestStates
from drivetrain.generation.token_scheduler import GenerationRequest, TokenGenerationScheduler
from drivetrain.generation.token_stream import TokenStream
from helpers.broken_generators import DEFECTS

GREEDY = SamplingOptions(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG = [(7 * i + 3) % 250 for i in range(65)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("generators") / "model", "qwen3")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("conformance"), {"max_batch_total_tokens": 4096})


@pytest.fixture(params=["static", "continuous"])
def generator(folder: Path, request: pytest.FixtureRequest) -> Iterator[BaseGenerator]:
    found = build(folder, generator=request.param)
    yield found
    found.close()


def build(folder: Path, **settings: Any) -> BaseGenerator:
    return build_generator(RolloutConfig(model=ModelConfig(path=str(folder)), **{"max_batch_total_tokens": 2048, **settings}))


def with_settings(case: Case, **settings: Any) -> Case:
    found = object.__new__(Case)
    found.__dict__ = {**case.__dict__, "_config": replace(case._config, **settings)}
    return found


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"generator": "static"}, id="static"),
        pytest.param({"generator": "continuous"}, id="continuous"),
        pytest.param(
            {
                "generator": "continuous",
                "max_batch_total_tokens": 256,
                "target_tokens_per_batch": 16,
                "max_batch_size": 3,
            },
            id="continuous-tight",
            marks=pytest.mark.slow,
        ),
        pytest.param({"generator": "static", "max_batch_size": 2}, id="static-two", marks=pytest.mark.slow),
    ],
)
def test_it_does_what_the_interface_says(case: Case, settings: dict[str, Any], check: str) -> None:
    if settings == {"generator": "static", "max_batch_size": 2} and check == "shared_prompts":
        pytest.skip("a static batch processes a prompt once, and these eight responses are four batches")
    CHECKS[check](with_settings(case, **settings))


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_checks_find_a_defect(case: Case, defect: str) -> None:
    broken = with_settings(case, generator=f"helpers.broken_generators:{defect}")
    with pytest.raises(GeneratorConformanceError):
        CHECKS[DEFECTS[defect]](broken)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "qwen3_moe", "gemma3_text"])
def test_other_families_conform(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    # What depends on a family's attention and weights; draws and requests are handled alike for all.
    checks = ["greedy", "log_probs", "weights_in_flight", "incomplete_weights", "prompts", "shared_prompts"]
    for name in ("static", "continuous"):
        assert conformance([name, "--family", family, "--only", *checks]) == 0, capsys.readouterr().out


NOT_PAGED = ("kimi_linear", "zamba2", "llama4_text")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family in (*WITH_STATE, "llama4_text")
        for name in ("static", "continuous")
        if name == "static" or family not in NOT_PAGED
    ],
)
def test_families_with_state_conform(family: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Copies for several responses, other prompts in the batch, new weights, and what is left of requests that ended.
    checks = ["greedy", "log_probs", "shared_prompts", "pause", "cancel", "resumed", "seeds"]
    assert conformance([name, "--family", family, "--only", *checks]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "bias"),
    [("nemotron_h", "use_bias"), ("lfm2", "conv_bias"), ("bamba", "mamba_proj_bias"), ("zamba2", "add_bias_linear")],
)
def test_a_bias_in_front_of_a_state_comes_from_no_padding(family: str, bias: str, tmp_path: Path) -> None:
    case = Case(tmp_path, {"max_batch_total_tokens": 4096, "generator": "static"}, family, **{bias: True})
    CHECKS["log_probs"](case)


def test_a_prompt_longer_than_a_step_is_continued(tmp_path: Path) -> None:
    """Chunks of a prompt begin with the states of the chunk before."""
    path = save_tiny_model(tmp_path / "model", "qwen3_next")
    # So few tokens that a prompt's response goes on before all others to it have begun.
    generators = [build(path, generator="continuous", target_tokens_per_batch=tokens) for tokens in (8, 512)]
    options = SamplingOptions(max_tokens=12, samples=5, seed=3, ignore_eos=True)
    answers = [g.generate([LONG, LONG[:40], LONG[:7]], options) for g in generators]
    for mine, theirs in zip(*answers, strict=True):
        assert [a.response for a in mine] == [a.response for a in theirs]
        for a, b in zip(mine, theirs, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
    for generator in generators:
        generator.close()


def test_states_have_slots_of_their_own() -> None:
    states = RequestStates(torch.device("cpu"))

    def add(rows: Sequence[Any], segments: Any, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        sums = torch.stack([x.sum(0) for x in rows[0].split(segments.lengths)])
        after = sums if before is None else before + sums
        return after, after

    def step(requests: list[str], numbers: list[float], pasts: list[int]) -> list[float]:
        carrier = states.begin_step(requests, [1] * len(requests), pasts).of_layer(0)
        return carrier.carry("scan", add, [torch.tensor(numbers)[:, None]])[:, 0].tolist()

    assert step(["a", "b"], [1, 2], [0, 0]) == [1, 2]
    # Children begin with what their parent had when they were forked, others with nothing.
    states.fork(["b", "a", "a__child#0", "a__child#1", "c__child#0"])
    assert step(["a", "a__child#0", "c", "b"], [10, 20, 30, 40], [1, 1, 0, 1]) == [11, 21, 30, 42]
    states.fork(["a", "a__child#0", "a__child#1", "c", "b"])
    assert step(["a__child#1"], [5], [1]) == [6]
    states.remove("b")
    states.remove("nobody")
    # The slot of a request that ended serves another, and one that begins anew forgets.
    assert step(["d", "a"], [5, 6], [0, 0]) == [5, 6]
    with pytest.raises(RuntimeError, match="request e continues after 3 tokens, whose state is gone"):
        states.begin_step(["e"], [1], [3])
    states.clear()
    assert step(["a"], [7], [0]) == [7]


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt2", *NOT_PAGED])
def test_continuous_batching_refuses_models_whose_attention_it_cannot_page(tmp_path: Path, family: str) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    with pytest.raises(ConfigError, match=r"generator=continuous cannot run .*; use generator=static"):
        build(path, generator="continuous")
    assert build(path, generator="static").generate([[5, 6]], GREEDY)


@pytest.mark.parametrize("factor", [0.5, 1.1])
def test_attention_of_a_wrong_scale_is_refused(folder: Path, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*tensors: Any, scale: float, **options: Any) -> torch.Tensor:
        return attend(*tensors, scale=factor * scale, **options)

    monkeypatch.setattr("drivetrain.generation.paged_attention.attend", scaled)
    with pytest.raises(ConfigError, match=r"a log-probability is .* in a plain forward pass; use generator=static"):
        build(folder, generator="continuous")


def test_the_check_of_attention_takes_several_steps(folder: Path) -> None:
    generator = build(folder, generator="continuous", target_tokens_per_batch=1)
    assert len(generator.generate([[5, 6, 7]], replace(GREEDY, max_tokens=3))[0][0].response) == 3
    generator.close()


@pytest.mark.parametrize("generator", ["static", "continuous"])
def test_options_that_nothing_reads_are_refused(generator: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"options\.tp is unknown to generator={generator}; it has no options"):
        build(tmp_path, generator=generator, options={"tp": 2})


# ---- the cache of continuous batching -----------------------------------------------------------------------------------


def responses(generator: BaseGenerator, prompts: list[list[int]], options: SamplingOptions) -> list[list[list[int]]]:
    return [[answer.response for answer in some] for some in generator.generate(prompts, options)]


def test_a_full_cache_changes_no_response(folder: Path) -> None:
    prompts = [[(i * 7 + 3 + j) % 250 for i in range(20 + j)] for j in range(8)]
    options = SamplingOptions(max_tokens=50, temperature=1.5, samples=2, top_p=0.95, seed=3)
    expected = responses(build(folder), prompts, options)
    # Room for a fifth of them, so that requests have to leave the cache and come back; and prompts in pieces.
    tight = build(folder, generator="continuous", max_batch_total_tokens=128)
    assert responses(tight, prompts, options) == expected
    assert tight.stats().prefill_tokens > sum(map(len, prompts)) * 2
    pieces = build(folder, generator="continuous", target_tokens_per_batch=7)
    assert responses(pieces, prompts, options) == expected


def test_a_prompt_that_is_in_the_cache_up_to_its_last_token(folder: Path) -> None:
    """What is left of it is too short to be kept back until all its responses exist."""
    options = SamplingOptions(max_tokens=9, temperature=1.5, samples=4, seed=3)
    expected = responses(build(folder), [LONG], options)
    generator: Any = build(folder, generator="continuous")
    for _ in range(3):
        before = generator.stats().prefill_tokens
        assert responses(generator, [LONG], options) == expected
    assert generator.stats().prefill_tokens - before == 4
    assert generator.weight_dtype == "float32"
    # Pages have the size that is counted with, and nothing has room for each token of a full batch beside each of a full cache.
    processor = generator._processor
    assert processor.cache.cache_allocators["full_attention"].tokens_per_page == 32
    assert processor.inputs_and_outputs.attention_mask is None


def test_requests_begin_in_the_order_of_their_arrival(folder: Path) -> None:
    """A long prompt that does not fit yet is not overtaken by short ones that would."""
    generator = build(folder, generator="continuous", max_batch_total_tokens=192)
    first = [generator.submit([5, 6, i], replace(GREEDY, max_tokens=20 + 5 * i)) for i in range(5)]
    generator.step()
    long = generator.submit([*LONG, *LONG[:40]], replace(GREEDY, max_tokens=4))
    short = [generator.submit([7, i], replace(GREEDY, max_tokens=4)) for i in range(12)]
    order: list[TokenStream] = []
    while generator.step():
        order += [stream for stream in [long, *short] if stream.tokens and stream not in order]
    assert order == [long, *short]
    assert all(stream.finish_reason == "length" for stream in [*first, long, *short])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_response_of_a_prompt_in_pieces_can_be_cancelled(folder: Path, which: int) -> None:
    """The responses of one prompt come into being with the first token of one of them."""
    generator = build(folder, generator="continuous", target_tokens_per_batch=16)
    options = SamplingOptions(max_tokens=9, temperature=1.5, seed=3)
    expected = responses(build(folder), [LONG], replace(options, samples=3))[0]
    streams = [generator.submit(LONG, options, row=0, sample=sample) for sample in range(3)]
    generator.step()
    assert not any(stream.tokens for stream in streams)
    generator.cancel(streams[which].id)
    while generator.step():
        pass
    for sample, stream in enumerate(streams):
        assert stream.tokens == ([] if sample == which else expected[sample])
    assert responses(generator, [LONG], replace(options, samples=3))[0] == expected


# ---- failures -----------------------------------------------------------------------------------------------------------


class Fault:
    """Lets the forward pass of a model fail at the given calls."""

    def __init__(self, generator: Any, error: BaseException, *calls: int) -> None:
        self._calls, self._error, self._count = calls, error, 0
        self._hook = generator._lm.model.register_forward_pre_hook(self._raise)

    def _raise(self, module: Any, inputs: Any) -> None:
        self._count += 1
        if self._count in self._calls:
            raise self._error

    def remove(self) -> None:
        self._hook.remove()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_when_memory_runs_out_the_latest_request_fails(generator: BaseGenerator, error: Exception) -> None:
    prompts = [[5, 6, 7], [9], [5, 6, 7, 8]]
    expected = [some[0] for some in responses(generator, prompts, GREEDY)]
    Fault(generator, error, 4)
    streams = [generator.submit(prompt, GREEDY) for prompt in prompts]
    while generator.step():
        pass
    failed = [stream for stream in streams if stream.error is not None]
    assert len(failed) == 1
    assert failed[0].error is error
    # The others go on after the tokens that they had.
    for stream, tokens in zip(streams, expected, strict=True):
        assert stream.tokens == (tokens[:3] if stream in failed else tokens)
    assert [some[0] for some in responses(generator, prompts, GREEDY)] == expected


def test_after_an_error_the_running_requests_fail_and_later_ones_do_not(generator: BaseGenerator) -> None:
    expected = responses(generator, [[5, 6, 7]], GREEDY)
    Fault(generator, RuntimeError("a broken kernel"), 3)
    streams = [generator.submit([5, i], GREEDY) for i in range(3)]
    with pytest.raises(RuntimeError, match="a broken kernel"):
        list(streams[0])
    assert all(stream.error is not None and len(stream.tokens) == 2 for stream in streams)
    assert responses(generator, [[5, 6, 7]], GREEDY) == expected
    # One that fails within generate leaves none of the others behind.
    Fault(generator, RuntimeError("a broken kernel"), 2)
    with pytest.raises(RuntimeError, match="a broken kernel"):
        generator.generate([[5], [6]], GREEDY)
    stats = generator.stats()
    assert (stats.waiting, stats.running) == (0, 0)


def test_an_interrupt_of_the_keyboard_loses_no_token(generator: BaseGenerator) -> None:
    expected = responses(generator, [[5, 6, 7]], GREEDY)[0][0]
    fault = Fault(generator, KeyboardInterrupt(), 4)
    stream = generator.submit([5, 6, 7], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    fault.remove()
    assert stream.tokens == expected[:3]
    assert [token.token for token in stream][-1] == expected[-1]
    assert stream.tokens == expected


# ---- names and settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("statik", "generator='statik' is unknown; available: .*did you mean 'static'?"),
        ("nowhere:Class", "generator=nowhere:Class: nowhere:Class cannot be imported"),
        ("json:Nothing", "json:Nothing cannot be imported: module 'json' has no attribute 'Nothing'"),
    ],
)
def test_a_generator_that_does_not_exist_is_named(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(folder, generator=name)


@pytest.mark.parametrize("name", ["max_batch_size", "max_batch_total_tokens", "target_tokens_per_batch"])
@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_sizes_that_are_no_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}; it must be an integer of at least "):
        RolloutConfig(model=ModelConfig(), **{name: value})


@pytest.mark.slow
def test_the_command_checks_a_generator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generators"]) == 0
    assert "static " in capsys.readouterr().out
    assert main(["conformance-rollout", "static", "max_batch_size=4", "--only", "greedy", "stops"]) == 0
    assert "2 checks passed, 0 failed" in capsys.readouterr().out
    broken = "helpers.broken_generators:OtherTokens"
    assert main(["conformance-rollout", broken, "--only", "greedy"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  greedy             to [5, 6, 7]: [" in printed
    assert "0 checks passed, 1 failed" in printed
    for words, message in (
        (["statik"], "did you mean 'static'?"),
        (["static", "size=3"], "'size=3' is not a setting with a value; the settings are"),
        (["static", "max_batch_size"], "'max_batch_size' has no value; write max_batch_size=VALUE"),
    ):
        assert main(["conformance-rollout", *words]) == 2
        assert message in capsys.readouterr().err
    assert parse_settings(["options.a.b=1", "dtype=bfloat16"]) == {"options": {"a.b": 1}, "dtype": "bfloat16"}


@pytest.mark.parametrize("place", ["host", "absent"])
def test_requests_of_a_scheduler_wait_for_a_model_that_is_away(case: Case, place: str) -> None:
    with case.generator(generator="static") as generator:
        scheduler = TokenGenerationScheduler(generator, SchedulerSettings())
        options = SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True)
        scheduler.begin("a", GenerationRequest(prompt=[5, 6, 7], options=options))
        events: list[Any] = scheduler.execute()
        generator.to(place)
        assert not scheduler.is_running()
        assert scheduler.execute() == []
        generator.to("device", "parameters")
        assert scheduler.execute() == []
        generator.load_weights(case.weights())
        generator.to("device", "cache")
        while scheduler.is_running():
            events += scheduler.execute()
        *progress, end = events
        assert (end.result, end.error) == ("length", None)
        assert [event.version for event in progress] == [0, *[1] * 11]
        generator.to("absent")
        # Twice, and the cache on its own, need no memory.
        generator.to("absent")
        generator.to("absent", "cache")
        assert not any(parameter.numel() for parameter in generator._lm.model.parameters())  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="new weights while the rollout's parameters are absent"):
            generator.load_weights(case.weights())
        generator.to("device")
        with pytest.raises(ModelError, match="were absent and have no values yet"):
            generator.submit([5], options)
