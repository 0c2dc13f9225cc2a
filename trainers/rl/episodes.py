"""Episodes: the turns of the policy, and what environments answer to them, until each has ended.

What the policy has written in a turn is never tokenized again. The next turn begins with exactly these tokens, behind which the tokens of
the observation are put:

    prompt | turn 0 | observation | turn 1 | observation | turn 2
             learned                learned                learned
"""

import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...engine.errors import DataError
from ...environments.environment import Done, EpisodeRow, Observation, Turn
from ...environments.pool import EnvironmentFailure, EnvironmentPool, FailureKind
from ...generation.result import Generation, to_batch
from ...generation.sampling import seed_of
from ..config.rl import RLConfig
from ..data.continuation import Continuation
from ..data.prompts import Prompt
from ..loop.ranks import TrainerRanks
from .completions import Completion, EpisodeEnd, EpisodeRecord, decoded
from .kept_completions import KeptCompletions
from .prompts import prompt_budget

log = logging.getLogger(__name__)

TURNS = 2**16
"""More than the responses to a prompt: the seeds of a turn begin at its number times this."""
_LOOK_S = 1.0
"""How often one looks for episodes that take too long."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentResult:
    """What has become of a call of an environment.

    Args:
        key: The episode.
        value: What it has returned.
        failure: How it has failed, if it has.
        message: What went wrong.
    """

    key: tuple[int, ...]
    value: Observation | Done | None = None
    failure: FailureKind | None = None
    message: str = ""


@dataclass(kw_only=True, eq=False)
class Episode:
    """An episode that has not ended.

    Args:
        key: Its key at the pool.
        number: The number of its prompt.
        sample: Its number among those of the prompt.
        row: The prompt of the row.
        restarts: How often it has begun anew.
    """

    key: tuple[int, ...]
    number: int
    sample: int
    row: Prompt
    restarts: int = 0
    first: list[int] | None = None
    """The tokens that the policy reads first, if they are not those of the row."""
    is_due: bool = False
    """Whether the policy has to write its next turn, and does not yet."""
    is_generating: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    finished: bool = False
    """Whether the policy has ended its last turn."""
    routed_experts: Any = None
    begun: Generation | None = None
    """The tokens of a turn whose call was cancelled."""

    @property
    def prompt(self) -> Prompt:
        """What the policy reads first."""
        return self.row if self.first is None else replace(self.row, ids=self.first)

    @property
    def context_length(self) -> int:
        """The number of tokens that the policy reads for its next turn."""
        return len(self.prompt.ids) + len(self.tokens)

    @property
    def context(self) -> Prompt:
        """What the policy reads for its next turn."""
        return replace(self.row, ids=[*self.prompt.ids, *self.tokens])

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], versions: Sequence[int], *, sampled: bool) -> None:
        """Add tokens of a turn or an observation."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.versions += versions
        self.sampled += [sampled] * len(tokens)


