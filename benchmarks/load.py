"""Peak memory per rank while loading a model of at least 1 GB, relative to the size of the model.

torchrun --nproc-per-node 4 -m benchmarks.load
"""

import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from drivetrain.engine.config import EngineConfig, ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class


def anonymous() -> float:
    """Return this process's own memory in bytes, without the pages of mapped files, which the kernel can drop."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024.0 for line in file if line.startswith("RssAnon"))


def peak() -> float:
    """Return the peak resident size of this process so far, including mapped files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024.0 for line in file if line.startswith("VmHWM"))


def write_config(folder: Path) -> Qwen3Config:
    """Write the config of a Qwen 3 model of 1.2 GB."""
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    return config


def write_model(folder: Path) -> float:
    """Write that model with random weights and return its size in bytes."""
    config = write_config(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size="400MB")
    return float(sum(f.stat().st_size for f in folder.glob("*.safetensors")))


def main() -> None:
    """Print one line of JSON on the first rank."""
    torch.set_num_threads(1)
    init_distributed()
    with tempfile.TemporaryDirectory() as temporary:
        root = [temporary]
        dist.broadcast_object_list(root)
        folder = Path(root[0])
        size = 0.0
        if dist.get_rank() == 0:
            # Write it in a child process, whose memory is not counted.
            import multiprocessing

            with multiprocessing.get_context("spawn").Pool(1) as pool:
                size = pool.apply(write_model, (folder / "model",))
            save_tiny_model(folder / "small", "qwen3")
        dist.barrier()
        engine_class("fsdp")(model=ModelConfig(path=str(folder / "small")), engine=EngineConfig()).initialize().close()
        before, before_peak = anonymous(), peak()
        start = time.perf_counter()
        engine = engine_class("fsdp")(model=ModelConfig(path=str(folder / "model")), engine=EngineConfig()).initialize()
        seconds = time.perf_counter() - start
        grown: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
        dist.all_gather_object(grown, (anonymous() - before, peak() - before_peak))
        if dist.get_rank() == 0:
            print(
                json.dumps(
                    {
                        "case": f"{size / 1e9:.2f} GB, {len(grown)} processes",
                        "seconds": round(seconds, 2),
                        "own_memory_gb": " ".join(f"{a / 1e9:.3f}" for a, _ in grown),
                        "peak_resident_gb": " ".join(f"{b / 1e9:.3f}" for _, b in grown),
                        "largest_share_of_model": round(max(a for a, _ in grown) / size, 3),
                    }
                ),
                flush=True,
            )
        engine.close()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
