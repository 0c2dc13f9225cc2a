"""Conformance checks for generators: `drivetrain conformance-rollout GENERATOR [setting=value ...]`."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers.utils.logging import disable_progress_bar

from ...engine.errors import ConfigError
from ...engine.tiny_configs import FAMILIES
from ..options import RolloutConfig
from ..registry import generator_class
from .case import Case, GeneratorConformanceError
from .checks import CHECKS


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse the settings of a generator.

    Args:
        words: Fields of `RolloutConfig` with a value, as in `["max_batch_size=4", "options.tp=2"]`.

    Raises:
        ConfigError: A word is not such a setting.
    """
    settings: dict[str, Any] = {}
    field_names = {field.name for field in fields(RolloutConfig)} - {"model", "generator", "options"}
    for word in words:
        name, separator, value = word.partition("=")
        target, field_name = settings, name
        if name.startswith("options."):
            target, field_name = settings.setdefault("options", {}), name.removeprefix("options.")
        elif name not in field_names:
            raise ConfigError(
                f"{word!r} is not a setting with a value; the settings are {', '.join(sorted(field_names))}, options.NAME"
            )
        if not separator or not field_name:
            raise ConfigError(f"{word!r} has no value; write {name}=VALUE")
        # YAML, so that numbers and booleans get their types, as in a configuration file.
        target[field_name] = yaml.safe_load(value)
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code, which is 0 if all of them pass."""
    parser = argparse.ArgumentParser(
        prog="drivetrain conformance-rollout", description="Check that a generator does what its interface says."
    )
    parser.add_argument("generator", help="its name, or module:class")
    parser.add_argument("settings", nargs="*", help="settings of the generator, e.g. max_batch_size=4 options.NAME=VALUE")
    parser.add_argument(
        "--family",
        default="qwen3",
        choices=sorted(FAMILIES),
        metavar="FAMILY",
        help="model family of the tiny model (docs/families.md)",
    )
    parser.add_argument("--tied", action="store_true", help="share the weights of embedding and head")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(CHECKS),
        metavar="CHECK",
        help=f"run only these checks: {', '.join(sorted(CHECKS))}",
    )
    args = parser.parse_args(argv)
    try:
        # A wrong name is an error of the command line, not a failed check.
        generator_class(args.generator)
        settings = {"generator": args.generator, "max_batch_total_tokens": 4096, **parse_settings(args.settings)}
    except (ConfigError, yaml.YAMLError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    disable_progress_bar()
    failed = 0
    names = args.only or list(CHECKS)
    with tempfile.TemporaryDirectory(prefix="drivetrain-conformance-") as folder:
        case = Case(Path(folder), settings, args.family, tie_word_embeddings=args.tied)
        for name in names:
            error = ""
            try:
                CHECKS[name](case)
            except Exception as e:  # a generator may fail in any way, and the next check must still run
                error = str(e) if isinstance(e, GeneratorConformanceError) else f"{type(e).__name__}: {e}"
            failed += bool(error)
            print(f"{'FAIL' if error else 'ok':4}  {name:18} {error}".rstrip(), flush=True)
    print(f"{len(names) - failed} checks passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
