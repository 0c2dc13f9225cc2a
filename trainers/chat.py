"""`drivetrain chat`: talk to a model, a run or a checkpoint in the terminal. Starts the server, and the chat client of transformers on it.

drivetrain chat MODEL|RUN|CHECKPOINT [--system-prompt TEXT] [max_new_tokens=100 temperature=0.7 ...] [-- arguments of drivetrain serve]
"""

import argparse
import difflib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CHAT_SETTINGS: dict[str, type] = {"max_new_tokens": int, "temperature": float, "top_p": float, "top_k": int, "do_sample": bool}
"""The generation settings of a chat and their types."""
_SERVED = " is served at "
_END_S = 15.0
_CLIENT = "--client"
"""The first argument of the process that is the chat client."""


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the user leaves; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == [_CLIENT]:
        return _run_client(words[1:])
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="drivetrain chat", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "source", metavar="MODEL|RUN|CHECKPOINT", help="a model folder, a Hub name, the folder of a run, or a checkpoint"
    )
    parser.add_argument("--system-prompt", default=None, help="system prompt of the conversation")
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="name=value", help="generation settings, such as temperature=0.7"
    )
    args = parser.parse_intermixed_args(words[:at])
    if problem := next(filter(None, map(_problem_of, args.settings)), None):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    name = Path(args.source).resolve().name
    # Port 0 lets the system choose a free port; the server prints it when it is ready.
    serve = [sys.executable, "-m", f"{__package__.partition('.')[0]}.cli", "serve", args.source, "--name", name, "--port", "0"]
    # A model that cannot chat, such as a reward model, is refused by the server instead of served as an embedding model.
    serve += ["--task", "generate"]
    with subprocess.Popen([*serve, *words[at + 1 :]], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = _address(server)
            if url is None:
                return server.wait() or 1
            chat = [sys.executable, "-m", f"{__package__}.chat", _CLIENT]
            if args.system_prompt is not None:
                chat += ["--system-prompt", args.system_prompt]
            # In offline mode, the client would refuse any address except the Hub's, even one on this machine.
            environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
            return subprocess.run([*chat, name, url, *args.settings], check=False, env=environment).returncode
        except KeyboardInterrupt:
            return 130
        finally:
            server.terminate()
            # A server that does not end by itself is killed.
            with suppress(subprocess.TimeoutExpired):
                server.wait(_END_S)
            server.kill()


def _problem_of(word: str) -> str | None:
    """Return what is wrong with a generation setting of the command line; None if nothing is."""
    name, _, value = word.partition("=")
    kind = CHAT_SETTINGS.get(name)
    if kind is None:
        close_matches = difflib.get_close_matches(name, CHAT_SETTINGS, n=1)
        hint = f"did you mean {close_matches[0]!r}? " if close_matches else ""
        return f"unknown setting {word!r}; {hint}the settings of a chat are {', '.join(CHAT_SETTINGS)}"
    if kind is bool:
        return None if value.lower() in ("true", "false") else f"{word}; it must be true or false"
    try:
        kind(value)
    except ValueError:
        return f"{word}; it must be {'an integer' if kind is int else 'a number'}"
    return None


def _address(server: "subprocess.Popen[str]") -> str | None:
    """Return the address that the server prints when it is ready; None if the server exits before that."""
    assert server.stdout is not None
    for line in server.stdout:
        if _SERVED in line:
            return line.rpartition(" ")[2].strip()
        print(line, end="", flush=True)
    return None


def _run_client(words: Sequence[str]) -> int:
    """Run the chat client of transformers; the end of the input ends the chat, like `!exit`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("url")
    parser.add_argument("--system-prompt", default=None)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_intermixed_args(list(words))
    from transformers.cli.chat import Chat

    try:
        Chat(args.name, args.url, generate_flags=args.settings, system_prompt=args.system_prompt)
    except EOFError:
        # The prompt has no line break of its own at the end of the input.
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
