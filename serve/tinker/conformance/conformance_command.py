"""`drivetrain conformance-tinker`: check whether a training service computes what Tinker's protocol specifies.

drivetrain conformance-tinker URL --model NAME [--full] [--api-key KEY] [--other-key KEY] [--only CHECK ...]
    [--tokenizer FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ....engine.errors import ModelError
from ...openai.text import Texts
from .checks import CHECKS, SEVERAL_MODELS, VOCABULARY
from .client import Connection, Decode, Send, ServiceConformanceError, send_to


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code, which is 0 if all of them pass."""
    parser = argparse.ArgumentParser(prog="drivetrain conformance-tinker", description=str(__doc__).splitlines()[0])
    parser.add_argument("url", help="the address of the service, without /api/v1")
    parser.add_argument(
        "--model", required=True, help="the name of the model that the service trains; it must have at least 64 tokens"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="the service trains all weights of one model at a time (LoRA rank 0); leaves out the checks that need several models: "
        + ", ".join(sorted(SEVERAL_MODELS)),
    )
    parser.add_argument("--api-key", default="tml-a-user-of-conformance", help="the API key of a user")
    parser.add_argument("--other-key", default="tml-another-user-of-conformance", help="the API key of another user")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), help="run only these checks")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="the folder of the model's tokenizer; without it, stop strings are not checked",
    )
    args = parser.parse_args(argv)
    names = args.only or [name for name in CHECKS if not (args.full and name in SEVERAL_MODELS)]
    if args.full and not SEVERAL_MODELS.isdisjoint(names):
        parser.error(
            f"--only {' '.join(names)}: {', '.join(sorted(SEVERAL_MODELS))} needs several models at a time; leave it out or leave out --full"
        )
    try:
        decode = None if args.tokenizer is None else Texts(args.tokenizer).decode
    except ModelError as e:
        parser.error(f"--tokenizer: {e}")
    failed = run(send_to(args.url), args.model, (args.api_key, args.other_key), names, full=args.full, decode=decode)
    return 1 if failed else 0


def run(
    send: Send,
    model: str,
    keys: tuple[str, str],
    names: Sequence[str],
    *,
    full: bool = False,
    decode: Decode | None = None,
) -> list[str]:
    """Run checks, and print a line for each; return the names of the failed checks.

    Args:
        send: Sends a request to the service.
        model: The name of the model.
        keys: The API keys of two users.
        names: The names of the checks.
        full: Whether the service trains all weights of one model at a time.
        decode: Returns the text of tokens; None to leave out the check of stop strings.
    """
    failed: list[str] = []
    lacks_ids = False
    for name in names:
        error = ""
        users: list[Connection] = []
        try:
            # Each check has new sessions, so that checks do not affect each other.
            users = [Connection(send, key, model, full=full, decode=decode) for key in keys]
            CHECKS[name](*users)
        except Exception as e:  # a service may fail in any way, and the next check must still run
            error = str(e) if isinstance(e, ServiceConformanceError) else f"{type(e).__name__}: {e}"
        lacks_ids = lacks_ids or "token id" in error
        for user in users:
            user.finish()
        failed += [name] if error else []
        print(f"{'FAIL' if error else 'ok':4}  {name:14} {error}".rstrip(), flush=True)
    print(f"{len(names) - len(failed)} checks passed, {len(failed)} failed")
    if decode is None and "stops" in names:
        print("stop strings were not checked; pass --tokenizer with the folder of the model's tokenizer")
    if lacks_ids:
        print(f"the checks use token ids below {VOCABULARY}; run them with a model of at least {VOCABULARY} tokens")
    return failed


if __name__ == "__main__":
    sys.exit(main())
