"""Roles above the engines; they know no backend."""

# Fails when the repository root is on sys.path and this is imported as a package of its own.
from .. import __version__ as __version__
