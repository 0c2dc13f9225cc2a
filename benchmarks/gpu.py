"""Training speed on one GPU: tokens per second and MFU of Qwen3 shapes with random weights and packed 4096-token documents, on both
engines.

    python -m benchmarks.gpu [--model 0.6B 4B] [--steps 10]

Float32 parameters, bfloat16 arithmetic, AdamW; fsdp with and without compilation, and mcore. The rates of plain copies and matrix products on
the same card are measured in the same run for comparison. Skipped without a GPU; `--model tiny` runs anywhere, to test the benchmark itself.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3Config

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, PrecisionConfig
from drivetrain.engine.flops import known_peak_tflops
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class, is_installed
from drivetrain.workers.losses.sft import SFTLoss

SHAPES = {
    # name: hidden, intermediate, layers, heads, kv heads, head size, vocabulary, tokens per document, documents per micro-batch
    "tiny": (64, 192, 2, 4, 2, 16, 512, 64, 2),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, 4096, 4),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936, 4096, 2),
}


def config_of(name: str) -> Qwen3Config:
    """Return a Qwen3 config with the sizes from its model card."""
    hidden, intermediate, layers, heads, kv, size, vocabulary, document, _ = SHAPES[name]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=size,
        max_position_embeddings=document,
        tie_word_embeddings=True,
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(name: str, backend: str, compiled: bool, steps: int, device: torch.device) -> dict[str, object]:
    """Train for some steps and return the medians."""
    document, per_micro_batch, vocabulary = SHAPES[name][7], SHAPES[name][8], SHAPES[name][6]
    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(Path(folder))
        engine = engine_class(backend)(
            model=ModelConfig(path=folder, init="random"),
            engine=EngineConfig(
                backend=backend,
                precision=PrecisionConfig(params="float32", compute="bfloat16", reduce="float32"),
                micro_batch=MicroBatchConfig(max_tokens=document * per_micro_batch),
                compile=compiled,
            ),
            optim=OptimConfig(lr=1e-5),
        ).initialize()
    generator = torch.Generator().manual_seed(0)
    seconds, result = [], None
    with engine.train_mode():
        for step in range(-3, steps):
            texts = [
                torch.randint(0, vocabulary, (document,), generator=generator).tolist() for _ in range(2 * per_micro_batch)
            ]
            batch = from_lists(texts)
            synchronize(device)
            start = time.perf_counter()
            result = engine.train_batch(batch, SFTLoss())
            synchronize(device)
            if step >= 0:
                seconds.append(time.perf_counter() - start)
    assert result is not None
    engine.close()
    median = statistics.median(seconds)
    achieved = result.flops / median / 1e12
    peak = known_peak_tflops(torch.cuda.get_device_name(device), "bfloat16") if device.type == "cuda" else None
    return {
        "case": f"Qwen3 {name}, {document}-token documents, {backend}{', compiled' if compiled else ''}",
        "tokens_per_s": round(result.tokens / median),
        "tflops": round(achieved, 2),
        "mfu": "-" if peak is None else round(achieved / peak, 3),
        "peak_gib": round(result.peak_gib, 1),
    }


def ceilings(device: torch.device) -> dict[str, object]:
    """Measure the peak rates of the card: bytes copied, and a large bfloat16 matrix product."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    medians = []
    for work in (lambda: torch.mm(a, b), lambda: target.copy_(source)):
        for _ in range(3):
            work()
        rounds = []
        for _ in range(10):
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            rounds.append(time.perf_counter() - start)
        medians.append(statistics.median(rounds))
    return {
        "case": f"ceilings of {torch.cuda.get_device_name(device)}",
        "matmul_tflops": round(2 * n**3 / medians[0] / 1e12, 1),
        "copy_gb_per_s": round(2 * source.numel() / medians[1] / 1e9),
    }


def main() -> None:
    """Print one line of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=sorted(SHAPES), default=["0.6B", "4B"])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if not torch.cuda.is_available() and args.model != ["tiny"]:
        print(json.dumps({"case": "skipped", "why": "no CUDA device"}))
        return
    device = init_distributed()
    if device.type == "cuda":
        print(json.dumps(ceilings(device)), flush=True)
    for name in args.model:
        for backend, compiled in (("fsdp", False), ("fsdp", True), *([("mcore", False)] if is_installed("mcore") else [])):
            print(json.dumps(measure(name, backend, compiled, args.steps, device)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
