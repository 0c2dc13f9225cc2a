"""Write the configuration reference from the dataclasses: `python -m docs.reference`."""

import re
from pathlib import Path

from drivetrain.engine.registry import backends, options_class
from drivetrain.trainers.config.parse import RECIPES, Key, keys
from drivetrain.trainers.config.rl import GRPOConfig
from drivetrain.trainers.config.runs import DPOConfig, RMConfig, SFTConfig

PAGE = Path(__file__).parent / "configuration.md"


RL = (
    "These settings are for `drivetrain grpo`, `ppo` and `online_dpo`. The settings of `model`, `engine` and `optim` above apply too, and "
    "those of `data` and `trainer` that are not listed here again. `actor`, `critic`, `reference` and `reward` take what is not set for them from the top level: "
    "`critic.optim.lr=1e-5` changes only that."
)


def table(rows: list[Key]) -> str:
    """Return a Markdown table of settings."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for key in rows:
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
        shown = '""' if shown == "" else shown
        # A bracket would begin a link, asterisks emphasis.
        meaning = key.help.replace("[", r"\[").replace("*", r"\*")
        # A class without its module.
        kind = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", key.type).replace("|", "&#124;")
        lines.append(f"| `{key.name}` | {kind} | `{shown}` | {meaning} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page."""
    parts = [
        "# Configuration reference",
        "",
        "`make docs` generates this page from the dataclasses. Every setting can be given in a recipe (YAML) or on the command line as",
        "`key=value`; unknown keys are an error. `drivetrain sft --help` (or `dpo`, `rm`, `grpo`, `ppo`, `online_dpo`) prints the same list.",
    ]
    every = [k for k in keys(SFTConfig) if k.name != "engine.options"]
    for section in ("model", "data", "engine", "optim", "trainer"):
        parts += ["", f"## {section}", "", table([k for k in every if k.name.startswith(f"{section}.")])]
    for section, cls, trainer in (("dpo", DPOConfig, "dpo"), ("reference", DPOConfig, "dpo"), ("rm", RMConfig, "rm")):
        own = [k for k in keys(cls) if k.name.startswith(f"{section}.")]
        parts += ["", f"## {section}", "", f"Only for `drivetrain {trainer}`.", "", table(own)]
    shared = {(k.name, k.help) for k in every}
    own = [k for k in keys(GRPOConfig) if (k.name, k.help) not in shared and k.name != "engine.options"]
    parts += ["", "## Reinforcement learning", "", RL]
    for section in dict.fromkeys(k.name.partition(".")[0] for k in own):
        parts += ["", f"### {section}", "", table([k for k in own if k.name.startswith(f"{section}.")])]
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
