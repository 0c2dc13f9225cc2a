"""`drivetrain parity`: compare the same SFT steps on every engine and layout with plain Hugging Face, as a table.

Each row trains the first steps of an SFT run on the same global batches. A row passes if its loss and gradient norm agree with
a plain transformers loop, which processes one document at a time, within the bounds of the dtype.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast, get_args

from ... import __version__
from ...engine.config import ParallelConfig, SharePrefixes
from ...engine.errors import ConfigError, DrivetrainError
from ...engine.registry import backends, spec_of
from ..loop.formats import counted

LOSS_BOUND, NORM_BOUND, WEIGHT_BOUND = 1e-6, 1e-5, 1e-5
"""Bounds in float32: relative differences of loss and norm, and the largest absolute difference of a parameter at lr 1e-4."""
ROUNDING = 3.0
"""In bfloat16, a row may differ from the reference by this many times the effect of bfloat16 on the reference itself."""

FSDP = ("", "dp_shard=2", "cp=2", "cp=4", "dp_replicate=2,dp_shard=2", "dp_shard=2,cp=2")
MCORE = (
    "",
    "dp_shard=2",
    "tp=2",
    "tp=2,tp_sequence=true",
    "pp=2",
    "pp=4",
    "pp=2,vpp=2",
    "cp=2",
    "tp=2,dp_shard=2",
    "tp=2,pp=2",
    "tp=2,tp_sequence=true,cp=2",
)
FSDP_MOE = ("", "dp_shard=2,ep=2")
MCORE_MOE = ("ep=2,dp_shard=2", "ep=2,dp_shard=2,pp=2", "tp=2,tp_sequence=true,ep=2")
UNSHARED = ("fsdp:share=off", "mcore:share=off")
SHORT = ("fsdp", "fsdp:dp_shard=2", "mcore", "mcore:tp=2", "mcore:pp=2")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    Args:
        backend: The value of `engine.backend`.
        axes: The axes of the layout whose size is not 1.
        model: The family of a tiny model, or a folder.
        share: The value of `engine.share_prefixes`.
    """

    backend: str
    axes: dict[str, Any] = field(default_factory=dict)
    model: str
    share: SharePrefixes = "auto"

    @property
    def parallel(self) -> ParallelConfig:
        """The layout as a `ParallelConfig`."""
        return ParallelConfig(**{"dp_shard": 1, **self.axes})

    @property
    def nproc(self) -> int:
        """The number of processes that the row needs."""
        p = self.parallel
        return p.dp_replicate * (p.dp_shard or 1) * p.cp * p.tp * p.pp

    @property
    def layout(self) -> str:
        """The layout in the form in which it is printed."""
        short = {"dp_shard": "dp", "dp_replicate": "replicate"}
        parts = [
            "ts" if axis == "tp_sequence" else f"{short.get(axis, axis)}{size}"
            for axis, size in self.axes.items()
            if size is True or size > 1
        ]
        return " ".join([*(parts or ["1"]), *([f"share={self.share}"] if self.share != "auto" else [])])


def parse_row(word: str, model: str) -> Row:
    """Parse a row such as `mcore:tp=2,pp=2`; `share=off` sets `engine.share_prefixes`.

    Raises:
        ConfigError: An engine or axis is unknown, or an axis has no valid size.
    """
    backend, _, suffix = word.partition(":")
    spec_of(backend)
    axes: dict[str, Any] = {}
    share: SharePrefixes | None = None
    for part in filter(None, suffix.split(",")):
        axis, _, value = part.partition("=")
        axes_fields = ParallelConfig.__dataclass_fields__
        if axis in axes or (axis == "share" and share is not None):
            raise ConfigError(f"--rows {word}: {axis} is given twice; remove one of the two")
        if axis == "share":
            if value not in get_args(SharePrefixes):
                raise ConfigError(f"--rows {word}: share={value}; it must be one of {', '.join(get_args(SharePrefixes))}")
            share = cast("SharePrefixes", value)
            continue
        if axis not in axes_fields:
            raise ConfigError(f"--rows {word}: {axis!r} is not an axis; the axes are {', '.join(axes_fields)}, and share")
        if axis == "tp_sequence" and value in ("true", "false"):
            axes[axis] = value == "true"
        elif axis != "tp_sequence" and value.isdigit() and int(value) > 0:
            axes[axis] = int(value)
        else:
            raise ConfigError(f"--rows {word}: {part!r} has no valid size; write it as in mcore:tp=2,tp_sequence=true,pp=2")
    return Row(backend=backend, axes=axes, model=model, share=share or "auto")


