"""`drivetrain parity`: the same SFT steps on every engine and layout, beside plain Hugging Face, as a table.

Each row trains the first steps of an SFT run on the same global batches. A row passes when loss and gradient norm agree
with a plain transformers loop, one document at a time, within the bounds of the number format.
"""

import argparse
import json
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
from typing import Any

from ... import __version__
from ...engine.config import ParallelConfig
from ...engine.errors import ConfigError, DrivetrainError
from ...engine.registry import backends, spec_of

LOSS_BOUND, NORM_BOUND, WEIGHT_BOUND = 1e-6, 1e-5, 1e-5
"""In float32: relative, relative, and largest absolute difference of a parameter after the steps at lr 1e-4."""
ROUNDING = 3.0
"""In bfloat16 a row may be off by this many times what bfloat16 alone does to the reference."""

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
SHORT = ("fsdp", "fsdp:dp_shard=2", "mcore", "mcore:tp=2", "mcore:pp=2")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        backend: `engine.backend`.
        axes: of the layout, those that are not 1.
        model: a tiny model's family, or a folder.
    """

    backend: str
    axes: dict[str, Any] = field(default_factory=dict)
    model: str

    @property
    def parallel(self) -> ParallelConfig:
        """The layout."""
        return ParallelConfig(**{"dp_shard": 1, **self.axes})

    @property
    def nproc(self) -> int:
        """Processes it needs."""
        p = self.parallel
        return p.dp_replicate * (p.dp_shard or 1) * p.cp * p.tp * p.pp

    @property
    def layout(self) -> str:
        """As it is printed."""
        short = {"dp_shard": "dp", "dp_replicate": "replicate"}
        words = [
            "ts" if axis == "tp_sequence" else f"{short.get(axis, axis)}{size}"
            for axis, size in self.axes.items()
            if size is True or size > 1
        ]
        return " ".join(words) or "1"


def parse_row(word: str, model: str) -> Row:
    """`mcore:tp=2,pp=2` as a row.

    Raises:
        ConfigError: an unknown engine or axis, or no size.
    """
    backend, _, rest = word.partition(":")
    spec_of(backend)
    axes: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        axis, _, value = part.partition("=")
        known = ParallelConfig.__dataclass_fields__
        if axis in axes:
            raise ConfigError(f"--rows {word}: {axis} stands there twice")
        if axis not in known:
            raise ConfigError(f"--rows {word}: {axis!r} is no axis; there are {', '.join(known)}")
        if axis == "tp_sequence" and value in ("true", "false"):
            axes[axis] = value == "true"
        elif axis != "tp_sequence" and value.isdigit() and int(value) > 0:
            axes[axis] = int(value)
        else:
            raise ConfigError(f"--rows {word}: {part!r} has no size; write it as in mcore:tp=2,tp_sequence=true,pp=2")
    return Row(backend=backend, axes=axes, model=model)


SETS: dict[str, tuple[str, ...]] = {
    "short": SHORT,
    "fsdp-all": tuple(f"fsdp:{axes}" for axes in FSDP),
    "mcore-all": tuple(f"mcore:{axes}" for axes in MCORE),
    "moe": (*(f"fsdp:{axes}" for axes in FSDP_MOE), *(f"mcore:{axes}" for axes in MCORE_MOE)),
}


def default_rows(models: Sequence[str] | None, words: Sequence[str]) -> list[Row]:
    """The rows of a command line: those named, or sets of them, for each model.

    Raises:
        ConfigError: an unknown set, engine or axis.
    """
    found: list[Row] = []
    for word in words:
        if word.partition(":")[0] not in {*SETS, "all", *backends()}:
            raise ConfigError(
                f"--rows {word}: there are the sets all, {', '.join(SETS)} and layouts of {', '.join(backends())}, as in fsdp:cp=2"
            )
        # Rows with experts need a mixture: by default that is another tiny model.
        dense = [*SETS["fsdp-all"], *SETS["mcore-all"]] if word == "all" else list(SETS.get(word, (word,)))
        mixed = list(SETS["moe"]) if word == "all" else []
        for row in [*dense, *mixed]:
            moe = row in mixed or word == "moe" or "ep=" in row
            if models is not None and row in mixed:
                continue
            found += [parse_row(row, model) for model in models or ["qwen3_moe" if moe else "qwen3"]]
    return _by_model(found)


def _by_model(rows: Sequence[Row]) -> list[Row]:
    """Each row once, those of one model together."""
    once = {json.dumps(asdict(row)): row for row in rows}
    models = list(dict.fromkeys(row.model for row in rows))
    return sorted(once.values(), key=lambda row: models.index(row.model))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the workers of a command share, as JSON.

    Args:
        folder: of models, references and results.
        data: a file of samples; None for embedded ones.
        rows: of the table.
        steps: of each row.
        dtype: float32 or bfloat16.
        batch_size: samples of a step.
        max_tokens: of a micro-batch.
    """

    folder: str
    data: str | None
    rows: list[Row]
    steps: int
    dtype: str
    batch_size: int
    max_tokens: int

    def write(self) -> Path:
        """To `job.json`."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    def result(self, i: int) -> Path:
        """Where the result of a row is left."""
        return Path(self.folder) / f"row-{i}.json"

    @classmethod
    def read(cls, path: Path | str) -> "Job":
        """From `job.json`."""
        told = json.loads(Path(path).read_text())
        return cls(**{**told, "rows": [Row(**row) for row in told["rows"]]})


def relative(found: Sequence[float], want: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, want, strict=True))


def judge(row: Row, result: dict[str, Any] | None, reference: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A row of the table, with its verdict.

    Args:
        row: which one.
        result: what its workers wrote: `steps` and `weights_off`, or `error`; None where they ended without a word.
        reference: of its model: `steps`, and for bfloat16 `rounding`.
        dtype: number format.
    """
    told: dict[str, Any] = {
        "model": row.model,
        "backend": row.backend,
        "layout": row.layout,
        "nproc": row.nproc,
        "steps": [],
        "loss_rel": None,
        "grad_norm_rel": None,
        "weights_off": None,
        "ok": False,
    }
    if result is None:
        return told | {"error": "its processes ended without a result"}
    if "error" in result:
        return told | {"error": result["error"]}
    steps, want = result["steps"], reference["steps"]
    off = {k: relative([s[k] for s in steps], [s[k] for s in want]) for k in ("loss", "grad_norm")}
    bounds: dict[str, Any] = {"loss": LOSS_BOUND, "grad_norm": NORM_BOUND, "weights": WEIGHT_BOUND}
    if dtype == "bfloat16":
        bounds = {**{k: ROUNDING * reference["rounding"][k] for k in off}, "weights": None}
    fits = bounds["weights"] is None or result["weights_off"] <= bounds["weights"]
    return told | {
        "steps": steps,
        "loss_rel": off["loss"],
        "grad_norm_rel": off["grad_norm"],
        "weights_off": result["weights_off"],
        "ok": fits and all(off[k] <= bounds[k] for k in off),
        "bounds": bounds,
    }


