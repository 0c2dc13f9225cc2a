"""Where the samples of a run are, and how they move between workers."""

from typing import TYPE_CHECKING

from ...lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .data_ref import DataRef as DataRef
    from .dataset import DatasetSpec as DatasetSpec

__getattr__, __dir__ = lazy_exports(__name__, {"DataRef": "data_ref", "DatasetSpec": "dataset"})
