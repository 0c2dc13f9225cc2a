"""Reads data as a trainer would, and prints its statistics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ...engine.errors import ConfigError, DataError, disk_error
from ...engine.hf.tokenizer import load_tokenizer
from ...engine.parallel.process_groups import close_distributed, init_distributed
from ..config.runs import RunConfig
from ..data.encode import DataKind, mark_supervised
from ..data.media import MediaReader
from ..data.sources import open_source, rename_columns
from ..data.token_cache import TokenCache
from ..data.tokenize import cache_folder, load_token_caches
from ..data.turn_ends import ends_to_learn
from ..loop.logs import configure_logging
from .facts import Facts, histogram

BINS = 20
BAR = "█"


def show(config: RunConfig, kind: DataKind | None, *, samples: int, picture: Path | None) -> None:
    """Print samples, lengths, duplicates and overlaps, and draw the histogram.

    Args:
        config: The settings of the trainer that would read the data.
        kind: The kind of data that it trains on; None for that of the first row.
        samples: The number of samples to print.
        picture: The image file; None for no image.

    Raises:
        DrivetrainError: The data or the tokenizer cannot be used, or the image cannot be written.
    """
    configure_logging()
    if picture is not None and not picture.absolute().parent.is_dir():
        raise ConfigError(
            f"--png {picture}: the folder {picture.absolute().parent} does not exist; create it, or give another path"
        )
    _limit(config)
    tokenizer = load_tokenizer(config.model)
    ends = ends_to_learn(config.model)
    media = MediaReader.of(config.model, config.data, tokenizer, cache_folder(config.data))
    kind = kind or kind_of(config)
    # Loading is collective, so it needs a process group even for this single process.
    init_distributed()
    try:
        train = load_token_caches(config.data.train, tokenizer, config.data, training=True, kind=kind, ends=ends, media=media)
        held_out = (
            load_token_caches(config.data.eval, tokenizer, config.data, training=False, kind=kind, ends=ends, media=media)
            if config.data.eval
            else []
        )
    finally:
        close_distributed()
    out = Console(highlight=False, soft_wrap=True)
    for title, caches, names in (("train", train, config.data.train), ("eval", held_out, config.data.eval)):
        if caches and not any(len(cache) for cache in caches):
            raise DataError(
                f"no sample of {', '.join(names)} is left to train on: all of its pairs have equal sides ({title})"
            )
    train_facts = Facts.of(train)
    _print_samples(out, tokenizer, train, samples, media)
    _print_facts(out, config, "train", config.data.train, train_facts, train)
    if held_out:
        facts = Facts.of(held_out)
        _print_facts(out, config, "eval", config.data.eval, facts, held_out)
        same, prompts, first = train_facts.overlap(facts)
        which = f"; the first is {first}" if first else ""
        out.print()
        out.print(
            f"overlap      {_share(same, len(facts))} of eval's samples are also in train, {_share(prompts, len(facts))} others have a prompt "
            f"of train{which}",
            markup=False,
        )
    if picture is not None:
        _draw(picture, config, {"train": train_facts, **({"eval": facts} if held_out else {})})
        out.print(f"picture      {picture}", markup=False)


def kind_of(config: RunConfig) -> DataKind:
    """Return the kind of data that the first row has.

    Args:
        config: The settings, of which only `data` is used.

    Raises:
        DataError: There is no row.
    """
    source = open_source(
        config.data.train[0], training=True, columns=config.data.columns, whole_text=config.data.txt == "file"
    )
    chunk = next(iter(source.chunks()))
    number, row = next(iter(chunk.parsed()))
    row = rename_columns(row, config.data.columns, f"{chunk.file}:{number}")
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return "pairs"
    return "unpaired" if row.get("label") is not None and row.get("completion") is not None else "completions"


def _limit(config: RunConfig) -> tuple[int, str]:
    most, max_length = config.engine.micro_batch.max_tokens, config.data.max_length
    if max_length is None:
        return most, f"engine.micro_batch.max_tokens={most}"
    if max_length > most:
        raise ConfigError(
            f"data.max_length={max_length} is more than engine.micro_batch.max_tokens={most}: a sample of that length would not fit in any "
            "micro-batch; raise the budget or lower the length"
        )
    return max_length, f"data.max_length={max_length}"


def _print_samples(out: Console, tokenizer: Any, caches: Sequence[TokenCache], most: int, media: MediaReader | None) -> None:
    total = sum(len(cache) // cache.width for cache in caches)
    count = min(most, total)
    # Spread over all sources, since neighboring samples may be alike.
    chosen = [i * total // count for i in range(count)]
    if count:
        out.print("samples, with the supervised parts between « and »:")
    start = 0
    for cache in caches:
        size = len(cache) // cache.width
        for index in (i - start for i in chosen if start <= i < start + size):
            for document in range(index * cache.width, (index + 1) * cache.width):
                sample = cache.sample(document, 0, int(cache.lengths[document]))
                learned = sum(sample.supervised)
                out.print(f"  {sample.name}: {len(sample.ids)} tokens, {learned} supervised", markup=False)
                out.print(f"    {mark_supervised(tokenizer, sample)}", markup=False)
                for span in sample.media:
                    assert media is not None
                    summary = media.store.summary(span.key)
                    of = "" if summary is None else f" of {summary.size}"
                    out.print(f"    {span.key.kind}{of}: {span.last - span.first} tokens", markup=False)
        start += size


def _print_facts(
    out: Console, config: RunConfig, title: str, names: Sequence[str], facts: Facts, caches: Sequence[TokenCache]
) -> None:
    limit, setting = _limit(config)
    unit = "pairs" if caches[0].width == 2 else "samples"
    out.print()
    sources = "" if len(names) == 1 else f" ({', '.join(f'{n}: {size}' for n, size in zip(names, facts.sizes, strict=True))})"
    out.print(f"{title:12} {len(facts)} {unit}{sources}", markup=False)
    out.print(f"tokens       {facts.tokens}, {_share(facts.supervised, facts.tokens)} of them supervised")
    split = sum(cache.split_chats for cache in caches)
    if split:
        out.print(f"chats        {split}, with each assistant turn as a separate sample (data.turns={config.data.turns})")
    out.print(f"lengths      {', '.join(f'{name} {value}' for name, value in facts.quantiles().items())}")
    most = config.engine.micro_batch.max_tokens
    longer = facts.longer_than(limit, most)
    both = f", or together more than {most}" if caches[0].width == 2 else ""
    out.print(f"too long     {_share(longer, len(facts))} have more than {setting} tokens{both}")
    repeated, first = facts.duplicates()
    out.print(f"duplicates   {_share(repeated, len(facts))} equal an earlier one{f': {first}' if first else ''}", markup=False)
    for kind, tokens in facts.media.items():
        if len(tokens):
            share = f"{tokens.sum()} tokens ({tokens.sum() / facts.tokens:.1%})"
            each = f"{tokens.min()} to {tokens.max()} each, {tokens.mean():.0f} on average"
            out.print(f"{kind + 's':12} {len(tokens)}, with {share}: {each}", markup=False)
    if facts.large[0]:
        out.print(f"too large    {facts.large[0]} rows are left out, the first is {facts.large[1]}", markup=False)
    if facts.equal[0]:
        out.print(f"equal sides  {facts.equal[0]} pairs are left out, the first is {facts.equal[1]}", markup=False)
    _print_histogram(out, facts, limit)


def _print_histogram(out: Console, facts: Facts, limit: int) -> None:
    rows = histogram(facts.lengths, BINS)
    most, width = max(n for _, _, n in rows), len(str(rows[-1][1]))
    columns = max(10, min(60, out.width - 2 * width - 16))
    for first, last, count in rows:
        # A bin that is not empty has at least one character.
        bar = BAR * max(round(columns * count / most), count > 0)
        mark = " <- limit" if first <= limit <= last else ""
        lengths = f"{first:>{width}}" if first == last else f"{first:>{width}}-{last:<{width}}"
        out.print(f"  {lengths} {count:>8} {bar}{mark}".rstrip(), markup=False)


def _share(part: int, total: int) -> str:
    return f"{part} ({part / total:.1%})" if total else "0"


def _draw(picture: Path, config: RunConfig, facts: dict[str, Facts]) -> None:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shortest = min(int(f.lengths.min()) for f in facts.values())
    longest = max(int(f.lengths.max()) for f in facts.values())
    edges = np.linspace(shortest, longest + 1, min(50, longest + 1 - shortest) + 1)
    for title, of in facts.items():
        axes.hist(
            of.lengths, bins=edges.tolist(), histtype="stepfilled" if title == "train" else "step", alpha=0.8, label=title
        )
    limit, setting = _limit(config)
    if limit <= longest:
        axes.axvline(limit, color="black", lw=1, ls="--", label=setting)
    axes.set(xlabel="tokens", ylabel="documents")
    axes.legend()
    figure.suptitle(", ".join(config.data.train))
    try:
        figure.savefig(picture, dpi=120, format="png")
    except OSError as e:
        raise disk_error(f"the image {picture}", e) from e
