"""The checks of a generator against plain transformers, one document at a time.

Each check takes a `Case` and raises a GeneratorConformanceError if the generator does not do what `BaseGenerator` says.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...engine.cancellation import cancellable
from ...engine.errors import ConfigError, ModelError
from ..options import SamplingOptions
from ..result import Generation
from .case import Case, expect, expect_error, expect_greedy, expect_greedy_stream, expect_log_probs

PROMPTS = [[5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11], [200, 100], [3] * 40, [(7 * i + 3) % 250 for i in range(65)]]
GREEDY = SamplingOptions(max_tokens=12, temperature=0.0)
DRAWS = 2000
"""The number of tokens that are drawn to compare their frequencies with their probabilities."""


def expect_completion(case: Case, completion: Generation, what: str, *, model: int = 0) -> None:
    """Check that a completion is the greedy one, and as long as `GREEDY` lets it be."""
    expect_greedy(case, completion.prompt, completion.response, completion.log_probs, what, model=model)
    expect(
        completion.finished or len(completion.response) == GREEDY.max_tokens,
        f"{what}: it ends after {len(completion.response)} tokens",
    )


def greedy(case: Case) -> None:
    """At temperature 0, completions and log-probabilities are those of plain transformers."""
    with case.generator() as generator:
        for prompt, (completion,) in zip(PROMPTS, generator.generate(PROMPTS, GREEDY), strict=True):
            expect(completion.prompt == prompt, f"the prompt of a completion is {completion.prompt[:8]}, not {prompt[:8]}")
            expect(
                completion.versions == [0] * len(completion.response),
                f"versions {completion.versions} of a completion of the first weights",
            )
            expect_completion(case, completion, f"to {prompt[:8]}")


def log_probs(case: Case) -> None:
    """The log-probability of a sampled token is the model's at the temperature, whatever top_p and top_k are."""
    options = SamplingOptions(max_tokens=8, temperature=1.7, samples=3, seed=4)
    with case.generator() as generator:
        for more in ({}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9, "temperature": 0.6}):
            settings = replace(options, **more)
            for samples in generator.generate(PROMPTS, settings):
                for completion in samples:
                    reference = case.log_probs(completion.prompt, completion.response, settings.temperature)
                    # Dividing logits by a temperature below 1 also magnifies their rounding errors.
                    tolerance = case.tolerance / min(settings.temperature, 1.0)
                    expect_log_probs(completion.log_probs, reference, str(more), tolerance)


