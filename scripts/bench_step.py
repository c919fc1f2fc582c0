"""Times one compiled step and its parts, and prints a JSON line for each size.

    python scripts/bench_step.py --decode 2x200 16x250 32x400 --prefill 4x512

`--decode 16x250`: one token for each of 16 requests with 250 tokens of context; `--prefill 4x512`: 4 whole prompts of
512 tokens in one step. The parts run alone, on the same weights and shapes, in turns with the whole step, so that a
noisy machine is noisy for all of them; figures are lower quartiles in milliseconds:

  step_ms         the whole step, from its call to the tokens on the host
  attention_ms    paged attention of all layers, new K and V written
  matmul_ms       the products with the weights of all layers, one after another (int8: quantizing what is multiplied)
  head_ms         logits and one draw for each request
  elementwise_ms  norms, rotary embeddings, activations and residuals of all layers
  rest_ms         the difference: what the parts gain or lose alone
  launch_ms       until the call of the whole step returns to the host
  floors_ms       of each part and of the step: the greater of its bytes ÷ `bandwidth_gb_s` and its operations ÷
                  `peak_gflop_s`, both measured here (a sum over 512 MB, a product of two 2048×2048 matrices)
"""

import argparse
import functools
import json
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from usage import count, pair, usage_errors

from jaxpaged import Engine, sampler
from jaxpaged.attention import paged_attention
from jaxpaged.config import EngineConfig
from jaxpaged.models import decoder, layers
from jaxpaged.models.weights import Weights
from jaxpaged.runner import DrawShape, PrefillShape, compiler_options
from jaxpaged.steps import RowState, sampling_rows


def attention_of_all_layers(kv, qkv_tnh, query_start_b1, context_len_b, page_table_bp, *, model, backend, is_decode):
    """(sum of the outputs, kv): the attention of a step, each layer's queries depending on the output before."""
    n, k = model.num_heads, model.num_kv_heads
    total_tnh, new_kv = jnp.zeros_like(qkv_tnh[:, :n]), []
    num_requests = jnp.int32(context_len_b.shape[0])
    for layer_kv in kv:
        q_tnh, k_tkh, v_tkh = jnp.split(qkv_tnh, (n, n + k), axis=1)
        out_tnh, layer_kv = paged_attention(
            q_tnh + total_tnh * 1e-3, k_tkh, v_tkh, layer_kv,
            query_start_b1, context_len_b, page_table_bp, num_requests,
            backend=backend, scale=model.head_dim**-0.5, is_decode=is_decode,
        )  # fmt: skip
        total_tnh += out_tnh
        new_kv.append(layer_kv)
    return total_tnh.sum(), tuple(new_kv)


def matmuls_of_all_layers(weights: Weights, x_td, *, model):
    """A number that depends on every product of a step's layers."""
    q, f = model.num_heads * model.head_dim, model.intermediate_size
    for w in weights.layers:
        x_td = layers.linear(layers.linear(x_td, w.qkv_od)[:, :q], w.out_do)
        x_td = layers.linear(layers.linear(x_td, w.gate_up_od)[:, :f], w.down_df)
    return x_td.sum()


def elementwise_of_all_layers(weights: Weights, x_td, qkv_tnh, gate_up_to, position_t, *, model, max_model_len):
    """A number that depends on all that a step's layers do between products and attention."""
    angles, n, k = layers.rope_angles(position_t, model, max_model_len), model.num_heads, model.num_kv_heads
    for w in weights.layers:
        # Barriers, so that each is computed whole, once, and not fused with its reader; around sums, so that
        # nothing is kept for a later layer.
        y_td = lax.optimization_barrier(layers.rms_norm(x_td, w.attention_norm_d, model.rms_norm_eps))
        q_tnh, k_tkh, _ = jnp.split(qkv_tnh * y_td[:, :1, None], (n, n + k), axis=1)
        turned = layers.rotate(q_tnh, *angles), layers.rotate(k_tkh, *angles)
        q_tnh, k_tkh = lax.optimization_barrier(turned)
        x_td = lax.optimization_barrier(x_td + q_tnh[:, 0, :1] + k_tkh[:, 0, :1])
        y_td = lax.optimization_barrier(layers.rms_norm(x_td, w.mlp_norm_d, model.rms_norm_eps))
        x_td = lax.optimization_barrier(x_td + lax.optimization_barrier(layers.gated(gate_up_to * y_td[:, :1]))[:, :1])
    return x_td.sum()


def head(weights: Weights, hidden_bd, rows: sampler.SamplingRows, position_b):
    """One token for each request."""
    return sampler.sample(decoder.logits(weights, hidden_bd), rows, position_b)


PARTS = ("attention", "matmul", "head", "elementwise")


