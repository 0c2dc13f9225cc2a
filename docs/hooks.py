"""MkDocs hooks: show diagrams as pictures, let code break where its parts end, put the pages into the site as Markdown too, and
give the API reference a view of the package that holds its modules alone.

A site that draws diagrams in the browser would need a network; `docs/draw.py` has drawn them.

The package is the repository root. mkdocstrings walks every folder below a package and follows links, so from the root it would
walk the virtual environment, and `.types/drivetrain` in circles. It reads this view instead.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

# MkDocs loads this file by its path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.draw import FENCE, PICTURES, picture_of

ROOT = Path(__file__).parent.parent
VIEW = ROOT / "build" / "docs"
"""The search path of `mkdocs.yml`, `plugins.mkdocstrings.handlers.python.paths`."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every diagram by its picture.

    Raises:
        PluginError: A diagram has not been drawn.
    """

    def picture(found: "re.Match[str]") -> str:
        name = picture_of(found[1])
        if not (PICTURES / name).is_file():
            raise PluginError(f"a diagram has no picture pictures/{name}; run python -m docs.draw")
        # A click shows it in its full size.
        return f'[![diagram](pictures/{name} "click for its full size")](pictures/{name})'

    return FENCE.sub(picture, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in tables break after a dot, an underscore and the like, and not inside of a word, no option after its dashes,
    and none before a last character."""

    def end_of_part(text: "re.Match[str]") -> str:
        return text[1] or f"{text[2]}<wbr>"

    def names(code: "re.Match[str]") -> str:
        longest = max(map(len, re.sub(r"<[^>]*>", "", code[0]).split()), default=0)
        return code[0] if longest < 19 else re.sub(r"(<[^>]*>)|(\.(?=[^\W\d])|[_=/,](?=\w\w))", end_of_part, code[0])

    def cell(text: "re.Match[str]") -> str:
        return re.sub(r"<code>.*?</code>", names, text[0], flags=re.DOTALL)

    def option(code: "re.Match[str]") -> str:
        return re.sub(r"(?<![\w-])--\w[\w-]*", r'<span class="option">\g<0></span>', code[0])

    # Programs stay as they are.
    parts = re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    parts[::2] = [re.sub(r"<code>[^<]*</code>", option, part) for part in parts[::2]]
    return re.sub(r"<t[dh]\b.*?</t[dh]>", cell, "".join(parts), flags=re.DOTALL)


def on_config(config: Any) -> Any:
    """Link the package's modules into the view."""
    shutil.rmtree(VIEW, ignore_errors=True)
    package = VIEW / "drivetrain"
    package.mkdir(parents=True)
    for part in (*ROOT.glob("*.py"), *(init.parent for init in ROOT.glob("[!.]*/__init__.py"))):
        (package / part.name).symlink_to(part)
    return config


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the pages that `llms.txt` names into the site."""
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, config["site_dir"])
