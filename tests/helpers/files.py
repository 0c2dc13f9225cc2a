"""Python files that belong to no package, as modules."""

import importlib.util
from pathlib import Path
from typing import Any


def module_of(path: Path) -> Any:
    """A module by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
