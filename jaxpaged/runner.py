"""The device's side of the engine: weights, KV pool, row state, compiled steps. Never sees a request."""

import functools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from tqdm import tqdm

from jaxpaged import steps
from jaxpaged.batch import Buckets, pick_bucket
from jaxpaged.config import DeviceFacts, EngineConfig, ModelConfig
from jaxpaged.kv_cache import copy_blocks, make_pool, pool_specs
from jaxpaged.models.weights import Weights
from jaxpaged.step_data import StepInputs, StepLogprobs, StepOutput

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
    return DeviceFacts(
        platform=device.platform,
        kind=device.device_kind,
        num_cores=os.cpu_count() or 1,
        total_memory=total,
        memory_limit=limit,
        memory_in_use=in_use,
        host_memory=memory.total,
        jax_version=jax.__version__,
        has_native_bf16=device.platform == "tpu" or capability >= 8,
    )


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
    num_logprobs: int | None

    def __str__(self) -> str:
        kind = (
            f"decode of {self.num_requests}" if self.is_decode else f"prefill of {self.num_tokens}×{self.num_requests}"
        )
        return kind if self.num_logprobs is None else f"{kind} with {self.num_logprobs} logprobs"


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """One compiled step: its shape in words, seconds it took, bytes of its temporaries."""

    shape: str
    seconds: float
    temporaries: int


class StepCompiler:
    """Compiled steps by shape, each made once, and a ledger of them. Works on shapes alone: no array is made."""

    def __init__(self, config: EngineConfig, model: ModelConfig, weights: Weights, buckets: Buckets, num_blocks: int):
        assert isinstance(config.block_size, int)
        self.ledger: list[CompileRecord] = []
        self._compiled: dict[StepShape, Any] = {}
        self._static = {
            "config": model,
            "backend": config.attention_backend,
            "max_model_len": config.max_model_len,
        }
        self._weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
        self._kv = pool_specs(model, num_blocks, config.block_size, config.dtype)
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

    def get(self, shape: StepShape) -> Any:
        """The step of this shape, compiled now if it has not been."""
        if shape not in self._compiled:
            start = time.perf_counter()
            compiled = self.lower(shape).compile()
            seconds = time.perf_counter() - start
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            self.ledger.append(CompileRecord(str(shape), seconds, temporaries))
            logger.debug("compiled %s in %.2f s", shape, seconds)
            self._compiled[shape] = compiled
        return self._compiled[shape]

    def lower(self, shape: StepShape) -> Any:
        """The step of this shape, lowered from shapes alone."""
        step = steps.decode_step if shape.is_decode else steps.prefill_step
        step = functools.partial(step, **self._static, num_logprobs=shape.num_logprobs)
        int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        b = shape.num_requests
        query_start = () if shape.is_decode else (int32((b + 1,)),)
        arguments = (int32((shape.num_tokens,)), int32((b,)), *query_start, int32((b,)), int32(()))
        return jax.jit(step, donate_argnums=(1, 2)).lower(self._weights, self._kv, self._state, *arguments)


def all_shapes(buckets: Buckets) -> list[StepShape]:
    """Every shape without log-probabilities that a step can have."""
    decodes = [StepShape(True, b, b, None) for b in buckets.requests]
    prefills = [
        StepShape(False, t, b, None)
        for t in buckets.tokens
        for b in buckets.prefill_requests
        if b <= pick_bucket(min(t, buckets.prefill_requests[-1]), buckets.prefill_requests, "requests")
    ]
    return decodes + prefills


def largest_shape(buckets: Buckets) -> StepShape:
    """The step with the most temporaries."""
    return StepShape(False, buckets.tokens[-1], buckets.prefill_requests[-1], buckets.logprobs[-1])


class Runner:
    """Executes steps, in order. `scratch_block` is the block beyond the pool that padding points to."""

    def __init__(self, config: EngineConfig, model: ModelConfig, weights: Weights, buckets: Buckets):
        assert config.num_device_blocks is not None and isinstance(config.block_size, int)
        self.scratch_block = config.num_device_blocks
        self.weights = weights
        self.compiler = StepCompiler(config, model, weights, buckets, config.num_device_blocks)
        self._kv = make_pool(model, config.num_device_blocks, config.block_size, config.dtype)
        self._state = steps.make_row_state(buckets.num_rows, buckets.max_blocks, self.scratch_block)
        self._update_rows = jax.jit(steps.update_rows, donate_argnums=0)
        self._update_blocks = jax.jit(steps.update_blocks, donate_argnums=0)
        self._copy_blocks = jax.jit(copy_blocks, donate_argnums=0)
        if config.warmup == "full":
            for shape in tqdm(all_shapes(buckets), desc="Compiling steps", disable=None):
                self.compiler.get(shape)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool, scratch block included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._kv))

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Brings the row state up to date, copies blocks, runs the step, and waits for what it drew."""
        shape = StepShape(inputs.is_decode, len(inputs.token_t), len(inputs.row_b), inputs.num_logprobs)
        step = self.compiler.get(shape)
        if inputs.copies is not None:
            self._kv = self._copy_blocks(self._kv, inputs.copies.source_c, inputs.copies.target_c)
        if inputs.row_updates is not None:
            self._state = _apply(self._update_rows, self._state, inputs.row_updates)
        if inputs.block_updates is not None:
            self._state = _apply(self._update_blocks, self._state, inputs.block_updates)
        query_start = () if inputs.is_decode else (inputs.query_start_b1,)
        output, self._kv, self._state = step(
            self.weights,
            self._kv,
            self._state,
            inputs.token_t,
            inputs.row_b,
            *query_start,
            inputs.context_len_b,
            np.int32(inputs.num_requests),
        )
        if inputs.num_logprobs is None:
            return StepOutput(token_id_b=np.asarray(output))
        token_b, logprobs = jax.device_get(output)
        return StepOutput(token_id_b=token_b, logprobs=StepLogprobs(*logprobs))

    def close(self):
        """Gives the device memory back at once."""
        for array in jax.tree.leaves((self.weights, self._kv, self._state)):
            array.delete()


def _apply(update: Callable, state: steps.RowState, values: Any) -> steps.RowState:
    return update(state, *(getattr(values, name) for name in values.__slots__))