def table(judged: Sequence[dict[str, Any]], references: dict[str, dict[str, Any]]) -> list[str]:
    """What is printed: the reference of each model, then its rows."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in judged):
        rows = [row for row in judged if row["model"] == model]
        want = references.get(model, {}).get("steps", [])
        shown = "  ".join(f"{s['loss']:.6f}/{s['grad_norm']:.4f}" for s in want)
        lines += [f"{model}, plain Hugging Face: loss/gradient norm  {shown}"] if want else [f"{model}"]
        lines += [f"  {'engine':6} {'layout':16} {'processes':>9}  {'loss':>8} {'grad norm':>9} {'weights':>8}"]
        said: set[str] = set()
        for row in rows:
            head = f"  {row['backend']:6} {row['layout']:16} {row['nproc']:9}  "
            if "error" in row:
                lines.append(f"{head}FAIL  {'as above' if row['error'] in said else row['error']}")
                said.add(row["error"])
                continue
            lines.append(
                f"{head}{row['loss_rel']:8.1e} {row['grad_norm_rel']:9.1e} {row['weights_off']:8.1e}  {'ok' if row['ok'] else 'FAIL'}"
            )
            if not row["ok"]:
                lines.append(" " * 10 + "  ".join(f"{s['loss']:.6f}/{s['grad_norm']:.4f}" for s in row["steps"]))
        bounds = next((row["bounds"] for row in rows if "bounds" in row), None)
        if bounds is not None:
            weights = f"{WEIGHT_BOUND:8.1e}" if bounds["weights"] is not None else f"{'-':>8}"
            lines.append(f"  {'allowed':33}   {bounds['loss']:8.1e} {bounds['grad_norm']:9.1e} {weights}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the table; 0 when every row is within its bounds."""
    parser = argparse.ArgumentParser(prog="drivetrain parity", description=(__doc__ or "").strip())
    parser.add_argument("--model", nargs="+", help="folders in Hugging Face format, or families of the embedded tiny models")
    parser.add_argument("--data", help="file of samples, as data.train takes; embedded ones by default")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=["all"],
        help="all, short, fsdp-all, mcore-all, moe, or layouts: fsdp:cp=2 mcore:tp=2,tp_sequence=true",
    )
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each row")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the matrix products")
    parser.add_argument("--batch-size", type=int, default=12, help="samples of a step")
    parser.add_argument("--max-tokens", type=int, default=None, help="tokens of a micro-batch")
    parser.add_argument("--json", help="also write the table to this file")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for the rows of one number of processes")
    args = parser.parse_args(argv)
    try:
        for name in ("steps", "batch_size", "max_tokens", "timeout"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')}={value}; it is at least 1")
        if args.data is not None and not Path(args.data).exists():
            raise ConfigError(f"--data {args.data} is not there; give a file of samples, as data.train takes")
        if args.json is not None and not Path(args.json).absolute().parent.is_dir():
            raise ConfigError(f"--json {args.json}: its folder is not there; make it first")
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
    """Start the workers, judge, print."""
    folder, path = Path(job.folder), job.write()
    module = ("-m", "drivetrain.trainers.parity.rows", str(path))
    code = subprocess.run([sys.executable, *module, "reference"], check=False).returncode
    if code:
        return code
    for nproc in sorted({row.nproc for row in job.rows}):
        if not _run_rows(job, module, nproc, timeout):
            print(f"error: the rows of {nproc} processes took more than {timeout} s (--timeout)", file=sys.stderr)
    references = json.loads((folder / "references.json").read_text())
    judged = []
    for i, row in enumerate(job.rows):
        told = json.loads(job.result(i).read_text()) if job.result(i).is_file() else None
        judged.append(judge(row, told, references.get(row.model, {}), job.dtype))
    print("\n".join([describe(job), *table(judged, references)]))
    failed = sum(not row["ok"] for row in judged)
    print(f"{len(judged) - failed} rows agree, {failed} do not, over {job.steps} steps in {job.dtype}")
    if json_file:
        Path(json_file).write_text("[\n" + ",\n".join(json.dumps(row) for row in judged) + "\n]\n")
    return 1 if failed else 0


def _run_rows(job: Job, module: Sequence[str], nproc: int, timeout: int) -> bool:
    """Start processes until every row of so many has a result, or a start brings none; whether it took no longer than allowed."""

    def missing() -> int:
        return sum(row.nproc == nproc and not job.result(i).is_file() for i, row in enumerate(job.rows))

    deadline, left = time.monotonic() + timeout, missing() + 1
    launcher = ("-m", "drivetrain.launch", "--nproc-per-node", str(nproc)) if nproc > 1 else ()
    # One thread each where there are several, as torchrun has it, without its word about it.
    environment = {**({"OMP_NUM_THREADS": "1"} if nproc > 1 else {}), **os.environ}
    while 0 < missing() < left:
        left = missing()
        # A session of its own: what is started by the launcher ends with it.
        started = subprocess.Popen([sys.executable, *launcher, *module, str(nproc)], env=environment, start_new_session=True)
        try:
            started.wait(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException as e:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            return False
    return True


def describe(job: Job) -> str:
    """What the table was made with."""
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "megatron-core") if _has(name)]
    return f"drivetrain {__version__}, {', '.join(packages)}; {job.dtype}, {job.batch_size} samples a step, lr 1e-4"


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