class Parts:
    """The compiled step of one size and its parts, each a function that runs it once and waits."""

    def __init__(self, engine: Engine, num_requests: int, num_context: int, *, is_decode: bool):
        self.runner, self.model, self.is_decode = engine._live_runner, engine.model_config, is_decode
        self.per_request = 1 if is_decode else num_context
        buckets, blocks = engine._buckets, -(-(num_context + 1) // engine.config.block_size)
        b, t = num_requests, num_requests * self.per_request
        tables = np.arange(b * blocks, dtype=np.int32).reshape(b, blocks) % engine.config.num_device_blocks
        rng = np.random.default_rng(0)
        table_rp = np.full((buckets.num_rows, buckets.max_blocks), self.runner.scratch_block, np.int32)
        table_rp[:b, :blocks] = rng.permutation(b * blocks)[tables]
        self.runner._state = self.runner._state.replace(page_table_rp=jnp.asarray(table_rp))
        self.row_b, self.query_start_b1 = (
            np.arange(b, dtype=np.int32),
            np.arange(b + 1, dtype=np.int32) * self.per_request,
        )
        self.context_len_b = np.full(b, num_context, np.int32)
        self.position_t = np.arange(t, dtype=np.int32) % num_context
        self.token_t = rng.integers(3, self.model.vocab_size, t).astype(np.int32)
        if not is_decode:
            b = next(n for n in buckets.prefill_requests(t) if n >= b)
            pad = b - num_requests
            self.row_b = np.pad(self.row_b, (0, pad), constant_values=buckets.padding_row)
            self.query_start_b1 = np.pad(self.query_start_b1, (0, pad), mode="edge")
            self.context_len_b = np.pad(self.context_len_b, (0, pad))
        self.num_requests = num_requests
        self.draw_compiled = self.runner.compiler.get(DrawShape(is_decode, b, buckets.logprobs[0]))
        if not is_decode:
            self.prefill_compiled = self.runner.compiler.get(PrefillShape(t, b))
        self._compile_parts(engine, jnp.asarray(table_rp[self.row_b]), t, b)

    def _compile_parts(self, engine: Engine, page_table_bp, t: int, b: int):
        model, dtype = self.model, jnp.dtype(engine.config.dtype)
        heads = model.num_heads + 2 * model.num_kv_heads
        attention = functools.partial(
            attention_of_all_layers, model=model, backend=engine.config.attention_backend, is_decode=self.is_decode
        )
        self.qkv_tnh = jnp.ones((t, heads, model.head_dim), dtype)
        self.attention_arguments = (self.qkv_tnh, self.query_start_b1, self.context_len_b, page_table_bp)
        compiled = functools.partial(jax.jit, compiler_options=compiler_options())
        self.attention_compiled = compiled(attention, donate_argnums=0)
        self.matmul_compiled = compiled(functools.partial(matmuls_of_all_layers, model=model))
        self.x_td = jnp.ones((t, model.hidden_size), dtype)
        elementwise = functools.partial(
            elementwise_of_all_layers, model=model, max_model_len=engine.config.max_model_len
        )
        self.elementwise_compiled = compiled(elementwise)
        self.gate_up_to = jnp.ones((t, 2 * model.intermediate_size), dtype)
        self.head_compiled = compiled(head)
        state: RowState = self.runner._state
        self.rows = sampling_rows(state, self.row_b)
        self.x_bd = jnp.ones((b, model.hidden_size), dtype)

    def step(self) -> float:
        """Runs the step; seconds until its call returned."""
        runner, start = self.runner, time.perf_counter()
        requests = (self.row_b, self.context_len_b, np.ones_like(self.row_b), np.bool_(False))
        if self.is_decode:
            drawn, runner._kv, runner._state = self.draw_compiled(
                runner.weights, runner._kv, runner._state, self.token_t, *requests
            )
        else:
            arguments = (self.token_t, self.row_b, self.query_start_b1, self.context_len_b, np.int32(self.num_requests))
            computed, runner._kv = self.prefill_compiled(runner.weights, runner._kv, runner._state, *arguments)
            drawn, runner._state = self.draw_compiled(
                runner._head, runner._state, computed.hidden_bd, computed.token_b, *requests
            )
        launch = time.perf_counter() - start
        np.asarray(drawn.token_ib)
        return launch

    def attention(self):
        total, self.runner._kv = self.attention_compiled(self.runner._kv, *self.attention_arguments)
        total.block_until_ready()

    def matmul(self):
        self.matmul_compiled(self.runner.weights, self.x_td).block_until_ready()

    def elementwise(self):
        arguments = (self.x_td, self.qkv_tnh, self.gate_up_to, self.position_t)
        self.elementwise_compiled(self.runner.weights, *arguments).block_until_ready()

    def head(self):
        self.head_compiled(self.runner.weights, self.x_bd, self.rows, self.context_len_b).block_until_ready()


def quartile_ms(seconds: list[float]) -> float:
    return round(1e3 * float(np.percentile(seconds, 25)), 2)


def check_sizes(config: EngineConfig, decode: list[tuple[int, int]], prefill: list[tuple[int, int]]):
    """ValueError for a size that no step of the engine has."""
    assert config.max_model_len is not None
    for b, context in (*decode, *prefill):
        if b > config.max_num_seqs or context >= config.max_model_len:
            most = f"{config.max_num_seqs} requests and {config.max_model_len - 1} tokens of each"
            raise ValueError(f"{b}x{context} is larger than the model and the engine allow; give at most {most}")


def measure(engine: Engine, size: tuple[int, int], repeat: int, *, is_decode: bool) -> dict:
    """The JSON line of one size."""
    num_requests, num_context = size
    parts = Parts(engine, num_requests, num_context, is_decode=is_decode)
    functions = {name: getattr(parts, name) for name in ("step", *PARTS)}
    times: dict[str, list[float]] = {name: [] for name in (*functions, "launch")}
    for i in range(repeat + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            launch = function()
            if i > 0:
                times[name].append(time.perf_counter() - start)
                if launch is not None:
                    times["launch"].append(launch)
    line = {f"{name}_ms": quartile_ms(seconds) for name, seconds in times.items()}
    rest = line["step_ms"] - sum(line[f"{name}_ms"] for name in PARTS)
    gb_s, gflop_s = bandwidth_gb_s(), peak_gflop_s(engine.config)
    return {
        ("decode" if is_decode else "prefill"): f"{num_requests}x{num_context}",
        **line,
        "rest_ms": round(rest, 2),
        "floors_ms": floors_ms(engine, parts, num_requests, num_context, gb_s, gflop_s),
        "bandwidth_gb_s": round(gb_s, 1),
        "peak_gflop_s": round(gflop_s),
        "tok_s": round(1e3 * num_requests * parts.per_request / line["step_ms"], 1),
    }


def floors_ms(engine: Engine, parts: Parts, num_requests: int, num_context: int, gb_s: float, gflop_s: float) -> dict:
    """The least milliseconds that each part, and the step, could take at this bandwidth and peak."""
    model, weights = engine.model_config, engine._live_runner.weights
    t, itemsize = num_requests * parts.per_request, jnp.dtype(engine.config.dtype).itemsize
    layer_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.layers))
    head_matrix = weights.embed_vd if weights.head_vd is None else weights.head_vd
    head_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(head_matrix))
    num_layer_weights = sum(leaf.size for leaf in jax.tree.leaves(weights.layers))
    kv_bytes = num_requests * num_context * engine.memory_report().bytes_per_block / engine.config.block_size
    pairs = num_requests * (num_context if parts.is_decode else num_context * (num_context + 1) / 2)
    widths = 4 * model.hidden_size + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    elements = t * model.num_layers * (widths + 3 * model.intermediate_size)
    seconds = {
        "attention": max(kv_bytes / gb_s, 4 * pairs * model.num_heads * model.head_dim * model.num_layers / gflop_s),
        "matmul": max(layer_bytes / gb_s, 2 * t * num_layer_weights / gflop_s),
        "head": max(head_bytes / gb_s, 2 * num_requests * model.vocab_size * model.hidden_size / gflop_s),
        "elementwise": elements * itemsize / gb_s,
    }
    seconds["step"] = sum(seconds.values())
    return {name: round(s / 1e6, 2) for name, s in seconds.items()}


