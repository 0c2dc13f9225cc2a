"""`drivetrain template check MODEL`: check whether a chat template supports training on multi-turn conversations.

Renders conversations of each kind of turn up to a completion of the policy, with it, and with the messages after it. For each kind, it
reports whether the next prompt begins with the text and the tokens of the policy's turn:

  safe       its tokens do
  splice     its text does, its tokens do not: keep the policy's own tokens, and tokenize only the following messages
  rewritten  its text does not: the next turn is of another conversation, and training would use text that the policy did not write
  refused    the template rejects such a conversation

  drivetrain template check MODEL
  drivetrain template check MODEL --template FILE.jinja --variables '{"enable_thinking": false}'

The exit code is 1 if a kind of turn is rewritten, 0 otherwise.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ...engine.config import ModelConfig
from ...engine.errors import ConfigError
from ...engine.parallel.process import report_failure


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    words = list(argv)
    if words[:1] != ["check"] and not ({"-h", "--help"} & {*words}):
        problem = f"unknown command {words[0]!r}" if words else "a command is missing"
        print(f"error: drivetrain template: {problem}; usage: drivetrain template check MODEL", file=sys.stderr)
        return 2
    arguments = _parser().parse_args(words[words[:1] == ["check"] :])
    try:
        return _check(arguments)
    except BrokenPipeError:
        raise
    except Exception as e:  # reported as one line, like those of the trainers
        return report_failure(e)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain template check",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder with a tokenizer, or a Hugging Face name")
    parser.add_argument("--template", help="file with a Jinja chat template instead of the tokenizer's")
    parser.add_argument("--variables", default="{}", help="variables of the template, as JSON: '{\"enable_thinking\": false}'")
    parser.add_argument("--conversations", type=int, default=40, help="conversations of each kind of turn (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the conversations (default: 0)")
    return parser


def _check(arguments: argparse.Namespace) -> int:
    if arguments.conversations < 1:
        raise ConfigError(f"--conversations={arguments.conversations}; it must be at least 1")
    variables = _variables(arguments.variables)
    # Imported lazily, so that --help and errors about mistyped options do not wait for torch.
    check = import_module(".check", __package__)
    tokenizers = import_module("...engine.hf.tokenizer", __package__)
    turn_ends = import_module("..data.turn_ends", __package__)
    model = ModelConfig(path=arguments.model, chat_template=arguments.template)
    tokenizer = tokenizers.load_tokenizer(model)
    if not tokenizer.chat_template:
        raise ConfigError(f"{arguments.model} has no chat template; give one with --template")
    ends = turn_ends.TurnEnds.of(tokenizer, turn_ends.ends_to_learn(model) or ())
    verdicts = check.check_template(
        tokenizer, ends=ends, conversations=arguments.conversations, seed=arguments.seed, variables=variables
    )
    width = max(len(one.kind) for one in verdicts)
    for one in verdicts:
        print(f"{one.kind:<{width}}  {one.verdict:<9}  {one.detail}".rstrip())
    rewritten = [one for one in verdicts if one.verdict == "rewritten"]
    if rewritten:
        print(f"\nfor example, with {rewritten[0].kind}: {json.dumps(rewritten[0].example, ensure_ascii=False)}")
    return 1 if rewritten else 0


def _variables(text: str) -> dict[str, Any]:
    try:
        variables = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"--variables={text!r} is not JSON: {e}") from None
    if not isinstance(variables, dict):
        raise ConfigError(f"--variables={text!r}; it must be a JSON object, such as '{{\"enable_thinking\": false}}'")
    return variables
