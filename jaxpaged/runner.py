"""The device's side of the engine: weights, KV pool, row state, compiled steps. Never sees a request."""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
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
from jaxpaged.adjustments import Adjustments, make_adjustments, row_values, start_row
from jaxpaged.batch import Buckets, prompt_chunk
from jaxpaged.config import DeviceFacts, EngineConfig, ModelConfig
from jaxpaged.kv_cache import (
    HostBlocks,
    copy_blocks,
    gather_blocks,
    make_pool,
    pinned_host,
    pool_specs,
    scatter_blocks,
    swap_spec,
)
from jaxpaged.memory import MOST_STAGED
from jaxpaged.models.weights import Weights, map_specs, param_specs
from jaxpaged.step_data import (
    FEW_LOGPROBS,
    MAX_STOP_IDS,
    AdjustedRow,
    BlockCopies,
    BlockUpdates,
    PromptLogprobs,
    PromptTargets,
    RowUpdates,
    StepInputs,
    StepLogprobs,
    StepOutput,
    SwapIn,
    SwapOut,
    mask_words,
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
        compute_capability=capability,
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
class PrefillShape:
    """What a prefill is compiled for: padded tokens, padded requests. What it computes, a `DrawShape` draws from."""

    num_tokens: int
    num_requests: int

    def __str__(self) -> str:
        return f"prefill of {self.num_tokens}×{self.num_requests}"


@dataclass(frozen=True, slots=True)
class DrawShape:
    """What draws are compiled for: one after a prefill, or decodes, which compute a token before each draw.

    Padded requests, width of the log-probabilities, whether anything but temperature and truncation changes logits,
    whether only some tokens may be drawn.
    """

    is_decode: bool
    num_requests: int
    num_logprobs: int
    is_adjusted: bool = False
    is_masked: bool = False

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "draw"
        changes = ", adjusted" * self.is_adjusted + ", masked" * self.is_masked
        return f"{kind} of {self.num_requests}, up to {self.num_logprobs} logprobs{changes}"


@dataclass(frozen=True, slots=True)
class PromptLogprobsShape:
    """What the log-probabilities of a chunk of prompt are compiled for: padded tokens of the prefill, and width."""

    num_tokens: int
    num_logprobs: int

    def __str__(self) -> str:
        return f"up to {self.num_logprobs} prompt logprobs in a prefill of {self.num_tokens}"


@dataclass(frozen=True, slots=True)
class UpdateShape:
    """What an update of the device's state before a step is compiled for: its kind and padded size. `Adjustments` are
    made when first needed, an `AdjustedRow` is one of theirs."""

    kind: (
        type[RowUpdates]
        | type[BlockUpdates]
        | type[BlockCopies]
        | type[SwapOut]
        | type[SwapIn]
        | type[AdjustedRow]
        | type[Adjustments]
    )
    size: int

    def __str__(self) -> str:
        return f"{self.size} {self.kind.__name__}"


Shape = PrefillShape | DrawShape | PromptLogprobsShape | UpdateShape


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """One compiled step or update: its shape in words, seconds it took, bytes of its temporaries and outputs."""

    shape: str
    seconds: float
    temporaries: int


def compiler_options(device: Any = None) -> dict[str, int] | None:
    """What XLA is told beyond its defaults for a `jax.Device`: unless given, the first at hand.

    On CPUs with AVX-512 LLVM takes vectors half as wide by itself. For a TPU 7x XLA would lay 16-bit weights out anew
    in larger tiles, before the loop over decode steps: each call would copy all of them, and have them twice.
    """
    device = device or jax.devices()[0]
    if device.platform == "cpu":
        return {"xla_cpu_prefer_vector_width": 512}
    return {"xla_tpu_control_large_2nd_minor_layout_for_x16": 0} if device.device_kind == "TPU7x" else None


def temporaries_of(compiled: Any) -> int:
    """Bytes, on one device, that a compiled program takes beyond what it is given: temporaries, and outputs of its
    own."""
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _compile(lowered: Any) -> Any:
    return lowered.compile(compiler_options())


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and the seconds it took."""
    start = time.perf_counter()
    return make(), time.perf_counter() - start


class StepCompiler:
    """Compiled steps and updates by shape, each made once, and a ledger of them.

    Works on shapes alone: no array is made. With warmup="strict" what `compile_all` was not asked for is an error.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, buckets: Buckets, num_blocks: int):
        assert isinstance(config.block_size, int)
        self.ledger: list[CompileRecord] = []
        self._compiled: dict[Shape, Any] = {}
        self._is_strict = config.warmup == "strict"
        self._buckets, self._config, self._model = buckets, config, model
        specs = param_specs(model, config.dtype, config.quantization)
        self._weights = map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)), specs)
        self._kv = pool_specs(model, num_blocks, config.block_size, config.dtype, config.attention_backend)
        self._state = jax.eval_shape(
            functools.partial(steps.make_row_state, buckets.num_rows, buckets.max_blocks, num_blocks)
        )
        self._pinned = pinned_host(jax.devices()[0])
        self._make_adjustments = functools.partial(make_adjustments, buckets.num_rows, model.vocab_size)
        self._adjustments = jax.eval_shape(self._make_adjustments)

    @property
    def temporaries(self) -> int:
        """Bytes of temporaries of the largest step compiled so far."""
        return max((record.temporaries for record in self.ledger), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the row state."""
        return _num_bytes(self._state)

    @property
    def adjustments_bytes(self) -> int:
        """Bytes of the rows' adjustments, set aside until they are needed."""
        return _num_bytes(self._adjustments)

    def compile_all(self, shapes: Iterable[Shape], *, has_bar: bool = True):
        """Compiles those that are not compiled yet, with a progress bar, and enters them in the ledger.

        In parallel threads, but lowered in the caller's, whose settings of JAX count.
        """
        shapes = [shape for shape in dict.fromkeys(shapes) if shape not in self._compiled]
        bar = tqdm(desc="Compiling steps", total=len(shapes), disable=None if has_bar else True)
        with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = []
            for shape in shapes:
                lowered, seconds = _timed(functools.partial(self.lower, shape))
                jobs.append((shape, seconds, pool.submit(_timed, functools.partial(_compile, lowered))))
                jobs[-1][-1].add_done_callback(lambda _: bar.update())
            for shape, seconds, job in jobs:
                compiled, seconds_more = job.result()
                seconds += seconds_more
                self.ledger.append(CompileRecord(str(shape), seconds, temporaries_of(compiled)))
                logger.debug("compiled %s in %.2f s", shape, seconds)
                self._compiled[shape] = compiled

    def has(self, shape: Shape) -> bool:
        """Whether what has this shape is compiled."""
        return shape in self._compiled

    def need(self, shapes: Iterable[Shape]):
        """Compiles now those that are not compiled yet. RuntimeError for such in strict mode."""
        missing = [shape for shape in shapes if shape not in self._compiled]
        if missing and self._is_strict:
            raise RuntimeError(
                f"{missing[0]} was not compiled ahead, and warmup='strict' forbids to compile it now; use warmup='full'"
            )
        if missing:
            self.compile_all(missing, has_bar=False)

    def get(self, shape: Shape) -> Any:
        """The step or update of this shape; see `need`."""
        self.need([shape])
        return self._compiled[shape]

    def lower(self, shape: Shape) -> Any:
        """What has this shape, lowered from shapes alone."""
        match shape:
            case PrefillShape():
                return self._lower_prefill(shape)
            case DrawShape():
                return self._lower_draw(shape)
            case PromptLogprobsShape():
                return self._lower_prompt_logprobs(shape)
            case UpdateShape():
                return self._lower_update(shape)

    @property
    def _model_options(self) -> dict[str, Any]:
        config = self._config
        return {"config": self._model, "backend": config.attention_backend, "max_model_len": config.max_model_len}

    def _lower_prefill(self, shape: PrefillShape) -> Any:
        step = functools.partial(steps.prefill_step, **self._model_options)
        b, per_request = shape.num_requests, _int32(shape.num_requests)
        arguments = (_int32(shape.num_tokens), per_request, _int32(b + 1), per_request, _int32())
        return jax.jit(step, donate_argnums=1).lower(self._weights, self._kv, self._state, *arguments)

    def _lower_draw(self, shape: DrawShape) -> Any:
        options = steps.DrawOptions(
            num_logprobs=shape.num_logprobs,
            has_processed_logprobs=self._config.logprobs_mode == "processed_logprobs",
            logits_processors=self._config.logits_processors,
            logits_processor_counts=self._config.logits_processor_counts,
        )
        state = replace(self._state, adjustments=self._adjustments if shape.is_adjusted else None)
        arguments = (*[_int32(shape.num_requests)] * 4, jax.ShapeDtypeStruct((), jnp.bool_))
        if shape.is_decode:
            max_draws = self._buckets.max_draws if shape.num_logprobs <= FEW_LOGPROBS else 1
            step = functools.partial(steps.decode_step, **self._model_options, max_draws=max_draws, options=options)
            return jax.jit(step, donate_argnums=(1, 2)).lower(self._weights, self._kv, state, *arguments)
        if shape.is_masked:
            arguments += (_int32(shape.num_requests, mask_words(self._model.vocab_size)),)
        step, hidden_bd = functools.partial(steps.draw_step, options=options), self._hidden(shape.num_requests)
        return jax.jit(step, donate_argnums=1).lower(steps.head_of(self._weights), state, hidden_bd, *arguments)

    def _lower_prompt_logprobs(self, shape: PromptLogprobsShape) -> Any:
        step = functools.partial(steps.prompt_logprobs_step, num_logprobs=shape.num_logprobs)
        chunk = _int32(prompt_chunk(shape.num_tokens))
        return jax.jit(step).lower(steps.head_of(self._weights), self._hidden(shape.num_tokens), chunk, chunk)

    def _hidden(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_tokens, self._model.hidden_size), self._weights.final_norm_d.dtype)

    def _lower_update(self, shape: UpdateShape) -> Any:
        size, int32 = shape.size, _int32(shape.size)
        if shape.kind is SwapOut:
            return jax.jit(gather_blocks, out_shardings=self._pinned).lower(self._kv, int32)
        if shape.kind is SwapIn:
            scatter = functools.partial(scatter_blocks, is_pinned=self._pinned is not None)
            content = swap_spec(self._kv, size, self._pinned)
            return jax.jit(scatter, donate_argnums=0).lower(self._kv, int32, content)
        if shape.kind is Adjustments:
            return jax.jit(self._make_adjustments).lower()
        if shape.kind is AdjustedRow:
            row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._adjustments)
            return jax.jit(start_row, donate_argnums=0).lower(self._adjustments, _int32(), row)
        if shape.kind is RowUpdates:
            float32 = jax.ShapeDtypeStruct((size,), jnp.float32)
            tables, seeds = _int32(size, self._buckets.max_blocks), jax.ShapeDtypeStruct((size, 2), jnp.uint32)
            flags, stop_ids = jax.ShapeDtypeStruct((size,), jnp.bool_), _int32(size, MAX_STOP_IDS)
            sampling = (seeds, int32, float32, int32, float32, float32, int32, stop_ids, flags)
            update, state, arguments = steps.update_rows, self._state, (int32, tables, *sampling)
        elif shape.kind is BlockUpdates:
            update, state, arguments = steps.update_blocks, self._state, (int32, int32, int32)
        else:
            update, state, arguments = copy_blocks, self._kv, (int32, int32)
        return jax.jit(update, donate_argnums=0).lower(state, *arguments)


