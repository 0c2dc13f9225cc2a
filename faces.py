"""Faces of packages: names that are resolved when asked for, so that importing a config loads no torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def hand_out(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`.
        home: public name -> the module inside the package that defines it.
    """

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{home[name]}", package), name)

    return find, lambda: sorted(home)