SETS: dict[str, tuple[str, ...]] = {
    "short": SHORT,
    "fsdp-all": (*(f"fsdp:{axes}" for axes in FSDP), UNSHARED[0]),
    "mcore-all": (*(f"mcore:{axes}" for axes in MCORE), UNSHARED[1]),
    "moe": (*(f"fsdp:{axes}" for axes in FSDP_MOE), *(f"mcore:{axes}" for axes in MCORE_MOE)),
}


def default_rows(models: Sequence[str] | None, words: Sequence[str]) -> list[Row]:
    """List the rows that a command line asks for, by name or by set, for each model.

    Raises:
        ConfigError: A set, engine or axis is unknown.
    """
    rows: list[Row] = []
    for word in words:
        if word.partition(":")[0] not in {*SETS, "all", *backends()}:
            raise ConfigError(
                f"--rows {word}: choose one of the sets all, {', '.join(SETS)}, or a layout of {', '.join(backends())}, as in "
                "fsdp:cp=2"
            )
        # Rows with expert parallelism need a mixture of experts, which by default is a different tiny model.
        dense = [*SETS["fsdp-all"], *SETS["mcore-all"]] if word == "all" else list(SETS.get(word, (word,)))
        mixed = list(SETS["moe"]) if word == "all" else []
        for row in [*dense, *mixed]:
            moe = row in mixed or word == "moe" or "ep=" in row
            # A model that the user names need not be a mixture of experts, so `all` leaves these rows out.
            if models is not None and row in mixed:
                continue
            rows += [parse_row(row, model) for model in models or ["qwen3_moe" if moe else "qwen3"]]
    return _by_model(rows)


def _by_model(rows: Sequence[Row]) -> list[Row]:
    """Remove duplicate rows, and group the rows by model."""
    once = {json.dumps(asdict(row)): row for row in rows}
    models = list(dict.fromkeys(row.model for row in rows))
    return sorted(once.values(), key=lambda row: models.index(row.model))


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job description that the workers of a command share as JSON.

    Args:
        folder: The folder of models, references and results.
        data: A file of samples; None for the built-in samples.
        rows: The rows of the table.
        steps: The number of optimizer steps in each row.
        dtype: Either float32 or bfloat16.
        batch_size: The number of samples per step.
        max_tokens: The maximum number of tokens in a micro-batch.
    """

    folder: str
    data: str | None
    rows: list[Row]
    steps: int
    dtype: str
    batch_size: int
    max_tokens: int

    def write(self) -> Path:
        """Write the job to `job.json` and return its path."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    def result(self, i: int) -> Path:
        """Return the path of the result of a row."""
        return Path(self.folder) / f"row-{i}.json"

    @classmethod
    def read(cls, path: Path | str) -> "Job":
        """Read the job from `job.json`."""
        fields = json.loads(Path(path).read_text())
        return cls(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})


