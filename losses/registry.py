"""Registries of objects that settings choose by name: objectives, estimators and algorithms of RL.

A registration is one class or object in one file: its settings with their help lines, its inputs, its paper, and its line in the docs.
All modules of built-in registrations in `PLACES` are imported. Third parties add theirs through the entry-point group `drivetrain.losses`:
an entry point's object is a module that registers objects when it is imported, without importing torch.
"""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_type_hints

from ..engine.config import Settings, setting
from ..engine.errors import ConfigError

ENTRY_POINT_GROUP = "drivetrain.losses"
_PACKAGE = __name__.rpartition(".")[0]
PLACES = ("algorithms", "objectives", "estimators", "pair_losses")
"""The modules of the built-in registrations, and the packages of such modules."""

Chosen = TypeVar("Chosen")
SettingsClass = TypeVar("SettingsClass")
RegisteredClass = TypeVar("RegisteredClass", bound=type[Any])


@cache
def load() -> None:
    """Import every module with registrations.

    Raises:
        ConfigError: A third party's module cannot be imported.
    """
    for place in PLACES:
        package = import_module(f"{_PACKAGE}.{place}")
        for module in iter_modules(getattr(package, "__path__", [])):
            import_module(f"{package.__name__}.{module.name}")
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()
        except (ImportError, AttributeError) as e:
            raise ConfigError(
                f"entry point {point.name} = {point.value} of group {ENTRY_POINT_GROUP} cannot be imported: {e}"
            ) from e


class LossRegistry(Generic[Chosen]):
    """Objects that settings choose by name.

    Args:
        kind: The setting that names an entry, for messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Chosen] = {}

    def add(self, name: str, entry: Chosen) -> None:
        """Add an entry.

        Raises:
            ConfigError: The name is taken, or all entries have been read already, so it would be missing in settings and other processes.
        """
        if name in self._entries:
            raise ConfigError(
                f"two registrations of {self.kind}={name}: {self._entries[name]} and {entry}; choose another name"
            )
        # While `load` runs, its cache is still empty; a registration after that would be missing where entries were
        # already listed.
        if load.cache_info().currsize:
            raise ConfigError(
                f"{self.kind}={name} is registered after the settings have been read; name its module in an entry point of the group "
                f"{ENTRY_POINT_GROUP}, so that every process has it"
            )
        self._entries[name] = entry

    def all(self) -> dict[str, Chosen]:
        """Return all entries by name, in alphabetical order."""
        load()
        return dict(sorted(self._entries.items()))

    def get(self, name: str) -> Chosen:
        """Return an entry.

        Raises:
            ConfigError: There is no entry of this name.
        """
        entries = self.all()
        if name not in entries:
            raise ConfigError(f"{self.kind}={name}; choose one of {', '.join(entries)}")
        return entries[name]


class NamedSettings(Settings):
    """Base class of objects chosen by name with their settings: a frozen dataclass whose fields are `setting(default, help)`."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    """The line in the docs."""
    paper: ClassVar[str] = ""


def describe(
    registry: LossRegistry[Any], name: str, summary: str, *, paper: str
) -> Callable[[RegisteredClass], RegisteredClass]:
    """Return a decorator that registers a subclass of `NamedSettings`.

    Args:
        registry: The registry to add the class to.
        name: The name in settings and messages.
        summary: The line in the docs.
        paper: Author, year and arXiv number.
    """

    def add(cls: RegisteredClass) -> RegisteredClass:
        cls.name, cls.summary, cls.paper = name, summary, paper
        registry.add(name, cls)
        return cls

    return add


class RegistryConfig:
    """Base class of a configuration with a field that holds an object of a registry.

    In settings and messages it is flat: the field has the object's name, and the object's settings are next to the configuration's.
    """

    part: ClassVar[str]
    """The name of the field."""
    registry: ClassVar[LossRegistry[Any]]

    @classmethod
    def from_settings(cls, **settings: Any) -> Self:
        """Build a configuration from flat settings.

        Args:
            settings: The fields, with the object's name or the object itself, and the settings of the object, which replace those that
                the object has. Settings of other objects in the registry are ignored, because messages of older versions contain all of
                them.

        Raises:
            ConfigError: There is no such object or setting, or a value is out of range.
        """
        chosen = settings.get(cls.part, getattr(cls, cls.part).name)
        # A custom class may have settings of its own. Anything else that is not a name is refused by `_check_part`.
        part_names = {f.name for f in fields(chosen)} if is_dataclass(chosen) and not isinstance(chosen, type) else set[str]()
        if unknown := sorted(settings.keys() - cls.setting_names() - part_names):
            raise ConfigError(f"{unknown[0]}={settings[unknown[0]]}: {cls.__name__} has no such setting")
        if isinstance(chosen, str):
            kind = cls.registry.get(chosen)
            # Only the settings of the chosen object: the flat form may hold those of others as well.
            chosen = kind(**{f.name: settings[f.name] for f in fields(kind) if f.name in settings})
        elif changes := {name: settings[name] for name in sorted(part_names & settings.keys())}:
            chosen = replace(chosen, **changes)
        own_settings = {f.name: settings[f.name] for f in fields(cls) if f.name in settings}  # type: ignore[arg-type]
        return cls(**{**own_settings, cls.part: chosen})

    @classmethod
    def setting_names(cls) -> set[str]:
        """Return the names of its fields and of the settings of all objects of the registry."""
        return {f.name for kind in (cls, *cls.registry.all().values()) for f in fields(kind)}  # type: ignore[arg-type]

    def settings(self) -> dict[str, Any]:
        """Return the flat settings, the inverse of `from_settings`. An unregistered object is kept as an object."""
        own_settings = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        chosen = own_settings[self.part]
        # An object of a custom class, possibly with the inherited name of a registered one, cannot be found again by
        # its name.
        if self.registry.all().get(chosen.name) is not type(chosen):
            return own_settings
        return {**own_settings, self.part: chosen.name, **{f.name: getattr(chosen, f.name) for f in fields(chosen)}}

    def with_settings(self, **changes: Any) -> Self:
        """Return a configuration with changed flat settings. If another object is named, settings that both objects have are kept.

        Args:
            changes: The settings that differ. An objective or estimator that is given as an object keeps its own settings, except those that are among them.

        Raises:
            ConfigError: There is no such setting, or a value is out of range.
        """
        kept = self.settings()
        if not isinstance(changes.get(self.part, ""), str):
            # The settings of the old object must not replace those of the new one.
            kept = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return self.from_settings(**{**kept, **changes})

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the flat settings."""
        return {f.name: f.default for f in (*fields(self), *fields(getattr(self, self.part)))}  # type: ignore[arg-type]

    def _check_part(self, base: type) -> None:
        if not isinstance(chosen := getattr(self, self.part), base):
            raise ConfigError(
                f"{self.part}={chosen!r} is not an instance of {base.__name__}; {type(self).__name__}.from_settings takes its name "
                "with its settings"
            )


