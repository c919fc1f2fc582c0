"""Compiles for NVIDIA GPUs on a machine without one and without a driver, and prints a JSON line for each program.

    pip install '.[test]' && pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python scripts/compile_for_gpu.py h200 --kernels pairs --steps 2

Targets: t4, a100, l4, h100, h200, b200. Nothing is run. `--backend mosaic_gpu` (h100 and h200): with the kernel for
decodes that is theirs alone.
`--kernels`: attention alone; `once`: each value of each axis at least once, `pairs`: each pair of values of two axes.
`--steps LAYERS`: whole decode and prefill steps of the models at their full widths with so many layers (0: all of
them); `--models` and `--kinds` name some. `--blocks` are the sizes of their pools.
A t4 is older than the kernels: its steps take the XLA form, in float16.

A line has what `compile_for_tpu.py` says of a program, and for each Pallas kernel what ptxas says of it: `registers`
of a thread, `spilled_bytes` of a thread, `instructions` that show which units it uses. That of a step says as well how
it is launched (`thunks.py`). The last line counts.

Flags for XLA may be given in $XLA_FLAGS, such as --xla_gpu_enable_command_buffer=+WHILE. Matrix products are XLA's own
kernels here, where a GPU would time them against cuBLAS.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_dump_emitter_re=ptx "
    f"--xla_dump_hlo_module_re=.* --xla_dump_to={tempfile.mkdtemp(prefix='jaxpaged-ptx-')}"
)

import jax
import jax.numpy as jnp
from compile_for_tpu import KINDS, MODELS, compile_step, compiled_facts
from covering import covering
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec, SingleDeviceSharding
from thunks import launches, read_thunks

from jaxpaged.kv_cache import pinned_host
from jaxpaged.runner import compiler_options
from pallas_kernels.gpu import mosaic_decode
from pallas_kernels.gpu.layout import HeadMajorKV
from pallas_kernels.gpu.paged_attention import merge_splits_kernel, paged_attention, paged_attention_kernel

GIVEN_FLAGS = os.environ["XLA_FLAGS"].partition(" --xla_gpu_autotune_level")[0]
DUMPS = Path(os.environ["XLA_FLAGS"].partition("--xla_dump_to=")[2])
"""Where XLA and Mosaic leave the PTX of what they compile, of each kernel in a file, and what XLA will launch in which
order."""
os.environ["MOSAIC_GPU_DUMP_TO"] = str(DUMPS)

SHAPES = {
    "decode of 64": (64, 64),
    "decode of 2": (2, 2),
    "prefill of 512×32": (512, 32),
    "prefill of 2048×8": (2048, 8),
}
"""Tokens and requests of a step."""

AXES = {
    "heads": [(32, 8), (32, 4), (8, 1), (16, 16), (9, 3)],
    "head_dim": [128, 64, 80, 96, 256],
    "block_size": [16, 32, 64],
    "dtype": ["bfloat16", "float16", "float32"],
    "kv_dtype": ["as dtype", "int8", "float8_e4m3fn"],
    "mask": ["causal", "window", "soft cap", "window and soft cap"],
    "shape": list(SHAPES),
}
"""What the kernels are compiled for. `heads`: query and KV heads."""

MOSAIC_AXES = {
    "heads": [(32, 8), (32, 4), (8, 1), (16, 16), (9, 3)],
    "head_dim": [128, 64, 256],
    "block_size": [16, 32, 64],
    "dtype": ["bfloat16", "float16"],
    "kv_dtype": ["as dtype"],
    "mask": AXES["mask"],
    "shape": ["decode of 64", "decode of 2"],
}
"""The same of the kernel for decodes on Mosaic GPU."""

KERNELS = (paged_attention_kernel.__name__, merge_splits_kernel.__name__, "decode_kernel_mosaic_gpu_kernel")
INSTRUCTIONS = r"\b(?:wgmma|mma\.sync|tcgen05\.mma|cp\.async\.bulk\.tensor|cp\.async)\b"


class Gpu(NamedTuple):
    """What XLA's compiler asks about a GPU: bandwidth in GB/s, memory and cache in bytes, shared memory of a block."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    threads: int
    fpus: int
    bandwidth: int
    cache: int
    clock: float
    memory: int


