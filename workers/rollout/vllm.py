"""Generation by vLLM, in this process or, with several GPUs, in processes that it starts."""

import gc
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from ...engine.errors import ConfigError, ModelError
from ...engine.hf.model_path import resolve_folder
from ...engine.hf.shape import context_of
from ...engine.hf.weights import WeightFolder
from .generator import BaseGenerator
from .options import RolloutConfig
from .token_stream import Limits, TokenStream

SUPPORTED = ((0, 32), (0, 33))
"""The first version of vLLM that this works with, and the first one that it was not tried with."""
_OWN = {"tp"}
_BLOCK_TOKENS, _BLOCK_TOKENS_CPU = 16, 32
"""The number of tokens of a block of the cache, which is what prompts share."""
_TIED_HEAD = "lm_head.weight"


class VLLMGenerator(BaseGenerator):
    """A generator with the engine of vLLM.

    Tokens are drawn as by the other generators, from the same seeds. `RolloutConfig.options`:

    - `tp`: the number of GPUs of a model. In a process of `torchrun` with that many ranks, each rank is one of them, and all call the
      same methods; otherwise vLLM starts processes of its own.
    - any other name is an argument of vLLM's engine, such as `gpu_memory_utilization` or `max_model_len`.

    Args:
        config: The configuration.

    Raises:
        ConfigError: This version of vLLM is not supported, or an argument is invalid.
        ModelError: The model cannot be loaded.
    """

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        # In this process, so that weights need no copy on their way; and quiet.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import vllm

        check_version(vllm.__version__)
        self._vllm: Any = vllm
        self._folder = resolve_folder(config.model.path)
        self._stored = WeightFolder(self._folder, str).shapes()
        model_config = AutoConfig.from_pretrained(self._folder, trust_remote_code=config.model.trust_remote_code)
        text = model_config.get_text_config()
        self._tied = bool(getattr(text, "tie_word_embeddings", False))
        tp = config.options.get("tp", 1)
        joined = dist.is_initialized() and dist.get_world_size() > 1
        if joined and dist.get_world_size() != tp:
            raise ConfigError(
                f"options.tp={tp}, but this process is one of {dist.get_world_size()} ranks; use the same number"
            )
        self._remote = tp > 1 and not joined
        self._context = context_of(text)
        self._tp, self._joined = tp, joined
        self._engine: Any = self._build(tp, joined)
        self._broken = self._asleep = False
        ends = text.eos_token_id
        if (self._folder / "generation_config.json").is_file():
            ends = GenerationConfig.from_pretrained(self._folder).eos_token_id or ends
        self._limits = Limits(
            vocabulary=text.vocab_size,
            context=min(self._context or math.inf, self._engine.model_config.max_model_len),  # type: ignore[arg-type]
            tokens=min(config.max_batch_total_tokens, self._engine.model_config.max_model_len),
            end_tokens=frozenset([ends] if isinstance(ends, int) else ends or ()),
        )
        self._numbers: dict[int | str, str] = {}
        self._streams: dict[str, TokenStream] = {}
        self._begun: dict[str, int] = {}
        self._count = 0

    def _build(self, tp: int, joined: bool) -> Any:
        config = self.config
        if torch.cuda.is_available():
            blocks = -(-config.max_batch_total_tokens // _BLOCK_TOKENS) + 1
            own: dict[str, Any] = {
                "num_gpu_blocks_override": blocks,
                "block_size": _BLOCK_TOKENS,
                # Without it, sleep frees nothing.
                "enable_sleep_mode": True,
            }
        else:
            # In GiB; the cache of vLLM on a CPU has no size in tokens.
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            own = {"enforce_eager": True, "block_size": _BLOCK_TOKENS_CPU}
        arguments = {
            "model": str(self._folder),
            "skip_tokenizer_init": True,
            "dtype": config.dtype,
            "trust_remote_code": config.model.trust_remote_code,
            # vLLM refuses a cache in which a response of all positions has no room.
            "max_model_len": min(self._context or config.max_batch_total_tokens, config.max_batch_total_tokens),
            "max_num_seqs": config.max_batch_size,
            "max_num_batched_tokens": max(config.target_tokens_per_batch, config.max_batch_size),
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "tensor_parallel_size": tp,
            "logits_processors": [f"{__package__}.vllm_sampler:DrivetrainSampler"],
            # Of the one token that the sampler leaves: its log-probability.
            "logprobs_mode": "processed_logits",
            # The sampler reads the tokens of a request before it draws the next one.
            "async_scheduling": False,
            **({"distributed_executor_backend": "external_launcher"} if joined else {}),
            **own,
            **{name: value for name, value in config.options.items() if name not in _OWN},
        }
        try:
            return self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(**arguments))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"vLLM cannot run {config.model.path}: {e}") from e

    def limits(self) -> Limits:
        """Return what this generator can take."""
        return self._limits

    def run_step(self) -> None:
        """Pass on the requests that wait, which vLLM begins in this order, and run a step of its engine."""
        for stream in list(self.waiting.values()):
            self.admit(stream)
            self._add(stream)
        for output in self._engine.step():
            if output.request_id not in self._streams:
                continue
            stream = self._streams[output.request_id]
            (found,) = output.outputs
            # With the first tokens of a request.
            if self._begun.pop(output.request_id, -1) == len(stream.tokens):
                self.prefill_tokens += len(stream.so_far) - (output.num_cached_tokens or 0)
            for token, log_probs in zip(found.token_ids, found.logprobs or (), strict=True):
                if stream.ended:
                    break
                self.add_token(stream, token, log_probs[token].logprob)

    def _add(self, stream: TokenStream) -> None:
        self._count += 1
        name = f"drivetrain-{self._count}"
        self._numbers[stream.id], self._streams[name] = name, stream
        self._begun[name] = len(stream.tokens)
        options = stream.options
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=stream.remaining,
            stop_token_ids=sorted(stream.stop_tokens),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            extra_args={
                "drivetrain": {
                    "temperature": float(options.temperature),
                    "top_p": float(options.top_p),
                    "top_k": options.top_k,
                    "seed": stream.seed,
                    "begun": len(stream.tokens),
                }
            },
        )
        self._engine.add_request(name, {"prompt_token_ids": stream.so_far}, params)

    def stop_request(self, stream: TokenStream) -> None:
        """Abort a request."""
        name = self._numbers.pop(stream.id)
        del self._streams[name]
        self._begun.pop(name, None)
        self._engine.abort_request([name])

    def drop_caches(self) -> None:
        """Abort all requests, and forget all prefixes."""
        if self._streams:
            self._engine.abort_request(list(self._streams))
        self._streams, self._numbers = {}, {}
        self._begun.clear()
        if not self._engine.reset_prefix_cache():
            raise ModelError("vLLM did not drop its cache of prefixes; tokens of old weights would follow")

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights into the engine.

        Raises:
            ModelError: Tensors are missing, unknown, of a wrong shape or not finite.
        """
        if self._broken:
            # vLLM cannot go on after half of a set.
            self._engine.engine_core.shutdown()
            self._engine = self._build(self._tp, self._joined)
        asleep = self._asleep
        if asleep:
            self.move("device")
        self._broken = True
        self._copy(self._checked(weights))
        self._broken = False
        self.drop_caches()
        if asleep:
            self.move("host")

    def _copy(self, checked: Iterator[tuple[str, Tensor]]) -> None:
        if self._remote:
            self._load_from_files(checked)
        else:
            worker = self._engine.model_executor.driver_worker
            runner = getattr(worker, "worker", worker).model_runner
            runner.reload_weights(weights_iterator=checked)
            if self._tied:
                # Their head keeps a copy of the embedding in the layout of its kernel.
                head = runner.get_model().lm_head
                head.quant_method.process_weights_after_loading(head)

    def _load_from_files(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="drivetrain-weights-"))
        try:
            save_file(
                {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}, folder / "model.safetensors"
            )
            shutil.copy(self._folder / "config.json", folder)
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, and raise an error if they are not a complete set."""
        missing = dict(self._stored)
        for name, tensor in weights:
            shape = missing.pop(name, None)
            if shape is None:
                if name == _TIED_HEAD and self._tied:
                    continue
                raise ModelError(
                    f"the weights are not those of {self.config.model.path}: {name} matches no parameter, or came twice"
                )
            if tuple(tensor.shape) != tuple(shape):
                raise ModelError(
                    f"{name} is {list(tensor.shape)}, but the rollout model's is {list(shape)}; they are different models"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(
                    f"{name} has values that are not finite (NaN or infinity); the weights that were sent are damaged"
                )
            yield name, tensor
        if self._tied:
            missing.pop(_TIED_HEAD, None)
        if missing:
            raise ModelError(
                f"the weights are not those of {self.config.model.path}: {len(missing)} parameters have no tensor "
                f"({', '.join(list(missing)[:3])})"
            )

    def move(self, place: str) -> None:
        """Let the engine sleep, its weights on the host, or wake it. On a CPU they are there already."""
        if not torch.cuda.is_available():
            return
        if place == "host" and not self._asleep:
            self._engine.sleep(level=1)
        elif place == "device" and self._asleep:
            self._engine.wake_up()
        self._asleep = place == "host"

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
        gc.collect()


def check_version(version: str) -> None:
    """Check the version of vLLM.

    Raises:
        ConfigError: It is not supported.
    """
    first, beyond = SUPPORTED
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not first <= found < beyond:
        raise ConfigError(
            f"vLLM {version} is installed; generator=vllm was tried with {'.'.join(map(str, first))} and not with "
            f"{'.'.join(map(str, beyond))}: pip install 'vllm>={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}'"
        )
