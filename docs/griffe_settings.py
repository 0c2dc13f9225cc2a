"""A griffe extension: show a field that is declared by `setting(default, help)` with its help line and its default."""

from ast import literal_eval
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
            attr.docstring = griffe.Docstring(literal_eval(str(text)).replace("[", r"\["), parent=attr)
        default = positional[0] if positional else keywords.get("default")
        attr.value = f"{keywords['factory']}()" if default is None and "factory" in keywords else default
