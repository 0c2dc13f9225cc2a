"""Episodes: the turns of the policy and the observations of environments, until each episode has ended.

The tokens of a turn are never tokenized again. The context of the next turn has exactly these tokens, followed by those of the observation:

    prompt | turn 0 | observation | turn 1 | observation | turn 2
             trained                trained                trained

An environment that changes its history starts a branch, which is a separate document; see `generation.trajectories`.
"""

import logging
import queue
import sys
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...engine.errors import ConfigError, DataError
from ...environments.environment import Done, EpisodeRow, Observation, Turn
from ...environments.pool import FAILURE_KINDS, EnvironmentFailure, EnvironmentPool, FailureKind
from ...generation.result import Generation, to_batch
from ...generation.sampling import seed_of
from ...generation.trajectories import PolicyTurn, Trajectory, path_of, trajectories_of
from ..config.rl import RLConfig
from ..data.conversation_tokens import ConversationTokens
from ..data.prompts import Prompt
from ..loop.ranks import TrainerRanks
from .completions import Completion, EpisodeEnd, EpisodeRecord, decoded
from .kept_completions import KeptCompletions
from .prompts import prompt_budget

log = logging.getLogger(__name__)

TURNS = 2**16
"""An upper bound on the completions of a prompt: the seeds of a turn start at its number times this."""
_LOOK_S = 1.0
"""The interval of checks for episodes that take too long, in seconds."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentResult:
    """The result of a call of an environment.

    Args:
        key: The key of the episode.
        value: The return value.
        failure: The kind of failure, if it failed.
        message: The error message.
        settings: The error in its settings, if that is why it failed.
    """

    key: tuple[int, ...]
    value: Observation | Done | None = None
    failure: FailureKind | None = None
    message: str = ""
    settings: ConfigError | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeTurn(PolicyTurn):
    """A turn of an episode.

    Args:
        observation: The messages between the previous turn and this one; empty for a first turn.
        text: Its text.
        routed_experts: The experts that the tokens of its context and of the turn were routed to, if known.
    """

    observation: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    routed_experts: Any = None


@dataclass(kw_only=True, eq=False)
class Episode:
    """An episode that has not ended.

    Args:
        key: Its key in the pool.
        number: The number of its prompt.
        sample: Its index among the episodes of the prompt.
        row: The prompt of the row.
        restarts: How many times it was restarted.
    """

    key: tuple[int, ...]
    number: int
    sample: int
    row: Prompt
    restarts: int = 0
    is_due: bool = False
    """Whether its next turn is due, and not being written yet."""
    is_generating: bool = False
    turns: list[EpisodeTurn] = field(default_factory=list)
    parent: EpisodeTurn | None = None
    """The turn that the next one follows."""
    observed: list[int] = field(default_factory=list)
    """The tokens between the two; without a previous turn, those of the first prompt."""
    observation: tuple[Mapping[str, Any], ...] = ()
    """The messages between the two."""
    stop: tuple[str, ...] = ()
    """The strings at which the next turn ends."""
    max_tokens: int | None = None
    """The number of tokens of the next turn, if the environment limits it."""
    rewards: list[float | None] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    """The numbers of turns that are not trained on."""
    resumable: Generation | None = None
    """The tokens of a turn whose call was cancelled."""

    @property
    def read_turns(self) -> list[EpisodeTurn]:
        """The turns that the agent has read. A turn with a successor counts as read."""
        unread = self.unread - {turn.parent.number for turn in self.turns if turn.parent is not None}
        return [turn for turn in self.turns if turn.number not in unread]

    @property
    def context_ids(self) -> list[int]:
        """The tokens that the policy reads for its next turn."""
        return [*([] if self.parent is None else self.parent.context()), *self.observed]

    @property
    def context_length(self) -> int:
        """The number of these tokens."""
        return sum(self.lengths)

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of tokens in the first prompt of the next turn's conversation, and of the tokens after it."""
        if self.parent is None:
            return len(self.observed), 0
        first, *others = path_of(self.parent)
        behind = len(first.tokens) + sum(len(turn.observed) + len(turn.tokens) for turn in others)
        return len(first.observed), behind + len(self.observed)

    @property
    def context(self) -> Prompt:
        """The context of the next turn, as a prompt."""
        return replace(self.row, ids=self.context_ids)


