"""Which models the embedded engine would compute wrongly: its cache knows plain causal attention only. No torch here,
so that it can be asked before a run is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FIXED_ROPE: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of the batch."""


def lacks(model: Mapping[str, Any]) -> str:
    """What it has not that this model needs; empty: nothing.

    Args:
        model: its config.json, as saved or as transformers completes it.
    """
    kinds = set(model.get("layer_types") or ["full_attention"])
    slides = "layer_types" not in model and model.get("use_sliding_window", True) and model.get("sliding_window")
    if kinds != {"full_attention"} or slides:
        return "has no sliding or linear attention"
    if model.get("attn_logit_softcapping"):
        return "has no attention softcapping"
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "" if kind in FIXED_ROPE else f"has no rope of type {kind!r}, only {', '.join(FIXED_ROPE)}"
