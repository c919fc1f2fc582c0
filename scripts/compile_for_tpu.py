"""Compiles for TPUs on a machine without one, and prints a JSON line for each program.

    pip install "jax[tpu]" && python scripts/compile_for_tpu.py v5e:2x2 --kernels pairs --steps 2

Needs libtpu, which compiles for v5e:2x2, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1 and others. Nothing is run.
`--kernels`: the attention kernel alone; `once`: each value of each axis at least once, `pairs`: each pair of values of
two axes. `--steps LAYERS`: whole steps of the models at their full widths with so many layers (0: all of them);
`--models` and `--kinds` name some. `--blocks` are the sizes of their pools.

A program is compiled, or refused with the first lines of the compiler's error. `alias_bytes`: what is updated in place;
`donated_bytes`: what was to be; `temp_bytes`: temporaries; `copies`: instructions of the optimized program that copy,
transpose or convert an array of a weight's or a pool's shape. The last line counts.
"""

import argparse
import itertools
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from covering import covering
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpaged.batch import make_buckets
from jaxpaged.config import EngineConfig, ModelConfig
from jaxpaged.models.weights import ParamSpec, Weights, map_specs, param_specs
from jaxpaged.runner import DrawShape, PrefillShape, StepCompiler, UpdateShape, compiler_options
from jaxpaged.step_data import SwapIn, SwapOut
from pallas_kernels.tpu.paged_attention import paged_attention

AXES = {
    "heads": [(32, 8), (32, 4), (8, 1), (16, 16), (9, 3)],
    "head_dim": [64, 128, 256],
    "block_size": [16, 32, 64, 128],
    "dtype": ["bfloat16", "float32"],
    "kv_dtype": ["as dtype", "int8", "float8_e4m3fn"],
    "mask": ["causal", "window", "soft cap", "window and soft cap"],
    "shape": ["decode of 64", "prefill of 512×32", "prefill of 2048×4"],
}
"""What the kernel is compiled for. `heads`: query and KV heads; `shape`: tokens and requests of a step, the longer the
prompts the longer the kernel's tiles."""

_LLAMA = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "bfloat16"}
MODELS = {
    "TinyLlama-1.1B": ModelConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=22, num_heads=32, num_kv_heads=4,
        head_dim=64, max_position_embeddings=2048, **_LLAMA,
    ),
    "Qwen3-0.6B": ModelConfig(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
        head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, **_LLAMA,
    ),
    "Llama-3.1-8B": ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, max_position_embeddings=131072, **_LLAMA,
    ),
}  # fmt: skip
"""Widths of models. Qwen3's norms of Q and K are not among what `ModelConfig` has: its sizes alone."""

SHARDED = {"Llama-3.1-8B"}
"""Models that are split over all devices of the target: one chip of 16 GB does not hold them."""

KINDS = ("decode", "prefill", "draw", "swap_out", "swap_in")
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_TOKENS = 2048, 64, 512


