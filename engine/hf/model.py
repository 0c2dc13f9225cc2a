"""A transformers model on the meta device, with the head and the adapters that the settings request."""

import copy
import difflib
import fnmatch
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from ..config import ModelConfig
from ..errors import ModelError
from ..heads import HeadType, check_module
from ..model_types import LM
from ..ops.scan.fused import without_kernels
from ..torch_private import replace_tensor
from .config import wants_adapters
from .layout import DiskLayout
from .lora import add_adapters, modules_to_save, peft_config
from .media import decoder_key
from .names import hf_name
from .overrides import named

ENCODERS = "encoders"
"""The name in `model.freeze` that stands for all encoders of media."""
ENCODER_ATTENTION = "sdpa"
"""The attention implementation of media encoders, by transformers' name."""


def decoder_of(lm: PreTrainedModel) -> Any:
    """Return the decoder of a causal language model, without its head."""
    decoder: Any = lm.get_decoder()
    # Llama 4's text model declares a prefix that it does not have, so transformers does not find its decoder.
    return decoder.model if decoder is lm else decoder


class HFModel(nn.Module):
    """A causal language model with the head of `model.head`.

    Args:
        lm: The language model on the meta device, already with its adapters, if any.
        head: The type of the head that replaces the language-model head; None keeps the latter.
    """

    def __init__(self, lm: PreTrainedModel, *, head: HeadType | None) -> None:
        super().__init__()
        self.lm = lm
        self.head = head
        self.score: nn.Module | None = None
        if head is not None:
            # Without the language-model head, whose weights would be loaded and sharded for nothing.
            lm.set_output_embeddings(nn.Identity())
            # Its buffers are real, like those of the decoder. Its initial values are drawn later.
            with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
                self.score = head.module(lm.config.get_text_config().hidden_size, lm.dtype)
            check_module(head, self.score)

    @property
    def base(self) -> Any:
        """The model without its head; for a model that takes media, the encoders and the decoder."""
        return getattr(self.lm, self.lm.base_model_prefix, None) or decoder_of(self.lm)


def empty_lm(
    config: PreTrainedConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    attention: str = "eager",
    *,
    media: PreTrainedConfig | None = None,
) -> tuple[PreTrainedModel, DiskLayout, Any]:
    """Return the language model with its adapters, its layout on disk, and the peft config or None.

    Args:
        config: The model's config.
        model: The model settings.
        dtype: The dtype of the parameters.
        attention: The attention implementation of the decoder, by transformers' name.
        media: The config of the whole model, if it is built with its encoders.

    Raises:
        ModelError: No model can be built with `model.overrides`, or settings contradict each other.
    """
    lm = _built(config, model, dtype, attention, media)
    # Creating parameters on meta one by one separates tied ones. FSDP must see a single parameter, or it would train two.
    lm.tie_weights()
    layout = DiskLayout(lm)
    adapters = None
    if wants_adapters(model.lora):
        adapters = peft_config(model.lora, lm, model.path)
        _check_saved_names(model, lm, layout)
        add_adapters(lm, adapters, model.lora)
        if model.head != LM and any(m is lm.get_output_embeddings() for m in modules_to_save(model.lora, lm)):
            raise ModelError(
                f"model.lora.modules_to_save={list(model.lora.modules_to_save)} with model.head={model.head}, which replaces the language-model head "
                "and is trained anyway; remove the head"
            )
        if model.head != LM and isinstance(lm.get_output_embeddings(), LoraLayer):
            raise ModelError(
                f"model.lora.targets={list(model.lora.targets)} with model.head={model.head}, which replaces the language-model head and is "
                "trained in full; remove the head"
            )
        rows = [lm.get_input_embeddings(), lm.get_output_embeddings()]
        if model.added_tokens and not all(m.weight.requires_grad for m in rows if m is not None):
            raise ModelError(
                f"model.added_tokens={list(model.added_tokens)} with model.lora.modules_to_save={list(model.lora.modules_to_save)}: "
                "the rows of the new tokens would not be trained; name the embeddings and the head there, unless they are tied"
            )
    return lm, layout, adapters


def _check_saved_names(model: ModelConfig, lm: PreTrainedModel, layout: DiskLayout) -> None:
    """Check that modules trained with adapters have the same names on disk as in the model, because peft loads them by name.

    Raises:
        ModelError: A module has another name.
    """
    saved = {id(p) for module in modules_to_save(model.lora, lm) for p in module.parameters()}
    for name, parameter in lm.named_parameters():
        if id(parameter) in saved and layout.stored_slices(name, parameter.shape)[0].name != name:
            raise ModelError(
                f"model.lora.modules_to_save={list(model.lora.modules_to_save)}: {type(lm).__name__} stores {name} under another name, "
                "where peft would not find it; leave it out, or train the model itself with model.lora.rank=0"
            )


