"""The bottom layer: builds, shards, steps and saves a model. Independent of any training task."""

# This fails if the repository root is on sys.path and `engine` is imported as a top-level package, which would create a second
# copy of every class.
from .. import __version__ as __version__
from ..lazy_imports import public_names_only

__getattr__ = public_names_only(__name__)
