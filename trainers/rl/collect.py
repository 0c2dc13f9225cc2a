"""The prompts of a run, and the collection of a step's completions."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.errors import ConfigError
from ...engine.hf.config import read_config
from ...engine.hf.shape import context_of
from ...engine.hf.tokenizer import load_tokenizer
from ...generation.memory import PAGE_TOKENS_CUDA
from ..config.rl import REWARD_MODEL, RLConfig
from ..data.dataset import Budget, micro_batch_budget
from ..data.media import MediaReader
from ..data.order import BatchOrder, Cursor, Sampler
from ..data.prompts import Prompt, PromptSet, empty_fields, load_prompts
from ..data.tokenize import cache_folder
from ..data.vocabulary import check_same_vocabulary
from .completions import Completions, equal_groups, join
from .phases import Phases
from .reward_runner import check_judged

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run.

    Args:
        train: Those to train on.
        order: Their order.
        held_out: Those to evaluate on, or None.
    """

    train: PromptSet
    order: BatchOrder
    held_out: PromptSet | None

    @property
    def sets(self) -> list[PromptSet]:
        """Both of them, if there are both."""
        return [self.train, *([self.held_out] if self.held_out is not None else [])]


def load_data(config: RLConfig) -> Prompts:
    """Load the prompts, and check that all models have the same tokenizer. Reads no weights.

    Raises:
        DataError: A source or a row cannot be used.
        ConfigError: A model has another tokenizer.
    """
    data = config.data
    tokenizer = load_tokenizer(config.model)
    models = {"reference": config.reference.model}
    if REWARD_MODEL in config.rewards.use:
        models["reward"] = config.reward.model
    models |= {"critic": config.critic.model, "actor": config.actor.model}
    for role, model in models.items():
        if model is not None and model.path != config.model.path:
            check_same_vocabulary(config.model, model, f"{role}.model.path")
    model = config.actor.model or config.model
    positions = context_of(read_config(model))
    budget = prompt_budget(config)
    if positions is not None and positions <= budget.tokens:
        budget = Budget(
            tokens=positions - 1,
            setting=f"the {positions} positions of {model.path} (max_position_embeddings) less one for an answer",
        )
    media = MediaReader.of(config.model, data, tokenizer, cache_folder(data))
    train = load_prompts(data.train, tokenizer, data, budget, training=True, media=media)
    sampler = Sampler(train.sizes, weights=data.weights, seed=data.seed, shuffle=data.shuffle)
    prompts = Prompts(
        train=train,
        order=BatchOrder(sampler, batch_size=data.batch_size, digest=lambda: train.digest),
        held_out=load_prompts(data.eval, tokenizer, data, budget, training=False, media=media) if data.eval else None,
    )
    fields = empty_fields(prompts.sets)
    for one in prompts.sets:
        one.check_media(config.rollout.generator, media)
        one.set_media_fields(fields)
    return prompts


def prompt_budget(config: RLConfig) -> Budget:
    """Return the largest number of tokens of a prompt, with which its longest completion still fits into a micro-batch.

    Raises:
        ConfigError: No prompt would fit.
    """
    usable, budget = micro_batch_budget(config.engine, infers=True)
    room = usable - config.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_tokens={config.rollout.max_tokens} leaves no room for a prompt in {budget.setting}, which a prompt and its answer "
            "have to fit into together; raise the latter"
        )
    return Budget(tokens=room, setting=f"{budget.setting} less rollout.max_tokens={config.rollout.max_tokens}")


