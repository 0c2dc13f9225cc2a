"""Tools for checkpoints that need no engine: merging into Hugging Face folders, inspecting, comparing and importing.

The functions are listed in `__init__.pyi`. They are imported on first access, so that inspecting a checkpoint does not import torch.
"""

from .. import __version__ as __version__
from ..lazy_imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
