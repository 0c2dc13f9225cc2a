"""`drivetrain generate MODEL|RUN|CHECKPOINT PROMPTS OUT`: generate completions for the prompts of a file.

A row has a `prompt`, which is a text or a list of messages, or `messages` that end with a user message. OUT has the same rows with
`completion` and `finish_reason`. If the command is killed, its completions are kept next to OUT, and the same command continues from there.

  drivetrain generate runs/mine prompts.jsonl completions.jsonl --max-tokens 512
  drivetrain generate MODEL questions.csv completions.jsonl data.columns={prompt: question} --temperature 0.7 --samples 4
"""

import argparse
import fcntl
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import xxhash

from ..checkpoint_tools.model_source import model_folder
from ..engine.config import ModelConfig
from ..engine.errors import ConfigError, DataError, DrivetrainError, disk_error
from ..engine.hf.tokenizer import load_tokenizer
from ..engine.parallel.process import report_failure
from ..generation.generator import BaseGenerator
from ..generation.memory import with_cache_size
from ..generation.options import RolloutConfig, SamplingOptions
from ..generation.registry import ENGINES, build_generator, generator_class
from ..generation.token_stream import TokenStream, check_prompt
from .config.data import PromptsConfig
from .config.parse import parse
from .config.rl import GRPOConfig
from .data.media import MediaReader
from .data.prompts import Prompt, check_media, encode_prompt
from .data.sources import open_source, rename_columns
from .data.tokenize import Bar, cache_folder

log = logging.getLogger(__name__)

PARTIAL = ".partial-"
"""The infix of an unfinished output's name, between the name of the output and a hash of everything that it depends on."""


