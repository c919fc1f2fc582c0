"""Compares attention kernels with the oracle, and prints a JSON line for each case.

    python scripts/check_attention.py --cases pairs                                      on a TPU or a GPU
    python scripts/check_attention.py --backends pallas_gpu --cases once --interpret     anywhere, interpreted

`--backends`: the kernels, unless given those that the device has. `once`: each value of each axis at least once;
`pairs`: each pair of values of two axes. A case is "equal" where the pool holds what the oracle's holds, and `error`,
the largest difference of outputs ÷ the largest output, is no more than `tolerance`; else it "differs", or is "refused"
with what went wrong. The last line counts. The exit status is 0 where all are equal.
"""

import argparse
import functools
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from interpreted import interpreted

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
from covering import Case, covering
from usage import count

import ragged
from pallas_kernels.gpu import layout as gpu_layout
from pallas_kernels.gpu import mosaic_decode
from pallas_kernels.gpu import paged_attention as gpu
from pallas_kernels.tpu import layout as tpu_layout
from pallas_kernels.tpu import paged_attention as tpu
from ragged import TOLERANCE, Batch, make_batch, scales_of

PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "mosaic_gpu": "gpu"}
"""The kind of device that a backend is for."""

MASKS = ["window", "causal", "soft cap", "window and soft cap"]
TPU_AXES = {
    "heads": [(8, 4), (4, 1), (3, 3), (9, 3)],
    "head_dim": [128, 64, 256],
    "block_size": [64, 16, 128, 32],
    "dtype": ["float32", "bfloat16"],
    "kv_dtype": ["int8", "as dtype", "float8_e4m3fn"],
    "mask": MASKS,
    "shape": ["mixed", "decode", "mixed of prompts", "mixed of decodes"],
}
"""`heads`: query and KV heads; `shape`: steps that may have prompt chunks and decodes, and have both, or one of them
alone; or the form for decodes."""
GPU_AXES = TPU_AXES | {
    "head_dim": [128, 64, 80, 256, 96],
    "block_size": [64, 16, 32, 48],
    "dtype": ["bfloat16", "float32", "float16"],
    "shape": ["mixed", "decode", "decode, keys not split"],
}
HOPPER_AXES = GPU_AXES | {
    "head_dim": [128, 64, 256],
    "block_size": [64, 16, 32],
    "dtype": ["bfloat16", "float16"],
    "kv_dtype": ["as dtype"],
    "shape": ["decode", "decode, keys not split"],
}


@dataclass(frozen=True)
class Kernel:
    """An attention kernel, its layout, and what it is checked for. `unpack(kv, num_kv_heads)`; `static`: names of its
    arguments that are no arrays."""

    attend: Callable
    pack: Callable
    unpack: Callable
    axes: dict[str, list]
    static: tuple[str, ...]
    is_possible: Callable[[Case], bool] = lambda case: True


def kernel_of(backend: str) -> Kernel:
    """The kernel of a backend. ValueError for one that has none."""
    masks = ("scale", "sliding_window", "soft_cap", "is_decode")
    match backend:
        case "pallas_tpu":
            static = (*masks, "tile", "chunk")
            attend, layout = tpu.paged_attention, tpu_layout
            return Kernel(attend, layout.pack, layout.unpack, TPU_AXES, static)
        case "pallas_gpu":
            static = (*masks, "num_rows", "chunk", "num_splits")
            attend, layout = gpu.paged_attention, gpu_layout
            return Kernel(attend, layout.pack, lambda kv, _: layout.unpack(kv), GPU_AXES, static, has_dtypes)
        case "mosaic_gpu":
            static = (*masks, "num_splits", "num_stages")
            return Kernel(decodes_on_hopper, gpu_layout.pack, lambda kv, _: gpu_layout.unpack(kv), HOPPER_AXES, static)
        case _:
            raise ValueError(f"backend {backend!r} has no kernel; there are {', '.join(PLATFORMS)}")


def decodes_on_hopper(*arrays, is_decode: bool, **options):
    """The kernel of mosaic_gpu, which knows nothing but decodes."""
    assert is_decode
    return mosaic_decode.paged_attention(*arrays, **options)


def has_kernel(backend: str, device: jax.Device) -> bool:
    """Whether a backend's kernel is for a device: that of mosaic_gpu for compute capability 9.0 alone."""
    is_hopper = str(getattr(device, "compute_capability", "")).startswith("9.")
    return PLATFORMS.get(backend) == device.platform and (backend != "mosaic_gpu" or is_hopper)


