"""The trainers, and other commands that users launch."""

# Fails if the repository root is on sys.path and this is imported as a top-level package.
from .. import __version__ as __version__
