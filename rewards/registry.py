"""Names of reward functions. Imports no torch.

A third party adds its own through the entry-point group `drivetrain.rewards`, or names it as `module:function`.
"""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import Any

from ..engine.errors import ConfigError

ENTRY_POINT_GROUP = "drivetrain.rewards"
_PACKAGE = __name__.rpartition(".")[0]
_FUNCTIONS = {
    "answer": "answers:match_answer",
    "exact": "answers:match_exact",
    "numeric": "answers:match_number",
    "code": "programs:check_program",
    "format": "formats:check_format",
    "json": "formats:check_json",
    "length": "rules:length_within",
    "overlong": "rules:overlong_penalty",
    "repetition": "rules:repetition_penalty",
    "script": "rules:script_share",
}


def rewards() -> dict[str, str]:
    """Return the locations of all reward functions that have a name, as `module:function`.

    Raises:
        ConfigError: Two of them have the same name.
    """
    locations = {name: f"{_PACKAGE}.{location}" for name, location in _FUNCTIONS.items()}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in locations:
            raise ConfigError(
                f"two rewards are called {point.name!r}: {locations[point.name]} and the entry point {point.value}; uninstall one of the "
                "two packages, or rename its entry point"
            )
        locations[point.name] = point.value
    return dict(sorted(locations.items()))


def location_of(name: str) -> str:
    """Return where a reward function is, as `module:function`, without importing it.

    Args:
        name: Its name, or `module:function`.

    Raises:
        ConfigError: There is no such reward.
    """
    if ":" in name:
        return name
    locations = rewards()
    if name in locations:
        return locations[name]
    close_matches = get_close_matches(name, locations, n=1)
    hint = f"did you mean {close_matches[0]!r}?" if close_matches else "give one of your own as module:function"
    raise ConfigError(f"rewards.use={name!r} is unknown; available: {', '.join(locations)}; {hint}")


def import_function(location: str) -> Callable[..., Any]:
    """Import a reward function.

    Raises:
        ConfigError: It cannot be imported, or is not callable.
    """
    module, _, attributes = location.partition(":")
    if module.endswith(".py") or "/" in module:
        raise ConfigError(
            f"the reward {location} is the path of a file; give module:function, such as {PurePath(module).stem}:{attributes or 'function'}, "
            "and run in the module's folder or name that in PYTHONPATH"
        )
    try:
        function: Any = import_module(module)
        for attribute in attributes.split("."):
            function = getattr(function, attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"the reward {location} cannot be imported: {e}") from e
    if isinstance(function, type):
        function = function()
    if not callable(function):
        raise ConfigError(f"the reward {location} is a {type(function).__name__}, which cannot be called")
    return function  # type: ignore[no-any-return]
