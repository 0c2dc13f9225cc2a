"""The state of a group's roles, as the memory manager sees and moves it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.errors import WorkerError
from ...generation.options import SamplingOptions
from ...workers.groups.base import WorkerGroup
from ..config.rl import ROLES, RLConfig
from .memory_manager import Allocation, RolePart, RolePlace
from .roles import held_versions, kept_versions, sends_adapters

_PARTS = ("text_config", "ffn_config")
"""Nested configs of a model's config that describe the layers of its language model."""
_RANDOM = re.compile("dropout|layerdrop|pdrop$|jitter")
"""Parts of the names of config settings that, above 0, make a model random during training."""
PROBE, PROBE_TOKENS = [1, 2, 3, 4], 4
"""The prompt for comparing a generator's processes, and the number of tokens to generate."""
PROBE_GAP = 0.05
"""The maximum difference of a log-probability between two processes, which run the same computation."""


def is_random(settings: Mapping[str, Any], lora_dropout: float) -> bool:
    """Return whether training a model involves random numbers: dropout, skipped layers, or router noise.

    Args:
        settings: The model's config, as in config.json.
        lora_dropout: The dropout of its adapters.
    """
    parts = [settings, *(settings.get(name) or {} for name in _PARTS)]
    values = [value for part in parts for name, value in part.items() if _RANDOM.search(name)]
    return any(isinstance(value, int | float) and value > 0 for value in (*values, lora_dropout))


def largest_gap(log_probs_by_model: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of a log-probability from that of the first replica, in nats; NaN if any of them is NaN.

    Args:
        log_probs_by_model: For each replica, the log-probabilities of its tokens; equally many.
    """
    first = log_probs_by_model[0]
    gaps = [abs(a - b) for log_probs in log_probs_by_model for a, b in zip(log_probs, first, strict=True)]
    # `max` alone drops a NaN unless it comes first, because every comparison with it is false.
    return max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap)


class GroupStates:
    """The state of a group's roles.

    Args:
        group: The group.
        config: The run's settings.
    """

    def __init__(self, group: WorkerGroup, config: RLConfig) -> None:
        self._group, self._pools = group, config.group.pools
        self._kind, self._sync_changes = config.group.kind, config.group.sync_changes
        self._held, self._kept = held_versions(config), kept_versions(config)
        self._adapters = sends_adapters(config)

    @property
    def holds_versions(self) -> bool:
        """See `RoleStates`."""
        return self._held > 1

    def allocations(self) -> Mapping[tuple[str, RolePart], Allocation]:
        """Return the allocations of each role in a process, by role and part."""
        allocations: dict[tuple[str, RolePart], Allocation] = {}
        for role in (name for name in ROLES if name in self._group.roles):
            sizes: Mapping[RolePart, int] = self._group[role].state_bytes()
            for part, size in sizes.items():
                place: RolePlace = "host" if part == "held_versions" else "device"
                allocations[role, part] = Allocation(bytes=size, place=place, shared=role not in self._pools)
        if self._kept:
            infos = self._group.rank_infos("rollout")
            # The weights of one replica, over all of its processes.
            whole = allocations["rollout", "parameters"].bytes * len(infos) // infos[0].dp_size
            each = self._group["rollout"].adapter_bytes() or whole
            allocations["actor", "kept_versions"] = Allocation(bytes=self._kept * each, place="host", shared=False)
        return allocations

    def move(self, role: str, place: RolePlace, part: RolePart) -> None:
        """Move a part of a role."""
        self._group[role].to(place, part)

    def sync(self, version: int) -> int:
        """Copy the actor's weights to the generator; return the number of bytes that were sent or handed over."""
        changes = self._sync_changes
        if changes is None and self._adapters:
            changes = False
        if changes is None:
            # Sending only changes does not pay: an optimizer step changes nearly all float32 values, and on one machine the generator reads
            # the actor's memory.
            apart = "rollout" in self._pools and self._kind == "ray"
            changes = apart and self._group.rank_infos("rollout")[0].weight_dtype in ("bfloat16", "float16")
        receipt = self._group.sync_weights(
            "actor", "rollout", version=version, changes=changes, adapters=self._adapters, keep=self._kept
        )
        return receipt.sent_bytes

    def resend(self, version: int) -> None:
        """Send a version to new processes of the generator: the kept copy, or the actor's weights if none is kept."""
        if self._kept:
            self._group.sync_weights(
                "actor", "rollout", version=version, adapters=self._adapters, keep=self._kept, resend=True
            )
        else:
            self.sync(version)

    def verify(self, version: int) -> None:
        """Compare the outputs of the generator's processes on a fixed prompt, with a version of the weights.

        They have received the same bytes, but may have fused or quantized them, or loaded them incorrectly.

        Raises:
            WorkerError: The outputs differ.
        """
        if "rollout" not in self._group.roles:
            return
        count = max(info.dp_size for info in self._group.rank_infos("rollout"))
        # A single replica has nothing to be compared with.
        if count < 2:
            return
        # `ignore_eos`, so that every process generates the same number of tokens.
        options = SamplingOptions(max_tokens=PROBE_TOKENS, temperature=0.0, ignore_eos=True, evaluation=True)
        # Prompts of equal length, one for every model replica.
        completions = self._group["rollout"].generate([PROBE] * count, options, version=version)
        gap = largest_gap([samples[0].log_probs for samples in completions])
        # Written as a negation, so that NaN fails too.
        if not gap <= PROBE_GAP:
            reason = f"compute log-probabilities of one prompt that differ by {gap:.3g} nats between processes"
            self._group["rollout"].discard_weights(reason)
            raise WorkerError(
                f"the generator's processes {reason} after the same weights were copied to them; start the run again"
            )
