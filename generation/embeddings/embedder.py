"""Embeddings with a plain transformers model: forward passes over many texts, pooling, normalization.

Axes: B texts of a batch, T tokens of all of them, L tokens of the longest, D embedding.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...engine.errors import ConfigError, ModelError
from ...engine.hf.model_path import resolve_folder
from ...engine.hf.shape import context_of
from ...engine.hf.weights import quiet_loading
from ...engine.offload import free_memory
from .config import EmbeddingConfig
from .folder import DenseLayer, read_folder

logger = logging.getLogger(__name__)

PACKED_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""The largest difference between packed and single texts at which a model counts as packable, relative to the embedding's length."""
_TRIAL_TOKENS = 24


class Embedder:
    """A model that embeds texts.

    Texts are packed without padding if the model separates them by their positions, as decoders do; this is tested when the model is
    loaded. Otherwise they are padded.

    Args:
        config: The configuration.

    Raises:
        ModelError: The model cannot be loaded, or its folder requires something that is not supported.
    """

    def __init__(self, config: EmbeddingConfig) -> None:
        self._config = config
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        path, self.folder = config.model.path, read_folder(resolve_folder(config.model.path))
        try:
            with quiet_loading():
                loaded: Any = AutoModel.from_pretrained(
                    self.folder.model,
                    dtype=getattr(torch, config.dtype),
                    trust_remote_code=config.model.trust_remote_code,
                    output_loading_info=True,
                )
        except Exception as e:  # transformers and safetensors raise anything on a damaged model
            raise ModelError(f"model.path={path} cannot be loaded for embeddings: {type(e).__name__}: {e}") from e
        if loaded[0].config.is_encoder_decoder:
            raise ModelError(f"model.path={path} is an encoder with a decoder, which cannot be used for embeddings here")
        # transformers fills missing tensors with random values, so they must be refused.
        model, info = loaded
        # The pooler of BERT is not used.
        if missing := sorted(name for name in info["missing_keys"] if not name.startswith("pooler.")):
            raise ModelError(f"model.path={path} lacks {len(missing)} tensors, {', '.join(missing[:3])} among them")
        self._model: Any = model.to(self.device).eval()
        self._parameters = set(inspect.signature(model.forward).parameters)
        text_config = model.config.get_text_config()
        causal = any(name.endswith("ForCausalLM") for name in model.config.architectures or ())
        self.pooling = config.pooling or self.folder.pooling or ("last" if causal else "mean")
        self.normalize = next((n for n in (config.normalize, self.folder.normalize) if n is not None), True)
        self._dense = [_load_dense(layer, config.dtype, self.device) for layer in self.folder.dense]
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.context: int | None = context_of(text_config)
        pad = getattr(text_config, "pad_token_id", None)
        self._pad: int = 0 if pad is None else pad
        # RoBERTa's positions start after that of padding.
        table: Any = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        if self.context is not None and padding is not None:
            self.context -= padding + 1
        # Each linear layer must take what the one before it returns; the first one takes the pooled hidden state.
        width = getattr(text_config, "hidden_size", None)
        for dense in self._dense:
            if dense[0].in_features != width:
                raise ModelError(f"model.path={path}: a linear layer takes {dense[0].in_features} features, but gets {width}")
            width = dense[0].out_features
        self.packs = self._is_decoder(text_config) and "position_ids" in self._parameters and self._can_pack()

    def check(self, tokens: Sequence[int]) -> None:
        """Check a text.

        Raises:
            ConfigError: It is empty, too long, or has a token outside the vocabulary.
        """
        if not tokens:
            raise ConfigError("the text has 0 tokens; it must have at least one")
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise ConfigError(
                f"the text has token ids from {min(tokens)} to {max(tokens)}; the model only has those below {self.vocabulary}"
            )
        if self.context is not None and len(tokens) > self.context:
            raise ConfigError(
                f"the text has {len(tokens)} tokens, and {self._config.model.path} has {self.context} positions; truncate it"
            )

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the embeddings `[B, D]` of texts, in float32 in host memory.

        Args:
            texts: The token ids of each text.

        Raises:
            ConfigError: A text cannot be embedded; see `check`.
            ModelError: The model computes NaN.
        """
        for text in texts:
            self.check(text)
        # Batch texts of similar length, to limit padding.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        embeddings: list[Tensor | None] = [None] * len(texts)
        batch: list[int] = []
        for i in order:
            tokens = sum(len(texts[j]) for j in batch) if self.packs else len(batch) * len(texts[batch[0]]) if batch else 0
            step = len(texts[i]) if self.packs or not batch else len(texts[batch[0]])
            if batch and (len(batch) >= self._config.max_batch_size or tokens + step > self._config.target_tokens_per_batch):
                self._run(texts, batch, embeddings)
                batch = []
            batch.append(i)
        if batch:
            self._run(texts, batch, embeddings)
        return torch.stack([row for row in embeddings if row is not None]) if texts else torch.zeros(0, 0)

    def close(self) -> None:
        """Free the model."""
        del self._model
        free_memory(self.device)

    def _run(self, texts: Sequence[Sequence[int]], batch: Sequence[int], embeddings: list[Tensor | None]) -> None:
        chosen = [texts[i] for i in batch]
        rows = self._packed(chosen) if self.packs else self._padded(chosen)
        rows = self._finish(rows).float().cpu()
        if not bool(torch.isfinite(rows).all()):
            raise ModelError(f"{self._config.model.path} computes NaN or infinity; its weights or its dtype are at fault")
        for i, row in zip(batch, rows, strict=True):
            embeddings[i] = row

    def _packed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor([[token for text in texts for token in text]], device=self.device)
        positions = torch.tensor([[i for text in texts for i in range(len(text))]], device=self.device)
        # With a cache, texts would attend to those before them.
        hidden = self._model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        lengths = [len(text) for text in texts]
        return torch.stack([self._pool(part, len(part)) for part in hidden.split(lengths)])

    def _padded(self, texts: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, texts))
        ids = torch.full((len(texts), width), self._pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(list(text))
            mask[row, : len(text)] = 1
        inputs: dict[str, Any] = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        if "use_cache" in self._parameters:
            inputs["use_cache"] = False
        hidden = self._model(**inputs).last_hidden_state
        return torch.stack([self._pool(states, len(text)) for states, text in zip(hidden, texts, strict=True)])

    def _pool(self, states: Tensor, length: int) -> Tensor:
        if self.pooling == "last":
            return states[length - 1]
        if self.pooling == "cls":
            return states[0]
        # In float32, because a sum of many bfloat16 values would lose its lower bits.
        return states[:length].float().mean(0)

    def _finish(self, rows: Tensor) -> Tensor:
        for dense in self._dense:
            rows = dense(rows.to(getattr(torch, self._config.dtype)))
        rows = rows.float()
        return nn.functional.normalize(rows, dim=-1) if self.normalize else rows

    def _is_decoder(self, config: Any) -> bool:
        """Return whether tokens depend only on earlier ones, and only through attention; otherwise a text could depend on its neighbors."""
        kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
        return (
            config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            and getattr(config, "is_decoder", None) is not False
            and not getattr(config, "use_bidirectional_attention", None)
            and "past_key_values" in self._parameters
            and all("attention" in kind and "linear" not in kind for kind in kinds)
        )

    @torch.inference_mode()
    def _can_pack(self) -> bool:
        length = min(_TRIAL_TOKENS, self.context or _TRIAL_TOKENS)
        # Three texts, so that the middle one has a neighbor on both sides.
        texts = [[(i * 7 + start) % self.vocabulary for i in range(length)] for start in (3, 9, 100)]
        alone = torch.cat([self._packed([text]) for text in texts]).float()
        together = self._packed(texts).float()
        difference = float((together - alone).norm() / alone.norm())
        logger.info("%s: packed texts differ by %.1e from single ones", self._config.model.path, difference)
        return difference <= PACKED_TOLERANCE[self._config.dtype]


def _load_dense(layer: DenseLayer, dtype: str, device: torch.device) -> nn.Sequential:
    file = layer.folder / "model.safetensors"
    try:
        tensors = load_file(file)
        weight = tensors["linear.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias)
        linear.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in tensors.items()})
    except (OSError, KeyError, IndexError, RuntimeError, SafetensorError) as e:
        raise ModelError(f"{file} cannot be used: {e}") from e
    activation: nn.Module = nn.Tanh() if layer.activation == "Tanh" else nn.Identity()
    return nn.Sequential(linear, activation).to(device, getattr(torch, dtype)).eval()
