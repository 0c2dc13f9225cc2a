"""Foreign sharded checkpoints into a Hugging Face folder, or into a checkpoint that an engine resumes."""

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..engine.checkpoint.hf_folder import CONFIGS, MODEL_STEM, SHARD_BYTES
from ..engine.checkpoint.manifest import FORMAT, MODEL, write_manifest
from ..engine.checkpoint.retention import folder_name
from ..engine.checkpoint.rng import rng_state
from ..engine.checkpoint.safetensors_io import TensorWriter, digests_of
from ..engine.checkpoint.storage import LocalStore
from ..engine.config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from ..engine.errors import CheckpointError, ModelError, disk_error
from ..engine.hf.model_path import check_model_path, resolve_folder
from .foreign import Mapped
from .plan import DTYPES, Cast, Copied, WritePlan, apply, check_dtype, plan_write, with_dtype
from .streaming import BlockBuffer, Blocks, Progress, blocks_of

log = logging.getLogger(__name__)

Kind = Literal["auto", "dcp", "verl", "torch_dist"]
Target = Literal["hf", "checkpoint"]
_NAMES = {code: name for name, code in DTYPES.items()}


def import_checkpoint(
    source: Path | str,
    output: Path | str,
    *,
    model: str | None = None,
    kind: Kind = "auto",
    to: Target = "hf",
    dtype: str | None = None,
    step: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    trust_pickle: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a foreign checkpoint in a form that is ours or Hugging Face's.

    Args:
        source: folder of the foreign checkpoint.
        output: Hugging Face folder to write, or the folder of checkpoints to write `step-XXXXXXXX` into.
        model: folder or Hub name of the same architecture: its config and tokenizer. None for one inside the source.
        kind: `dcp` (torch's distributed checkpoint of an FSDP run), `verl` (its FSDP shards), `torch_dist` (megatron's
            dist_checkpointing); `auto` by the files.
        to: `hf`, or `checkpoint`: with the optimizer's moments, where they are stored by name.
        dtype: float32, bfloat16, float16 or float64; None as stored.
        step: number of the checkpoint and, where it is not stored, the count of optimizer steps; None as stored.
        shard_bytes: size of a file of the Hugging Face folder, at most.
        trust_pickle: read pickles that could run code.
        workers: threads.
        progress: called with the bytes of each block.

    Returns:
        what was written.

    Raises:
        CheckpointError: the source is none of these, of another model, or would have to run code.
    """
    check_dtype(dtype)
    if to not in ("hf", "checkpoint"):
        raise CheckpointError(f"to={to}; it must be hf or checkpoint")
    if to == "hf" and step is not None:
        raise CheckpointError(
            f"step={step} is of a checkpoint; a Hugging Face folder has none: leave it out, or choose to=checkpoint"
        )
    found = read_foreign(source, model=model, kind=kind, trust_pickle=trust_pickle)
    for note in found.notes:
        log.warning("%s: %s", source, note)
    if to == "hf":
        plan = plan_import(found.kinds["value"], output, dtype=dtype, shard_bytes=shard_bytes)
        apply(plan, workers, progress)
        return plan.output
    try:
        return _write_checkpoint(Path(output), found, dtype, step, progress)
    except OSError as e:
        raise disk_error(str(output), e) from e


def plan_import(values: Mapped, output: Path | str, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> WritePlan:
    """What importing into a Hugging Face folder would write."""
    files = values.model_files()
    stored = {found for found, _ in values.entries.values()}
    if dtype is None and len(stored) == 1:
        files = with_dtype(files, _NAMES[stored.pop()])
    return plan_write(values.label, output, Copied(values), values.entries, files, dtype=dtype, shard_bytes=shard_bytes)


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What a foreign checkpoint holds.

    Args:
        kinds: value, exp_avg, exp_avg_sq; main, where float32 values stand beside those of another format.
        steps: optimizer steps by name; empty where they are not stored.
        backend: the engine that it is nearest to.
        model: path of the model that it is like.
        notes: what was found and is not taken over.
    """

    kinds: Mapping[str, Mapped]
    steps: Mapping[str, float]
    backend: str
    model: str
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        moments = [kind for kind in self.kinds if kind.startswith("exp_avg")]
        what = f"values{' and moments' if moments else ', no moments'}"
        return [f"{self.kinds['value'].label}: {what} of a model like {self.model}", *(f"  note: {n}" for n in self.notes)]


def read_foreign(source: Path | str, *, model: str | None = None, kind: Kind = "auto", trust_pickle: bool = False) -> Foreign:
    """The Hugging Face tensors of a foreign checkpoint.

    Raises:
        CheckpointError: it is none, of another model, or would have to run code.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    # torch takes a second: first what can be told without it.
    found = kind if kind != "auto" else _kind(folder)
    path = _model(folder, model)
    config = ModelConfig(path=path)
    try:
        check_model_path(path)
        files = _files(path)
    except Exception as e:  # of many kinds: no folder, no network, no such name
        raise CheckpointError(f"--model {path} cannot be read: {str(e).splitlines()[0]}") from e
    from . import fsdp, mcore
    from .dcp import DCPTensors

    try:
        tensors: DCPTensors | fsdp.ShardFiles
        if found == "verl":
            tensors = fsdp.ShardFiles(folder, trust=trust_pickle)
            kinds, counts = fsdp.kinds_of(tensors, config, files)
        elif found in ("dcp", "torch_dist"):
            tensors = DCPTensors(folder, trust=trust_pickle)
            kinds, counts = (fsdp if found == "dcp" else mcore).kinds_of(tensors, config, files)
        else:
            raise CheckpointError(f"kind={found}; it must be auto, dcp, verl or torch_dist")
    except ModelError as e:
        raise CheckpointError(str(e)) from e
    steps = {name: tensors.scalar(count) for name, count in counts.items()}
    if "main" in kinds:
        # Beside its tensors megatron keeps one count, in a pickle; its folders are named after it.
        number = re.fullmatch(r"iter_(\d+)", folder.name)
        steps = dict.fromkeys(kinds["main"].entries, None if number is None else float(number[1]))
    known = {name: count for name, count in steps.items() if count is not None}
    moments = any(kind.startswith("exp_avg") for kind in kinds)
    left = [name for name in tensors.entries if ".exp_avg" in name]
    notes = (
        ()
        if moments or not left
        else (f"its optimizer's state is not stored by names that are known ({left[0]}), and is left out",)
    )
    return Foreign(
        kinds=kinds,
        steps=known if len(known) == len(steps) else {},
        backend="mcore" if found == "torch_dist" else "fsdp",
        model=path,
        notes=notes,
    )


def _kind(folder: Path) -> Kind:
    if any(folder.glob("model_world_size_*_rank_*.pt")):
        return "verl"
    if (folder / ".metadata").is_file():
        return "torch_dist" if (folder / "metadata.json").is_file() or (folder / "common.pt").is_file() else "dcp"
    inside = [p.parent for pattern in ("*/.metadata", "*/model_world_size_*_rank_0.pt") for p in sorted(folder.glob(pattern))]
    hint = f"; did you mean {inside[-1]}?" if inside else ""
    raise CheckpointError(
        f"{folder} is no checkpoint that can be imported: it has neither .metadata (DCP, megatron) nor "
        f"model_world_size_W_rank_R.pt (verl){hint}"
    )


def _model(folder: Path, model: str | None) -> str:
    if model is not None:
        return model
    for inside in (folder / "huggingface", folder / "model", folder):
        if (inside / CONFIGS[MODEL_STEM]).is_file():
            return str(inside)
    raise CheckpointError(f"{folder} does not say what model it is of; give --model, a folder with its config.json")


def _files(path: str) -> dict[str, bytes]:
    folder = resolve_folder(path)
    weights = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".safetensors.index.json", ".bin.index.json")
    return {
        p.name: p.read_bytes()
        for p in sorted(folder.iterdir())
        if p.is_file() and not p.name.endswith(weights) and not p.name.startswith(".") and p.name != "metadata.json"
    }


def _write_checkpoint(root: Path, found: Foreign, dtype: str | None, step: int | None, progress: Progress | None) -> Path:
    """One file of one rank; whoever resumes it reads the parts that it needs."""
    kinds, steps = dict(found.kinds), dict(found.steps)
    if not any(kind.startswith("exp_avg") for kind in kinds):
        raise CheckpointError(
            f"{kinds['value'].label} has no moments by which a run could go on; import it into a Hugging Face folder, and give that "
            "as model.path"
        )
    moments = {kind: made for kind, made in kinds.items() if kind.startswith("exp_avg")}
    if not steps:
        if step is None:
            raise CheckpointError(
                f"{kinds['value'].label} does not say how many steps its optimizer has made, which its moments are corrected by; give --step"
            )
        steps = dict.fromkeys(moments["exp_avg"].entries, float(step))
    number = step if step is not None else int(max(steps.values(), default=0))
    values = kinds.get("main", kinds["value"])
    kinds = {"value": values, **moments}
    sources: dict[str, tuple[Blocks, Any]] = {kind: (Copied(made), made.entries) for kind, made in kinds.items()}
    if dtype is not None:
        cast = Cast(Copied(values), values.entries, DTYPES[dtype])
        sources["value"] = (cast, cast.entries)
    stored = {code for code, _ in sources["value"][1].values()}
    if len(stored) > 1:
        raise CheckpointError(f"{values.label} has tensors of {', '.join(sorted(stored))}; give one dtype for all of them")
    params = _NAMES[stored.pop()]
    store, name, file = LocalStore(root), folder_name(number), "rank-00000.safetensors"
    if name in store.folders():
        raise CheckpointError(f"{root}/{name} exists; delete it, or choose another folder or --step")
    made = store.begin(name)
    try:
        keys = {
            f"{kind}/{n}@{'.'.join('0' * len(shape))}": (kind, n, (code, shape))
            for kind, (_, entries) in sources.items()
            for n, (code, shape) in entries.items()
        }
        files: dict[str, Any] = {}
        room = BlockBuffer()
        with made.create(file) as out:
            writer = TensorWriter(out, {key: entry for key, (_, _, entry) in keys.items()})
            for key, (kind, n, entry) in keys.items():
                for part, _ in blocks_of(entry):
                    block = sources[kind][0].block(n, part, room)
                    writer.write(key, memoryview(block.reshape(-1)).cast("B") if block.size else memoryview(b""))
                    if progress is not None:
                        progress(block.nbytes)
            files[file] = writer.finish()
        for n, data in values.model_files().items():
            made.write(f"{MODEL}{n}", data)
            files[f"{MODEL}{n}"] = {"bytes": len(data), "xxh3": digests_of(data)}
        tensors: dict[str, Any] = {}
        for key, (kind, n, (code, shape)) in keys.items():
            box = {"offset": [0] * len(shape), "length": list(shape), "file": file, "key": key}
            tensors.setdefault(n, {"shape": list(shape), "kinds": {}})["kinds"][kind] = {"dtype": code, "boxes": [box]}
        engine = EngineConfig(backend=found.backend, precision=PrecisionConfig(params=params, compute=params))  # type: ignore[arg-type]
        manifest = {
            "format": FORMAT,
            "step": number,
            "parallel": asdict(ParallelConfig(dp_shard=1)),
            "world_size": 1,
            "backend": found.backend,
            "engine": asdict(engine),
            "model": asdict(ModelConfig(path=found.model)),
            "optim": asdict(OptimConfig()),
            "schedule": {"step": number},
            "optimizer": {"step": steps},
            "extra": {"imported": kinds["value"].label},
            "files": files,
            "ranks": [{"rng": rng_state()}],
            "tensors": tensors,
        }
        write_manifest(made, manifest)
        return store.publish(made, name).path
    except BaseException:
        store.remove(made.name)
        raise
