"""Calling conventions of reward functions: as in TRL, as in verl, or with the parameters that a function declares.

| parameters | called | with |
|---|---|---|
| `completions` | once | lists: `prompts`, `completions`, `completion_ids` and all columns, as TRL does; None is "not applicable" |
| `solution_strs` | once | `data_sources`, `solution_strs`, `ground_truths`, `extra_infos`, as verl's batch reward manager does |
| `solution_str` | for each completion | `data_source`, `solution_str`, `ground_truth`, `extra_info`, as verl does |
| `samples` | once | a list of `RewardSample` |
| anything else | for each completion | those that it declares of `sample`, `prompt`, `completion`, `completion_ids`, `truncated`, `turns`, `environment_reward`, the columns and the settings |
"""

import asyncio
import inspect
import math
import pickle
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from ..engine.errors import ConfigError
from .sample import RewardOutcome, RewardSample

_INSTALLED = ("site-packages", "lib/python3")
"""Path fragments of modules that are not the user's code."""
Convention = Literal["trl", "verl_batch", "verl", "samples", "each"]
_MARKS: dict[str, Convention] = {
    "completions": "trl",
    "solution_strs": "verl_batch",
    "solution_str": "verl",
    "samples": "samples",
}
_PLURALS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
_BATCHED: frozenset[Convention] = frozenset(("trl", "verl_batch", "samples"))
_GIVEN = frozenset(("sample", "prompt", "completion", "completion_ids", "truncated", "turns", "environment_reward"))


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How a reward function is called.

    Args:
        convention: The library whose signature it has.
        at_once: Whether one call takes all completions.
        named: Its parameters.
        required: The parameters that must be columns or settings.
        optional: The parameters that may be columns or settings.
        takes_all: Whether it accepts arbitrary keyword arguments.
    """

    convention: Convention
    at_once: bool
    named: frozenset[str]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    takes_all: bool = False

    @property
    def takes_batch(self) -> bool:
        """Whether it is called with lists of completions, and returns a list."""
        return self.convention in _BATCHED


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return how a function is called.

    Raises:
        ConfigError: It has positional-only parameters.
    """
    parameters = inspect.signature(function).parameters
    title = getattr(function, "__qualname__", type(function).__name__)
    if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters.values()):
        raise ConfigError(f"the reward {title} has positional-only parameters, but is called with keyword arguments")
    # The first parameter that only one of the conventions has decides.
    convention: Convention = next((_MARKS[name] for name in parameters if name in _MARKS), "each")
    named = {name: p for name, p in parameters.items() if p.kind != p.VAR_KEYWORD}
    if convention == "each" and not _GIVEN & set(named):
        raise ConfigError(
            f"the reward {title}({', '.join(named)}) does not take the completion; add one of the parameters "
            f"{', '.join(sorted(_GIVEN))}, {', '.join(_MARKS)}"
        )
    sample_parameters = {
        "trl": {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"},
        "verl_batch": {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
        "verl": {"data_source", "solution_str", "ground_truth", "extra_info"},
        "samples": {"samples"},
        "each": _GIVEN,
    }[convention]
    column_parameters = {name: p for name, p in named.items() if name not in sample_parameters}
    # An object with an asynchronous `__call__` is not a coroutine function itself.
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return Signature(
        convention=convention,
        # Functions that wait for a network run concurrently.
        at_once=convention in _BATCHED or is_async,
        named=frozenset(named),
        required=frozenset(name for name, p in column_parameters.items() if p.default is p.empty),
        optional=frozenset(name for name, p in column_parameters.items() if p.default is not p.empty),
        takes_all=len(named) < len(parameters),
    )


def judge(
    function: Callable[..., Any], samples: Sequence[RewardSample], settings: Mapping[str, Any], timeout_s: float
) -> tuple[list[RewardOutcome], bool]:
    """Call a function for completions, and check its results. Errors become outcomes.

    A function of single completions is isolated per completion: an error for one does not affect the others, and changes that a call
    makes to its arguments are not visible to the next one. Outcomes therefore do not depend on which completions are passed together.

    Args:
        function: The function.
        samples: The completions, with columns under the names of its parameters.
        settings: Additional arguments.
        timeout_s: The time limit of an asynchronous function per completion, in seconds.

    Returns:
        An outcome for each completion, and whether the outcomes are separate: False if a call for all completions failed, possibly
        because of a single one of them.
    """
    signature = signature_of(function)
    if signature.takes_batch:
        return _score_batch(function, signature, samples, settings)
    if signature.at_once:
        return asyncio.run(_score_concurrently(function, signature, samples, settings, timeout_s)), True
    return [_score_one(function, signature, sample, settings) for sample in samples], True


def _score_batch(
    function: Callable[..., Any], signature: Signature, samples: Sequence[RewardSample], settings: Mapping[str, Any]
) -> tuple[list[RewardOutcome], bool]:
    started = time.perf_counter()
    separate = True
    try:
        values = _settled(function(**_arguments_at_once(signature, samples, settings)))
        if isinstance(values, Mapping) or not hasattr(values, "__len__") or isinstance(values, str):
            raise TypeError(f"it returned a {type(values).__name__}; it must return a list with a value for each completion")
        if len(values) != len(samples):
            raise ValueError(f"it returned {len(values)} values for {len(samples)} completions")
        outcomes = [_checked(value, none_is_allowed=signature.convention == "trl") for value in values]
    except Exception as e:  # user code can raise anything
        outcomes, separate = [RewardOutcome(kind="error", message=_described(e))] * len(samples), False
    share = (time.perf_counter() - started) / max(1, len(samples))
    return [replace(outcome, seconds=share) for outcome in outcomes], separate


def _score_one(
    function: Callable[..., Any], signature: Signature, sample: RewardSample, settings: Mapping[str, Any]
) -> RewardOutcome:
    started = time.perf_counter()
    try:
        outcome = _checked(_settled(function(**_arguments(signature, *_copies(sample, settings)))))
    except Exception as e:  # user code can raise anything
        outcome = RewardOutcome(kind="error", message=_described(e))
    return replace(outcome, seconds=time.perf_counter() - started)


async def _score_concurrently(
    function: Callable[..., Awaitable[Any]],
    signature: Signature,
    samples: Sequence[RewardSample],
    settings: Mapping[str, Any],
    timeout_s: float,
) -> list[RewardOutcome]:
    async def one(sample: RewardSample) -> RewardOutcome:
        started = time.perf_counter()
        try:
            call = function(**_arguments(signature, *_copies(sample, settings)))
            outcome = _checked(await asyncio.wait_for(call, timeout_s))
        except TimeoutError:
            outcome = RewardOutcome(kind="timeout", message=f"it took more than {timeout_s:g} s")
        except Exception as e:  # user code can raise anything
            outcome = RewardOutcome(kind="error", message=_described(e))
        return replace(outcome, seconds=time.perf_counter() - started)

    return list(await asyncio.gather(*(one(sample) for sample in samples)))


def _copies(sample: RewardSample, settings: Mapping[str, Any]) -> tuple[RewardSample, Mapping[str, Any]]:
    """Return deep copies of a sample and settings, because the completions of one prompt share their columns."""
    copies: tuple[RewardSample, Mapping[str, Any]] = pickle.loads(pickle.dumps((sample, settings)))
    return copies


def _checked(value: Any, *, none_is_allowed: bool = False) -> RewardOutcome:
    """Return the outcome of a returned value, even if its class raises when it is inspected."""
    try:
        return outcome_of(value, none_is_allowed=none_is_allowed)
    except Exception as e:  # raised by the value's class
        return RewardOutcome(
            kind="error", message=f"it returned a {type(value).__name__} that is not a number: {_described(e)}"
        )


def _described(error: Exception) -> str:
    """Return an error with the last line of the user's code in its traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames_of_user = [frame for frame in frames if not any(part in frame.filename for part in _INSTALLED)] or frames
    where = (
        f" ({frames_of_user[-1].filename}:{frames_of_user[-1].lineno}, in {frames_of_user[-1].name})" if frames_of_user else ""
    )
    return f"{type(error).__name__}: {error}{where}"


def _settled(value: Any) -> Any:
    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def outcome_of(value: Any, *, none_is_allowed: bool = False) -> RewardOutcome:
    """Return the outcome of a returned value: a finite number, or a mapping with one as `score`, as in verl."""
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if value is None and none_is_allowed:
        return RewardOutcome(kind="not_applicable")
    if hasattr(value, "item") and hasattr(value, "shape") and math.prod(value.shape) == 1:
        # A tensor with one element.
        value = value.item()
    if not isinstance(value, Real):
        return RewardOutcome(
            kind="error", message=f"it returned {value!r:.80}, a {type(value).__name__}; it must return a number"
        )
    number = float(value)
    if not math.isfinite(number):
        return RewardOutcome(kind="error", message=f"it returned {number}; a reward must be finite")
    return RewardOutcome(kind="value", value=number)


def _arguments(signature: Signature, sample: RewardSample, settings: Mapping[str, Any]) -> dict[str, Any]:
    columns = {**sample.columns, **settings}
    if signature.convention == "verl":
        return {**_wanted(signature, columns), **_asked(signature, _verl(sample))}
    arguments = {
        "sample": sample,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "completion_ids": list(sample.completion_ids),
        "truncated": sample.truncated,
        "turns": [dict(turn) for turn in sample.turns],
        "environment_reward": sample.environment_reward,
    }
    # The sample's own values take precedence over columns of the same names.
    return {**_wanted(signature, columns), **_asked(signature, arguments)}


def _arguments_at_once(signature: Signature, samples: Sequence[RewardSample], settings: Mapping[str, Any]) -> dict[str, Any]:
    if signature.convention == "samples":
        return {"samples": list(samples), **_wanted(signature, settings)}
    if signature.convention == "verl_batch":
        each = [_verl(sample) for sample in samples]
        arguments: dict[str, Any] = {_PLURALS[name]: [one[name] for one in each] for name in _PLURALS}
        return {**_wanted(signature, settings), **_asked(signature, arguments)}
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    arguments = {
        "prompts": [sample.prompt for sample in samples],
        "completions": [sample.completion if isinstance(sample.prompt, str) else _messages(sample) for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        # The function does not run in the trainer's process.
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    return {**_wanted(signature, {**columns, **settings}), **_asked(signature, arguments)}


def _messages(sample: RewardSample) -> list[dict[str, Any]]:
    return [dict(turn) for turn in sample.turns] or [{"role": "assistant", "content": sample.completion}]


def _ignore(*args: Any, **more: Any) -> None:
    pass


def _asked(signature: Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    # A function of single completions that has **kwargs still receives only the arguments that it names.
    every = signature.takes_all and signature.convention != "each"
    return {name: value for name, value in arguments.items() if every or name in signature.named}


def _verl(sample: RewardSample) -> dict[str, Any]:
    columns = sample.columns
    # verl's data sets have the reference inside of this column.
    nested = columns.get("reward_model")
    if "ground_truth" in columns:
        truth = columns["ground_truth"]
    elif isinstance(nested, Mapping) and "ground_truth" in nested:
        truth = nested["ground_truth"]
    elif "answer" in columns:
        truth = columns["answer"]
    else:
        raise KeyError("no column ground_truth, reward_model.ground_truth or answer")
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": sample.completion,
        "ground_truth": truth,
        "extra_info": columns.get("extra_info", {}),
    }


def _wanted(signature: Signature, columns: Mapping[str, Any]) -> dict[str, Any]:
    if missing := sorted(signature.required - set(columns)):
        raise KeyError(f"no column or setting {', '.join(missing)}; the row has {', '.join(sorted(columns)) or 'none'}")
    if signature.takes_all:
        return dict(columns)
    return {name: value for name, value in columns.items() if name in signature.required | signature.optional}