MAX_TOKENS = SamplingOptions.max_tokens
"""The maximum number of tokens in a completion, unless `--max-tokens` is given or fewer fit."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_intermixed_args(list(argv))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    try:
        if unknown := [word for word in args.settings if not word.startswith("data.") or "=" not in word]:
            raise ConfigError(f"{unknown[0]!r} is not a setting of the prompts; give data.* settings, such as data.columns")
        data = parse(GRPOConfig, args.settings).data
        options = SamplingOptions(
            max_tokens=MAX_TOKENS if args.max_tokens is None else args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            samples=args.samples,
            seed=args.seed,
        )
        if args.column in ("finish_reason", "sample", "prompt", "messages", "text"):
            raise ConfigError(
                f"--column {args.column} is the name of another output column; give the completions a different name"
            )
        out = Path(args.out)
        _check_out(out, overwrite=args.overwrite)
        # Before the model is loaded, since a package of the generator may be missing.
        generator_class(ENGINES[args.engine])
        with model_folder(args.source, lambda text: print(text, file=sys.stderr, flush=True)) as folder:
            _generate(args, data, options, folder, out)
    except KeyboardInterrupt:
        print("interrupted; the same command continues where this one stopped", file=sys.stderr)
        return 130
    except Exception as e:  # reported as one line, like those of the trainers
        return report_failure(e)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain generate",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", metavar="MODEL|RUN|CHECKPOINT", help="a model folder, a Hub name, the folder of a run, or a checkpoint")
    add("prompts", metavar="PROMPTS", help="a file, a folder, a pattern or a Hub dataset, as in data.train")
    add("out", metavar="OUT", help="the jsonl file to write")
    add("settings", nargs="*", metavar="data.key=value", help="settings of the prompts, as for drivetrain grpo")
    add(
        "--max-tokens",
        type=int,
        default=None,
        metavar="N",
        help=f"the maximum number of tokens in a completion; default: {MAX_TOKENS}, or as many as fit behind the prompt if fewer do",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0, the default, decodes greedily")
    add("--top-p", type=float, default=1.0, metavar="P", help="the probability mass to sample from (1)")
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="the number of most likely tokens to sample from; 0, the default: all",
    )
    add("--samples", type=int, default=1, metavar="N", help="completions per prompt, each in a separate row (1)")
    add("--seed", type=int, default=0, help="seed; the same seed gives the same completions (0)")
    add("--column", default="completion", metavar="NAME", help="the column of the completions (completion)")
    add("--engine", choices=list(ENGINES), default="transformers", help="the generation engine")
    add("--tp", type=int, default=None, metavar="N", help="the number of devices; needs --engine tensor_parallel or vllm")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on a GPU, else float32")
    add(
        "--max-batch-size",
        type=int,
        default=RolloutConfig.max_batch_size,
        metavar="N",
        help="completions to generate at the same time",
    )
    add(
        "--max-batch-total-tokens",
        type=int,
        default=0,
        metavar="N",
        help="total tokens of these completions and their prompts, which is the size of the KV cache; 0, the default: as many as "
        "fit on the GPU, or 32,768 without one",
    )
    add("--overwrite", action="store_true", help="replace OUT if it exists")
    add("--trust-remote-code", action="store_true", help="run code from the model folder")
    return parser


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give the name of a jsonl file")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists; give another name, or --overwrite")
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"{out} cannot be written: the folder {out.absolute().parent} does not exist; create it, or give another path"
        )


def _generate(args: argparse.Namespace, data: PromptsConfig, options: SamplingOptions, folder: Path, out: Path) -> None:
    model = ModelConfig(path=str(folder), trust_remote_code=args.trust_remote_code)
    tokenizer = load_tokenizer(model)
    reader = MediaReader.of(model, data, tokenizer, cache_folder(data))
    added = {args.column, "finish_reason", *(["sample"] if options.samples > 1 else [])}
    prompts, rows = _read(args.prompts, tokenizer, data, added, reader)
    check_media(prompts, ENGINES[args.engine], reader)
    unfinished = _unfinished(out, args, options, folder, prompts)
    total, start = len(prompts) * options.samples, time.monotonic()
    with _appended(unfinished) as file:
        # Counted under the lock, so that no other process is writing.
        done = _completed(unfinished)
        if done:
            print(f"{done} of {total} completions are already done; continuing", file=sys.stderr, flush=True)
        tokens = _respond(args, options, model, tokenizer, prompts, rows, file, done) if done < total else 0
        # Another command may have written it in the meantime.
        _check_out(out, overwrite=args.overwrite)
        # OUT appears only when it is complete.
        os.replace(unfinished, out)
    seconds = time.monotonic() - start
    print(
        f"{total} completions of {len(prompts)} prompts: {out} ({tokens} tokens, {tokens / max(seconds, 1e-9):.0f} per second)"
    )


def _respond(
    args: argparse.Namespace,
    options: SamplingOptions,
    model: ModelConfig,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    rows: Sequence[dict[str, Any]],
    file: IO[str],
    done: int,
) -> int:
    """Append the missing completions; return the number of their tokens."""
    tokens, total = 0, len(prompts) * options.samples
    config = RolloutConfig(
        model=model,
        generator=ENGINES[args.engine],
        dtype=_dtype(args.dtype),
        max_batch_size=args.max_batch_size,
        max_batch_total_tokens=args.max_batch_total_tokens,
        options={} if args.tp is None else {"tp": args.tp},
    )
    with _built(with_cache_size(config)) as generator, Bar("generating") as bar:
        limits = generator.limits()
        room = min(limits.tokens, limits.context or limits.tokens)

        def options_of(prompt: Prompt) -> SamplingOptions:
            if args.max_tokens is not None:
                return options
            return replace(options, max_tokens=max(1, min(options.max_tokens, room - len(prompt.ids))))

        # Check all prompts first: one that is too long is an error now, and not in the middle of the work.
        for prompt in prompts:
            check_prompt(prompt.name, prompt.ids, options_of(prompt), limits, generator.config)
        # Twice as many requests as are computed at the same time, so that the generator has
        # others while the oldest one is not complete.
        for number, stream in _in_order(generator, prompts, options_of, options.samples, done, 2 * args.max_batch_size):
            tokens += len(stream.tokens)
            row = rows[number // options.samples] | ({"sample": number % options.samples} if options.samples > 1 else {})
            text = tokenizer.decode(stream.tokens, skip_special_tokens=True)
            _write(file, {**row, args.column: text, "finish_reason": stream.finish_reason})
            bar.advance(1 / total, number + 1)
    return tokens


@contextmanager
def _appended(unfinished: Path) -> Iterator[IO[str]]:
    with open(unfinished, "a", encoding="utf-8") as file:
        try:
            # Two processes would append to the same file.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(f"{unfinished} is being written by the same command; wait for it, or stop it") from e
        except OSError as e:
            # Some network file systems do not support locks.
            log.warning(
                "%s cannot be locked (%s): a second command that writes it would not be detected", unfinished, e.strerror or e
            )
        try:
            yield file
        finally:
            # Nothing to continue from, so leave no file behind.
            if unfinished.is_file() and not unfinished.stat().st_size:
                unfinished.unlink()


@contextmanager
def _built(config: RolloutConfig) -> Iterator[BaseGenerator]:
    try:
        generator = build_generator(config)
    except ConfigError as e:
        if "generator=continuous cannot run" not in str(e):
            raise
        # Some kinds of attention cannot be batched continuously.
        generator = build_generator(replace(config, generator="static"))
    try:
        yield generator
    finally:
        generator.close()


def _dtype(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def _read(
    name: str, tokenizer: Any, data: PromptsConfig, added: set[str], media: MediaReader | None
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Return the prompts, and their rows, to which the output columns will be added."""
    prompts, rows = [], []
    source = open_source(name, training=True, every_column=True, columns=data.columns, whole_text=data.txt == "file")
    for chunk in source.chunks():
        for number, row in chunk.parsed():
            place = f"{chunk.file}:{number}"
            if taken := added & row.keys():
                raise DataError(f"{place} already has a column {min(taken)}; rename it, or give another name with --column")
            try:
                # Rows are written again with their completions, so find out now whether they can be.
                json.dumps(row, ensure_ascii=False).encode()
            except (TypeError, ValueError) as e:
                raise DataError(
                    f"{place} cannot be written as JSON, as the output requires: {e}; leave out that column"
                ) from e
            ours = rename_columns(row, data.columns, place)
            if ours.get("prompt") is None:
                column = next((c for c in ("messages", "text") if ours.get(c) is not None), None)
                ours = {**ours, "prompt": ours[column]} if column else ours
            prompts.append(encode_prompt(tokenizer, ours, place, data, media))
            rows.append(row)
    return prompts, rows