class Target:
    """A kind of TPU, as libtpu describes it, and the mesh of its chips that programs are compiled for."""

    backend, dtype, custom_calls = "pallas_tpu", "bfloat16", "tpu_custom_call"
    pool_axis = 2
    """Of a layer's pool, the one that is split over devices."""

    def __init__(self, name: str, num_devices: int = 1):
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[:num_devices]
        self.num_devices = len(devices)
        self._options = compiler_options(devices[0])
        self._mesh = Mesh(devices, ("tensor",), axis_types=(AxisType.Auto,))
        cores = getattr(devices[0], "num_cores", 1)
        device = AbstractDevice(device_kind=devices[0].device_kind, num_cores=cores, platform="tpu")
        self._abstract = AbstractMesh((len(devices),), ("tensor",), (AxisType.Auto,), abstract_device=device)
        split = PartitionSpec(*[None] * (self.pool_axis + 1), "tensor" if self.num_devices > 1 else None)
        self.pinned = NamedSharding(self._mesh, split, memory_kind="pinned_host")

    def placed(self, tree, spec: PartitionSpec | None = None):
        """The shapes of a tree, on the target's devices."""
        sharding = NamedSharding(self._mesh, spec or PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def compile(self, lower: Callable):
        """What `lower()` gives, compiled with the engine's options, traced as on the target."""
        with jax.sharding.use_abstract_mesh(self._abstract):
            return lower().compile(self._options)


def kernel_cases(which: str) -> list[dict]:
    """Cases of the kernel."""
    return covering(AXES, 1 if which == "once" else 2)


def compile_kernel(target: Target, case: dict) -> dict:
    """The facts of one case of the kernel."""
    (n, k), h, s = case["heads"], case["head_dim"], case["block_size"]
    is_decode = case["shape"].startswith("decode")
    t, b = (64, 64) if is_decode else map(int, case["shape"].removeprefix("prefill of ").split("×"))
    dtype, num_blocks = jnp.dtype(case["dtype"]), 32768 // s
    kv_dtype = dtype if case["kv_dtype"] == "as dtype" else jnp.dtype(case["kv_dtype"])
    options = {"is_decode": is_decode, "scale": h**-0.5}
    options |= {"sliding_window": 300} if "window" in case["mask"] else {}
    options |= {"soft_cap": 30.0} if "soft cap" in case["mask"] else {}

    def attend(q, k_new, v_new, kv, starts, contexts, table, num_requests, scale_k):
        scales = {} if kv_dtype == dtype else {"k_scale_k": scale_k, "v_scale_k": scale_k}
        return paged_attention(q, k_new, v_new, kv, starts, contexts, table, num_requests, **scales, **options)

    kv = jax.ShapeDtypeStruct((num_blocks, s, 2 * k * h), kv_dtype)
    floats = [jax.ShapeDtypeStruct((t, heads, h), dtype) for heads in (n, k, k)]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((b + 1,), (b,), (b, 4096 // s), ())]
    arguments = target.placed((*floats, kv, *ints, jax.ShapeDtypeStruct((k,), jnp.float32)))
    facts = compiled_facts(target, lambda: jax.jit(attend, donate_argnums=3).lower(*arguments), [kv.shape])
    return facts | {"donated_bytes": math.prod(kv.shape) * kv_dtype.itemsize}


def compile_step(target: Target, model: ModelConfig, kind: str, num_layers: int, num_blocks: int) -> dict:
    """The facts of a whole step: "decode" (8 tokens of each request in one call), "prefill", or the "draw" after it; or
    of a swap of 32 blocks to or from pinned memory of the host."""
    model = replace(model, num_layers=num_layers or model.num_layers)
    config = EngineConfig(
        dtype=target.dtype, block_size=16, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS, attention_backend=target.backend, num_device_blocks=num_blocks,
    )  # fmt: skip
    compiler = StepCompiler(config, model, make_buckets(config), num_blocks)
    place(compiler, target, param_specs(model, target.dtype))
    b = MAX_NUM_SEQS
    swaps = {"swap_out": UpdateShape(SwapOut, 32), "swap_in": UpdateShape(SwapIn, 32)}
    shape = swaps.get(kind) or (
        PrefillShape(MAX_TOKENS, b) if kind == "prefill" else DrawShape(kind == "decode", b, 20)
    )
    pools = jax.tree.leaves(compiler._kv)
    big = [leaf.sharding.shard_shape(leaf.shape) for leaf in (*pools, *jax.tree.leaves(compiler._weights))]
    facts = compiled_facts(target, lambda: compiler.lower(shape), big)
    pool_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in pools) // target.num_devices
    donated_bytes = {"decode": pool_bytes + compiler.state_bytes, "draw": compiler.state_bytes, "swap_out": 0}
    return facts | {
        "donated_bytes": donated_bytes.get(kind, pool_bytes),
        "layer_pool_bytes": pool_bytes // len(compiler._kv),
    }


def place(compiler: StepCompiler, target: Target, specs: Weights):
    """Has a compiler lower for the target: weights and pool are split over its devices, all else is on each."""
    axis = "tensor" if target.num_devices > 1 else None
    split = {"qkv", "heads", "gate_up", "mlp", "vocab"}

    def weight(spec: ParamSpec):
        partition = PartitionSpec(*(axis if name in split else None for name in spec.axes))
        return target.placed(jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)), partition)

    compiler._weights = map_specs(weight, specs)
    compiler._state, compiler._adjustments = target.placed(compiler._state), target.placed(compiler._adjustments)
    compiler._kv = target.placed(compiler._kv, PartitionSpec(*[None] * target.pool_axis, axis))
    compiler._pinned = target.pinned


def compiled_facts(target: Target, lower: Callable, big_shapes: list[tuple[int, ...]]) -> dict:
    """What there is to know of a compiled program, or why it was refused."""
    start = time.perf_counter()
    try:
        compiled = target.compile(lower)
    except Exception as error:
        return {"result": "refused", "error": str(error)[:600]}
    analysis = compiled.memory_analysis()
    hlo = compiled.as_text()
    return {
        "result": "compiled",
        "seconds": round(time.perf_counter() - start, 1),
        "alias_bytes": analysis.alias_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
        "kernels": len(re.findall(target.custom_calls, hlo)),
        "copies": copies_in(hlo, big_shapes),
    }


def copies_in(hlo: str, shapes: list[tuple[int, ...]]) -> list[str]:
    """Instructions outside of fusions that copy, transpose or convert an array of one of these shapes, in any order of
    dimensions. Inside a fusion nothing is written that its result is not."""
    forbidden = {tuple(sorted(shape)) for shape in shapes if len(shape) > 1}
    found, is_fused = [], False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            is_fused = line.lstrip("%").startswith("fused_computation")
        match = re.search(r"= \w+\[([\d,]+)\]\S* (copy|transpose|convert)\(", line)
        if match and not is_fused and tuple(sorted(int(size) for size in match[1].split(","))) in forbidden:
            found.append(line.strip()[:200])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a topology of libtpu, for example v5e:2x2")
    parser.add_argument("--kernels", choices=("once", "pairs"))
    parser.add_argument("--steps", type=int, metavar="LAYERS")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--blocks", type=int, nargs="*", default=[4000])
    args = parser.parse_args()
    versions = {"jax": jax.__version__, "libtpu": metadata.version("libtpu"), "python": platform.python_version()}
    results = []

    def report(case: dict, facts: dict):
        results.append(facts["result"])
        print(json.dumps({"target": args.target, **case, **facts, **versions}), flush=True)

    if args.kernels:
        one = Target(args.target)
        for case in kernel_cases(args.kernels):
            report(case, compile_kernel(one, case))
    if args.steps is not None:
        for name, kind, num_blocks in itertools.product(args.models, args.kinds, args.blocks):
            target = Target(args.target, 4 if name in SHARDED else 1)
            case = {"model": name, "step": kind, "layers": args.steps or MODELS[name].num_layers, "blocks": num_blocks}
            report(case, compile_step(target, MODELS[name], kind, args.steps, num_blocks))
    print(json.dumps({"compiled": results.count("compiled"), "refused": results.count("refused"), "skipped": 0}))
    return 0 if "refused" not in results else 1


if __name__ == "__main__":
    sys.exit(main())