GPUS = {
    "t4": Gpu("Tesla T4", (7, 5), 40, 65536, 1024, 64, 320, 4 << 20, 1.59, 16 << 30),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 2048, 64, 2039, 40 << 20, 1.41, 80 << 30),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 101376, 1536, 128, 300, 48 << 20, 2.04, 24 << 30),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 2048, 128, 3352, 50 << 20, 1.98, 80 << 30),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 232448, 2048, 128, 4800, 50 << 20, 1.98, 141 << 30),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 232448, 2048, 128, 8000, 126 << 20, 1.96, 180 << 30),
}


def target_config(gpu: Gpu) -> str:
    """A GPU in the words of XLA's GpuTargetConfigProto."""
    major, minor = gpu.compute_capability
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
        gpu_device_info {{
          name: "{gpu.name}" threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads}
          core_count: {gpu.multiprocessors} fpus_per_core: {gpu.fpus} clock_rate_ghz: {gpu.clock}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_memory}
          shared_memory_per_core: {gpu.shared_memory + 1024}
          memory_bandwidth: {gpu.bandwidth * 10**9} l2_cache_size: {gpu.cache} device_memory_size: {gpu.memory}
          cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
          driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
        }}
        platform_name: "CUDA" device_description_str: "{gpu.name}"
        dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
    """


class Target:
    """A kind of GPU, one of it."""

    custom_calls, num_devices, pool_axis = r'"__gpu\$xla\.gpu\.triton"|"mosaic_gpu_v2"', 1, 1

    def __init__(self, name: str, backend: str = "pallas_gpu"):
        gpu = GPUS[name]
        self.compute_capability = gpu.compute_capability
        self.backend, self.dtype = (backend, "bfloat16") if self.has_kernels else ("xla", "float16")
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target_config(gpu), topology="1x1x1"
        )
        self._options = compiler_options(topology.devices[0])
        self._sharding = SingleDeviceSharding(topology.devices[0])
        self.pinned = pinned_host(topology.devices[0])
        device = AbstractDevice(device_kind=gpu.name, num_cores=None, platform="gpu")
        self._abstract = AbstractMesh((1,), ("tensor",), (AxisType.Auto,), abstract_device=device)

    @property
    def has_kernels(self) -> bool:
        return self.compute_capability >= (8, 0)

    def placed(self, tree, spec: PartitionSpec | None = None):
        """The shapes of a tree, on the target."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), tree)

    def compile(self, lower: Callable):
        """What `lower()` gives, compiled with the engine's options, traced as on the target."""
        for file in DUMPS.iterdir():
            file.unlink()
        jax.clear_caches()  # an equal program, as of another model's swap, would be taken from there and leave no dump
        with jax.sharding.use_abstract_mesh(self._abstract):
            return lower().compile(self._options)


ATTENTION_THUNKS = (paged_attention_kernel.__name__, "kCustomCall")
"""What XLA calls the attention of a layer in its list: Triton's kernel by its name, Mosaic's a custom call."""


def thunk_facts() -> dict:
    """How the program compiled last is launched."""
    # There is one after XLA's passes only where they have changed something: made command buffers.
    file = max(DUMPS.glob("*.thunk_sequence*.txt"))
    return {"thunks": launches(read_thunks(file.read_text()), ATTENTION_THUNKS)}


def kernel_facts() -> dict:
    """What ptxas says of the Pallas kernels in the program compiled last: the most of each kernel's instances."""
    facts: dict = {}
    for file in DUMPS.glob("*.ptx"):
        source = file.read_text()
        if not any(f".entry {kernel}" in source for kernel in KERNELS):
            continue
        # Mosaic writes what ptxas said as well. The PTX is too new for the wheel's.
        report = file.with_suffix(".ptxas")
        text = report.read_text() if report.exists() else ptxas_report(file, source)
        entries = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", text, re.S)
        for kernel, spilled, registers in entries:
            if kernel in KERNELS:
                old = facts.get(kernel, {"registers": 0, "spilled_bytes": 0})
                facts[kernel] = {
                    "registers": max(old["registers"], int(registers)),
                    "spilled_bytes": max(old["spilled_bytes"], int(spilled)),
                    "instructions": sorted(set(re.findall(INSTRUCTIONS, source))),
                }
    return {"ptxas": facts}