def with_settings_of(registry: LossRegistry[Any], part: str) -> Callable[[type[SettingsClass]], type[SettingsClass]]:
    """Return a decorator that adds the settings of all entries to a class before it becomes a dataclass. Each may be null.

    The help lines begin with the names of the entries.

    Args:
        registry: The registry.
        part: The field that names an entry; its type becomes a literal of all names.

    Raises:
        ConfigError: An entry and the class have a setting of the same name, or two entries have one with different types.
    """

    def extend(cls: type[SettingsClass]) -> type[SettingsClass]:
        annotations, types = cls.__annotations__, dict[str, Any]()
        lines: dict[str, dict[str, list[str]]] = {}
        for name, kind in registry.all().items():
            hints = get_type_hints(kind)
            for f in fields(kind):
                if f.name in annotations:
                    raise ConfigError(
                        f"the setting {f.name} of {registry.kind}={name} is one of {cls.__name__} itself; give it another name"
                    )
                if types.setdefault(f.name, hints[f.name]) != hints[f.name]:
                    raise ConfigError(
                        f"the setting {f.name} of {registry.kind}={name} has another type elsewhere; give it another name"
                    )
                lines.setdefault(f.name, {}).setdefault(f.metadata.get("help", ""), []).append(name)
        for name, by_help in lines.items():
            setattr(cls, name, setting(None, "; ".join(f"{', '.join(names)}: {line}" for line, names in by_help.items())))
        names: Any = Literal[tuple(registry.all())]  # type: ignore[misc]
        nullable = {name: hint | None for name, hint in types.items()}
        # Replaced as a whole, so that the new fields come first and `part` has the literal of all names as its type.
        cls.__annotations__ = {
            part: names | None,
            **nullable,
            **{name: hint for name, hint in annotations.items() if name != part},
        }
        return cls

    return extend


def check_positive(settings: Any, *names: str) -> None:
    """Check that settings are finite and more than 0.

    Raises:
        ConfigError: A setting is not; the message names it.
    """
    for name in names:
        if not (getattr(settings, name) > 0 and math.isfinite(getattr(settings, name))):
            raise ConfigError(f"{name}={getattr(settings, name)}; it must be more than 0")


def check_not_negative(settings: Any, *names: str) -> None:
    """Check that settings are finite and 0 or more, unless they are None.

    Raises:
        ConfigError: A setting is not; the message names it.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{name}={value}; it must be 0 or more")


def check_share(settings: Any, *names: str) -> None:
    """Check that settings are from 0 to 1.

    Raises:
        ConfigError: A setting is not; the message names it.
    """
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            raise ConfigError(f"{name}={getattr(settings, name)}; it must be between 0 and 1")
