"""Recurrent layers against transformers' own code: the operators on one document, and a step of a hybrid on prompts with several answers.

    python -m benchmarks.states --case operators | step [--steps 16]
    python -m benchmarks.states --case kernels      # on a GPU

Operators: forward and backward of one document of 1024 tokens, and the memory that the forward pass keeps for the backward
pass, of the operator and of transformers' fallback without packages, which carries states over document boundaries in a pack. Step: 8
prompts with 4 answers each, of which a third of the tokens are the prompt's; a plain transformers loop, one document at a time, the engine
with each prompt computed once, and the engine without, in turn. Ratios are medians over steps of times that were measured side by side.
Kernels: forward and backward of three documents in a pack of 8192 tokens, in bfloat16 by the kernels of flash-linear-attention and
causal-conv1d, and in float32 by the chunks that serve where those are not installed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, SharePrefixes
from drivetrain.engine.ops.scan.causal_conv import causal_conv
from drivetrain.engine.ops.scan.fused import is_installed
from drivetrain.engine.ops.scan.linear_attention import linear_attention
from drivetrain.engine.ops.scan.segments import Segments
from drivetrain.engine.ops.scan.selective_scan import selective_scan
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss

LENGTH, REPEATS = 1024, 5
PACK = (0, 3000, 3001, 8192)
PROMPTS, ANSWERS = 8, 4
OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999))

Operator = Callable[[], Tensor]


def operators() -> dict[str, tuple[Operator, Operator]]:
    """Return our operator and transformers' for each kind of layer, on separate inputs."""
    torch.manual_seed(0)
    segments = Segments((0, LENGTH), torch.device("cpu"))

    def unit(heads: int, size: int) -> Tensor:
        return F.normalize(torch.randn(LENGTH, heads, size), dim=-1).requires_grad_()

    def decays(*size: int) -> Tensor:
        return (-0.1 * torch.rand(LENGTH, *size)).requires_grad_()

    def delta(groups: int, heads: int, size: int) -> tuple[Operator, Operator]:
        q, k, v = unit(groups, size), unit(groups, size), torch.randn(LENGTH, heads, size, requires_grad=True)
        decay, beta = decays(heads), torch.rand(LENGTH, heads, requires_grad=True)
        inputs = [x[None] for x in (q, k, v, decay, beta)]
        # transformers' function scales queries itself.
        return (
            lambda: linear_attention(q * size**-0.5, k, v, decay, beta, segments)[0],
            lambda: torch_chunk_gated_delta_rule(*inputs)[0],
        )

    def kimi(heads: int, size: int) -> tuple[Operator, Operator]:
        q, k, v = unit(heads, size), unit(heads, size), torch.randn(LENGTH, heads, size, requires_grad=True)
        decay, beta = decays(heads, size), torch.rand(LENGTH, heads, requires_grad=True)
        inputs = [x[None] for x in (q, k, v, decay, beta)]
        return (
            lambda: linear_attention(q * size**-0.5, k, v, decay, beta, segments)[0],
            lambda: chunk_kimi_delta_attention(*inputs)[0],
        )

    def mamba2(heads: int, state: int, size: int) -> tuple[Operator, Operator]:
        c, b, x = unit(1, state), unit(1, state), torch.randn(LENGTH, heads, size, requires_grad=True)
        dt, a = torch.rand(LENGTH, heads, requires_grad=True), (-torch.rand(heads)).requires_grad_()
        inputs = [t[None] for t in (x, dt)]
        return (
            lambda: linear_attention(c, b, x * dt.unsqueeze(-1), a * dt, None, segments)[0],
            # The size of chunks in the configs of Bamba, Falcon-H1, Granite and Zamba.
            lambda: mamba2_chunk_scan(*inputs, a, b[None], c[None], chunk_size=256),
        )

    def mamba(channels: int, state: int) -> tuple[Operator, Operator]:
        # transformers' loop processes tokens one by one, and would take half a minute for as many as the others.
        length = LENGTH // 8
        x, dt = torch.randn(length, channels, requires_grad=True), torch.rand(length, channels, requires_grad=True)
        a = (-torch.rand(channels, state)).requires_grad_()
        b, c = (torch.randn(length, state, requires_grad=True) for _ in range(2))
        inputs = [t.t()[None] for t in (x, dt)]
        short = Segments((0, length), torch.device("cpu"))
        return (
            lambda: selective_scan(x, dt, a, b, c, short)[0],
            lambda: mamba_selective_scan(*inputs, a, b.t()[None], c.t()[None]),
        )

    return {
        "gated DeltaNet, 4 key and 8 value heads of 128": delta(4, 8, 128),
        "Kimi's delta attention, 4 heads of 64": kimi(4, 64),
        "Mamba 2, 8 heads of 64, state of 128": mamba2(8, 128, 64),
        f"Mamba, 512 channels, state of 16, {LENGTH // 8} tokens": mamba(512, 16),
    }


