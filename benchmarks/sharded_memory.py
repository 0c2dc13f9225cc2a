"""Peak memory of a rank of a tensor-parallel model, against the size of the model.

    torchrun --nproc-per-node N -m benchmarks.sharded_memory

A model of 1.2 GB is loaded and runs one step. `peak_to_model` is the maximum growth of a rank's resident memory, including mapped pages of
files, divided by the bytes of the model: the largest value of all ranks. `parameters_to_model` is the fraction that a rank keeps.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint import forget_peak
from benchmarks.load import peak, write_model
from drivetrain.workers.tensor_parallel.model import ShardedLM, parse_config


@contextmanager
def model_folder() -> Iterator[Path]:
    """Yield a folder, the same on all ranks, with a model."""
    if dist.get_rank():
        found: list[str] = [""]
        dist.broadcast_object_list(found)
        yield Path(found[0])
        dist.barrier()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        dist.broadcast_object_list([name])
        yield folder
        dist.barrier()


def main() -> None:
    """Measure on all ranks; rank 0 prints."""
    dist.init_process_group("gloo")
    with model_folder() as folder:
        config = parse_config((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        # A warm-up allocates the memory that the first step of any model takes, independently of the model.
        torch.nn.Linear(8, 8)(torch.zeros(1, 8))
        before = forget_peak()
        model = ShardedLM(config, files, torch.device("cpu"), group)
        with torch.inference_mode():
            model.step(list(range(16)), 0)
        kept = sum(parameter.nbytes for parameter in model.model.parameters())
        ratios = torch.tensor([(peak() - before) / size, kept / size])
        dist.all_reduce(ratios, op=dist.ReduceOp.MAX)
        if not dist.get_rank():
            found = {"peak_to_model": round(float(ratios[0]), 3), "parameters_to_model": round(float(ratios[1]), 3)}
            print(json.dumps({"case": f"tp={dist.get_world_size()}", "model_gb": round(size / 1e9, 2), **found}), flush=True)
        model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
