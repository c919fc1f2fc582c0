"""Model families: which module reads which checkpoint."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxpaged.models import llama

FAMILIES: dict[str, ModuleType] = {"LlamaForCausalLM": llama, "llama": llama}
"""Name in config.json, under `architectures` or `model_type` -> module."""


def family_of(hf: Mapping[str, Any]) -> ModuleType:
    """The family that a config.json belongs to. `architectures` decides; `model_type` where it is absent."""
    names = hf.get("architectures") or [hf.get("model_type")]
    names = names if isinstance(names, list) else [names]
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise ValueError(
        f"config.json: no model family reads {' or '.join(map(repr, names))}; known are {', '.join(FAMILIES)}"
    )
