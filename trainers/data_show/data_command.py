"""`drivetrain data show SOURCE ... --model MODEL`: inspect data as a trainer would read it, before training on it.

Prints a few samples with their supervised parts between « and », the lengths with a histogram (also as an image), samples longer than
data.max_length, duplicates, and overlaps of evaluation data with the training data. Settings of the trainer follow as key=value:

  drivetrain data show train.jsonl --model MODEL --eval eval.jsonl data.max_length=4096
  drivetrain data show pairs/ --model MODEL --trainer dpo data.columns={chosen: better}
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ...engine.errors import ConfigError
from ...engine.parallel.process import report_failure
from ..config.parse import parse
from ..config.runs import DPOConfig, RMConfig, RunConfig, SFTConfig

CONFIGS: dict[str, type[RunConfig]] = {"sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig, "kto": DPOConfig}
PICTURE = "data-lengths.png"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    words = list(argv)
    if words[:1] != ["show"] and not ({"-h", "--help"} & {*words}):
        problem = f"unknown command {words[0]!r}" if words else "a command is missing"
        print(f"error: drivetrain data: {problem}; usage: drivetrain data show SOURCE ... --model MODEL", file=sys.stderr)
        return 2
    arguments = _parser().parse_intermixed_args(words[words[:1] == ["show"] :])
    try:
        sources, settings = _separated(arguments.sources)
        config = _config(arguments, sources, settings)
        kind = {"auto": None, "sft": "completions", "kto": "unpaired"}.get(arguments.trainer, "pairs")
        picture = None if arguments.no_png else Path(arguments.png)
        # Imported lazily, so that --help and errors about mistyped settings do not wait for torch.
        import_module(".show", __package__).show(config, kind, samples=arguments.samples, picture=picture)
    except BrokenPipeError:
        raise
    except Exception as e:  # reported as one line, like those of the trainers
        return report_failure(e)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain data show",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("sources", nargs="*", metavar="SOURCE|key=value", help="data as in data.train, and settings")
    parser.add_argument("--model", required=True, help="the model whose tokenizer and chat template are used")
    parser.add_argument("--eval", action="append", default=[], metavar="SOURCE", help="evaluation data; may be repeated")
    parser.add_argument(
        "--trainer",
        choices=("auto", *CONFIGS),
        default="auto",
        help="the trainer that would read the data; auto: dpo if the rows have chosen and rejected, kto if they have a label, otherwise sft",
    )
    parser.add_argument("--samples", type=int, default=3, help="the number of samples to print (3)")
    parser.add_argument("--png", default=PICTURE, metavar="FILE", help=f"the image file of the histogram ({PICTURE})")
    parser.add_argument("--no-png", action="store_true", help="do not write an image")
    return parser


def _separated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    settings = [word for word in words if "=" in word and "/" not in word.partition("=")[0] and not os.path.exists(word)]
    return [word for word in words if word not in settings], settings


def _config(arguments: argparse.Namespace, sources: Sequence[str], settings: Sequence[str]) -> RunConfig:
    if not sources:
        raise ConfigError("no data is given; name files, folders or Hub datasets, as in data.train")
    if arguments.samples < 0:
        raise ConfigError(f"--samples {arguments.samples}; it must be 0 or more")
    for name in ("data.train", "data.eval", "model.path"):
        if any(word.startswith(f"{name}=") for word in settings):
            other = {"data.train": "SOURCE", "data.eval": "--eval SOURCE", "model.path": "--model MODEL"}[name]
            raise ConfigError(f"{name} is not accepted here; give {other} instead")
    config = parse(CONFIGS.get(arguments.trainer, SFTConfig), settings)
    data = replace(config.data, train=tuple(sources), eval=tuple(arguments.eval))
    data.check()
    return replace(config, data=data, model=replace(config.model, path=arguments.model))
