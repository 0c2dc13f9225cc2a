"""`drivetrain gateway`: a policy for agents of any kind, whose exact tokens are recorded.

drivetrain gateway MODEL|RUN|CHECKPOINT [--host 127.0.0.1] [--port 8100] [--temperature 1.0] [--max-turns N] [--max-tokens N] [--max-seconds S]

POST /sessions starts a session: an agent talks to its `base_url`, and a trainer ends it with a reward and gets the tokens.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...checkpoint_tools.model_source import model_folder
from ...engine.config import ModelConfig
from ...engine.errors import DrivetrainError
from ...engine.hf.generation import end_tokens
from ...trainers.data.conversation_tokens import ConversationTokens
from ...trainers.data.turn_ends import TurnEnds
from ..openai.model import ServedModel
from ..openai.serve_command import add_common_arguments, check_common_arguments, serve
from ..openai.settings import KEY_VARIABLE, ServeSettings
from .app import GatewaySettings, create_gateway
from .session import SessionLimits


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process receives a signal to stop; return the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = _settings(args)
        with model_folder(args.source, lambda text: print(text, flush=True)) as folder:
            config = ModelConfig(path=str(folder), trust_remote_code=args.trust_remote_code)
            return asyncio.run(
                serve(
                    args,
                    settings.service,
                    folder,
                    lambda model, replicas: create_gateway(settings, model, replicas, _tokens(model, config)),
                    path="/sessions",
                )
            )
    except KeyboardInterrupt:
        # 128 + SIGINT, as shells report it.
        return 130
    except (DrivetrainError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def _tokens(model: ServedModel, config: ModelConfig) -> ConversationTokens:
    tokenizer = model.texts.tokenizer
    return ConversationTokens(tokenizer, TurnEnds.of(tokenizer, end_tokens(config)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drivetrain gateway", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    add, limits = parser.add_argument, SessionLimits()
    add_common_arguments(parser)
    parser.set_defaults(port=8100)
    add("--api-key", action="append", default=[], metavar="KEY", help=f"a key for opening sessions; or {KEY_VARIABLE}")
    add("--temperature", type=float, default=1.0, metavar="T", help="the sampling temperature of all completions")
    add("--turn-tokens", type=int, default=4096, metavar="N", help="maximum number of tokens of a completion")
    add("--max-turns", type=int, default=limits.turns, metavar="N", help="maximum number of completions in a session")
    add(
        "--max-tokens",
        type=int,
        default=limits.tokens,
        metavar="N",
        help="maximum number of tokens of all completions in a session",
    )
    add(
        "--max-seconds",
        type=float,
        default=limits.seconds,
        metavar="S",
        help="maximum duration of a session, in seconds",
    )
    add("--max-sessions", type=int, default=4096, metavar="N", help="maximum number of open sessions")
    return parser


def _settings(args: argparse.Namespace) -> GatewaySettings:
    check_common_arguments(args)
    return GatewaySettings(
        service=ServeSettings(
            name=args.name or Path(args.source).resolve().name,
            host=args.host,
            port=args.port,
            api_keys=(*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])),
            allowed_hosts=tuple(args.allowed_host),
            max_body_mib=args.max_body_mib,
        ),
        limits=SessionLimits(turns=args.max_turns, tokens=args.max_tokens, seconds=args.max_seconds),
        most_sessions=args.max_sessions,
        temperature=args.temperature,
        turn_tokens=args.turn_tokens,
    )


if __name__ == "__main__":
    sys.exit(main())
