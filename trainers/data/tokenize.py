"""Sources to tokenised stores: in several processes, with a bar, once - and by one process of each machine for all of it.

A store is kept under a name made of everything that its contents depend on, so that the next run finds it.
"""

import json
import logging
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import transformers
import xxhash

from ...engine.errors import DataError
from ...engine.parallel.collectives import all_gather_object, collective_errors
from ..config.data import DataConfig
from .encode import WIDTH, Kind, encode_row
from .sources import Chunk, Source, open_source
from .token_cache import FORMAT, EncodedSamples, TokenCache, TokenCacheWriter, is_complete, is_undamaged

log = logging.getLogger(__name__)

FEW_CHUNKS = 64
"""Up to so many, tokenising is over before further processes have started."""
MOST_WORKERS = 16
NEWS_SECONDS = 15.0
"""Ranks that wait hear from those that tokenise at least so often: they must not run into their timeout."""


def load_token_caches(
    names: Sequence[str], tokenizer: Any, data: DataConfig, *, training: bool, kind: Kind = "completions"
) -> list[TokenCache]:
    """The tokenised samples of each source. Collective over all processes of the job.

    Args:
        names: entries of `data.train` or `data.eval`.
        tokenizer: the model's.
        data: settings.
        training: of which of the two.
        kind: what the trainer learns from.

    Raises:
        DataError: names the file, the row and what is wrong with it, on the rank that found it.
        RemoteError: on the others.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    root = cache_folder(data)
    sources: list[Source] = []
    folders: list[Path] = []
    with collective_errors():
        if rank == 0:
            # One rank says which data: file times may differ between machines. The tokenizer's own truncation and padding, which
            # its first call takes off, come off before the key is made of it.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            sources = [open_source(name, training=training) for name in names]
            shared = shared_key(tokenizer, data, kind)
            folders = [root / xxhash.xxh3_128_hexdigest(f"{shared} {s.name} {s.identity()}".encode()) for s in sources]
    folders = all_gather_object(folders)[0]
    # The first rank goes first; where the cache is no shared folder, the other machines' first ranks follow.
    for mine in (rank == 0, local_rank == 0 and rank != 0):
        encoder = Encoder(tokenizer, data, kind)
        work = _build(names, sources, folders, encoder, training) if mine else (None for _ in ())
        with closing(work):
            _together(work)
    return _open(folders)


def cache_folder(data: DataConfig) -> Path:
    """Where stores are kept."""
    if data.cache_dir is not None:
        return Path(data.cache_dir)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "drivetrain"


def shared_key(tokenizer: Any, data: DataConfig, kind: Kind) -> str:
    """What a store depends on beside its source: the tokenizer, the template, the settings, and the versions of both sides."""
    said = {
        "format": FORMAT,
        "transformers": transformers.__version__,
        "vocabulary": tokenizer.backend_tokenizer.to_str(),
        "special": {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "settings": [kind, data.format, data.turns, data.chat_template_kwargs],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True, default=str).encode())


def _open(folders: Sequence[Path]) -> list[TokenCache]:
    with collective_errors():
        try:
            stores = [TokenCache(folder) for folder in folders]
        except (OSError, ValueError, KeyError) as e:
            raise DataError(
                f"tokenized data in {folders[0].parent} cannot be read ({e}); set data.cache_dir to another folder"
            ) from e
    said = all_gather_object([store.digest for store in stores])
    differs = next((r for r, digests in enumerate(said) if digests != said[0]), None)
    if differs is not None:
        raise DataError(
            f"rank {differs} sees other data than rank 0: the files of data.train or data.eval differ between machines"
        )
    return stores


def _together(work: Generator[None, None, None]) -> None:
    """Run, while the ranks that have nothing to do wait without a timeout; an error is everybody's. Collective."""
    while True:
        done, start = False, time.monotonic()
        with collective_errors():
            while not done and time.monotonic() - start < NEWS_SECONDS:
                done = next(work, work) is work
        if all(all_gather_object(done)):
            return


def _build(
    names: Sequence[str], sources: list[Source], folders: Sequence[Path], encoder: "Encoder", training: bool
) -> Generator[None, None, None]:
    """Make the stores that are missing; pauses after every chunk."""
    for i, (name, folder) in enumerate(zip(names, folders, strict=True)):
        if is_complete(folder):
            if is_undamaged(folder):
                continue
            log.warning("tokenised data in %s is damaged; it is made again", folder)
            shutil.rmtree(folder)
        source = sources[i] if sources else open_source(name, training=training)
        try:
            writer = TokenCacheWriter(folder)
        except OSError as e:
            raise DataError(
                f"the folder for tokenised data, {folder.parent}, cannot be made: {e.strerror}; set data.cache_dir"
            ) from e
        try:
            yield from _write(source, writer, encoder)
        except OSError as e:
            raise DataError(f"tokenised data cannot be written to {folder.parent}: {e.strerror}; set data.cache_dir") from e
        finally:
            # Also where the run is interrupted; after a commit there is nothing left to remove.
            writer.abandon()


