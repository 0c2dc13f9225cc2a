"""Services over HTTP in front of models."""

# This import fails if the repository root is on sys.path and this package is imported as a top-level one.
from .. import __version__ as __version__
