"""An extension of vLLM's workers that loads new weights. vLLM makes it a base class of its workers."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..weight_values import common_dtype


class WorkerExtension:
    """Methods that are called in all of vLLM's workers."""

    model_runner: Any

    def load_drivetrain_weights(self, folder: str) -> None:
        """Load new weights from a folder, in Hugging Face format."""
        reload_weights(self.model_runner, weights_path=folder)

    def drivetrain_weight_dtype(self) -> str:
        """Return the common data type of all parameters; empty if they differ, as in quantized layers."""
        return common_dtype(self.model_runner.get_model().parameters())


def reload_weights(
    runner: Any, *, weights_path: str | None = None, weights_iterator: Iterable[tuple[str, Tensor]] | None = None
) -> None:
    """Load new weights into the model of one of vLLM's workers."""
    arguments = {"weights_path": weights_path} if weights_path is not None else {"weights_iterator": weights_iterator}
    runner.reload_weights(**arguments)
    model = runner.get_model()
    if getattr(runner.model_config.hf_text_config, "tie_word_embeddings", False):
        # The head of these models keeps a copy of the embedding in its kernel's layout.
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    if runner.device.type == "cpu":
        for layer in model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                # vLLM converts experts to this kernel's layout when it builds a model, but not when it loads new weights.
                kernel.fused_experts.process_weights_after_loading(layer)
