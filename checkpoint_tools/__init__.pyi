"""The functions of `drivetrain.checkpoint_tools`, which `__init__.py` imports on first access."""

from .comparison import compare as compare
from .comparison import verify as verify
from .importing import import_checkpoint as import_checkpoint
from .inspection import inspect as inspect
from .merging import merge as merge
