"""Compares the attention kernel for TPUs with the oracle, and prints a JSON line for each case.

    python scripts/check_tpu_attention.py --cases pairs                 on a TPU
    python scripts/check_tpu_attention.py --cases once --interpret      anywhere: the kernel is interpreted

`once`: each value of each axis at least once; `pairs`: each pair of values of two axes. A case is "equal" where the
pool holds what the oracle's holds, and `error`, the largest difference of outputs ÷ the largest output, is no more than
`tolerance`; else it "differs", or is "refused" with what went wrong. The last line counts. The exit status is 0 where
all are equal.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# The interpreter, called from one of XLA's threads for CPUs, waits for a copy that another one makes.
os.environ.setdefault("NPROC", str(max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)))
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
from covering import Case, covering
from jax.experimental.pallas import tpu as pltpu

import ragged
from pallas_kernels.tpu.layout import pack, rows_per_tile, unpack
from pallas_kernels.tpu.paged_attention import paged_attention
from ragged import TOLERANCE, Batch, make_batch, scales_of

AXES = {
    "heads": [(8, 4), (4, 1), (3, 3), (9, 3)],
    "head_dim": [128, 64, 256],
    "block_size": [64, 16, 128, 32],
    "dtype": ["float32", "bfloat16"],
    "kv_dtype": ["int8", "as dtype", "float8_e4m3fn"],
    "mask": ["window", "causal", "soft cap", "window and soft cap"],
    "shape": ["mixed", "decode"],
}
"""`heads`: query and KV heads; `shape`: prompt chunks and decodes together, or decodes alone."""

STATIC = ("scale", "sliding_window", "soft_cap", "is_decode", "tile", "chunk")
attend = jax.jit(paged_attention, static_argnames=STATIC)


def cases(which: str) -> list[Case]:
    """ "once" or "pairs". Blocks are memory tiles of the pool's dtype, or more: the kernel refuses others."""
    return covering(AXES, 1 if which == "once" else 2, has_whole_tiles)


def has_whole_tiles(case: Case) -> bool:
    """Whether what is chosen of a case lets blocks be whole memory tiles."""
    names = [name for name in (case.get("kv_dtype"), case.get("dtype")) if name not in (None, "as dtype")]
    return case.get("block_size", 128) >= rows_per_tile(names[0] if names else "float32")


def error_in(case: Case, seed: int) -> float:
    """How far the kernel is from the oracle in one case; see `compare`."""
    (n, k), is_decode = case["heads"], case["shape"] == "decode"
    options: dict[str, Any] = {"is_decode": is_decode}
    options |= {"sliding_window": 40} if "window" in case["mask"] else {}
    options |= {"soft_cap": 1.5} if "soft cap" in case["mask"] else {}
    if case["kv_dtype"] != "as dtype":
        options |= {"kv_dtype": case["kv_dtype"], **scales_of(case["kv_dtype"], k)}
    lengths = [(100, 1), (0, 1), (37, 1), (140, 1)] if is_decode else [(100, 1), (0, 70), (37, 5), (140, 18)]
    batch = make_batch(
        lengths, block_size=case["block_size"], num_heads=n, num_kv_heads=k, head_dim=case["head_dim"],
        tokens=5 if is_decode else 100, requests=5, seed=seed,
    )  # fmt: skip
    return compare(batch, dtype=case["dtype"], **options)


def compare(batch: Batch, *, function=attend, **options) -> float:
    """See `ragged.compare`."""
    num_kv_heads = batch.k_tkh.shape[1]
    return ragged.compare(batch, function, pack, functools.partial(unpack, num_kv_heads=num_kv_heads), **options)


def line_of(case: Case, seed: int) -> dict:
    """What is printed of one case."""
    start = time.perf_counter()
    try:
        facts = {"result": "equal", "error": error_in(case, seed)}
    except AssertionError as error:
        facts = {"result": "differs", "why": str(error)[:600]}
    except Exception as error:
        facts = {"result": "refused", "why": str(error)[:600]}
    return case | {"tolerance": TOLERANCE[case["dtype"]]} | facts | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=("once", "pairs"), default="pairs")
    parser.add_argument("--first", type=int, metavar="N", help="only so many of them")
    parser.add_argument("--interpret", action="store_true", help="on any device, slowly")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "tpu" and not args.interpret:
        parser.error(f"the kernel needs a TPU, but this is {device.device_kind} ({device.platform}); give --interpret")
    where = {"device": device.device_kind, "interpreted": args.interpret, "jax": metadata.version("jax")}
    where["python"] = platform.python_version()
    results = []
    with pltpu.force_tpu_interpret_mode() if args.interpret else contextlib.nullcontext():
        for seed, case in enumerate(cases(args.cases)[: args.first]):
            line = line_of(case, seed)
            results.append(line["result"])
            print(json.dumps(line | where), flush=True)
    counts = {name: results.count(name) for name in ("equal", "differs", "refused")}
    print(json.dumps(counts), flush=True)
    return 0 if counts["equal"] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