class Episodes:
    """The episodes of several prompts.

    Args:
        config: The run's settings.
        ranks: The processes of the controller.
        pool: The processes that run environments, in the first of them.
        tokenizer: The tokenizer of the policy.
        conversation: Tokenizes observations.
        title: A number that is unique among the episodes of the pool.
        seed: The seed of the environments.
        positions: The number of positions of the model; None without a limit.
        independent: Whether no episode waits for another one to end.
    """

    def __init__(
        self,
        config: RLConfig,
        ranks: TrainerRanks,
        pool: EnvironmentPool | None,
        tokenizer: Any,
        conversation: ConversationTokens | None,
        *,
        title: int,
        seed: int,
        positions: int | None = None,
        independent: bool = True,
    ) -> None:
        self._config, self._settings, self._ranks, self._pool = config, config.environment, ranks, pool
        self._tokenizer, self._conversation, self._title, self._seed = tokenizer, conversation, title, seed
        self._episodes: dict[tuple[int, ...], Episode] = {}
        self._left: dict[int, int] = {}
        """For each prompt, the number of its episodes that have not ended."""
        self._ended: dict[int, dict[int, list[tuple[Generation, Completion]]]] = {}
        self._results: queue.SimpleQueue[EnvironmentResult] = queue.SimpleQueue()
        self._asked: dict[tuple[int, ...], float] = {}
        """The episodes with a call of their environment in flight from this process, mapped to the time of the call."""
        self._seconds: dict[tuple[int, ...], float] = {}
        """The time that each episode's environment has spent in earlier calls."""
        self._warned: set[str] = set()
        self._positions, self._independent = positions, independent
        longest = prompt_budget(config).tokens
        self._longest = longest if positions is None else min(longest, positions - 1)

    # ---- calls of the generator ------------------------------------------------------------------------------------------

    def begin(self, number: int, prompt: Prompt, samples: int) -> None:
        """Start the episodes of a prompt.

        Args:
            number: The number of the prompt.
            prompt: The prompt.
            samples: The number of episodes.
        """
        self._left[number], self._ended[number] = samples, {}
        for sample in range(samples):
            key = (self._title, number, sample, 0)
            self._reset(Episode(key=key, number=number, sample=sample, row=prompt, observed=prompt.ids))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the prompts whose episodes have started and were not taken yet."""
        return list(self._left)

    @property
    def at_work(self) -> bool:
        """Whether an environment is running."""
        return any(not episode.is_due and not episode.is_generating for episode in self._episodes.values())

    def due(self, most: int | None = None) -> list[Episode]:
        """Return the episodes whose next turn is due, in order, and mark them as being written."""
        # In the order of prompts, and not in that in which environments returned.
        waiting = sorted((one for one in self._episodes.values() if one.is_due), key=lambda one: (one.number, one.sample))[
            :most
        ]
        for episode in waiting:
            episode.is_due, episode.is_generating = False, True
        return waiting

    def room(self, episode: Episode) -> int:
        """Return the maximum number of tokens in the next turn of an episode."""
        first, behind = episode.lengths
        return min(self._config.rollout.max_tokens, episode.max_tokens or sys.maxsize, self._most(first) - behind)

    def _most(self, first: int) -> int:
        """Return the maximum number of tokens after a first prompt of `first` tokens."""
        most = self._config.max_answer_tokens
        return most if self._positions is None else min(most, self._positions - first)

    def give_back(self, episodes: Sequence[Episode]) -> None:
        """Record that the call that was writing turns is lost; they are due again."""
        for episode in episodes:
            episode.is_due, episode.is_generating = True, False

    def take(self, episodes: Sequence[Episode], turns: Sequence[Generation], *, cancelled: bool = False) -> None:
        """Take the written turns, and pass them to the environments.

        Args:
            episodes: The episodes.
            turns: The turn of each.
            cancelled: Whether turns may have ended because their call was cancelled.
        """
        for episode, turn in zip(episodes, turns, strict=True):
            if episode.key not in self._episodes:
                # It has failed in the meantime.
                continue
            episode.is_generating = False
            # Neither the model nor the limit has ended it, so the cancellation has:
            # the next call continues from its tokens.
            if cancelled and not turn.finished and len(turn.response) < self.room(episode):
                episode.resumable, episode.is_due = replace(turn, finish_reason="aborted"), True
                continue
            self._add_turn(episode, turn)

    def _add_turn(self, episode: Episode, turn: Generation) -> None:
        turn, text, stop = self._until_stop(turn, episode.stop)
        context_length = episode.context_length
        added = EpisodeTurn(
            number=len(episode.turns),
            parent=episode.parent,
            observed=tuple(episode.observed),
            tokens=tuple(turn.response),
            log_probs=tuple(turn.log_probs),
            versions=tuple(turn.versions),
            finished=turn.finished,
            observation=episode.observation,
            text=text,
            routed_experts=turn.routed_experts,
        )
        episode.turns.append(added)
        episode.resumable = None
        argument = Turn(
            number=added.number,
            tokens=turn.response,
            text=text,
            finished=turn.finished,
            stop=stop,
            context_length=context_length,
        )
        self._ask(episode, argument)

    def _until_stop(self, turn: Generation, stops: Sequence[str]) -> tuple[Generation, str, str]:
        """Return a turn up to the token that completes the first stop string, its text before the string, and the string."""
        text = decoded(self._tokenizer, turn.response)
        if not any(stop in text for stop in stops):
            return turn, text, ""
        # Once a stop string is complete, it stays in the text of all longer prefixes, so bisection finds
        # the first one with it, and decodes few prefixes.
        count = bisect_left(
            range(len(turn.response)),
            True,
            key=lambda last: any(stop in decoded(self._tokenizer, turn.response[: last + 1]) for stop in stops),
        )
        # From the index of the last token to a number of tokens.
        count = min(count + 1, len(turn.response))
        text = decoded(self._tokenizer, turn.response[:count])
        at, stop = min((at, stop) for stop in stops if (at := text.find(stop)) >= 0)
        routes = turn.routed_experts
        cut = replace(
            turn,
            response=turn.response[:count],
            log_probs=turn.log_probs[:count],
            versions=turn.versions[:count],
            finish_reason="stop",
            routed_experts=None if routes is None else routes[: len(turn.prompt) + count],
        )
        return cut, text[:at], stop

    # ---- calls of environments -------------------------------------------------------------------------------------------

    def _reset(self, episode: Episode) -> None:
        self._episodes[episode.key] = episode
        row, seed = episode.row, seed_of(self._seed, episode.number, episode.sample)
        temperature = self._config.rollout.temperature
        self._ask(episode, EpisodeRow(prompt=row.content, columns=row.columns, seed=seed, temperature=temperature))

    def _ask(self, episode: Episode, argument: EpisodeRow | Turn) -> None:
        """Call an environment, in the process that runs it."""
        # Environments belong to the first process of the controller; the others get their results in `poll`.
        if self._pool is None:
            return
        key = episode.key
        future = self._pool.step(key, argument) if isinstance(argument, Turn) else self._pool.reset(key, argument)
        self._asked[key] = time.monotonic()

        # Called in a thread of the pool, so it only puts the result into the queue.
        def done(ended: Any) -> None:
            error = ended.exception()
            if error is None:
                self._results.put(EnvironmentResult(key=key, value=ended.result()))
            else:
                kind = error.kind if isinstance(error, EnvironmentFailure) else "error"
                settings = error if isinstance(error, ConfigError) else None
                self._results.put(EnvironmentResult(key=key, failure=kind, message=str(error), settings=settings))

        future.add_done_callback(done)

    def poll(self, *, wait: bool) -> None:
        """Take the results of environments.

        Args:
            wait: Whether to wait for at least one, if any is running, or for all with `environment.wait_for_all`.
        """
        for result in self._ranks.run_on_rank0(lambda: self._collect(wait=wait)):
            if (episode := self._episodes.get(result.key)) is not None:
                self._take_result(episode, result)

    @property
    def waits_for_all(self) -> bool:
        """Whether a call of the generator waits for all environments."""
        if not self._independent:
            return False
        if (chosen := self._settings.wait_for_all) is not None:
            return chosen
        return self._config.rl.staleness == 0 and not self._config.rollout.invariant

    def _collect(self, *, wait: bool) -> list[EnvironmentResult]:
        # With a timeout, because an environment that takes too long is noticed by the clock and not by a result.
        results: list[EnvironmentResult] = []
        while self._asked:
            needed = wait and (self.waits_for_all or not results)
            try:
                result = self._results.get(block=needed, timeout=_LOOK_S if needed else None)
            except queue.Empty:
                results += self._late()
                if not needed:
                    break
            else:
                results.append(self._timed(result))
        return results

    def _timed(self, result: EnvironmentResult) -> EnvironmentResult:
        """Return a result, or a failure if its environment has taken too long."""
        if result.settings is not None:
            raise result.settings
        asked_at = self._asked.pop(result.key, None)
        # It was given up on before. Its episode has ended, so `poll` ignores the result.
        if asked_at is None:
            return result
        limit = self._settings.episode_timeout_s
        self._seconds[result.key] = self._seconds.get(result.key, 0.0) + time.monotonic() - asked_at
        return result if limit is None or self._seconds[result.key] <= limit else self._too_late(result.key)

    def _late(self) -> list[EnvironmentResult]:
        """Return the episodes whose environments take too long as failures, and stop waiting for them."""
        limit, now = self._settings.episode_timeout_s, time.monotonic()
        if limit is None:
            return []
        late = [key for key, asked_at in self._asked.items() if self._seconds.get(key, 0.0) + now - asked_at > limit]
        for key in late:
            del self._asked[key]
        return [self._too_late(key) for key in late]

    def _too_late(self, key: tuple[int, ...]) -> EnvironmentResult:
        limit = self._settings.episode_timeout_s
        message = f"its environment has worked for more than environment.episode_timeout_s={limit:g}"
        return EnvironmentResult(key=key, failure="timeout", message=message)

    def _take_result(self, episode: Episode, result: EnvironmentResult) -> None:
        if result.failure == "lost" and episode.restarts < self._settings.restarts:
            self._restart(episode)
            return
        if result.failure is not None:
            self._end(episode, result.failure, result.message)
            return
        if result.value is not None:
            episode.unread |= set(result.value.unread)
        if isinstance(result.value, Done):
            episode.rewards.append(result.value.reward)
            episode.metrics |= {name: float(value) for name, value in result.value.metrics.items()}
            self._end(episode, "done")
        elif result.value is None:
            episode.is_due = True
        else:
            self._observe(episode, result.value)

    def _restart(self, episode: Episode) -> None:
        """Restart an episode whose process died, possibly because of another episode."""
        self._close(episode)
        # The key counts attempts, so that results of the earlier process are not taken for those of the new one.
        *names, attempt = episode.key
        self._reset(
            Episode(
                key=(*names, attempt + 1),
                number=episode.number,
                sample=episode.sample,
                row=episode.row,
                observed=episode.row.ids,
                restarts=episode.restarts + 1,
            )
        )

    def _observe(self, episode: Episode, observation: Observation) -> None:
        try:
            parent, tokens = self._next(episode, observation)
        except DataError as e:
            self._end(episode, "invalid", str(e))
            return
        # The first observation has no turn before it that it could reward.
        if episode.turns:
            episode.rewards.append(observation.reward)
        if len(episode.turns) >= self._settings.max_turns:
            self._end(episode, "max_turns")
            return
        episode.parent, episode.observed = parent, tokens
        episode.stop, episode.max_tokens = tuple(observation.stop), observation.max_tokens
        episode.observation = tuple(dict(message) for message in observation.messages) or (
            {"role": "tool", "content": decoded(self._tokenizer, tokens) if observation.text is None else observation.text},
        )
        # The next turn needs room for at least one token.
        first, behind = episode.lengths
        if first > self._longest or behind >= self._most(first):
            self._end(episode, "max_tokens")
        else:
            episode.is_due = True

    def _next(self, episode: Episode, observation: Observation) -> tuple[EpisodeTurn | None, list[int]]:
        """Return the turn that an observation follows, and its tokens.

        Raises:
            DataError: The chat template cannot render it, a token is not in the vocabulary, there is no such turn, or the first prompt is
                too long.
        """
        parent = self._parent(episode, observation.after)
        if observation.tokens is not None:
            tokens = list(observation.tokens)
            if not tokens or not 0 <= min(tokens) <= max(tokens) < len(self._tokenizer):
                raise DataError(
                    f"an observation has the tokens {tokens[:8]}; there must be at least one, and all must be below {len(self._tokenizer)}"
                )
            return parent, tokens
        assert self._conversation is not None
        last = None if parent is None else parent.context()[-1]
        if observation.text is not None:
            tokens = self._conversation.text(observation.text, last)
        else:
            try:
                tokens = self._conversation.messages(observation.messages, last, observation.tools)
            except DataError as e:
                if parent is None or not observation.history:
                    raise
                self._warn("history", "a conversation is rendered again from its beginning, as a separate document: %s", e)
                parent = None
                whole = [*observation.history, *observation.messages]
                tokens = self._conversation.messages(whole, None, observation.tools)
        if parent is None and not tokens:
            raise DataError("an observation that begins a conversation has no tokens")
        if not episode.turns and len(tokens) > self._longest:
            raise DataError(
                f"the first observation has {len(tokens)} tokens, more than the {self._longest} that fit with an episode"
            )
        return parent, tokens

    @staticmethod
    def _parent(episode: Episode, after: int | None) -> EpisodeTurn | None:
        if after is None:
            return episode.turns[-1] if episode.turns else None
        if after >= len(episode.turns):
            raise DataError(
                f"an observation follows turn {after}, but there are {len(episode.turns)} turns, which are numbered from 0"
            )
        return None if after < 0 else episode.turns[after]

    def _warn(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *values)

    def _end(self, episode: Episode, end: EpisodeEnd, message: str = "") -> None:
        """End an episode."""
        # Turns that the agent has not read had no effect on the episode, so its reward says nothing about them.
        trajectories = trajectories_of(episode.read_turns)
        if end not in FAILURE_KINDS and not trajectories:
            end, message = "invalid", "no turn has tokens that the agent has read"
        if message:
            text = "the environment of an episode of %s failed, and the episode is left out (%s: %s); further failures are counted in the metrics"
            self._warn(end, text, episode.row.name, end, message)
        self._close(episode)
        self._ended[episode.number][episode.sample] = self._documents(episode, trajectories, end, message)
        self._left[episode.number] -= 1

    def _documents(
        self, episode: Episode, trajectories: list[Trajectory[EpisodeTurn]], end: EpisodeEnd, message: str
    ) -> list[tuple[Generation, Completion]]:
        if not trajectories:
            ids = episode.observed if episode.parent is None else episode.row.ids
            empty = Generation(prompt=list(ids), response=[], log_probs=[], sampled=[])
            trajectories = [Trajectory(turns=(), new=0, spans=(), generation=empty)]
        rewards = [*episode.rewards, *([None] * (len(episode.turns) - len(episode.rewards)))]
        documents = []
        for number, trajectory in enumerate(trajectories):
            is_last = number == len(trajectories) - 1
            generation, new = trajectory.generation, trajectory.new
            if trajectory.turns:
                generation = replace(generation, routed_experts=trajectory.turns[-1].routed_experts)
            # An episode that its environment did not end counts as truncated, like a completion at its length limit.
            if is_last and end != "done":
                generation = replace(generation, finish_reason="length")
            learned = trajectory.turns[new:]
            numbers = {turn.number for turn in learned}
            others = [reward for i, reward in enumerate(rewards) if reward is not None and i not in numbers]
            own_prompt = generation.prompt != episode.row.ids
            record = EpisodeRecord(
                end=end,
                turns=_messages(trajectory.turns),
                spans=trajectory.spans[new:],
                turn_rewards=tuple(rewards[turn.number] for turn in learned),
                metrics=episode.metrics,
                message=message,
                own_prompt=own_prompt,
                sample=episode.sample,
                document=number,
                documents=len(trajectories),
                first_turn=new,
                other_rewards=sum(others) if others else None,
            )
            completion = Completion(
                prompt=replace(episode.row, ids=generation.prompt) if own_prompt else episode.row,
                group=episode.number,
                tokens=generation.response,
                text=decoded(self._tokenizer, generation.response[slice(*record.last_span)]),
                finished=generation.finished,
                versions=tuple(sorted({*generation.versions} - {-1})),
                episode=record,
            )
            documents.append((generation, completion))
        return documents

    def _close(self, episode: Episode) -> None:
        del self._episodes[episode.key]
        self._asked.pop(episode.key, None)
        self._seconds.pop(episode.key, None)
        if self._pool is not None:
            self._pool.close_episode(episode.key)

    # ---- ended episodes --------------------------------------------------------------------------------------------------

    def take_complete(self) -> dict[int, KeptCompletions]:
        """Return the episodes of prompts whose episodes have all ended, by the number of the prompt; each prompt only once."""
        complete = {}
        for number in [number for number, left in self._left.items() if not left]:
            del self._left[number]
            ended = self._ended.pop(number)
            # In the order of samples, and not in that of their ends, which depends on time.
            pairs = [pair for sample in sorted(ended) for pair in ended[sample]]
            complete[number] = KeptCompletions(
                batch=to_batch([generation for generation, _ in pairs]), rows=tuple(completion for _, completion in pairs)
            )
        return complete


def _messages(turns: Sequence[EpisodeTurn]) -> tuple[Mapping[str, Any], ...]:
    """Return turns and the observations between them as messages."""
    messages: list[Mapping[str, Any]] = []
    for number, turn in enumerate(turns):
        messages += [*(turn.observation if number else ()), {"role": "assistant", "content": turn.text}]
    return tuple(messages)