def most_tokens(config: RLConfig, prompts: Prompts) -> int:
    """Return the size of a generator's cache, in tokens, that is not full even if all completions of a call are as long as allowed.

    Args:
        config: The run's settings.
        prompts: The prompts.
    """
    sizes = [(prompts.train, config.data.batch_size * config.rl.group_size)]
    if prompts.held_out is not None:
        sizes.append((prompts.held_out, len(prompts.held_out) * config.rl.eval_samples))
    completions = min(config.rollout.max_batch_size, max(count for _, count in sizes))
    # One token more than these, and whole pages, as `continuous` reserves them.
    tokens = max(part.longest for part, _ in sizes) + config.rollout.max_tokens + 1
    return completions * -(-tokens // PAGE_TOKENS_CUDA) * PAGE_TOKENS_CUDA


class Collector:
    """Collects the completions of steps.

    Args:
        config: The run's settings.
        phases: The phases.
        prompts: The prompts.
    """

    def __init__(self, config: RLConfig, phases: Phases, prompts: Prompts) -> None:
        self._config, self._phases, self._prompts = config, phases, prompts
        self._equal_steps = 0
        self._warned: set[str] = set()

    def collect(self, cursor: Cursor, *, step: int, version: int) -> tuple[Completions, dict[str, float], Cursor]:
        """Generate the completions of a step, whose rewards are then being computed.

        Args:
            cursor: The position of the first prompt.
            step: The number of the step.
            version: The version of the weights.

        Returns:
            The completions, numbers of what happened to others, and the position of the next prompt.
        """
        chosen, cursor = next(self._prompts.order.indices(cursor))
        return self._complete(chosen, step, version, first=0), {}, cursor

    def collect_varied(self, cursor: Cursor, *, step: int, version: int) -> tuple[Completions, dict[str, float], Cursor]:
        """Generate the completions of a step with dynamic sampling: groups whose rewards are all equal are replaced, and rewards are known.

        Source: DAPO, arXiv:2503.14476, section 3.2.

        Args:
            cursor: The position of the first prompt.
            step: The number of the step.
            version: The version of the weights.

        Returns:
            The completions, numbers of what happened to others, and the position of the next prompt.

        Raises:
            RewardError: Too many completions could not be judged.
        """
        batches = self._prompts.order.indices(cursor)
        group_count = self._config.data.batch_size
        kept: list[Completions] = []
        totals: dict[str, float] = {}
        groups = different = first = replaced = 0
        for attempt in range(1 + self._config.rl.max_resamples):
            chosen, cursor = next(batches)
            completions, counts = self._phases.collect_rewards(self._complete(chosen, step, version, first=first))
            first += len(chosen)
            for name, count in counts.items():
                totals[name] = totals.get(name, 0.0) + count
            equal = equal_groups(completions.rows)
            last_resort = attempt == self._config.rl.max_resamples and not kept and len(equal) == len({*completions.groups})
            others = [group for group in dict.fromkeys(completions.groups) if group not in equal or last_resort][
                : group_count - groups
            ]
            chosen_groups = set(others)
            rows = [i for i, row in enumerate(completions.rows) if row.group in chosen_groups]
            self._phases.discard(completions.ref.select(sorted({*range(len(completions))} - {*rows})))
            replaced += len(equal)
            different += sum(group not in equal for group in others)
            if rows:
                kept.append(completions.select(rows))
                groups += len(others)
            if groups >= group_count:
                break
        if different < group_count:
            self._warn_once(
                "resamples",
                "step %d has %d groups of different rewards instead of %d after %d times the prompts of a step "
                "(rl.max_resamples); the task may be too hard or too easy for the policy",
                step,
                different,
                group_count,
                1 + self._config.rl.max_resamples,
            )
        check_judged([row for part in kept for row in part.rows], totals)
        return join(kept), {**totals, "replaced_groups": float(replaced)}, cursor

    def _complete(self, chosen: Sequence[int], step: int, version: int, *, first: int) -> Completions:
        """Answer prompts, in parts whose completions are judged while the next part is answered."""
        prompts: list[Prompt] = [self._prompts.train[i] for i in chosen]
        size = self._config.rollout.prompts_per_call or len(prompts)
        parts = []
        for begin in range(0, len(prompts), size):
            seed = self._phases.seed(step, first + begin)
            parts.append(self._phases.rollout(prompts[begin : begin + size], version=version, seed=seed, first=first + begin))
        return join(parts)

    def warn(self, metrics: dict[str, float]) -> None:
        """Warn about a run that cannot learn.

        Args:
            metrics: The numbers of a step.
        """
        self._equal_steps = self._equal_steps + 1 if metrics.get("equal_groups", 0.0) >= 1 else 0
        if self._equal_steps == self._config.rl.warn_equal_steps and self._config.rl.group_size > 1:
            log.warning(
                "in the last %d steps all answers to each prompt had equal rewards (%s), so nothing was learned from them; check the "
                "rewards on the sample answers, use easier prompts, or raise rl.group_size or rollout.temperature",
                self._equal_steps,
                ", ".join(f"{name} {value:.3g}" for name, value in metrics.items() if name.startswith("reward/")),
            )
        if metrics.get("truncated", 0.0) >= 1:
            self._warn_once(
                "truncated",
                "all answers of a step reached rollout.max_tokens=%d without an end; raise it, or check that the model's "
                "eos_token_id (generation_config.json) is the token that ends its answers",
                self._config.rollout.max_tokens,
            )

    def _warn_once(self, what: str, message: str, *values: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning(message, *values)
