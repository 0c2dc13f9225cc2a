"""A language model that is split over the ranks, and its cache of keys and values."""

import copy
import inspect
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ...engine.checkpoint.local_shards import cut_local_shards
from ...engine.checkpoint.tensor_slices import whole
from ...engine.errors import CapabilityError, ConfigError, ModelError, first_line, install_command
from ...engine.hf.layout import DiskLayout
from ...engine.hf.weights import WeightFolder
from ...engine.offload import free_memory
from ...engine.torch_private import named_persistent_buffers, replace_tensor
from .plan import resolve_plan, styles_of
from .styles import LocalSlices

QUANTIZATIONS = ("int8",)
"""The values of `quant` other than None."""


def parse_config(config_json: str) -> PreTrainedConfig:
    """Return the configuration of a model.

    Args:
        config_json: The text of its config.json.

    Raises:
        ConfigError: The text is not a model configuration.
        CapabilityError: transformers does not know the model's family.
    """
    try:
        values = json.loads(config_json)
    except ValueError as e:
        raise ConfigError(f"config_json is not JSON: {e}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError("config_json has no model_type; give the text of the model's config.json")
    if values["model_type"] not in CONFIG_MAPPING_NAMES:
        raise CapabilityError(f"model_type={values['model_type']} is not supported: transformers does not know it")
    if values.get("quantization_config"):
        raise CapabilityError(
            "the model is quantized (quantization_config), which generation steps cannot load; use the original"
        )
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**values)
    except Exception as e:  # each model family checks its own settings and can raise anything
        raise ConfigError(f"config_json cannot be used: {type(e).__name__}: {first_line(e)}") from None
    return config


