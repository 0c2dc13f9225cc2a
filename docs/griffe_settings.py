"""A griffe extension: show a field that is declared by `setting(default, help)` with its help line and its default."""

from ast import literal_eval
from importlib import import_module
from typing import Any

import griffe


class Settings(griffe.Extension):
    """An extension that replaces a call of `setting` by the default, and uses the help line as the docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Rewrite one attribute, if it is a setting."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != "setting":
            return
        positional = [a for a in call.arguments if not isinstance(a, griffe.ExprKeyword)]
        keywords = {a.name: a.value for a in call.arguments if isinstance(a, griffe.ExprKeyword)}
        text = positional[1] if len(positional) > 1 else keywords.get("help")
        if isinstance(text, griffe.ExprName):
            # A constant of the module, which several settings share.
            text = attr.module[text.name].value
        if text is not None:
            # A bracket would begin a link.
            attr.docstring = griffe.Docstring(_help(attr, str(text)).replace("[", r"\["), parent=attr)
        default = positional[0] if positional else keywords.get("default")
        attr.value = f"{keywords['factory']}()" if default is None and "factory" in keywords else default


def _help(attr: griffe.Attribute, text: str) -> str:
    """Return the help line of a setting, given its expression in the source."""
    try:
        return str(literal_eval(text))
    except ValueError:
        # It is computed, so only the class itself knows it.
        assert attr.parent is not None
        settings = getattr(import_module(attr.module.canonical_path), attr.parent.name)
        return str(settings.__dataclass_fields__[attr.name].metadata["help"])