def ptxas_report(file: Path, source: str) -> str:
    """What the nvcc wheel's ptxas says of a file of PTX."""
    arch = re.search(r"^\.target (sm_\w+)", source, re.MULTILINE)
    assert arch is not None
    command = [ptxas(), f"-arch={arch[1]}", "-v", str(file), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def ptxas() -> str:
    """The assembler of the nvcc wheel."""
    folder = Path(metadata.distribution("nvidia-cuda-nvcc-cu12").locate_file("nvidia/cuda_nvcc/bin/ptxas"))
    return str(folder)


def kernel_cases(target: Target, which: str) -> list[dict]:
    """Cases of attention, without fp8 K and V before compute capability 8.9, which does not know them."""
    has_fp8 = target.compute_capability >= (8, 9)
    axes = MOSAIC_AXES if target.backend == "mosaic_gpu" else AXES
    cases = covering(axes, 1 if which == "once" else 2, lambda case: has_fp8 or case.get("kv_dtype") != "float8_e4m3fn")
    return [case | ({"kv_dtype": case["dtype"]} if case["kv_dtype"] == "as dtype" else {}) for case in cases]


def compile_kernel(target: Target, case: dict) -> dict:
    """The facts of one case of attention."""
    (n, k), h, s = case["heads"], case["head_dim"], case["block_size"]
    t, b = SHAPES[case["shape"]]
    dtype, kv_dtype = jnp.dtype(case["dtype"]), jnp.dtype(case["kv_dtype"])
    attention = mosaic_decode.paged_attention if target.backend == "mosaic_gpu" else paged_attention
    options = {"scale": h**-0.5} | ({} if target.backend == "mosaic_gpu" else {"is_decode": t == b})
    options |= {"sliding_window": 300} if "window" in case["mask"] else {}
    options |= {"soft_cap": 30.0} if "soft cap" in case["mask"] else {}

    def attend(q, k_new, v_new, kv, starts, contexts, table, num_requests, scale_k):
        scales = {} if kv_dtype == dtype else {"k_scale_k": scale_k, "v_scale_k": scale_k}
        return attention(q, k_new, v_new, kv, starts, contexts, table, num_requests, **scales, **options)

    pool = jax.ShapeDtypeStruct((32768 // s, k, s, h), kv_dtype)
    floats = [jax.ShapeDtypeStruct((t, heads, h), dtype) for heads in (n, k, k)]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((b + 1,), (b,), (b, 4096 // s), ())]
    scale = jax.ShapeDtypeStruct((k,), jnp.float32)
    arguments = target.placed((*floats, HeadMajorKV(pool, pool), *ints, scale))
    facts = compiled_facts(target, lambda: jax.jit(attend, donate_argnums=3).lower(*arguments), [pool.shape])
    return facts | kernel_facts() | {"donated_bytes": 2 * pool.size * kv_dtype.itemsize}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=list(GPUS))
    parser.add_argument("--backend", choices=("pallas_gpu", "mosaic_gpu"), default="pallas_gpu")
    parser.add_argument("--kernels", choices=("once", "pairs"))
    parser.add_argument("--steps", type=int, metavar="LAYERS")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--blocks", type=int, nargs="*", default=[4000])
    args = parser.parse_args()
    target, results = Target(args.target, args.backend), []
    if args.backend == "mosaic_gpu" and target.compute_capability != (9, 0):
        parser.error(f"--backend mosaic_gpu compiles for compute capability 9.0 alone, which {args.target} has not")
    if args.kernels and not target.has_kernels:
        parser.error(f"{args.target} is older than the kernels; give --steps alone")
    packages = ("jax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
    versions = {name: metadata.version(name) for name in packages} | {"python": platform.python_version()}
    versions |= {"xla_flags": GIVEN_FLAGS} if GIVEN_FLAGS else {}

    def report(case: dict, facts: dict):
        results.append(facts["result"])
        print(json.dumps({"target": args.target, "backend": target.backend, **case, **facts, **versions}), flush=True)

    if args.kernels:
        for case in kernel_cases(target, args.kernels):
            report(case, compile_kernel(target, case))
    if args.steps is not None:
        for name, kind, num_blocks in itertools.product(args.models, args.kinds, args.blocks):
            case = {"model": name, "step": kind, "layers": args.steps or MODELS[name].num_layers, "blocks": num_blocks}
            facts = compile_step(target, MODELS[name], kind, args.steps, num_blocks)
            report(case, facts | (kernel_facts() | thunk_facts() if facts["result"] == "compiled" else {}))
    shutil.rmtree(DUMPS)
    print(json.dumps({"compiled": results.count("compiled"), "refused": results.count("refused"), "skipped": 0}))
    return 0 if "refused" not in results else 1


if __name__ == "__main__":
    sys.exit(main())