def bandwidth_gb_s() -> float:
    """GB read a second by a sum over 512 MB."""
    array = jnp.ones(2**27, jnp.float32)
    return array.nbytes / _least_seconds(jax.jit(jnp.sum), array) / 1e9


def peak_gflop_s(config: EngineConfig) -> float:
    """1e9 operations a second of a product of two 2048×2048 matrices, of the kind that the layers multiply."""
    dtype = jnp.int8 if config.quantization == "int8" else jnp.dtype(config.dtype)
    into = jnp.int32 if dtype == jnp.int8 else dtype
    matrix = jnp.ones((2048, 2048), dtype)
    product = jax.jit(lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ())), preferred_element_type=into))
    return 2 * 2048**3 / _least_seconds(product, matrix) / 1e9


def _least_seconds(function, array) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        function(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", nargs="*", type=pair, default=[], metavar="REQUESTSxCONTEXT")
    parser.add_argument("--prefill", nargs="*", type=pair, default=[], metavar="REQUESTSxTOKENS")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--repeat", type=count, default=20)
    args = parser.parse_args()
    if not args.decode and not args.prefill:
        parser.error("there is no size to time; give --decode or --prefill, or both")
    settings = {"dtype": args.dtype, "quantization": args.quantization, "num_decode_steps": 1}
    with usage_errors():
        engine = Engine(args.model, **settings)
        check_sizes(engine.config, args.decode, args.prefill)
    with engine:
        where = {"dtype": engine.config.dtype, "quantization": args.quantization, "platform": jax.devices()[0].platform}
        where |= {"jax": jax.__version__, "python": platform.python_version()}
        for size in args.decode:
            print(json.dumps(measure(engine, size, args.repeat, is_decode=True) | where), flush=True)
        for size in args.prefill:
            print(json.dumps(measure(engine, size, args.repeat, is_decode=False) | where), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
