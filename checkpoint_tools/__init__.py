"""Checkpoints without an engine: merged into Hugging Face folders, looked at, compared, and taken over from elsewhere.

Names are resolved when asked for: looking at a checkpoint loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .. import __version__ as __version__

if TYPE_CHECKING:
    from .comparison import compare as compare
    from .comparison import verify as verify
    from .importing import import_checkpoint as import_checkpoint
    from .inspection import inspect as inspect
    from .merging import merge as merge

_HOME = {
    "compare": "comparison",
    "import_checkpoint": "importing",
    "inspect": "inspection",
    "merge": "merging",
    "verify": "comparison",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
