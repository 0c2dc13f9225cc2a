"""Drivetrain: one training program for large language models, on any engine.

The public names are those of `__init__.pyi`. They are imported on first access, so that importing a configuration loads no torch.
"""

from .lazy_imports import lazy_exports, name_moved_modules

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_exports(__name__, __file__)
name_moved_modules()
