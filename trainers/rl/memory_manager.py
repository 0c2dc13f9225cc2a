"""The memory manager, which tracks where the state of every role is, and is the only component that moves it.

Roles that share processes take turns on their devices: the generator's parameters and cache, and the state of trained roles, are
never there together, except the parameters of both while new weights are copied.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ...engine.errors import ConfigError

log = logging.getLogger(__name__)

RolePart = Literal["parameters", "gradients", "optimizer", "cache", "held_versions", "kept_versions"]
RolePlace = Literal["device", "host", "disk", "absent"]
Phase = Literal["rollout", "score", "train"]
PLACES: tuple[RolePlace, ...] = ("device", "host", "disk", "absent")
_TRAINED: tuple[RolePart, ...] = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A part of a role's state.

    Args:
        bytes: Its size in one process.
        place: Its current place.
        shared: Whether its processes also have other roles.
    """

    bytes: int
    place: RolePlace = "device"
    shared: bool = True


def scoring_phase(*, own_reference: bool, critic: bool) -> Phase:
    """Return the phase in which the completions of a step are scored.

    A policy that is its own reference is trained next, so all of its state is loaded at once, instead of loading its parameters twice.
    With a critic it is not, since the critic is trained first.

    Args:
        own_reference: Whether the policy without its adapters is the reference.
        critic: Whether there is a critic.
    """
    return "train" if own_reference and not critic else "score"


class RoleStates(Protocol):
    """The movable state of roles."""

    def allocations(self) -> Mapping[tuple[str, RolePart], Allocation]:
        """Return all allocations, by role and part. `rollout` has the parameters, the cache and other versions of the parameters. Other roles have the
        parameters and, if they are trained, gradients and optimizer.
        """
        ...

    def move(self, role: str, place: RolePlace, part: RolePart) -> None:
        """Move a part of a role."""
        ...

    def sync(self, version: int) -> int:
        """Copy the actor's weights to the generator as a version; return the number of bytes that were sent or handed over."""
        ...

    def resend(self, version: int) -> None:
        """Copy a version that the generator had to its restarted processes."""
        ...

    @property
    def holds_versions(self) -> bool:
        """Whether the generator holds several versions of the weights, and switches to a new one when a call asks for it."""
        ...

    def verify(self, version: int) -> None:
        """Compare the weights that the generator's processes have loaded, once they can generate; they switch to this version."""
        ...