class ShardedLM:
    """This rank's part of a causal language model, or of the language model of a vision-language model.

    Args:
        config: The model's configuration.
        files: The safetensors files with all of its weights, in one folder.
        device: The device of this rank.
        group: The ranks that hold the model; None if this process holds the whole model.
        quant: `int8` for 8-bit weights in linear layers, by torchao; None for no quantization.

    Raises:
        CapabilityError: The family cannot be split, or the quantization does not exist.
        ModelError: Files are missing or damaged, or are not those of this model.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        files: Sequence[str | Path],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        quant: str | None = None,
    ) -> None:
        self.device = device
        self._group = group
        quantize = _quantizer(quant)
        self.model = _empty_model(config)
        backbone = getattr(self.model, "model", None)
        self.sees_images = hasattr(backbone, "language_model") and hasattr(backbone, "get_rope_index")
        layout = DiskLayout(self.model)
        stored = WeightFolder.of_files(files, layout.canonical)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters(remove_duplicate=False)}
        # Splitting replaces every parameter separately, so a weight that the embedding and the head share is detected
        # before, and shared again after.
        tied = self._tied()
        slices = self._split()
        if tied:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight
        self.stored_names: frozenset[str] = frozenset(
            piece.name for name, shape in shapes.items() for piece in layout.stored_slices(name, shape)
        ) | {piece.name for name, b in named_persistent_buffers(self.model) for piece in layout.stored_slices(name, b.shape)}
        """The names of the tensors that the model consists of, as on disk."""
        self.tied_names: frozenset[str] = frozenset(self.model.all_tied_weights_keys)
        """The names of parameters that share the tensor of another one."""
        self._fill(layout, stored, shapes, slices, quantize)
        self.model.eval().requires_grad_(False)
        # Without the model's configuration: a cache of sliding windows cannot be rolled back beyond its window.
        self._cache: Any = DynamicCache()
        self._length = 0
        self._images: list[tuple[int, int, int]] = []

    # ---- building ----------------------------------------------------------------------------------------------------

    def _tied(self) -> bool:
        head = self.model.get_output_embeddings()
        return head is not None and head.weight is self.model.get_input_embeddings().weight

    def _split(self) -> LocalSlices:
        slices = LocalSlices()
        size = 1 if self._group is None else dist.get_world_size(self._group)
        if self._group is None or size == 1:
            return slices
        plan = resolve_plan(self.model, size)
        # A mesh over the existing group: other constructors create process groups of their own.
        mesh = DeviceMesh.from_group(self._group, self.device.type)
        parallelize_module(self.model, mesh, styles_of(self.model, plan, slices))
        return slices

    def _fill(
        self,
        layout: DiskLayout,
        stored: WeightFolder,
        shapes: dict[str, tuple[int, ...]],
        slices: LocalSlices,
        quantize: Callable[[nn.Module, nn.Module], None] | None,
    ) -> None:
        """Read this rank's slices of the parameters, module by module, so that at most one module exists in two formats at a time."""
        missing: list[str] = []
        for path, module in self.model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                # It has been read already, for another module that shares it.
                if parameter.device.type != "meta":
                    continue
                full = f"{path}.{name}" if path else name
                value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.device)
                # A parameter that is not split is a single slice.
                everything = [(whole(shapes[full]), (slice(None),) * parameter.dim())]
                for box, place in slices.boxes.get(full, everything):
                    pieces = cut_local_shards("value", layout.stored_slices(full, shapes[full]), box, value[place])
                    missing += stored.fill_all(pieces, self.model.base_model_prefix)
                self._replace(parameter, nn.Parameter(value, requires_grad=False))
            if quantize is not None and isinstance(module, nn.Linear) and module is not self.model.get_output_embeddings():
                quantize(self.model, module)
        # Then the buffers that the files contain.
        for name, buffer in list(named_persistent_buffers(self.model)):
            value = torch.empty(buffer.shape, dtype=buffer.dtype)
            pieces = cut_local_shards("value", layout.stored_slices(name, buffer.shape), whole(buffer.shape), value)
            missing += stored.fill_all(pieces, self.model.base_model_prefix)
            owner, _, own_name = name.rpartition(".")
            replace_tensor(self.model.get_submodule(owner), own_name, value)
        if missing:
            raise ModelError(
                f"the files lack {len(missing)} tensors that config.json requires, including {', '.join(missing[:3])}; the files and "
                "the configuration do not belong together"
            )
        # The parameters are there already; this moves the buffers.
        self.model.to(self.device)

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Replace a parameter wherever it is used."""
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter is old:
                    module.register_parameter(name, new)

    # ---- steps -------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return self._length

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def check(self, tokens: Sequence[int], offset: int) -> None:
        """Check a step.

        Raises:
            ConfigError: There are no tokens, one is outside the vocabulary, or the offset is beyond the cache.
        """
        if not tokens:
            raise ConfigError("tokens is empty; a step has at least one token")
        if max(tokens) >= self.vocabulary or min(tokens) < 0:
            raise ConfigError(
                f"tokens are from {min(tokens)} to {max(tokens)}; the model only has those below {self.vocabulary}"
            )
        inside = next((one for one in self._images if one[0] < offset < one[1]), None)
        if inside is not None:
            raise ConfigError(
                f"offset={offset} is inside of a prompt with images, from {inside[0]} to {inside[1]}; go back to its beginning"
            )
        if offset > self._length:
            raise ConfigError(f"offset={offset} is beyond the {self._length} tokens in the cache; send those before it first")

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], offset: int) -> Tensor:
        """Process the next tokens of the sequence. Collective over the ranks, which pass the same tokens.

        Args:
            tokens: The token ids.
            offset: The number of tokens that stay in the cache; later ones are dropped first.

        Returns:
            The logits `[V]` of the token after the last one, the same on all ranks.

        Raises:
            ConfigError: See `check`.
        """
        self.check(tokens, offset)
        self.roll_back(offset)
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(offset, offset + len(tokens), device=self.device)[None] + self.positions_delta
        with self.clear_cache_on_error():
            # Not through the model's own `forward`, which remembers the offset of positions after images beyond the end
            # of a sequence.
            if self.sees_images:
                hidden = self.model.model.get_input_embeddings()(ids)
                # Text has the same position along all three axes of these models.
                return self.run(hidden, positions.expand(3, 1, -1), len(tokens))
            output = self.model(
                input_ids=ids, position_ids=positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            self._length += len(tokens)
            logits: Tensor = output.logits[0, -1]
            return logits

    def run(self, hidden: Tensor, positions: Tensor, count: int, **more: Any) -> Tensor:
        """Run the language model of a vision-language model on embeddings.

        Args:
            hidden: The embeddings `[1, T, H]`.
            positions: The positions in time, height and width `[3, 1, T]`.
            count: T.
            more: Further arguments of the language model.

        Returns:
            The logits `[V]` of the token after the last one.
        """
        output = self.model.model.language_model(
            inputs_embeds=hidden, position_ids=positions, past_key_values=self._cache, use_cache=True, **more
        )
        self._length += count
        logits: Tensor = self.model.lm_head(output.last_hidden_state[:, -1:])[0, -1]
        return logits

    def roll_back(self, offset: int) -> None:
        """Drop all but the first tokens from the cache."""
        if offset == 0:
            self.clear()
        elif offset < self._length:
            # A positive number would be the length to keep, which later versions of transformers refuse.
            self._cache.crop(offset - self._length)
            self._length = offset
            self._images = [one for one in self._images if one[1] <= offset]

    def clear(self) -> None:
        """Empty the cache."""
        self._cache, self._length, self._images = DynamicCache(), 0, []

    @property
    def positions_delta(self) -> int:
        """The difference between the position of a token after the images and its index in the sequence."""
        return self._images[-1][2] if self._images else 0

    def note_images(self, start: int, delta: int) -> None:
        """Record that a prompt with images was processed.

        Args:
            start: The number of tokens before it.
            delta: The difference between positions and indices after it.
        """
        self._images.append((start, self._length, delta))

    def clear_cache_on_error(self) -> "_ClearOnError":
        """Return a context manager that empties the cache if its block fails."""
        return _ClearOnError(self)

    def close(self) -> None:
        """Free the model."""
        del self.model
        self._cache = None
        free_memory(self.device)


class _ClearOnError:
    """Empties the cache if a step fails, after which its layers may have different lengths."""

    def __init__(self, lm: ShardedLM) -> None:
        self._lm = lm

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self._lm.clear()


def _empty_model(config: PreTrainedConfig) -> Any:
    if getattr(config, "auto_map", None):
        raise CapabilityError("the model's code is in its folder (auto_map), which generation steps do not run")
    # Buffers stay real: those that the model computes, such as rotary frequencies, are not in the files.
    with init_empty_weights(include_buffers=False):
        try:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=config.dtype or torch.float32)
        except ValueError:
            # Raised for a family that has no class of this kind.
            try:
                model = AutoModelForImageTextToText.from_config(copy.deepcopy(config), dtype=config.dtype or torch.float32)
            except ValueError:
                raise CapabilityError(f"{config.model_type} is not a language model of transformers") from None
    model.tie_weights()
    _check_cache(model)
    _keep_in_float32(model)
    return model


def _keep_in_float32(model: Any) -> None:
    """Convert to float32 the tensors that a family keeps in float32 in its 16-bit models, as transformers does when it loads one."""
    names = set(model._keep_in_fp32_modules_strict or ())
    if model.dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    if not names or model.dtype not in (torch.float16, torch.bfloat16):
        return
    # As in transformers, a pattern may match anywhere in a name, and * stands for any text.
    kept = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in sorted(names)))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if kept.search(name):
            tensor.data = tensor.data.float()


def _check_cache(model: Any) -> None:
    """Refuse models whose state is not a KV cache: rewinding to an earlier token would corrupt it."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("past_key_values", "position_ids") if name not in parameters]
    other = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    # GPT-NeoX is a decoder although its is_decoder is False. In BERT, this setting decides whether attention is causal.
    causal = any(getattr(module, "is_causal", None) is True for module in model.get_decoder().modules())
    encoder = getattr(text, "is_decoder", None) is False and not causal
    if missing or other or encoder or getattr(model, "_is_stateful", False):
        reason = f"its layers are {', '.join(other)}" if other else "it is not a decoder whose cache is keys and values"
        raise CapabilityError(f"{model.config.model_type} cannot be run in generation steps: {reason}")


def _quantizer(quant: str | None) -> Callable[[nn.Module, nn.Module], None] | None:
    if quant is None:
        return None
    if quant not in QUANTIZATIONS:
        raise ModelError(
            f"quant={quant!r}: there is no such quantization here; there is {', '.join(QUANTIZATIONS)}, or null for none"
        )
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as e:
        raise ModelError(f"quant=int8 needs torchao, which is not installed: {install_command('quant')}") from e

    def quantize(model: nn.Module, linear: nn.Module) -> None:
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: module is linear)

    return quantize
