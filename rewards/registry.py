"""Names of reward functions.

A third party adds its own through the entry-point group `drivetrain.rewards`, or names it as `module:function`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import Any

from ..engine.errors import ConfigError

ENTRY_POINT_GROUP = "drivetrain.rewards"
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Locations:
    """Functions or classes with registered names, imported on demand.

    Args:
        kind: Their kind, for messages: `reward`.
        setting: The setting that names one.
        attribute: The part after the module in the location of an unnamed one: `function` or `class`.
        group: The entry-point group through which third parties add theirs.
        named: The location of each, as `module:attribute`.
    """

    kind: str
    setting: str
    attribute: str
    group: str
    named: Mapping[str, str]

    def all(self) -> dict[str, str]:
        """Return all registered locations by name.

        Raises:
            ConfigError: Two of them have the same name.
        """
        locations = dict(self.named)
        for point in entry_points(group=self.group):
            if point.name in locations:
                raise ConfigError(
                    f"two {self.kind}s are called {point.name!r}: {locations[point.name]} and the entry point {point.value}; uninstall one of "
                    "the two packages, or rename its entry point"
                )
            locations[point.name] = point.value
        return dict(sorted(locations.items()))

    def of(self, name: str) -> str:
        """Return the location of a function or class, as `module:attribute`, without importing it.

        Args:
            name: Its name, or `module:attribute`.

        Raises:
            ConfigError: The name is unknown.
        """
        if ":" in name:
            return name
        locations = self.all()
        if name in locations:
            return locations[name]
        close_matches = get_close_matches(name, locations, n=1)
        hint = f"did you mean {close_matches[0]!r}?" if close_matches else f"name your own as module:{self.attribute}"
        raise ConfigError(f"{self.setting}={name!r} is unknown; available: {', '.join(locations)}; {hint}")

    def load(self, location: str) -> Any:
        """Import a function or class.

        Raises:
            ConfigError: It cannot be imported.
        """
        module, _, attributes = location.partition(":")
        if module.endswith(".py") or "/" in module:
            raise ConfigError(
                f"the {self.kind} {location} is the path of a file; use module:{self.attribute}, such as "
                f"{PurePath(module).stem}:{attributes or self.attribute}, and run in the module's folder or name that in PYTHONPATH"
            )
        try:
            loaded: Any = import_module(module)
            for name in attributes.split("."):
                loaded = getattr(loaded, name)
        except (ImportError, AttributeError) as e:
            raise ConfigError(f"the {self.kind} {location} cannot be imported: {e}") from e
        return loaded


REWARDS = Locations(
    kind="reward",
    setting="rewards.use",
    attribute="function",
    group=ENTRY_POINT_GROUP,
    named={
        name: f"{_PACKAGE}.{location}"
        for name, location in {
            "answer": "answers:match_answer",
            "exact": "answers:match_exact",
            "numeric": "answers:match_number",
            "code": "programs:check_program",
            "environment": "rules:environment_value",
            "format": "formats:check_format",
            "json": "formats:check_json",
            "length": "rules:length_within",
            "overlong": "rules:overlong_penalty",
            "repetition": "rules:repetition_penalty",
            "script": "rules:script_share",
        }.items()
    },
)
"""The reward functions."""


def import_function(location: str) -> Callable[..., Any]:
    """Import a reward function.

    Raises:
        ConfigError: It cannot be imported, or is not callable.
    """
    function = REWARDS.load(location)
    # A class is a reward if its instances can be called.
    if isinstance(function, type):
        function = function()
    if not callable(function):
        raise ConfigError(f"the reward {location} is a {type(function).__name__}, which cannot be called")
    return function  # type: ignore[no-any-return]
