"""The base class of the configuration of a command."""

from dataclasses import dataclass
from typing import Self

from ...engine.config import Settings


@dataclass(frozen=True, kw_only=True)
class CommandConfig(Settings):
    """All settings of a command."""

    @classmethod
    def parse(cls, *settings: str) -> Self:
        """Merge the defaults, a recipe and settings into a configuration, as the command line does.

        Args:
            settings: Words of the command line, such as `recipe=sft` and `model.path=MODEL`.

        Raises:
            ConfigError: A setting is unknown or has the wrong type, or the recipe does not exist.
        """
        from .parse import parse

        return parse(cls, settings)
