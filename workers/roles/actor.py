"""The actor: the policy that is trained on its own completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.errors import ConfigError
from ...engine.loss import OutputRequest, StepResult
from ...engine.ops.expert_routes import ROUTED_EXPERTS
from ...engine.packing.batch import PackedBatch
from ...losses.policy import PolicyLoss
from ...losses.preference import PreferenceLoss
from .base import Worker, WorkerConfig
from .dispatch import register


@dataclass(frozen=True, kw_only=True)
class ActorConfig(WorkerConfig):
    """The configuration of an actor.

    Args:
        loss: The loss of its updates. Log-probabilities are computed at the temperature of this loss.
    """

    loss: PolicyLoss | PreferenceLoss = PolicyLoss()

    @property
    def temperature(self) -> float:
        """The temperature of its log-probabilities; all roles of a group must use the same."""
        return self.loss.request.temperature


class ActorWorker(Worker):
    """A policy that is trained.

    Args:
        config: The configuration of the role.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    trainable: ClassVar[bool] = True
    replays_routes: ClassVar[bool] = True
    config: ActorConfig

    @register("dp")
    def compute_log_probs(
        self, data: Any, *, entropy: bool = False, sum_squared_probs: bool = False, routed_experts: bool = False
    ) -> Any:
        """Compute the `log_probs` of completion tokens and, if requested, statistics of their distributions, in the caller's format.

        Args:
            data: This rank's data-parallel shard, in a format of `workers.roles.batch_adapters`.
            entropy: Whether to return the `entropy` of each token's distribution as well, in nats.
            sum_squared_probs: Whether to return the `sum_squared_probs` of each token's distribution as well.
            routed_experts: Whether to return the `routed_experts` `[T, L, K]` of all tokens as well, in a `PackedBatch`.

        Raises:
            ConfigError: `routed_experts` is requested from a model without experts, or with padded or jagged tensors.
        """
        request = OutputRequest(
            log_probs=True,
            entropy=entropy,
            sum_squared_probs=sum_squared_probs,
            routed_experts=routed_experts,
            temperature=self.config.temperature,
        )
        if routed_experts and not isinstance(data, PackedBatch):
            raise ConfigError(
                "routed_experts=True: padded and jagged results hold values of completion tokens only, but prompts have routes too; pass a "
                "PackedBatch"
            )
        return self._infer(data, request, {name: name for name in (*request.names, ROUTED_EXPERTS)})

    @register("dp")
    def compute_reference_log_probs(self, data: Any) -> Any:
        """Compute the `reference_log_probs` of completion tokens, in the caller's format, with the adapters of the policy disabled.

        Args:
            data: This rank's data-parallel shard, in a format of `workers.roles.batch_adapters`.

        Raises:
            ConfigError: The policy has no adapters to disable, so it would be its own reference.
        """
        if not self.config.model.lora.rank:
            raise ConfigError(
                "model.lora.rank=0: only a policy with adapters can serve as its own reference; add a ReferenceWorker to the group"
            )
        if saved := self.config.model.lora.modules_to_save:
            raise ConfigError(
                f"model.lora.modules_to_save={list(saved)} are trained in full, so even with its adapters disabled the policy is not its own "
                "reference; add a ReferenceWorker to the group"
            )
        request = OutputRequest(log_probs=True, temperature=self.config.temperature)
        # No replay: the routes of the batch were chosen with the adapters enabled.
        with self.engine.disable_adapter():
            return self._infer(data, request, {"log_probs": "reference_log_probs"}, replay=False)

    @register("minibatches")
    def update(
        self, data: Any, steps: Sequence[Sequence[int]] | None = None, *, loss: PolicyLoss | PreferenceLoss | None = None
    ) -> list[StepResult]:
        """Train the policy on completions.

        Args:
            data: This rank's data-parallel shard, with `old_log_probs`, `advantages` and the other fields that the loss needs.
            steps: For each optimizer step, the rows of the shard to use. Every rank must have the same number of steps. None
                makes one step on the entire shard. A group derives the steps from `MiniBatches`.
            loss: The loss of this update; None uses the loss of the role.

        Returns:
            The result of each step.

        Raises:
            ConfigError: The temperature of `loss` is not that of the role's log-probabilities.
        """
        if loss is not None and loss.request.temperature != self.config.temperature:
            raise ConfigError(
                f"loss.temperature={loss.request.temperature}: the actor's log-probabilities are computed at "
                f"{self.config.temperature} (config.loss), so importance ratios would compare different distributions; "
                "use the same temperature"
            )
        return self._update(data, loss or self.config.loss, steps)

    @register("dp", returns="numbers")
    def evaluate(self, data: Any) -> dict[str, float]:
        """Compute the `loss` of a batch of completions and its metrics, without training.

        Args:
            data: This rank's data-parallel shard, with the fields that the loss needs.
        """
        return self._evaluate(data, self.config.loss)
