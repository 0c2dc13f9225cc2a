"""The model worker: one process, one rank, which answers requests."""

from typing import TYPE_CHECKING

from ...lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .role_host import RoleSpec as RoleSpec
    from .supervisor import start_model_worker as start_model_worker

__getattr__, __dir__ = lazy_exports(__name__, {"RoleSpec": "role_host", "start_model_worker": "supervisor"})
