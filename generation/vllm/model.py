"""A model for vLLM: its files, its settings, and the checks of its weights."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ...engine.errors import ConfigError, ModelError
from ...engine.hf.model import decoder_of
from ...engine.hf.model_path import resolve_folder
from ...engine.hf.shape import context_of
from ...engine.hf.weights import WeightFolder
from ..memory import GeneratorMemoryNeeds, GpuMemory, gpu_memory, memory_needs, utilization
from ..options import RolloutConfig
from ..placement import GeneratorPlacement
from ..token_stream import CompletionLimits, TokenStream
from ..weight_values import all_finite
from .adapters import adapter_arguments
from .draws import KEY

SUPPORTED = ((0, 32), (0, 33))
"""The first supported version of vLLM, and the first untested one."""
_OWN = {"tp"}
_BLOCK_TOKENS, _BLOCK_TOKENS_CPU = 16, 32
"""The number of tokens in a cache block, the unit of prefix sharing."""
_TIED_HEAD = "lm_head.weight"
_PACKAGE = __name__.rpartition(".")[0]
SAMPLER = f"{_PACKAGE}.sampler:DrivetrainSampler"
"""Our logits processor, under the name that vLLM loads it by."""


class VLLMModel:
    """The model of a generator on vLLM.

    Args:
        config: The configuration of the generator.

    Raises:
        ConfigError: This version of vLLM is not supported.
        ModelError: The folder holds no model.
    """

    def __init__(self, config: RolloutConfig) -> None:
        # Before the import, in which vLLM sets up its logging.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import vllm

        check_version(vllm.__version__)
        self.folder = resolve_folder(config.model.path)
        self._config = config
        self._stored = WeightFolder(self.folder, str).shapes()
        self._model_config = AutoConfig.from_pretrained(self.folder, trust_remote_code=config.model.trust_remote_code)
        self._text = self._model_config.get_text_config()
        self._tied = bool(getattr(self._text, "tie_word_embeddings", False))
        self._context = context_of(self._text)

    def limits(self, max_length: int) -> CompletionLimits:
        """Return the limits of the generator.

        Args:
            max_length: The number of tokens that vLLM's engine allows for a prompt and its completion.
        """
        ends = self._text.eos_token_id
        # It takes precedence over the model's config, as in transformers.
        if (self.folder / "generation_config.json").is_file():
            ends = GenerationConfig.from_pretrained(self.folder).eos_token_id or ends
        return CompletionLimits(
            vocabulary=self._text.vocab_size,
            context=min(self._context or math.inf, max_length),  # type: ignore[arg-type]
            tokens=min(self._config.max_batch_total_tokens, max_length),
            end_tokens=frozenset([ends] if isinstance(ends, int) else ends or ()),
        )

    def engine_arguments(self, tp: int, *, joined: bool = False) -> dict[str, Any]:
        """Return the arguments of vLLM's engine. Call it just before building the engine: they depend on the free memory.

        Args:
            tp: The number of devices of the model.
            joined: Whether each device belongs to a separate process, and these run the model together.

        Raises:
            ConfigError: Parameters and cache do not fit on the GPU.
        """
        config = self._config
        gpu = gpu_memory(range(tp) if tp > 1 and not joined else ())
        if gpu is None:
            # In GiB; the cache of vLLM on a CPU has no size in tokens.
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            if tp > 1:
                # vLLM binds each worker to its own NUMA node, and refuses to start if there are too few.
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            device_arguments: dict[str, Any] = {"enforce_eager": True, "block_size": _BLOCK_TOKENS_CPU}
        else:
            device_arguments = gpu_arguments(config, gpu, memory_needs(config), tp=tp, joined=joined)
            if device_arguments.get("disable_custom_all_reduce"):
                # vLLM's rendezvous treats GPUs with the same index in different processes as one GPU.
                os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
        return {
            "model": str(self.folder),
            "skip_tokenizer_init": True,
            "dtype": config.dtype,
            "trust_remote_code": config.model.trust_remote_code,
            # vLLM refuses a cache that cannot hold a completion of maximum length.
            "max_model_len": min(self._context or config.max_batch_total_tokens, config.max_batch_total_tokens),
            "max_num_seqs": config.max_batch_size,
            "max_num_batched_tokens": max(config.target_tokens_per_batch, config.max_batch_size),
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "tensor_parallel_size": tp,
            "logits_processors": [SAMPLER],
            "worker_extension_cls": f"{_PACKAGE}.worker_extension.WorkerExtension",
            # The logit of the one token that the sampler leaves is its log-probability.
            "logprobs_mode": "processed_logits",
            # vLLM's first runner reads the tokens of a request before the next one is sampled. With the second one, a step would be in
            # flight when new weights arrive.
            "async_scheduling": False,
            # Supported only by the second runner, which requires it.
            **({"enable_return_routed_experts": True} if config.return_routed_experts else {}),
            **(adapter_arguments(config.max_adapters) if config.max_adapters else {}),
            **device_arguments,
            **{name: value for name, value in config.options.items() if name not in _OWN},
        }

    @cached_property
    def _layers_with_experts(self) -> list[int]:
        """The numbers of the layers with experts."""
        # Without memory for the parameters; only the modules are of interest.
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self._text)
        return [
            n
            for n, layer in enumerate(decoder_of(model).layers)
            if any(hasattr(m, "_is_expert_parallel") for m in layer.modules())
        ]

    def routes_of(self, routes: Any) -> Tensor:
        """Return the experts of a request's tokens, `[T, L, K]` int16.

        Args:
            routes: vLLM's result `[T, layers, K]`, with rows for all layers of the model, including those without experts.

        Raises:
            ModelError: It has rows for a different number of layers.
        """
        returned, layers = torch.as_tensor(routes), self._layers_with_experts
        if returned.shape[1] == len(layers):
            return returned.to(torch.int16)
        if returned.shape[1] != self._text.num_hidden_layers:
            raise ModelError(
                f"vLLM returned the experts of {returned.shape[1]} layers, but {self._config.model.path} has {self._text.num_hidden_layers} "
                f"layers, {len(layers)} of them with experts"
            )
        return returned[:, layers].to(torch.int16)

    def common_dtype(self, dtypes: Sequence[str]) -> str:
        """Return the common data type of the parameters in all of vLLM's workers; empty if they differ, or are not the generator's."""
        return self._config.dtype if set(dtypes) == {self._config.dtype} else ""

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, and raise an error if they are not a complete set.

        Raises:
            ModelError: Tensors are missing, unknown, of a wrong shape or not finite.
        """
        yield from self._checked(weights, dict(self._stored))

    def completed(self, weights: Iterable[tuple[str, Tensor]]) -> "CompletedWeights":
        """Return weights that raise an error only after vLLM has received a complete set; see `CompletedWeights`."""
        missing = dict(self._stored)
        return CompletedWeights(self._checked(weights, missing), missing, _TIED_HEAD if self._tied else None)

    def _checked(
        self, weights: Iterable[tuple[str, Tensor]], missing: dict[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        path = self._config.model.path
        for name, tensor in weights:
            shape = missing.get(name)
            if shape is None:
                if name == _TIED_HEAD and self._tied:
                    continue
                raise ModelError(f"the weights are not those of {path}: {name} matches no parameter, or came twice")
            if tuple(tensor.shape) != tuple(shape):
                raise ModelError(
                    f"{name} is {list(tensor.shape)}, but the rollout model's is {list(shape)}; they are different models"
                )
            if not all_finite(tensor):
                raise ModelError(
                    f"{name} has values that are not finite (NaN or infinity); the weights that were sent are damaged"
                )
            del missing[name]
            yield name, tensor
        absent = [name for name in missing if not (self._tied and name == _TIED_HEAD)]
        if absent:
            raise ModelError(
                f"the weights are not those of {path}: {len(absent)} parameters have no tensor ({', '.join(absent[:3])})"
            )


class CompletedWeights:
    """Weights for vLLM, which cannot continue after a partial set: if the stream fails, the missing tensors are replaced by zeros.

    The engine must not generate with such weights. It remains usable, and accepts the next set.

    Args:
        weights: The weights.
        missing: The shapes of the parameters that have not arrived; the stream removes them as they arrive.
        optional: The name of a parameter that may be absent.
    """

    def __init__(
        self, weights: Iterator[tuple[str, Tensor]], missing: Mapping[str, tuple[int, ...]], optional: str | None = None
    ) -> None:
        self._weights, self._missing, self._optional = weights, missing, optional
        self.error: Exception | None = None
        """Why the stream failed."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from self._weights
        except Exception as e:  # the caller raises it after vLLM has loaded everything
            self.error = e
            for name, shape in self._missing.items():
                if name != self._optional:
                    yield name, torch.zeros(shape)


def gpu_arguments(
    config: RolloutConfig, gpu: GpuMemory, needs: GeneratorMemoryNeeds, *, tp: int, joined: bool
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that depend on its GPUs.

    Args:
        config: The configuration of the generator.
        gpu: The memory of the GPU before the engine is built.
        needs: The memory that the engine needs there.
        tp: The number of devices of the model.
        joined: Whether each device belongs to a separate process.

    Raises:
        ConfigError: Parameters and cache do not fit on the GPU.
    """
    arguments: dict[str, Any] = {
        # One more: vLLM keeps one block for itself, as a placeholder.
        "num_gpu_blocks_override": -(-config.max_batch_total_tokens // _BLOCK_TOKENS) + 1,
        "block_size": _BLOCK_TOKENS,
        # Without it, sleep does not free memory.
        "enable_sleep_mode": True,
    }
    if "gpu_memory_utilization" not in config.options:
        # vLLM refuses to start unless this fraction is free, even though the cache size is set. Its default assumes a dedicated GPU.
        arguments["gpu_memory_utilization"] = utilization(
            gpu, needs, config.max_batch_total_tokens, f"generator={config.generator} of {config.model.path}"
        )
    if joined and gpu.visible < tp:
        # vLLM looks for the other ranks' GPUs among those that this process sees.
        arguments["disable_custom_all_reduce"] = True
    return arguments


def sampling_settings(stream: TokenStream) -> dict[str, Any]:
    """Return the sampling parameters of a request: vLLM selects the one token that our sampler leaves."""
    options = stream.options
    return {
        "temperature": 0.0,
        "max_tokens": stream.remaining,
        # They already include the model's end tokens, unless the request ignores these.
        "stop_token_ids": sorted(stream.stop_tokens),
        "ignore_eos": True,
        # Only that of the sampled token.
        "logprobs": 0,
        "detokenize": False,
        "extra_args": {
            KEY: {
                "temperature": float(options.temperature),
                "top_p": float(options.top_p),
                "top_k": options.top_k,
                "seed": stream.seed,
                "begun": len(stream.tokens),
                "prompt": stream.length,
            }
        },
    }


def check_version(version: str) -> None:
    """Check the version of vLLM.

    Raises:
        ConfigError: It is not supported.
    """
    first, beyond = SUPPORTED
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not first <= numbers < beyond:
        raise ConfigError(
            f"vLLM {version} is installed; generator=vllm is tested from {'.'.join(map(str, first))} up to, but not including, "
            f"{'.'.join(map(str, beyond))}: pip install 'vllm>={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}'"
        )


def sleep_calls(present: GeneratorPlacement, target: GeneratorPlacement) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of vLLM's engine, as methods with arguments, that move a model from one placement to another.

    Sleep level 1 copies the weights to the host, level 2 discards them; both free the cache.
    """
    if target == present or (present.parameters, target.parameters) == ("absent", "absent"):
        return []
    calls: list[tuple[str, dict[str, Any]]] = []
    if target.parameters != "device":
        if present.parameters == "host":
            # vLLM cannot switch directly between sleep levels. The cache remains freed in between.
            calls.append(("wake_up", {"tags": ["weights"]}))
        return [*calls, ("sleep", {"level": 1 if target.parameters == "host" else 2})]
    if present.parameters != "device":
        calls.append(("wake_up", {"tags": ["weights"]}))
    elif target.cache != "device":
        # vLLM must be paused for this.
        calls += [("sleep", {"level": 0}), ("release_kv_cache_memory", {})]
    if target.cache == "device":
        calls.append(("wake_up", {"tags": ["kv_cache"]}))
    return calls
