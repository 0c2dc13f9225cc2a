"""The types of models by their output: the names that `model.head` accepts, and the locations of their heads.

Third parties add types with `register_head` or through the entry-point group `drivetrain.heads`. An entry point is known to every
process that has the package installed: its name is the name of the type, and its object is a subclass of `engine.heads.HeadType`.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import ConfigError

ENTRY_POINT_GROUP = "drivetrain.heads"
LM = "lm"
"""The type that keeps the model's own language-model head."""
HEAD_PREFIX = "score."
"""The prefix of the parameter names of any other head, in memory and on disk."""
_PACKAGE = __name__.rpartition(".")[0]
_BUILT_IN = {"value": f"{_PACKAGE}.heads:ValueHead", "actions": f"{_PACKAGE}.heads:ActionHead"}
_HEADS = dict(_BUILT_IN)


def register_head(name: str, location: str) -> None:
    """Add a type of model to this process.

    Args:
        name: The name, for `model.head`.
        location: The location of the subclass of `HeadType`, as `module:attribute`.

    Raises:
        ConfigError: The name is already taken, or the location is malformed.
    """
    if name in head_names():
        raise ConfigError(f"model.head={name} is already taken; choose another name")
    if not isinstance(location, str) or not all(location.partition(":")):
        raise ConfigError(f"model.head={name}: {location!r} is not a location; give 'module:attribute'")
    _HEADS[name] = location


def unregister_head(name: str) -> None:
    """Remove a type that `register_head` added.

    Raises:
        ConfigError: No type of this name was registered.
    """
    if name in _BUILT_IN or name not in _HEADS:
        raise ConfigError(
            f"model.head={name} was not added by register_head, so it cannot be removed; built-in heads and those of entry points stay"
        )
    del _HEADS[name]


@cache
def _installed() -> dict[str, EntryPoint]:
    """The types that installed packages provide."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if taken := sorted({LM, *_BUILT_IN} & set(points)):
        raise ConfigError(
            f"the entry point {points[taken[0]].value} of {ENTRY_POINT_GROUP} is called {taken[0]!r}, a built-in head; rename it"
        )
    return points


def head_names() -> list[str]:
    """Return all names that `model.head` accepts."""
    return sorted({LM, *_HEADS, *_installed()})


def head_class(name: str) -> Any:
    """Import and return the object that is registered under a name.

    Raises:
        ConfigError: It cannot be imported.
    """
    location = _HEADS[name] if name in _HEADS else _installed()[name].value
    module, _, attribute = location.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"model.head={name}: {location} cannot be imported: {e}") from e
