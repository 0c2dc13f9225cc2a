"""Backend name -> engine class and options class, imported only when asked for.

The one place that names our backends, as strings. A third party adds its own through the entry-point group
`drivetrain.engines`: the entry point's name is the backend's, its object a `BackendSpec`.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .base import BaseEngine

ENTRY_POINT_GROUP = "drivetrain.engines"


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """Where a backend's classes are, as `module:attribute`, so that naming a backend imports nothing.

    Args:
        engine: the `BaseEngine` subclass.
        options: the frozen dataclass behind `engine.options`; its module must import without torch.
        needs: a module that the backend cannot do without.
        extra: of drivetrain, that installs it.
    """

    engine: str
    options: str | None = None
    needs: str | None = None
    extra: str | None = None


_PACKAGE = __name__.rpartition(".")[0]
_BACKENDS: dict[str, BackendSpec] = {
    "fsdp": BackendSpec(engine=f"{_PACKAGE}.fsdp.engine:FSDPEngine", options=f"{_PACKAGE}.fsdp.options:FSDPOptions"),
    "mcore": BackendSpec(
        engine=f"{_PACKAGE}.mcore:MCoreEngine",
        options=f"{_PACKAGE}.mcore.options:MCoreOptions",
        needs="megatron.core",
        extra="mcore",
    ),
}


def register(name: str, spec: BackendSpec) -> None:
    """Add a backend.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _known():
        raise ConfigError(f"backend {name!r} is registered already, by {_known()[name].engine}; choose another name")
    _BACKENDS[name] = spec


def unregister(name: str) -> None:
    """Forget a backend that `register` added."""
    del _BACKENDS[name]


def _known() -> dict[str, BackendSpec]:
    known = dict(_BACKENDS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in known:
            raise ConfigError(
                f"two engines are called {point.name!r}: {known[point.name].engine} and the entry point {point.value}; "
                "uninstall one of the two packages, or rename its entry point"
            )
        spec = point.load()
        if not isinstance(spec, BackendSpec):
            raise ConfigError(
                f"entry point {point.name} = {point.value} of group {ENTRY_POINT_GROUP} is a {type(spec).__name__}; "
                "it must be a drivetrain.engine.registry.BackendSpec"
            )
        known[point.name] = spec
    return known


def backends() -> dict[str, BackendSpec]:
    """Every backend that can be named in `engine.backend`."""
    return dict(sorted(_known().items()))


def spec_of(name: str) -> BackendSpec:
    """The spec of one backend.

    Raises:
        ConfigError: no backend has this name; the nearest is suggested.
    """
    known = _known()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "install the package that brings it."
        raise ConfigError(f"engine.backend={name!r} is unknown; there are {', '.join(sorted(known))}: {hint}")
    return known[name]


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def is_installed(name: str) -> bool:
    """Whether what a backend stands on is there. Imports nothing."""
    needs = spec_of(name).needs
    try:
        return needs is None or find_spec(needs) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def options_class(name: str) -> type | None:
    """The dataclass of `engine.options` for this backend, or None where it has no settings of its own."""
    spec = spec_of(name)
    return _resolve(spec.options) if spec.options else None


def engine_class(name: str) -> "type[BaseEngine]":
    """The engine class of a backend; imports the backend.

    Raises:
        ConfigError: what the backend stands on is not installed.
    """
    spec = spec_of(name)
    if not is_installed(name):
        raise ConfigError(
            f"engine.backend={name} needs {spec.needs}, which is not installed: pip install 'drivetrain[{spec.extra}]', or use "
            "another engine.backend"
        )
    engine: type[BaseEngine] = _resolve(spec.engine)
    return engine