class Episodes:
    """The episodes of several prompts.

    Args:
        config: The run's settings.
        ranks: The processes of the controller.
        pool: The processes that run environments, in the first of them.
        tokenizer: The tokenizer of the policy.
        continuation: What the chat template writes behind a turn; None without a chat template.
        title: A number that other episodes of the same pool do not have.
        seed: The seed of what environments draw.
        positions: The number of positions of the model; None without a limit.
    """

    def __init__(
        self,
        config: RLConfig,
        ranks: TrainerRanks,
        pool: EnvironmentPool | None,
        tokenizer: Any,
        continuation: Continuation | None,
        *,
        title: int,
        seed: int,
        positions: int | None = None,
    ) -> None:
        self._config, self._settings, self._ranks, self._pool = config, config.environment, ranks, pool
        self._tokenizer, self._continuation, self._title, self._seed = tokenizer, continuation, title, seed
        self._episodes: dict[tuple[int, ...], Episode] = {}
        self._left: dict[int, int] = {}
        """For each prompt, how many of its episodes have not ended."""
        self._ended: dict[int, dict[int, tuple[Generation, Completion]]] = {}
        self._results: queue.SimpleQueue[EnvironmentResult] = queue.SimpleQueue()
        self._asked: dict[tuple[int, ...], float] = {}
        """The episodes whose environments were called by this process, and whose results were not taken, with the time of the call."""
        self._seconds: dict[tuple[int, ...], float] = {}
        """For how long the environment of each has worked before."""
        self._warned: set[str] = set()
        self._positions = positions
        longest = prompt_budget(config).tokens
        self._longest = longest if positions is None else min(longest, positions - 1)

    # ---- what the generator does -----------------------------------------------------------------------------------------

    def begin(self, number: int, prompt: Prompt, samples: int) -> None:
        """Begin the episodes of a prompt.

        Args:
            number: The number of the prompt.
            prompt: The prompt.
            samples: How many.
        """
        self._left[number], self._ended[number] = samples, {}
        for sample in range(samples):
            self._reset(Episode(key=(self._title, number, sample, 0), number=number, sample=sample, row=prompt))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the prompts whose episodes were begun and not taken yet."""
        return list(self._left)

    @property
    def at_work(self) -> bool:
        """Whether an environment is at work."""
        return any(not episode.is_due and not episode.is_generating for episode in self._episodes.values())

    def due(self, most: int | None = None) -> list[Episode]:
        """Return the episodes whose next turn has to be written, in order; they count as being written."""
        waiting = sorted((one for one in self._episodes.values() if one.is_due), key=lambda one: (one.number, one.sample))[
            :most
        ]
        for episode in waiting:
            episode.is_due, episode.is_generating = False, True
        return waiting

    def room(self, episode: Episode) -> int:
        """Return how many tokens the next turn of an episode may have."""
        return min(self._config.rollout.max_tokens, self._most(episode) - len(episode.tokens))

    def _most(self, episode: Episode) -> int:
        """Return how many tokens may follow what is read first."""
        most = self._config.max_answer_tokens
        return most if self._positions is None else min(most, self._positions - len(episode.prompt.ids))

    def give_back(self, episodes: Sequence[Episode]) -> None:
        """Note that whatever was writing turns is gone: they have to be written again."""
        for episode in episodes:
            episode.is_due, episode.is_generating = True, False

    def take(self, episodes: Sequence[Episode], turns: Sequence[Generation], *, cancelled: bool = False) -> None:
        """Take the turns that were written, and hand them to the environments.

        Args:
            episodes: The episodes.
            turns: The turn of each.
            cancelled: Whether turns may have ended because their call was cancelled.
        """
        for episode, turn in zip(episodes, turns, strict=True):
            if episode.key not in self._episodes:
                # It has failed meanwhile.
                continue
            episode.is_generating = False
            if cancelled and not turn.finished and len(turn.response) < self.room(episode):
                episode.begun, episode.is_due = replace(turn, finish_reason="aborted"), True
                continue
            self._add_turn(episode, turn)

    def _add_turn(self, episode: Episode, turn: Generation) -> None:
        begin = len(episode.tokens)
        episode.add(turn.response, turn.log_probs, turn.versions, sampled=True)
        episode.spans.append((begin, len(episode.tokens)))
        episode.finished, episode.begun, episode.routed_experts = turn.finished, None, turn.routed_experts
        text = decoded(self._tokenizer, turn.response)
        number = len(episode.spans) - 1
        episode.turns.append({"role": "assistant", "content": text})
        self._ask(episode, Turn(number=number, tokens=turn.response, text=text, finished=turn.finished))

    # ---- what environments do --------------------------------------------------------------------------------------------

    def _reset(self, episode: Episode) -> None:
        self._episodes[episode.key] = episode
        row, seed = episode.row, seed_of(self._seed, episode.number, episode.sample)
        self._ask(episode, EpisodeRow(prompt=row.content, columns=row.columns, seed=seed))

    def _ask(self, episode: Episode, argument: EpisodeRow | Turn) -> None:
        """Call an environment, in the process that has it."""
        if self._pool is None:
            return
        key = episode.key
        future = self._pool.step(key, argument) if isinstance(argument, Turn) else self._pool.reset(key, argument)
        self._asked[key] = time.monotonic()

        def done(ended: Any) -> None:
            error = ended.exception()
            if error is None:
                self._results.put(EnvironmentResult(key=key, value=ended.result()))
            else:
                kind = error.kind if isinstance(error, EnvironmentFailure) else "error"
                self._results.put(EnvironmentResult(key=key, failure=kind, message=str(error)))

        future.add_done_callback(done)

    def poll(self, *, wait: bool) -> None:
        """Take what environments have returned.

        Args:
            wait: Whether to wait for at least one, if any is at work, or for all, if `environment.wait_for_all` says so.
        """
        for result in self._ranks.run_on_rank0(lambda: self._collect(wait=wait)):
            if (episode := self._episodes.get(result.key)) is not None:
                self._take_result(episode, result)

    @property
    def waits_for_all(self) -> bool:
        """Whether a call of the generator waits for all environments."""
        if (chosen := self._settings.wait_for_all) is not None:
            return chosen
        return self._config.rl.staleness == 0 and not self._config.rollout.invariant

    def _collect(self, *, wait: bool) -> list[EnvironmentResult]:
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
        """Return a result, or a failure if its environment has taken too long over it."""
        asked_at = self._asked.pop(result.key, None)
        if asked_at is None:
            return result
        limit = self._settings.episode_timeout_s
        self._seconds[result.key] = self._seconds.get(result.key, 0.0) + time.monotonic() - asked_at
        return result if limit is None or self._seconds[result.key] <= limit else self._too_late(result.key)

    def _late(self) -> list[EnvironmentResult]:
        """Return as failures the episodes whose environments take too long, for which nobody waits any more."""
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
        elif result.failure is not None:
            self._end(episode, result.failure, result.message)
        elif isinstance(result.value, Done):
            episode.rewards.append(result.value.reward)
            episode.metrics |= {name: float(value) for name, value in result.value.metrics.items()}
            self._end(episode, "done")
        elif result.value is None:
            episode.is_due = True
        else:
            self._observe(episode, result.value)

    def _restart(self, episode: Episode) -> None:
        """Begin an episode anew whose process has ended, perhaps because of another one."""
        self._close(episode)
        *names, attempt = episode.key
        self._reset(
            Episode(
                key=(*names, attempt + 1),
                number=episode.number,
                sample=episode.sample,
                row=episode.row,
                restarts=episode.restarts + 1,
            )
        )

    def _observe(self, episode: Episode, observation: Observation) -> None:
        try:
            tokens = self._tokens(episode, observation)
        except DataError as e:
            self._end(episode, "invalid", str(e))
            return
        if not episode.spans:
            episode.first, episode.is_due = tokens, True
            return
        episode.rewards.append(observation.reward)
        if len(episode.spans) >= self._settings.max_turns:
            self._end(episode, "max_turns")
        elif len(episode.tokens) + len(tokens) >= self._most(episode):
            self._end(episode, "max_tokens")
        else:
            episode.add(tokens, [0.0] * len(tokens), [-1] * len(tokens), sampled=False)
            episode.turns += [dict(message) for message in observation.messages] or [
                {"role": "tool", "content": decoded(self._tokenizer, tokens)}
            ]
            episode.is_due = True

    def _tokens(self, episode: Episode, observation: Observation) -> list[int]:
        """Return the tokens of an observation.

        Raises:
            DataError: The chat template cannot render it, a token is not in the vocabulary, or what is read first is too long.
        """
        if observation.tokens is not None:
            tokens = list(observation.tokens)
            if not tokens or not 0 <= min(tokens) <= max(tokens) < len(self._tokenizer):
                raise DataError(
                    f"an observation has the tokens {tokens[:8]}; there must be at least one, and the model has those below {len(self._tokenizer)}"
                )
        elif self._continuation is None:
            raise DataError(
                "an observation has messages, but the model's tokenizer has no chat template; set model.chat_template=FILE, or return tokens"
            )
        elif not episode.spans:
            tokens = self._continuation.first_tokens(observation.messages)
        else:
            tokens = self._continuation.tokens(observation.messages, episode.tokens[-1])
        if not episode.spans and len(tokens) > self._longest:
            raise DataError(
                f"the first observation has {len(tokens)} tokens, more than the {self._longest} that fit with an episode"
            )
        return tokens

    def _end(self, episode: Episode, end: EpisodeEnd, message: str = "") -> None:
        """End an episode."""
        if message and end not in self._warned:
            self._warned.add(end)
            log.warning(
                "the environment of an episode of %s has failed, which is left out (%s: %s); further ones are counted in the metrics",
                episode.row.name,
                end,
                message,
            )
        self._close(episode)
        rewards = [*episode.rewards, *([None] * (len(episode.spans) - len(episode.rewards)))]
        finished = episode.finished and end == "done"
        generation = Generation(
            prompt=list(episode.prompt.ids),
            response=episode.tokens,
            log_probs=episode.log_probs,
            versions=episode.versions,
            finish_reason="stop" if finished else "length",
            routed_experts=episode.routed_experts,
            sampled=episode.sampled,
        )
        record = EpisodeRecord(
            end=end,
            turns=tuple(episode.turns),
            spans=tuple(episode.spans),
            turn_rewards=tuple(rewards),
            metrics=episode.metrics,
            message=message,
            own_prompt=episode.first is not None,
        )
        completion = Completion(
            prompt=episode.prompt,
            group=episode.number,
            tokens=episode.tokens,
            text=decoded(self._tokenizer, episode.tokens[slice(*record.last_span)]),
            finished=finished,
            versions=tuple(sorted({*episode.versions} - {-1})),
            episode=record,
        )
        self._ended[episode.number][episode.sample] = (generation, completion)
        self._left[episode.number] -= 1

    def _close(self, episode: Episode) -> None:
        del self._episodes[episode.key]
        self._asked.pop(episode.key, None)
        self._seconds.pop(episode.key, None)
        if self._pool is not None:
            self._pool.close_episode(episode.key)

    # ---- what has ended --------------------------------------------------------------------------------------------------

    def take_complete(self) -> dict[int, KeptCompletions]:
        """Return the episodes of prompts of which all have ended, by the number of the prompt; each prompt once."""
        complete = {}
        for number in [number for number, left in self._left.items() if not left]:
            del self._left[number]
            ended = self._ended.pop(number)
            pairs = [ended[sample] for sample in sorted(ended)]
            complete[number] = KeptCompletions(
                batch=to_batch([generation for generation, _ in pairs]), rows=tuple(completion for _, completion in pairs)
            )
        return complete
