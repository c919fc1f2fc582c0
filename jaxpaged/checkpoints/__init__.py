"""Finds a model and loads its weights.

A reader (safetensors, GGUF, Orbax) has `names()` and `tensors()`, an iterator of (Hugging Face name, array) that holds
one array at a time. Everything else is common: names are checked before anything is read, then each weight is cast,
fused with its neighbours, placed on the device and quantized where that is asked for.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.checkpoints.gguf import GGUFFile
from jaxpaged.checkpoints.hub import BUILT_IN, REPO_ID, built_in_file, download
from jaxpaged.checkpoints.safetensors import SafetensorsFiles
from jaxpaged.config import ModelConfig
from jaxpaged.models import family_of
from jaxpaged.models.int8 import Int8Matrix
from jaxpaged.models.weights import (
    ParamSpec,
    Weights,
    is_weight_spec,
    param_specs,
    placed,
    random_weights,
    unquantized,
)
from jaxpaged.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found. Its architecture is known, its weights are not read yet."""

    name: str
    path: Path
    config: ModelConfig
    family: ModuleType
    reader: Any
    """None: random weights."""
    gguf_metadata: dict[str, Any] | None = None

    def names(self) -> list[str]:
        """The Hugging Face names of the weights in the checkpoint; none for random weights."""
        return [] if self.reader is None else self.reader.names()

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(Hugging Face name, array), one in memory at a time; none for random weights."""
        return iter(()) if self.reader is None else self.reader.tensors()

    def load_tokenizer(self) -> Tokenizer | None:
        """The model's own tokenizer, None where it has none."""
        return load_tokenizer(self.path) if self.gguf_metadata is None else tokenizer_from_gguf(self.gguf_metadata)


def open_model(model: str | os.PathLike[str], load_format: str = "auto") -> ModelSource:
    """The model under a path, a built-in name or a Hugging Face repo id; what it is says how its weights are read.

    `load_format` insists on one of "safetensors", "gguf" and "orbax", or takes random weights ("dummy", for which
    config.json is enough). ValueError where there is no such model, or no such weights in it.
    """
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise ValueError(f"model={model!r} must be a directory, a .gguf file, a Hugging Face repo id or a built-in one")
    name, path = os.fspath(model), Path(model).expanduser()
    if not path.exists():
        if name.lower() in BUILT_IN:
            name = name.lower()
            path = built_in_file(name)
        elif REPO_ID.fullmatch(name):
            path = download(name, weights=load_format != "dummy")
        else:
            raise ValueError(
                f"model={name!r} is neither a file nor a directory here, nor a built-in name ({', '.join(BUILT_IN)}), "
                "nor a Hugging Face repo id (organization/name)"
            )
    if path.is_dir():
        return _open_directory(path, name, load_format)
    if path.suffix == ".gguf":
        return _open_gguf(path, name, load_format)
    if path.name == "config.json" and load_format == "dummy":
        return _open_directory(path.parent, name, load_format)
    raise ValueError(
        f"{path} is a file but not a .gguf file; give the directory that holds config.json and the weights"
        + (" (config.json alone is enough for load_format='dummy')" if path.name == "config.json" else "")
    )


def _open_gguf(path: Path, name: str, load_format: str) -> ModelSource:
    if load_format not in ("auto", "gguf", "dummy"):
        raise ValueError(f"load_format={load_format!r}, but {path} is a GGUF file; leave load_format 'auto'")
    file = GGUFFile(path)
    family = family_of(file.hf_config)
    reader = None if load_format == "dummy" else file
    return ModelSource(name, path, family.model_config(file.hf_config), family, reader, file.metadata)


def _open_directory(directory: Path, name: str, load_format: str) -> ModelSource:
    if not (directory / "config.json").exists():
        ggufs = sorted(file.name for file in directory.glob("*.gguf"))
        raise ValueError(
            f"{directory} has no config.json, so it is no model directory"
            + (f"; to use its GGUF file give {directory / ggufs[0]}" if ggufs else "")
        )
    hf = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists() and (eos := _read_json(generation).get("eos_token_id")) is not None:
        # The generation config knows chat models' end-of-turn ids, which config.json often lacks.
        hf["eos_token_id"] = eos
    family = family_of(hf)
    return ModelSource(name, directory, family.model_config(hf), family, _reader(directory, load_format))


