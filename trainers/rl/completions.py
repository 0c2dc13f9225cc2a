"""Completions of prompts, as the controller sees them: it has their text, and the workers have their tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from ...engine.packing.prefixes import Prefixes
from ...environments.pool import FAILURE_KINDS
from ...rewards.sample import RewardSample
from ...rewards.scorer import PendingScores
from ...workers.data_plane.data_ref import DataRef
from ..data.prompts import Prompt

EpisodeEnd = Literal["done", "max_turns", "max_tokens", "error", "invalid", "timeout", "lost"]
"""How an episode ended: by its environment, at a limit, or because the environment failed; see `environments.pool`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """The record of an episode. One that branches has several documents; each turn is trained on in one of them, and the last document is scored for all.

    Args:
        end: How it ended.
        turns: The turns of the policy (role `assistant`) in this document and the observations between them, as messages.
        spans: For each turn that is trained on in this document, the start and the end of its tokens, relative to the end of the prompt.
        turn_rewards: The reward of each of these turns; None where the environment gave none.
        metrics: Numbers of the environment.
        message: The error message, if the environment failed.
        own_prompt: Whether the environment wrote the first prompt of the policy.
        sample: The index of the episode among those of its prompt.
        document: The index of this document among those of the episode.
        documents: The number of documents of the episode.
        first_turn: The number of turns before the first one that is trained on in this document.
        other_rewards: The sum of the rewards of turns in other documents; None if they have none.
    """

    end: EpisodeEnd
    turns: tuple[Mapping[str, Any], ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    turn_rewards: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    message: str = ""
    own_prompt: bool = False
    sample: int = 0
    document: int = 0
    documents: int = 1
    first_turn: int = 0
    other_rewards: float | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Return the record of an episode from its JSON fields, in which lists stand for tuples.

        Raises:
            TypeError: A field has the wrong type.
            KeyError: A field is missing.
        """
        spans = tuple((int(begin), int(end)) for begin, end in record["spans"])
        others = {name: tuple(record[name]) for name in ("turns", "turn_rewards")}
        return cls(**{**record, **others, "spans": spans})

    @property
    def failure(self) -> str:
        """The kind of the environment's failure; empty if it did not fail."""
        return self.end if self.end in FAILURE_KINDS else ""

    @property
    def last_span(self) -> tuple[int, int]:
        """The start and the end of the last turn's tokens, relative to the end of the prompt."""
        return self.spans[-1] if self.spans else (0, 0)

    @property
    def reward(self) -> float | None:
        """The sum of the rewards. If there are none, 0 for an episode that reached a limit, and otherwise None."""
        # An environment may give its only reward at the end, which an episode at a
        # limit has not reached: it has earned 0.
        rewards = [reward for reward in (*self.turn_rewards, self.other_rewards) if reward is not None]
        return sum(rewards) if rewards else 0.0 if self.end in ("max_turns", "max_tokens") else None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A completion of a prompt: a single turn, or an episode.

    Args:
        prompt: The prompt.
        group: The number of the prompt in the run, or in an evaluation.
        tokens: The token ids after the prompt; for an episode, those of turns and observations.
        text: The completion without special tokens; for an episode, its last turn.
        finished: Whether it was ended by the model, and not by a limit.
        versions: The versions of the weights that generated its tokens, each once.
        rewards: The value of each reward by name, without those that returned none.
        reward: The weighted sum of the rewards; NaN if it has none.
        baseline: The reward of the greedy completion of the same prompt, if the algorithm compares with it.
        episode: The record of the episode, if there is an environment.
    """

    prompt: Prompt
    group: int
    tokens: list[int]
    text: str
    finished: bool
    versions: tuple[int, ...] = ()
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = float("nan")
    baseline: float | None = None
    episode: EpisodeRecord | None = None

    @property
    def is_scored(self) -> bool:
        """Whether it is scored itself: of an episode's documents, only the last one is."""
        return self.episode is None or self.episode.document == self.episode.documents - 1

    @property
    def written(self) -> list[int]:
        """The tokens that the policy has written, without observations and turns that are trained on in another document."""
        if self.episode is None:
            return self.tokens
        return [token for begin, end in self.episode.spans for token in self.tokens[begin:end]]

    def is_unfinished(self, max_tokens: int) -> bool:
        """Return whether it ended because its call was cancelled: neither by the model nor by the length limit."""
        return not self.finished and len(self.tokens) < max_tokens

    def sample(self) -> RewardSample:
        """Return the argument of a reward function."""
        episode = self.episode
        return RewardSample(
            prompt=self.prompt.content,
            completion=self.text,
            completion_ids=self.written,
            truncated=not self.finished,
            columns=self.prompt.columns,
            turns=() if episode is None else episode.turns,
            environment_reward=None if episode is None else episode.reward,
            failure="" if episode is None else episode.failure,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Completions:
    """Completions, with references to their tensors.

    Args:
        ref: The samples, each a prompt with its completion.
        rows: The completions, in the same order.
        pending: The pending rewards, for consecutive parts of the rows; entries are None in a process that computes no rewards.
        model_scores: The reward model's score of each completion, if it was called.
        baselines: The greedy completion of each prompt, if the algorithm needs it.
    """

    ref: DataRef
    rows: tuple[Completion, ...]
    pending: tuple[PendingScores | None, ...] = ()
    model_scores: tuple[float, ...] | None = None
    baselines: "Completions | None" = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def groups(self) -> list[int]:
        """The number of the prompt of each completion."""
        return [row.group for row in self.rows]

    def select(self, indices: Sequence[int]) -> Self:
        """Return some of the completions."""
        scores = None if self.model_scores is None else tuple(self.model_scores[i] for i in indices)
        return replace(self, ref=self.ref.select(indices), rows=tuple(self.rows[i] for i in indices), model_scores=scores)

    def with_columns(self, ref: DataRef) -> Self:
        """Return the completions with further columns."""
        return replace(self, ref=self.ref | ref)


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of a completion, without special tokens."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def join(parts: Sequence[Completions]) -> Completions:
    """Concatenate batches of completions that have no computed columns yet.

    Args:
        parts: The batches, at least one; different batches have completions of different prompts.
    """
    first = parts[0]
    rows = tuple(row for part in parts for row in part.rows)
    ref = DataRef.of(first.ref.buffer, [sample for part in parts for sample in part.ref.ids])
    # An update may distribute the completions of a prompt over ranks.
    ref = replace(ref, extra_fields=first.ref.extra_fields).without_groups().with_prefixes(prefixes_of(rows))
    baselines = [part.baselines for part in parts if part.baselines is not None]
    return Completions(
        ref=ref,
        rows=rows,
        pending=tuple(pending for part in parts for pending in part.pending),
        baselines=join(baselines) if baselines else None,
    )


def split(completions: Completions) -> dict[int, Completions]:
    """Split completions by prompt, keyed by the number of the prompt.

    Args:
        completions: Completions whose rewards are not being computed yet.
    """
    rows: dict[int, list[int]] = {}
    for i, group in enumerate(completions.groups):
        rows.setdefault(group, []).append(i)
    baselines = {} if completions.baselines is None else split(completions.baselines)
    return {group: replace(completions.select(indices), baselines=baselines.get(group)) for group, indices in rows.items()}


def prefixes_of(rows: Sequence[Completion]) -> Prefixes:
    """Return which completions share a prefix: those of one prompt, unless the environment has written a prompt for each."""
    numbers: dict[Any, int] = {}
    prompts = [
        (row.group, tuple(row.prompt.ids) if row.episode is not None and row.episode.own_prompt else ()) for row in rows
    ]
    for prompt in prompts:
        numbers.setdefault(prompt, len(numbers))
    return Prefixes.of_prompts([numbers[prompt] for prompt in prompts], [len(row.prompt.ids) for row in rows])


def scored_only(completions: Sequence[Completion]) -> list[Completion]:
    """Return the completions that are scored themselves, one per episode."""
    return [completion for completion in completions if completion.is_scored]


def episodes_of(completions: Sequence[Completion]) -> list[int]:
    """Return for each completion the index of the one that is scored for it: its own, or that of its episode's last document, which follows it."""
    places: list[int] = []
    scored = len(completions) - 1
    # Backwards, since the document that is scored is the last one of its episode.
    for i in reversed(range(len(completions))):
        if completions[i].is_scored:
            scored = i
        places.append(scored)
    return places[::-1]


def equal_groups(completions: Sequence[Completion]) -> set[int]:
    """Return the groups in which all rewards are equal, including those of a single completion."""
    rewards: dict[int, set[float]] = {}
    for completion in completions:
        rewards.setdefault(completion.group, set()).add(completion.reward)
    return {group for group, values in rewards.items() if len(values) == 1}
