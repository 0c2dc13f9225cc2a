"""The Megatron-core engine. Importing it changes no warning filters; building an engine does, see `quiet.py`."""

from typing import TYPE_CHECKING, Any

from .quiet import ignored_warnings

if TYPE_CHECKING:
    from .engine import MCoreEngine as MCoreEngine


def __getattr__(name: str) -> Any:
    if name == "MCoreEngine":
        # On import, megatron warns that TransformerEngine and apex are missing; neither is needed.
        with ignored_warnings():
            from .engine import MCoreEngine

            return MCoreEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
