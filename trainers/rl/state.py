"""The state of a group's roles, as the memory manager sees and moves it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ...engine.errors import WorkerError
from ...generation.options import SamplingOptions
from ...workers.groups.base import WorkerGroup
from ..config.rl import ROLES, RLConfig
from .memory_manager import Allocation, Move, RolePart, RolePlace

_PARTS = ("text_config", "ffn_config")
"""Configs inside a model's config that are those of a language model's layers."""
_RANDOM = re.compile("dropout|layerdrop|pdrop$|jitter")
"""In the names of settings of a model that are random only while it is trained, if they are above 0."""
PROBE, PROBE_TOKENS = [1, 2, 3, 4], 4
"""The prompt on which a generator's processes are compared, and the number of tokens that they answer it with."""
PROBE_GAP = 0.05
"""The largest difference of a log-probability between two processes, which compute the same in the same way."""


def allocations_of(group: WorkerGroup, config: RLConfig) -> Mapping[tuple[str, RolePart], Allocation]:
    """Return what each role holds in a process.

    Args:
        group: The group.
        config: The run's settings.
    """
    found: dict[tuple[str, RolePart], Allocation] = {}
    for role in (name for name in ROLES if name in group.roles):
        sizes: Mapping[RolePart, int] = group[role].state_bytes()
        for part, size in sizes.items():
            found[role, part] = Allocation(bytes=size, shared=role not in config.group.pools)
    return found


def is_random(settings: Mapping[str, Any], lora_dropout: float) -> bool:
    """Return whether a model computes random numbers while it is trained: by dropout, skipped layers, or noise at its routers.

    Args:
        settings: The model's config, as in config.json.
        lora_dropout: The dropout of its adapters.
    """
    parts = [settings, *(settings.get(name) or {} for name in _PARTS)]
    values = [value for part in parts for name, value in part.items() if _RANDOM.search(name)]
    return any(isinstance(value, int | float) and value > 0 for value in (*values, lora_dropout))


def move_with(group: WorkerGroup) -> Move:
    """Return the function that moves a part of a role."""

    def move(role: str, place: RolePlace, part: RolePart) -> None:
        group[role].to(place, part)

    return move


def verify_with(group: WorkerGroup) -> Callable[[], None]:
    """Return the function that compares what the processes of the generator make of one fixed prompt.

    They have received the same bytes, but may have fused or quantized them, or have loaded them wrongly.
    """

    def verify() -> None:
        if "rollout" not in group.roles:
            return
        count = max(info.dp_size for info in group.rank_infos("rollout"))
        if count < 2:
            return
        options = SamplingOptions(max_tokens=PROBE_TOKENS, temperature=0.0, ignore_eos=True, evaluation=True)
        # Prompts of one length, of which every model gets one.
        found = [some[0].log_probs for some in group["rollout"].generate([PROBE] * count, options)]
        worst = max(abs(one - other) for own in found for one, other in zip(own, found[0], strict=True))
        if not worst <= PROBE_GAP:
            reason = f"make log-probabilities of one prompt that differ by {worst:.3g} nats from process to process"
            group["rollout"].discard_weights(reason)
            raise WorkerError(
                f"the generator's processes {reason} after the same weights were copied to them; start the run again"
            )

    return verify


def sync_with(group: WorkerGroup) -> Callable[[int], None]:
    """Return the function that copies the actor's weights to the generator."""

    def sync(version: int) -> None:
        group.sync_weights("actor", "rollout", version=version)

    return sync
