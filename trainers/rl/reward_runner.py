"""Rewards of a run: functions run in separate processes while the workers keep running."""

import logging
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace

from ...engine.errors import ConfigError, RewardError
from ...rewards.pool import RewardTarget
from ...rewards.sample import OUTCOME_KINDS, RewardSample
from ...rewards.scorer import PendingScores, RewardScorer, Scores
from ..config.rl import REWARD_MODEL, RLConfig
from ..data.prompts import PromptSet
from ..loop.ranks import TrainerRanks
from .completions import Completion, episodes_of, scored_only

log = logging.getLogger(__name__)
SHOWN = 80
"""The maximum number of characters of a completion in a message."""


class RewardRunner:
    """The reward functions of a run, which one process of the controller calls.

    Args:
        config: The run's settings.
        functions: Reward functions of the program, in addition to those of `rewards.use`.
        ranks: The processes of the controller.

    Raises:
        ConfigError: There is no reward, or one cannot be used.
    """

    def __init__(self, config: RLConfig, functions: Sequence[RewardTarget], ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._scorer: RewardScorer | None = None
        self._shown: set[str] = set()

        def start() -> list[str]:
            self._scorer = RewardScorer(config.rewards, functions, models=(REWARD_MODEL,))
            return self._scorer.names

        # One process of the controller scores all completions, since a reward may compare them with each other.
        self.names: list[str] = ranks.run_on_rank0(start)
        """The names of the rewards."""
        if (eval_reward := config.rl.eval_reward) is not None and eval_reward not in self.names:
            self.close()
            raise ConfigError(f"rl.eval_reward={eval_reward} is not one of the rewards; they are {', '.join(self.names)}")

    @property
    def asks_model(self) -> bool:
        """Whether the reward model is one of the rewards."""
        return REWARD_MODEL in self.names

    def check(self, sets: Sequence[PromptSet]) -> None:
        """Check that all prompts have the columns that their rewards need.

        Raises:
            ConfigError: A prompt lacks a column; the message names its file and row.
        """

        def check() -> None:
            assert self._scorer is not None
            for prompts in sets:
                all_prompts = [prompts[i] for i in range(len(prompts))]
                samples = [
                    RewardSample(prompt=prompt.content, completion="", columns=prompt.columns) for prompt in all_prompts
                ]
                self._scorer.check(samples, [prompt.name for prompt in all_prompts])

        self._ranks.run_on_rank0(check)

    def submit(self, completions: Sequence[Completion]) -> PendingScores | None:
        """Start to score completions, and return immediately; None in a process that computes no rewards.

        Of an episode with several documents, the last one is scored.

        Raises:
            ConfigError: A completion lacks a column that a reward needs.
        """
        if self._scorer is None:
            return None
        return self._scorer.submit([completion.sample() for completion in scored_only(completions)])

    def result(
        self, rows: Sequence[Completion], pending: Sequence[PendingScores | None], model: Sequence[float] | None
    ) -> tuple[list[Completion], dict[str, float]]:
        """Wait for the rewards of completions.

        Args:
            rows: The completions.
            pending: The result of `submit` for each part of them.
            model: The reward model's score of each completion, if there is one.

        Returns:
            The completions with their rewards, and the number of outcomes of each kind, by the name of the reward.

        Raises:
            RewardError: A function failed, and `rewards.on_failure` is `raise`.
        """

        everything, places = rows, episodes_of(rows)
        rows = scored_only(everything)
        # Of an episode, only the score of the document that is scored counts, which is at its own place.
        model = None if model is None else [model[place] for i, place in enumerate(places) if place == i]

        def wait() -> list[Scores] | RewardError:
            scores, first = [], 0
            for part in pending:
                assert part is not None
                # Scores of the model are for all rows, pending rewards for consecutive parts of them.
                values = None if model is None else {REWARD_MODEL: model[first : first + len(part)]}
                try:
                    scores.append(part.result(models=values))
                except RewardError as e:
                    # All processes must raise this error, since they save together afterwards.
                    return e
                first += len(part)
            return scores

        scores = self._ranks.run_on_rank0(wait)
        if isinstance(scores, RewardError):
            raise scores
        scored: list[Completion] = []
        counts: dict[str, float] = {}
        messages: dict[str, tuple[Completion, str]] = {}
        for part in scores:
            for i, reward in enumerate(part.rewards):
                values = {}
                for name, outcomes in part.outcomes.items():
                    outcome = outcomes[i]
                    if outcome is not None and outcome.value is not None:
                        values[name] = outcome.value
                    elif outcome is not None and outcome.message:
                        messages.setdefault(name, (rows[len(scored)], f"{outcome.kind}: {outcome.message}"))
                scored.append(replace(rows[len(scored)], reward=reward, rewards=values))
            for name in part.outcomes:
                for kind, count in part.counts(name).items():
                    counts[f"{kind}/{name}"] = counts.get(f"{kind}/{name}", 0) + count
        self._warn(messages)
        # All documents of an episode get the reward of the one that was scored.
        by_place = dict(zip((i for i, place in enumerate(places) if place == i), scored, strict=True))
        scored = [
            replace(row, reward=by_place[place].reward, rewards=by_place[place].rewards)
            for row, place in zip(everything, places, strict=True)
        ]
        return scored, {name: count for name, count in counts.items() if count and not name.startswith(f"{OUTCOME_KINDS[0]}/")}

    def _warn(self, messages: Mapping[str, tuple[Completion, str]]) -> None:
        for name, (completion, message) in messages.items():
            if name not in self._shown:
                self._shown.add(name)
                log.warning(
                    "the reward %s could not score a completion of %s, %r (%s); further failures are counted in the metrics",
                    name,
                    completion.prompt.name,
                    completion.text[:SHOWN],
                    message,
                )

    def close(self) -> None:
        """Stop the processes."""
        if self._scorer is not None:
            self._scorer.close()


def check_scored(completions: Sized, counts: Mapping[str, float]) -> None:
    """Check that completions are left after those without a reward were dropped.

    Args:
        completions: The remaining completions.
        counts: The counts of the others: `dropped`, and the outcomes by kind and reward.

    Raises:
        RewardError: None is left; the message has the counts of the outcomes.
    """
    if not len(completions):
        failures = (
            ", ".join(f"{name} {count:.0f}" for name, count in counts.items() if "/" in name) or "no reward was responsible"
        )
        raise RewardError(
            f"none of {counts.get('dropped', 0):.0f} completions could be scored ({failures}), so there is nothing to train on"
        )
