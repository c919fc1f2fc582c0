"""Times paged attention on the device at hand, and prints a JSON line for each shape and backend.

    python scripts/bench_attention.py --decode 1x1024 64x1024 64x16384 --prefill 1x2048 16x128 1x512@8192

`--decode 64x1024`: one new token for each of 64 requests, 1024 tokens with it; `--prefill 4x512`: 4 whole prompts of
512 tokens; `1x512@8192`: a chunk of 512 that ends a context of 8192. Without either, shapes for the kind of device.
`--backends`: forms of attention (`attention_backend` of the engine); unless given the XLA form and the device's own
kernel, where it has one. All backends of a shape take turns, and of each the fastest run counts:

  us               microseconds of one call, new K and V written: a run makes many in a row, each taking the output of
                   the one before as its queries and, as far as the pool goes, other blocks
  floor_us         the least that it could take: the greater of `bytes` ÷ the copy rate and `flops` ÷ the matmul rate
  of_floor         floor_us ÷ us
  gb_s, tflop_s    bytes ÷ us (K and V seen read once, new ones read and written, queries read, outputs written), and
                   flops ÷ us (products of the pairs of tokens that see each other)
  copy_gb_s, matmul_tflop_s   measured before: arrays of `--rate-size` MB read and written; a product of square matrices

A shape that does not fit the device's memory, and what a backend refuses, has a line with "error" instead. A table
follows on stderr. The exit status is 0 where nothing was refused.

`--interpret tpu` or `gpu` runs kernels for that in the interpreter, which shows that this script works, and nothing
about speed. With `--limit-s` no shape is begun after so many seconds; those that are left have a line, "not_timed".
"""

import argparse
import contextlib
import functools
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
from interpreted import PLATFORMS, interpreted
from jax import lax
from usage import count, pair, usage_errors

from jaxpaged.attention import paged_attention
from jaxpaged.config import DeviceFacts, EngineConfig, ModelConfig, resolve
from jaxpaged.kv_cache import pool_specs
from jaxpaged.memory import block_bytes, blocks_for
from jaxpaged.runner import compiler_options, device_facts

DECODE = [f"{b}x{context}" for context in (1024, 4096, 16384) for b in (1, 8, 32, 64, 128, 256)]
PREFILL = ["1x2048", "4x512", "16x128", "1x512@8192", "4x512@4096"]
SMALL_DECODE, SMALL_PREFILL = ["1x1024", "8x256", "8x1024", "32x256"], ["1x256", "4x64", "1x128@1024"]
"""Shapes for accelerators, and for CPUs."""

SECONDS_PER_RUN, FEWEST_CALLS, MOST_CALLS = 0.05, 4, 128
"""A run has as many calls as fill this time at the floor: what its start costs is spread over them."""
POOL_BYTES = 2**29
"""A pool is at least so large, where that many calls fill it: beyond what a device's caches hold."""


@dataclass(frozen=True)
class Shape:
    """`num_requests` requests, each with `num_new` new tokens at the end of `context` tokens."""

    text: str
    is_decode: bool
    num_requests: int
    num_new: int
    context: int

    @staticmethod
    def parse(text: str, *, is_decode: bool) -> "Shape":
        """ArgumentTypeError for what is no shape."""
        size, at, context = text.partition("@")
        num_requests, num = pair(text if is_decode else size)
        num_new, context = (1, num) if is_decode else (num, count(context) if at else num)
        if context < num_new:
            raise argparse.ArgumentTypeError(
                f"{text!r}: the context must be {num_new} tokens or more, the new ones in it"
            )
        return Shape(text, is_decode, num_requests, num_new, context)

    def num_bytes(self, model: ModelConfig, itemsize: int) -> int:
        """Bytes that must be moved: K and V that were there read, new ones read and written, queries and outputs."""
        per_token = 2 * model.num_kv_heads * model.head_dim
        elements = (self.context + self.num_new) * per_token + 2 * self.num_new * model.num_heads * model.head_dim
        return self.num_requests * elements * itemsize

    def num_flops(self, model: ModelConfig) -> int:
        """Operations of both products, over the pairs of a query and a token that it sees."""
        pairs = self.num_new * self.context - self.num_new * (self.num_new - 1) // 2
        return 4 * self.num_requests * pairs * model.num_heads * model.head_dim


