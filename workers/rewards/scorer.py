"""The weighted sum of several rewards, and what becomes of answers that could not be judged. Imports no torch."""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from ...engine.errors import ConfigError, RewardError
from .pool import RewardPool, Target, title_of
from .registry import location_of
from .sample import OUTCOME_KINDS, Outcome, OutcomeKind, RewardSample
from .signatures import Signature

OnFailure = Literal["drop", "zero", "raise"]


@dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """The rewards of a run.

    Args:
        use: The reward functions: names, or `module:function`.
        weights: The weight of a function, by its name in `use`; 1 if it is not given.
        settings: Further arguments of a function, by its name in `use`.
        columns: The column of the data that stands for a parameter, where their names differ: `{answer: solution}`.
        route: The column that says which of the functions judge a row: a name, several separated by commas, or a list of names; empty if
            all of them judge every row.
        on_failure: What becomes of an answer that a function could not judge: `drop` gives it no reward, `zero` counts this function
            as 0, `raise` ends the run.
        timeout_s: For how many seconds a call may run. A function that takes all answers at once has as many times this as there are
            answers for each worker.
        memory_mb: How much memory a process of a function may have for data, in MiB.
        workers: The number of these processes.
    """

    use: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    route: str = ""
    on_failure: OnFailure = "drop"
    timeout_s: float = 10.0
    memory_mb: int = 4096
    workers: int = 2

    def __post_init__(self) -> None:
        if len(set(self.use)) != len(self.use):
            raise ConfigError(f"rewards.use names one twice: {', '.join(self.use)}; give it a larger weight")
        if bad := [name for name, weight in self.weights.items() if not math.isfinite(weight)]:
            raise ConfigError(f"rewards.weights.{bad[0]}={self.weights[bad[0]]}; it must be finite")
        if self.on_failure not in ("drop", "zero", "raise"):
            raise ConfigError(f"rewards.on_failure={self.on_failure}; it must be drop, zero or raise")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The rewards of a batch of answers.

    Args:
        rewards: The weighted sum for each answer; NaN for one that has no reward and must be left out.
        outcomes: By the name of each function, what it made of each answer; None for those that it was not asked about.
    """

    rewards: list[float]
    outcomes: dict[str, list[Outcome | None]]

    def counts(self, name: str) -> dict[OutcomeKind, int]:
        """Return how often a function came to each kind of outcome."""
        found = Counter(outcome.kind for outcome in self.outcomes[name] if outcome is not None)
        return {kind: found[kind] for kind in OUTCOME_KINDS}

    def mean(self, name: str) -> float:
        """Return the mean of a function's values; NaN if it has none."""
        values = [outcome.value for outcome in self.outcomes[name] if outcome is not None and outcome.value is not None]
        return sum(values) / len(values) if values else math.nan


