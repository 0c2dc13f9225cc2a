"""The types of models by their output: the names that `model.head` accepts, and where their heads are. Imports no torch.

A third party adds its own with `register_head`, or through the entry-point group `drivetrain.heads`, so that every process that has the
package installed knows it: the entry point's name is the name of the type, and its object is a subclass of `engine.heads.HeadType`.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from .errors import ConfigError

ENTRY_POINT_GROUP = "drivetrain.heads"
LM = "lm"
"""The type with the model's own language-model head."""
HEAD_PREFIX = "score."
"""What the names of the parameters of any other head begin with, in memory and on disk."""
_PACKAGE = __name__.rpartition(".")[0]
_HEADS = {"value": f"{_PACKAGE}.heads:ValueHead", "actions": f"{_PACKAGE}.heads:ActionHead"}


def register_head(name: str, location: str) -> None:
    """Add a type of models to this process.

    Args:
        name: The name, for `model.head`.
        location: The location of the subclass of `HeadType`, as `module:attribute`.

    Raises:
        ConfigError: The name is already taken.
    """
    if name in head_names():
        raise ConfigError(f"model.head={name} is already taken; choose another name")
    _HEADS[name] = location


def unregister_head(name: str) -> None:
    """Remove a type that `register_head` added."""
    del _HEADS[name]


def head_names() -> list[str]:
    """Return all names that `model.head` accepts."""
    return sorted({LM, *_HEADS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def head_class(name: str) -> Any:
    """Return the subclass of `HeadType` of a name, which is imported."""
    if name in _HEADS:
        module, _, attribute = _HEADS[name].partition(":")
        return getattr(import_module(module), attribute)
    return next(point.load() for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name)
