"""The conformance checks. Each takes the sessions of two users and raises a ServiceConformanceError if the service does not conform.

The checks work with any model: they compare results of the service with each other, or with numbers computed from other results. All of
them but `tenants` train one model at a time, so that they also suit a service that trains all weights of a single model.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import Any

import torch

from .client import Connection, Datum, Model, SamplerHandle, ServiceConformanceError, expect, expect_close

Check = Callable[[Connection, Connection], None]
VOCABULARY = 64
"""Token ids are drawn below this number, so that they exist in every model."""

LINEAR: dict[str, Any] = {"beta1": 0.0, "beta2": 0.0, "eps": 1e4, "learning_rate": 10.0}
"""Settings of Adam with which a step is proportional to the gradient: no moments, and a large epsilon."""


def data(seed: int, count: int = 4, length: int = 10, *, sampled: bool = False) -> list[Datum]:
    """Return random datums, with weights or, if `sampled`, with the sampler's log-probabilities and advantages."""
    random = Random(seed)
    result: list[Datum] = []
    for _ in range(count):
        tokens, targets = ([random.randrange(1, VOCABULARY) for _ in range(length)] for _ in range(2))
        fields: dict[str, Sequence[float]] = {"weights": [random.choice((1.0, 0.5, -0.25)) for _ in range(length)]}
        if sampled:
            fields = {
                "logprobs": [-4.0 - random.random() for _ in range(length)],
                "advantages": [random.uniform(-1, 1) for _ in range(length)],
            }
        result.append(Datum(tokens, targets, fields))
    return result


def scaled(datums: Sequence[Datum], factor: float) -> list[Datum]:
    """Return datums with their weights multiplied by a factor."""
    return [Datum(d.tokens, d.targets, {"weights": [w * factor for w in d.fields["weights"]]}) for d in datums]


def weighted(datums: Sequence[Datum], weights: Sequence[float]) -> list[Datum]:
    """Return datums with these weights of all their tokens in turn, for the loss cross_entropy."""
    numbers = iter(weights)
    return [Datum(d.tokens, d.targets, {"weights": list(islice(numbers, len(d.tokens)))}) for d in datums]


def after(model: Model, datums: Sequence[Datum]) -> list[float]:
    """Return the log-probabilities of datums under a model, from a forward pass."""
    return model.run(datums, forward_only=True).all


def moved(model: Model, datums: Sequence[Datum], before: Sequence[float]) -> float:
    """Return the largest absolute change of the log-probabilities since `before`."""
    return largest(after(model, datums), before)


