"""Decides whether to correct for the numerical difference between generator and actor."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from ...engine.resolve import compute_dtype
from ...workers.groups.base import WorkerGroup
from ..config.rl import RLConfig
from .roles import rollout_config

log = logging.getLogger(__name__)

_SAME_PROGRAM = ("static", "continuous", "exact", "tensor_parallel")
"""Generators that compute with transformers, like the actor."""


def resolve_importance(config: RLConfig, group: WorkerGroup) -> RLConfig:
    """Return the settings with `rl.importance=auto` resolved, and log the choice.

    Args:
        config: The run's settings.
        group: The group of its roles.
    """
    if config.rl.importance != "auto":
        return config
    if "rollout" in group.roles:
        generator: Mapping[str, str] = group["rollout"].dtype_and_device()
    else:
        # The completions come from a bundle.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = rollout_config(config).dtype
        generator = {"dtype": ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype, "device": device}
    reason = difference(config, generator)
    if reason is None and config.rl.staleness:
        reason = f"completions may be up to {config.rl.staleness} steps old"
    importance: Literal["none", "truncate"] = "none" if reason is None else "truncate"
    why = reason or "the generator computes the same numbers as the actor"
    if config.rl.old_log_probs == "rollout":
        importance, why = "none", "rl.old_log_probs=rollout takes the generator's log-probabilities as the old ones"
    elif config.rl.algorithm == "online_dpo":
        importance, why = "none", "the loss of rl.algorithm=online_dpo has no importance ratio"
    log.info("importance correction: %s, since %s (rl.importance=auto)", importance, why)
    return replace(config, rl=replace(config.rl, importance=importance))


def difference(config: RLConfig, generator: Mapping[str, str]) -> str | None:
    """Return why the generator's log-probabilities are not the actor's; None if they agree up to the rounding of float32.

    Args:
        config: The run's settings.
        generator: The `dtype` of the generator's weights, and the type of its `device`.
    """
    rollout, model = config.rollout, config.actor.model or config.model
    if rollout.generator not in _SAME_PROGRAM:
        return f"rollout.generator={rollout.generator} uses other kernels than the actor"
    quantized = rollout.options.get("quant") or (model.quantization if model.quantization != "none" else None)
    if quantized:
        return f"weights are quantized ({quantized})"
    # In float32, two programs with the same operations agree up to rounding that needs no correction.
    if generator["dtype"] != "float32":
        return f"the generator computes in {generator['dtype']}, whose rounding depends on the shapes of a batch"
    computed = compute_dtype((config.actor.engine or config.engine).precision, cuda=generator["device"] == "cuda")
    return None if computed in ("float32", "float64") else f"the actor computes in {computed}, and the generator in float32"