def _built(
    config: PreTrainedConfig, model: ModelConfig, dtype: torch.dtype, attention: str, media: PreTrainedConfig | None
) -> PreTrainedModel:
    kind: Any = AutoModelForCausalLM
    implementation: Any = attention
    if media is not None:
        # Encoders attend in both directions, and separate images themselves.
        kind, implementation = AutoModelForMultimodalLM, {"": ENCODER_ATTENTION, decoder_key(media): attention}
    try:
        # With a GPU, transformers' own generation in the same process requires kernels of other packages.
        hidden = nullcontext() if torch.cuda.is_available() else without_kernels(config)
        # Parameters are on the meta device but buffers are real: rotary frequencies are computed, not loaded.
        with init_empty_weights(include_buffers=False), hidden:
            lm: PreTrainedModel = kind.from_config(
                copy.deepcopy(config if media is None else media),
                attn_implementation=implementation,
                dtype=dtype,
                trust_remote_code=model.trust_remote_code,
            )
    except Exception as e:  # a family's code may raise anything on a value that it does not expect
        if isinstance(e, ValueError) and str(e).startswith("Unrecognized configuration class"):
            raise ModelError(
                f"model.path={model.path}: transformers {transformers.__version__} has no causal language model of type "
                f"{config.model_type!r} without the encoders of the whole model; use the path of a text model, or of a family that "
                "docs/families.md lists"
            ) from e
        if not model.overrides:
            raise
        raise ModelError(
            f"{named(model.overrides)}: no model can be built from the config of {model.path} with that: "
            f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        ) from e
    return lm


def allocate(module: nn.Module, device: torch.device, *, buffers: torch.device | None = None) -> None:
    """Allocate memory for the parameters of a module on the meta device. Its buffers are real and keep their values.

    Args:
        module: The module.
        device: The device of the parameters.
        buffers: The device of the buffers, if it is different.
    """
    kept = {name: b for name, b in module.named_buffers() if not b.is_meta}
    module.to_empty(device=device)
    for name, value in kept.items():
        owner, _, leaf = name.rpartition(".")
        replace_tensor(module.get_submodule(owner), leaf, value.to(buffers or device))


def choose_trainable(root: HFModel, model: ModelConfig) -> None:
    """Make a new head with adapters trainable, and freeze the base model under adapters or everything that `model.freeze` matches."""
    if model.max_adapters:
        root.requires_grad_(False)
        return
    if wants_adapters(model.lora) and root.score is not None:
        root.score.requires_grad_(True)
    freeze(root, model.freeze)


def freeze(root: HFModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose Hugging Face names match a pattern.

    Args:
        root: The model.
        patterns: The patterns; `encoders` stands for everything but the decoder and the head.

    Raises:
        ModelError: A pattern matches nothing, or the patterns together match everything.
    """
    names = {name: hf_name(name).name for name, _ in root.named_parameters()}
    encoders = encoder_parameters(root)
    for pattern in patterns:
        if pattern == ENCODERS:
            if not encoders:
                raise ModelError(f"model.freeze: {type(root.lm).__name__} has no encoders; leave {ENCODERS} out")
            continue
        if not fnmatch.filter(names.values(), pattern):
            close_matches = difflib.get_close_matches(pattern, names.values(), n=1, cutoff=0.3)
            hint = f"; did you mean {close_matches[0]!r}?" if close_matches else ""
            raise ModelError(f"model.freeze: {pattern!r} matches no parameter of {type(root.lm).__name__}{hint}")
    for name, parameter in root.named_parameters():
        if (ENCODERS in patterns and name in encoders) or any(
            fnmatch.fnmatchcase(names[name], pattern) for pattern in patterns
        ):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in root.parameters()):
        raise ModelError(f"model.freeze={list(patterns)} leaves nothing to train; remove a pattern")


def encoder_parameters(root: HFModel) -> set[str]:
    """Return the names of the parameters of media encoders, including the projections of features."""
    lm: Any = root.lm
    others = [decoder_of(lm), lm.get_input_embeddings(), lm.get_output_embeddings(), root.score]
    assigned = {id(parameter) for module in others if module is not None for parameter in module.parameters()}
    return {name for name, parameter in root.named_parameters() if id(parameter) not in assigned}


def vocabulary_names(lm: PreTrainedModel, layout: DiskLayout) -> frozenset[str]:
    """Return the names of the tensors on disk with one row per token: the embeddings, the head and its bias."""
    modules = [m for m in (lm.get_input_embeddings(), lm.get_output_embeddings()) if m is not None]
    vocabulary_ids = {id(p) for m in modules for p in m.parameters()}
    return frozenset(
        stored.name
        for name, p in lm.named_parameters()
        if id(p) in vocabulary_ids
        for stored in layout.stored_slices(hf_name(name).name, p.shape)
    )
