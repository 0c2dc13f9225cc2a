"""Write the configuration reference from the dataclasses: `python -m docs.reference`."""

from pathlib import Path

from drivetrain.engine.registry import backends, options_class
from drivetrain.trainers.config import DPOConfig, RMConfig, SFTConfig
from drivetrain.trainers.config.parse import RECIPES, Key, keys

PAGE = Path(__file__).parent / "configuration.md"


def table(rows: list[Key]) -> str:
    """Return a Markdown table of settings."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for key in rows:
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
        # A bracket would begin a link.
        meaning = key.help.replace("[", r"\[")
        lines.append(f"| `{key.name}` | {key.type.replace('|', '&#124;')} | `{shown}` | {meaning} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page."""
    parts = [
        "# Configuration reference",
        "",
        "Generated from the dataclasses by `make docs`; a test compares the two. Every setting can be given in a recipe (YAML) or on the command line as",
        "`key=value`; unknown keys are an error. `python -m drivetrain.trainers.sft --help` (or `dpo`, `rm`) prints the same list.",
    ]
    every = [k for k in keys(SFTConfig) if k.name != "engine.options"]
    for section in ("model", "data", "engine", "optim", "trainer"):
        parts += ["", f"## {section}", "", table([k for k in every if k.name.startswith(f"{section}.")])]
    for section, cls, trainer in (("dpo", DPOConfig, "dpo"), ("reference", DPOConfig, "dpo"), ("rm", RMConfig, "rm")):
        own = [k for k in keys(cls) if k.name.startswith(f"{section}.")]
        parts += ["", f"## {section}", "", f"Only for `drivetrain.trainers.{trainer}`.", "", table(own)]
    parts += ["", "## Built-in recipes", "", "The settings of each recipe; everything else has the defaults above."]
    for recipe in sorted(RECIPES.glob("*.yaml")):
        parts += ["", f"### {recipe.stem}", "", "```yaml", recipe.read_text().strip(), "```"]
    for name in backends():
        options = options_class(name)
        if options is not None:
            parts += ["", f"## engine.options of {name}", "", table(list(keys(options, "engine.options.")))]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
