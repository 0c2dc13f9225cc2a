"""Tokenization of sources into token caches, in several processes and with a progress bar.

One process of each machine builds the caches for all of the machine's processes. The name of a cache is a hash of everything
that its contents depend on, so that later runs reuse it.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import transformers
import xxhash

from ...engine.errors import DataError, ModelError
from ...engine.parallel.collectives import all_gather_object, collective_errors
from ...engine.parallel.fork_pool import ForkPool, StartError
from ...engine.parallel.fork_server import ProcessEndedError
from ...media.decode import TooLargeError
from ..config.data import DataConfig, SourcesConfig
from .dataset import Budget, too_long_hint
from .encode import WIDTH, DataKind, encode_row, oddity
from .files import Chunk, small_chunks
from .length_bound import LimitedTokenizer, TooManyTokens
from .media import MediaReader, unused_media
from .python_data import PythonData
from .sources import DataSource, check_columns, hidden_column, open_source, rename_columns, warn_about_repeated
from .token_cache import FORMAT, EncodedSamples, TokenCache, TokenCacheWriter, is_complete, is_undamaged, media_files
from .turn_ends import TurnEnds

log = logging.getLogger(__name__)

FEW_CHUNKS = 64
"""Up to this many chunks, tokenization finishes before additional processes would have started."""
FEW_MEDIA_CHUNKS = 4
"""The same for the smaller chunks of a model that takes media."""
MAX_WORKERS = 16
NO_PYTHON = PythonData(rows={})
ENDLESS = (
    "%s: the chat template ends an assistant turn without a token at which generation stops (eos_token_id of generation_config.json), so the model does "
    "not learn to end its turns; use a template that writes such a token after each assistant turn, inside of {%% generation %%} marks if it has "
    "some (model.chat_template)"
)
"""The warning about assistant turns without an end, given the name of a sample."""
SYNC_SECONDS = 15.0
"""The longest time between two synchronizations with the waiting ranks, which would otherwise time out."""


def load_token_caches(
    names: Sequence[str],
    tokenizer: Any,
    data: DataConfig,
    *,
    training: bool,
    kind: DataKind = "completions",
    python: PythonData = NO_PYTHON,
    limit: Budget | None = None,
    ends: Collection[int] | None = None,
    media: MediaReader | None = None,
) -> list[TokenCache]:
    """Load the token cache of each source, building the missing ones. Collective over all processes of the job.

    Args:
        names: The entries of `data.train` or `data.eval`.
        tokenizer: The model's tokenizer.
        data: The data settings.
        training: Whether the entries are those of `data.train`.
        kind: The kind of data that the trainer uses.
        python: The rows in memory and the formatting function of a Python program.
        limit: The limit on the tokens of a document; None for no limit.
        ends: The ids of the tokens at which generation stops; None if the model does not generate.
        media: Reads media; None if the model takes none.

    Raises:
        DataError: A source cannot be used; the message names the file, the row and the problem. Raised on the rank that
            detects it.
        RemoteError: The same, on all other ranks.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    root = cache_folder(data)
    sources: list[DataSource] = []
    folders: list[Path] = []
    with collective_errors():
        if rank == 0:
            # One rank determines the keys, because file times may differ between machines. The tokenizer's own truncation and
            # padding, which its first call removes, are removed before the key is computed from it.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            check_columns(data.columns)
            sources = [_open_source(name, data, training, python) for name in names]
            warn_about_repeated(sources, "data.train" if training else "data.eval")
            shared = shared_key(tokenizer, data, kind, ends) + python.key() + ("" if media is None else media.key())
            folders = [root / xxhash.xxh3_128_hexdigest(f"{shared} {s.name} {s.identity()}".encode()) for s in sources]
    # The list of every rank but the first is empty.
    folders = all_gather_object(folders)[0]
    # Rank 0 builds first; if the cache is not in a shared folder, the first ranks of the other machines follow.
    for builds in (rank == 0, local_rank == 0 and rank != 0):
        encoder = Encoder(tokenizer, data, kind, python, limit, ends, media)
        # A rank that builds nothing has an empty generator; it only synchronizes.
        work = _build(names, sources, folders, encoder, training) if builds else (None for _ in ())
        # If another rank fails, this one gets the error between two chunks. Closing the
        # generator removes its unfinished cache.
        with closing(work):
            _run_collectively(work)
    return _open(folders)


