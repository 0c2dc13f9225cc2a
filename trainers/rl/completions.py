"""Completions to prompts, as the controller sees them: their text here, their tensors with the workers."""

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
"""How an episode has ended: by its environment, at a limit, or because the environment failed; see `environments.pool`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """What happened in an episode. One that branches has several documents; each turn is learned in one of them, and the last one is judged for all.

    Args:
        end: How it has ended.
        turns: The turns of the policy (role `assistant`) in this document and the observations between them, as messages.
        spans: For each turn that is learned here, where its tokens begin and end behind the prompt.
        turn_rewards: The reward of each of them; None where the environment gave none.
        metrics: Numbers of the environment.
        message: What went wrong, if the environment failed.
        own_prompt: Whether the environment has written what the policy read first.
        sample: The number of the episode among those of its prompt.
        document: The number of this document among those of the episode.
        documents: How many there are.
        first_turn: The number of turns before the first one that is learned here.
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
        """Return what happened in an episode, from its fields in JSON, which knows no tuples.

        Raises:
            TypeError: They are something else.
            KeyError: One is missing.
        """
        spans = tuple((int(begin), int(end)) for begin, end in record["spans"])
        others = {name: tuple(record[name]) for name in ("turns", "turn_rewards")}
        return cls(**{**record, **others, "spans": spans})

    @property
    def failure(self) -> str:
        """The kind of the environment's failure; empty if it has not failed."""
        return self.end if self.end in FAILURE_KINDS else ""

    @property
    def last_span(self) -> tuple[int, int]:
        """Where the tokens of the last turn begin and end behind the prompt."""
        return self.spans[-1] if self.spans else (0, 0)

    @property
    def reward(self) -> float | None:
        """The sum of the rewards. Without any, 0 if the episode has come to a limit, where nothing was earned, and else None."""
        rewards = [reward for reward in (*self.turn_rewards, self.other_rewards) if reward is not None]
        return sum(rewards) if rewards else 0.0 if self.end in ("max_turns", "max_tokens") else None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A completion to a prompt: an answer, or an episode.

    Args:
        prompt: The prompt.
        group: The number of the prompt in the run, or in an evaluation.
        tokens: The token ids behind the prompt; of an episode those of turns and observations.
        text: The completion without special tokens; of an episode its last turn.
        finished: Whether it was ended by the model, and not by a limit.
        versions: The versions of the weights that made its tokens, each once.
        rewards: What each reward made of it, by name; without those that had no value.
        reward: The weighted sum; NaN if it has none.
        baseline: The reward of the most likely completion to the same prompt, if the algorithm compares with it.
        episode: What happened in the episode, if there is an environment.
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
    def is_judged(self) -> bool:
        """Whether it is judged itself: of the documents of an episode only the last one is."""
        return self.episode is None or self.episode.document == self.episode.documents - 1

    @property
    def written(self) -> list[int]:
        """The tokens that the policy has written, without observations and what is learned in another document."""
        if self.episode is None:
            return self.tokens
        return [token for begin, end in self.episode.spans for token in self.tokens[begin:end]]

    def goes_on(self, max_tokens: int) -> bool:
        """Return whether it ended because its call was cancelled: neither by the model nor by the length limit."""
        return not self.finished and len(self.tokens) < max_tokens

    def sample(self) -> RewardSample:
        """Return what a reward function is given."""
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
    """Completions, and where their tensors are.

    Args:
        ref: The samples, each a prompt with its completion.
        rows: The completions, in the same order.
        pending: The rewards that are being computed, for each part of the rows in turn; None in it in a process that computes none.
        model_scores: What the reward model made of each completion, if it was asked.
        baselines: The most likely completion to each prompt, if the algorithm needs it.
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
        """The number of each completion's prompt."""
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
    """Return several batches of completions that nothing has been computed for yet as one.

    Args:
        parts: The batches, at least one; the completions of different ones are to different prompts.
    """
    first = parts[0]
    rows = tuple(row for part in parts for row in part.rows)
    ref = DataRef.of(first.ref.buffer, [sample for part in parts for sample in part.ref.ids])
    # An update may distribute the completions to a prompt.
    ref = replace(ref, extra_fields=first.ref.extra_fields).without_groups().with_prefixes(prefixes_of(rows))
    baselines = [part.baselines for part in parts if part.baselines is not None]
    return Completions(
        ref=ref,
        rows=rows,
        pending=tuple(pending for part in parts for pending in part.pending),
        baselines=join(baselines) if baselines else None,
    )


def split(completions: Completions) -> dict[int, Completions]:
    """Return the completions to each prompt by themselves, by the number of the prompt.

    Args:
        completions: Completions whose rewards are not being computed yet.
    """
    rows: dict[int, list[int]] = {}
    for i, group in enumerate(completions.groups):
        rows.setdefault(group, []).append(i)
    baselines = {} if completions.baselines is None else split(completions.baselines)
    return {group: replace(completions.select(indices), baselines=baselines.get(group)) for group, indices in rows.items()}


def prefixes_of(rows: Sequence[Completion]) -> Prefixes:
    """Return which completions begin alike: those to one prompt, which an environment may have written for each anew."""
    numbers: dict[Any, int] = {}
    prompts = [
        (row.group, tuple(row.prompt.ids) if row.episode is not None and row.episode.own_prompt else ()) for row in rows
    ]
    for prompt in prompts:
        numbers.setdefault(prompt, len(numbers))
    return Prefixes.of_prompts([numbers[prompt] for prompt in prompts], [len(row.prompt.ids) for row in rows])


def judged_only(completions: Sequence[Completion]) -> list[Completion]:
    """Return the completions that are judged themselves: each episode counts once."""
    return [completion for completion in completions if completion.is_judged]


def episodes_of(completions: Sequence[Completion]) -> list[int]:
    """Return for each completion the place of the one that is judged for it, which follows it: its own, or that of the last document of its episode."""
    places: list[int] = []
    judged = len(completions) - 1
    for i in reversed(range(len(completions))):
        if completions[i].is_judged:
            judged = i
        places.append(judged)
    return places[::-1]


def equal_groups(completions: Sequence[Completion]) -> set[int]:
    """Return the groups in which all rewards are equal, those of a single completion among them."""
    rewards: dict[int, set[float]] = {}
    for completion in completions:
        rewards.setdefault(completion.group, set()).add(completion.reward)
    return {group for group, values in rewards.items() if len(values) == 1}
