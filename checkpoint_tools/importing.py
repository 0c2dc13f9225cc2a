"""Import of foreign sharded checkpoints into a Hugging Face folder, or into a checkpoint that an engine can resume from."""

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
from ..engine.errors import CheckpointError, ModelError, disk_error, first_line
from ..engine.hf.model_path import check_model_path, resolve_folder
from .foreign import MappedSource
from .plan import DTYPES, CastBlocks, CopiedBlocks, WritePlan, apply, check_dtype, plan_write, with_dtype
from .streaming import BlockBuffer, Blocks, ProgressCallback, blocks_of

log = logging.getLogger(__name__)

CheckpointKind = Literal["auto", "dcp", "verl", "torch_dist"]
ImportTarget = Literal["hf", "checkpoint"]
_NAMES = {code: name for name, code in DTYPES.items()}


def import_checkpoint(
    source: Path | str,
    output: Path | str,
    *,
    model: str | None = None,
    kind: CheckpointKind = "auto",
    to: ImportTarget = "hf",
    dtype: str | None = None,
    step: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    trust_pickle: bool = False,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Path:
    """Convert a foreign checkpoint into a Hugging Face folder or a Drivetrain checkpoint.

    Args:
        source: The folder of the foreign checkpoint.
        output: The Hugging Face folder to write, or the folder of checkpoints to write `step-XXXXXXXX` into.
        model: The folder or Hub name of a model of the same architecture, for its config and tokenizer. None for the one
            inside the source.
        kind: The format of the source: `dcp` (PyTorch Distributed Checkpoint of an FSDP run), `verl` (verl's FSDP shards) or
            `torch_dist` (Megatron's dist_checkpointing). `auto` detects it from the files.
        to: The kind of output: `hf`, or `checkpoint`, which includes the optimizer's moments and needs them stored by name.
        dtype: The dtype to write: float32, bfloat16, float16 or float64; None for the dtype as stored.
        step: The step number of the checkpoint and, if the source stores none, the number of optimizer steps; None for the
            stored number.
        shard_bytes: The maximum size of a weight file in the Hugging Face folder.
        trust_pickle: Whether to read pickles that could run code.
        workers: The number of threads; None for one per core, at most 8.
        progress: Called with the size of each block in bytes.

    Returns:
        The folder that was written.

    Raises:
        CheckpointError: The source has none of these formats, belongs to a different model, or could run code.
    """
    # Settings first, before the source is opened.
    check_dtype(dtype)
    if to not in ("hf", "checkpoint"):
        raise CheckpointError(f"to={to}; it must be hf or checkpoint")
    if to == "hf" and step is not None:
        raise CheckpointError(
            f"step={step} applies only to checkpoints, because a Hugging Face folder has no step; leave it out, or choose "
            "to=checkpoint"
        )
    foreign = read_foreign(source, model=model, kind=kind, trust_pickle=trust_pickle)
    for note in foreign.notes:
        log.warning("%s: %s", source, note)
    if to == "hf":
        plan = plan_import(foreign.kinds["value"], output, dtype=dtype, shard_bytes=shard_bytes)
        apply(plan, workers, progress)
        return plan.output
    try:
        return _write_checkpoint(Path(output), foreign, dtype, step, progress)
    except OSError as e:
        raise disk_error(str(output), e) from e


def plan_import(
    values: MappedSource, output: Path | str, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> WritePlan:
    """Plan the import of values into a Hugging Face folder."""
    files = values.model_files()
    stored = {dtype_code for dtype_code, _ in values.entries.values()}
    # The config may name another data type than the one stored.
    if dtype is None and len(stored) == 1:
        files = with_dtype(files, _NAMES[stored.pop()])
    return plan_write(values.label, output, CopiedBlocks(values), values.entries, files, dtype=dtype, shard_bytes=shard_bytes)


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """The contents of a foreign checkpoint.

    Args:
        kinds: The tensors by kind: value, exp_avg, exp_avg_sq; also main if float32 values are stored next to values of
            another dtype.
        steps: The number of optimizer steps by tensor name; empty if they are not stored.
        backend: The engine whose checkpoints are most similar.
        model: The path of a model of the same architecture.
        notes: Notes on data that is present but not imported.
    """

    kinds: Mapping[str, MappedSource]
    steps: Mapping[str, float]
    backend: str
    model: str
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Describe the contents for the user, one string per line."""
        moments = [kind for kind in self.kinds if kind.startswith("exp_avg")]
        contents = f"values{' and moments' if moments else ', no moments'}"
        return [f"{self.kinds['value'].label}: {contents} of a model like {self.model}", *(f"  note: {n}" for n in self.notes)]


def read_foreign(
    source: Path | str, *, model: str | None = None, kind: CheckpointKind = "auto", trust_pickle: bool = False
) -> ForeignCheckpoint:
    """Map a foreign checkpoint to Hugging Face tensors.

    Raises:
        CheckpointError: The folder is not a known checkpoint, belongs to a different model, or could run code.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    # Importing torch takes a second, so everything that can be checked without it comes first.
    source_kind = kind if kind != "auto" else _kind(folder)
    path = _model(folder, model)
    config = ModelConfig(path=path)
    try:
        check_model_path(path)
        files = _files(path)
    except Exception as e:  # transformers may raise anything: no folder, no network, unknown name
        raise CheckpointError(f"--model {path} cannot be read: {first_line(e)}") from e
    from . import fsdp, mcore
    from .dcp import DCPTensors

    try:
        tensors: DCPTensors | fsdp.ShardFiles
        if source_kind == "verl":
            tensors = fsdp.ShardFiles(folder, trust=trust_pickle)
            kinds, counts = fsdp.kinds_of(tensors, config, files)
        elif source_kind in ("dcp", "torch_dist"):
            tensors = DCPTensors(folder, trust=trust_pickle)
            kinds, counts = (fsdp if source_kind == "dcp" else mcore).kinds_of(tensors, config, files)
        else:
            raise CheckpointError(f"kind={source_kind}; it must be auto, dcp, verl or torch_dist")
    except ModelError as e:
        raise CheckpointError(str(e)) from e
    steps = {name: tensors.scalar(count) for name, count in counts.items()}
    if "main" in kinds:
        # Megatron stores a single step count, in a pickle outside its tensors, and names its folders after it.
        number = re.fullmatch(r"iter_(\d+)", folder.name)
        steps = dict.fromkeys(kinds["main"].entries, None if number is None else float(number[1]))
    known_steps = {name: count for name, count in steps.items() if count is not None}
    moments = any(kind.startswith("exp_avg") for kind in kinds)
    moment_names = [name for name in tensors.entries if ".exp_avg" in name]
    notes = (
        ()
        if moments or not moment_names
        else (f"its optimizer state is stored under unknown names ({moment_names[0]}) and is not imported",)
    )
    return ForeignCheckpoint(
        kinds=kinds,
        steps=known_steps if len(known_steps) == len(steps) else {},
        backend="mcore" if source_kind == "torch_dist" else "fsdp",
        model=path,
        notes=notes,
    )


def _kind(folder: Path) -> CheckpointKind:
    if any(folder.glob("model_world_size_*_rank_*.pt")):
        return "verl"
    if (folder / ".metadata").is_file():
        return "torch_dist" if (folder / "metadata.json").is_file() or (folder / "common.pt").is_file() else "dcp"
    inside = [p.parent for pattern in ("*/.metadata", "*/model_world_size_*_rank_0.pt") for p in sorted(folder.glob(pattern))]
    hint = f"; did you mean {inside[-1]}?" if inside else ""
    raise CheckpointError(
        f"{folder} is not a checkpoint that can be imported: it has neither .metadata (DCP, megatron) nor "
        f"model_world_size_W_rank_R.pt (verl){hint}"
    )


def _model(folder: Path, model: str | None) -> str:
    if model is not None:
        return model
    for inside in (folder / "huggingface", folder / "model", folder):
        if (inside / CONFIGS[MODEL_STEM]).is_file():
            return str(inside)
    raise CheckpointError(f"{folder} does not record its model; set --model to a folder that contains its config.json")


def _files(path: str) -> dict[str, bytes]:
    folder = resolve_folder(path)
    weights = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".safetensors.index.json", ".bin.index.json")
    return {
        p.name: p.read_bytes()
        for p in sorted(folder.iterdir())
        if p.is_file() and not p.name.endswith(weights) and not p.name.startswith(".") and p.name != "metadata.json"
    }


def _write_checkpoint(
    root: Path, foreign: ForeignCheckpoint, dtype: str | None, step: int | None, progress: ProgressCallback | None
) -> Path:
    """Write a checkpoint with a single file of a single rank, from which resuming ranks read the parts that they need."""
    kinds, steps = dict(foreign.kinds), dict(foreign.steps)
    if not any(kind.startswith("exp_avg") for kind in kinds):
        raise CheckpointError(
            f"{kinds['value'].label} has no optimizer moments to resume from; import it into a Hugging Face folder, and use "
            "that as model.path"
        )
    moments = {kind: mapped for kind, mapped in kinds.items() if kind.startswith("exp_avg")}
    if not steps:
        if step is None:
            raise CheckpointError(
                f"{kinds['value'].label} does not record how many steps its optimizer took, which the bias correction of its "
                "moments needs; set --step"
            )
        steps = dict.fromkeys(moments["exp_avg"].entries, float(step))
    # Counts may differ between parameters, as for experts that were not always used.
    number = step if step is not None else int(max(steps.values(), default=0))
    # Megatron's float32 values, if there are any: resuming from the rounded ones would lose what the optimizer has
    # accumulated.
    values = kinds.get("main", kinds["value"])
    kinds = {"value": values, **moments}
    sources: dict[str, tuple[Blocks, Any]] = {kind: (CopiedBlocks(mapped), mapped.entries) for kind, mapped in kinds.items()}
    if dtype is not None:
        cast = CastBlocks(CopiedBlocks(values), values.entries, DTYPES[dtype])
        sources["value"] = (cast, cast.entries)
    stored = {code for code, _ in sources["value"][1].values()}
    # The engine's configuration names a single data type for all parameters.
    if len(stored) > 1:
        raise CheckpointError(f"{values.label} has tensors of {', '.join(sorted(stored))}; set a single dtype for all of them")
    params = _NAMES[stored.pop()]
    store, name, file = LocalStore(root), folder_name(number), "rank-00000.safetensors"
    if name in store.folders():
        raise CheckpointError(f"{root}/{name} exists; delete it, or choose another folder or --step")
    # A temporary folder, which gets its final name when everything is written.
    folder = store.begin(name)
    try:
        keys = {
            f"{kind}/{tensor_name}@{'.'.join('0' * len(shape))}": (kind, tensor_name, (code, shape))
            for kind, (_, entries) in sources.items()
            for tensor_name, (code, shape) in entries.items()
        }
        files: dict[str, Any] = {}
        # One block after the other, in the order of the keys: the writer appends to a single file.
        buffer = BlockBuffer()
        with folder.create(file) as out:
            writer = TensorWriter(out, {key: entry for key, (_, _, entry) in keys.items()})
            for key, (kind, tensor_name, entry) in keys.items():
                for part, _ in blocks_of(entry):
                    block = sources[kind][0].block(tensor_name, part, buffer)
                    writer.write(key, memoryview(block.reshape(-1)).cast("B") if block.size else memoryview(b""))
                    if progress is not None:
                        progress(block.nbytes)
            files[file] = writer.finish()
        for tensor_name, data in values.model_files().items():
            folder.write(f"{MODEL}{tensor_name}", data)
            files[f"{MODEL}{tensor_name}"] = {"bytes": len(data), "xxh3": digests_of(data)}
        tensors: dict[str, Any] = {}
        for key, (kind, tensor_name, (code, shape)) in keys.items():
            box = {"offset": [0] * len(shape), "length": list(shape), "file": file, "key": key}
            tensors.setdefault(tensor_name, {"shape": list(shape), "kinds": {}})["kinds"][kind] = {
                "dtype": code,
                "boxes": [box],
            }
        engine = EngineConfig(backend=foreign.backend, precision=PrecisionConfig(params=params, compute=params))  # type: ignore[arg-type]
        manifest = {
            "format": FORMAT,
            "step": number,
            "parallel": asdict(ParallelConfig(dp_shard=1)),
            "world_size": 1,
            "backend": foreign.backend,
            "engine": asdict(engine),
            "model": asdict(ModelConfig(path=foreign.model)),
            "optim": asdict(OptimConfig()),
            "schedule": {"step": number},
            "optimizer": {"step": steps},
            "extra": {"imported": kinds["value"].label},
            "files": files,
            "ranks": [{"rng": rng_state()}],
            "tensors": tensors,
        }
        # Last, because a folder with a manifest counts as complete.
        write_manifest(folder, manifest)
        return store.commit(folder, name).path
    except BaseException:
        # Also on an interrupt: nothing partial stays behind.
        store.remove(folder.name)
        raise
