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
import jax.numpy as jnp
import numpy as np
from covering import Case, covering
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import reference
from pallas_kernels.tpu.layout import pack, rows_per_tile, unpack
from pallas_kernels.tpu.paged_attention import paged_attention
from ragged import Batch, make_batch

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

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
SCALE = 0.3

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
        # Powers of two, so that dividing by them rounds nowhere; they differ from head to head.
        step = 2.0**-5 if case["kv_dtype"] == "int8" else 2.0**-3
        k_scale_k = np.float32(step) * 2.0 ** np.arange(k, dtype=np.float32)
        options |= {"kv_dtype": case["kv_dtype"], "k_scale_k": k_scale_k, "v_scale_k": k_scale_k[::-1] * 2}
    lengths = [(100, 1), (0, 1), (37, 1), (140, 1)] if is_decode else [(100, 1), (0, 70), (37, 5), (140, 18)]
    batch = make_batch(
        lengths, block_size=case["block_size"], num_heads=n, num_kv_heads=k, head_dim=case["head_dim"],
        tokens=5 if is_decode else 100, requests=5, seed=seed,
    )  # fmt: skip
    return compare(batch, dtype=case["dtype"], **options)


def compare(
    batch: Batch, *, dtype="float32", kv_dtype=None, k_scale_k=None, v_scale_k=None, function=attend, **options
) -> float:
    """The largest difference of the outputs ÷ the oracle's largest output.

    AssertionError where that is beyond the dtype's tolerance, or the pool is not the oracle's.
    """
    stored_dtype = np.dtype(jnp.dtype(kv_dtype or dtype))
    pools = [np.nan_to_num(x) if stored_dtype.kind == "i" else x for x in batch.kv]
    pools = [reference.stored(x, stored_dtype) for x in pools]
    new = [jnp.asarray(x, dtype) for x in (batch.q_tnh, batch.k_tkh, batch.v_tkh)]
    scales = {} if k_scale_k is None else {"k_scale_k": jnp.asarray(k_scale_k), "v_scale_k": jnp.asarray(v_scale_k)}
    out_tnh, kv = function(*new, pack(*pools), *batch.arguments(), scale=SCALE, **scales, **options)
    masks = {name: options[name] for name in ("sliding_window", "soft_cap") if name in options}
    rounded = [np.asarray(x.astype(jnp.float32)) for x in new]
    expected_tnh, expected_kv = reference.paged_attention(
        *rounded, pools, *batch.arguments(), scale=SCALE, k_scale_k=k_scale_k, v_scale_k=v_scale_k, **masks
    )
    for actual, expected in zip(unpack(kv, batch.k_tkh.shape[1]), expected_kv, strict=True):
        np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
    error = float(np.abs(np.asarray(out_tnh, np.float32) - expected_tnh).max() / np.abs(expected_tnh).max())
    assert error <= TOLERANCE[dtype], f"outputs differ by {error:.1e} of the largest, more than {TOLERANCE[dtype]}"
    return error


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
