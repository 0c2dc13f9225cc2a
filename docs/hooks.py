"""MkDocs hooks: give the API reference a view of the package that holds its modules alone.

The package is the repository root. mkdocstrings walks every folder below a package and follows links, so from the root it would
walk the virtual environment, and `.types/drivetrain` in circles. It reads this view instead.
"""

import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VIEW = ROOT / "build" / "docs"
"""The search path of `mkdocs.yml`, `plugins.mkdocstrings.handlers.python.paths`."""


def on_config(config: Any) -> Any:
    """Link the package's modules into the view."""
    shutil.rmtree(VIEW, ignore_errors=True)
    package = VIEW / "drivetrain"
    package.mkdir(parents=True)
    for part in (*ROOT.glob("*.py"), *(init.parent for init in ROOT.glob("[!.]*/__init__.py"))):
        (package / part.name).symlink_to(part)
    return config
