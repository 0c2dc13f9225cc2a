"""The independent reference: plain Hugging Face, one document at a time, without packing or any Drivetrain code in the model.

Axes: L tokens of one document.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from ..config import OptimConfig
from ..hf.layout import DiskLayout
from ..hf.media import FAMILIES
from ..ops.scan.fused import without_kernels
from ..torch_private import named_persistent_buffers


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """The results of one step.

    Args:
        loss: The mean negative log-likelihood of the supervised tokens.
        grad_norm: The 2-norm of the gradient, in float64.
    """

    loss: float
    grad_norm: float


class PlainReference:
    """A slow trainer, as simple as possible.

    Args:
        folder: The folder of the model.
        optim: The settings of AdamW with a constant learning rate; weight decay is not applied to norms and biases.
        dtype: The dtype of parameters and optimizer state.
        compute: The dtype of the computation; `dtype` if None. If it differs, every step converts a copy of the model to it.
        device: The device of the model.
    """

    def __init__(
        self,
        folder: Path | str,
        optim: OptimConfig,
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.optim, self.compute = optim, dtype if compute is None else compute
        config = AutoConfig.from_pretrained(folder)
        self._takes_media = config.model_type in FAMILIES
        auto: Any = AutoModelForMultimodalLM if self._takes_media else AutoModelForCausalLM
        with without_kernels(config):
            model: Any = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        if self._takes_media:
            # Parameters that a family freezes when built, such as positions of an audio encoder, are trainable once loaded by transformers.
            for built, loaded in zip(auto.from_config(config).parameters(), model.parameters(), strict=True):
                loaded.requires_grad_(built.requires_grad)
        # Read before a test wraps the model with adapters.
        self._takes_kinds = "mm_token_type_ids" in inspect.signature(type(model).forward).parameters
        self.model = model.to(device).train()
        self._copy: Any = None
        named = list(self.model.named_parameters())
        decayed = [p for n, p in named if p.dim() > 1 and not n.endswith("bias")]
        others = [p for n, p in named if not (p.dim() > 1 and not n.endswith("bias"))]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
        )

    def step(
        self,
        documents: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]] | None = None,
        media: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> ReferenceStep:
        """Run one AdamW step with clipping.

        Args:
            documents: The token ids of each document.
            masks: Whether each token of each document is a target; all tokens are if None.
            media: The fields of each document's images, videos and audios.
        """
        # A mask is over targets, and the first token of a document is never one.
        supervised = (
            [torch.tensor(m[1:], dtype=torch.bool) for m in masks]
            if masks
            else [torch.ones(len(d) - 1).bool() for d in documents]
        )
        total = sum(int(m.sum()) for m in supervised)
        loss = 0.0
        if self.compute != self.model.dtype:
            self._copy = copy.deepcopy(self.model).to(self.compute)
        fields = [{} for _ in documents] if media is None else media
        for document, mask, items in zip(documents, supervised, fields, strict=True):
            if mask.any():
                # Divided by the count of all documents, so the sum over documents is the mean over tokens.
                nll = -self.log_probs(document, media=items)[mask.to(self.model.device)].sum() / total
                nll.backward()
                loss += nll.item()
        if self._copy is not None:
            for parameter, copied in zip(self.model.parameters(), self._copy.parameters(), strict=True):
                parameter.grad = None if copied.grad is None else copied.grad.to(parameter.dtype)
            self._copy = None
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.double().norm() for g in grads]).norm())
        if self.optim.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return ReferenceStep(loss=loss, grad_norm=norm)

    def log_probs(
        self, document: Sequence[int], temperature: float = 1.0, media: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the log-probability of each next token, `[L - 1]`."""
        logits = self.logits(document, media)[:-1] / temperature
        targets = torch.tensor(document[1:], dtype=torch.long, device=logits.device)
        return -F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")

    def logits(self, document: Sequence[int], media: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the logits of one document, `[L, V]`, given the fields of its media."""
        ids = torch.tensor([list(document)], device=self.model.device)
        model = self.model if self._copy is None else self._copy
        more = self._media_arguments(ids, media or {}) if self._takes_media else {}
        result: Tensor = model(input_ids=ids, use_cache=False, **more).logits[0]
        return result

    def _media_arguments(self, ids: Tensor, media: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments that a family's own processor would pass to its model."""
        config = self.model.config
        arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        for name, value in media.items():
            moved = value.to(ids.device)
            # The processors of these families add a leading axis of rows.
            arguments[name] = moved[None] if config.model_type in ("idefics3", "smolvlm") else moved
        if config.model_type == "gemma3":
            arguments["token_type_ids"] = (ids == config.image_token_id).long()
        if media and self._takes_kinds:
            kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
            arguments["mm_token_type_ids"] = kinds
        if config.model_type == "gemma4" and "input_features_mask" in media:
            arguments["input_features_mask"] = arguments["input_features_mask"].bool()
        if config.model_type == "gemma4" and "pixel_values_videos" in media:
            arguments["num_frames_per_video"] = torch.tensor([len(media["pixel_values_videos"])])
        return arguments

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers (such as a router's bias) under their names and in their shapes on disk."""
        layout = DiskLayout(self.model)
        named = {**dict(self.model.named_parameters()), **dict(named_persistent_buffers(self.model))}
        weights = {}
        for name, tensor in named.items():
            for segment in layout.stored_slices(name, tensor.shape):
                weights[segment.name] = segment.cut(tensor.detach())
        return weights