def relative(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference between two sequences; infinity for a value beside an expected 0."""
    return max((0.0 if a == b else abs(a - b) / abs(b) if b else math.inf) for a, b in zip(values, expected, strict=True))


def compare_with_reference(row: Row, result: dict[str, Any] | None, reference: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Compare the result of a row with its reference and return the row of the table, with its verdict.

    Args:
        row: The row.
        result: The output of its workers, with `steps`, `weights_off` and `shared`, or with `error`; or `not_run`, the reason why there
            were none; None if they ended without a result.
        reference: The reference of its model, with `steps` and, for bfloat16, `rounding`.
        dtype: Either float32 or bfloat16.
    """
    verdict: dict[str, Any] = {
        "model": row.model,
        "backend": row.backend,
        "layout": row.layout,
        "nproc": row.nproc,
        "steps": [],
        "loss_rel": None,
        "grad_norm_rel": None,
        "weights_off": None,
        "shared": None,
        "ok": False,
    }
    if result is None:
        return verdict | {"error": "its processes ended without a result"}
    if "not_run" in result:
        return verdict | {"not_run": result["not_run"], "ok": None}
    if "error" in result:
        return verdict | {"error": result["error"]}
    steps, expected = result["steps"], reference["steps"]
    differences = {k: relative([s[k] for s in steps], [s[k] for s in expected]) for k in ("loss", "grad_norm")}
    bounds: dict[str, Any] = {"loss": LOSS_BOUND, "grad_norm": NORM_BOUND, "weights": WEIGHT_BOUND}
    if dtype == "bfloat16":
        # Adam divides by the size of a gradient, so rounding of tiny gradients moves weights by up to
        # the learning rate: in bfloat16 they have no bound.
        bounds = {**{k: ROUNDING * reference["rounding"][k] for k in differences}, "weights": None}
    weights_ok = bounds["weights"] is None or result["weights_off"] <= bounds["weights"]
    return verdict | {
        "steps": steps,
        "loss_rel": differences["loss"],
        "grad_norm_rel": differences["grad_norm"],
        "weights_off": result["weights_off"],
        "shared": result["shared"],
        "ok": weights_ok
        # Such a row is there to test the path without shared prefixes.
        and not (row.share == "off" and result["shared"])
        and all(differences[k] <= bounds[k] for k in differences),
        "bounds": bounds,
    }


def table(judged: Sequence[dict[str, Any]], references: dict[str, dict[str, Any]]) -> list[str]:
    """Format the table for printing: the reference of each model, followed by its rows."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in judged):
        rows = [row for row in judged if row["model"] == model]
        reference = references.get(model, {}).get("steps", [])
        numbers = "  ".join(f"{s['loss']:.6f}/{s['grad_norm']:.4f}" for s in reference)
        lines += [f"{model}, plain Hugging Face: loss/gradient norm  {numbers}"] if reference else [f"{model}"]
        lines += [f"  {'engine':6} {'layout':16} {'processes':>9} {'shared':>6}  {'loss':>8} {'grad norm':>9} {'weights':>8}"]
        seen_reasons: set[str] = set()
        for row in rows:
            head = f"  {row['backend']:6} {row['layout']:16} {row['nproc']:9}  "
            reason = row.get("error", row.get("not_run"))
            if reason is not None:
                lines.append(
                    f"{head}{'FAIL ' if 'error' in row else 'not run:'} {'as above' if reason in seen_reasons else reason}"
                )
                seen_reasons.add(reason)
                continue
            lines.append(
                f"{head[:-1]}{row['shared']:6.0%}  {row['loss_rel']:8.1e} {row['grad_norm_rel']:9.1e} {row['weights_off']:8.1e}  "
                f"{'ok' if row['ok'] else 'FAIL'}"
            )
            if not row["ok"]:
                lines.append(" " * 10 + "  ".join(f"{s['loss']:.6f}/{s['grad_norm']:.4f}" for s in row["steps"]))
        bounds = next((row["bounds"] for row in rows if "bounds" in row), None)
        if bounds is not None:
            weights = f"{WEIGHT_BOUND:8.1e}" if bounds["weights"] is not None else f"{'-':>8}"
            lines.append(f"  {'allowed':40}   {bounds['loss']:8.1e} {bounds['grad_norm']:9.1e} {weights}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 if every row that can be run is within its bounds, and there is one."""
    parser = argparse.ArgumentParser(prog="drivetrain parity", description=(__doc__ or "").strip())
    parser.add_argument("--model", nargs="+", help="folders in Hugging Face format, or families of the built-in tiny models")
    parser.add_argument("--data", help="file of samples in a format that data.train accepts; default: built-in samples")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=["all"],
        help="sets (all, short, fsdp-all, mcore-all, moe) or layouts (fsdp:cp=2 mcore:tp=2,tp_sequence=true); default: all",
    )
    parser.add_argument("--steps", type=int, default=5, help="number of optimizer steps in each row; default: 5")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the matrix products; default: float32"
    )
    parser.add_argument("--batch-size", type=int, default=12, help="number of samples per step; default: 12")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=None,
        help="maximum number of tokens in a micro-batch; default: 192, or 4096 with --data",
    )
    parser.add_argument("--json", help="also write the table to this file")
    parser.add_argument(
        "--timeout",
        type=int,
        default=1800,
        help="time limit in seconds for all rows with the same number of processes; default: 1800",
    )
    args = parser.parse_args(argv)
    try:
        for name in ("steps", "batch_size", "max_tokens", "timeout"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}={value}; it must be at least 1")
        if args.data is not None and not Path(args.data).exists():
            raise ConfigError(f"--data {args.data} does not exist; use a file of samples in a format that data.train accepts")
        if args.json is not None and not Path(args.json).absolute().parent.is_dir():
            raise ConfigError(f"--json {args.json}: the folder does not exist; create it first")
        rows = default_rows(args.model, args.rows)
    except DrivetrainError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tokens = args.max_tokens or (4096 if args.data else 192)
        job = Job(
            folder=folder,
            data=args.data,
            rows=rows,
            steps=args.steps,
            dtype=args.dtype,
            batch_size=args.batch_size,
            max_tokens=tokens,
        )
        return run(job, args.json, args.timeout)


