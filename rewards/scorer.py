"""The weighted sum of several rewards, and the handling of completions that could not be scored."""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from ..engine.errors import ConfigError, RewardError
from .config import RewardsConfig
from .pool import DoneCallback, RewardPool, RewardTarget, title_of
from .registry import REWARDS
from .sample import OUTCOME_KINDS, OutcomeKind, RewardOutcome, RewardSample
from .signatures import Signature


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The rewards of a batch of completions.

    Args:
        rewards: The weighted sum for each completion; NaN for a completion that has no reward and must be left out.
        outcomes: Each function's outcome for each completion, by name; None for completions that it did not score.
    """

    rewards: list[float]
    outcomes: dict[str, list[RewardOutcome | None]]

    def counts(self, name: str) -> dict[OutcomeKind, int]:
        """Return how many outcomes of each kind a function has."""
        by_kind = Counter(outcome.kind for outcome in self.outcomes[name] if outcome is not None)
        return {kind: by_kind[kind] for kind in OUTCOME_KINDS}

    def mean(self, name: str) -> float:
        """Return the mean of a function's values; NaN if it has none."""
        values = [outcome.value for outcome in self.outcomes[name] if outcome is not None and outcome.value is not None]
        return sum(values) / len(values) if values else math.nan


_CALL_S = 0.02
"""The target duration of a call to a process, in seconds."""
_MEMORY = 0.1
"""The weight of a call in the mean time per completion."""


class PendingScores:
    """The rewards of completions that are being scored."""

    def __init__(
        self,
        scorer: "RewardScorer",
        samples: Sequence[RewardSample],
        asked: dict[str, list[int]],
        asked_of_models: dict[str, list[int]],
    ) -> None:
        self._scorer, self._count, self._asked_of_models = scorer, len(samples), asked_of_models
        self._outcomes: dict[str, list[RewardOutcome | None]] = {name: [None] * len(samples) for name in asked}
        self._left = sum(len(rows) for rows in asked.values())
        self._done = threading.Condition()

    def add(self, name: str, rows: Sequence[int], outcomes: Sequence[RewardOutcome]) -> None:
        """Record a function's outcomes for some completions."""
        with self._done:
            for row, outcome in zip(rows, outcomes, strict=True):
                self._outcomes[name][row] = outcome
            self._left -= len(rows)
            self._done.notify_all()

    def __len__(self) -> int:
        return self._count

    @property
    def ready(self) -> bool:
        """Whether all completions have been scored."""
        return not self._left

    def result(self, timeout_s: float | None = None, *, models: Mapping[str, Sequence[float]] | None = None) -> Scores:
        """Wait for all completions and return their rewards.

        Args:
            timeout_s: The time limit, in seconds; None for no limit.
            models: For each name in `models` of the scorer, its value for each completion; used for the rows routed to it.

        Raises:
            RewardError: A function failed, and `rewards.on_failure` is `raise`.
            TimeoutError: They were not scored in time.
        """
        with self._done:
            if not self._done.wait_for(lambda: self.ready, timeout_s):
                raise TimeoutError(f"{self._left} reward values are missing after {timeout_s} s")
        outcomes = dict(self._outcomes)
        for name, rows in self._asked_of_models.items():
            values = (models or {})[name]
            results: list[RewardOutcome | None] = [None] * self._count
            for row in rows:
                finite = math.isfinite(values[row])
                message = "" if finite else f"the reward model returned {values[row]}"
                results[row] = RewardOutcome(
                    kind="value" if finite else "error", value=values[row] if finite else None, message=message
                )
            outcomes[name] = results
        return self._scorer.add_up(self._count, outcomes)


