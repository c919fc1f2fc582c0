"""Where the device's memory goes: pure arithmetic, from measured numbers. All sizes in bytes unless named otherwise."""

from dataclasses import dataclass

from jaxpaged.config import GIB, DeviceFacts, EngineConfig, ModelConfig

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_CPU_POOL_LIMIT = 4 * GIB
_CPU_POOL_FRACTION = 0.4


def kv_block_shape(layout: str, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of one block in one layer. ValueError for a layout that is not known.

    "head_major" (GPU and CPU): K, or V, [kv_heads, block_size, head_dim].
    "packed" (TPU): K and V, [block_size, kv_heads × 2 × head_dim].
    """
    match layout:
        case "head_major":
            return (num_kv_heads, block_size, head_dim)
        case "packed":
            return (block_size, num_kv_heads * 2 * head_dim)
    raise ValueError(f"KV layout {layout!r} is not known; there are 'head_major' and 'packed'")


def kv_layout(backend: str) -> str:
    """The layout that an attention backend reads."""
    return "packed" if backend == "pallas_tpu" else "head_major"


def block_bytes(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block: K and V of `block_size` tokens in all layers, unpadded."""
    per_layer = 2 * block_size * model.num_kv_heads * model.head_dim * DTYPE_BYTES[dtype]
    return per_layer * model.num_layers


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def num_host_blocks(swap_space: float, bytes_per_block: int) -> int:
    """Blocks that `swap_space` GiB of host memory hold."""
    return int(swap_space * GIB) // bytes_per_block


def decide_num_host_blocks(engine: EngineConfig, model: ModelConfig) -> int:
    """Number of blocks of the host pool, from a resolved config: what swap_space holds, but no more than all requests
    that can be under way have at their full length, none where preempted requests are always recomputed; and what
    kv_offloading_size holds."""
    assert isinstance(engine.block_size, int) and engine.max_model_len is not None
    per_block = block_bytes(model, engine.block_size, engine.dtype)
    most = engine.max_num_seqs * blocks_for(engine.max_model_len, engine.block_size) if engine.may_swap else 0
    return min(num_host_blocks(engine.swap_space, per_block), most) + num_host_blocks(
        engine.kv_offloading_size, per_block
    )


_SWAP_SIZES = (4, 32)
"""Padding is moved as well: at most 3 blocks a step, each way."""

MOST_STAGED = 4
"""Calls whose blocks are under way at once, to the host; and to the device, before a step."""


def swap_sizes(engine: EngineConfig) -> tuple[int, ...]:
    """Blocks that are moved between device and host in one call, ascending; none where nothing goes to the host."""
    return _SWAP_SIZES if engine.may_swap or engine.kv_offloading_size else ()


def swap_staging_bytes(engine: EngineConfig, platform: str, bytes_per_block: int) -> int:
    """Most bytes of device memory that blocks take which are under way to the host, and to the device before each of
    two steps in flight. On GPUs and TPUs they wait in pinned memory of the host, and none is taken between steps."""
    if platform != "cpu":
        return 0
    return 3 * MOST_STAGED * max(swap_sizes(engine), default=0) * bytes_per_block


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Measured seconds: to compute a token as part of a prompt; to move a block to the host and back."""

    per_token: float
    per_block: float


_REMEDIES = {
    "weights": "take quantization='int8' or a smaller dtype",
    "temporaries": "lower max_num_batched_tokens or max_num_seqs",
    "step state": "lower max_num_seqs or max_model_len",
    "other programs": "end them",
}
"""What makes a part of the device's memory smaller."""


def decide_num_device_blocks(
    engine: EngineConfig, model: ModelConfig, device: DeviceFacts, *, weights: int, temporaries: int, state: int
) -> int:
    """Number of blocks of the device pool, from a resolved config.

    Given blocks or bytes are taken as they are. On a CPU otherwise the smallest of 4 GiB, 0.4 × the memory
    available and max_num_seqs × max_model_len tokens; elsewhere (limit × utilization − all but KV) ÷ block bytes.
    ValueError where nothing is left, or the device has not as much as is given.
    """
    assert isinstance(engine.block_size, int) and engine.max_model_len is not None
    per_block = block_bytes(model, engine.block_size, engine.dtype)
    given_bytes = engine.kv_cache_memory_bytes or (engine.num_device_blocks or 0) * per_block
    if given_bytes > device.total_memory > 0:
        name = "kv_cache_memory_bytes" if engine.num_device_blocks is None else "num_device_blocks"
        raise ValueError(
            f"{name}={getattr(engine, name)} would take {given_bytes} bytes, but {device.kind} has "
            f"{device.total_memory}; lower it"
        )
    if engine.num_device_blocks is not None:
        return engine.num_device_blocks
    if engine.kv_cache_memory_bytes is not None:
        num_blocks = engine.kv_cache_memory_bytes // per_block
        if num_blocks < 1:
            raise ValueError(
                f"kv_cache_memory_bytes={engine.kv_cache_memory_bytes} holds no block: one takes {per_block} bytes"
            )
        return num_blocks
    if device.platform == "cpu":
        full = engine.max_num_seqs * blocks_for(engine.max_model_len, engine.block_size)
        available = device.memory_limit - weights
        usable = device.memory_limit * engine.gpu_memory_utilization - weights
        left = int(min(full * per_block, _CPU_POOL_LIMIT, _CPU_POOL_FRACTION * available, usable))
    elif device.memory_limit == 0:
        raise ValueError(
            f"{device.kind} does not say how much memory it has; give kv_cache_memory_bytes or num_device_blocks"
        )
    else:
        usable = int(device.memory_limit * engine.gpu_memory_utilization)
        left = usable - weights - temporaries - state - device.memory_in_use
    if left < per_block:
        parts = {"weights": weights, "temporaries": temporaries, "step state": state}
        parts["other programs"] = device.memory_in_use
        largest = max(parts, key=lambda name: parts[name])
        taken = ", ".join(f"{name} {size}" for name, size in parts.items())
        raise ValueError(
            f"no memory is left for the KV pool: of {device.memory_limit} bytes gpu_memory_utilization="
            f"{engine.gpu_memory_utilization} may be filled, and these take: {taken}; for one block of {per_block} "
            f"bytes {per_block - left} are missing. The largest part are the {largest}: {_REMEDIES[largest]}, raise "
            "gpu_memory_utilization, or use a larger device"
        )
    return left // per_block


def fit_max_model_len(given: int | None, resolved: int, num_blocks: int, block_size: int) -> int:
    """The longest request that the pool can hold, at most `resolved` tokens.

    ValueError where the user gave a max_model_len that does not fit.
    """
    room = num_blocks * block_size
    if room >= resolved:
        return resolved
    if room < 2:
        raise ValueError(
            f"the KV pool has room for {room} token, but a request needs 2 or more (a prompt token and a generated one)"
            "; enlarge it (kv_cache_memory_bytes or num_device_blocks)"
        )
    if given is not None:
        raise ValueError(
            f"max_model_len={given} needs {blocks_for(given, block_size)} blocks of {block_size} tokens, but the KV "
            f"pool has {num_blocks} ({room} tokens); lower max_model_len to {room} or enlarge the pool "
            "(kv_cache_memory_bytes, num_device_blocks or gpu_memory_utilization)"
        )
    return room


def check_host_memory(engine: EngineConfig, host_memory: int) -> str | None:
    """None, or a warning when the host's blocks may take over 40 % of its memory. ValueError over 70 %."""
    swap_space = engine.swap_space if engine.may_swap else 0
    settings = f"swap_space={swap_space}"
    if engine.kv_offloading_size:
        settings += f" + kv_offloading_size={engine.kv_offloading_size}"
    fraction = (swap_space + engine.kv_offloading_size) * GIB / host_memory
    text = f"{settings} GiB is {fraction:.0%} of the host's {host_memory / GIB:.1f} GiB of memory"
    if fraction > 0.7:
        raise ValueError(f"{text}; at most 70 % may be taken: lower it to {0.7 * host_memory / GIB:.1f} or less")
    return f"{text}; more than 40 % may leave too little for others" if fraction > 0.4 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """The partition of the device's memory, summing to `limit`. `str()` gives it as a table.

    `temporaries` is that of the largest step compiled so far. `adjustments` are set aside for penalties, biases and
    masks, and allocated when a request first needs them. `staging`: for blocks on their way to the host and back.
    `other`: in use before the engine, and the runtime's own.
    """

    limit: int
    total: int
    weights: int
    kv_pool: int
    temporaries: int
    state: int
    adjustments: int
    staging: int
    other: int
    block_size: int
    bytes_per_block: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_seqs: int

    @property
    def free(self) -> int:
        steps = (self.temporaries, self.state, self.adjustments, self.staging)
        return self.limit - self.weights - self.kv_pool - sum(steps) - self.other

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of max_model_len tokens the pool holds at once."""
        return self.num_device_blocks / blocks_for(self.max_model_len, self.block_size)

    def __str__(self) -> str:
        parts = [
            ("weights", self.weights),
            ("KV pool", self.kv_pool),
            ("temporaries of the largest step compiled", self.temporaries),
            ("step state", self.state),
            ("token counts and masks (when first needed)", self.adjustments),
            ("blocks on their way to and from the host", self.staging),
            ("other (runtime, in use before)", self.other),
            ("free", self.free),
            ("limit", self.limit),
        ]
        lines = ["Device memory"]
        lines += [f"  {name:<42}{size / GIB:9.3f} GiB {size / max(self.limit, 1):7.1%}" for name, size in parts]
        if self.limit < 0.95 * self.total:
            lines.append(
                f"  (the limit is {self.limit / self.total:.0%} of the device's {self.total / GIB:.1f} GiB; "
                "XLA_PYTHON_CLIENT_MEM_FRACTION raises it)"
            )
        return "\n".join([*lines, *self._block_lines()])

    def _block_lines(self) -> list[str]:
        tokens = self.num_device_blocks * self.block_size
        host_gib = self.num_host_blocks * self.bytes_per_block / GIB
        return [
            "KV cache",
            f"  block: {self.block_size} tokens, {self.bytes_per_block:,} bytes ({self.bytes_per_token:,} a token)",
            f"  device blocks: {self.num_device_blocks:,} ({tokens:,} tokens)",
            f"  host blocks: {self.num_host_blocks:,} (up to {host_gib:.2f} GiB of host memory)",
            f"  requests of {self.max_model_len:,} tokens at once: {self.max_concurrency:.2f} "
            f"(at most {self.max_num_seqs})",
        ]