@dataclass(frozen=True)
class Rates:
    """What the device can do, measured here: bytes copied, and operations of matrix products, a second."""

    copy: float
    matmul: float

    def floor(self, shape: Shape, model: ModelConfig, itemsize: int) -> float:
        """The least seconds that attention could take."""
        return max(shape.num_bytes(model, itemsize) / self.copy, shape.num_flops(model) / self.matmul)


def measure_rates(dtype: str, megabytes: int) -> Rates:
    """Copies of `megabytes` MB, and products of matrices that take a sixteenth of that."""
    count = 8
    array = jnp.ones(megabytes * 2**20 // jnp.dtype(dtype).itemsize, dtype)
    copies = jax.jit(lambda x: lax.fori_loop(0, count, lambda _, x: x + jnp.ones((), dtype), x))
    n = int((array.nbytes / 16 / array.dtype.itemsize) ** 0.5) // 128 * 128 or 128
    matrix = jax.random.normal(jax.random.key(0), (n, n), dtype)
    scale = jnp.asarray(n**-0.5, dtype)
    products = jax.jit(lambda x, y: lax.fori_loop(0, count, lambda _, y: (x @ y) * scale, y))
    return Rates(
        copy=2 * count * array.nbytes / min(seconds_of(lambda: copies(array), 5)),
        matmul=2 * count * n**3 / min(seconds_of(lambda: products(matrix, matrix), 5)),
    )


def seconds_of(run: Callable, repeat: int) -> list[float]:
    """Seconds of each of `repeat` runs, after one that is not counted."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times


class Calls:
    """`num_calls` calls of attention in a row, on a pool of their own: calling it runs them once, and waits."""

    def __init__(self, shape: Shape, config: EngineConfig, model: ModelConfig, num_calls: int):
        assert isinstance(config.block_size, int)
        b, t = shape.num_requests, shape.num_requests * shape.num_new
        per_request = blocks_for(shape.context, config.block_size)
        num_parts = num_pool_parts(shape, config, model, num_calls)
        rng = np.random.default_rng(0)
        tables = [
            rng.permutation(b * per_request).reshape(b, per_request) + i * b * per_request for i in range(num_parts)
        ]
        (spec,) = pool_specs(
            model, num_parts * b * per_request, config.block_size, config.dtype, config.attention_backend
        )
        self._kv = jax.tree.map(_random_pool, spec)
        queries, new = (t, model.num_heads, model.head_dim), (t, model.num_kv_heads, model.head_dim)
        keys = jax.random.split(jax.random.key(1), 3)
        self._arrays = [
            jax.random.normal(key, size, config.dtype) for key, size in zip(keys, (queries, new, new), strict=True)
        ]
        self._where = (
            jnp.arange(b + 1, dtype=jnp.int32) * shape.num_new,
            jnp.full(b, shape.context, jnp.int32),
            jnp.asarray(np.stack(tables), jnp.int32),
        )
        attend = functools.partial(
            paged_attention, backend=config.attention_backend, scale=model.head_dim**-0.5, is_decode=shape.is_decode
        )
        run = functools.partial(_calls, attend=attend, num_calls=num_calls)
        self._run = jax.jit(run, donate_argnums=0, compiler_options=compiler_options())

    def __call__(self) -> jax.Array:
        out_tnh, self._kv = self._run(self._kv, *self._arrays, *self._where)
        return jax.block_until_ready(out_tnh)


def _calls(kv, q_tnh, k_tkh, v_tkh, query_start_b1, context_len_b, page_table_xbp, *, attend, num_calls: int):
    """(out_tnh, kv) of the last call; each takes the next of the page tables."""
    num_requests = jnp.int32(context_len_b.shape[0])

    def one(i, carry):
        q_tnh, kv = carry
        page_table_bp = page_table_xbp[i % page_table_xbp.shape[0]]
        return attend(q_tnh, k_tkh, v_tkh, kv, query_start_b1, context_len_b, page_table_bp, num_requests)

    return lax.fori_loop(0, num_calls, one, (q_tnh, kv))


def _random_pool(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """One random block, over and over: its numbers are like those of real ones, and it is made in place."""
    block = jax.random.normal(jax.random.key(2), spec.shape[1:], spec.dtype)
    return jax.jit(lambda x: jnp.broadcast_to(x, spec.shape))(block)


def num_pool_parts(shape: Shape, config: EngineConfig, model: ModelConfig, num_calls: int) -> int:
    """How many times the blocks of all requests a pool holds."""
    return max(1, min(num_calls, POOL_BYTES // _blocks_bytes(shape, config, model)))


def _blocks_bytes(shape: Shape, config: EngineConfig, model: ModelConfig) -> int:
    assert isinstance(config.block_size, int)
    per_request = blocks_for(shape.context, config.block_size)
    return shape.num_requests * per_request * block_bytes(model, config.block_size, config.dtype)


def measure(
    shape: Shape, backends: list[str], model: ModelConfig, facts: DeviceFacts, rates: Rates, args
) -> list[dict]:
    """The lines of one shape."""
    results: dict[str, dict] = {}
    calls: dict[str, Calls] = {}
    for backend in backends:
        try:
            config = settings(shape, backend, model, facts, args)
            floor = rates.floor(shape, model, jnp.dtype(config.dtype).itemsize)
            num_calls = args.calls or max(FEWEST_CALLS, min(MOST_CALLS, round(SECONDS_PER_RUN / floor)))
            needed = num_pool_parts(shape, config, model, num_calls) * _blocks_bytes(shape, config, model)
            if len(backends) * needed > 0.8 * facts.memory_limit > 0:
                raise ValueError(
                    f"pools of {len(backends)} × {needed / 1e9:.1f} GB do not fit {facts.memory_limit / 1e9:.1f} GB; "
                    "give one of --backends, or a smaller shape"
                )
            calls[backend] = Calls(shape, config, model, num_calls)
            calls[backend]()
            results[backend] = {"block_size": config.block_size, "calls": num_calls, "floor": floor, "seconds": []}
        except Exception as error:
            calls.pop(backend, None)
            results[backend] = {"error": str(error)[:400]}
    for _ in range(args.repeat):
        for backend, run in calls.items():
            start = time.perf_counter()
            run()
            results[backend]["seconds"].append(time.perf_counter() - start)
    return [line_of(shape, model, backend, results[backend], args.dtype, rates) for backend in backends]


def settings(shape: Shape, backend: str, model: ModelConfig, facts: DeviceFacts, args) -> EngineConfig:
    """What an engine would take for these requests. ValueError for what it would refuse."""
    config = EngineConfig(
        dtype=args.dtype, block_size=args.block_size, attention_backend=backend,
        max_num_seqs=shape.num_requests, max_model_len=max(shape.context, 2),
    )  # fmt: skip
    return resolve(config, model, facts)


def line_of(shape: Shape, model: ModelConfig, backend: str, result: dict, dtype: str, rates: Rates) -> dict:
    line = {("decode" if shape.is_decode else "prefill"): shape.text, "backend": backend}
    if "error" in result:
        return line | result
    seconds = min(result["seconds"]) / result["calls"]
    num_bytes, num_flops = shape.num_bytes(model, jnp.dtype(dtype).itemsize), shape.num_flops(model)
    return line | {
        "us": round(1e6 * seconds, 2),
        "floor_us": round(1e6 * result["floor"], 2),
        "of_floor": round(result["floor"] / seconds, 3),
        "bytes": num_bytes,
        "flops": num_flops,
        "gb_s": round(num_bytes / seconds / 1e9, 2),
        "tflop_s": round(num_flops / seconds / 1e12, 3),
        "block_size": result["block_size"],
        "calls": result["calls"],
    }


def table(lines: list[dict]) -> str:
    """A row for each line: what, with what, microseconds, and the fraction of the floor."""
    rows = [f"{'':10}{'':16}{'backend':12}{'µs':>12}{'floor µs':>12}{'of floor':>10}{'GB/s':>10}{'TFLOP/s':>10}"]
    for line in lines:
        kind = "decode" if "decode" in line else "prefill"
        numbers = f"{line.get('error', '')[:60]:>12}"
        if "error" not in line:
            numbers = f"{line['us']:12.1f}{line['floor_us']:12.1f}{line['of_floor']:10.0%}"
            numbers += f"{line['gb_s']:10.1f}{line['tflop_s']:10.3f}"
        rows.append(f"{kind:10}{line[kind]:16}{line['backend']:12}{numbers}")
    return "\n".join(rows)


def versions() -> dict[str, str]:
    """Of Python and of what compiles and runs here, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def heads(text: str) -> tuple[int, int]:
    """Numbers of query and of KV heads. ArgumentTypeError for what is not that."""
    n, k = pair(text)
    if n % k:
        raise argparse.ArgumentTypeError(f"{text!r}: the query heads must be a multiple of the KV heads, such as 32x8")
    return n, k


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = functools.partial(functools.partial, Shape.parse)
    parser.add_argument("--decode", nargs="*", type=shape(is_decode=True), metavar="REQUESTSxCONTEXT")
    parser.add_argument("--prefill", nargs="*", type=shape(is_decode=False), metavar="REQUESTSxTOKENS[@CONTEXT]")
    parser.add_argument("--backends", nargs="+", metavar="BACKEND")
    parser.add_argument("--heads", type=heads, default="32x8", metavar="QUERYxKV", help="how many (default: 32x8)")
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--dtype", default="auto", help="auto: what an engine would take here")
    parser.add_argument("--block-size", type=lambda text: text if text == "auto" else count(text), default="auto")
    parser.add_argument("--repeat", type=count, default=5, help="runs that are timed")
    parser.add_argument("--calls", type=count, help="calls in a run (default: by size)")
    parser.add_argument("--rate-size", type=count, metavar="MB", help="default: 1024, on a CPU 128")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no shape after so many seconds")
    parser.add_argument("--interpret", choices=PLATFORMS, help="interpret the kernels for such a device")
    return parser.parse_args()


def main() -> int:
    args, start = parse_args(), time.perf_counter()
    facts = device_facts()
    is_cpu = facts.platform == "cpu"
    if args.decode is None and args.prefill is None:
        decode, prefill = (SMALL_DECODE, SMALL_PREFILL) if is_cpu else (DECODE, PREFILL)
        args.decode = [Shape.parse(text, is_decode=True) for text in decode]
        args.prefill = [Shape.parse(text, is_decode=False) for text in prefill]
    shapes = [*(args.decode or []), *(args.prefill or [])]
    if args.interpret:
        facts = replace(facts, platform=args.interpret, has_native_bf16=True)
    n, k = args.heads
    model = ModelConfig(
        vocab_size=1, hidden_size=n * args.head_dim, intermediate_size=1, num_layers=1, num_heads=n, num_kv_heads=k,
        head_dim=args.head_dim, max_position_embeddings=2**30, rms_norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    with usage_errors():
        one = settings(Shape.parse("1x16", is_decode=True), "auto", model, facts, args)
    args.dtype = one.dtype
    backends = args.backends or list(dict.fromkeys(("xla", one.attention_backend)))
    rates = measure_rates(args.dtype, args.rate_size or (128 if is_cpu else 1024))
    where = {"heads": [n, k], "head_dim": args.head_dim, "dtype": args.dtype}
    where |= {"copy_gb_s": round(rates.copy / 1e9, 2), "matmul_tflop_s": round(rates.matmul / 1e12, 3)}
    where |= {"device": facts.kind, "platform": jax.devices()[0].platform, **versions()}
    where["interpreted"] = args.interpret is not None
    lines = []
    with interpreted(args.interpret):
        for shape in shapes:
            if time.perf_counter() - start > args.limit_s:
                print(json.dumps({"not_timed": [left.text for left in shapes[shapes.index(shape) :]]}), flush=True)
                break
            for line in measure(shape, backends, model, facts, rates, args):
                lines.append(line | where)
                print(json.dumps(lines[-1]), flush=True)
    print(table(lines), file=sys.stderr)
    return 1 if any("error" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
