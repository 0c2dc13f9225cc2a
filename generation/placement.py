"""The placement of a generator's parameters and cache."""

from dataclasses import dataclass, replace
from typing import Literal, Self, cast

from ..engine.errors import ConfigError

GeneratorPlace = Literal["device", "host", "absent"]
GeneratorPart = Literal["parameters", "cache"]


@dataclass(frozen=True)
class GeneratorPlacement:
    """The placement of the parts of a generator.

    Args:
        parameters: On the `device`, on the `host`, or `absent`. Absent parameters are not kept, so new weights have to be loaded.
        cache: On the `device` or `absent`. It cannot be used without the parameters.
    """

    parameters: GeneratorPlace = "device"
    cache: GeneratorPlace = "device"

    def moved(self, place: str, part: str | None) -> Self:
        """Return the placement after a move.

        Args:
            place: The target.
            part: The part to move; None is both. A cache does not leave the device: it is dropped, and starts empty.

        Raises:
            ConfigError: There is no such place or part, or the move is not possible.
        """
        if part not in (None, "parameters", "cache"):
            raise ConfigError(f"to({place!r}, {part!r}): the parts of a rollout model are 'parameters' and 'cache'")
        if place not in ("device", "host", "absent"):
            raise ConfigError(f"to({place!r}): a rollout model can be on 'device' or 'host', or 'absent'")
        target = cast("GeneratorPlace", place)
        if part == "cache":
            if target == "host":
                raise ConfigError("to('host', 'cache'): a cache is not kept on the host; use 'absent'")
            if target == "device" and self.parameters != "device":
                raise ConfigError(
                    f"to('device', 'cache') while the parameters are {_where(self.parameters)}; move these to the device first"
                )
            return replace(self, cache=target)
        if (self.parameters, target) == ("absent", "host"):
            raise ConfigError("to('host') while the parameters are absent; load them on the device first")
        if target != "device":
            return replace(self, parameters=target, cache="absent")
        return replace(self, parameters=target, cache="device" if part is None else self.cache)


def _where(place: GeneratorPlace) -> str:
    return "absent" if place == "absent" else f"on the {place}"