def _unfinished(
    out: Path, args: argparse.Namespace, options: SamplingOptions, folder: Path, prompts: Sequence[Prompt]
) -> Path:
    """Return the name of the unfinished output, which depends on everything that the completions depend on."""
    digest = xxhash.xxh3_64()
    source = Path(args.source)
    # A checkpoint is merged into a new folder each time, so hash the checkpoint's own files.
    place = next((p for p in (source / "checkpoints", source) if source not in (folder, folder.parent) and p.is_dir()), folder)
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(place.iterdir())]
    digest.update(
        json.dumps([files, asdict(options), args.max_tokens, args.column, args.dtype, args.engine], default=str).encode()
    )
    for prompt in prompts:
        digest.update(json.dumps(prompt.identity(), default=str).encode())
    return out.with_name(f"{out.name}{PARTIAL}{digest.hexdigest()}")


def _completed(unfinished: Path) -> int:
    """Truncate an incomplete last line, and return the number of complete ones."""
    if not unfinished.is_file():
        return 0
    with open(unfinished, "rb+") as file:
        count = end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            count, end = count + 1, end + len(line)
        file.truncate(end)
    return count


def _in_order(
    generator: BaseGenerator,
    prompts: Sequence[Prompt],
    options_of: Callable[[Prompt], SamplingOptions],
    samples: int,
    first: int,
    most: int,
) -> Iterator[tuple[int, TokenStream]]:
    """Yield the finished completions in order, with up to `most` requests in flight."""
    total, following = len(prompts) * samples, first
    requested: deque[tuple[int, TokenStream]] = deque()
    read, media = -1, dict[str, Any]()
    while requested or following < total:
        while following < total and len(requested) < most:
            row, sample = divmod(following, samples)
            # The seed depends on the row and the sample, so a continued run generates the same completions as an uninterrupted one.
            if row != read:
                # Once for all completions of the prompt.
                read, media = row, prompts[row].fields()
            stream = generator.submit(prompts[row].ids, options_of(prompts[row]), row=row, sample=sample, media=media)
            requested.append((following, stream))
            following += 1
        # Only the oldest request is written, so that the lines of an unfinished output tell how many are done.
        number, stream = requested[0]
        # One step of the generator computes for all requests in flight.
        if not stream.ended:
            generator.step()
            continue
        if stream.error is not None:
            name = prompts[number // samples].name
            if isinstance(stream.error, DrivetrainError):
                raise stream.error
            raise DataError(f"{name}: generating failed with {type(stream.error).__name__}: {stream.error}") from stream.error
        requested.popleft()
        yield number, stream


def _write(file: IO[str], row: dict[str, Any]) -> None:
    try:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
    except OSError as e:
        raise disk_error("the completions", e) from e
