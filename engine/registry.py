"""Registry of backends: maps each name to an engine class and an options class, which are imported on demand.

This is the only module that names the built-in backends, as strings. A third party adds its own through the entry-point group
`drivetrain.engines`: the entry point's name is the name of the backend, and its object is a `BackendSpec`.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .config import EngineConfig, ModelConfig
from .errors import CapabilityError, ConfigError, ModelError, TopologyError, install_command

if TYPE_CHECKING:
    from .base import BaseEngine

ENTRY_POINT_GROUP = "drivetrain.engines"


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """The locations of a backend's classes, as `module:attribute`, so that listing backends does not import them.

    Args:
        engine: The location of the `BaseEngine` subclass.
        options: The location of the frozen dataclass for `engine.options`, whose module must not import torch; None if the
            backend has no settings.
        needs: A module that the backend requires.
        extra: The extra of drivetrain that installs this module.
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

    Args:
        name: The name of the backend.
        spec: The locations of its classes.

    Raises:
        ConfigError: The name is already taken.
    """
    if name in _known():
        raise ConfigError(f"backend {name!r} is already registered by {_known()[name].engine}; choose another name")
    _BACKENDS[name] = spec


def unregister(name: str) -> None:
    """Remove a backend that `register` added."""
    del _BACKENDS[name]


def _known() -> dict[str, BackendSpec]:
    specs = dict(_BACKENDS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in specs:
            raise ConfigError(
                f"two backends are called {point.name!r}: {specs[point.name].engine} and the entry point {point.value}; "
                "uninstall one of the two packages, or rename its entry point"
            )
        spec = point.load()
        if not isinstance(spec, BackendSpec):
            raise ConfigError(
                f"entry point {point.name} = {point.value} of group {ENTRY_POINT_GROUP} is a {type(spec).__name__}; "
                "it must be a drivetrain.engine.registry.BackendSpec"
            )
        specs[point.name] = spec
    return specs


def backends() -> dict[str, BackendSpec]:
    """Return all backends that `engine.backend` accepts."""
    return dict(sorted(_known().items()))


def main(argv: Sequence[str]) -> int:
    """Run `drivetrain backends`; return the exit code."""
    return print_list(
        "backends", "the engines that engine.backend accepts", argv, {n: s.engine for n, s in backends().items()}
    )


def print_list(command: str, what: str, argv: Sequence[str], rows: Mapping[str, str]) -> int:
    """Run a command that prints names and their descriptions; return its exit code.

    Args:
        command: The command.
        what: The description of the output, for `--help`.
        argv: The command-line arguments.
        rows: The names and their descriptions.
    """
    argparse.ArgumentParser(prog=f"drivetrain {command}", description=f"Print {what}.").parse_args(argv)
    width = max(map(len, rows))
    print("\n".join(f"{name:{width}} {meaning}" for name, meaning in rows.items()))
    return 0


def spec_of(name: str) -> BackendSpec:
    """Return the spec of a backend.

    Args:
        name: The name of the backend.

    Raises:
        ConfigError: There is no backend of this name; the message suggests the closest one.
    """
    specs = _known()
    if name not in specs:
        close_matches = get_close_matches(name, specs, n=1)
        hint = (
            f"did you mean {close_matches[0]!r}?"
            if close_matches
            else "install the package that provides a custom backend; sharding is set by engine.parallel.*, offloading by engine.offload.*"
        )
        raise ConfigError(f"engine.backend={name!r} is unknown; available: {', '.join(sorted(specs))}; {hint}")
    return specs[name]


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def is_installed(name: str) -> bool:
    """Return whether the module that a backend requires is installed, without importing it."""
    needs = spec_of(name).needs
    try:
        return needs is None or find_spec(needs) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def options_class(name: str) -> type | None:
    """Return the dataclass for `engine.options` of a backend; None if it has no settings."""
    spec = spec_of(name)
    return _resolve(spec.options) if spec.options else None


def engine_class(name: str) -> "type[BaseEngine]":
    """Import a backend and return its engine class.

    Args:
        name: The name of the backend.

    Raises:
        ConfigError: The module that the backend requires is not installed.
    """
    spec = spec_of(name)
    if not is_installed(name):
        raise ConfigError(
            f"engine.backend={name} needs {spec.needs}, which is not installed: {install_command(spec.extra or '')}, or "
            "use another engine.backend"
        )
    engine: type[BaseEngine] = _resolve(spec.engine)
    return engine


def other_backends(axis: str, engine: EngineConfig, model: ModelConfig) -> list[str]:
    """Return the installed backends, other than the chosen one, that support an axis of the layout and the model. Reads no weights.

    Args:
        axis: The name of the axis.
        engine: The engine settings.
        model: The model settings.
    """
    names = []
    for name in backends():
        if name == engine.backend or not is_installed(name) or axis not in engine_class(name).capabilities.axes:
            continue
        try:
            engine_class(name)(model=model, engine=replace(engine, backend=name, options=None)).check_model(engine.parallel)
        except TopologyError:
            # The model is supported, though not with this size of the axis; the error of that backend names those that are.
            pass
        except (CapabilityError, ModelError):
            continue
        names.append(name)
    return names
