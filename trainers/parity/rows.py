"""The workers of `drivetrain parity`: `JOB reference` trains the references, `JOB N` the rows with N processes."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from logging import ERROR, getLogger
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, PrecisionConfig
from ...engine.conformance.reference import PlainReference
from ...engine.conformance.tiny import save_tiny_model
from ...engine.errors import CapabilityError, ConfigError, DrivetrainError, ModelError, TopologyError
from ...engine.hf.config import read_config
from ...engine.hf.shape import context_of
from ...engine.packing.batch import IGNORE
from ...engine.parallel.process import exit_process, report_failure
from ...engine.parallel.process_groups import close_distributed, init_distributed
from ...engine.registry import engine_class
from ...engine.tiny_configs import FAMILIES
from ...losses.sft import SFTLoss
from ..config.data import DataConfig
from ..config.runs import SFTConfig
from ..data.dataset import TokenDataset
from ..data.load import load_data
from ..data.loader import Loader
from ..data.order import Cursor, Sampler
from ..methods.sft import SFTMethod
from ..tasks.addition import DIGITS, SPECIAL, make_tokenizer
from ..tasks.shapes import write_shapes, write_vision_model
from .parity_command import Job, Row, relative

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)
# One layer for each stage of pp=4, and for each part of pp=2 with vpp=2.
LAYERS = 4
VISION = "qwen2_5_vl"
"""The built-in tiny model that takes images, and has separate samples."""
CHATS, QUESTIONS = 64, 3


def model_folder(job: Job, model: str) -> Path:
    """Return the folder of a row's model, which is the user's or that of a built-in tiny model."""
    return Path(model) if Path(model).is_dir() else Path(job.folder) / model


def make_models(job: Job) -> None:
    """Create the built-in tiny models that the rows need, and the built-in samples.

    Raises:
        ConfigError: A model is neither a folder nor a known family.
    """
    for model in {row.model for row in job.rows}:
        folder = model_folder(job, model)
        if folder.is_dir():
            continue
        if model == VISION:
            write_vision_model(folder, 0)
            write_shapes(_pictures(job), 0, counts={"train": CHATS})
            continue
        if model not in FAMILIES:
            raise ConfigError(
                f"--model {model} is not a folder; give a folder with config.json, tokenizer and safetensors files, or a family, of which a tiny "
                f"random model is made: {', '.join([*list(FAMILIES)[:4], VISION])} and {len(FAMILIES) - 4} others (docs/families.md)"
            )
        settings = FAMILIES[model]
        layers: dict[str, Any] = {}
        if "num_hidden_layers" not in settings:
            layers = {"num_hidden_layers": LAYERS}
            for name in ("layer_types", "no_rope_layers"):
                if name in settings:
                    layers[name] = settings[name] * (LAYERS // len(settings[name]))
        save_tiny_model(folder, model, **layers)
        make_tokenizer().save_pretrained(folder)
    if job.data is None:
        _write_chats(Path(job.folder) / "chats.jsonl")


def _pictures(job: Job) -> Path:
    return Path(job.folder) / "pictures"


def _write_chats(path: Path) -> None:
    random = Random(0)

    def text(longest: int) -> str:
        # Include special tokens, whose embedding rows engines may treat differently.
        return "".join(random.choices([*DIGITS, "+", "=", *SPECIAL], k=random.randint(1, longest)))

    # Half of the samples share a few prompts, so that documents of a batch have common prefixes.
    questions = [{"role": "user", "content": "".join(random.choices(DIGITS, k=40))} for _ in range(QUESTIONS)]
    with open(path, "w") as file:
        for i in range(CHATS):
            turns = [{"role": role, "content": text(25)} for role in ("user", "assistant") * random.randint(1, 2)]
            if i % 2:
                turns = [questions[i % QUESTIONS], {"role": "assistant", "content": text(25)}]
            file.write(json.dumps({"messages": turns}) + "\n")


def config_of(job: Job, row: Row) -> SFTConfig:
    """Build the configuration of the SFT run whose first steps a row trains."""
    model = ModelConfig(path=str(model_folder(job, row.model)))
    if job.data is not None:
        data = DataConfig(train=(job.data,), batch_size=job.batch_size)
    elif row.model == VISION:
        data = DataConfig(train=(str(_pictures(job) / "train.jsonl"),), batch_size=job.batch_size)
    else:
        # A random chat may have more tokens than a small model has positions.
        positions = context_of(read_config(model))
        data = DataConfig(
            train=(f"{job.folder}/chats.jsonl",),
            batch_size=job.batch_size,
            max_length=positions if positions is not None and positions < job.max_tokens else None,
            too_long="truncate_right",
        )
    return SFTConfig(
        model=model,
        data=data,
        engine=EngineConfig(
            backend=row.backend,
            parallel=row.parallel,
            precision=PrecisionConfig(params="float32", compute="bfloat16" if job.dtype == "bfloat16" else "float32"),
            micro_batch=MicroBatchConfig(max_tokens=job.max_tokens),
            share_prefixes=row.share,
        ),
        optim=OPTIM,
    )


def loader_of(samples: TokenDataset, config: SFTConfig) -> Loader:
    """Build the loader that yields the batches of the SFT trainer."""
    order = Sampler(samples.sizes, weights=None, seed=config.data.seed, shuffle=True)
    return Loader(samples, order, batch_size=config.data.batch_size)


def documents_of(
    samples: TokenDataset, config: SFTConfig, steps: int
) -> Iterator[tuple[list[list[int]], list[list[bool]], list[dict[str, Tensor]]]]:
    """Yield the documents of each step, the masks of their target tokens and their media, for a loop without packing."""
    batches = loader_of(samples, config).batches(Cursor())
    for _ in range(steps):
        # A single shard has all documents, in order; the ratio of costs then has no effect.
        batch = next(batches)[0].shard(0, 1, 0.0).batch
        documents, masks, media = [], [], []
        for i, (start, end) in enumerate(pairwise(batch.bounds)):
            documents.append(batch.input_ids[start:end].tolist())
            # Labels are shifted: the label of a token determines whether the next token is a target.
            masks.append([False, *(batch.labels[start : end - 1] != IGNORE).tolist()])
            fields = batch.select([i]).media
            media.append({name: field.values for name, field in fields.items() if len(field.values)})
        yield documents, masks, media


def make_reference(job: Job) -> None:
    """Train the references in plain Hugging Face, one document at a time.

    For bfloat16, each reference is also trained in float32, to measure the effect of bfloat16 by itself.
    """
    make_models(job)
    init_distributed()
    check_rows(job)
    references: dict[str, Any] = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Rows whose configuration is invalid have a result already, and need no reference.
    possible = [row for i, row in enumerate(job.rows) if not job.result(i).is_file()]
    for row in {row.model: row for row in possible}.values():
        config = config_of(job, row)
        method = SFTMethod(config)
        samples = load_data(config.model, config.data, kind=method.kind, budget=method.budget).train
        steps_by_dtype: dict[str, Any] = {}
        # In float32 always: it is the expected result, also for rows in bfloat16.
        for dtype in dict.fromkeys(("float32", job.dtype)):
            reference = PlainReference(config.model.path, OPTIM, compute=getattr(torch, dtype), device=device)
            steps = [reference.step(*step) for step in documents_of(samples, config, job.steps)]
            steps_by_dtype[dtype] = [{"loss": s.loss, "grad_norm": s.grad_norm} for s in steps]
            if dtype == "float32":
                # `save_file` refuses tensors that are not contiguous.
                weights = {name: value.cpu().contiguous() for name, value in reference.weights().items()}
                save_file(weights, str(_weights_file(job, row)))
        references[row.model] = {"steps": steps_by_dtype["float32"]}
        if job.dtype != "float32":
            kinds = ("loss", "grad_norm")
            references[row.model]["rounding"] = {
                k: relative([s[k] for s in steps_by_dtype[job.dtype]], [s[k] for s in steps_by_dtype["float32"]])
                for k in kinds
            }
    (Path(job.folder) / "references.json").write_text(json.dumps(references))
    close_distributed()


def check_rows(job: Job) -> None:
    """Record why a row is refused, before processes are started for it.

    A layout that does not fit the model, or that the backend does not support, is not run; anything else is an error.
    """
    for i, row in enumerate(job.rows):
        config = config_of(job, row)
        try:
            engine_class(row.backend)(
                model=config.model, engine=config.engine, optim=config.optim, ranks=range(row.nproc)
            ).check()
        except (TopologyError, CapabilityError, ModelError) as e:
            job.result(i).write_text(json.dumps({"not_run": str(e)}))
        except DrivetrainError as e:
            job.result(i).write_text(json.dumps({"error": str(e)}))


def _weights_file(job: Job, row: Row) -> Path:
    # Numbered, since the folders of two models may have the same name.
    models = list(dict.fromkeys(r.model for r in job.rows))
    return Path(job.folder) / f"reference-{models.index(row.model)}.safetensors"


def run_row(job: Job, row: Row) -> dict[str, Any]:
    """Train the steps of one row and return their result, or the error that prevented them. Collective over its processes."""
    config = config_of(job, row)
    try:
        engine = engine_class(row.backend)(model=config.model, engine=config.engine, optim=config.optim)
        engine.check()
        method = SFTMethod(config)
        samples = load_data(config.model, config.data, kind=method.kind, budget=method.budget).train
        engine.initialize()
    # An engine raises its errors on every rank, so all ranks return here and meet again at the next row.
    except DrivetrainError as e:
        return {"error": str(e)}
    try:
        batches = loader_of(samples, config).batches(Cursor())
        steps, shared, tokens = [], 0, 0
        for _ in range(job.steps):
            batch, _ = next(batches)
            result = engine.train_batch(batch.shard_of(engine).batch, SFTLoss())
            steps.append({"loss": result.loss, "grad_norm": result.grad_norm})
            shared, tokens = shared + result.shared_tokens, tokens + result.tokens
        reference_weights = load_file(str(_weights_file(job, row)))
        # Every rank reads the whole stream, because gathering a tensor is collective.
        with engine.named_weights() as stream:
            # One tensor after another, so that the engine never gathers all of its weights at once.
            largest_difference = max(
                float((value.cpu().float() - reference_weights[name]).abs().max()) for name, value in stream
            )
        return {"steps": steps, "weights_off": largest_difference, "shared": shared / tokens}
    except DrivetrainError as e:
        return {"error": str(e)}
    finally:
        engine.close()


def run_rows(job: Job, nproc: int) -> None:
    """Run all rows with `nproc` processes one after another, writing each result as soon as it is available."""
    init_distributed()
    for i, row in enumerate(job.rows):
        if row.nproc != nproc or job.result(i).is_file():
            continue
        # All ranks check for an existing result before any rank writes a new one.
        dist.barrier()
        try:
            result = run_row(job, row)
        except Exception as e:  # a backend may raise anything; other ranks may wait for this one, so all processes restart
            job.result(i).write_text(json.dumps({"error": f"{type(e).__name__}: {e}"}))
            raise
        # The file is also the mark that a row is done, so exactly one rank writes it.
        if dist.get_rank() == 0:
            job.result(i).write_text(json.dumps(result))
    close_distributed()


def main(argv: Sequence[str]) -> int:
    """Run one part of a job."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    job = Job.read(argv[0])
    if job.data is None:
        # That built-in chats are cut would be reported by every process.
        getLogger("drivetrain.trainers.data").setLevel(ERROR)
    try:
        if argv[1] == "reference":
            make_reference(job)
        else:
            run_rows(job, int(argv[1]))
    except Exception as e:  # any error: this process must end now, or its peers would wait for it until their timeout
        report_failure(e)
        return 2
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
