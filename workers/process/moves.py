"""The moves of a role's state if it has both an engine and a generator."""

from dataclasses import dataclass
from typing import Literal

from ...engine.errors import ConfigError
from ...generation.placement import GeneratorPlacement

_PARTS = ("parameters", "gradients", "optimizer", "cache")
_PLACES = ("device", "host", "disk", "absent")


@dataclass(frozen=True)
class PlacementStep:
    """A move of the engine or of the generator.

    Args:
        half: Which of them moves.
        place: The target.
        part: The part that moves; None is all of them.
    """

    half: Literal["engine", "generator"]
    place: str
    part: str | None = None


def plan_moves(place: str, part: str | None, generator: GeneratorPlacement) -> list[PlacementStep]:
    """Return the moves of the two halves of a role, in order.

    Each half has its own places and parts. An engine is on the device, on the host or on disk. A generator is never on disk: its
    parameters are a copy of the engine's, so they are dropped and copied again. An engine is never absent, because its state exists nowhere
    else. The order is that of the memory manager: the generator leaves the device before the engine, and returns after it.

    Args:
        place: The target: `device`, `host`, `disk`, or `absent`, which only applies to the generator.
        part: `parameters` of both, `gradients` or `optimizer` of the engine, `cache` of the generator; None is everything.
        generator: The placement of the generator's parts.

    Raises:
        ConfigError: There is no such place or part, or the part cannot be there.
    """
    if part is not None and part not in _PARTS:
        raise ConfigError(f"to({place!r}, {part!r}): the parts of a role with a generator are {', '.join(_PARTS)}")
    if place not in _PLACES:
        raise ConfigError(
            f"to({place!r}): the state of a role with a generator can be moved to {', '.join(map(repr, _PLACES))}"
        )
    if part == "cache":
        if place in ("host", "disk"):
            raise ConfigError(f"to({place!r}, 'cache'): a cache is either on the device or absent; use 'absent'")
        return [PlacementStep("generator", place, part)]
    if part is not None and part != "parameters":
        if place == "absent":
            raise ConfigError(
                f"to('absent', {part!r}): an engine keeps its state; use 'host' or 'disk'. Only its generator can be absent"
            )
        return [PlacementStep("engine", place, part)]
    if place == "device":
        return [PlacementStep("engine", place, part), PlacementStep("generator", place, part)]
    moves = []
    if place != "host" or generator.parameters != "absent":
        # An absent part has no values to keep on the host.
        moves.append(PlacementStep("generator", "absent" if place == "disk" else place, part))
    return moves if place == "absent" else [*moves, PlacementStep("engine", place, part)]