class MemoryManager:
    """The places of all state.

    Args:
        states: The state of the roles.
        offload_to: The place for a role's state while others use the devices: `host`, `disk`, or `none` to move nothing.
    """

    def __init__(self, states: RoleStates, *, offload_to: Literal["none", "host", "disk"]) -> None:
        self._states, self._allocations = states, dict(states.allocations())
        self._offload_to = offload_to
        self._phase: Phase | None = None
        self._version: int | None = None
        self.sent_bytes = 0
        """The number of bytes that the last sync has sent or handed over."""

    @property
    def _takes_turns(self) -> bool:
        # A generator with dedicated processes has no other role to take turns with.
        return self._offload_to != "none" and any(
            allocation.shared for (role, _), allocation in self._allocations.items() if role != "rollout"
        )

    def place(self, role: str, part: RolePart) -> RolePlace:
        """Return the place of a part of a role."""
        return self._allocations[role, part].place

    def enter(self, phase: Phase) -> None:
        """Move all state to the places that a phase needs.

        Args:
            phase: `rollout` needs the generator. `score` needs other roles, whose methods load their state and offload it again; an update
                of the critic, a checkpoint and an export do the same. `train` needs the actor with all of its state.

        Raises:
            ConfigError: The generator was offloaded, and the actor has been trained since; see `sync`.
        """
        # The generator leaves the device before the state of other roles is loaded, and the other way around.
        if self._takes_turns and phase != self._phase:
            if phase == "rollout":
                self._bring_generator()
            else:
                self._move_generator("absent", "cache")
                self._move_generator("absent", "parameters")
            if phase == "train":
                # The generator's copy is outdated once the actor is trained.
                self._version = None
                self._move_all("actor", "device")
            elif phase == "score":
                self._move_all("actor", self._offload_place())
        self._phase = phase

    def sync(self, version: int) -> None:
        """Copy the actor's weights to the generator, and make it ready to generate.

        Args:
            version: The version of the weights.
        """
        if not self._takes_turns:
            self.sent_bytes = self._states.sync(version)
            self._verify_sync(version)
            return
        # First free the cache and the state of all roles, except the actor's parameters, which are about to be copied.
        away = self._offload_place()
        self._move_generator("absent", "cache")
        for role in self._others():
            self._move_all(role, away, but="parameters" if role == "actor" else None)
        self.move("actor", "device", "parameters")
        self._move_generator("device", "parameters")
        self.sent_bytes = self._states.sync(version)
        # Only then is there room for the cache.
        self.move("actor", away, "parameters")
        self._move_generator("device", "cache")
        self._phase, self._version = "rollout", version
        self._verify_sync(version)

    def resend(self, version: int) -> None:
        """Copy a version that the generator had to its restarted, dedicated processes."""
        self._states.resend(version)

    def _verify_sync(self, version: int) -> None:
        # Verifying would switch a generator with several versions to the new one, while older ones are still needed.
        if not self._states.holds_versions:
            self._states.verify(version)

    def verify(self, version: int) -> None:
        """Compare the outputs of the generator's processes with a version of the weights that they hold, before it is used."""
        self._states.verify(version)

    def _bring_generator(self) -> None:
        # Parameters of the generator are freed instead of offloaded, since the actor has the same ones.
        if self.place("rollout", "parameters") == "absent" or self._version is None:
            if self._version is None:
                raise ConfigError("the generator was offloaded, and the actor has been trained since; sync the weights first")
            self.sync(self._version)
        else:
            for role in self._others():
                self._move_all(role, self._offload_place())
            self._move_generator("device", "cache")

    def _move_generator(self, place: RolePlace, part: RolePart) -> None:
        # A generator with dedicated processes stays in place.
        allocation = self._allocations.get(("rollout", part))
        if allocation is not None and allocation.shared:
            self.move("rollout", place, part)

    def _move_all(self, role: str, place: RolePlace, but: RolePart | None = None) -> None:
        # Parameters are offloaded last and loaded first, since the other parts depend on them.
        parts = [part for part in _TRAINED if (role, part) in self._allocations and part != but]
        for part in parts if place == "device" else reversed(parts):
            self.move(role, place, part)

    def _others(self) -> list[str]:
        return list(
            dict.fromkeys(
                role for (role, _), allocation in self._allocations.items() if role != "rollout" and allocation.shared
            )
        )

    def _offload_place(self) -> RolePlace:
        assert self._offload_to != "none"
        return self._offload_to

    def move(self, role: str, place: RolePlace, part: RolePart) -> None:
        """Move a part of a role, unless it is already there.

        Raises:
            ConfigError: There is no such part or place, or the move would put conflicting state on the same devices.
        """
        allocation = self._allocations.get((role, part))
        if allocation is None:
            raise ConfigError(
                f"the memory manager has no {part} of {role}; it has "
                + ", ".join(f"{kind} of {name}" for name, kind in self._allocations)
            )
        if place not in PLACES:
            raise ConfigError(
                f"the memory manager cannot move {part} of {role} to {place!r}; the places are {', '.join(PLACES)}"
            )
        if allocation.place == place:
            return
        if place == "device":
            self._check_room(role, part)
        self._states.move(role, place, part)
        self._allocations[role, part] = replace(allocation, place=place)

    def _check_room(self, role: str, part: RolePart) -> None:
        """Reject moving a part to devices that hold conflicting state."""
        if not self._takes_turns or not self._allocations[role, part].shared:
            return
        for (other, kind), allocation in self._allocations.items():
            if allocation.place != "device" or not allocation.shared or not allocation.bytes:
                continue
            # The parameters of both are allowed: a sync copies from one to the other.
            mine, theirs = (role == "rollout", part), (other == "rollout", kind)
            if mine[0] != theirs[0] and not (part == kind == "parameters" and {role, other} == {"actor", "rollout"}):
                raise ConfigError(
                    f"{part} of {role} cannot be moved to the device while {kind} of {other} are there: the generator and the other "
                    f"roles take turns (group.offload={self._offload_to}); move these away first"
                )

    # ---- reporting ---------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the number of bytes in every place, for a process that all roles share."""
        totals = dict.fromkeys(PLACES, 0)
        for allocation in self._allocations.values():
            if not allocation.shared:
                continue
            totals[allocation.place] += allocation.bytes
        return {f"memory/{place}_bytes": float(totals[place]) for place in PLACES if place != "absent"}

    def log_plan(self) -> None:
        """Log the memory plan of every phase."""
        log.info("memory of a process, as estimated:\n  %s", "\n  ".join(self.plan()))

    def plan(self) -> list[str]:
        """Return the memory plan of every phase, as lines of text."""
        lines = []
        for phase in ("rollout", "score", "train", "sync"):
            parts: dict[RolePlace, list[str]] = {}
            for (role, part), allocation in self._allocations.items():
                parts.setdefault(self._planned(role, part, allocation, phase), []).append(
                    f"{role} {part} {_size(allocation.bytes)}"
                )
            places = "; ".join(f"{place}: {', '.join(parts[place])}" for place in PLACES if place in parts)
            lines.append(f"{phase}: {places}")
            if not self._takes_turns:
                return [f"all the time: {places}"]
        return lines

    def _planned(self, role: str, part: RolePart, allocation: Allocation, phase: str) -> RolePlace:
        if part in ("held_versions", "kept_versions"):
            return "host"
        if not self._takes_turns or not allocation.shared:
            return "device"
        if role == "rollout":
            return "absent" if phase in ("score", "train") or (phase == "sync" and part == "cache") else "device"
        here = role == "actor" and (phase == "train" or (phase == "sync" and part == "parameters"))
        return "device" if here else self._offload_place()


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"
