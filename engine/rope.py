"""The settings of rotary embeddings in a config, by kind of layer."""

from typing import Any

BY_LENGTH = ("dynamic", "longrope")
"""The types of rotary embeddings whose frequencies depend on a document's length."""

FIXED_BY_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text")
"""The families where a factor `alpha` fixes the frequencies of `rope_type=dynamic`; other families ignore it."""


def rope_by_kind(config: Any) -> dict[str, dict[str, Any]]:
    """Return the settings for each kind of layer. The kind is "" if all layers share them. Empty if there are no settings.

    Configs of families with several kinds also keep settings of the older form, in one dict next to those of each kind. Their models
    read only the latter.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {kind: settings for kind, settings in rope.items() if isinstance(settings, dict)}
    return kinds or ({"": rope} if rope else {})


def length_dependent_rope(config: Any) -> str | None:
    """Return the type of rotary embeddings, if their frequencies may depend on a document's length, otherwise None."""
    for rope in rope_by_kind(config).values():
        fixed = rope.get("rope_type") == "dynamic" and rope.get("alpha") and config.model_type in FIXED_BY_ALPHA
        if rope.get("rope_type") in BY_LENGTH and not fixed:
            return str(rope["rope_type"])
    return None
