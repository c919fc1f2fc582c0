"""The device's side of the engine: weights, KV pool, row state, compiled steps. Never sees a request."""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from tqdm import tqdm

from jaxpaged import steps
from jaxpaged.batch import Buckets
from jaxpaged.config import DeviceFacts, EngineConfig, ModelConfig
from jaxpaged.kv_cache import (
    HostBlocks,
    copy_blocks,
    gather_blocks,
    make_pool,
    pool_specs,
    scatter_blocks,
    swap_spec,
)
from jaxpaged.memory import MOST_STAGED
from jaxpaged.models.weights import Weights, map_specs, param_specs
from jaxpaged.step_data import (
    MAX_STOP_IDS,
    BlockCopies,
    BlockUpdates,
    RowUpdates,
    StepInputs,
    StepLogprobs,
    StepOutput,
    SwapIn,
    SwapOut,
)

logger = logging.getLogger("jaxpaged")


def device_facts() -> DeviceFacts:
    """What the first device is and how much memory it has, now."""
    device = jax.devices()[0]
    memory = psutil.virtual_memory()
    total, limit, in_use = memory.total, memory.available, 0
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        total = limit = stats.get("bytes_limit", 0)
        in_use = stats.get("bytes_in_use", 0)
    if device.platform == "gpu":
        # The allocator takes this fraction of the device and reports no more than that.
        total = int(limit / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")))
    capability = float(getattr(device, "compute_capability", "0") or 0)
    has_native_bf16 = device.platform == "tpu" or capability >= 8
    if device.platform == "cpu":
        has_native_bf16 = cpu_has_native_bf16()
    return DeviceFacts(
        platform=device.platform,
        kind=device.device_kind,
        num_cores=os.cpu_count() or 1,
        total_memory=total,
        memory_limit=limit,
        memory_in_use=in_use,
        host_memory=memory.total,
        jax_version=jax.__version__,
        has_native_bf16=has_native_bf16,
    )


def cpu_has_native_bf16() -> bool:
    """Whether XLA multiplies in bfloat16 faster than in float32 on this CPU.

    Known, not timed, so that one machine always takes one dtype: with jax before 0.11 it is several times slower on
    every CPU; since then it is about twice as fast where the CPU has instructions for it.
    """
    if jax.__version_info__ < (0, 11):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:  # not Linux
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def use_compilation_cache():
    """Turns JAX's persistent compilation cache on, in the user's cache folder, unless the user has chosen one."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "jaxpaged" / "jax"))


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is compiled for: kind, padded tokens, padded requests, width of the log-probabilities."""

    is_decode: bool
    num_tokens: int
    num_requests: int
    num_logprobs: int

    def __str__(self) -> str:
        size = (
            f"decode of {self.num_requests}" if self.is_decode else f"prefill of {self.num_tokens}×{self.num_requests}"
        )
        return f"{size}, up to {self.num_logprobs} logprobs"


@dataclass(frozen=True, slots=True)
class UpdateShape:
    """What an update of the device's state before a step is compiled for: its kind and padded size."""

    kind: type[RowUpdates] | type[BlockUpdates] | type[BlockCopies] | type[SwapOut] | type[SwapIn]
    size: int

    def __str__(self) -> str:
        return f"{self.size} {self.kind.__name__}"


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """One compiled step or update: its shape in words, seconds it took, bytes of its temporaries."""

    shape: str
    seconds: float
    temporaries: int


def compiler_options() -> dict[str, int] | None:
    """What XLA is told beyond its defaults: on CPUs with AVX-512 LLVM takes vectors half as wide by itself."""
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None


class StepCompiler:
    """Compiled steps and updates by shape, each made once, and a ledger of them.

    Works on shapes alone: no array is made. With warmup="strict" what `compile_all` was not asked for is an error.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, buckets: Buckets, num_blocks: int):
        assert isinstance(config.block_size, int)
        self.ledger: list[CompileRecord] = []
        self._compiled: dict[StepShape | UpdateShape, Any] = {}
        self._is_strict = config.warmup == "strict"
        self._buckets = buckets
        self._static = {
            "config": model,
            "backend": config.attention_backend,
            "max_model_len": config.max_model_len,
        }
        specs = param_specs(model, config.dtype, config.quantization)
        self._weights = map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)), specs)
        self._kv = pool_specs(model, num_blocks, config.block_size, config.dtype, config.attention_backend)
        self._state = jax.eval_shape(
            functools.partial(steps.make_row_state, buckets.num_rows, buckets.max_blocks, num_blocks)
        )

    @property
    def temporaries(self) -> int:
        """Bytes of temporaries of the largest step compiled so far."""
        return max((record.temporaries for record in self.ledger), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the row state."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._state))

    def compile_all(self, shapes: Iterable[StepShape | UpdateShape]):
        """Compiles all of them in parallel threads, with a progress bar."""
        shapes = [shape for shape in shapes if shape not in self._compiled]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in tqdm(pool.map(self.compile, shapes), desc="Compiling steps", total=len(shapes), disable=None):
                pass

    def has(self, shape: StepShape | UpdateShape) -> bool:
        """Whether what has this shape is compiled."""
        return shape in self._compiled

    def get(self, shape: StepShape | UpdateShape) -> Any:
        """The step or update of this shape, compiled now if it has not been. RuntimeError for that in strict mode."""
        if shape not in self._compiled:
            if self._is_strict:
                raise RuntimeError(
                    f"{shape} was not compiled ahead, and warmup='strict' forbids to compile it now; use warmup='full'"
                )
            self.compile(shape)
        return self._compiled[shape]

    def compile(self, shape: StepShape | UpdateShape):
        """Compiles what has this shape and enters it in the ledger."""
        start = time.perf_counter()
        compiled = self.lower(shape).compile(compiler_options())
        seconds = time.perf_counter() - start
        self.ledger.append(CompileRecord(str(shape), seconds, compiled.memory_analysis().temp_size_in_bytes))
        logger.debug("compiled %s in %.2f s", shape, seconds)
        self._compiled[shape] = compiled

    def lower(self, shape: StepShape | UpdateShape) -> Any:
        """What has this shape, lowered from shapes alone."""
        return self._lower_step(shape) if isinstance(shape, StepShape) else self._lower_update(shape)

    def _lower_step(self, shape: StepShape) -> Any:
        static = self._static | {"num_logprobs": shape.num_logprobs}
        b, per_request = shape.num_requests, _int32(shape.num_requests)
        if shape.is_decode:
            step = functools.partial(steps.decode_step, **static, max_draws=self._buckets.max_draws)
            arguments = (per_request, per_request, per_request, per_request)
        else:
            step = functools.partial(steps.prefill_step, **static)
            arguments = (_int32(shape.num_tokens), per_request, _int32(b + 1), per_request, _int32())
        arguments += (jax.ShapeDtypeStruct((), jnp.bool_),)
        return jax.jit(step, donate_argnums=(1, 2)).lower(self._weights, self._kv, self._state, *arguments)

    def _lower_update(self, shape: UpdateShape) -> Any:
        size, int32 = shape.size, _int32(shape.size)
        if shape.kind is SwapOut:
            return jax.jit(gather_blocks).lower(self._kv, int32)
        if shape.kind is SwapIn:
            return jax.jit(scatter_blocks, donate_argnums=0).lower(self._kv, int32, swap_spec(self._kv, size))
        if shape.kind is RowUpdates:
            float32 = jax.ShapeDtypeStruct((size,), jnp.float32)
            tables, seeds = _int32(size, self._buckets.max_blocks), jax.ShapeDtypeStruct((size, 2), jnp.uint32)
            sampling = (seeds, int32, float32, int32, float32, float32, _int32(size, MAX_STOP_IDS))
            update, state, arguments = steps.update_rows, self._state, (int32, tables, *sampling)
        elif shape.kind is BlockUpdates:
            update, state, arguments = steps.update_blocks, self._state, (int32, int32, int32)
        else:
            update, state, arguments = copy_blocks, self._kv, (int32, int32)
        return jax.jit(update, donate_argnums=0).lower(state, *arguments)


def _shape_of(inputs: StepInputs) -> StepShape:
    return StepShape(inputs.is_decode, len(inputs.token_t), len(inputs.row_b), inputs.num_logprobs)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def all_shapes(buckets: Buckets) -> list[StepShape | UpdateShape]:
    """Every shape that a step can have, and every update of the device's state."""
    decodes = [(True, b, b) for b in buckets.requests]
    prefills = [(False, t, b) for t in buckets.tokens for b in buckets.prefill_requests(t)]
    kinds = (RowUpdates, BlockUpdates, BlockCopies)
    return [
        *(StepShape(*sizes, num_logprobs) for num_logprobs in buckets.logprobs for sizes in prefills + decodes),
        *(UpdateShape(kind, size) for kind in kinds for size in buckets.updates),
        *(UpdateShape(kind, size) for kind in (SwapOut, SwapIn) for size in buckets.swaps),
    ]


def largest_shape(buckets: Buckets) -> StepShape:
    """The step with the most temporaries."""
    most_tokens = buckets.tokens[-1]
    return StepShape(False, most_tokens, buckets.prefill_requests(most_tokens)[-1], buckets.logprobs[-1])


class Runner:
    """Executes steps, in order. `scratch_block` is the block beyond the pool that padding points to.

    `seconds_per_swap`: what it takes to move a block to the host and back; None where that decides nothing
    (`preemption_mode`), and until a first one was moved where steps are compiled lazily.
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, weights: Weights, buckets: Buckets, num_host_blocks: int
    ):
        assert config.num_device_blocks is not None
        self.scratch_block = config.num_device_blocks
        self.weights = weights
        self.compiler = StepCompiler(config, model, buckets, config.num_device_blocks)
        self._config, self._model, self._buckets = config, model, buckets
        self._make_state()
        self._host_blocks = HostBlocks(swap_spec(self._kv, num_host_blocks))
        self.seconds_per_swap: float | None = None
        if config.warmup in ("full", "strict"):
            self.compiler.compile_all(all_shapes(buckets))
            if num_host_blocks and config.preemption_mode == "auto":
                self._measure_swap()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool, scratch block included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._kv))

    def launch(self, inputs: StepInputs) -> steps.Drawn:
        """Brings the row state up to date, moves blocks and starts the step. What it draws is to be waited for.

        Does not wait: steps run one after another on the device, and their outputs come to the host by themselves.
        """
        step = self.compiler.get(_shape_of(inputs))
        for swap in inputs.swaps_out:
            self._swap_out(swap)
        if inputs.copies is not None:
            self._kv = self._updated(self._kv, inputs.copies)
        for i, swap in enumerate(inputs.swaps_in):
            self._swap_in(swap, is_late=i > 0 and i % MOST_STAGED == 0)
        for updates in (inputs.row_updates, inputs.block_updates):
            if updates is not None:
                self._state = self._updated(self._state, updates)
        arguments = (inputs.token_t, inputs.row_b)
        if inputs.is_decode:
            arguments += (inputs.context_len_b, inputs.num_draws_b)
        else:
            arguments += (inputs.query_start_b1, inputs.context_len_b, np.int32(inputs.num_requests))
        arguments += (np.bool_(inputs.has_logprobs),)
        drawn, self._kv, self._state = step(self.weights, self._kv, self._state, *arguments)
        if not inputs.has_logprobs:
            drawn = replace(drawn, logprobs=None)
        for array in jax.tree.leaves(drawn):
            array.copy_to_host_async()
        return drawn

    def is_compiled(self, inputs: StepInputs) -> bool:
        """Whether `launch` would have nothing to compile but updates of state, which take no time."""
        swaps = [UpdateShape(type(swap), len(swap.device_block_c)) for swap in (*inputs.swaps_out, *inputs.swaps_in)]
        return all(map(self.compiler.has, (_shape_of(inputs), *swaps)))

    def wait(self, drawn: steps.Drawn) -> StepOutput:
        """What a step has drawn, when it is done. Raises what went wrong on the device."""
        token_id_ib, logprobs = jax.device_get((drawn.token_ib, drawn.logprobs))
        self._host_blocks.land()
        return StepOutput(token_id_ib=token_id_ib, logprobs=None if logprobs is None else StepLogprobs(*logprobs))

    def reset(self):
        """Makes pool and row state anew, after a step that failed or may not have run: K and V are lost."""
        self._host_blocks.forget()
        self._delete(self._kv, self._state)
        self._make_state()

    def close(self):
        """Gives the device memory back at once, and the host's."""
        self._host_blocks.forget()
        del self._host_blocks
        self._delete(self.weights, self._kv, self._state)

    def _make_state(self):
        config, buckets = self._config, self._buckets
        assert isinstance(config.block_size, int)
        pool = (self.scratch_block, config.block_size, config.dtype, config.attention_backend)
        self._kv = make_pool(self._model, *pool)
        self._state = steps.make_row_state(buckets.num_rows, buckets.max_blocks, self.scratch_block)

    def _delete(self, *trees: Any):
        for array in jax.tree.leaves(trees):
            if not array.is_deleted():  # a step that failed has taken what it was given, and given nothing back
                with contextlib.suppress(Exception):  # whoever waits for the step's output is told what went wrong
                    array.block_until_ready()  # or what is still running would write to memory given away
                array.delete()

    def _swap_out(self, swap: SwapOut):
        if self.seconds_per_swap is None and self._config.preemption_mode == "auto":
            self._measure_swap()
        gather = self.compiler.get(UpdateShape(SwapOut, len(swap.device_block_c)))
        self._host_blocks.store(swap.host_blocks, gather(self._kv, swap.device_block_c))

    def _swap_in(self, swap: SwapIn, *, is_late: bool):
        content_c = self._host_blocks.load(swap.host_blocks, len(swap.device_block_c))
        if is_late:  # what is brought in takes device memory twice until it is in its place
            jax.block_until_ready(self._kv)
        scatter = self.compiler.get(UpdateShape(SwapIn, len(swap.device_block_c)))
        self._kv = scatter(self._kv, swap.device_block_c, content_c)

    def _measure_swap(self):
        """Times the largest swap there and back, of the scratch block to itself: nothing is changed."""
        size = self._buckets.swaps[-1]
        gather, scatter = (self.compiler.get(UpdateShape(kind, size)) for kind in (SwapOut, SwapIn))
        block_c, seconds = np.full(size, self.scratch_block, np.int32), []
        jax.block_until_ready(self._kv)
        for _ in range(3):
            start = time.perf_counter()
            content_c = np.array(gather(self._kv, block_c))
            self._kv = jax.block_until_ready(scatter(self._kv, block_c, content_c))
            seconds.append(time.perf_counter() - start)
        self.seconds_per_swap = min(seconds) / size

    def _updated(self, state: Any, updates: RowUpdates | BlockUpdates | BlockCopies) -> Any:
        values = [getattr(updates, name) for name in updates.__slots__]
        return self.compiler.get(UpdateShape(type(updates), len(values[0])))(state, *values)