def cache_folder(data: SourcesConfig) -> Path:
    """Return the folder of the token caches.

    Args:
        data: The data settings; `cache_dir` is used.
    """
    if data.cache_dir is not None:
        return Path(data.cache_dir)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "drivetrain"


def shared_key(tokenizer: Any, data: DataConfig, kind: DataKind, ends: Collection[int] | None = None) -> str:
    """Return a hash of everything except the source that a token cache depends on.

    These are the tokenizer, its template, the settings, and the versions of this code and of transformers.

    Args:
        tokenizer: The model's tokenizer.
        data: The data settings.
        kind: The kind of data that the trainer uses.
        ends: The ids of the tokens at which generation stops; None if the model does not generate.
    """
    # Length limits are not included: they are applied when a cache is opened, so changing them does not tokenize again.
    inputs = {
        "format": FORMAT,
        "transformers": transformers.__version__,
        "vocabulary": tokenizer.backend_tokenizer.to_str(),
        "special": {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "ends": None if ends is None else sorted(ends),
        "settings": [kind, data.format, data.turns, data.chat_template_kwargs, data.columns, data.txt, data.train_on],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs, sort_keys=True, default=str).encode())


def open_training_source(name: str, data: DataConfig, python: PythonData) -> DataSource:
    """Open an entry of `data.train` to be streamed.

    Args:
        name: The entry.
        data: The data settings.
        python: The rows in memory of a Python program.

    Raises:
        DataError: The entry cannot be used.
    """
    return _open_source(name, data, True, python)


def _open_source(name: str, data: DataConfig, training: bool, python: PythonData) -> DataSource:
    if name in python.rows:
        return DataSource(name, rows=python.rows[name])
    return open_source(
        name,
        training=training,
        every_column=python.formatting is not None,
        columns=data.columns,
        whole_text=data.txt == "file",
        streaming=training and data.streaming,
    )


def _open(folders: Sequence[Path]) -> list[TokenCache]:
    with collective_errors():
        try:
            caches = [TokenCache(folder) for folder in folders]
        except (OSError, ValueError, KeyError) as e:
            raise DataError(
                f"tokenized data in {folders[0].parent} cannot be read ({e}); set data.cache_dir to another folder"
            ) from e
    # Without a shared folder, each machine has read its own copy of the files. If these differ, ranks would assemble
    # different batches from the same indices.
    digests = all_gather_object([cache.digest for cache in caches])
    other_rank = next((rank for rank, rank_digests in enumerate(digests) if rank_digests != digests[0]), None)
    if other_rank is not None:
        raise DataError(
            f"rank {other_rank} has different data than rank 0: the files of data.train or data.eval differ between machines"
        )
    return caches


def _run_collectively(work: Generator[None, None, None]) -> None:
    """Run steps until all ranks are done; an error is raised on all ranks. Collective.

    Ranks without work synchronize with the others every `SYNC_SECONDS`, so that they do not time out.
    """
    while True:
        done, start = False, time.monotonic()
        with collective_errors():
            while not done and time.monotonic() - start < SYNC_SECONDS:
                # The generator serves as its own default value, which `next` returns only when it is exhausted.
                done = next(work, work) is work
        # A rank that is done keeps synchronizing until all are, because a collective needs every rank.
        if all(all_gather_object(done)):
            return


def _build(
    names: Sequence[str], sources: list[DataSource], folders: Sequence[Path], encoder: "Encoder", training: bool
) -> Generator[None, None, None]:
    """Build the missing token caches, yielding after every chunk."""
    endless = ""
    for i, (name, folder) in enumerate(zip(names, folders, strict=True)):
        if is_complete(folder):
            what = "is damaged" if not is_undamaged(folder) else _media_problem(folder, encoder.media, changes=bool(sources))
            if not what:
                continue
            log.warning("the tokenized data in %s %s; tokenizing it again", folder, what)
            shutil.rmtree(folder)
        # Only rank 0 has opened the sources; on another machine, the rank that builds opens them here.
        source = sources[i] if sources else _open_source(name, encoder.data, training, encoder.python)
        try:
            writer = TokenCacheWriter(folder)
        except OSError as e:
            raise DataError(
                f"the folder for tokenized data, {folder.parent}, cannot be created: {e.strerror}; set data.cache_dir"
            ) from e
        try:
            first = yield from _write(source, writer, encoder)
            endless = endless or first
        except OSError as e:
            raise DataError(f"tokenized data cannot be written to {folder.parent}: {e.strerror}; set data.cache_dir") from e
        finally:
            # This also runs if the run is interrupted; after a commit there is nothing left to remove.
            writer.abandon()
    if endless:
        log.warning(ENDLESS, endless)


