"""Activation checkpointing of a transformers model."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from ..torch_private import saved_operators


def recompute(model: PreTrainedModel, mode: str) -> None:
    """Enable activation checkpointing with transformers' own switch.

    `full` keeps only a layer's input; `selective` also keeps the outputs of its matrix products and attention, so that only
    cheap operations run twice.
    """
    if mode == "none":
        return
    # Only the non-reentrant form takes a policy (`context_fn`), and it does not require inputs with gradients.
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = _selective
    switch: Any = model
    if hasattr(switch, "activation_checkpointing_enable"):
        switch.activation_checkpointing_enable(settings)
    else:  # the name in transformers 5.17
        switch.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    # The switch makes all embeddings require a gradient, for reentrant checkpoints. Frozen encoders would then run a backward pass.
    switch.disable_input_require_grads()


def _selective() -> Any:
    saved = saved_operators()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
