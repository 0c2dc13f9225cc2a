"""Lazy imports of a package's public names, so that importing a config does not import torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build a package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: The package's `__name__`.
        modules: A mapping from each public name to the module inside the package that defines it.
    """

    def resolve(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{modules[name]}", package), name)

    return resolve, lambda: sorted(modules)