def _write(source: Source, writer: TokenCacheWriter, encoder: "Encoder") -> Iterator[None]:
    files: dict[str, int] = {}
    start = time.monotonic()
    with Bar(f"tokenising {source.name}") as bar:
        for chunk, encoded in _encoded(source.chunks(), encoder):
            encoded.files[:] = files.setdefault(chunk.file, len(files))
            writer.add(encoded, chunk.file)
            bar.advance(chunk.share, writer.samples)
            yield
    width = WIDTH[encoder.kind]
    writer.commit(list(files), width=width, compared=encoder.kind != "completions")
    count, seconds = writer.samples // width, time.monotonic() - start
    log.info("tokenised %s: %d samples, %d tokens, %.1f s", source.name, count, writer.tokens, seconds)


@dataclass(frozen=True)
class Encoder:
    """What turns rows into samples; it travels to the processes that do.

    Args:
        tokenizer: the model's.
        data: settings.
        kind: what the trainer learns from.
    """

    tokenizer: Any
    data: DataConfig
    kind: Kind = "completions"

    def chunk(self, chunk: Chunk) -> EncodedSamples:
        """All samples of a chunk.

        Raises:
            DataError: names the row.
        """
        found, equal = [], []
        for number, row in chunk.parsed():
            name = f"{chunk.file}:{number}"
            try:
                samples = encode_row(self.tokenizer, row, name, self.data, self.kind)
            except DataError:
                raise
            except Exception as e:  # of the tokenizer or of a template, which may raise anything
                raise DataError(f"{name}: {_why(row, e)}") from e
            if not samples:
                equal.append(number)
            numbered = self.kind == "completions" and len(samples) > 1
            found += [(0, number, part if numbered else 0, sample) for part, sample in enumerate(samples, 1)]
        return EncodedSamples.of(found, equal)


def _encoded(chunks: Iterator[Chunk], encoder: Encoder) -> Iterator[tuple[Chunk, EncodedSamples]]:
    """Chunks in order, tokenised here or in processes."""
    first = list(islice(chunks, FEW_CHUNKS + 1))
    workers = encoder.data.workers
    if workers is None:
        workers = 0 if len(first) <= FEW_CHUNKS else min(MOST_WORKERS, os.cpu_count() or 1)
    every = chain(first, chunks)
    if workers == 0:
        for chunk in every:
            yield chunk, encoder.chunk(chunk)
        return
    # Spawned, not forked: threads of this process, gloo's and the tokenizer's own, would be missing in a fork that needs them.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (encoder,)) as pool:
        ahead: deque[tuple[Chunk, Future[EncodedSamples]]] = deque()
        try:
            for chunk in every:
                ahead.append((chunk, pool.submit(_work, chunk)))
                if len(ahead) >= 4 * workers:
                    done, future = ahead.popleft()
                    yield done, future.result()
            for done, future in ahead:
                yield done, future.result()
        except BrokenProcessPool as e:
            raise DataError("a process that tokenises died (out of memory?); set data.workers to fewer, or to 0") from e
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _why(row: Any, error: Exception) -> str:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as e:
        return f"{e.object[e.start : e.end]!r} is half of a character, cut in two; no tokenizer can read it"
    return f"it cannot be tokenised: {type(error).__name__}: {error}"


_worker: Encoder


def _start_worker(encoder: Encoder) -> None:
    global _worker
    _worker = encoder
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    # A parent that is killed cannot tell its workers, which would wait for more for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(chunk: Chunk) -> EncodedSamples:
    return _worker.chunk(chunk)


class Bar:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, title: str) -> None:
        self._title, self._share, self._told = title, 0.0, time.monotonic()
        self._progress: Any = None

    def __enter__(self) -> "Bar":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[samples]} samples"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.add_task(self._title, total=1.0, samples=0)
            self._progress.start()
        return self

    def advance(self, share: float, samples: int) -> None:
        """A part of the whole is done, `samples` in all."""
        self._share += share
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._share, samples=samples)
        elif time.monotonic() - self._told > NEWS_SECONDS:
            log.info("%s: %.0f%%, %d samples", self._title, 100 * self._share, samples)
            self._told = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
