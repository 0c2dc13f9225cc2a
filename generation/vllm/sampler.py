"""Drivetrain's sampling as a logits processor of vLLM, so that all generators sample identically.

vLLM then has a single candidate token, and reports its logit, which is set to the log-probability: the model's at the request's
temperature, before top_p and top_k. vLLM itself cannot report this value, since its processed log-probabilities include the filters.
"""

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from .draws import KEY, RequestDraws


class DrivetrainSampler(V1LogitsProcessor, V2LogitsProcessor):
    """Samples the tokens of requests that carry settings; see `VLLMGenerator`. Other requests are unchanged.

    The class implements the interfaces of both of vLLM's model runners, because vLLM decides which one runs: the first one on a CPU,
    and the second one where Triton is installed, unless a setting needs the first one. Each loads only subclasses of its own interface.

    Args:
        vllm_config: The configuration of vLLM's engine.
        states: Passed by a runner to its processors; not used.

    Raises:
        ValueError: Several tokens of a request are sampled in one step (speculative decoding).
    """

    def __init__(self, vllm_config: Any, *states: Any) -> None:
        if getattr(vllm_config, "speculative_config", None) is not None:
            raise ValueError("speculative_config is set, but tokens are sampled one at a time; remove it from the options")
        self._draws = RequestDraws()

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check that vLLM itself selects the most likely token of requests that carry settings."""
        if KEY in (sampling_params.extra_args or {}) and sampling_params.temperature:
            raise ValueError(f"a request with settings of {KEY} must have temperature 0")

    def is_argmax_invariant(self) -> bool:
        """Return False, because the most likely token changes. Called by the first runner."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track added, removed and moved requests, as the first runner reports them before each step."""
        if batch_update is None:
            return
        self._draws.end(batch_update.removed)
        for slot, params, _, output in batch_update.added:
            self._draws.begin(slot, params.extra_args, output)
        for source, target, direction in batch_update.moved:
            self._draws.move(source, target, swap=direction == MoveDirectionality.SWAP)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Track a new request, as the second runner reports it. Its slot does not change, and is reused after its end."""
        return self._draws.begin(req_idx, sampling_params.extra_args)

    def apply(self, logits: Tensor, ctx: LogitsContext | None = None) -> Tensor:
        """Leave a single candidate token in the rows of requests that carry settings.

        Args:
            logits: The logits `[B, V]`, modified in place.
            ctx: The slots of the rows and the lengths of their requests, from the second runner. The rows of the first one are its
                slots.
        """
        if ctx is None:
            return self._draws.choose(logits, range(len(logits)))
        # The lengths are padded; without speculative decoding they are exact.
        return self._draws.choose(logits, ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist())