def _reader(directory: Path, load_format: str) -> Any:
    if load_format == "dummy":
        return None
    has = {
        "safetensors": any(directory.glob("*.safetensors*")),
        "orbax": (directory / "orbax").is_dir(),
    }
    chosen = next((kind for kind, is_there in has.items() if is_there), "") if load_format == "auto" else load_format
    if not has.get(chosen):
        wanted = {"safetensors": "*.safetensors files", "orbax": "an Orbax checkpoint in orbax/"}
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        raise ValueError(
            f"{directory} has no weights for load_format={load_format!r}; looked for "
            + wanted.get(chosen, " and ".join(wanted.values()))
            + ("; its PyTorch files (.bin, .pth) must be converted to safetensors first" if pickled else "")
        )
    if chosen == "safetensors":
        return SafetensorsFiles(directory)
    # Importing Orbax takes 0.7 s.
    from jaxpaged.checkpoints.orbax import OrbaxCheckpoint

    return OrbaxCheckpoint(directory / "orbax")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one tensor of a checkpoint goes: rows `start` to `start + shape[0]` of the weight at `path`."""

    path: str
    start: int
    shape: tuple[int, ...]


def load_weights(source: ModelSource, dtype: str, quantization: str | None = None, *, seed: int = 0) -> Weights:
    """The weights on the device, in the tree and shapes of `param_specs(source.config, dtype, quantization)`.

    Beyond them, host memory holds one tensor of the checkpoint and the fused weights that are not complete yet; what is
    to be quantized is in float32 until it is complete, on the device too for one weight at a time.
    ValueError lists names that are missing, left over or there twice, and shapes that do not fit.
    `seed` is for random weights (load_format "dummy").
    """
    specs = param_specs(source.config, dtype, quantization)
    if source.reader is None:
        return random_weights(specs, seed)
    leaves, tree = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_weight_spec)
    path_to_spec = {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in leaves}
    name_to_part = _parts(source, path_to_spec)
    _check_names(source, name_to_part)

    num_open = Counter(part.path for part in name_to_part.values())
    buffers: dict[str, np.ndarray] = {}
    arrays: dict[str, jax.Array | Int8Matrix] = {}
    for name, tensor in source.tensors():
        part = name_to_part.get(name)
        if part is None:
            continue
        if tensor.shape != part.shape:
            raise ValueError(
                f"{source.name}: {name} has shape {list(tensor.shape)}, but the config asks for {list(part.shape)}"
            )
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(
                f"{source.name}: {name} has dtype {tensor.dtype}, but weights are floating-point numbers; give a "
                "checkpoint that is not quantized, or quantized as GGUF"
            )
        spec = path_to_spec[part.path]
        if part.path not in buffers:
            whole = unquantized(spec)
            buffers[part.path] = np.empty(whole.shape, jnp.dtype(whole.dtype))
        buffers[part.path][part.start : part.start + part.shape[0]] = tensor
        num_open[part.path] -= 1
        if not num_open[part.path]:
            arrays[part.path] = placed(buffers.pop(part.path), spec)
    return jax.tree.unflatten(tree, [arrays[path] for path in path_to_spec])


def _parts(source: ModelSource, path_to_spec: dict[str, ParamSpec | Int8Matrix]) -> dict[str, _Part]:
    """Name -> part, for every tensor that the checkpoint must have."""
    config = source.config
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused_rows = {"qkv": (num_q, num_kv, num_kv), "gate_up": (config.intermediate_size,) * 2}
    name_to_part = {}
    for layer in range(config.num_layers):
        for pattern, (path_pattern, index) in source.family.NAMES.items():
            path = path_pattern.format(l=layer)
            # Biases and head that this model does not have.
            if path not in path_to_spec:
                continue
            whole = unquantized(path_to_spec[path])
            rows = fused_rows.get(whole.axes[0] or "", whole.shape[:1])
            part = _Part(path, sum(rows[:index]), (rows[index], *whole.shape[1:]))
            name_to_part[pattern.format(l=layer)] = part
    return name_to_part


def _check_names(source: ModelSource, name_to_part: dict[str, _Part]) -> None:
    family, config = source.family, source.config
    ignored = {name.format(l=layer) for name in family.IGNORED for layer in range(config.num_layers)}
    if config.tie_word_embeddings:
        ignored |= set(family.IGNORED_WHEN_TIED)
    counts = Counter(source.names())
    problems = {
        "missing": [name for name in name_to_part if name not in counts],
        "left over (the config has no place for them)": [
            n for n in counts if n not in name_to_part and n not in ignored
        ],
        "there more than once": [name for name, count in counts.items() if count > 1],
    }
    found = [
        f"{len(names)} {'is' if len(names) == 1 else 'are'} {what}: {', '.join(names[:4])}{', …' * (len(names) > 4)}"
        for what, names in problems.items()
        if names
    ]
    if found:
        raise ValueError(f"{source.name}: of the weights in the checkpoint, {'; '.join(found)}")