def frequencies(case: Case) -> None:
    """Tokens are sampled as often as the model says, within the support of top_k and top_p."""
    prompt, temperature = PROMPTS[0], 0.25
    with torch.no_grad():
        probabilities = (case.models[0](torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
    ordered = probabilities.sort(descending=True)
    supports: dict[str, tuple[dict[str, Any], int]] = {
        "top_k": ({"top_k": 6}, 6),
        "top_p": ({"top_p": 0.4}, 1 + int((ordered.values.cumsum(0) < 0.4).sum())),
        "neither": ({}, len(ordered.values)),
    }
    with case.generator() as generator:
        for name, (more, count) in supports.items():
            expected = torch.zeros_like(probabilities)
            expected[ordered.indices[:count]] = ordered.values[:count] / ordered.values[:count].sum()
            options = SamplingOptions(max_tokens=1, temperature=temperature, samples=DRAWS, seed=1, **more)
            (completions,) = generator.generate([prompt], options)
            drawn = (
                torch.bincount(torch.tensor([completion.response[0] for completion in completions]), minlength=len(expected))
                / DRAWS
            )
            expect(not drawn[expected == 0].any(), f"{name}: tokens outside the support were sampled")
            # Five standard deviations, and some draws of tokens that are expected less than once.
            limit = 5 * (expected * (1 - expected) / DRAWS).sqrt() + 4 / DRAWS
            expect(bool(((drawn - expected).abs() <= limit).all()), f"{name}: frequencies differ from the probabilities")


def seeds(case: Case) -> None:
    """A completion depends on its seed, row and sample, and on nothing else."""
    options = SamplingOptions(max_tokens=8, temperature=2.0, samples=2, seed=7)
    with case.generator() as generator:
        all_at_once = [[a.response for a in samples] for samples in generator.generate(PROMPTS, options)]
        again = [[a.response for a in samples] for samples in generator.generate(PROMPTS, options)]
        expect(again == all_at_once, "the same seed gives different completions")
        alone = [[a.response for a in generator.generate([p], options, [i])[0]] for i, p in enumerate(PROMPTS)]
        expect(alone == all_at_once, "a completion depends on the other prompts of its batch")
        other = [[a.response for a in samples] for samples in generator.generate(PROMPTS, replace(options, seed=8))]
        expect(other != all_at_once, "another seed gives the same completions")
        same = generator.generate([PROMPTS[0]] * 2, options)
        expect(same[0][0].response != same[1][0].response, "the same prompt in another row gets the same completion")
        expect(same[0][0].response != same[0][1].response, "all samples of a prompt are the same")
        unseeded = replace(options, seed=None)
        first, second = (generator.generate(PROMPTS, unseeded) for _ in range(2))
        expect(first != second, "without a seed, two calls give the same completions")


def stops(case: Case) -> None:
    """A completion ends with a stop token, which is its last one, or at the length limit."""
    prompt = PROMPTS[0]
    with case.generator() as generator:
        ((whole,),) = generator.generate([prompt], GREEDY)
        expected = whole.response
        # The same token may occur before, and then ends the completion there.
        stop = expected[3]
        length = expected.index(stop) + 1
        ((stopped,),) = generator.generate([prompt], replace(GREEDY, stop_tokens=(stop,)))
        expect(stopped.response == expected[:length], f"with stop token {stop} it generates {stopped.response}")
        expect(stopped.finish_reason == "stop", f"the finish reason at a stop token is {stopped.finish_reason}")
        ((short,),) = generator.generate([prompt], replace(GREEDY, max_tokens=1))
        expect(len(short.response) == 1, f"max_tokens=1 gives {len(short.response)} tokens")
        expect(short.finish_reason == "length", f"the finish reason at the length limit is {short.finish_reason}")
        # The model's own end token, which a temperature this high soon draws.
        hot = SamplingOptions(max_tokens=100, temperature=100.0, samples=16, seed=1)
        (completions,) = generator.generate([prompt], hot)
        ended = [completion for completion in completions if completion.finished]
        expect(bool(ended), "no completion of 100 random tokens ends with the end token of the model")
        # 2 is the end token of all tiny models.
        expect(all(a.response.index(2) == len(a.response) - 1 for a in ended), "tokens follow the end token")
        (ignoring,) = generator.generate([prompt], replace(hot, ignore_eos=True))
        expect(all(len(completion.response) == 100 for completion in ignoring), "ignore_eos=True: a completion ended early")


def streams(case: Case) -> None:
    """Tokens come one after the other, of several requests at the same time."""
    with case.generator() as generator:
        streams_of_prompts = [generator.submit(prompt, GREEDY, f"r{i}") for i, prompt in enumerate(PROMPTS)]
        first = next(iter(streams_of_prompts[-1]))
        expect(len(streams_of_prompts[-1].tokens) < GREEDY.max_tokens, "the first token comes with the last one")
        expect(first.token == streams_of_prompts[-1].tokens[0], "the first token that is read is not the first one")
        expect_error(
            ConfigError, "a second request of the same id", lambda: generator.submit([5], GREEDY, streams_of_prompts[-1].id)
        )
        for stream in streams_of_prompts:
            remaining = list(stream)
            expect(stream.ended, "a stream ends, and its request does not")
            expect(
                [token.token for token in remaining] == stream.tokens[len(stream.tokens) - len(remaining) :], "tokens are lost"
            )
            expect_greedy_stream(case, stream, "as a stream")
        stats = generator.stats()
        expect((stats.waiting, stats.running) == (0, 0), f"requests are left: {stats}")
        expect(stats.tokens == sum(len(stream.tokens) for stream in streams_of_prompts), f"{stats.tokens} tokens were counted")


def cancel(case: Case) -> None:
    """A request that is cancelled ends as `aborted`, with the tokens so far; the others do not notice."""
    long = replace(GREEDY, max_tokens=40, ignore_eos=True)
    with case.generator() as generator:
        streams = [generator.submit(prompt, long, f"r{i}") for i, prompt in enumerate(PROMPTS)]
        same = generator.submit(PROMPTS[0], long, "same")
        reader = iter(streams[0])
        for _ in range(3):
            next(reader)
        expect(generator.cancel("r0"), "a running request is not found")
        count = len(streams[0].tokens)
        expect(
            streams[0].finish_reason == "aborted", f"the finish reason of a cancelled request is {streams[0].finish_reason}"
        )
        expect(3 <= count < 40, f"a request that was cancelled after 3 tokens has {count}")
        expect(not generator.cancel("r0"), "a request can be cancelled twice")
        expect(not generator.cancel("nobody"), "a request that does not exist can be cancelled")
        late = generator.submit(PROMPTS[1], long, "late")
        expect(generator.cancel("late"), "a waiting request is not found")
        expect(late.finish_reason == "aborted" and not late.tokens, "a request cancelled before it began has tokens")
        again = generator.submit(PROMPTS[0], long, "r0")
        while generator.step():
            pass
        expect(len(streams[0].tokens) == count, "a cancelled request gets more tokens")
        for stream in [*streams[1:], same, again]:
            expect(stream.finish_reason == "length", f"the others end with {stream.finish_reason}")
            expect_greedy_stream(case, stream, "beside a request that was cancelled")
        expect(streams[0].tokens == again.tokens[:count], "the tokens so far are not those of the whole completion")


def resumed(case: Case) -> None:
    """A cancelled call ends with the tokens so far, and another call continues from them with the current weights."""
    # A server in a separate process keeps generating between reads, so a few steps may return many tokens.
    most, steps = 96, 4
    options = SamplingOptions(max_tokens=most, temperature=1.5, samples=2, seed=3, ignore_eos=True)
    asked = 0

    def after_steps() -> bool:
        nonlocal asked
        asked += 1
        return asked > steps

    with case.generator() as generator:
        whole = generator.generate(PROMPTS, options)
        with cancellable(after_steps):
            parts = generator.generate(PROMPTS, options)
        stats = generator.stats()
        expect((stats.waiting, stats.running) == (0, 0), f"after a call that was cancelled requests are left: {stats}")
        lengths = [len(completion.response) for samples in parts for completion in samples]
        expect(
            0 < sum(lengths) < most * len(lengths),
            f"a call that is cancelled after {steps} steps ends with {lengths} tokens of {most}",
        )
        with cancellable(lambda: True):
            step = generator.generate(PROMPTS, options, partial_completions=parts)
        for part, one in zip((c for samples in parts for c in samples), (c for samples in step for c in samples), strict=True):
            count = len(part.response)
            expect(one.response[:count] == part.response, "a call that is cancelled at once changes tokens")
            expect(len(one.response) <= count + 1, f"a call that is cancelled at once adds {len(one.response) - count} tokens")
        continued = generator.generate(PROMPTS, options, partial_completions=parts)
        generator.load_weights(case.weights())
        mixed = generator.generate(PROMPTS, options, partial_completions=parts)
        expect(
            generator.generate(PROMPTS, options, partial_completions=mixed) == mixed, "completions that had ended have changed"
        )
        for rows in zip(whole, parts, continued, mixed, strict=True):
            for one, part, resumed, other in zip(*rows, strict=True):
                count = len(part.response)
                reason = "aborted" if count < most else "length"
                expect(
                    part.finish_reason == reason, f"the finish reason after {count} tokens of {most} is {part.finish_reason}"
                )
                for what, completion, model in (("the same weights", resumed, 0), ("new weights", other, 1)):
                    expect(completion.finish_reason == "length", f"{what}: the finish reason is {completion.finish_reason}")
                    expect(completion.response[:count] == part.response, f"{what}: the tokens so far have changed")
                    expect(completion.log_probs[:count] == part.log_probs, f"{what}: their log-probabilities have changed")
                    expect(
                        completion.versions == [0] * count + [model] * (most - count),
                        f"{what}: after {count} tokens of version 0, versions are {completion.versions}",
                    )
                    reference = case.log_probs(
                        [*completion.prompt, *part.response], completion.response[count:], options.temperature, model=model
                    )
                    expect_log_probs(completion.log_probs[count:], reference, f"{what}, after {count} tokens", case.tolerance)
                if case.exact:
                    expect(resumed.response == one.response, "a completion that is continued is not what it would have been")
        expect(mixed != continued, "new weights change nothing")
        ((first, *_), *others) = parts
        for what, wrong in {
            "one completion of two": [[first], *others],
            "a completion of another prompt": [others[0], *others],
            "a completion without versions": [[replace(first, versions=[])] * 2, *others],
            "a completion that is continued after its last token": [
                [replace(whole[0][0], finish_reason="aborted")] * 2,
                *others,
            ],
        }.items():
            resume = partial(generator.generate, PROMPTS, options, partial_completions=wrong)
            expect_error(ConfigError, what, resume)
        expect(generator.stats().waiting == 0, "after a refusal requests are left")


def pause(case: Case) -> None:
    """Nothing is generated during a pause, and nothing is lost."""
    with case.generator() as generator:
        stream = generator.submit(PROMPTS[0], GREEDY)
        next(stream)
        generator.pause()
        count = len(stream.tokens)
        expect(not generator.step(), "step() returns True during a pause")
        other = generator.submit(PROMPTS[1], GREEDY)
        # What was generated before the pause can be read.
        expect_error(ConfigError, "reading further", lambda: list(stream))
        expect(len(stream.tokens) == count, "tokens were generated during a pause")
        generator.resume()
        for one in (stream, other):
            while not one.ended:
                generator.step()
            expect_greedy_stream(case, one, "after a pause")


def weights_in_flight(case: Case) -> None:
    """After new weights every token is theirs, of requests in flight and of fresh ones on the same prompt."""
    long = replace(GREEDY, max_tokens=30, ignore_eos=True)
    # These prompts fill two pages of 32 tokens, none, and one: only whole pages may be found in a cache of prefixes.
    prompts = [PROMPTS[5], PROMPTS[0], PROMPTS[4]]
    with case.generator() as generator:
        streams = [generator.submit(prompt, long) for prompt in prompts]
        for _ in range(5):
            generator.step()
        counts = [len(stream.tokens) for stream in streams]
        expect(any(counts), "after 5 steps no request has a token")
        generator.load_weights(case.weights())
        expect([len(stream.tokens) for stream in streams] == counts, "tokens were lost or made while weights were loaded")
        # Their prompts are in the cache of the old weights.
        fresh = [generator.submit(prompt, long) for prompt in prompts]
        while generator.step():
            pass
        for stream, count in zip(streams + fresh, counts + [0] * len(fresh), strict=True):
            expect(len(stream.tokens) == 30, f"a completion has {len(stream.tokens)} tokens of 30 ({stream.error})")
            expect(
                stream.versions == [0] * count + [1] * (30 - count),
                f"after {count} tokens of version 0, versions are {stream.versions}",
            )
            for model, start, end in ((0, 0, count), (1, count, 30)):
                so_far = stream.prompt + stream.tokens[:start]
                part = stream.tokens[start:end]
                what = f"version {model}, {'in flight' if count else 'fresh'}"
                if part:
                    expect_greedy(case, so_far, part, stream.log_probs[start:end], what, model=model)
        # The same values again: only the version changes.
        generator.load_weights(case.weights(), version=12)
        ((completion,),) = generator.generate([PROMPTS[0]], GREEDY)
        expect(set(completion.versions) == {12}, f"versions {completion.versions} of weights that were given version 12")


def incomplete_weights(case: Case) -> None:
    """After weights that are incomplete or damaged nothing is generated, until a complete set has come."""
    with case.generator() as generator:
        waiting = generator.submit(PROMPTS[0], GREEDY)
        generator.step()
        name = next(name for name, tensor in case.weights() if tensor.dim() == 1)
        matrix = [name for name, tensor in case.weights() if (tensor.dim() == 2 and ".layers." in name) or ".h." in name][-1]
        damaged = [(n, torch.full_like(t, float("nan")) if n == name else t) for n, t in case.weights()]
        for what, weights in {
            "a set without a tensor": case.weights(without=name),
            # Generators may fuse several matrices into one.
            "a set without a matrix": case.weights(without=matrix),
            "a set with an unknown tensor": [*case.weights(), ("other.weight", torch.zeros(2))],
            "a tensor of another shape": [(n, t[:3] if n == name else t) for n, t in case.weights()],
            "a tensor of NaN": damaged,
            "a stream that ends at once": [],
        }.items():
            expect_error(ModelError, what, lambda weights=weights: generator.load_weights(weights))  # type: ignore[misc]
            expect_error(ModelError, f"generate after {what}", lambda: generator.generate(PROMPTS, GREEDY))
            expect_error(ModelError, f"step after {what}", generator.step)
        generator.load_weights(case.weights(), version=1)
        ((completion,),) = generator.generate([PROMPTS[0]], GREEDY)
        expect_completion(case, completion, "after a complete set", model=1)
        while not waiting.ended:
            generator.step()
        expect(waiting.error is None, f"a request that waited for a complete set fails: {waiting.error}")


def prompts(case: Case) -> None:
    """Invalid prompts are refused when they are submitted, and other requests continue."""
    with case.generator() as generator:
        room = generator.limits().tokens
        for what, prompt in {
            "an empty prompt": [],
            "a token beyond the vocabulary": [5, generator.limits().vocabulary],
            "a negative token": [-1],
            "a prompt without room for its completion": [5] * (room - GREEDY.max_tokens + 1),
            "text": "five",
            "numbers with a fraction": [1.5],
        }.items():
            expect_error(ConfigError, what, lambda prompt=prompt: generator.submit(prompt, GREEDY))  # type: ignore[misc]
            expect_error(ConfigError, what, lambda prompt=prompt: generator.generate([[5], prompt], GREEDY))  # type: ignore[misc]
        stats = generator.stats()
        expect((stats.waiting, stats.running) == (0, 0), f"after a refusal requests are left: {stats}")
        expect(generator.generate([], GREEDY) == [], "no prompts give completions")
        ((completion,),) = generator.generate([PROMPTS[0]], GREEDY)
        expect_completion(case, completion, "after a refusal")


def places(case: Case) -> None:
    """A model returned from the host generates as before, while requests wait for it. An absent one generates with new weights."""
    with case.generator() as generator:
        stream = generator.submit(PROMPTS[2], GREEDY)
        next(stream)
        generator.to("host")
        expect_error(ConfigError, "step() with the model on the host", generator.step)
        expect_error(ConfigError, "an unknown place", lambda: generator.to("moon"))
        generator.to("device")
        list(stream)
        expect_greedy_stream(case, stream, "after a time on the host")
        # As before new weights: the parameters alone, and then the cache.
        generator.to("host")
        expect_error(ConfigError, "a cache without parameters", lambda: generator.to("device", "cache"))
        generator.to("device", "parameters")
        expect_error(ConfigError, "generate() without a cache", lambda: generator.generate(PROMPTS, GREEDY))
        generator.to("device", "cache")
        ((completion,),) = generator.generate([PROMPTS[2]], GREEDY)
        expect_completion(case, completion, "after a move in two steps")
        generator.to("absent")
        expect_error(ConfigError, "new weights without parameters", lambda: generator.load_weights(case.weights()))
        generator.to("device", "parameters")
        generator.load_weights(case.weights())
        generator.to("device", "cache")
        ((completion,),) = generator.generate([PROMPTS[2]], GREEDY)
        expect_completion(case, completion, "with new parameters after none", model=1)
        generator.to("absent")
        generator.to("device")
        expect_error(ModelError, "generate() with parameters that were absent", lambda: generator.generate(PROMPTS, GREEDY))


def shared_prompts(case: Case) -> None:
    """A prompt with several completions is processed once."""
    prompt, samples = PROMPTS[5], 8
    with case.generator() as generator:
        generator.generate([prompt], SamplingOptions(max_tokens=4, samples=samples, seed=1))
        prefill_tokens, most = generator.stats().prefill_tokens, len(prompt) + samples
        expect(
            prefill_tokens <= most,
            f"{prefill_tokens} tokens were processed for a prompt of {len(prompt)} and {samples} completions",
        )


CHECKS: dict[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (
        greedy,
        log_probs,
        frequencies,
        seeds,
        stops,
        streams,
        cancel,
        resumed,
        pause,
        weights_in_flight,
        incomplete_weights,
        prompts,
        places,
        shared_prompts,
    )
}
"""The checks by name."""
