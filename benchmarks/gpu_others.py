"""Baselines for the engines on a GPU: a hand-written loop with the same kernels, and TRL if it is installed."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks.gpu_cases import SHAPES, Case, batch_of
from drivetrain.engine.ops.kernels import attend
from drivetrain.engine.ops.packed_context import PackedContext
from drivetrain.engine.packing.batch import IGNORE


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    context: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    out = attend(*(t[0].transpose(0, 1) for t in (query, key, value)), context, scaling, None, None, None)  # type: ignore[call-arg,arg-type]
    return out[None], None


AttentionInterface.register("bare_gpu", _attention)


def bare_loop(case: Case, micro_batches: int, device: torch.device) -> Callable[[int], int]:
    """Return a function that makes a step and returns its number of tokens.

    Documents are packed; products are in bfloat16; parameters, sums of gradients, moments and the clipped norm in float32, as in the engine.
    """
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            SHAPES[case.model].config(), attn_implementation="bare_gpu", dtype=torch.bfloat16
        ).train()
    copies = list(model.parameters())
    parameters = [copy.detach().float().requires_grad_() for copy in copies]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def add_gradients() -> None:
        for copy, parameter in zip(copies, parameters, strict=True):
            parameter.grad = copy.grad.float() if parameter.grad is None else parameter.grad.add_(copy.grad)
            copy.grad = None

    @torch.no_grad()
    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.copy_(parameter)

    def step(seed: int) -> int:
        batch = batch_of(case, micro_batches, seed)
        total = int((batch.labels != IGNORE).sum())
        for i in range(micro_batches):
            part = batch.select(range(i * case.documents, (i + 1) * case.documents)).to(device)
            hidden = model.model(
                input_ids=part.input_ids[None],
                position_ids=part.position_ids[None],
                use_cache=False,
                context=PackedContext(bounds=part.bounds, cu_seqlens=part.cu_seqlens),
            ).last_hidden_state[0]
            # Compute in chunks: the logits of 8,192 tokens take 5 GB in float32. (Autograd still keeps all of them.)
            sums = [
                F.cross_entropy(model.lm_head(h).float(), y, ignore_index=IGNORE, reduction="sum")
                for h, y in zip(hidden.split(2048), part.labels.split(2048), strict=True)
            ]
            (torch.stack(sums).sum() / total).backward()
            add_gradients()
        update()
        return batch.num_tokens

    return step


def trl_rate(case: Case, steps: int) -> float:
    """Return TRL's tokens per second on the same documents, as measured by its trainer, excluding startup.

    Raises:
        ImportError: TRL is not installed.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    shape = SHAPES[case.model]
    g = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(0, shape.vocabulary, (case.document,), generator=g).tolist()} for _ in range(2 * steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_config(shape.config(), dtype=getattr(torch, case.params)),
            args=SFTConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=2,
                max_length=case.document,
                gradient_checkpointing=False,
                bf16=torch.cuda.is_available(),
                use_cpu=not torch.cuda.is_available(),
                report_to="none",
                save_strategy="no",
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=Dataset.from_list(rows),
        )
        metrics = trainer.train().metrics
    return 2 * steps * case.document / float(metrics["train_runtime"])
