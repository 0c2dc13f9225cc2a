"""Fails on a tracked binary and on a tracked file over 300 kB; pictures of the docs may be both, and recorded checkpoints binary."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LARGEST = 300_000
PICTURES = (".png", ".svg", ".jpg")
RECORDED = "tests/recorded/formats/"


def unwanted(root: Path, names: Iterable[str]) -> list[str]:
    """What is wrong with these files, a line each.

    Args:
        root: folder that the names are relative to.
        names: of the files.
    """
    lines = []
    for name in names:
        path = root / name
        if not path.is_file() or (name.startswith("docs/") and name.endswith(PICTURES)):
            continue
        with open(path, "rb") as file:
            binary = b"\0" in file.read(8192)
        if binary and not name.startswith(RECORDED):
            lines.append(f"{name} is a binary file; leave it out of the repository (.gitignore)")
        elif (size := path.stat().st_size) > LARGEST:
            lines.append(f"{name} has {size} bytes, more than {LARGEST}; make it smaller, or leave it out of the repository")
    return lines


def main() -> int:
    """Look at all tracked files; 1 when one of them should not be there."""
    root = Path(__file__).parent.parent
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        print("not a git checkout: tracked files are not looked at")
        return 0
    lines = unwanted(root, filter(None, listed.stdout.split("\0")))
    print("\n".join(lines) or "no tracked binary, no tracked file over 300 kB")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
