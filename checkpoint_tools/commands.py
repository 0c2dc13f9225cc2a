"""The commands `drivetrain merge | inspect | verify | import`."""

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..engine.checkpoint.hf_folder import SHARD_BYTES
from ..engine.errors import CheckpointError, DrivetrainError, NoCheckpointError
from .plan import DTYPES
from .streaming import ProgressCallback

SHOWN = 10


def main(command: str, words: Sequence[str]) -> int:
    """Run one of the commands; return 0 for success, 1 for an error, 2 for missing arguments, 3 for two checkpoints that differ."""
    arguments = _parser(command).parse_args(list(words))
    try:
        return int({"merge": _merge, "inspect": _inspect, "verify": _verify, "import": _import}[command](arguments))
    except DrivetrainError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no partial output was left behind", file=sys.stderr)
        return 130


def _parser(command: str) -> argparse.ArgumentParser:
    descriptions = {
        "merge": "Convert a checkpoint from any engine and layout into a Hugging Face folder.",
        "inspect": "Describe a checkpoint without reading its tensors.",
        "verify": "Read an entire checkpoint and check it against its checksums, or compare two checkpoints tensor by tensor.",
        "import": "Import a sharded checkpoint from another program: PyTorch DCP (FSDP), verl shards or Megatron torch_dist.",
    }
    parser = argparse.ArgumentParser(prog=f"drivetrain {command}", description=descriptions[command])
    location = "checkpoint, run, or folder of checkpoints, as a path or a URL"
    if command == "merge":
        # Both are needed; `_merge` names the missing one, and what a call looks like.
        parser.add_argument("checkpoint", nargs="?", help=f"{location}; the last complete checkpoint is used")
        parser.add_argument("output", nargs="?", help="folder to write")
        parser.add_argument(
            "--adapters",
            metavar="{merged,only}",
            default="merged",
            help="LoRA adapters: merged into the base model (default), or written separately",
        )
        parser.add_argument("--base", help="base model of the adapters; default: the one recorded by the run")
        parser.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of the output; default: as trained")
        parser.add_argument(
            "--shard-size", type=_size, default=SHARD_BYTES, help="maximum size of a weight file, such as 5GB or 500MiB"
        )
        parser.add_argument(
            "--no-verify", action="store_true", help="do not check the data that is read against its checksums"
        )
        parser.add_argument("--dry-run", action="store_true", help="print what would be written, without writing anything")
    elif command == "import":
        parser.add_argument("source", help="folder of the checkpoint to import")
        parser.add_argument(
            "output", help="Hugging Face folder to write; with --to checkpoint, the folder of checkpoints to add to"
        )
        parser.add_argument(
            "--model", help="folder or Hub name of the model, for its config and tokenizer; default: the one inside the source"
        )
        parser.add_argument(
            "--kind",
            choices=("auto", "dcp", "verl", "torch_dist"),
            default="auto",
            help="format of the source; default: detected from its files",
        )
        parser.add_argument(
            "--to",
            choices=("hf", "checkpoint"),
            default="hf",
            help="write a Hugging Face folder (default), or a checkpoint to resume from",
        )
        parser.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of the output; default: as stored")
        parser.add_argument(
            "--step",
            type=int,
            help="step number of the checkpoint; default: the number of optimizer steps stored in the source",
        )
        parser.add_argument(
            "--shard-size", type=_size, default=SHARD_BYTES, help="maximum size of a weight file, such as 5GB or 500MiB"
        )
        parser.add_argument(
            "--trust-pickle", action="store_true", help="read pickles that could run code; only for sources that you trust"
        )
        parser.add_argument("--dry-run", action="store_true", help="print what would be written, without writing anything")
    elif command == "inspect":
        parser.add_argument("checkpoint", help=f"{location}; or a Hugging Face folder")
        parser.add_argument("--json", action="store_true", help="print JSON")
    else:
        parser.add_argument("first", help=f"{location}; or a Hugging Face folder")
        parser.add_argument("second", nargs="?", help="checkpoint or Hugging Face folder to compare it with")
        parser.add_argument("--all", action="store_true", help=f"list every difference, not just the first {SHOWN}")
    if command != "inspect":
        parser.add_argument("--workers", type=_count, help="number of threads; default: one per core, at most 8")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMGT])(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 5GB or 500MiB")
    # GB is a power of 1000, and GiB one of 1024.
    return max(1, int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1)))