def _draw_shape(inputs: StepInputs) -> DrawShape:
    return DrawShape(inputs.is_decode, len(inputs.row_b), inputs.num_logprobs, inputs.is_adjusted, inputs.is_masked)


def _requests(inputs: StepInputs) -> tuple[Any, ...]:
    """What a step that draws is told of its requests."""
    return inputs.row_b, inputs.context_len_b, inputs.num_draws_b, np.bool_(inputs.has_logprobs)


def _prefill_shape(inputs: StepInputs) -> PrefillShape:
    return PrefillShape(len(inputs.token_t), len(inputs.row_b))


def _prompt_logprobs_shape(num_tokens: int, targets: PromptTargets) -> PromptLogprobsShape:
    return PromptLogprobsShape(num_tokens, targets.num_logprobs)


def _shapes_of(inputs: StepInputs) -> list[Shape]:
    """All that a step is made of, but for updates of the row state."""
    shapes: list[Shape] = [] if inputs.is_decode else [_prefill_shape(inputs)]
    shapes.append(_draw_shape(inputs))
    if inputs.prompt_targets is not None:
        shapes.append(_prompt_logprobs_shape(len(inputs.token_t), inputs.prompt_targets))
    swaps = (*inputs.swaps_out, *inputs.swaps_in)
    return shapes + [UpdateShape(type(swap), len(swap.device_block_c)) for swap in swaps]


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def all_shapes(buckets: Buckets, *, is_always_adjusted: bool) -> list[Shape]:
    """Every shape that a step can have, and every update of the device's state."""
    prefills = [PrefillShape(t, b) for t in buckets.tokens for b in buckets.prefill_requests(t)]
    sizes = sorted({p.num_requests for p in prefills})
    kinds = [(True, b, False) for b in buckets.requests]
    kinds += [(False, b, is_masked) for is_masked in (False, True) for b in sizes]
    draws = [
        DrawShape(is_decode, num_requests, num_logprobs, is_adjusted, is_masked)
        for is_adjusted in ([True] if is_always_adjusted else [False, True])
        for num_logprobs in buckets.logprobs
        for is_decode, num_requests, is_masked in kinds
    ]
    prompts = [PromptLogprobsShape(t, num_logprobs) for t in buckets.tokens for num_logprobs in buckets.logprobs]
    updates = [UpdateShape(kind, size) for kind in (RowUpdates, BlockUpdates, BlockCopies) for size in buckets.updates]
    return [
        *prefills,
        *draws,
        *prompts,
        *updates,
        *(UpdateShape(kind, size) for kind in (SwapOut, SwapIn) for size in buckets.swaps),
        UpdateShape(Adjustments, buckets.num_rows),
        UpdateShape(AdjustedRow, 1),
    ]


