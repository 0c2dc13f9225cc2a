"""Draw the diagrams of the pages as pictures, so that the site needs no network: `python -m docs.draw`.

A diagram is written as Mermaid in its page, which GitHub draws by itself. The site shows `pictures/diagram-HASH.svg` instead, whose name is a
hash of the text; `docs/hooks.py` puts it there. This command draws the missing ones with Mermaid's own program (`npm install
@mermaid-js/mermaid-cli`, `mmdc` in PATH) and Chromium, and removes those that no page has any more.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = {"theme": "neutral", "htmlLabels": False, "flowchart": {"htmlLabels": False}, "fontFamily": "sans-serif"}
"""Labels are text: a picture may not show the HTML that Mermaid writes otherwise."""


TAG = re.compile(r"</?(?!br/>)\w+[^<>\n]*>")
"""HTML other than a line break, which GitHub and a picture show as text."""


def picture_of(diagram: str) -> str:
    """Return the name of the picture of a diagram, given its text."""
    return f"diagram-{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"


def diagrams() -> dict[str, str]:
    """Return the text of every diagram of the pages, by the name of its picture."""
    return {picture_of(text): text for page in sorted(DOCS.glob("*.md")) for text in FENCE.findall(page.read_text())}


def main() -> int:
    """Draw what is missing."""
    wanted = diagrams()
    for old in PICTURES.glob("diagram-*.svg"):
        if old.name not in wanted:
            old.unlink()
    missing = [name for name in wanted if not (PICTURES / name).is_file()]
    program, browser = shutil.which("mmdc"), shutil.which("chromium") or shutil.which("google-chrome")
    if missing and (program is None or browser is None):
        print("error: drawing needs mmdc (npm install @mermaid-js/mermaid-cli) and Chromium in PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        start, settings = Path(folder) / "start.json", Path(folder) / "settings.json"
        start.write_text(json.dumps({"executablePath": browser, "args": ["--no-sandbox"]}))
        settings.write_text(json.dumps(SETTINGS))
        for name in missing:
            source = Path(folder) / "diagram.mmd"
            source.write_text(wanted[name])
            command = [str(program), "--quiet", "-p", str(start), "-c", str(settings), "-b", "transparent"]
            subprocess.run([*command, "-i", str(source), "-o", str(PICTURES / name)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