def _media_problem(folder: Path, media: MediaReader | None, *, changes: bool) -> str:
    """Return why the media of a token cache no longer match the rows; an empty text if they do.

    Args:
        folder: The token cache.
        media: Reads media; None if the model takes none.
        changes: Whether to compare the media files with those that were read. Only the first rank does, since modification times may differ
            between machines.
    """
    if media is None:
        return ""
    if any(not media.store.path(key).is_file() for key in TokenCache(folder).media_keys()):
        return "has media that are no longer in the cache"
    for path, size, changed in media_files(folder) if changes else ():
        try:
            status = os.stat(path)
        except OSError:
            # The media are already processed, so the file itself is not needed.
            continue
        # As with the files of rows, contents are not compared, which would read all media at every start.
        if (status.st_size, status.st_mtime_ns) != (size, changed):
            return f"has media from files that have changed ({path})"
    return ""


def _write(source: DataSource, writer: TokenCacheWriter, encoder: "Encoder") -> Generator[None, None, str]:
    """Build a token cache, yielding after every chunk. Return the name of the first sample with an unended assistant turn, or an empty text."""
    files: dict[str, int] = {}
    odd: dict[str, str] = {}
    endless = ""
    start = time.monotonic()
    with Bar(f"tokenizing {source.name}") as bar:
        for chunk, encoded in _encode_chunks(source.chunks(), encoder):
            # Workers do not know the number of a file, and leave 0.
            encoded.files[:] = files.setdefault(chunk.file, len(files))
            writer.add(encoded, chunk.file)
            odd |= encoded.odd
            endless = endless or encoded.endless
            bar.advance(chunk.fraction, writer.samples)
            yield
    width = WIDTH[encoder.kind]
    writer.commit(list(files), width=width, compared=encoder.kind != "completions")
    if odd:
        place, what = next(iter(odd.items()))
        others = f" (and {len(odd) - 1} more rows)" if len(odd) > 1 else ""
        log.warning("%s: %s%s", place, what, others)
    count, seconds = writer.samples // width, time.monotonic() - start
    log.info("tokenized %s: %d samples, %d tokens, %.1f s", source.name, count, writer.tokens, seconds)
    return endless


@dataclass(frozen=True)
class Encoder:
    """A converter of rows to samples, which is sent to the worker processes.

    Args:
        tokenizer: The model's tokenizer.
        data: The data settings.
        kind: The kind of data that the trainer uses.
        python: The formatting function of a Python program; its rows are not used.
        limit: The limit on the tokens of a document, if exceeding it is an error. Documents that certainly exceed it are not tokenized.
        ends: The ids of the tokens at which generation stops; None if the model does not generate.
        media: Reads media; None if the model takes none.
    """

    tokenizer: Any
    data: DataConfig
    kind: DataKind = "completions"
    python: PythonData = NO_PYTHON
    limit: Budget | None = None
    ends: Collection[int] | None = None
    media: MediaReader | None = None

    @cached_property
    def _turn_ends(self) -> TurnEnds | None:
        return None if self.ends is None else TurnEnds.of(self.tokenizer, self.ends)

    @cached_property
    def _limited(self) -> Any:
        # With every other setting the cache must hold the whole document, because it serves runs with other limits too.
        if self.limit is None or self.data.too_long != "error":
            return self.tokenizer
        return LimitedTokenizer(self.tokenizer, self.limit.tokens)

    def chunk(self, chunk: Chunk) -> EncodedSamples:
        """Return all samples of a chunk.

        Raises:
            DataError: A row cannot be used; the message names it.
        """
        encoded, equal, large = [], [], []
        odd: dict[str, str] = {}
        for number, row in chunk.parsed():
            name = f"{chunk.file}:{number}"
            try:
                formatted = self.python.formatted(row, name)
                row = rename_columns(formatted, self.data.columns, name)
                samples = encode_row(self._limited, row, name, self.data, self.kind, self._turn_ends, self.media)
                unused = unused_media(row) if self.media is None else None
                what = oddity(row) or hidden_column(formatted, self.data.columns) or unused
                odd |= {name: what} if what else {}
            except TooLargeError as e:
                if self.data.too_large != "skip":
                    raise DataError(f"{name}: {e}, or skip") from e
                large.append(number)
                continue
            # The messages of these already name the row, or the row is not the cause, as with a full disk.
            except (DataError, ModelError, OSError):
                raise
            except TooManyTokens as e:
                assert self.limit is not None
                raise DataError(
                    f"{name} has at least {e.least} tokens, more than {self.limit.setting}; {too_long_hint(WIDTH[self.kind])}"
                ) from e
            except Exception as e:  # the tokenizer and a template may raise any exception
                raise DataError(f"{name}: {_reason(row, e)}") from e
            if not samples:
                equal.append(number)
            # The two samples of a preference row are sides, not turns.
            numbered = self.kind == "completions" and len(samples) > 1
            encoded += [(0, number, part if numbered else 0, sample) for part, sample in enumerate(samples, 1)]
        odd |= {
            f"{chunk.file}:{number}": f"the key {key!r} occurs twice; the last one is used" for number, key in chunk.doubled
        }
        files = {} if self.media is None else self.media.take_files()
        return EncodedSamples.of(encoded, equal, large, odd, files)


