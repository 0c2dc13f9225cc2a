"""The prompts of a run, in the order of its tickets."""

from dataclasses import dataclass
from typing import Any

from ...engine.errors import ConfigError, DataError
from ...engine.hf.config import read_config
from ...engine.hf.generation import end_tokens
from ...engine.hf.shape import context_of
from ...engine.hf.tokenizer import load_tokenizer
from ...generation.memory import PAGE_TOKENS_CUDA
from ..config.rl import REWARD_MODEL, RLConfig
from ..data.conversation_tokens import ConversationTokens
from ..data.dataset import Budget, micro_batch_budget
from ..data.media import MediaReader
from ..data.order import BatchOrder, Sampler
from ..data.prompts import Prompt, PromptSet, empty_fields, load_prompts
from ..data.tokenize import cache_folder
from ..data.turn_ends import TurnEnds
from ..data.vocabulary import check_same_vocabulary
from .environments import described


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run.

    Args:
        train: The prompts to train on.
        order: Their order.
        held_out: The prompts to evaluate on, or None.
    """

    train: PromptSet
    order: BatchOrder
    held_out: PromptSet | None

    def of_ticket(self, number: int) -> Prompt:
        """Return the prompt of a ticket; tickets number the prompts of all epochs consecutively."""
        return self.train[self.order.index(number)]

    @property
    def sets(self) -> list[PromptSet]:
        """The sets of prompts that exist."""
        return [self.train, *([self.held_out] if self.held_out is not None else [])]


def load_data(config: RLConfig) -> Prompts:
    """Load the prompts, and check that all models have the same tokenizer. Reads no weights.

    Raises:
        DataError: A source or a row cannot be used.
        ConfigError: A model has a different tokenizer.
    """
    data = config.data
    tokenizer = load_tokenizer(config.model)
    models = {"reference": config.reference.model}
    if REWARD_MODEL in config.rewards.use:
        models["reward"] = config.reward.model
    # All models read the tokens of the policy, so one with other tokens would read other texts.
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
            setting=f"the {positions} positions of {model.path} (max_position_embeddings) minus one for a completion",
        )
    media = MediaReader.of(config.model, data, tokenizer, cache_folder(data))
    variables = template_variables_of(config)
    if variables.get("tools") and not tokenizer.chat_template:
        raise ConfigError(
            f"rollout.environment={config.rollout.environment} has tools, which need a chat template, but the model's tokenizer has "
            "none; set model.chat_template=FILE"
        )
    train = load_prompts(data.train, tokenizer, data, budget, training=True, media=media, variables=variables)
    sampler = Sampler(train.sizes, weights=data.weights, seed=data.seed, shuffle=data.shuffle)
    prompts = Prompts(
        train=train,
        order=BatchOrder(
            sampler,
            batch_size=data.batch_size,
            digest=lambda: train.digest,
            source_digests=lambda: train.source_digests,
        ),
        held_out=load_prompts(data.eval, tokenizer, data, budget, training=False, media=media, variables=variables)
        if data.eval
        else None,
    )
    if config.rollout.environment is not None and (with_media := [one for part in prompts.sets for one in part if one.media]):
        raise ConfigError(
            f"{with_media[0].name} has media, which rollout.environment={config.rollout.environment} does not support; leave such prompts out, or train "
            "without an environment"
        )
    fields = empty_fields(prompts.sets)
    for one in prompts.sets:
        one.check_media(config.rollout.generator, media)
        one.set_media_fields(fields)
    return prompts


def template_variables_of(config: RLConfig) -> dict[str, Any]:
    """Return the variables of the chat template: those of the settings, and the tools of the environment.

    Raises:
        ConfigError: The environment cannot be built.
    """
    variables = dict(config.data.chat_template_kwargs)
    if config.rollout.environment is None:
        return variables
    tools = described(config).tools
    return {**variables, "tools": tools} if tools else variables


def conversation_of(config: RLConfig, tokenizer: Any) -> ConversationTokens | None:
    """Return the tokenizer of an environment's observations; None without an environment.

    Args:
        config: The run's settings.
        tokenizer: The tokenizer of the policy.

    Raises:
        ConfigError: The environment has tools, but the template does not support tool results.
    """
    if config.rollout.environment is None:
        return None
    variables = template_variables_of(config)
    conversation = ConversationTokens(tokenizer, TurnEnds.of(tokenizer, end_tokens(config.model)), variables)
    # Try a tool result once, so that a template that cannot render it is an error now and not in
    # the first episode. The token before it can be any.
    if tools := variables.get("tools"):
        name = tools[0]["function"]["name"]
        try:
            conversation.messages([{"role": "tool", "tool_call_id": "call00000", "name": name, "content": "0"}], 0)
        except DataError as e:
            raise ConfigError(f"rollout.environment={config.rollout.environment} has tools, but {e}") from e
    return conversation


def prompt_budget(config: RLConfig) -> Budget:
    """Return the maximum number of tokens of a prompt that fits into a micro-batch together with its longest completion.

    Raises:
        ConfigError: No prompt would fit.
    """
    # Completions also go through passes without gradients, which score them.
    usable, budget = micro_batch_budget(config.engine, infers=True)
    room = usable - config.max_answer_tokens
    setting = f"rollout.max_tokens={config.rollout.max_tokens}"
    if config.rollout.environment is not None:
        setting = f"environment.max_tokens={config.max_answer_tokens}"
    if room < 1:
        raise ConfigError(
            f"{setting} leaves no room for a prompt in {budget.setting}, which must hold a prompt and its completion; raise the latter"
        )
    return Budget(tokens=room, setting=f"{budget.setting} less {setting}")


def most_tokens(config: RLConfig, prompts: Prompts) -> int:
    """Return the size of a generator's cache, in tokens, that suffices even if all completions of a call have the maximum length.

    Args:
        config: The run's settings.
        prompts: The prompts.
    """
    sizes = [(prompts.train, config.data.batch_size * (config.rl.staleness + 1) * config.rl.group_size)]
    if prompts.held_out is not None:
        sizes.append((prompts.held_out, len(prompts.held_out) * config.rl.eval_samples))
    completions = min(config.rollout.max_batch_size, max(count for _, count in sizes))
    # Add one token per completion, and round up to whole pages, as `continuous` reserves them.
    tokens = max(part.longest for part, _ in sizes) + config.max_answer_tokens + 1
    return completions * -(-tokens // PAGE_TOKENS_CUDA) * PAGE_TOKENS_CUDA
