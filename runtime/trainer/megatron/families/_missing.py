"""What the megatron trainer lacks for kinds of models that it has no file for. Loads nothing: `submit` asks too."""

from __future__ import annotations

from typing import Final

_DELTA: Final = "its linear attention (gated delta rule) and gated attention"
_INDEXED: Final = "its sparse attention with an indexer"

MISSING: Final = {
    "qwen3_next": _DELTA,
    "qwen3_5": _DELTA,
    "qwen4": f"{_DELTA}, and {_INDEXED}",
    "glm_moe_dsa": _INDEXED,
    "glm5_next": f"{_INDEXED}, its linear attention and hyper-connections",
    "deepseek_v32": _INDEXED,
    "deepseek_v4": f"{_INDEXED} and hyper-connections",
}
"""Start of a `model_type` -> what is missing."""


def lacking(model_type: str) -> str:
    """Why a model of this kind is refused."""
    found = [what for start, what in MISSING.items() if model_type.startswith(start)]
    return f"the megatron trainer lacks {found[0]}" if found else "the megatron trainer has no table of its names"