def largest_shapes(buckets: Buckets) -> list[Shape]:
    """The steps of each kind, and the swaps, with the most temporaries."""
    most_tokens, most_logprobs = buckets.tokens[-1], buckets.logprobs[-1]
    most_requests = buckets.prefill_requests(most_tokens)[-1]
    return [
        PrefillShape(most_tokens, most_requests),
        DrawShape(False, most_requests, most_logprobs, is_adjusted=True, is_masked=True),
        *(DrawShape(True, buckets.requests[-1], num_logprobs, True) for num_logprobs in buckets.logprobs),
        PromptLogprobsShape(most_tokens, most_logprobs),
        *(UpdateShape(kind, size) for kind in (SwapOut, SwapIn) for size in buckets.swaps[-1:]),
    ]


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
        self._head = steps.head_of(weights)
        self.compiler = StepCompiler(config, model, buckets, config.num_device_blocks)
        self._config, self._model, self._buckets = config, model, buckets
        self._make_state()
        self._host_blocks = HostBlocks(swap_spec(self._kv, num_host_blocks))
        self.seconds_per_swap: float | None = None
        if config.warmup in ("full", "strict"):
            self.compiler.compile_all(all_shapes(buckets, is_always_adjusted=config.logits_processor_counts))
            if num_host_blocks and self._is_swap_weighed:
                self._measure_swap()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool, scratch block included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._kv))

    def launch(self, inputs: StepInputs) -> steps.Computed | steps.Drawn:
        """Brings the row state up to date, moves blocks and starts the step. What it draws is to be waited for.

        Does not wait: steps run one after another on the device, and their outputs come to the host by themselves.
        Where masks say what may be drawn, what it has computed is to be given to `draw` with them.
        """
        self.compiler.need(_shapes_of(inputs))  # before anything changes
        for swap in inputs.swaps_out:
            self._swap_out(swap)
        if inputs.copies is not None:
            self._kv = self._updated(self._kv, inputs.copies)
        for i, swap in enumerate(inputs.swaps_in):
            self._swap_in(swap, is_late=i > 0 and i % MOST_STAGED == 0)
        for updates in (inputs.row_updates, inputs.block_updates):
            if updates is not None:
                self._state = self._updated(self._state, updates)
        self._adjust(inputs.adjusted_rows)
        if inputs.is_decode:
            step, state = self.compiler.get(_draw_shape(inputs)), self._state_to_draw(inputs)
            drawn, self._kv, state = step(self.weights, self._kv, state, inputs.token_t, *_requests(inputs))
            return self._take(inputs, drawn, state)
        prefill = self.compiler.get(_prefill_shape(inputs))
        arguments = (inputs.token_t, inputs.row_b, inputs.query_start_b1, inputs.context_len_b)
        computed, self._kv = prefill(self.weights, self._kv, self._state, *arguments, np.int32(inputs.num_requests))
        return computed if inputs.is_masked else self.draw(inputs, computed)

    def draw(self, inputs: StepInputs, computed: steps.Computed, mask_bw: np.ndarray | None = None) -> steps.Drawn:
        """Starts the draws of the step launched last, which has computed its tokens. `mask_bw`: see `draw_step`."""
        step, state = self.compiler.get(_draw_shape(inputs)), self._state_to_draw(inputs)
        masks = () if mask_bw is None else (mask_bw,)
        drawn, state = step(self._head, state, computed.hidden_bd, computed.token_b, *_requests(inputs), *masks)
        if inputs.prompt_targets is not None:
            drawn = replace(drawn, prompt_logprobs=self._prompt_logprobs(computed, inputs.prompt_targets))
        return self._take(inputs, drawn, state)

    def _state_to_draw(self, inputs: StepInputs) -> steps.RowState:
        return replace(self._state, adjustments=self._adjustments if inputs.is_adjusted else None)

    def _take(self, inputs: StepInputs, drawn: steps.Drawn, state: steps.RowState) -> steps.Drawn:
        """Keeps the state that a step gave back, and has what it drew come to the host."""
        if inputs.is_adjusted:
            self._adjustments = state.adjustments
        self._state = replace(state, adjustments=None)
        if not inputs.has_logprobs:
            drawn = replace(drawn, logprobs=None)
        for array in jax.tree.leaves(drawn):
            array.copy_to_host_async()
        return drawn

    def is_compiled(self, inputs: StepInputs) -> bool:
        """Whether `launch` would have nothing to compile but updates of state, which take no time."""
        return all(map(self.compiler.has, _shapes_of(inputs)))

    def wait(self, drawn: steps.Drawn) -> StepOutput:
        """What a step has drawn, when it is done. Raises what went wrong on the device."""
        token_id_ib, logprobs, chunks = jax.device_get((drawn.token_ib, drawn.logprobs, drawn.prompt_logprobs))
        return StepOutput(
            token_id_ib=token_id_ib,
            logprobs=None if logprobs is None else StepLogprobs(*logprobs),
            prompt_logprobs=None if chunks is None else PromptLogprobs(*map(np.concatenate, zip(*chunks, strict=True))),
        )

    def land_swaps(self):
        """Takes in what has come to the host. Not a part of `wait`, which may be in a thread of its own."""
        self._host_blocks.land()

    def _prompt_logprobs(self, computed: steps.Computed, targets: PromptTargets) -> list[tuple[jax.Array, ...]]:
        """Chunk after chunk, so that logits over the vocabulary are there of one chunk at a time."""
        step = self.compiler.get(_prompt_logprobs_shape(len(computed.hidden_td), targets))
        chunks = zip(targets.index_cp, targets.token_cp, strict=True)
        return [step(self._head, computed.hidden_td, index_p, token_p) for index_p, token_p in chunks]

    def _adjust(self, rows: Iterable[AdjustedRow]):
        """Tells the device of rows whose logits are changed; the first one makes it allocate what is set aside."""
        for row in rows:
            if self._adjustments is None:
                self._adjustments = self.compiler.get(UpdateShape(Adjustments, self._buckets.num_rows))()
            values = row_values(row, self._model.vocab_size)
            start = self.compiler.get(UpdateShape(AdjustedRow, 1))
            self._adjustments = start(self._adjustments, np.int32(row.row), values)

    def reset(self):
        """Makes pool and row state anew, after a step that failed or may not have run: K and V are lost."""
        self._host_blocks.forget()
        self._delete(self._kv, self._state, self._adjustments)
        self._make_state()

    def close(self):
        """Gives the device memory back at once, and the host's."""
        self._host_blocks.forget()
        del self._host_blocks
        self._delete(self.weights, self._kv, self._state, self._adjustments)

    def _make_state(self):
        config, buckets = self._config, self._buckets
        assert isinstance(config.block_size, int)
        pool = (self.scratch_block, config.block_size, config.dtype, config.attention_backend)
        self._kv = make_pool(self._model, *pool)
        self._state = steps.make_row_state(buckets.num_rows, buckets.max_blocks, self.scratch_block)
        self._adjustments: Adjustments | None = None

    def _delete(self, *trees: Any):
        for array in jax.tree.leaves(trees):
            if not array.is_deleted():  # a step that failed has taken what it was given, and given nothing back
                with contextlib.suppress(Exception):  # whoever waits for the step's output is told what went wrong
                    array.block_until_ready()  # or what is still running would write to memory given away
                array.delete()

    def _swap_out(self, swap: SwapOut):
        if self.seconds_per_swap is None and self._is_swap_weighed:
            self._measure_swap()
        gather = self.compiler.get(UpdateShape(SwapOut, len(swap.device_block_c)))
        self._host_blocks.store(swap.host_blocks, gather(self._kv, swap.device_block_c))

    def _swap_in(self, swap: SwapIn, *, is_late: bool):
        content_c = self._host_blocks.load(swap.host_blocks, len(swap.device_block_c))
        if is_late:  # what is brought in takes device memory twice until it is in its place
            jax.block_until_ready(self._kv)
        scatter = self.compiler.get(UpdateShape(SwapIn, len(swap.device_block_c)))
        self._kv = scatter(self._kv, swap.device_block_c, content_c)

    @property
    def _is_swap_weighed(self) -> bool:
        """Whether what a swap takes decides between swapping and recomputing."""
        return self._config.preemption_mode == "auto" and self._config.may_swap

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
