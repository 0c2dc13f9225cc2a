"""The collection of a step's completions."""

import logging
from collections.abc import Sequence

from ..config.rl import RLConfig
from .completions import Completions, equal_groups, join
from .phases import Phases
from .reward_runner import check_scored
from .rollouts import Rollouts

log = logging.getLogger(__name__)


class Collector:
    """Collects the completions of steps.

    Args:
        config: The run's settings.
        phases: The phases.
        rollouts: The completions of the run's tickets.
    """

    def __init__(self, config: RLConfig, phases: Phases, rollouts: Rollouts) -> None:
        self._config, self._phases, self._rollouts = config, phases, rollouts
        self._equal_steps = 0
        self._warned: set[str] = set()

    def collect(self) -> Completions:
        """Return the completions of a step, whose rewards are being computed.

        They are the groups of the next tickets, in order.
        """
        parts: list[Completions] = []
        while not self._rollouts.tickets.is_full:
            for _ in self._rollouts.answered(self._missing):
                parts.append(self._rollouts.keep())
        return join(parts)

    def collect_with_dynamic_sampling(self) -> tuple[Completions, dict[str, float]]:
        """Return the completions of a step with dynamic sampling: their rewards are known, and groups whose rewards are all equal are dropped.

        Source: DAPO, arXiv:2503.14476, section 3.2.

        Returns:
            The completions, and the counts of dropped ones.

        Raises:
            RewardError: Too many completions could not be scored.
        """
        most = self._config.rl.max_resamples * self._config.data.batch_size
        parts: list[Completions] = []
        totals: dict[str, float] = {}
        replaced = equal = 0
        while not self._rollouts.tickets.is_full:
            for number, counts in self._score(self._rollouts.answered(self._missing)):
                for name, count in counts.items():
                    totals[name] = totals.get(name, 0.0) + count
                completions = self._rollouts.completions(number)
                has_signal = bool(completions.rows) and not equal_groups(completions.rows)
                # Past the bound, groups with equal rewards are kept, so that the step ends.
                if not has_signal and replaced < most:
                    self._phases.discard(self._rollouts.drop().ref)
                    replaced += 1
                    continue
                equal += not has_signal
                parts.append(self._rollouts.keep())
        if equal:
            self._warn_once(
                "resamples",
                "step %d has %d groups with equal rewards, because %d groups were already replaced (rl.max_resamples=%d times the prompts "
                "of a step); the task may be too hard or too easy for the policy",
                self._rollouts.tickets.version + 1,
                equal,
                replaced,
                self._config.rl.max_resamples,
            )
        check_scored([row for part in parts for row in part.rows], totals)
        return join([part for part in parts if part.rows]), {**totals, "replaced_groups": float(replaced)}

    @property
    def _missing(self) -> int:
        """Return the number of groups that the step still needs."""
        return self._rollouts.tickets.batch - self._rollouts.tickets.kept

    def _score(self, numbers: Sequence[int]) -> list[tuple[int, dict[str, float]]]:
        """Wait for the rewards of several prompts' completions together, with a single call of the reward model."""
        # One call for all groups: with roles that take turns, every call may move models between host and device.
        parts = self._phases.ask_reward_model([self._rollouts.completions(number) for number in numbers])
        outcomes = []
        for number, part in zip(numbers, parts, strict=True):
            scored, counts = self._phases.collect_rewards(part)
            self._rollouts.replace(number, scored)
            outcomes.append((number, counts))
        return outcomes

    def warn(self, metrics: dict[str, float]) -> None:
        """Warn about a run without a learning signal.

        Args:
            metrics: The metrics of a step.
        """
        self._equal_steps = self._equal_steps + 1 if metrics.get("equal_groups", 0.0) >= 1 else 0
        # Equal, not at least: one warning for each series of such steps.
        if self._equal_steps == self._config.rl.warn_equal_steps and self._config.rl.group_size > 1:
            log.warning(
                "in the last %d steps all completions of each prompt had equal rewards (%s), which carries no learning signal; check the "
                "rewards on the sample completions, use easier prompts, or raise rl.group_size or rollout.temperature",
                self._equal_steps,
                ", ".join(f"{name} {value:.3g}" for name, value in metrics.items() if name.startswith("reward/")),
            )
        at_limits = metrics.get("max_turns", 0.0) + metrics.get("max_tokens", 0.0)
        if at_limits >= 1:
            self._warn_once(
                "limits",
                "all episodes of a step reached a limit: environment.max_turns=%d (%.0f%%) or environment.max_tokens=%d; raise it, or check that the "
                "environment ends them (Done)",
                self._config.environment.max_turns,
                100 * metrics.get("max_turns", 0.0),
                self._config.max_answer_tokens,
            )
        elif metrics.get("truncated", 0.0) >= 1:
            self._warn_once(
                "truncated",
                "all completions of a step reached rollout.max_tokens=%d without an end; raise it, or check that the model's "
                "eos_token_id (generation_config.json) is the token that ends its completions",
                self._config.rollout.max_tokens,
            )

    def _warn_once(self, what: str, message: str, *values: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning(message, *values)