def _encode_chunks(chunks: Iterator[Chunk], encoder: Encoder) -> Iterator[tuple[Chunk, EncodedSamples]]:
    """Yield each chunk with its samples, in order, tokenized in this process or in worker processes."""
    few = FEW_CHUNKS
    if encoder.media is not None:
        # Their media are in memory as files, and take longer to process than texts.
        few, chunks = FEW_MEDIA_CHUNKS, chain.from_iterable(map(small_chunks, chunks))
    # One chunk more than the bound is enough to decide about processes, without reading all data.
    first = list(islice(chunks, few + 1))
    workers = encoder.data.workers
    if workers is None:
        workers = 0 if len(first) <= few else min(MAX_WORKERS, os.cpu_count() or 1)
    # Another process could not unpickle the formatting function.
    if not encoder.python.runs_anywhere:
        workers = 0
    all_chunks = chain(first, chunks)
    if workers == 0:
        for chunk in all_chunks:
            yield chunk, encoder.chunk(chunk)
        return
    # Do not send the rows in memory to the workers.
    sent = replace(encoder, python=replace(encoder.python, rows={}))
    # Do not fork this process: the child would lack its threads (gloo's and the tokenizer's), but need them.
    with ForkPool(workers, __name__, _start_worker, (sent,)) as pool:
        pending: deque[tuple[Chunk, Future[EncodedSamples]]] = deque()
        try:
            for chunk in all_chunks:
                pending.append((chunk, pool.submit(_work, chunk)))
                # Results are taken in order, so the queue holds chunks that finished early as well. The bound limits
                # their memory, and several chunks per worker keep the others busy while the oldest one takes long.
                if len(pending) >= 4 * workers:
                    oldest, future = pending.popleft()
                    yield oldest, future.result()
            for oldest, future in pending:
                yield oldest, future.result()
        except (ProcessEndedError, StartError) as e:
            raise DataError(
                f"a process that tokenizes died (out of memory?): {e}; set data.workers to a smaller number, or to 0"
            ) from e


def _reason(row: Any, error: Exception) -> str:
    # Look for an unpaired surrogate first, which the error of the tokenizer does not name.
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as e:
        return f"{e.object[e.start : e.end]!r} is an unpaired surrogate, which no tokenizer can read"
    return f"it cannot be tokenized: {type(error).__name__}: {error}"


# Set once in each worker process, so that the tokenizer is not pickled again with every chunk.
_worker: Encoder


def _start_worker(encoder: Encoder) -> None:
    global _worker
    _worker = encoder


def _work(chunk: Chunk) -> EncodedSamples:
    return _worker.chunk(chunk)


class Bar:
    """A progress bar on a terminal; otherwise, an occasional log line."""

    def __init__(self, title: str) -> None:
        self._title, self._fraction, self._last_report = title, 0.0, time.monotonic()
        self._progress: Any = None

    def __enter__(self) -> "Bar":
        # On standard error, since standard output may be the result of a command.
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

    def advance(self, fraction: float, samples: int) -> None:
        """Report progress.

        Args:
            fraction: The fraction of the work that has been done since the last call.
            samples: The total number of samples so far.
        """
        self._fraction += fraction
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._fraction, samples=samples)
        elif time.monotonic() - self._last_report > SYNC_SECONDS:
            log.info("%s: %.0f%%, %d samples", self._title, 100 * self._fraction, samples)
            self._last_report = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
