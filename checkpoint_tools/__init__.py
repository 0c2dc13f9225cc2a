"""Tools for checkpoints that need no engine: merging into Hugging Face folders, inspecting, comparing and importing.

Names are resolved lazily, so inspecting a checkpoint does not import torch.
"""

from typing import TYPE_CHECKING

from .. import __version__ as __version__
from ..lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .comparison import compare as compare
    from .comparison import verify as verify
    from .importing import import_checkpoint as import_checkpoint
    from .inspection import inspect as inspect
    from .merging import merge as merge

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "compare": "comparison",
        "import_checkpoint": "importing",
        "inspect": "inspection",
        "merge": "merging",
        "verify": "comparison",
    },
)