def run(job: Job, json_file: str | None, timeout: int) -> int:
    """Start the workers, judge their results and print the table."""
    folder, path = Path(job.folder), job.write()
    module = ("-m", "drivetrain.trainers.parity.rows", str(path))
    print("computing the reference with plain transformers", file=sys.stderr, flush=True)
    # References come first: rows compare their weights with the files that this process writes.
    code = subprocess.run([sys.executable, *module, "reference"], check=False).returncode
    if code:
        return code
    for nproc in sorted({row.nproc for row in job.rows}):
        count = sum(row.nproc == nproc for row in job.rows)
        print(f"running {counted(count, 'row')} with {counted(nproc, 'process')} each", file=sys.stderr, flush=True)
        # Results that were written before the limit still count; rows without one fail below.
        if not _run_rows(job, module, nproc, timeout):
            print(f"error: the rows with {counted(nproc, 'process')} took more than {timeout} s (--timeout)", file=sys.stderr)
    references = json.loads((folder / "references.json").read_text())
    judged = []
    for i, row in enumerate(job.rows):
        result = json.loads(job.result(i).read_text()) if job.result(i).is_file() else None
        judged.append(compare_with_reference(row, result, references.get(row.model, {}), job.dtype))
    print("\n".join([describe(job), *table(judged, references)]))
    verdicts = [row["ok"] for row in judged]
    agreeing, failed, not_run = (verdicts.count(verdict) for verdict in (True, False, None))
    others = f", {not_run} {'was' if not_run == 1 else 'were'} not run" if not_run else ""
    print(
        f"{counted(agreeing, 'row')} {'agrees' if agreeing == 1 else 'agree'}, {failed} {'does' if failed == 1 else 'do'} not{others}, "
        f"over {counted(job.steps, 'step')} in {job.dtype}"
    )
    if json_file:
        Path(json_file).write_text("[\n" + ",\n".join(json.dumps(row) for row in judged) + "\n]\n")
    # A run in which nothing could be compared has shown nothing, so it does not pass.
    return 1 if failed or not agreeing else 0


def _run_rows(job: Job, module: Sequence[str], nproc: int, timeout: int) -> bool:
    """Run the rows with `nproc` processes; return False if they exceed the timeout.

    Processes are started until every such row has a result, or until a start produces no new result.
    """

    def missing() -> int:
        return sum(row.nproc == nproc and not job.result(i).is_file() for i, row in enumerate(job.rows))

    deadline, missing_before = time.monotonic() + timeout, missing() + 1
    # Rows with the same number of processes run in the same ones, because starting processes takes seconds.
    launcher = ("-m", "drivetrain.launch", "--nproc-per-node", str(nproc)) if nproc > 1 else ()
    # Use one thread per process if there are several, as torchrun does; setting it here avoids the warning from torchrun.
    environment = {**({"OMP_NUM_THREADS": "1"} if nproc > 1 else {}), **os.environ}
    while 0 < missing() < missing_before:
        missing_before = missing()
        # The launcher gets its own session, so that the processes it starts can be killed with it.
        launched = subprocess.Popen([sys.executable, *launcher, *module, str(nproc)], env=environment, start_new_session=True)
        try:
            launched.wait(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException as e:
            # Also on an interrupt: a worker that waits in a collective for a dead peer would not end by itself.
            os.killpg(launched.pid, signal.SIGKILL)
            launched.wait()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            return False
    return True


def describe(job: Job) -> str:
    """Describe the versions and settings behind the table."""
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "megatron-core") if _has(name)]
    return f"drivetrain {__version__}, {', '.join(packages)}; {job.dtype}, {job.batch_size} samples per step, lr 1e-4"


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