class PendingScores:
    """The rewards of answers that are being judged."""

    def __init__(self, scorer: "RewardScorer", samples: Sequence[RewardSample], asked: dict[str, list[int]]) -> None:
        self._scorer, self._count = scorer, len(samples)
        self._outcomes: dict[str, list[Outcome | None]] = {name: [None] * len(samples) for name in asked}
        self._left = sum(len(rows) for rows in asked.values())
        self._done = threading.Condition()

    def add(self, name: str, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Note what a function made of some answers."""
        with self._done:
            for row, outcome in zip(rows, outcomes, strict=True):
                self._outcomes[name][row] = outcome
            self._left -= len(rows)
            self._done.notify_all()

    @property
    def ready(self) -> bool:
        """Whether all answers have been judged."""
        return not self._left

    def result(self, timeout_s: float | None = None) -> Scores:
        """Wait for all answers and return their rewards.

        Raises:
            RewardError: A function failed, and `rewards.on_failure` is `raise`.
            TimeoutError: They were not judged in time.
        """
        with self._done:
            if not self._done.wait_for(lambda: self.ready, timeout_s):
                raise TimeoutError(f"{self._left} judgments of rewards are missing after {timeout_s} s")
        return self._scorer.add_up(self._count, self._outcomes)


class RewardScorer:
    """Judges answers with several reward functions at the same time, each in a process that can be killed.

    Args:
        config: The configuration.
        functions: Reward functions of this program, beside those that the configuration names. Each must be at the top level of a
            module; its name there is its name in `weights` and `settings`.

    Raises:
        ConfigError: There is no reward, or one cannot be used; or a setting is invalid.
    """

    def __init__(self, config: RewardsConfig, functions: Sequence[Target] = ()) -> None:
        self._config = config
        self._targets: dict[str, Target] = {name: location_of(name) for name in config.use}
        for function in functions:
            name = title_of(function)
            if name in self._targets:
                raise ConfigError(f"two rewards are called {name}; rename the function")
            self._targets[name] = function
        if not self._targets:
            raise ConfigError("there is no reward; name one in rewards.use, such as answer, or module:function")
        for setting in ("weights", "settings"):
            if unknown := sorted(set(getattr(config, setting)) - set(self._targets)):
                raise ConfigError(
                    f"rewards.{setting} has {', '.join(unknown)}, which rewards.use has not ({', '.join(self._targets)})"
                )
        self._pool = RewardPool(config.workers, config.timeout_s, config.memory_mb, tuple(self._targets.values()))
        try:
            self._signatures: dict[str, Signature] = {
                name: self._pool.describe(target) for name, target in self._targets.items()
            }
            self._check_settings()
        except BaseException:
            self._pool.close()
            raise

    @property
    def names(self) -> list[str]:
        """The names of the rewards."""
        return list(self._targets)

    def _check_settings(self) -> None:
        for name, settings in self._config.settings.items():
            signature = self._signatures[name]
            if unknown := sorted(set(settings) - signature.required - signature.optional):
                if signature.takes_all:
                    continue
                raise ConfigError(
                    f"rewards.settings.{name}.{unknown[0]}: {name} has no such parameter; it has "
                    f"{', '.join(sorted(signature.required | signature.optional)) or 'none'}"
                )

    def submit(self, samples: Sequence[RewardSample]) -> PendingScores:
        """Begin to judge answers, and return at once.

        Raises:
            ConfigError: A row is routed to a reward that does not exist, or lacks a column.
        """
        renamed = [self._renamed(sample) for sample in samples]
        asked = self._routes(renamed)
        self._check_columns(renamed, asked)
        pending = PendingScores(self, samples, asked)
        for name, rows in asked.items():
            target, settings = self._targets[name], self._config.settings.get(name, {})
            batches = [rows] if self._signatures[name].at_once else [[row] for row in rows]
            for batch in batches:
                if batch:
                    self._pool.submit(
                        target,
                        [renamed[row] for row in batch],
                        settings,
                        lambda outcomes, name=name, batch=batch: pending.add(name, batch, outcomes),  # type: ignore[misc]
                        calls=-(-len(batch) // self._config.workers),
                    )
        return pending

    def score(self, samples: Sequence[RewardSample]) -> Scores:
        """Judge answers, and wait for the rewards.

        Raises:
            ConfigError: A row is routed to a reward that does not exist, or lacks a column.
            RewardError: A function failed, and `rewards.on_failure` is `raise`.
        """
        return self.submit(samples).result()

    def add_up(self, count: int, outcomes: dict[str, list[Outcome | None]]) -> Scores:
        """Return the weighted sums of what the functions made of `count` answers."""
        totals = [0.0] * count
        judged = [False] * count
        for name, found in outcomes.items():
            weight = self._config.weights.get(name, 1.0)
            for row, outcome in enumerate(found):
                if outcome is None or outcome.kind == "not_applicable":
                    continue
                judged[row] = True
                if outcome.value is not None:
                    totals[row] += weight * outcome.value
                elif self._config.on_failure == "raise":
                    raise RewardError(
                        f"the reward {name} could not judge answer {row} ({outcome.kind}): {outcome.message}; with "
                        "rewards.on_failure=drop such answers are left out"
                    )
                elif self._config.on_failure == "drop":
                    totals[row] = math.nan
        # An answer that no function had anything to say about has no reward, which is not a reward of 0.
        rewards = [total if known else math.nan for total, known in zip(totals, judged, strict=True)]
        return Scores(rewards=rewards, outcomes=outcomes)

    def close(self) -> None:
        """End all processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _renamed(self, sample: RewardSample) -> RewardSample:
        if not self._config.columns:
            return sample
        columns = dict(sample.columns)
        for parameter, column in self._config.columns.items():
            if column not in columns:
                raise ConfigError(
                    f"rewards.columns.{parameter}={column}: a row has no such column; it has {', '.join(columns) or 'none'}"
                )
            columns[parameter] = columns[column]
        return replace(sample, columns=columns)

    def _routes(self, samples: Sequence[RewardSample]) -> dict[str, list[int]]:
        route = self._config.route
        if not route:
            return {name: list(range(len(samples))) for name in self._targets}
        found: dict[str, list[int]] = {name: [] for name in self._targets}
        for row, sample in enumerate(samples):
            wanted = sample.columns.get(route)
            names = [part.strip() for part in wanted.split(",") if part.strip()] if isinstance(wanted, str) else wanted
            if not isinstance(names, Sequence) or not names:
                raise ConfigError(
                    f"rewards.route={route}: answer {row} has {wanted!r:.80} there; give it the name of a reward"
                )
            for name in names:
                if name not in found:
                    raise ConfigError(
                        f"rewards.route={route}: answer {row} is routed to {name!r}, but rewards.use has {', '.join(found)}"
                    )
                found[name].append(row)
        return found

    def _check_columns(self, samples: Sequence[RewardSample], asked: Mapping[str, Sequence[int]]) -> None:
        for name, rows in asked.items():
            needed = self._signatures[name].required - set(self._config.settings.get(name, {}))
            for row in rows:
                if missing := sorted(needed - set(samples[row].columns)):
                    raise ConfigError(
                        f"the reward {name} needs a column {missing[0]}, which answer {row} has not (it has "
                        f"{', '.join(samples[row].columns) or 'none'}); name another one with rewards.columns.{missing[0]}, or set "
                        f"rewards.settings.{name}.{missing[0]}"
                    )
