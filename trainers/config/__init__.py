"""Settings of the trainers. No module imports torch."""

from ...lazy_imports import public_names_only

__getattr__ = public_names_only(__name__)
