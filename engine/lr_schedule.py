"""Learning-rate schedules and the weight-decay rule, shared by all backends."""

import math
from collections.abc import Iterable
from typing import Any

from .config import OptimConfig
from .errors import ConfigError


def warmup_steps(optim: OptimConfig, total_steps: int | None) -> int:
    """Return the number of linear warmup steps.

    Args:
        optim: The optimizer settings.
        total_steps: The number of steps of the run; None if it is not known.

    Raises:
        ConfigError: `warmup_ratio` is set, but `total_steps` is None.
    """
    if optim.warmup_steps or not optim.warmup_ratio:
        return optim.warmup_steps
    if total_steps is None:
        raise ConfigError(f"optim.warmup_ratio={optim.warmup_ratio} needs a known number of steps; set optim.warmup_steps")
    return math.ceil(optim.warmup_ratio * total_steps)


def learning_rate(step: int, optim: OptimConfig, total_steps: int | None) -> float:
    """Return the learning rate of a step.

    During warmup the learning rate increases linearly and reaches its peak at the last warmup step. After that, `constant`
    keeps it; `linear` and `cosine` (Loshchilov & Hutter 2017, arXiv:1608.03983) decrease it to the fraction `min_lr_ratio` at
    step `total_steps`; `inverse_sqrt` decreases it with the square root of the step (Vaswani et al. 2017, arXiv:1706.03762);
    `wsd` keeps it until the last `decay_ratio` of all steps, then decreases it linearly (Hu et al. 2024, arXiv:2404.06395).

    Args:
        step: The index of the step, starting at 0.
        optim: The optimizer settings.
        total_steps: The number of steps of the run; None if it is not known and the schedule does not need it.

    Raises:
        ConfigError: The schedule or the warmup needs `total_steps`, but it is None.
    """
    warmup = warmup_steps(optim, total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    low = optim.min_lr_ratio
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "inverse_sqrt":
        # Equal to 1 at the last warmup step, so that the schedule has no jump. Without warmup it starts at the peak.
        return optim.lr * max(low, math.sqrt(max(warmup, 1) / (step + 1)))
    if total_steps is None:
        raise ConfigError(f"optim.schedule={optim.schedule} needs a known number of steps; use constant or inverse_sqrt")
    if optim.schedule == "wsd":
        start = max(warmup, math.floor(total_steps * (1 - optim.decay_ratio)))
        progress = _progress(step, start, total_steps)
        return optim.lr * (1 - (1 - low) * progress)
    progress = _progress(step, warmup, total_steps)
    if optim.schedule == "linear":
        return optim.lr * (1 - (1 - low) * progress)
    return optim.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def _progress(step: int, start: int, end: int) -> float:
    if step <= start:
        return 0.0
    return min(1.0, (step - start) / max(1, end - start))


def is_decayed(name: str, dimensions: int) -> bool:
    """Return whether weight decay applies: yes for matrices and embeddings, no for norms, biases and other vectors."""
    return dimensions > 1 and not name.endswith("bias")


IS_DECAYED = "is_decayed"
"""The key of an optimizer's parameter groups that says whether weight decay applies to the group."""


def set_settings(groups: Iterable[dict[str, Any]], optim: OptimConfig) -> None:
    """Set the betas, eps and weight decay of AdamW's parameter groups."""
    for group in groups:
        group.update(betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay if group[IS_DECAYED] else 0.0)
