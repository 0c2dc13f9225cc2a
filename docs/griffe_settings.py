"""A griffe extension: show a field that is declared by `setting(default, help)` with its help line and its default, and let the fields of a
msgspec struct or a named tuple be its parameters, as griffe does for dataclasses.
"""

from ast import literal_eval
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import griffe


class Settings(griffe.Extension):
    """An extension that replaces a call of `setting` by the default, uses the help line as the docstring, and knows structs and named tuples."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give every struct and named tuple its parameters, when all of its bases are known."""
        for struct in _classes(pkg):
            parents = [struct, *struct.mro()]
            if any(str(base) in ("Struct", "msgspec.Struct", "NamedTuple") for parent in parents for base in parent.bases):
                fields = {
                    field.name: field
                    for parent in reversed(parents)
                    for field in parent.attributes.values()
                    if _is_field(field)
                }
                kind = griffe.ParameterKind.keyword_only
                parameters = [
                    griffe.Parameter(f.name, annotation=f.annotation, kind=kind, default=f.value) for f in fields.values()
                ]
                struct.set_member(
                    "__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=struct)
                )

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
            # A bracket would begin a link, asterisks emphasis.
            attr.docstring = griffe.Docstring(_help(attr, str(text)).replace("[", r"\[").replace("*", r"\*"), parent=attr)
        default = positional[0] if positional else keywords.get("default")
        attr.value = f"{keywords['factory']}()" if default is None and "factory" in keywords else default


def _classes(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    """Yield the classes at any depth."""
    for member in parent.members.values():
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _classes(member)


def _is_field(attribute: griffe.Attribute) -> bool:
    """Return whether an attribute of a struct is a field: it has a type, and is neither a property nor a `ClassVar`."""
    of_class = "class-attribute" in attribute.labels and "instance-attribute" not in attribute.labels
    return attribute.annotation is not None and "property" not in attribute.labels and not of_class


def _help(attr: griffe.Attribute, text: str) -> str:
    """Return the help line of a setting, given its expression in the source."""
    try:
        return str(literal_eval(text))
    except ValueError:
        # It is computed, so only the class itself knows it.
        assert attr.parent is not None
        settings = getattr(import_module(attr.module.canonical_path), attr.parent.name)
        return str(settings.__dataclass_fields__[attr.name].metadata["help"])
