"""A hand-written Megatron-core loop as a baseline for the engine: Megatron's schedule, reduction, optimizer and head.

The layers are the engine's own, because Megatron's need CUDA. Everything around them is plain Megatron: logits of the supervised
tokens, vocabulary-parallel cross entropy, the distributed optimizer with its clipping, global process groups.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from transformers import PreTrainedConfig

from drivetrain.engine.bridge.family import find_family
from drivetrain.engine.config import EngineConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.mcore.config import transformer_config
from drivetrain.engine.mcore.cpu import cuda_calls_use_cpu
from drivetrain.engine.mcore.model import PackedGPTModel, layer_spec
from drivetrain.engine.mcore.modules import PackedParams, slice_of
from drivetrain.engine.mcore.options import MCoreOptions
from drivetrain.engine.ops.linear_head import PLAIN
from drivetrain.engine.ops.packed_context import PackedContext
from drivetrain.engine.packing.batch import IGNORE, PackedBatch
from drivetrain.engine.rank_slice import RankSlice


class LogitsModel(PackedGPTModel):
    """The engine's layers with megatron's own head: logits, then cross entropy."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        part = slice_of(packed_seq_params)
        head: Any = self.output_layer
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = head(hidden_states.index_select(0, part.selected), weight=weight)
        return vocab_parallel_cross_entropy(logits.clone(), part.targets[:, None])


class BareMegatron:
    """A model and its optimizer, with tensor or data parallelism over all processes.

    Args:
        config: The model's config.
        tp: The number of tensor-parallel ranks.
        lr: The learning rate.
        weights: The initial weights: the state dict of a chunk of the engine's model.
    """

    def __init__(self, config: PreTrainedConfig, tp: int, lr: float, weights: dict[str, Tensor]) -> None:
        with cuda_calls_use_cpu():
            if not parallel_state.is_initialized():
                parallel_state.initialize_model_parallel(tp)
            self.groups = ProcessGroupCollection.use_mpu_process_groups()
            model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
            decoder = find_family(config.model_type).decoder(config)
            engine = EngineConfig(precision=PrecisionConfig(compute="float32"))
            settings = transformer_config(decoder, engine, MCoreOptions(), ParallelConfig(tp=tp, dp_shard=1))
            specs = [layer_spec(decoder, config, i, self.groups) for i in range(decoder.layers)]
            model = LogitsModel(
                settings,
                decoder,
                config,
                specs,
                self.groups,
                first=True,
                last=True,
                stage=None,
                head=None,
                transform=PLAIN,
            )
            model.load_state_dict(weights, strict=False)
            for parameter in model.parameters():
                name = next(n for n, p in model.named_parameters() if p is parameter)
                rule, _ = find_family(config.model_type).rule(name)
                if not hasattr(parameter, "tensor_model_parallel"):
                    parameter.tensor_model_parallel = rule.is_split(parameter.dim())
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
            self.model = DistributedDataParallel(settings, ddp, model)
            optimizer = OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=0.0,
                adam_beta1=0.9,
                adam_beta2=0.999,
                clip_grad=1.0,
                use_distributed_optimizer=True,
            )
            self.optimizer = get_megatron_optimizer(optimizer, [self.model], config_overrides={})
            settings.finalize_model_grads_func = lambda model, *args, **kwargs: finalize_model_grads(model, None)

    def step(self, batch: PackedBatch, total: float) -> float:
        """Make an optimizer step on this rank's shard and return the loss. `total` is the number of supervised tokens on all ranks."""
        with cuda_calls_use_cpu():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()

            def forward(batches: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
                micro_batch = next(batches)
                supervised = micro_batch.labels != IGNORE
                part = RankSlice(
                    input_ids=micro_batch.input_ids,
                    position_ids=micro_batch.position_ids,
                    context=PackedContext(bounds=micro_batch.bounds, cu_seqlens=micro_batch.cu_seqlens),
                    selected=supervised.nonzero()[:, 0],
                    targets=micro_batch.labels[supervised],
                    outputs=OutputRequest(log_probs=True),
                    expected=None,
                    real_tokens=micro_batch.num_tokens,
                    mask=supervised,
                )
                out = model(
                    micro_batch.input_ids[None],
                    micro_batch.position_ids[None],
                    None,
                    packed_seq_params=PackedParams(qkv_format="sbhd", part=part),
                )

                def loss(token_losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                    value = token_losses.sum() / total
                    return value, torch.zeros((), dtype=torch.int), {"loss": value.detach()}

                return out, loss

            outputs = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter([batch]),
                model=[self.model],
                num_microbatches=1,
                seq_length=1,
                micro_batch_size=1,
                forward_only=False,
            )
            self.optimizer.step()
            loss = outputs[0]["loss"].clone()
            torch.distributed.all_reduce(loss, group=self.groups.dp)
            return float(loss)