def _merge(a: argparse.Namespace) -> int:
    from .merging import plan_merge
    from .plan import apply

    if a.output is None:
        words, example = ("", _merge_call()) if a.checkpoint is None else (f" {a.checkpoint}", _merge_call(a.checkpoint))
        lacking = "a CHECKPOINT to read and an OUTPUT" if a.checkpoint is None else "an OUTPUT"
        print(f"error: drivetrain merge{words} needs {lacking}, the folder to write; for example: {example}", file=sys.stderr)
        return 2
    try:
        plan = plan_merge(
            a.checkpoint,
            a.output,
            adapters=a.adapters,
            base=a.base,
            dtype=a.dtype,
            shard_bytes=a.shard_size,
            verify=not a.no_verify,
        )
    except NoCheckpointError as e:
        raise CheckpointError(f"CHECKPOINT={a.checkpoint}: {e}; for example: {_merge_call(output=a.output)}") from e
    print("\n".join(plan.lines()))
    if a.dry_run:
        print("nothing was written (--dry-run)")
        return 0
    start = time.perf_counter()
    with _bar("merging", plan.folder.total_bytes) as progress:
        apply(plan, a.workers, progress)
    seconds = time.perf_counter() - start
    print(f"done in {seconds:.1f} s, {plan.folder.total_bytes / 1e9 / seconds:.2f} GB/s")
    return 0


def _merge_call(checkpoint: str = "runs/sft", output: str = "") -> str:
    return f"drivetrain merge {checkpoint} {output or (Path(checkpoint).name or 'model') + '-hf'}"


def _import(a: argparse.Namespace) -> int:
    from .importing import import_checkpoint, plan_import, read_foreign

    if a.dry_run:
        foreign = read_foreign(a.source, model=a.model, kind=a.kind, trust_pickle=a.trust_pickle)
        print("\n".join(foreign.lines()))
        if a.to == "hf":
            print("\n".join(plan_import(foreign.kinds["value"], a.output, dtype=a.dtype, shard_bytes=a.shard_size).lines()))
        print("nothing was written (--dry-run)")
        return 0
    start = time.perf_counter()
    with _bar("importing", None) as progress:
        written = import_checkpoint(
            a.source,
            a.output,
            model=a.model,
            kind=a.kind,
            to=a.to,
            dtype=a.dtype,
            step=a.step,
            shard_bytes=a.shard_size,
            trust_pickle=a.trust_pickle,
            workers=a.workers,
            progress=progress,
        )
    print(f"{written}: done in {time.perf_counter() - start:.1f} s")
    return 0


def _inspect(a: argparse.Namespace) -> int:
    from .inspection import inspect

    inspection = inspect(a.checkpoint)
    print(json.dumps(inspection.to_json(), indent=2) if a.json else "\n".join(inspection.lines()))
    return 0


def _verify(a: argparse.Namespace) -> int:
    from .comparison import compare, verify
    from .inspection import inspect

    total = inspect(a.first).bytes
    if a.second is None:
        with _bar("reading", total) as progress:
            verified = verify(a.first, workers=a.workers, progress=progress)
        checked = "all checksums match" if verified.bytes else "there are no checksums to compare with"
        print(f"{verified.where}: {verified.tensors} tensors are complete, {checked}")
        return 0
    with _bar("comparing", total) as progress:
        result = compare(a.first, a.second, workers=a.workers, progress=progress)
    if result.same:
        print(f"equal: {len(result.equal)} tensors, byte for byte")
        return 0
    exclusive = [(a.first, result.only_first), (a.second, result.only_second)]
    print(
        f"different: {len(result.equal)} tensors equal, {len(result.different)} different, largest difference "
        f"{result.largest:.3g}" + "".join(f", {len(names)} only in {where}" for where, names in exclusive if names)
    )
    lines = [f"only in {where}: {name}" for where, names in exclusive for name in names]
    lines += [f"differs: {name}: {difference}" for name, difference in result.different.items()]
    shown_lines = lines if a.all else lines[:SHOWN]
    print("\n".join(f"  {line}" for line in shown_lines))
    if len(shown_lines) < len(lines):
        print(f"  and {len(lines) - len(shown_lines)} more (list them with --all)")
    # Not 1, so that scripts can distinguish checkpoints that differ from an error.
    return 3


@contextmanager
def _bar(label: str, total: int | None) -> Iterator[ProgressCallback | None]:
    """Show a progress bar if standard error is a terminal; yield the function that advances it, or None."""
    # On standard error, so that the output can be redirected.
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns: list[Any] = [TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task, lock = bar.add_task(label, total=total), threading.Lock()

        def advance(count: int) -> None:
            # Blocks are written by several threads.
            with lock:
                bar.advance(task, count)

        yield advance
