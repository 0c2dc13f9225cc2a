"""Write `llms.txt` (llmstxt.org), the list of the site's pages for language models, from the index: `python -m docs.llms`.

The site has it at its root, and the pages as Markdown beside their HTML (`docs/hooks.py`). Those of the API reference are HTML alone: their text
comes from docstrings.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
FILE = DOCS / "llms.txt"
SUMMARY = """\
> Drivetrain is a program for post-training large language models: supervised fine-tuning, preference optimization, reward models and
> reinforcement learning. It trains on FSDP2 with Hugging Face models, on Megatron-core, or on an engine of your own, and the same batch gives the
> same loss and the same gradient norm on each. Batches are packed without padding, and runs resume in any layout and on any engine. Generation,
> an OpenAI-compatible server and a service for Tinker's client are part of it.
"""


def text(index: str) -> str:
    """Return the file, given the text of the index."""
    lines = ["# Drivetrain", "", *SUMMARY.splitlines()]
    _, *parts = re.split(r"^## (.+)\n", index, flags=re.MULTILINE)
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        links = [line for line in part.splitlines() if line.startswith("- [")]
        lines += ["", f"## {name}", "", *(re.sub(r"\((api/[\w-]+)\.md\)", r"(\1.html)", line) for line in links)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text((DOCS / "index.md").read_text()))
