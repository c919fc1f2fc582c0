"""Weights in `*.safetensors` files, as Hugging Face writes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open


class SafetensorsFiles:
    """The files of a directory: `model.safetensors`, else the shards of its index, else every `*.safetensors`.

    ValueError where the directory has none, or lacks shards that the index lists.
    """

    def __init__(self, directory: Path):
        index = directory / "model.safetensors.index.json"
        if (directory / "model.safetensors").exists():
            self.files = [directory / "model.safetensors"]
        elif index.exists():
            self.files = [directory / name for name in _shards(index)]
        else:
            self.files = sorted(directory.glob("*.safetensors"))
        missing = [file.name for file in self.files if not file.exists()]
        if missing:
            raise ValueError(
                f"{directory}: {len(missing)} of the {len(self.files)} files that {index.name} lists are missing: "
                f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}; download them again"
            )
        if not self.files:
            raise ValueError(f"{directory} has no *.safetensors files")

    def names(self) -> list[str]:
        """The names of all tensors; only the headers are read."""
        return [name for file in self.files for name in _open(file).offset_keys()]

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array), one in memory at a time, file by file."""
        for file in self.files:
            with _open(file) as tensors:
                for name in tensors.offset_keys():
                    yield name, tensors.get_tensor(name)


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({error!r}); download it again") from None


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); download it again") from None
