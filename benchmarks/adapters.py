"""Several adapters in one pass, against one after another: forward and backward passes and optimizer steps, with batch-invariant numerics and without.

    python -m benchmarks.adapters [--adapters 8] [--documents 4] [--length 32] [--rank 8] [--rounds 7] [--threads 2]

A step of each adapter is a loss on its documents, then its optimizer step. `together` is one call with the documents of all adapters,
`alone` one call per adapter. Both alternate in one process. The results are medians of tokens per wall second, and their ratio.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu import synchronize
from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.adapters.config import AdapterConfig
from drivetrain.engine.call_trainer import TrainingCall
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain.engine.registry import engine_class
from drivetrain.losses.token_sums import TokenSumLoss

VOCABULARY = 8192
OPTIM = OptimConfig(lr=1e-4)


def main() -> None:
    """Print one line of JSON for each setting of `engine.invariant`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 8), ("documents", 4), ("length", 32), ("rank", 8), ("rounds", 7), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(Path(folder))
        for invariant in (True, False) if device.type == "cpu" else (False,):
            measure(Path(folder), args, parameters, device, invariant=invariant)


def write_model(folder: Path) -> int:
    """Write a model of about 20 million parameters; return their number."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def measure(folder: Path, args: argparse.Namespace, parameters: int, device: torch.device, *, invariant: bool) -> None:
    """Measure both ways alternately."""
    engine = engine_class("fsdp")(
        model=ModelConfig(path=str(folder), max_adapters=args.adapters),
        engine=EngineConfig(micro_batch=MicroBatchConfig(max_tokens=4096), invariant=invariant),
    ).initialize()
    trainer = AdapterTrainer(engine)
    generator = torch.Generator().manual_seed(0)
    calls = []
    for number in range(args.adapters):
        name = f"adapter-{number}"
        trainer.create(name, AdapterConfig(rank=args.rank, seed=number))
        documents = torch.randint(VOCABULARY, (args.documents, args.length), generator=generator).tolist()
        batch = from_lists(documents)
        batch = batch.with_fields(loss_weights=torch.ones(batch.num_tokens))
        calls.append(TrainingCall(adapter=name, batch=batch, loss=TokenSumLoss("cross_entropy")))
    tokens = args.adapters * args.documents * args.length

    def together() -> None:
        trainer.forward_backward(calls)
        for call in calls:
            trainer.optim_step(str(call.adapter), OPTIM)

    def alone() -> None:
        for call in calls:
            trainer.forward_backward([call])
            trainer.optim_step(str(call.adapter), OPTIM)

    ways: dict[str, Callable[[], None]] = {"together": together, "alone": alone}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(args.rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            synchronize(device)
            # The first round warms up.
            seconds[name] += [time.perf_counter() - start] if round_number else []
    speeds = {name: round(tokens / statistics.median(values)) for name, values in seconds.items()}
    report = {
        "case": f"{args.adapters} adapters of rank {args.rank}, engine.invariant={str(invariant).lower()}",
        "parameters": parameters,
        **{f"tokens per second, {name}": speed for name, speed in speeds.items()},
        "ratio": round(statistics.median(a / b for a, b in zip(seconds["alone"], seconds["together"], strict=True)), 2),
        "rows_of_a_pass": engine.invariant_size,
    }
    print(json.dumps(report), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
