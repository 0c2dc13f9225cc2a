"""Training all weights of a model by calls: forward and backward passes whose gradients add up until an optimizer step with settings of its own."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from .adapters.slot import AdapterStep
from .base import BaseEngine
from .call_trainer import REQUEST, CallTrainer, TrainingCall
from .config import OptimConfig
from .errors import ConfigError, NonFiniteError
from .loss import HeadRequest, TokenOutputs
from .ops.expert_routes import ExpertRoutes
from .packing.convert import unsupervised
from .step import MicroBatchConsumer, unused
from .step_plan import MicroBatch


class FullWeightTrainer(CallTrainer):
    """What trains or evaluates all weights of an engine's model. All methods are collective over the engine's ranks.

    A call whose loss raises an error drops the gradients of all calls since the last optimizer step: a copy of them would take as much memory
    again as the model.

    Args:
        engine: An initialized engine. One without an optimizer only evaluates.
        name: The name of the model in calls; None for that of calls without any.

    Raises:
        ConfigError: The engine trains adapters, or adds a loss of the routers, which a sum over tokens does not have.
    """

    def __init__(self, engine: BaseEngine, name: str | None) -> None:
        model = engine.model_config
        if model.max_adapters or model.lora.rank:
            raise ConfigError(
                f"model.max_adapters={model.max_adapters}, model.lora.rank={model.lora.rank}: a FullWeightTrainer trains all weights; set both to 0"
            )
        if engine.router_aux_coef and engine.optim_config is not None:
            raise ConfigError(
                f"model.router_aux_loss_coef={engine.router_aux_coef:g}: the losses of calls are sums over tokens, and the routers' loss is not; "
                "set it to 0"
            )
        super().__init__(engine)
        self.name = name
        self._has_gradients = False

    def optim_step(self, optim: OptimConfig) -> AdapterStep:
        """Clip the gradients that have added up since the last step, and make an AdamW step. The gradients are dropped.

        Without any, they count as zeros.

        Args:
            optim: The settings of this step. There is no schedule: `lr` is the learning rate of this step. The weights of norms and biases
                do not decay.

        Raises:
            ConfigError: The engine has no optimizer, or another one.
            NonFiniteError: The gradient is not finite; weights and moments are unchanged.
        """
        if not self._has_gradients:
            self._add_zeros()
        # Cleared before the step: the engine drops the gradients also of a step that is not finite.
        self._has_gradients = False
        message = "the gradient is not finite; it was dropped, and weights and moments are unchanged. Check the data, the weights and the learning rate"
        try:
            result = self.engine.optimizer_step(optim=optim)
        except NonFiniteError as e:
            self._has_gradients = False
            raise NonFiniteError(message) from e
        self._has_gradients = False
        # With engine.non_finite=skip there is no error, but the caller must know that this step was not made.
        if result.skipped:
            raise NonFiniteError(message)
        assert result.grad_norm is not None
        return AdapterStep(grad_norm=result.grad_norm, step=self.engine.step)

    def _add_zeros(self) -> None:
        """Run a pass whose loss is zero, so that every parameter has a gradient and its moments decay."""
        micro_batch = MicroBatch(batch=unsupervised(1, self.engine.topology.device), index=0, count=1, is_dummy=True)
        self.accumulate([micro_batch], _ZeroLoss(), [], backward=True)

    # ---- what calls train --------------------------------------------------------------------------------------------

    def check_model(self, call: TrainingCall) -> None:
        """See `CallTrainer.check_model`."""
        if call.adapter != self.name:
            raise ConfigError(f"there is no model {call.adapter!r}; there is {self.name!r}")
        if not call.forward_only and self.engine.optim_config is None:
            raise ConfigError(f"the model {self.name!r} is only evaluated; set forward_only")

    def gradients(self, names: Collection[str]) -> dict[str, Tensor | None]:
        """See `CallTrainer.gradients`. They are not copied."""
        return dict.fromkeys(names)

    def restore_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Drop the gradients of all calls since the last optimizer step."""
        # An evaluation has no names here, and must leave the gradients of earlier calls alone.
        if gradients:
            self.engine.zero_grad()
            self._has_gradients = False

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], consumer: MicroBatchConsumer, names: Collection[str], *, backward: bool
    ) -> None:
        """See `CallTrainer.accumulate`."""
        with self.engine.accumulating(backward=backward):
            self.engine.run_micro_batches(micro_batches, consumer, backward=backward)
        self._has_gradients |= backward


class _ZeroLoss:
    """Consumer of a pass whose loss is zero; see `step.MicroBatchConsumer`."""

    records_routes = False
    counts_experts = False

    def take_routes(self, micro_batch: MicroBatch, routes: ExpertRoutes, gather: Callable[[], Tensor]) -> None:
        """Ignore the experts that tokens go to."""

    def request(self, micro_batch: MicroBatch) -> HeadRequest:
        """Return what the head computes: log-probabilities of no tokens."""
        zeros = torch.zeros(micro_batch.batch.num_tokens, device=micro_batch.batch.device)
        return HeadRequest(outputs=REQUEST, mask=zeros.bool(), expected={"log_probs": zeros})

    def __call__(self, micro_batch: MicroBatch, outputs: TokenOutputs, aux: Tensor | None = None) -> Tensor:
        """Return zero, with a gradient for every parameter."""
        assert outputs.log_probs is not None
        return unused(outputs.log_probs)