class RewardScorer:
    """Scores completions with several reward functions at the same time, in processes that can be killed.

    Args:
        config: The configuration.
        functions: Reward functions of this program, in addition to those named in the configuration. Each must be at the top level of a
            module; its name there is its name in `weights` and `settings`.
        models: Names in `config.use` that are not functions; their values are passed to `PendingScores.result`.

    Raises:
        ConfigError: There is no reward, a reward cannot be used, or a setting is invalid.
    """

    def __init__(self, config: RewardsConfig, functions: Sequence[RewardTarget] = (), *, models: Sequence[str] = ()) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._models = [name for name in config.use if name in models]
        self._targets: dict[str, RewardTarget] = {name: REWARDS.of(name) for name in config.use if name not in models}
        for function in functions:
            name = title_of(function)
            if name in self._targets:
                raise ConfigError(f"two rewards are called {name}; rename the function")
            self._targets[name] = function
        if not self.names:
            raise ConfigError("there is no reward; name one in rewards.use, such as answer, or module:function")
        for setting in ("weights", "settings"):
            names = self.names if setting == "weights" else list(self._targets)
            if unknown := sorted(set(getattr(config, setting)) - set(names)):
                raise ConfigError(
                    f"rewards.{setting} has {', '.join(unknown)}, which are not in rewards.use ({', '.join(names)})"
                )
        self._pool = RewardPool(config.workers, config.timeout_s, config.memory_mb, tuple(self._targets.values()))
        try:
            # Every function is imported in a process now, so that one that cannot be used ends the run at its start.
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
        named = [name for name in self._config.use if name in self._targets or name in self._models]
        return [*named, *(name for name in self._targets if name not in named)]

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

    def check(self, samples: Sequence[RewardSample], names: Sequence[str]) -> None:
        """Check that rows have the columns that the rewards need, without scoring.

        Args:
            samples: Rows, without completions.
            names: The name of each row, for messages.

        Raises:
            ConfigError: A row is routed to a reward that does not exist, or lacks a column.
        """
        renamed = [self._renamed(sample, name) for sample, name in zip(samples, names, strict=True)]
        routes = self._routes(renamed, names)
        self._check_columns(renamed, {name: rows for name, rows in routes.items() if name in self._targets}, names)

    def submit(self, samples: Sequence[RewardSample]) -> PendingScores:
        """Start scoring completions, and return immediately.

        If a call with several completions fails, its function may be called again for each of them, so that only those are lost that
        fail individually.

        Raises:
            ConfigError: A row is routed to a reward that does not exist, or lacks a column.
        """
        renamed = [self._renamed(sample, _title(row, None)) for row, sample in enumerate(samples)]
        routes = self._routes(renamed)
        asked = {name: rows for name, rows in routes.items() if name not in self._models}
        self._check_columns(renamed, asked)
        # All rows have been checked; only now is a function called.
        pending = PendingScores(self, samples, asked, {name: routes[name] for name in self._models})
        for name, rows in asked.items():
            size = len(rows) if self._signatures[name].at_once else self._answers_per_call(name, len(rows))
            for first in range(0, len(rows), max(1, size)):
                self._ask(name, rows[first : first + size], renamed, pending)
        return pending

    def _answers_per_call(self, name: str, count: int) -> int:
        """Return the number of completions per call: more than one if scoring takes no longer than handing them over."""
        with self._lock:
            seconds = self._seconds.get(name)
        if seconds is None:
            return 1
        # At least two calls per process, so that a process that has finished early takes over some of the work.
        return max(1, min(int(_CALL_S / max(seconds, 1e-6)), -(-count // (2 * self._config.workers))))

    def _ask(self, name: str, rows: Sequence[int], samples: Sequence[RewardSample], pending: PendingScores) -> None:
        """Call a function for completions, and separately for each if one failure stands for several of them."""

        def done(outcomes: list[RewardOutcome], separate: bool) -> None:
            if separate or len(rows) == 1:
                self._note(name, outcomes)
                pending.add(name, rows, outcomes)
            else:
                # One of them has killed the process or used up the time limit; later calls take one completion each too.
                with self._lock:
                    self._seconds[name] = _CALL_S
                self._ask_singly(name, rows, samples, pending)

        self._submit(name, rows, samples, done)

    def _ask_singly(self, name: str, rows: Sequence[int], samples: Sequence[RewardSample], pending: PendingScores) -> None:
        """Call a function separately for each of several completions.

        The value that a function of all completions gives one may depend on the others. Its values therefore come from a joint call for
        all that it can score: completions that fail individually are left out, and it is called once more with the rest.
        """
        singly: dict[int, RewardOutcome] = {}

        def collect(row: int, outcomes: list[RewardOutcome], _: bool) -> None:
            self._note(name, outcomes)
            with self._lock:
                (singly[row],) = outcomes
                if len(singly) < len(rows):
                    return
            able = [row for row in rows if singly[row].kind in ("value", "not_applicable")]
            if len(able) < 2 or not self._signatures[name].takes_batch:
                able = []
            settled = [row for row in rows if row not in set(able)]
            pending.add(name, settled, [singly[row] for row in settled])
            if able:
                self._submit_again(name, able, samples, lambda outcomes, _: pending.add(name, able, outcomes))

        for row in rows:
            self._submit_again(name, [row], samples, partial(collect, row))

    def _submit(self, name: str, rows: Sequence[int], samples: Sequence[RewardSample], done: DoneCallback) -> None:
        # One call for all gets the time that its completions would have as single calls, divided among the processes.
        calls = -(-len(rows) // self._config.workers) if self._signatures[name].at_once else 1
        settings = self._config.settings.get(name, {})
        self._pool.submit(self._targets[name], [samples[row] for row in rows], settings, done, calls=calls)

    def _submit_again(self, name: str, rows: Sequence[int], samples: Sequence[RewardSample], done: DoneCallback) -> None:
        try:
            self._submit(name, rows, samples, done)
        except ConfigError as e:  # the pool was closed after the first call
            done([RewardOutcome(kind="error", message=str(e))] * len(rows), False)

    def _note(self, name: str, outcomes: Sequence[RewardOutcome]) -> None:
        """Record how long a function takes per completion."""
        mean = sum(outcome.seconds for outcome in outcomes) / max(1, len(outcomes))
        with self._lock:
            before = self._seconds.get(name, mean)
            self._seconds[name] = before + _MEMORY * (mean - before)

    def score(self, samples: Sequence[RewardSample]) -> Scores:
        """Score completions, and wait for the rewards.

        Raises:
            ConfigError: A row is routed to a reward that does not exist, or lacks a column.
            RewardError: A function failed, and `rewards.on_failure` is `raise`.
        """
        return self.submit(samples).result()

    def add_up(self, count: int, outcomes: dict[str, list[RewardOutcome | None]]) -> Scores:
        """Return the weighted sums of the functions' outcomes for `count` completions."""
        totals = [0.0] * count
        scored = [False] * count
        for name, values in outcomes.items():
            weight = self._config.weights.get(name, 1.0)
            for row, outcome in enumerate(values):
                if outcome is None or outcome.kind == "not_applicable":
                    continue
                scored[row] = True
                if outcome.value is not None:
                    totals[row] += weight * outcome.value
                elif self._config.on_failure == "raise":
                    raise RewardError(
                        f"the reward {name} could not score completion {row} ({outcome.kind}): {outcome.message}; with "
                        "rewards.on_failure=drop such completions are left out"
                    )
                elif self._config.on_failure == "drop":
                    # It stays NaN whatever other rewards add.
                    totals[row] = math.nan
        # A completion that no function applies to, or whose environment failed, has no reward, which differs from a reward of 0.
        rewards = [total if has_value else math.nan for total, has_value in zip(totals, scored, strict=True)]
        return Scores(rewards=rewards, outcomes=outcomes)

    def close(self) -> None:
        """End all processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _renamed(self, sample: RewardSample, title: str) -> RewardSample:
        if not self._config.columns:
            return sample
        columns = dict(sample.columns)
        for parameter, column in self._config.columns.items():
            if column not in columns:
                raise ConfigError(
                    f"rewards.columns.{parameter}={column}: {title} has no such column; it has {', '.join(columns) or 'none'}"
                )
            columns[parameter] = columns[column]
        return replace(sample, columns=columns)

    def _routes(self, samples: Sequence[RewardSample], names: Sequence[str] | None = None) -> dict[str, list[int]]:
        route = self._config.route
        # Failed episodes are not scored.
        able = [row for row, sample in enumerate(samples) if not sample.failure]
        if not route:
            return {name: list(able) for name in self.names}
        rows_by_name: dict[str, list[int]] = {name: [] for name in self.names}
        for row in able:
            sample, title = samples[row], _title(row, names)
            names_asked = sample.columns.get(route)
            routed = (
                [part.strip() for part in names_asked.split(",") if part.strip()]
                if isinstance(names_asked, str)
                else names_asked
            )
            if not isinstance(routed, Sequence) or not routed:
                raise ConfigError(
                    f"rewards.route={route}: {title} has {names_asked!r:.80} there; set it to the name of a reward"
                )
            for name in routed:
                if name not in rows_by_name:
                    raise ConfigError(
                        f"rewards.route={route}: {title} is routed to {name!r}, but rewards.use has {', '.join(rows_by_name)}"
                    )
                rows_by_name[name].append(row)
        return rows_by_name

    def _check_columns(
        self, samples: Sequence[RewardSample], asked: Mapping[str, Sequence[int]], names: Sequence[str] | None = None
    ) -> None:
        for name, rows in asked.items():
            needed = self._signatures[name].required - set(self._config.settings.get(name, {}))
            for row in rows:
                if missing := sorted(needed - set(samples[row].columns)):
                    raise ConfigError(
                        f"the reward {name} needs a column {missing[0]}, which {_title(row, names)} does not have (it has "
                        f"{', '.join(samples[row].columns) or 'none'}); select another one with rewards.columns.{missing[0]}, or set "
                        f"rewards.settings.{name}.{missing[0]}"
                    )


def _title(row: int, names: Sequence[str] | None) -> str:
    return f"completion {row}" if names is None else names[row]
