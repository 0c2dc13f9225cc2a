"""The Megatron-core engine. Importing it changes no warning filters; building an engine does, see `quiet.py`."""

from typing import TYPE_CHECKING, Any

from .quiet import ignored_warnings

if TYPE_CHECKING:
    from .engine import MCoreEngine as MCoreEngine


def __getattr__(name: str) -> Any:
    if name == "MCoreEngine":
        # On import, megatron warns about TransformerEngine and apex, which are missing and not needed.
        with ignored_warnings():
            from .engine import MCoreEngine

            return MCoreEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
