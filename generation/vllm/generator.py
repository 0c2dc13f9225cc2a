"""Generation by vLLM's engine, in this process or, with several GPUs, in processes that it starts."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.errors import ConfigError, ModelError
from ...engine.hf.config import read_config
from ...engine.hf.model_path import fingerprint
from ...engine.offload import free_memory
from ...engine.parallel.collectives import all_gather_object
from ...engine.parallel.process_groups import fixed_segments
from ..adapters import check_adapter_settings, weights_stay
from ..generator import BaseGenerator
from ..options import RolloutConfig
from ..placement import GeneratorPlacement
from ..route_recorder import check_has_experts
from ..token_stream import CompletionLimits, TokenStream
from ..weight_files import write_weights
from .adapters import DEFAULT_RANK, VLLMAdapters
from .model import VLLMModel, sampling_settings, sleep_calls
from .worker_extension import reload_weights


class VLLMGenerator(BaseGenerator):
    """A generator with the engine of vLLM.

    Tokens are drawn as by the other generators, from the same seeds. `RolloutConfig.options`:

    - `tp`: the number of GPUs of a model. In a process group, each `tp` neighboring ranks are the GPUs of one model, and all of these
      call the same methods; in a process by itself, vLLM starts processes of its own.
    - any other name is an argument of vLLM's engine, such as `gpu_memory_utilization` or `max_model_len`.

    Args:
        config: The configuration.

    Raises:
        ConfigError: This version of vLLM is not supported, or an argument is invalid.
        ModelError: The model cannot be loaded.
    """

    option_names = None
    returns_routes = True
    joins_process_group = True
    has_adapters = True

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        # In this process, so that weights need no copy on their way.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._model = VLLMModel(config)
        tp = config.options.get("tp", 1)
        joined = dist.is_initialized() and dist.get_world_size() > 1
        self._remote = tp > 1 and not joined
        self._tp, self._joined = tp, joined
        self.ranks_per_model = tp if joined else 1
        # Before the engine is built, which may start process groups of its own.
        self._shares_process_group = dist.is_initialized()
        self._engine: Any = self._build()
        self._broken = False
        self._adapters_of_requests: dict[str, int] = {}
        """The number of the adapter of each request that is under way."""
        self._side_by_side: VLLMAdapters | None = None
        if config.max_adapters:
            path, rank = config.model.path, int(config.options.get("max_lora_rank", DEFAULT_RANK))
            self._side_by_side = VLLMAdapters(path, fingerprint(path), config.max_adapters, rank)
        self._limits = self._model.limits(self._engine.model_config.max_model_len)
        self._numbers: dict[int | str, str] = {}
        self._versions: dict[int | str, int] = {}
        """The version of the adapter that each response has begun with."""
        self._streams: dict[str, TokenStream] = {}
        self._begun: dict[str, int] = {}
        self._count = 0

    @classmethod
    def check(cls, config: RolloutConfig, processes: int) -> None:
        """See `BaseGenerator.check`."""
        super().check(config, processes)
        check_adapter_settings(config)
        if config.return_routed_experts:
            check_has_experts(read_config(config.model), config.model.path)
            if not torch.cuda.is_available():
                raise ConfigError(
                    "return_routed_experts=true with generator=vllm and no GPU, without which vLLM does not return them; set it to false "
                    "(rl.routing_replay=off or actor), or use static or continuous"
                )
        tp = config.options.get("tp", 1)
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            raise ConfigError(f"options.tp={tp!r}; it must be an integer of at least 1")
        if processes > 1 and processes % tp:
            raise ConfigError(
                f"options.tp={tp} with generator=vllm in {processes} processes, which are the GPUs of models of {tp} each; use a "
                "divisor of the number of processes"
            )

    def _build(self) -> Any:
        import vllm

        arguments, error = {}, None
        try:
            arguments = self._model.engine_arguments(self._tp, joined=self._joined)
        except Exception as e:  # such as too little memory on this rank's device
            if not self._joined:
                raise
            error = e
        if self._joined:
            # Before vLLM's start, in which the other ranks would wait for one that has failed.
            all_gather_object(None, error=error)
            # It makes a model of each `tp` neighboring ranks of the process group, also where there are several models.
            arguments["distributed_executor_backend"] = "external_launcher"
        try:
            with fixed_segments():
                return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"vLLM cannot run {self.config.model.path}: {e}") from e

    def limits(self) -> CompletionLimits:
        """Return what this generator can take."""
        return self._limits

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def adapter_names(self) -> list[str]:
        """See `BaseGenerator.adapter_names`."""
        return [] if self._side_by_side is None else self._side_by_side.names

    def load_adapter(self, name: str, folder: str) -> int:
        """See `BaseGenerator.load_adapter`. Responses that are under way keep the factors that they began with."""
        adapters = self._require_adapters(name)
        self._pass_on()
        return adapters.load(self._engine, name, folder, list(self._adapters_of_requests.values()))

    def drop_adapter(self, name: str) -> None:
        """See `BaseGenerator.drop_adapter`."""
        adapters = self._require_adapters(name)
        # Those that wait have been promised it.
        self._pass_on()
        adapters.drop(name)

    def _require_adapters(self, name: str) -> VLLMAdapters:
        if self._side_by_side is None:
            raise self._without_adapters(name)
        return self._side_by_side

    def version_of(self, stream: TokenStream) -> int:
        """See `BaseGenerator.version_of`."""
        return self._versions[stream.id] if stream.options.adapter else self.version

    # ---- steps -------------------------------------------------------------------------------------------------------

    @property
    def weight_dtype(self) -> str:
        """See `BaseGenerator.weight_dtype`."""
        return self._model.common_dtype(self._engine.collective_rpc("drivetrain_weight_dtype"))

    def run_step(self) -> None:
        """Pass on the requests that wait, which vLLM begins in this order, and run a step of its engine."""
        self._pass_on()
        if self._side_by_side is not None:
            self._side_by_side.free_unused(self._engine, list(self._adapters_of_requests.values()))
        for output in self._engine.step():
            if output.request_id not in self._streams:
                continue
            stream = self._streams[output.request_id]
            (completion,) = output.outputs
            # With the first tokens of a request.
            if self._begun.pop(output.request_id, -1) == len(stream.tokens):
                self.prefill_tokens += len(stream.so_far) - (output.num_cached_tokens or 0)
            if completion.routed_experts is not None:
                stream.routes.add(0, self._model.routes_of(completion.routed_experts))
            for token, log_probs in zip(completion.token_ids, completion.logprobs or (), strict=True):
                if stream.ended:
                    break
                self.add_token(stream, token, log_probs[token].logprob)

    def _pass_on(self) -> None:
        for stream in list(self.waiting.values()):
            self.admit(stream)
            self._add(stream)

    def _add(self, stream: TokenStream) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        name = f"drivetrain-{self._count}"
        # A name of its own for each start, because an aborted request may still have outputs under its old name.
        self._numbers[stream.id], self._streams[name] = name, stream
        self._begun[name] = len(stream.tokens)
        params = vllm.SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling_settings(stream))
        adapter = None
        if stream.options.adapter:
            adapters = self._require_adapters(stream.options.adapter)
            adapter = adapters.request(stream.options.adapter)
            self._adapters_of_requests[name] = adapter.lora_int_id
            self._versions[stream.id] = adapters.version(stream.options.adapter)
        self._engine.add_request(name, {"prompt_token_ids": stream.so_far}, params, lora_request=adapter)

    def stop_request(self, stream: TokenStream) -> None:
        """Abort a request."""
        name = self._numbers.pop(stream.id)
        del self._streams[name]
        self._begun.pop(name, None)
        self._adapters_of_requests.pop(name, None)
        self._versions.pop(stream.id, None)
        self._engine.abort_request([name])

    def drop_caches(self) -> None:
        """Abort all requests, and forget all prefixes."""
        if self._streams and self._engine is not None:
            self._engine.abort_request(list(self._streams))
        self._streams, self._numbers = {}, {}
        self._begun.clear()
        self._adapters_of_requests.clear()
        self._versions.clear()
        if self._engine is not None and not self._engine.reset_prefix_cache():
            raise ModelError("vLLM did not drop its prefix cache; keys and values of the old weights would be reused")

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights into the engine. Collective over the ranks of a process group.

        Raises:
            ModelError: Tensors are missing, unknown, of a wrong shape or not finite; or vLLM failed before and cannot be rebuilt.
        """
        if self._side_by_side is not None:
            raise weights_stay(self.config)
        if self._on_any_rank(self._broken):
            self._rebuild()
        back, loading = self.placement, replace(self.placement, parameters="device")
        # It writes to the device.
        self._sleep(back, loading)
        try:
            self._load(weights)
            self.drop_caches()
        finally:
            self._sleep(loading, back)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights. What fails before vLLM has them, such as their transfer, leaves the engine as it is."""
        if self._remote:
            folder = Path(tempfile.mkdtemp(prefix="drivetrain-weights-"))
            try:
                # The files are complete and checked before vLLM reads the first of them, so an error so far leaves the
                # engine as it is.
                write_weights(folder, self._model.checked(weights))
                # From here to the end of the load, the engine may hold a partial set.
                self._broken = True
                self._engine.collective_rpc("load_drivetrain_weights", args=(str(folder),))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        else:
            completed = self._model.completed(weights)
            worker = self._engine.model_executor.driver_worker
            self._broken = True
            reload_weights(getattr(worker, "worker", worker).model_runner, weights_iterator=completed)
        self._broken = False
        # The stream has failed, but vLLM has a set of the right shapes (see `CompletedWeights`), so it need not be
        # rebuilt.
        if not self._remote and completed.error is not None:
            raise completed.error

    def _on_any_rank(self, value: bool) -> bool:
        """Return whether a value is true on any rank of the process group: its ranks build their engines together."""
        return any(all_gather_object(value)) if self._joined else value

    def _rebuild(self) -> None:
        """Build the engine anew, after it has failed. The old one goes before the new one comes: they may not fit both.

        Raises:
            ModelError: Memory of the old engine is still in use, for which vLLM has no room in the same process.
        """
        self._release()
        # The largest value of all ranks, so that all of them raise the error or none does.
        held = max(all_gather_object(_held_bytes())) if self._joined else _held_bytes()
        if held:
            raise ModelError(
                f"vLLM failed while it loaded weights, and {held / 2**30:.1f} GiB of its former engine are still in use, so it cannot be "
                "rebuilt in this process; start the workers again"
            )
        self._engine = self._build()
        self._broken = False
        self._sleep(GeneratorPlacement(), self.placement)

    def move(self, target: GeneratorPlacement) -> None:
        """Let the engine sleep, or wake it; see `GeneratorPlacement`. On a CPU vLLM cannot sleep."""
        self._sleep(self.placement, target)

    def _sleep(self, present: GeneratorPlacement, target: GeneratorPlacement) -> None:
        if torch.cuda.is_available():
            with fixed_segments():
                for method, arguments in sleep_calls(present, target):
                    getattr(self._engine, method)(**arguments)

    def close(self) -> None:
        """End the engine."""
        self._release()
        if self._side_by_side is not None:
            self._side_by_side.close()

    def _release(self) -> None:
        if self._engine is not None:
            if self._shares_process_group:
                _end_engine(self._engine)
            else:
                self._engine.engine_core.shutdown()
            self._engine = None
        free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _end_engine(engine: Any) -> None:
    """Do what vLLM's `EngineCore.shutdown` does, but keep torch's process groups: it would destroy those of all roles."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    client = engine.engine_core
    # It would call `EngineCore.shutdown` when the client is collected.
    client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    destroy_model_parallel()


def _held_bytes() -> int:
    """Return how much memory vLLM's own allocator has in this process, in bytes. It starts a second engine only at 0."""
    if not torch.cuda.is_available():
        return 0
    from vllm.device_allocator import get_mem_allocator_instance

    return int(get_mem_allocator_instance().get_current_usage())