def kept(operator: Operator) -> float:
    """Return the number of megabytes that a forward pass keeps."""
    sizes: dict[int, int] = {}
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        operator()
    return sum(sizes.values()) / 1e6


def seconds(run: Callable[[], Any]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def compare_operators() -> None:
    """Print one line of JSON for each operator."""
    for name, pair in operators().items():
        times = []
        for _ in range(REPEATS + 1):
            times.append([seconds(lambda run=run: run().sum().backward()) for run in pair])  # type: ignore[misc]
        ours, theirs = (statistics.median(row[i] for row in times[1:]) for i in range(2))
        print(
            json.dumps(
                {
                    "case": name,
                    "ours_ms": round(1e3 * ours, 1),
                    "transformers_ms": round(1e3 * theirs, 1),
                    "ratio": round(statistics.median(row[1] / row[0] for row in times[1:]), 2),
                    "ours_kept_mb": round(kept(pair[0]), 1),
                    "transformers_kept_mb": round(kept(pair[1]), 1),
                }
            ),
            flush=True,
        )


def on_device(run: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the median milliseconds of forward and backward, and their peak memory in megabytes."""
    times = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        run().float().sum().backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:]), (torch.cuda.max_memory_allocated() - before) / 1e6


def compare_kernels() -> None:
    """Print one line of JSON for each kind of layer, in sizes of published models."""
    device, length = torch.device("cuda"), PACK[-1]
    segments = Segments(PACK, device)

    def leaf(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype, requires_grad=True)

    def attention(
        dtype: torch.dtype, groups: int, heads: int, key: int, value: int, *, delta: bool, by_channel: bool = False
    ) -> Operator:
        q, k = (
            F.normalize(torch.randn(length, groups, key, device=device), dim=-1).to(dtype).requires_grad_() for _ in range(2)
        )
        v = leaf(length, heads, value, dtype=dtype)
        size = (length, heads, key) if by_channel else (length, heads)
        decay = (-0.1 * torch.rand(*size, device=device)).requires_grad_()
        beta = torch.rand(length, heads, device=device, dtype=dtype, requires_grad=True) if delta else None
        return lambda: linear_attention(q, k, v, decay, beta, segments)[0]

    def convolution(dtype: torch.dtype, channels: int) -> Operator:
        x, weight = leaf(length, channels, dtype=dtype), leaf(channels, 4, dtype=dtype)
        return lambda: causal_conv(x, weight, None, segments)[0]

    def mamba(dtype: torch.dtype, channels: int, state: int) -> Operator:
        x, b, c = leaf(length, channels, dtype=dtype), leaf(length, state, dtype=dtype), leaf(length, state, dtype=dtype)
        dt = torch.rand(length, channels, device=device, dtype=dtype, requires_grad=True)
        a = (-torch.rand(channels, state, device=device)).requires_grad_()
        return lambda: selective_scan(x, dt, a, b, c, segments)[0]

    kinds: dict[str, tuple[str, Callable[[torch.dtype], Operator]]] = {
        "gated DeltaNet, 16 key and 32 value heads of 128": ("fla", lambda d: attention(d, 16, 32, 128, 128, delta=True)),
        "Kimi's delta attention, 32 heads of 128": (
            "fla",
            lambda d: attention(d, 32, 32, 128, 128, delta=True, by_channel=True),
        ),
        "Mamba 2, 64 heads of 64, state of 128": ("fla", lambda d: attention(d, 8, 64, 128, 64, delta=False)),
        "convolution, 4096 channels, 4 taps": ("causal_conv1d", lambda d: convolution(d, 4096)),
        # There is no kernel for it: both run the chunked code.
        "Mamba, 4096 channels, state of 16": ("", lambda d: mamba(d, 4096, 16)),
    }
    for name, (package, build) in kinds.items():
        torch.manual_seed(0)
        installed = bool(package) and is_installed(package)
        (kernel_ms, kernel_mb), (chunks_ms, chunks_mb) = (on_device(build(d)) for d in (torch.bfloat16, torch.float32))
        print(
            json.dumps(
                {
                    "case": name,
                    "kernel": package if installed else None,
                    "bfloat16_ms": round(kernel_ms, 2),
                    "float32_ms": round(chunks_ms, 2),
                    "ratio": round(chunks_ms / kernel_ms, 2),
                    "bfloat16_peak_mb": round(kernel_mb),
                    "float32_peak_mb": round(chunks_mb),
                }
            ),
            flush=True,
        )


def hybrid_config() -> PreTrainedConfig:
    """Return the config of a hybrid with about 20 million parameters: three recurrent layers to one with attention."""
    config: PreTrainedConfig = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return config


def answers(step: int) -> list[list[int]]:
    """Return the documents of a step: prompts of 40 to 120 tokens, each with answers of 20 to 60."""
    g = torch.Generator().manual_seed(step)

    def text(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=g))
        return torch.randint(3, 8192, (length,), generator=g).tolist()

    return [prompt + text(20, 60) for prompt in (text(40, 120) for _ in range(PROMPTS)) for _ in range(ANSWERS)]


def compare_steps(count: int) -> None:
    """Print one line of JSON for the step."""
    init_distributed()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        plain: Any = AutoModelForCausalLM.from_config(hybrid_config(), dtype=torch.float32)
        plain.save_pretrained(folder)

        def built(share: SharePrefixes) -> Any:
            config = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=4096), share_prefixes=share)
            return engine_class("fsdp")(model=ModelConfig(path=folder), engine=config, optim=OPTIM).initialize()

        engines = {"shared": built("on"), "alone": built("off")}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, weight_decay=0.0, fused=True)

    def loop(documents: list[list[int]]) -> float:
        optimizer.zero_grad()
        total, targets = 0.0, sum(len(d) - 1 for d in documents)
        for document in documents:
            ids = torch.tensor([document])
            logits = plain(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, ids[0, 1:], reduction="sum") / targets
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        return total

    rows = []
    for step in range(-1, count):
        documents = answers(step + 1)
        batch = from_lists(documents)
        losses: list[float] = []
        row = [seconds(lambda d=documents, out=losses: out.append(loop(d)))]  # type: ignore[misc]
        for engine in engines.values():
            row.append(seconds(lambda e=engine, b=batch, out=losses: out.append(e.train_batch(b, SFTLoss()).loss)))  # type: ignore[misc]
        assert max(losses) - min(losses) < 1e-3 * losses[0], f"the loops do not train the same model: {losses}"
        rows += [row] if step >= 0 else []
    print(
        json.dumps(
            {
                "case": f"step of a hybrid, {PROMPTS} prompts with {ANSWERS} answers",
                "transformers_s": round(statistics.median(r[0] for r in rows), 3),
                "shared_s": round(statistics.median(r[1] for r in rows), 3),
                "alone_s": round(statistics.median(r[2] for r in rows), 3),
                "ratio_shared": round(statistics.median(r[0] / r[1] for r in rows), 2),
                "ratio_alone": round(statistics.median(r[0] / r[2] for r in rows), 2),
            }
        ),
        flush=True,
    )
    for engine in engines.values():
        engine.close()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Run a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("operators", "step", "kernels"), default="operators")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case == "kernels":
        if not torch.cuda.is_available():
            sys.exit("--case kernels needs a GPU")
        compare_kernels()
    elif args.case == "step":
        compare_steps(args.steps)
    else:
        compare_operators()


if __name__ == "__main__":
    main()
