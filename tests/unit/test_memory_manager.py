"""The memory manager: what is where in each phase, in which order it moves, and what is refused."""

from typing import Any

import pytest

from drivetrain.engine.errors import ConfigError
from drivetrain.trainers.rl.memory_manager import Allocation, MemoryManager, RolePart, RolePlace, scoring_phase

GIB = 2**30
TRAINED = ("parameters", "gradients", "optimizer")


def memory_manager(
    offload_to: Any = "host", *, apart: bool = False, sync: Any = None, holds: bool = True
) -> tuple[MemoryManager, list[str]]:
    """A memory manager of four roles, and what it does."""
    done: list[str] = []
    allocations: dict[tuple[str, RolePart], Allocation] = {("actor", part): Allocation(bytes=GIB) for part in TRAINED}  # type: ignore[misc]
    allocations |= {("critic", part): Allocation(bytes=GIB) for part in TRAINED}  # type: ignore[misc]
    allocations["reference", "parameters"] = Allocation(bytes=GIB)
    allocations["rollout", "parameters"] = Allocation(bytes=GIB, shared=not apart)
    allocations["rollout", "cache"] = Allocation(bytes=4 * GIB, shared=not apart)

    class States:
        def allocations(self) -> dict[tuple[str, RolePart], Allocation]:
            return allocations

        def move(self, role: str, place: RolePlace, part: RolePart) -> None:
            done.append(f"{role} {part} {place}")

        def sync(self, version: int) -> int:
            done.append(f"sync {version}")
            if sync is not None:
                sync(found)
            return 0

        def resend(self, version: int) -> None:
            done.append(f"resend {version}")

        holds_versions = holds

        def verify(self, version: int) -> None:
            done.append(f"verify {version}")

    found = MemoryManager(States(), offload_to=offload_to)
    return found, done


def test_the_order_of_a_step_never_holds_two_large_things() -> None:
    found, done = memory_manager()
    found.sync(0)
    assert done == [
        "rollout cache absent",
        "actor optimizer host",
        "actor gradients host",
        *(f"critic {part} host" for part in reversed(TRAINED)),
        "reference parameters host",
        "sync 0",
        "actor parameters host",
        "rollout cache device",
    ]
    done.clear()
    found.enter("rollout")
    assert done == []
    found.enter("score")
    assert done == ["rollout cache absent", "rollout parameters absent"]
    done.clear()
    found.enter("train")
    assert done == [f"actor {part} device" for part in TRAINED]
    done.clear()
    found.sync(1)
    assert done == [
        "actor optimizer host",
        "actor gradients host",
        "rollout parameters device",
        "sync 1",
        "actor parameters host",
        "rollout cache device",
    ]


@pytest.mark.parametrize(("own", "critic", "comes"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_policy_that_is_its_own_reference_comes_once_for_both(own: bool, critic: bool, comes: int) -> None:
    found, done = memory_manager()
    found.sync(0)
    done.clear()
    found.enter(scoring_phase(own_reference=own, critic=critic))
    assert done.count("actor parameters device") == comes
    # The old log-probabilities, and the update.
    for _ in range(2):
        found.enter("train")
    assert done.count("actor parameters device") == 1
    assert "actor parameters host" not in done


def test_the_large_things_are_elsewhere_while_weights_are_copied() -> None:
    on_device: list[set[tuple[str, str]]] = []

    def note(found: MemoryManager) -> None:
        on_device.append({key for key, allocation in found._allocations.items() if allocation.place == "device"})

    found, _ = memory_manager(sync=note)
    found.sync(0)
    found.enter("train")
    found.sync(1)
    assert on_device == [{("actor", "parameters"), ("rollout", "parameters")}] * 2


def test_the_generator_comes_back_with_the_same_weights_unless_they_were_trained() -> None:
    found, done = memory_manager()
    found.sync(3)
    found.enter("score")
    done.clear()
    found.enter("rollout")
    assert "sync 3" in done
    found.enter("train")
    with pytest.raises(ConfigError, match="the actor has been trained since; sync the weights first"):
        found.enter("rollout")


def test_illegal_moves_are_refused() -> None:
    found, _ = memory_manager()
    found.sync(0)
    with pytest.raises(ConfigError, match="optimizer of actor cannot be moved to the device while parameters of rollout"):
        found.move("actor", "device", "optimizer")
    found.enter("train")
    with pytest.raises(ConfigError, match="cache of rollout cannot be moved to the device while parameters of actor"):
        found.move("rollout", "device", "cache")
    with pytest.raises(ConfigError, match="the memory manager has no cache of actor"):
        found.move("actor", "host", "cache")
    with pytest.raises(ConfigError, match="the places are device, host, disk, absent"):
        found.move("actor", "moon", "optimizer")  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [False, True])
def test_nothing_moves_where_there_is_room(apart: bool) -> None:
    found, done = memory_manager("none", apart=apart)
    found.sync(0)
    for phase in ("rollout", "score", "train", "rollout"):
        found.enter(phase)  # type: ignore[arg-type]
    assert done == ["sync 0"]
    assert len(found.plan()) == 1


def test_a_generator_with_processes_of_its_own_stays_and_the_others_take_turns() -> None:
    found, done = memory_manager(apart=True)
    found.sync(0)
    assert not any(step.startswith("rollout") for step in done)
    assert done[-1] == "actor parameters host"
    done.clear()
    found.enter("rollout")
    found.enter("score")
    assert done == []
    found.enter("train")
    assert done == [f"actor {part} device" for part in TRAINED]
    done.clear()
    # An update of the critic, and back.
    found.enter("score")
    assert done == [f"actor {part} host" for part in reversed(TRAINED)]
    # Of a process that roles share: neither the generator's parameters nor its cache.
    assert found.metrics()["memory/device_bytes"] == 0


def test_bytes_and_plan_are_those_of_the_moves() -> None:
    found, _ = memory_manager("disk")
    found.sync(0)
    assert found.metrics() == {"memory/device_bytes": 5.0 * GIB, "memory/host_bytes": 0.0, "memory/disk_bytes": 7.0 * GIB}
    found.enter("train")
    assert found.metrics()["memory/device_bytes"] == 3.0 * GIB
    plan = {line.partition(":")[0]: line for line in found.plan()}
    assert list(plan) == ["rollout", "score", "train", "sync"]
    assert "device: rollout parameters 1.00 GiB, rollout cache 4.00 GiB; disk: actor" in plan["rollout"]
    assert (
        "device: actor parameters 1.00 GiB, actor gradients 1.00 GiB, actor optimizer 1.00 GiB; disk: critic" in plan["train"]
    )
    assert "device: actor parameters 1.00 GiB, rollout parameters 1.00 GiB; disk:" in plan["sync"]


@pytest.mark.parametrize("offload_to", ["host", "none"])
def test_a_generator_that_holds_versions_is_verified_when_it_uses_them(offload_to: Any) -> None:
    for holds in (False, True):
        found, done = memory_manager(offload_to, apart=True, holds=holds)
        found.sync(3)
        assert ("verify 3" in done) is not holds
        found.verify(2)
        assert done[-1] == "verify 2"