def largest(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest absolute difference of two sequences."""
    return max(abs(a - b) for a, b in zip(values, others, strict=True))


def loss_of(log_probs: Sequence[float], datums: Sequence[Datum]) -> float:
    """Return the cross_entropy loss of datums with these log-probabilities."""
    weights = [w for d in datums for w in d.fields["weights"]]
    return -math.fsum(p * w for p, w in zip(log_probs, weights, strict=True))


def sums(user: Connection, other: Connection) -> None:
    """A loss is a weighted sum over all tokens, so a request with every datum twice has twice the loss and twice the gradient."""
    datums = data(1)
    with user.model() as model:
        result = model.run(datums)
    expect_close([result.loss], [loss_of(result.all, datums)], "the loss of cross_entropy")
    with user.model() as model:
        expect_close([model.run([*datums, *datums]).loss], [2 * result.loss], "the loss of all datums twice")
    # Adam's usual step hardly depends on the norm of the gradient, so a mean could not be told from a sum. With a large eps it does,
    # and it stays exactly the same if the gradient and eps are both twice as large.
    stepped = []
    for batch, eps in ((datums, 5e3), ([*datums, *datums], 1e4)):
        with user.model() as model:
            model.run(batch)
            model.step(**{**LINEAR, "eps": eps})
            stepped.append(after(model, datums))
    expect(largest(stepped[0], result.all) > 1e-3, "a step with a large eps changes no log-probability")
    expect_close(stepped[1], stepped[0], "log-probabilities after a step with all datums twice and twice the eps")


def chunks(user: Connection, other: Connection) -> None:
    """The losses and gradients of several requests add up to those of one request with all their datums."""
    datums = data(2, 6)
    with user.model() as whole:
        expected = whole.run(datums)
        whole.step()
        stepped = after(whole, datums)
    with user.model() as parts:
        results = [parts.run(datums[i : i + 2]) for i in (0, 2, 4)]
        expect_close([sum(r.loss for r in results)], [expected.loss], "the loss of chunks")
        parts.step()
        expect_close(after(parts, datums), stepped, "log-probabilities after a step on chunks")


def order(user: Connection, other: Connection) -> None:
    """Requests run in the order of their sequence numbers, not in the order of their arrival."""
    datums = data(3, 4)
    with user.model() as first:
        for half in (datums[:2], datums[2:]):
            first.run(half)
            first.step()
        expected = after(first, datums)
    with user.model() as second:
        sent = {
            3: lambda: second.send(datums[2:], seq=3),
            2: lambda: second.step(wait=False, seq=2),
            4: lambda: second.step(wait=False, seq=4),
            1: lambda: second.send(datums[:2], seq=1),
        }
        futures = {seq: send() for seq, send in sent.items()}
        # `number` counts the sequence numbers that were passed explicitly above.
        for seq in (1, 2, 3, 4):
            second.connection.result(futures[seq])
            second.number()
        expect_close(after(second, datums), expected, "log-probabilities after steps that arrived in another order")


def repetition(user: Connection, other: Connection) -> None:
    """A request that is sent several times has one effect and one result, also if it is sent again after its result."""
    datums, nothing = data(4), scaled(data(4), 0.0)
    # With a large eps the step is proportional to the gradient, so that a gradient that was added twice is detected. With beta1,
    # a second step moves the weights although it has no gradient.
    step: dict[str, Any] = {"eps": 1e3, "learning_rate": 1.0, "beta1": 0.9}
    with user.model() as once:
        expected = once.run(datums)
        once.step(**step)
        stepped = after(once, datums)
        once.run(nothing)
        once.step(**step)
        stepped_again = after(once, datums)
    with user.model() as again:
        passes = [again.send(datums, seq=1) for _ in range(3)]
        expect_close(again.passed(passes[0]).all, expected.all, "log-probabilities of a repeated request")
        passes.append(again.send(datums, seq=1))
        steps = [again.step(wait=False, seq=2, **step) for _ in range(3)]
        again.connection.result(steps[0])
        steps.append(again.step(wait=False, seq=2, **step))
        passes.append(again.send(datums, seq=1))
        for name, futures in (("forward_backward", passes), ("optim_step", steps)):
            expect(len({f["request_id"] for f in futures}) == 1, f"a repeated {name} request has several results")
            # Counts the sequence number that was passed explicitly above.
            again.number()
        expect_close(after(again, datums), stepped, "log-probabilities after a repeated request and a repeated step")
        # Shows whether the repetition of the pass after the step has added to the gradient.
        again.run(nothing)
        again.step(**step)
        expect_close(after(again, datums), stepped_again, "log-probabilities after another step, which has no gradient")


def forward_only(user: Connection, other: Connection) -> None:
    """A forward pass returns the same loss and log-probabilities, and does not change the gradient."""
    datums = data(5)
    step: dict[str, Any] = {"eps": 1e3, "learning_rate": 1.0}
    with user.model() as plain:
        expected = plain.run(datums)
        plain.step(**step)
        stepped = after(plain, datums)
    with user.model() as with_forward:
        results = with_forward.run(datums, forward_only=True)
        expect_close(
            [results.loss, *results.all], [expected.loss, *expected.all], "the loss and log-probabilities of a forward pass"
        )
        with_forward.run(datums)
        with_forward.run(datums, forward_only=True)
        with_forward.step(**step)
        expect_close(after(with_forward, datums), stepped, "log-probabilities after a step with forward passes before it")


def equal_rate(*steps: dict[str, Any], gradient: float) -> float:
    """Return the learning rate with which one step moves a parameter as far as several steps, of which only the first has a gradient.

    The steps are those of torch's AdamW. The single step has betas of 0 and the epsilon of the first of the steps.

    Args:
        steps: The settings of each step.
        gradient: The gradient of the parameter in the first step.
    """

    def distance(*steps: dict[str, Any]) -> float:
        parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.AdamW([parameter])
        for number, params in enumerate(steps):
            betas = params["beta1"], params["beta2"]
            settings = {"lr": params["learning_rate"], "betas": betas, "eps": params["eps"], "weight_decay": 0.0}
            optimizer.param_groups[0].update(settings)
            parameter.grad = torch.full_like(parameter, 0.0 if number else gradient)
            optimizer.step()
        return parameter.item()

    return distance(*steps) / distance({"learning_rate": 1.0, "beta1": 0.0, "beta2": 0.0, "eps": steps[0]["eps"]})


def adam(user: Connection, other: Connection) -> None:
    """Each step is AdamW with the learning rate, betas, epsilon, weight decay and clipping of its request."""
    datums, nothing = data(6), scaled(data(6), 0.0)
    small, large = scaled(datums, 0.1), scaled(datums, 0.8)

    def stepped(*steps: tuple[Sequence[Datum], dict[str, Any]]) -> list[float]:
        with user.model() as model:
            for batch, params in steps:
                model.run(batch)
                model.step(**params)
            return after(model, datums)

    still = stepped()
    # With betas of 0 and a tiny eps, a step is the learning rate times the sign of the gradient.
    sign: dict[str, Any] = {"beta1": 0.0, "beta2": 0.0, "eps": 1e-8, "learning_rate": 1e-2}
    single = stepped((datums, sign))
    expect(largest(single, still) > 1e-3, "a step changes no log-probability")
    expect_close(
        stepped((scaled(datums, 8.0), {**sign, "eps": 8e-8})),
        single,
        "log-probabilities after a step with betas of 0 and a tiny eps, with 8 times the weights and 8 times the eps",
    )
    linear = stepped((small, LINEAR))
    expect(largest(linear, still) > 1e-3, "a step with a large eps changes no log-probability")
    expect_close(
        stepped((large, {**LINEAR, "learning_rate": 1.25})),
        linear,
        "log-probabilities after a step with a large eps, with 8 times the weights and an eighth of the learning rate",
    )
    _betas(stepped, datums, small, nothing)
    # The later steps have betas of 0 and weights of 0, so that only weight_decay changes the model: a step multiplies its weights
    # by 1 - learning_rate * weight_decay, here by 0.4 and then 0.5, or by 0.2 at once.
    decayed = stepped((datums, sign), (nothing, {**sign, "weight_decay": 80.0}))
    expect(largest(decayed, single) > 1e-3, "weight_decay changes no log-probability")
    parts = [{**sign, "learning_rate": 0.02, "weight_decay": 30.0}, {**sign, "weight_decay": 50.0}]
    expect_close(
        stepped((datums, sign), *((nothing, params) for params in parts)),
        decayed,
        "log-probabilities after steps with learning_rate * weight_decay of 0.6 and 0.5, compared with a step with 0.8",
    )
    _clipping(stepped, still, datums)


Stepped = Callable[..., list[float]]
"""Trains a new model with steps, each with its datums and settings; returns the log-probabilities afterward."""


def _betas(stepped: Stepped, datums: Sequence[Datum], small: Sequence[Datum], nothing: Sequence[Datum]) -> None:
    """Check the moments: a step without a gradient moves the model because of the step before it."""
    for batch, gradient, rates, eps in ((datums, 1.0, (0.01, 0.02), 1e-8), (small, 1e-6, (5.0, 5.0), 1e4)):
        first = {"learning_rate": rates[0], "beta1": 0.5, "beta2": 0.5, "eps": eps}
        second = {"learning_rate": rates[1], "beta1": 0.2, "beta2": 0.1, "eps": eps / 5}
        if eps < 1:
            # After both steps, the corrected second moment is this share of the squared gradient. With an eps that shrinks alike,
            # the second step is the same multiple of the first one for any gradient, however small.
            share = second["beta2"] * (1 - first["beta2"]) / (1 - second["beta2"] ** 2)
            second["eps"] = eps * math.sqrt(share)
        rate = equal_rate(first, second, gradient=gradient)
        expect_close(
            stepped((batch, first), (nothing, second)),
            stepped((batch, {"learning_rate": rate, "beta1": 0.0, "beta2": 0.0, "eps": eps})),
            f"log-probabilities after a step with {first} and a step without a gradient with {second}, compared with a single step "
            f"with betas of 0 and learning_rate={rate:.6g}, which moves torch's AdamW equally far",
        )


def _clipping(stepped: Stepped, still: Sequence[float], datums: Sequence[Datum]) -> None:
    """Check that a gradient is scaled to the norm grad_clip_norm, if its norm exceeds it."""
    clipped = {"beta1": 0.0, "beta2": 0.0, "eps": 10.0, "learning_rate": 2.0, "grad_clip_norm": 1e-2}
    forward, backward = (stepped((scaled(datums, direction), clipped)) for direction in (1.0, -1.0))
    expect_close(
        stepped((scaled(datums, 8.0), clipped)),
        forward,
        "log-probabilities after a step with a small grad_clip_norm, with 8 times the weights",
    )
    # A clipped step has this length. The change of the loss along it, in both directions, tells the norm of the gradient.
    length = clipped["learning_rate"] * clipped["grad_clip_norm"] / clipped["eps"]
    norm = (loss_of(backward, datums) - loss_of(forward, datums)) / (2 * length)
    expect(norm > 0, "steps with grad_clip_norm along a gradient and against it do not change the loss")
    rate = LINEAR["eps"] * length / norm
    unclipped = stepped((datums, {**LINEAR, "learning_rate": rate}))
    expect(largest(forward, still) > 1e-4, "a step with a small grad_clip_norm changes no log-probability")
    difference = largest(unclipped, forward) / largest(forward, still)
    # The norm has an error of the third order of the length.
    expect(
        difference < 0.05,
        f"a step with {clipped} changes log-probabilities differently than a step of the same length without clipping: by "
        f"{difference:.2g} of the change; expected less than 0.05",
    )


def log_prob_order(user: Connection, other: Connection) -> None:
    """A pass returns one log-probability for each position of each datum, in the order of the request."""
    with user.model() as model:
        datums = [*data(7, 3, 5), *data(8, 2, 17), *data(9, 1, 1)]
        together = model.run(datums, forward_only=True)
        expect(
            [len(p) for p in together.log_probs] == [len(d.tokens) for d in datums],
            "a pass does not return one log-probability for each position",
        )
        for number, datum in enumerate(datums):
            alone = model.run([datum], forward_only=True)
            expect_close(together.log_probs[number], alone.all, f"log-probabilities of datum {number} among others")
        unweighted = scaled(datums, 0.0)
        expect_close(
            model.run(unweighted, forward_only=True).all, together.all, "log-probabilities of tokens with a weight of 0"
        )


def clip(value: float, low: float, high: float) -> float:
    """Return a value, bounded from both sides."""
    return min(max(value, low), high)


def policy_losses(
    p: float, q: float, advantage: float
) -> dict[tuple[str, tuple[tuple[str, float], ...]], tuple[float, float]]:
    """Return the policy losses of a token, each with its derivative by the token's log-probability, by name and settings.

    Args:
        p: The log-probability of the token.
        q: The log-probability of the token when it was sampled.
        advantage: The advantage of the token.
    """
    r = math.exp(p - q)
    result: dict[tuple[str, tuple[tuple[str, float], ...]], tuple[float, float]] = {
        ("importance_sampling", ()): (-r * advantage, -r * advantage)
    }
    ppo: tuple[tuple[str, float], ...] = (("clip_low_threshold", 0.5), ("clip_high_threshold", 3.0))
    for settings, low, high in (((), 0.8, 1.2), (ppo, 0.5, 3.0)):
        bounded = clip(r, low, high) * advantage
        # Where the bounded term is the smaller one, it does not depend on the log-probability.
        result["ppo", settings] = -min(r * advantage, bounded), 0.0 if bounded < r * advantage else -r * advantage
    # The clipped ratio of cispo is a constant factor in the backward pass.
    factor = clip(r, 0.0, 4.0) * advantage
    result["cispo", (("clip_low_threshold", 0.0), ("clip_high_threshold", 4.0))] = -factor * p, -factor
    for beta in (0.05, 0.5):
        result["dro", (("beta", beta),)] = beta / 2 * (p - q) ** 2 - p * advantage, beta * (p - q) - advantage
    return result


def ratios(user: Connection, other: Connection) -> None:
    """The policy losses and their gradients follow their formulas: ratios are not truncated, and the settings are those of the request.

    The loss dro is checked if the service has it.
    """
    with user.model() as model:
        has_dro = model.accepts(data(10, 1, sampled=True), "dro")
    with user.model() as model:
        # The second shift makes all ratios 400 times as large, which detects an implementation that truncates them.
        for shift in (0.0, 6.0):
            datums = [
                Datum(d.tokens, d.targets, {**d.fields, "logprobs": [q - shift for q in d.fields["logprobs"]]})
                for d in data(10, 3, sampled=True)
            ]
            before = model.run(datums, "importance_sampling", forward_only=True).all
            q, a = ([v for d in datums for v in d.fields[name]] for name in ("logprobs", "advantages"))
            tokens = [policy_losses(*one) for one in zip(before, q, a, strict=True)]
            for name, config in tokens[0]:
                if name == "dro" and not has_dro:
                    continue
                terms, slopes = zip(*(token[name, config] for token in tokens), strict=True)
                what = f"{name} with {dict(config) or 'the default settings'}"
                results = model.run(datums, name, forward_only=True, **dict(config))
                expect_close([results.loss], [math.fsum(terms)], f"the loss of {what}")
                # The gradient of cross_entropy is minus the weights times that of the log-probabilities. With the slopes of the policy
                # loss as weights, both gradients cancel, so a step must not change the model.
                model.run(datums, name, **dict(config))
                model.run(weighted(datums, slopes))
                model.step(**{**LINEAR, "learning_rate": 10.0 / max(1.0, *map(abs, slopes))})
                expect_close(
                    after(model, weighted(datums, slopes)),
                    before,
                    f"log-probabilities after a step with the gradient of {what}, minus the gradient that its formula has",
                )


def sampled(user: Connection, other: Connection) -> None:
    """The log-probabilities of sampled tokens equal those of a pass over the whole sequence, by the sampler and by the model."""
    prompt, datums = [3, 4, 5], data(11)
    with user.model() as model:
        model.run(datums)
        model.step()
        sampler = user.sampler(model.save("sampled", sampler=True))
        (completion,), _ = sampler.sample(prompt, seed=1)
        sequence = [*prompt, *completion.tokens]
        scores = sampler.log_probs(sequence)
        expect_close(
            completion.log_probs,
            scores[len(prompt) - 1 :],
            "log-probabilities of sampled tokens, compared with compute_logprobs",
        )
        datum = Datum(sequence[:-1], sequence[1:], {"weights": [0.0] * (len(sequence) - 1)})
        expect_close(
            scores,
            model.run([datum], forward_only=True).all,
            "log-probabilities of compute_logprobs, compared with the saved model",
        )


def saved(user: Connection, other: Connection) -> None:
    """A model that is loaded with the optimizer continues like the saved one; without the optimizer, it starts with zero moments."""
    datums = data(12)
    # Without a gradient, a step depends on the moments only, which shows whether they were loaded.
    nothing = scaled(datums, 0.0)

    def rested(model: Model) -> list[float]:
        model.run(nothing)
        model.step()
        return after(model, datums)

    with user.model() as model:
        for _ in range(3):
            model.run(datums)
            model.step()
        path = model.save("state")
        expected = after(model, datums)
        continued = rested(model)
    expect(
        largest(continued, expected) > 1e-4,
        "a step with moments and no gradient changes no log-probability",
    )
    for optimizer, then, what in (
        (True, continued, "with loaded moments and no gradient"),
        (False, expected, "without moments and without a gradient"),
    ):
        with user.model(path, optimizer=optimizer) as loaded:
            expect_close(after(loaded, datums), expected, "log-probabilities of a model from a checkpoint")
            expect_close(rested(loaded), then, f"log-probabilities after a step {what}")


def snapshots(user: Connection, other: Connection) -> None:
    """Samplers keep their weights while the model is trained further. Several snapshots and the base model are sampled by turns."""
    datums = data(13)
    sequence = [1, 2, 3, 4, 5, 6]
    samplers = [user.sampler()]
    results = [samplers[0].log_probs(sequence)]
    with user.model() as model:
        for step in range(2):
            model.run(datums)
            model.step()
            samplers.append(user.sampler(model.save(f"snapshot-{step}", sampler=True)))
            results.append(samplers[-1].log_probs(sequence))
        model.run(datums)
        model.step()
        for number, (sampler, expected) in enumerate(zip(samplers, results, strict=True)):
            expect_close(sampler.log_probs(sequence), expected, f"log-probabilities of snapshot {number} after another step")
        # All requests are sent before the first result is read, so that the service has requests of all snapshots at once.
        futures = [(sampler, sampler.send(sequence[:2], seed=4)) for sampler in (*samplers, *reversed(samplers))]
        for sampler, future in futures:
            (completion,), _ = sampler.sampled(future)
            expect_close(
                completion.log_probs,
                sampler.log_probs([*sequence[:2], *completion.tokens])[1:],
                f"log-probabilities of tokens that snapshot {samplers.index(sampler)} sampled, compared with its compute_logprobs",
            )
    for a in range(3):
        for b in range(a):
            expect(
                largest(results[a], results[b]) > 1e-3,
                f"snapshots {a} and {b} have the same log-probabilities",
            )


def tenants(user: Connection, other: Connection) -> None:
    """Requests of one user do not change the results of another, and users cannot see each other's checkpoints."""
    datums = data(14)
    alone = user.create(seed=5)
    for _ in range(2):
        alone.run(datums)
        alone.step()
    expected = after(alone, datums)
    mine, theirs = user.create(seed=5), other.create(seed=6)
    for _ in range(2):
        pending = [
            mine.send(datums),
            theirs.send(scaled(data(15), 100.0)),
            theirs.step(wait=False, learning_rate=0.5),
            mine.step(wait=False),
        ]
        # All requests were sent before the first result is read, so that the service has requests of both users at once.
        for number, future in enumerate(pending):
            (mine if number in (0, 3) else theirs).connection.result(future)
    expect_close(
        after(mine, datums), expected, "log-probabilities of a model that was trained at the same time as another user's"
    )
    expect(moved(theirs, datums, expected) > 1e-3, "the models of two users with different data are the same")
    path = mine.save("mine")
    status, _, _ = other.request("POST", "/weights_info", b'{"tinker_path": "%s"}' % path.encode())
    expect(
        status in (400, 403, 404),
        f"weights_info returned status {status} for another user's checkpoint, instead of 400, 403 or 404",
    )


def stops(user: Connection, other: Connection) -> None:
    """A completion ends with the first of the `stop` tokens, which it includes, or at max_tokens. Stop strings need a tokenizer."""
    sampler = user.sampler()
    (free,), _ = sampler.sample([5, 6], seed=2, max_tokens=6)
    expect(
        len(free.tokens) == 6 and not free.stopped,
        f"a completion without stop tokens has {len(free.tokens)} tokens, stopped={free.stopped}; expected max_tokens=6 and stopped=False",
    )
    end = free.tokens[2]
    (ended,), _ = sampler.sample([5, 6], seed=2, max_tokens=6, stop=[end])
    cut = free.tokens.index(end) + 1
    expect(
        ended.tokens == free.tokens[:cut],
        f"with stop=[{end}] the completion is {ended.tokens}; expected {free.tokens[:cut]}, the beginning of {free.tokens}",
    )
    expect(ended.stopped, "a completion that ended at a stop token has the stop reason length")
    if user.decode is not None:
        _stop_strings(sampler, user.decode)


def _stop_strings(sampler: SamplerHandle, decode: Callable[[Sequence[int]], str]) -> None:
    """Check that a completion ends with the token that completes a stop string."""
    for seed in range(20):
        (free,), _ = sampler.sample([5, 6], seed=seed, max_tokens=8)
        if (chosen := stop_string(decode, free.tokens)) is not None:
            break
    else:
        raise ServiceConformanceError("no completion has text in which a stop string could be searched")
    stop, cut = chosen
    # A single string, and a list with a string that does not occur.
    for stops in (stop, ["\x07", stop]):
        (ended,), _ = sampler.sample([5, 6], seed=seed, max_tokens=8, stop=stops)
        expect(
            ended.tokens == free.tokens[:cut] and ended.stopped,
            f"with stop={stops!r} the completion is {ended.tokens}, stopped={ended.stopped}; expected {free.tokens[:cut]}, the beginning "
            f"of {free.tokens}, whose text is {decode(free.tokens)!r}, and stopped=True",
        )


def stop_string(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> tuple[str, int] | None:
    """Return a string that begins in one token and ends in the next, and the number of tokens up to its end; None if there is none.

    At least one token comes after it.
    """
    for cut in range(2, len(tokens)):
        before, text = decode(tokens[: cut - 1]), decode(tokens[:cut])
        # Characters of incomplete bytes are decoded as U+FFFD, and may change with the next token.
        if before and text.startswith(before) and len(text) > len(before) and "\ufffd" not in text:
            stop = text[len(before) - 1 : len(before) + 1]
            if stop not in before:
                return stop, cut
    return None


def seeds(user: Connection, other: Connection) -> None:
    """The same seed gives the same completions. The completions of one request differ, as do those of requests without a seed."""
    sampler = user.sampler()
    first, _ = sampler.sample([7, 8], samples=4, seed=3)
    again, _ = sampler.sample([7, 8], samples=4, seed=3)
    expect([r.tokens for r in first] == [r.tokens for r in again], "the same seed gives different completions")
    expect(len({tuple(r.tokens) for r in first}) > 1, "all completions of a request are the same")
    free = [tuple(sampler.sample([7, 8])[0][0].tokens) for _ in range(4)]
    expect(len(set(free)) > 1, "requests without a seed have the same completions")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        sums,
        chunks,
        order,
        repetition,
        forward_only,
        adam,
        log_prob_order,
        ratios,
        sampled,
        saved,
        snapshots,
        tenants,
        stops,
        seeds,
    )
}
"""The checks by name."""

SEVERAL_MODELS = frozenset({"tenants"})
"""The checks that train several models at the same time."""
