"""The conformance checks. Each takes the sessions of two users and raises a ServiceConformanceError if the service does not conform.

The checks work with any model: they compare results of the service with each other, or with numbers computed from other results. All of
them but `tenants` train one model at a time, so that they also suit a service that trains all weights of a single model.
"""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from .client import Connection, Datum, Model, expect, expect_close

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


def after(model: Model, datums: Sequence[Datum]) -> list[float]:
    """Return the log-probabilities of datums under a model, from a forward pass."""
    return model.run(datums, forward_only=True).all


def moved(model: Model, datums: Sequence[Datum], before: Sequence[float]) -> float:
    """Return the largest absolute change of the log-probabilities since `before`."""
    return max(abs(a - b) for a, b in zip(after(model, datums), before, strict=True))


def sums(user: Connection, other: Connection) -> None:
    """A loss is a weighted sum over all tokens, so a request with every datum twice has twice the loss and twice the gradient."""
    datums = data(1)
    with user.model() as model:
        result = model.run(datums)
    weights = [w for d in datums for w in d.fields["weights"]]
    expect_close([result.loss], [-sum(p * w for p, w in zip(result.all, weights, strict=True))], "the loss of cross_entropy")
    with user.model() as model:
        expect_close([model.run([*datums, *datums]).loss], [2 * result.loss], "the loss of all datums twice")
    small = scaled(datums, 0.1)
    # Adam's usual step hardly depends on the norm of the gradient, so a mean could not be told from a sum. With LINEAR it is
    # proportional to the gradient, so half of the learning rate must compensate for twice the gradient.
    stepped = []
    for batch, rate in ((small, 10.0), ([*small, *small], 5.0)):
        with user.model() as model:
            model.run(batch)
            model.step(**{**LINEAR, "learning_rate": rate})
            stepped.append(after(model, datums))
    expect_close(stepped[1], stepped[0], "log-probabilities after half the rate with all datums twice")


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
    """A request that is sent several times has one effect and one result."""
    datums = data(4)
    # With a large eps the step is proportional to the gradient, so that a gradient that was added twice is detected.
    step: dict[str, Any] = {"eps": 1e3, "learning_rate": 1.0}
    with user.model() as once:
        expected = once.run(datums)
        once.step(**step)
        stepped = after(once, datums)
    with user.model() as again:
        futures = [again.send(datums, seq=1) for _ in range(3)]
        expect(len({f["request_id"] for f in futures}) == 1, "a repeated request has several results")
        expect_close(again.passed(futures[0]).all, expected.all, "log-probabilities of a repeated request")
        again.number()
        again.step(**step)
        expect_close(after(again, datums), stepped, "log-probabilities after a step on a repeated request")


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


def adam(user: Connection, other: Connection) -> None:
    """Each step is AdamW with the learning rate, betas, epsilon, weight decay and clipping of its request."""
    datums, nothing = data(6), scaled(data(6), 0.0)

    def stepped(*steps: tuple[Sequence[Datum], dict[str, Any]]) -> list[float]:
        with user.model() as model:
            for batch, params in steps:
                model.run(batch)
                model.step(**params)
            return after(model, datums)

    still = stepped()
    # With betas of 0 and a tiny eps, a step is the learning rate times the sign of the gradient.
    sign = {"beta1": 0.0, "beta2": 0.0, "eps": 1e-30}
    expect_close(
        stepped((scaled(datums, 8.0), sign)),
        stepped((datums, sign)),
        "log-probabilities after a step with betas of 0 and a tiny eps, with 8 times the weights",
    )
    small, large = scaled(datums, 0.1), scaled(datums, 0.8)
    expect_close(
        stepped((large, {**LINEAR, "learning_rate": 1.25})),
        stepped((small, LINEAR)),
        "log-probabilities after a step with a large eps, with 8 times the weights and an eighth of the learning rate",
    )
    expect(
        max(abs(a - b) for a, b in zip(stepped((datums, sign)), still, strict=True)) > 1e-3,
        "a step changes no log-probability",
    )
    # The second step has weights of 0, so its gradient is exactly 0: any change comes from the settings.
    resting = stepped((datums, sign), (nothing, {**sign, "eps": 1e-8}))
    expect_close(resting, stepped((datums, sign)), "log-probabilities after a step with beta1=0 and no gradient")
    carried = stepped((datums, {**sign, "beta1": 0.9}), (nothing, {**sign, "eps": 1e-8, "beta1": 0.9}))
    single = stepped((datums, {**sign, "beta1": 0.9}))
    expect(
        max(abs(a - b) for a, b in zip(carried, single, strict=True)) > 1e-4,
        "a step with beta1=0.9 and no gradient changes no log-probability",
    )
    decayed = stepped((datums, sign), (nothing, {**sign, "eps": 1e-8, "weight_decay": 50.0}))
    expect(max(abs(a - b) for a, b in zip(decayed, resting, strict=True)) > 1e-4, "weight_decay changes no log-probability")
    # Two gradients with the same direction whose norms exceed the bound are equal after clipping.
    clipped = {**LINEAR, "eps": 1.0, "grad_clip_norm": 1e-2}
    expect_close(
        stepped((large, clipped)),
        stepped((small, clipped)),
        "log-probabilities after a step with a small grad_clip_norm, with 8 times the weights",
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


def ratios(user: Connection, other: Connection) -> None:
    """The policy losses follow their formulas: ratios are not truncated, and the clip thresholds are those of the request."""
    with user.model() as model:
        # The second shift makes all ratios 400 times as large, which detects an implementation that truncates them.
        for shift in (0.0, 6.0):
            datums = [
                Datum(d.tokens, d.targets, {**d.fields, "logprobs": [q - shift for q in d.fields["logprobs"]]})
                for d in data(10, 3, sampled=True)
            ]
            p = model.run(datums, "importance_sampling", forward_only=True).all
            q, a = ([v for d in datums for v in d.fields[name]] for name in ("logprobs", "advantages"))
            r = [math.exp(x - y) for x, y in zip(p, q, strict=True)]

            def clip(value: float, low: float, high: float) -> float:
                return min(max(value, low), high)

            formulas = {
                ("importance_sampling", ()): [-x * y for x, y in zip(r, a, strict=True)],
                ("ppo", ()): [-min(x * y, clip(x, 0.8, 1.2) * y) for x, y in zip(r, a, strict=True)],
                ("ppo", (("clip_low_threshold", 0.5), ("clip_high_threshold", 3.0))): [
                    -min(x * y, clip(x, 0.5, 3.0) * y) for x, y in zip(r, a, strict=True)
                ],
                ("cispo", (("clip_low_threshold", 0.0), ("clip_high_threshold", 4.0))): [
                    -clip(x, 0.0, 4.0) * z * y for x, y, z in zip(r, a, p, strict=True)
                ],
            }
            for (name, config), terms in formulas.items():
                results = model.run(datums, name, forward_only=True, **dict(config))
                expect_close(
                    [results.loss], [math.fsum(terms)], f"the loss of {name} with {dict(config) or 'the default settings'}"
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
        max(abs(a - b) for a, b in zip(continued, expected, strict=True)) > 1e-4,
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
    for a in range(3):
        for b in range(a):
            expect(
                max(abs(x - y) for x, y in zip(results[a], results[b], strict=True)) > 1e-4,
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
    """A completion ends with the first of the `stop` tokens, which it includes, or at max_tokens."""
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
