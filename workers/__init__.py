"""Processes that hold models, and how to drive them. Nothing here depends on a backend."""

# This import fails if the repository root is on sys.path and this package is imported as a top-level one.
from .. import __version__ as __version__
from ..lazy_imports import public_names_only

__getattr__ = public_names_only(__name__)
