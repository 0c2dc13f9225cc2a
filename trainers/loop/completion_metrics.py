"""Metrics of generated completions: functions that compare the model's completion for a held-out sample with the expected one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from ...engine.errors import ConfigError, DataError
from .samples import HeldOutCompletion

Metric: TypeAlias = Callable[..., float]
"""A function of any of `prompt`, `completion` and `expected`, which are texts without special tokens; higher is better."""
GIVEN = ("prompt", "completion", "expected")
TAKEN = ("step", "split", "loss", "accuracy", "tokens", "seconds", "reward_accuracy", "reward_margin")
"""Names that evaluation records already use."""


def exact_match(completion: str, expected: str) -> float:
    """Return 1 if both texts are equal except for white space around them, and otherwise 0."""
    return float(completion.strip() == expected.strip())


def contains(completion: str, expected: str) -> float:
    """Return 1 if the completion contains the expected text, and otherwise 0."""
    return float(expected.strip() in completion)


BUILT_IN: Mapping[str, Metric] = {"exact_match": exact_match, "contains": contains}


@dataclass(frozen=True)
class CompletionMetrics:
    """The metrics of a run.

    Args:
        functions: The functions by name.
    """

    functions: Mapping[str, Metric]

    @classmethod
    def of(cls, names: Sequence[str], functions: Sequence[Metric] = ()) -> "CompletionMetrics":
        """Find the functions that the settings name.

        Args:
            names: `trainer.metrics`: names of `BUILT_IN`, or `module:function`.
            functions: Functions of a Python program.

        Raises:
            ConfigError: A function does not exist, cannot be called like a metric, or has a name that is taken.
        """
        by_title: dict[str, Metric] = {}
        for function, title in (
            *(_named(name) for name in names),
            *((f, getattr(f, "__name__", type(f).__name__)) for f in functions),
        ):
            if title in by_title or title in TAKEN:
                raise ConfigError(
                    f"two metrics of an evaluation are called {title}; rename the function that trainer.metrics or metrics= has"
                )
            _check_signature(function, title)
            by_title[title] = function
        return cls(by_title)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self.functions)

    def measure(self, completions: Sequence[HeldOutCompletion]) -> dict[str, float]:
        """Return the mean of every metric. Not collective.

        Args:
            completions: The completions; at least one.

        Raises:
            DataError: A function failed, or did not return a number.
        """
        return {
            title: sum(_value(function, title, completion) for completion in completions) / len(completions)
            for title, function in self.functions.items()
        }


def _named(name: str) -> tuple[Metric, str]:
    if name in BUILT_IN:
        return BUILT_IN[name], name
    module, _, attributes = name.partition(":")
    if not attributes or "/" in module or module.endswith(".py"):
        raise ConfigError(
            f"trainer.metrics has {name!r}; give module:function, or one of {', '.join(BUILT_IN)} "
            "(a module is found in this folder and in PYTHONPATH)"
        )
    try:
        function: Any = import_module(module)
        for attribute in attributes.split("."):
            function = getattr(function, attribute)
    except Exception as e:  # a module may raise anything when it is imported
        raise ConfigError(f"trainer.metrics has {name!r}, which cannot be imported: {type(e).__name__}: {e}") from e
    if not callable(function):
        raise ConfigError(f"trainer.metrics has {name!r}, which is a {type(function).__name__} and cannot be called")
    return function, attributes.rpartition(".")[2]


def _check_signature(function: Metric, title: str) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as e:
        raise ConfigError(
            f"the parameters of the metric {title} cannot be inspected; wrap it in a function of any of {', '.join(GIVEN)}"
        ) from e
    # A parameter with a default need not be passed.
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if unknown := [name for name in needed if name not in GIVEN]:
        raise ConfigError(f"the metric {title} needs {unknown[0]!r}; a metric is a function of any of {', '.join(GIVEN)}")


def _value(function: Metric, title: str, completion: HeldOutCompletion) -> float:
    parameters = inspect.signature(function).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    arguments = {
        "prompt": completion.plain_prompt,
        "completion": completion.plain_completion,
        "expected": completion.plain_expected,
    }
    try:
        value = function(**{name: text for name, text in arguments.items() if everything or name in parameters})
    except Exception as e:
        raise DataError(
            f"the metric {title} failed on the completion for {completion.name} with {type(e).__name__}: {e}"
        ) from e
    # numpy does not register its bool as a number, unlike its other types.
    if not isinstance(value, Real | np.bool_):
        raise DataError(f"the metric {title} returned {value!r} for the completion for {completion.name}; it must be a number")
    return float(value)
