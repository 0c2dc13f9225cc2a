"""The memory that a generator needs, estimated from its model's files and config, and the size of its cache."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig

from ..engine.errors import ConfigError, ModelError
from ..engine.hf.config import read_config
from ..engine.hf.model_path import reason, resolve_folder
from ..engine.hf.shape import context_of
from ..engine.offload import free_bytes
from .options import RolloutConfig

TOKENS_WITHOUT_GPU = 32768
"""The default size of a cache without a GPU, in tokens."""
PAGE_TOKENS_CUDA = 256
"""The number of tokens in a page of the cache of `continuous` on a GPU: the minimum of flash attention's kernels."""
CACHE_SHARE = 0.9
"""The fraction of the memory left after parameters and workspace that a cache gets, because both are estimates."""
GIB = 2**30
_LEAST_TOKENS = 1024
"""The smallest cache that is chosen automatically, in tokens."""
_BYTES = {"float32": 4, "bfloat16": 2}
_FIXED_WORKSPACE = 2 * GIB
"""Memory for communicators, CUDA graphs, and fragmentation of the allocator."""
_LOGIT_BYTES = 40
"""Of a logit while a token is drawn: in float32 as it is, scaled, and as a log-probability; in float64 its probability and the sum; and
sorted with their positions."""


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of the GPU that a process uses, or of the one with the least free memory if it uses several.

    Args:
        free: Free memory, in bytes.
        total: All memory, in bytes.
        visible: The number of GPUs that the process sees.
    """

    free: int
    total: int
    visible: int = 1


def gpu_memory(devices: Sequence[int] = ()) -> GpuMemory | None:
    """Return the memory of GPUs; None if there are none.

    Args:
        devices: The indices of the GPUs; empty for the current one.
    """
    if not torch.cuda.is_available():
        return None
    # Memory reserved by this process's allocator counts as free: vLLM and torch release it before they measure.
    gc.collect()
    torch.cuda.empty_cache()
    visible = torch.cuda.device_count()
    chosen = [index for index in devices if index < visible] or [torch.cuda.current_device()]
    free, total = min(torch.cuda.mem_get_info(index) for index in chosen)
    return GpuMemory(free=free, total=total, visible=visible)


@dataclass(frozen=True, kw_only=True)
class GeneratorMemoryNeeds:
    """The memory that a generator needs on each of its devices, in bytes. 0 means that the config and the files do not determine it.

    Args:
        parameters: The size of the parameters.
        per_token: The size of a token in the cache.
        workspace: The size of everything else.
        most_tokens: The number of tokens of the maximum number of concurrent completions, each as long as the model allows; 0 if
            unknown.
    """

    parameters: int
    per_token: int
    workspace: int = 0
    most_tokens: int = 0


def memory_needs(config: RolloutConfig) -> GeneratorMemoryNeeds:
    """Estimate the memory that a generator needs on each of its devices.

    Args:
        config: The configuration of the generator.

    Raises:
        ModelError: The model's config cannot be read.
    """
    folder = resolve_folder(config.model.path)
    # Models that only support generation, such as quantized ones, are refused where the config of a trainable model is read.
    trust = config.model.trust_remote_code
    try:
        model: Any = (
            read_config(config.model)
            if config.model.overrides
            else AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        ).get_text_config(decoder=True)
    except (OSError, ValueError) as e:
        raise ModelError(f"model.path={config.model.path}: {reason(e, config.model.path, 'its config cannot be read')}") from e
    size, tp = _BYTES[config.dtype], config.options.get("tp", 1)
    # An invalid value is reported by the generator's own check.
    tp = tp if isinstance(tp, int) and tp > 0 else 1
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # The files are taken to have the config's data type, or one of 16 bits if it names none of these.
    stored_size = {"float32": 4, "float64": 8}.get(str(getattr(model, "dtype", "")).removeprefix("torch."), 2)
    attention = getattr(model, "num_attention_heads", None)
    heads = getattr(model, "num_key_value_heads", None) or attention or 0
    # Newer configs set the head size; in older ones it follows from the hidden size.
    width = getattr(model, "head_dim", None) or (model.hidden_size // attention if attention else 0)
    # If there are fewer heads than devices, heads are replicated.
    per_token = 2 * model.num_hidden_layers * -(-heads // tp) * width * size
    tokens = max(config.target_tokens_per_batch, config.max_batch_size)
    if config.generator == "continuous":
        # Without flash attention, the keys and values of a layer are gathered and padded by up to a third, with an index.
        per_token += per_token // model.num_hidden_layers * 4 // 3 + 16
    inner = max(getattr(model, "intermediate_size", None) or 0, 4 * model.hidden_size)
    return GeneratorMemoryNeeds(
        parameters=stored * size // stored_size // tp,
        per_token=per_token,
        # A layer's activations for the tokens of a pass, and the logits of one token of each request.
        workspace=_FIXED_WORKSPACE
        + tokens * (8 * model.hidden_size + 3 * inner) * size
        + config.max_batch_size * getattr(model, "vocab_size", 0) * _LOGIT_BYTES,
        most_tokens=config.max_batch_size * (context_of(model) or 0),
    )


def tokens_that_fit(gpu: GpuMemory, needs: GeneratorMemoryNeeds, title: str) -> int:
    """Return the size of a cache, in tokens, for a generator without a configured size.

    Args:
        gpu: The memory of its device before it is built.
        needs: The memory that the generator needs there.
        title: The name of the generator and its model, for messages.

    Raises:
        ConfigError: No useful cache fits.
    """
    if not needs.per_token:
        return TOKENS_WITHOUT_GPU
    room = gpu.free - needs.parameters - needs.workspace
    tokens = int(room * CACHE_SHARE) // needs.per_token if room > 0 else 0
    most = needs.most_tokens or tokens
    # A small model with few requests never needs the usual minimum.
    least = min(_LEAST_TOKENS, needs.most_tokens or _LEAST_TOKENS)
    if tokens < least:
        raise ConfigError(
            f"{title}: the size of the cache (max_batch_total_tokens) is not set, and fewer than {least} tokens fit: of "
            f"{_gib(gpu.total)} on the GPU {_gib(gpu.free)} are free, its parameters need {_gib(needs.parameters)}, and a pass about "
            f"{_gib(needs.workspace)}. Give the generator its own GPUs, lower max_batch_size or target_tokens_per_batch, or set the "
            "size of the cache"
        )
    return min(tokens, most)


def with_cache_size(config: RolloutConfig) -> RolloutConfig:
    """Return a configuration with a cache size: if not set, as many tokens as fit. Call it before the generator is built.

    Raises:
        ConfigError: No useful cache fits.
        ModelError: The model's config cannot be read.
    """
    if config.max_batch_total_tokens:
        return config
    gpu = gpu_memory(devices_of(config))
    title = f"{config.generator} of {config.model.path}"
    tokens = TOKENS_WITHOUT_GPU if gpu is None else tokens_that_fit(gpu, memory_needs(config), title)
    return replace(config, max_batch_total_tokens=tokens)


def check_held_versions(config: RolloutConfig) -> None:
    """Check that this machine has the memory for the versions of the weights that a process may hold in addition to the generator's.

    Raises:
        ConfigError: They do not fit, even if the memory were otherwise free.
        ModelError: The model's config cannot be read.
    """
    if config.held_versions == 1 or config.model.lora.rank:
        # Adapters are small.
        return
    each, room = memory_needs(config).parameters, int(free_bytes(torch.device("cpu"), 1))
    if (config.held_versions - 1) * each > room:
        raise ConfigError(
            f"held_versions={config.held_versions}: {config.held_versions - 1} versions of the weights of {config.model.path} in host memory need "
            f"{_gib((config.held_versions - 1) * each)}, and this machine has {_gib(room)}. Lower it (rollout.held_versions; 1 holds none, and "
            "new weights wait for the completions of older ones), or rl.staleness"
        )


def devices_of(config: RolloutConfig) -> range:
    """Return the indices of the GPUs of a generator with several in one process; empty if it uses the current GPU."""
    tp = config.options.get("tp", 1)
    # In a process group, each rank has one GPU of the model, which is its current one.
    return range(tp) if isinstance(tp, int) and tp > 1 and not _joined() else range(0)


def _joined() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def utilization(gpu: GpuMemory, needs: GeneratorMemoryNeeds, tokens: int, title: str) -> float:
    """Return the fraction of a GPU's memory that an engine may claim, for an engine that refuses to start unless it is free.

    Args:
        gpu: The memory of the device before the engine is built.
        needs: The memory that the engine needs there.
        tokens: The size of its cache, in tokens.
        title: The name of the generator and its model, for messages.

    Raises:
        ConfigError: Parameters and cache do not fit.
    """
    cache = tokens * needs.per_token
    # Its communicators are created before it measures free memory.
    available = gpu.free - GIB
    if needs.parameters + cache > available:
        raise ConfigError(
            f"{title}: of {_gib(gpu.total)} on the GPU {_gib(gpu.free)} are free, but its parameters need {_gib(needs.parameters)} and its "
            f"cache of max_batch_total_tokens={tokens} needs {_gib(cache)}. Lower it, give the generator its own GPUs "
            "(group.pools.rollout), or set options.gpu_memory_utilization to skip this estimate"
        )
    return min(needs.parameters + cache + needs.workspace, available) / gpu.total


def estimated_bytes(config: RolloutConfig) -> dict[str, int]:
    """Return the size of the `parameters` and of the full `cache` on a device, in bytes; 0 if the config and files do not determine it.

    Args:
        config: The configuration of the generator, with the size of the cache.
    """
    needs = memory_needs(config)
    return {"parameters": needs.parameters, "cache": needs.per_token * config.max_batch_total_tokens}


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
