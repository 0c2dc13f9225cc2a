"""The phases of a step before its update, rollout and scoring, as functions of role handles and completions."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from ...engine.errors import ModelError
from ...engine.packing.batch import PackedBatch
from ...environments.pool import EnvironmentPool
from ...generation.options import SamplingOptions
from ...generation.result import Generation
from ...generation.sampling import seed_of
from ...rewards.scorer import PendingScores
from ...workers.data_plane.data_ref import DataRef
from ...workers.groups.base import WorkerGroup
from ...workers.groups.group_call import GroupCall
from ..config.rl import RLConfig
from ..data.conversation_tokens import ConversationTokens
from ..data.prompts import Prompt, packed_prompts
from ..loop.ranks import TrainerRanks
from .adaptive import Adaptive
from .algorithms import Algorithm
from .completions import Completion, Completions, decoded, join, prefixes_of, scored_only
from .environments import described
from .episodes import TURNS, Episode, Episodes
from .kept_completions import KeptCompletions, generations_of
from .memory_manager import MemoryManager, scoring_phase
from .reward_runner import RewardRunner
from .roles import Roles


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningRollout:
    """Completions in flight.

    Args:
        prompts: The prompts.
        numbers: The number of each prompt in the run.
        versions: The allowed versions of the tokens; None accepts any.
        prompt_ref: The prompts in the stores of the generator's processes.
        calls: The calls of the generator: for the completions, and if the algorithm needs them, for the greedy ones.
    """

    prompts: tuple[Prompt, ...]
    numbers: tuple[int, ...]
    versions: range | None
    prompt_ref: DataRef
    calls: tuple[GroupCall, ...]

    @property
    def seconds(self) -> float:
        """The time that the generator has spent on them, in seconds; available once they are done."""
        return max(call.seconds() for call in self.calls if call.seconds is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningTurns:
    """Turns of episodes in flight.

    Args:
        episodes: The episodes.
        versions: The allowed versions of the tokens; None accepts any.
        prompt_ref: The context of each turn, in the stores of the generator's processes.
        calls: The call of the generator.
    """

    episodes: tuple[Episode, ...]
    versions: range | None
    prompt_ref: DataRef
    calls: tuple[GroupCall]

    @property
    def seconds(self) -> float:
        """The time that the generator has spent on them, in seconds; available once they are done."""
        (call,) = self.calls
        return 0.0 if call.seconds is None else call.seconds()


@dataclass(kw_only=True, eq=False)
class Phases:
    """The phases of a run, with the resources that they use.

    Args:
        config: The run's settings.
        algorithm: The algorithm.
        roles: The roles.
        ranks: The processes of the controller.
        group: The group that the roles run in.
        rewards: The rewards; None if no completions are scored.
        tokenizer: The tokenizer of the policy.
        memory_manager: Moves the state of roles.
        adaptive: The values that a run adapts.
        environments: The processes of environments, in the first process of the controller; None without any.
        positions: The number of positions of the model; None if it has no limit, or is not known.
        conversation: Tokenizes observations; None without an environment.
        is_random: Whether training the policy involves random numbers, as with dropout.
        after_each: Called after each phase, so that concurrent work can proceed.
        seconds: The duration of each phase in this step, by name.
        tokens: The number of tokens that each phase has processed in this step, by name.
    """

    config: RLConfig
    algorithm: Algorithm
    roles: Roles
    ranks: TrainerRanks
    group: WorkerGroup
    rewards: RewardRunner | None
    tokenizer: Any
    memory_manager: MemoryManager
    adaptive: Adaptive
    environments: EnvironmentPool | None = None
    positions: int | None = None
    conversation: ConversationTokens | None = None
    is_random: bool = False
    after_each: Callable[[], object] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    _titles: int = 0

    @property
    def reward_runner(self) -> RewardRunner:
        """The rewards."""
        assert self.rewards is not None
        return self.rewards

    @property
    def is_on_policy(self) -> bool:
        """Whether a step has a single update, of the weights that generated the completions, so that ratios need no old log-probabilities.

        With dropout or router noise, the update's own log-probabilities are not those of the policy that generated the completions.
        """
        # One update, of the weights that generated, and nothing else that uses log-probabilities from before it.
        rl = self.config.rl
        return (
            rl.staleness == 0
            and rl.mini_batch_size is None
            and rl.epochs == 1
            and not self.is_random
            and rl.importance == "none"
            and not rl.rejection
            and rl.old_log_probs == "actor"
            and rl.kl_target is None
            and not self.algorithm.needs_old_log_probs
        )

    @property
    def has_adapters(self) -> bool:
        """Whether the policy is trained through adapters."""
        return bool(self.roles.specs["actor"].config.model.lora.rank)

    def reset_timing(self) -> None:
        """Reset the durations and token counts."""
        self.seconds.clear()
        self.tokens.clear()

    def timing(self) -> dict[str, float]:
        """Return the seconds of each phase of the step, and its tokens per second."""
        speeds = {f"tokens_per_s/{n}": count / max(self.seconds[n], 1e-9) for n, count in self.tokens.items() if count}
        return {f"seconds/{name}": value for name, value in self.seconds.items()} | speeds

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a completion, in addition to those of the model's generation config."""
        return () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)

    def discard(self, ref: DataRef) -> None:
        """Drop the samples of a reference that still exist."""
        # Some samples may have been dropped already, such as those without a reward.
        left = [row for row, sample in enumerate(ref.ids) if sample in ref.buffer]
        if left:
            self.group.data.clear_data_cache(ref.select(left))

    @contextmanager
    def timed(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Add the duration of a block to that of a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start
            self.tokens[name] = self.tokens.get(name, 0) + tokens
        # Not after an error, which must be reported before other work begins.
        if self.after_each is not None:
            self.after_each()

    # ---- rollout -----------------------------------------------------------------------------------------------------

    def rollout(self, prompts: Sequence[Prompt], numbers: Sequence[int], *, version: int | None) -> Completions:
        """Generate `rl.group_size` completions of each prompt, and wait for them. No rewards are computed yet.

        Args:
            prompts: The prompts.
            numbers: The number of each prompt in the run, which seeds its completions.
            version: The version that the weights must have; None accepts any.
        """
        self.memory_manager.enter("rollout")
        if self.config.rollout.environment is not None:
            return self.run_episodes(prompts, numbers, self.sampling_options, self.config.rl.group_size, version=version)
        return self.finish_rollout(self.begin_rollout(prompts, numbers, version=version))

    @property
    def sampling_options(self) -> SamplingOptions:
        """The sampling options of training completions, without their number."""
        settings = self.config.rollout
        return SamplingOptions(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_tokens=self.stop_tokens,
            seed=seed_of(self.config.data.seed),
        )

    def begin_rollout(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        *,
        version: int | None,
        oldest: int | None = None,
        resumable: Mapping[int, Sequence[Generation]] | None = None,
    ) -> RunningRollout:
        """Start to generate completions; see `rollout`. The processes of the generator do nothing else until `finish_rollout`.

        Args:
            prompts: The prompts.
            numbers: The number of each prompt in the run, which seeds its completions.
            version: The version that the weights must have; None accepts any.
            oldest: The oldest version among the tokens of continued completions; None if all tokens are of `version`.
            resumable: Unfinished completions to continue, by the number of their prompt.
        """
        sampled = replace(self.sampling_options, samples=self.config.rl.group_size)
        greedy = replace(sampled, temperature=0.0, top_p=1.0, top_k=0, samples=1)
        kinds = [sampled, *([greedy] if self.algorithm.needs_baselines else [])]
        # The seed of a completion depends on the number of its prompt, and not on its place in the call.
        columns: dict[str, list[Any]] = {"number": list(numbers)}
        if resumable:
            columns["partial_completions"] = [resumable.get(number) for number in numbers]
        with self.timed("rollout"):
            prompt_ref = self.group.data.put(packed_prompts(prompts), role="rollout")
            calls = [
                self.group.submit("rollout", "generate", prompt_ref, options, version=version, columns=columns)
                for options in kinds
            ]
            # Submitted calls are sent here, without waiting for their results.
            self.group.flush()
        return RunningRollout(
            prompts=tuple(prompts),
            numbers=tuple(numbers),
            versions=None if version is None else range(version if oldest is None else oldest, version + 1),
            prompt_ref=prompt_ref,
            calls=tuple(calls),
        )

    def finish_rollout(self, running: RunningRollout) -> Completions:
        """Wait for completions, and return them.

        Args:
            running: The result of `begin_rollout`.

        Raises:
            WorkerError: A process of the generator failed.
            ModelError: The generator used other weights than requested.
        """
        with self.timed("rollout"):
            # Wait for all calls before the prompts, which they share, are freed.
            refs = [call.result() for call in running.calls]
            self.group.data.clear_data_cache(running.prompt_ref)
        completions, *greedy = (self._read(ref, running.prompts, running.numbers, running.versions) for ref in refs)
        return replace(completions, baselines=greedy[0] if greedy else None)

    def generate(
        self, prompts: Sequence[Prompt], options: SamplingOptions, *, version: int | None, first: int = 0
    ) -> Completions:
        """Generate completions, and submit them to the rewards.

        Args:
            prompts: The prompts.
            options: The sampling options.
            version: The version that the weights must have; None accepts any.
            first: The number of the first prompt.
        """
        with self.timed("rollout"):
            prompt_ref = self.group.data.put(packed_prompts(prompts), role="rollout")
            ref = self.group["rollout"].generate(prompt_ref, options, version=version)
            self.group.data.clear_data_cache(prompt_ref)
        versions = None if version is None else range(version, version + 1)
        completions = self._read(ref, prompts, range(first, first + len(prompts)), versions)
        return replace(completions, pending=self.submit(completions.rows))

    # ---- episodes ----------------------------------------------------------------------------------------------------

    def new_episodes(self, *, evaluates: bool = False) -> Episodes:
        """Return a new runner of episodes.

        Args:
            evaluates: Whether they belong to an evaluation, whose environments have other seeds.
        """
        self._titles += 1
        seed = seed_of(self.config.data.seed, int(evaluates))
        return Episodes(
            *(self.config, self.ranks, self.environments, self.tokenizer, self.conversation),
            title=self._titles,
            seed=seed,
            positions=self.positions,
            independent=described(self.config).independent,
        )

    def begin_turns(
        self,
        episodes: Episodes,
        due: Sequence[Episode],
        options: SamplingOptions,
        *,
        version: int | None,
        oldest: int | None = None,
    ) -> RunningTurns:
        """Start to generate the next turns of episodes. The processes of the generator do nothing else until `finish_turns`.

        Args:
            episodes: The runner of the episodes.
            due: The episodes; at least one.
            options: The sampling options of turns.
            version: The version that the weights must have; None accepts any.
            oldest: The oldest version among the tokens of continued turns; None if all tokens are of `version`.
        """
        columns: dict[str, list[Any]] = {
            "number": [episode.number for episode in due],
            "first_samples": [len(episode.turns) * TURNS + episode.sample for episode in due],
            "max_tokens": [episodes.room(episode) for episode in due],
        }
        if any(episode.resumable is not None for episode in due):
            columns["partial_completions"] = [None if episode.resumable is None else [episode.resumable] for episode in due]
        with self.timed("rollout"):
            prompt_ref = self.group.data.put(packed_prompts([episode.context for episode in due]), role="rollout")
            call = self.group.submit("rollout", "generate", prompt_ref, options, version=version, columns=columns)
            self.group.flush()
        versions = None if version is None else range(version if oldest is None else oldest, version + 1)
        return RunningTurns(episodes=tuple(due), versions=versions, prompt_ref=prompt_ref, calls=(call,))

    def finish_turns(self, running: RunningTurns) -> list[Generation]:
        """Wait for turns, and return them; they are removed from the stores.

        Args:
            running: The result of `begin_turns`.

        Raises:
            WorkerError: A process of the generator failed.
            ModelError: The generator used other weights than requested.
        """
        with self.timed("rollout"):
            (call,) = running.calls
            ref = call.result()
            batch = self.group.data.get_batch(ref)
            self.group.data.clear_data_cache(running.prompt_ref)
            self.group.data.clear_data_cache(ref)
        turns = generations_of(batch, [episode.context_length for episode in running.episodes])
        self._check_versions({made for turn in turns for made in turn.versions}, running.versions)
        self.tokens["rollout"] = self.tokens.get("rollout", 0) + sum(len(turn.response) for turn in turns)
        return turns

    def run_episodes(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        options: SamplingOptions,
        samples: int,
        *,
        version: int | None,
    ) -> Completions:
        """Run the episodes of prompts, and wait until all have ended. No rewards are computed yet.

        Args:
            prompts: The prompts.
            numbers: The number of each prompt.
            options: The sampling options of turns.
            samples: The number of episodes per prompt.
            version: The version that the weights must have; None accepts any.
        """
        episodes = self.new_episodes(evaluates=options.evaluation)
        for number, prompt in zip(numbers, prompts, strict=True):
            episodes.begin(number, prompt, samples)
        ended: dict[int, KeptCompletions] = {}
        while episodes.numbers:
            with self.timed("environments"):
                episodes.poll(wait=True)
            if due := episodes.due():
                running = self.begin_turns(episodes, due, options, version=version)
                episodes.take(due, self.finish_turns(running))
            ended |= episodes.take_complete()
        kept = [ended[number] for number in numbers]
        rows = tuple(row for one in kept for row in one.rows)
        return self.put_completions(PackedBatch.concat([one.batch for one in kept]), rows)

    def put_completions(self, batch: PackedBatch, rows: Sequence[Completion]) -> Completions:
        """Put completions into the stores of the actor's processes, or of the generator's if there is no actor.

        Args:
            batch: The documents.
            rows: The completions.
        """
        ref = self.group.data.put(batch, role="actor" if "actor" in self.group.roles else "rollout")
        return Completions(ref=ref.without_groups().with_prefixes(prefixes_of(rows)), rows=tuple(rows))

    def submit(self, rows: Sequence[Completion]) -> tuple[PendingScores | None, ...]:
        """Start to score completions, if there are rewards."""
        return () if self.rewards is None else (self.rewards.submit(rows),)

    def _read(self, ref: DataRef, prompts: Sequence[Prompt], numbers: Sequence[int], versions: range | None) -> Completions:
        """Read completions back, and decode them. Decoding here takes far less time than generation, and the generator's processes need no tokenizer
        and send no texts.
        """
        with self.timed("read"):
            columns = self.group.data.get(ref, ["input_ids", "versions", "finished"])
            # Values of all samples are concatenated; split them by sample.
            ids, made_by = (columns[name].split(list(ref.lengths)) for name in ("input_ids", "versions"))
        rows, samples = [], len(ref) // max(1, len(prompts))
        for i, (tokens, makers) in enumerate(zip(ids, made_by, strict=True)):
            prompt = prompts[i // samples]
            completion = tokens[len(prompt.ids) :].tolist()
            rows.append(
                Completion(
                    prompt=prompt,
                    group=numbers[i // samples],
                    tokens=completion,
                    text=decoded(self.tokenizer, completion),
                    finished=bool(columns["finished"][i]),
                    # Collapse runs of equal versions as tensors first, so that few values reach Python.
                    versions=tuple(sorted({*makers.unique_consecutive().tolist()} - {-1})),
                )
            )
        self._check_versions({made for row in rows for made in row.versions}, versions)
        self.tokens["rollout"] = self.tokens.get("rollout", 0) + sum(len(row.tokens) for row in rows)
        return Completions(ref=ref.without_groups(), rows=tuple(rows))

    def _check_versions(self, makers: set[int], versions: range | None) -> None:
        if versions is not None and (others := makers - {*versions}):
            raise ModelError(
                f"tokens were generated by version {min(others)} of the weights, but {_named(versions)} was requested; the generator has "
                "changed its weights by itself"
            )

    # ---- score -------------------------------------------------------------------------------------------------------

    def ask_reward_model(self, parts: Sequence[Completions]) -> list[Completions]:
        """Let the reward model score several batches of completions in one call, if there is one and it has not scored them yet."""
        # Completions that the model has not scored yet, and their greedy baselines.
        asked = [
            one
            for part in parts
            for one in (part, part.baselines)
            if one is not None and one.pending and one.model_scores is None
        ]
        if self.rewards is None or not self.rewards.asks_model or not asked:
            return list(parts)
        self.memory_manager.enter("score")
        # One call for all of them, so that the reward model is loaded only once.
        batch = asked[0].ref if len(asked) == 1 else join([replace(one, baselines=None) for one in asked]).ref
        with self.timed("reward_model", batch.num_tokens):
            rewards = self.group.data.get(self.group["reward"].compute_rewards(batch), ["rewards"])["rewards"]
            scores = {
                id(one): tuple(part.tolist())
                for one, part in zip(asked, rewards.split([len(one) for one in asked]), strict=True)
            }

        def scored(one: Completions) -> Completions:
            return replace(one, model_scores=scores.get(id(one), one.model_scores))

        return [replace(scored(part), baselines=None if part.baselines is None else scored(part.baselines)) for part in parts]

    def collect_rewards(self, completions: Completions) -> tuple[Completions, dict[str, float]]:
        """Wait for the rewards of completions, unless they are already known.

        Returns:
            The completions with their rewards, without those that have none (possibly all); and the counts of outcomes that are not
            values.
        """
        if not completions.pending:
            return completions, {}
        (completions,) = self.ask_reward_model([completions])
        with self.timed("reward_wait"):
            rows, counts = self.reward_runner.result(completions.rows, completions.pending, completions.model_scores)
        for row in scored_only(rows):
            if row.episode is not None and row.episode.failure:
                name = f"{row.episode.failure}/episode"
                counts[name] = counts.get(name, 0.0) + 1.0
        if completions.baselines is not None:
            greedy, failed = self.collect_rewards(completions.baselines)
            for name, count in failed.items():
                counts[name] = counts.get(name, 0.0) + count
            self.discard(completions.baselines.ref)
            # A prompt whose greedy completion has no reward gets NaN, and its completions are left out below.
            by_group = {row.group: row.reward for row in greedy.rows}
            rows = [replace(row, baseline=by_group.get(row.group, math.nan)) for row in rows]
        scored = replace(completions, rows=tuple(rows), pending=(), baselines=None)
        kept = [i for i, row in enumerate(rows) if not math.isnan(row.reward) and not math.isnan(row.baseline or 0.0)]
        counts["dropped"] = float(len(scored_only(rows)) - len(scored_only([rows[i] for i in kept])))
        # Free the tensors of completions without a reward in the workers now, since nothing refers to them later.
        if len(kept) < len(rows):
            self.discard(completions.ref.select(sorted(set(range(len(rows))) - set(kept))))
            scored = scored.select(kept)
        return scored, counts

    def score(self, completions: Completions) -> Completions:
        """Add the outputs of other models that the algorithm needs: reference, critic and reward model.

        The rewards are computed concurrently.
        """
        (completions,) = self.ask_reward_model([completions])
        batch = completions.ref
        if self.algorithm.needs_reference or self.algorithm.needs_critic:
            self.memory_manager.enter(
                scoring_phase(own_reference=self.roles.has_own_reference, critic=self.algorithm.needs_critic)
            )
        if self.algorithm.needs_reference:
            with self.timed("reference", batch.num_tokens):
                if self.roles.has_own_reference:
                    batch |= self.group["actor"].compute_reference_log_probs(batch)
                else:
                    batch |= self.group["reference"].compute_log_probs(batch)
        if self.algorithm.needs_critic:
            with self.timed("critic", batch.num_tokens):
                batch |= self.group["critic"].compute_values(batch)
        return completions.with_columns(batch)


def _named(versions: range) -> str:
    return f"version {versions[0]}" if len(versions) == 1 else f"one of the versions {versions[0]} to {versions[-1]}"
