"""Weights in an Orbax checkpoint: a flat dictionary from Hugging Face names to arrays."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp


class OrbaxCheckpoint:
    """A checkpoint that `PyTreeCheckpointer` or `StandardCheckpointer` wrote of `{name: array}`."""

    def __init__(self, directory: Path):
        self.directory = directory.resolve()
        with ocp.PyTreeCheckpointer() as checkpointer:
            # None here: the folder is no checkpoint, or one that was never finished.
            item = getattr(checkpointer.metadata(self.directory), "item_metadata", None)
        if item is None:
            raise ValueError(f"{directory} holds no finished Orbax checkpoint of a tree of arrays")
        self.leaves = dict(item.tree)
        nested = [name for name, leaf in self.leaves.items() if isinstance(leaf, dict)]
        if nested:
            raise ValueError(
                f"{directory}: the checkpoint is nested under {', '.join(map(repr, nested[:3]))}; "
                "it must be one flat dictionary from Hugging Face weight names to arrays"
            )

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.leaves)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array), one in memory at a time."""
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        with ocp.PyTreeCheckpointer() as checkpointer:
            for name, leaf in self.leaves.items():
                one = ocp.args.PyTreeRestore({name: leaf}, restore_args={name: as_numpy}, partial_restore=True)
                yield name, checkpointer.restore(self.directory, args=one)[name]