def cases(backend: str, which: str) -> list[Case]:
    """ "once" or "pairs"."""
    kernel = kernel_of(backend)
    return covering(kernel.axes, 1 if which == "once" else 2, kernel.is_possible)


def has_dtypes(case: Case) -> bool:
    """Whether the GPU at hand knows the dtypes: floats of 8 bits only from compute capability 8.9 on."""
    capability = float(getattr(jax.devices()[0], "compute_capability", "9.0") or "9.0")
    return capability >= 8.9 or case.get("kv_dtype") != "float8_e4m3fn"


def error_in(backend: str, case: Case, seed: int) -> float:
    """How far the kernel is from the oracle in one case; see `compare`."""
    (n, k), is_decode = case["heads"], case["shape"].startswith("decode")
    options: dict[str, Any] = {"is_decode": is_decode}
    options |= {"num_splits": 1} if "not split" in case["shape"] else {}
    options |= {"sliding_window": 40} if "window" in case["mask"] else {}
    options |= {"soft_cap": 1.5} if "soft cap" in case["mask"] else {}
    if case["kv_dtype"] != "as dtype":
        options |= {"kv_dtype": case["kv_dtype"], **scales_of(case["kv_dtype"], k)}
    lengths = [(100, 1), (0, 70), (37, 5), (140, 18)]
    if case["shape"].endswith("prompts"):
        lengths = lengths[1:]
    elif case["shape"] != "mixed":
        lengths = [(before, 1) for before, _ in lengths]
    batch = make_batch(
        lengths, block_size=case["block_size"], num_heads=n, num_kv_heads=k, head_dim=case["head_dim"],
        tokens=5 if is_decode else 100, requests=5, seed=seed,
    )  # fmt: skip
    return compare(backend, batch, dtype=case["dtype"], **options)


def compare(backend: str, batch: Batch, **options) -> float:
    """See `ragged.compare`."""
    kernel = kernel_of(backend)
    num_kv_heads = batch.k_tkh.shape[1]
    return ragged.compare(batch, compiled(backend), kernel.pack, lambda kv: kernel.unpack(kv, num_kv_heads), **options)


@functools.cache
def compiled(backend: str) -> Callable:
    """The kernel, each form of it compiled once."""
    kernel = kernel_of(backend)
    return jax.jit(kernel.attend, static_argnames=kernel.static)


def line_of(backend: str, case: Case, seed: int) -> dict:
    """What is printed of one case."""
    start = time.perf_counter()
    try:
        facts = {"result": "equal", "error": error_in(backend, case, seed)}
    except AssertionError as error:
        facts = {"result": "differs", "why": str(error)[:600]}
    except Exception as error:
        facts = {"result": "refused", "why": str(error)[:600]}
    facts |= {"tolerance": TOLERANCE[case["dtype"]], "seconds": round(time.perf_counter() - start, 1)}
    return {"backend": backend} | case | facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=list(PLATFORMS))
    parser.add_argument("--cases", choices=("once", "pairs"), default="pairs")
    parser.add_argument("--first", type=count, metavar="N", help="only so many of them")
    parser.add_argument("--interpret", action="store_true", help="on any device, slowly")
    args = parser.parse_args()
    device = jax.devices()[0]
    backends = args.backends or [backend for backend in PLATFORMS if has_kernel(backend, device)]
    if not backends:
        parser.error(f"no kernel is for {device.device_kind} ({device.platform}); give --backends and --interpret")
    for backend in backends:
        if not args.interpret and not has_kernel(backend, device):
            parser.error(f"{backend} is not for {device.device_kind} ({device.platform}); give --interpret")
    if args.interpret and "mosaic_gpu" in backends:
        parser.error("mosaic_gpu is interpreted in tests/test_mosaic_decode.py alone")
    where = {"device": device.device_kind, "interpreted": args.interpret, "jax": metadata.version("jax")}
    where["python"] = platform.python_version()
    results = []
    for backend in backends:
        with interpreted(PLATFORMS[backend] if args.interpret else None), ThreadPoolExecutor(8) as pool:
            # Most of the time compilers take. What is interpreted is in this thread alone.
            in_order = map if args.interpret else pool.map
            chosen = cases(backend, args.cases)[: args.first]
            for line in in_order(line_of, itertools.repeat(backend), chosen, range(len(chosen))):
                results.append(line["result"])
                print(json.dumps(line | where), flush=True)
    counts = {name: results.count(name) for name in ("equal", "differs", "refused")}
    print(json.dumps(counts), flush=True)
    return 0 if counts["equal"] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
