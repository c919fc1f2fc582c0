"""Kernels in an interpreter, so that they run on any device: slow, and nothing like their speed on their own."""

import contextlib
import functools
import os
from collections.abc import Iterator
from unittest import mock

# The interpreter of kernels for TPUs, called from one of XLA's threads for CPUs, waits for a copy that another makes.
os.environ.setdefault("NPROC", str(max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)))

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

PLATFORMS = ("tpu", "gpu")


@contextlib.contextmanager
def interpreted(platform: str | None) -> Iterator[None]:
    """Interprets what is traced in it: kernels for "tpu" or for "gpu", on Pallas' Triton lowering; None: nothing."""
    match platform:
        case "tpu":
            with pltpu.force_tpu_interpret_mode():
                yield
        case "gpu":
            with mock.patch.object(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True)):
                yield
        case None:
            yield
        case _:
            raise ValueError(f"kernels for {platform!r} cannot be interpreted; give tpu or gpu")
