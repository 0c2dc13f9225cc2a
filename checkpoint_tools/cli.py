"""`drivetrain merge | inspect | verify | import`. Imports no torch."""

import argparse
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..engine.checkpoint.hf_folder import SHARD_BYTES
from ..engine.errors import DrivetrainError
from .plan import DTYPES
from .streaming import Progress

SHOWN = 10


def main(command: str, words: Sequence[str]) -> int:
    """Run one of the commands; its exit code: 0, 1 for an error, 3 for two checkpoints that differ."""
    if threading.current_thread() is threading.main_thread():
        # Whoever reads may stop reading, as `head` does.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    arguments = _parser(command).parse_args(list(words))
    try:
        return int({"merge": _merge, "inspect": _inspect, "verify": _verify, "import": _import}[command](arguments))
    except DrivetrainError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130


def _parser(command: str) -> argparse.ArgumentParser:
    what = {
        "merge": "Write a checkpoint of either engine, in any layout, as a Hugging Face folder.",
        "inspect": "Say what a checkpoint is, without reading its tensors.",
        "verify": "Read all of a checkpoint and compare it with its checksums; or compare two, tensor by tensor.",
        "import": "Take over a sharded checkpoint of another program: an FSDP run's DCP folder, verl's shards, megatron's torch_dist.",
    }
    parser = argparse.ArgumentParser(prog=f"drivetrain {command}", description=what[command])
    place = "checkpoint, run, or folder of checkpoints; also as a URL"
    if command == "merge":
        parser.add_argument("checkpoint", help=f"{place}: the last complete one is taken")
        parser.add_argument("output", help="folder to write")
        parser.add_argument(
            "--adapters",
            choices=("merged", "only"),
            default="merged",
            help="of LoRA: merged into the base (default), or alone",
        )
        parser.add_argument("--base", help="base model of the adapters; default: the one that the run names")
        parser.add_argument("--dtype", choices=tuple(DTYPES), help="number format; default: as trained")
        parser.add_argument("--shard-size", type=_size, default=SHARD_BYTES, help="largest file, as in 5GB or 500MiB")
        parser.add_argument("--no-verify", action="store_true", help="do not compare what is read with its checksums")
        parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    elif command == "import":
        parser.add_argument("source", help="folder of the foreign checkpoint")
        parser.add_argument("output", help="Hugging Face folder to write; with --to checkpoint, the folder of checkpoints")
        parser.add_argument("--model", help="folder or Hub name with its config and tokenizer; default: one inside the source")
        parser.add_argument(
            "--kind", choices=("auto", "dcp", "verl", "torch_dist"), default="auto", help="default: by the files"
        )
        parser.add_argument(
            "--to",
            choices=("hf", "checkpoint"),
            default="hf",
            help="a Hugging Face folder (default), or a checkpoint to resume",
        )
        parser.add_argument("--dtype", choices=tuple(DTYPES), help="number format; default: as stored")
        parser.add_argument("--step", type=int, help="number of the checkpoint; default: the optimizer steps it has stored")
        parser.add_argument("--shard-size", type=_size, default=SHARD_BYTES, help="largest file, as in 5GB or 500MiB")
        parser.add_argument(
            "--trust-pickle", action="store_true", help="read pickles that could run code: for sources that you trust"
        )
        parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    elif command == "inspect":
        parser.add_argument("checkpoint", help=f"{place}, or Hugging Face folder")
        parser.add_argument("--json", action="store_true", help="as JSON")
    else:
        parser.add_argument("first", help=f"{place}, or Hugging Face folder")
        parser.add_argument("second", nargs="?", help="to compare it with")
        parser.add_argument("--all", action="store_true", help=f"list every difference, not {SHOWN} of them")
    if command != "inspect":
        parser.add_argument("--workers", type=_count, help="threads; default: one for each core, 8 at most")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"([\d.]+)\s*([KMGT])(i?)B?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give one as in 5GB or 500MiB")
    return max(1, int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2].upper()) + 1)))


def _merge(a: argparse.Namespace) -> int:
    from .merging import plan_merge
    from .plan import apply

    plan = plan_merge(
        a.checkpoint,
        a.output,
        adapters=a.adapters,
        base=a.base,
        dtype=a.dtype,
        shard_bytes=a.shard_size,
        verify=not a.no_verify,
    )
    print("\n".join(plan.lines()))
    if a.dry_run:
        print("nothing was written (--dry-run)")
        return 0
    began = time.perf_counter()
    with _bar("merging", plan.folder.total_bytes) as progress:
        apply(plan, a.workers, progress)
    seconds = time.perf_counter() - began
    print(f"done in {seconds:.1f} s, {plan.folder.total_bytes / 1e9 / seconds:.2f} GB/s")
    return 0


def _import(a: argparse.Namespace) -> int:
    from .importing import import_checkpoint, plan_import, read_foreign

    if a.dry_run:
        found = read_foreign(a.source, model=a.model, kind=a.kind, trust_pickle=a.trust_pickle)
        print("\n".join(found.lines()))
        if a.to == "hf":
            print("\n".join(plan_import(found.kinds["value"], a.output, dtype=a.dtype, shard_bytes=a.shard_size).lines()))
        print("nothing was written (--dry-run)")
        return 0
    began = time.perf_counter()
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
    print(f"{written}: done in {time.perf_counter() - began:.1f} s")
    return 0


def _inspect(a: argparse.Namespace) -> int:
    from .inspection import inspect

    found = inspect(a.checkpoint)
    print(json.dumps(found.to_json(), indent=2) if a.json else "\n".join(found.lines()))
    return 0


def _verify(a: argparse.Namespace) -> int:
    from .comparison import compare, verify
    from .inspection import inspect

    total = inspect(a.first).bytes
    if a.second is None:
        with _bar("reading", total) as progress:
            found = verify(a.first, workers=a.workers, progress=progress)
        checked = "all checksums match" if found.bytes else "there are no checksums to compare with"
        print(f"{found.where}: {found.tensors} tensors are whole, {checked}")
        return 0
    with _bar("comparing", total) as progress:
        result = compare(a.first, a.second, workers=a.workers, progress=progress)
    if result.same:
        print(f"equal: {len(result.equal)} tensors, byte for byte")
        return 0
    lone = [(a.first, result.only_first), (a.second, result.only_second)]
    print(
        f"different: {len(result.equal)} tensors equal, {len(result.different)} different, at most {result.largest:.3g} apart"
        + "".join(f", {len(names)} only in {where}" for where, names in lone if names)
    )
    lines = [f"only in {where}: {name}" for where, names in lone for name in names]
    lines += [f"differs: {name}: {what}" for name, what in result.different.items()]
    shown = lines if a.all else lines[:SHOWN]
    print("\n".join(f"  {line}" for line in shown))
    if len(shown) < len(lines):
        print(f"  and {len(lines) - len(shown)} more (--all)")
    return 3


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Progress | None]:
    """A progress bar where somebody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns: list[Any] = [TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task, lock = bar.add_task(what, total=total), threading.Lock()

        def advance(count: int) -> None:
            with lock:
                bar.advance(task, count)

        yield advance
