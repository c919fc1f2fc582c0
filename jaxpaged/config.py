"""What an engine is made of, as plain data: the model's architecture, the engine's settings, the device's facts.

All three are frozen. `resolve` turns every "auto" into a value once and returns a new `EngineConfig`;
nothing assigns to a config afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

GIB = 2**30

DTYPES = ("float32", "float16", "bfloat16")

_MOST_REQUESTS = 2**16
_MOST_DECODE_STEPS = 2**10
"""Far above what anyone wants; a larger number is a mistake, which would fail later and in other words."""

_TPU_LEAST_BLOCK_SIZE = 16
"""Tokens of 16 bits in a memory tile of a TPU, which the kernel writes whole."""
_TPU_PAGE_TABLE_BYTES = 2**19
"""What a step's page table may take of a TPU's 1 MiB of scalar memory."""
_AUTO_TAKES_MOSAIC_GPU = False
"""Whether "auto" takes mosaic_gpu where it can be used. Changed only together with a record in scripts/results/ of that
kernel being right on hardware."""
_GPU_LARGEST_HEAD_DIM = 256
"""Beyond, a tile's queries and values are more than a multiprocessor's registers hold."""

LogitsProcessor = Callable[[Any, Any], Any]
"""f(logits_bv, state: adjustments.LogitsState) → logits_bv, a pure JAX function of each row alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length. Positions are in tokens.

    `kind` is the checkpoint's `rope_type`. Fields that a kind does not use stay None, and the family's
    reader refuses keys that the kind does not know.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture of a decoder-only model; families differ only in these fields."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    """The checkpoint's own dtype; what the engine computes in is `EngineConfig.dtype`."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}; "
                "each KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs of dimensions")

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once, norms and biases included."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        qkv, out = (self.num_heads + 2 * self.num_kv_heads) * h, self.num_heads * h
        layer = d * qkv + out * d + 3 * d * f + 2 * d
        layer += (qkv + d) * self.attention_bias + (2 * f + d) * self.mlp_bias
        return self.num_layers * layer + (2 - self.tie_word_embeddings) * self.vocab_size * d + d


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What the runner found out about the device, as plain data. Sizes in bytes."""

    platform: str
    """"cpu", "gpu" or "tpu"."""
    kind: str
    """The device's own name, for example "NVIDIA H200"."""
    num_cores: int
    total_memory: int
    """Bytes of memory on the device (on a CPU: of the host)."""
    memory_limit: int
    """Most bytes that the allocator hands out (on a CPU: what is available now); 0: the device does not say."""
    memory_in_use: int
    """Bytes in use before the engine took any."""
    host_memory: int
    """Bytes of RAM on the host."""
    jax_version: str
    has_native_bf16: bool
    """Whether matrix products in bfloat16 run faster than in float32 here. On a GPU: compute capability 8.0 or newer,
    from which on there are Pallas kernels as well."""
    compute_capability: float
    """Of an NVIDIA GPU, for example 9.0 of an H200; 0: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The engine's settings. "auto" and None are turned into values by `resolve`."""

    dtype: str = "auto"
    """float32, float16 or bfloat16; auto: on a CPU bfloat16 where its instructions and this version of jax make that
    faster than float32; elsewhere the checkpoint's 16-bit type."""
    seed: int = 0
    """Where the seeds of requests without one come from; also of random weights."""
    block_size: int | Literal["auto"] = "auto"
    """Tokens in a block of KV memory; auto: 16, on a TPU more where the page table of all requests would not fit."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: what the model was trained for."""
    max_num_seqs: int = 256
    """Most requests that run at once."""
    max_num_batched_tokens: int = 2048
    """The token budget: most tokens in a step."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the device's memory (any device, not only a GPU) that the engine may fill."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in bytes, instead of what is measured to be free."""
    num_device_blocks: int | None = None
    """Size of the KV pool in blocks, instead of what is measured to be free."""
    swap_space: float = 4
    """Host memory for the blocks of preempted requests, in GiB."""
    preemption_mode: str = "auto"
    """What becomes of a preempted request's K and V. swap: they go to the host and come back, where swap_space has
    room; recompute: they are dropped and computed again; auto: what costs less time."""
    enable_prefix_caching: bool = True
    """Reuse K and V of prompts that begin alike."""
    kv_offloading_size: float = 0
    """Host memory for blocks that the prefix cache loses on the device, in GiB; they come back when they are hit."""
    attention_backend: str = "auto"
    """xla, pallas_tpu, pallas_gpu or mosaic_gpu; auto: pallas_tpu on a TPU, for models that it can be used for
    (num_kv_heads × head_dim a multiple of 64), pallas_gpu on a GPU of compute capability 8.0 or newer (head_dim up to
    256); else xla, and a line that says why. mosaic_gpu, on an H100 or H200, is pallas_gpu with another kernel for
    decodes, where that fits the model; a line says why where it does not."""
    load_format: str = "auto"
    """auto, safetensors, gguf, orbax, or dummy: random weights of the right shapes."""
    kv_cache_dtype: str = "auto"
    """auto: K and V have the engine's dtype."""
    quantization: str | None = None
    """int8: matrices in int8 with a float32 scale per output channel, activations quantized per token on the way; None:
    weights are used as they are."""
    max_logprobs: int = 20
    """Most logprobs that a request may ask for; -1: the whole vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    """Which logprobs of drawn tokens are returned. raw_logprobs: the model's own; processed_logprobs: what was drawn
    from, after penalties, temperature and truncations. Those of the prompt are the model's own."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Functions f(logits_bv, state) -> logits_bv, compiled into the steps and applied in order to all requests, after
    penalties and before temperature; see LogitsState. What is forbidden stays forbidden."""
    logits_processor_counts: bool = False
    """Whether logits processors are told how often each token was drawn (output_counts_bv)."""
    warmup: str = "auto"
    """full: compile all steps at the start; lazy: each when first needed; strict: full, and a step that was not
    compiled at the start is an error; auto: lazy on a CPU, else full."""
    num_decode_steps: int | Literal["auto"] = "auto"
    """Decode steps in one call of the device while no request waits; auto: as many, up to 8, as it takes for the
    device to have work while the host does its own."""
    native_kernels: str | bool = "auto"
    """auto: none yet."""

    @property
    def may_swap(self) -> bool:
        """Whether a preempted request's blocks may go to the host."""
        return self.preemption_mode != "recompute" and self.swap_space > 0

    def __post_init__(self):
        self._check_choices()
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_int("max_num_seqs", self.max_num_seqs, 1, _MOST_REQUESTS)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_device_blocks"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError("max_model_len=1 leaves no room for a prompt token and a generated one; give 2 or more")
        if self.block_size != "auto":
            _check_int("block_size", self.block_size, 1)
        if self.num_decode_steps != "auto":
            _check_int("num_decode_steps", self.num_decode_steps, 1, _MOST_DECODE_STEPS)
        _check_int("seed", self.seed, -(2**63))
        if self.seed >= 2**64:
            raise ValueError(f"seed={self.seed} does not fit 64 bits")
        _check_int("max_logprobs", self.max_logprobs, -1)
        _check_number("gpu_memory_utilization", self.gpu_memory_utilization)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]: "
                "a fraction of the device's memory"
            )
        for name in ("swap_space", "kv_offloading_size"):
            _check_number(name, getattr(self, name))
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a number of GiB, 0 or more")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ValueError("preemption_mode='swap' needs host memory: raise swap_space, in GiB, above 0")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError(
                f"kv_offloading_size={self.kv_offloading_size} keeps what the prefix cache loses, but "
                "enable_prefix_caching=False; turn it on, or give kv_offloading_size=0"
            )
        if self.kv_cache_memory_bytes is not None and self.num_device_blocks is not None:
            raise ValueError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} and num_device_blocks={self.num_device_blocks} "
                "both set the size of the KV pool; give one of them"
            )

    def _check_choices(self):
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("load_format", self.load_format, ("auto", "safetensors", "gguf", "orbax", "dummy"))
        _check_choice("preemption_mode", self.preemption_mode, ("auto", "swap", "recompute"))
        _check_choice("warmup", self.warmup, ("auto", "lazy", "full", "strict"))
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching={self.enable_prefix_caching!r} must be True or False")
        backends = ("auto", "xla", "pallas_tpu", "pallas_gpu", "mosaic_gpu")
        _check_choice("attention_backend", self.attention_backend, backends)
        if self.kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is not supported yet; K and V have the engine's dtype ('auto')"
            )
        _check_choice("quantization", self.quantization, (None, "int8"))
        _check_choice("logprobs_mode", self.logprobs_mode, ("raw_logprobs", "processed_logprobs"))
        if not isinstance(self.logits_processors, tuple) or not all(map(callable, self.logits_processors)):
            raise ValueError(f"logits_processors={self.logits_processors!r} must be a tuple of functions")
        if not isinstance(self.logits_processor_counts, bool):
            raise ValueError(f"logits_processor_counts={self.logits_processor_counts!r} must be True or False")
        if self.logits_processor_counts and not self.logits_processors:
            raise ValueError("logits_processor_counts=True needs logits_processors: no one else reads the counts")
        if self.native_kernels != "auto":
            raise ValueError(f"native_kernels={self.native_kernels!r} is not supported yet; leave it 'auto'")


def resolve(engine: EngineConfig, model: ModelConfig, device: DeviceFacts) -> EngineConfig:
    """The same settings with every "auto" and None that does not depend on free memory turned into a value.

    The size of the KV pool (`num_device_blocks`) needs measured memory: `memory.py` decides it.
    """
    dtype = engine.dtype if engine.dtype != "auto" else _auto_dtype(model, device)
    max_model_len = engine.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings and not _stretches(model):
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the {model.max_position_embeddings} positions that the model was "
            f"trained for; give max_model_len={model.max_position_embeddings} or less"
        )
    backend = engine.attention_backend
    if backend == "auto":
        backend = _auto_backend(model, device)
    block_size = 16 if engine.block_size == "auto" else engine.block_size
    if backend == "pallas_tpu":
        block_size = _tpu_block_size(engine, model, device, dtype, max_model_len)
    if backend in ("pallas_gpu", "mosaic_gpu"):
        _check_gpu(backend, model, device)
    return replace(
        engine,
        dtype=dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        attention_backend=backend,
        warmup=("lazy" if device.platform == "cpu" else "full") if engine.warmup == "auto" else engine.warmup,
        max_logprobs=model.vocab_size if engine.max_logprobs == -1 else min(engine.max_logprobs, model.vocab_size),
    )


def _auto_backend(model: ModelConfig, device: DeviceFacts) -> str:
    """The device's own kernel, or xla where it has none for the model."""
    if _why_no_kernel(model, device):
        return "xla"
    if device.platform == "gpu" and _AUTO_TAKES_MOSAIC_GPU and _why_no_mosaic(device) is None:
        return "mosaic_gpu"
    return {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}.get(device.platform, "xla")


def _check_gpu(backend: str, model: ModelConfig, device: DeviceFacts):
    """ValueError where the backend's kernels for GPUs cannot be used."""
    reason = None if device.platform == "gpu" else f"this is {device.kind} ({device.platform})"
    reason = reason or _why_no_kernel(model, device)
    needed = "a GPU of compute capability 8.0 or newer"
    if backend == "mosaic_gpu":
        needed = "a GPU of compute capability 9.x (an H100 or H200), jax 0.11 or newer,"
        reason = reason or _why_no_mosaic(device)
    if reason:
        raise ValueError(
            f"attention_backend={backend!r} needs {needed} and head_dim up to {_GPU_LARGEST_HEAD_DIM}, but {reason}; "
            "use 'auto'"
        )


def _why_no_mosaic(device: DeviceFacts) -> str | None:
    """Why kernels on Mosaic GPU cannot be used on a GPU; None: they can."""
    if not 9 <= device.compute_capability < 10:
        return f"{device.kind} has compute capability {device.compute_capability}"
    if tuple(map(int, device.jax_version.split(".")[:2])) < (0, 11):
        return f"this is jax {device.jax_version}"
    return None


def _auto_dtype(model: ModelConfig, device: DeviceFacts) -> str:
    """On a CPU bfloat16 where that is faster than float32; on a TPU bfloat16; elsewhere the checkpoint's 16-bit dtype,
    bfloat16 for float32 checkpoints, float16 where bfloat16 is not native."""
    if device.platform == "cpu":
        return "bfloat16" if device.has_native_bf16 else "float32"
    if device.platform == "tpu":
        return "bfloat16"
    if not device.has_native_bf16:
        return "float16"
    return model.dtype if model.dtype != "float32" else "bfloat16"


def attention_notice(given: EngineConfig, model: ModelConfig, device: DeviceFacts) -> str | None:
    """A line for when "auto" takes the XLA form on a device that there is a kernel for."""
    reason = _why_no_kernel(model, device)
    if reason is None or given.attention_backend != "auto":
        return None
    return f"attention_backend='auto' takes 'xla', the form without a kernel of its own: {reason}"


def _why_no_kernel(model: ModelConfig, device: DeviceFacts) -> str | None:
    """Why the kernel for this kind of device cannot be used. None: it can, or there is none anyway."""
    if device.platform == "tpu" and not _fills_lanes(model):
        return f"num_kv_heads × head_dim = {model.num_kv_heads} × {model.head_dim} is no multiple of 64"
    if device.platform == "gpu" and not device.has_native_bf16:
        return f"{device.kind} is older than compute capability 8.0"
    if device.platform == "gpu" and model.head_dim > _GPU_LARGEST_HEAD_DIM:
        return f"head_dim={model.head_dim} is above {_GPU_LARGEST_HEAD_DIM}"
    return None


def _fills_lanes(model: ModelConfig) -> bool:
    """Whether K and V of a token fill lanes of 128, which is what the TPU kernel's layout is made for."""
    return model.num_kv_heads * model.head_dim % 64 == 0


def _tpu_block_size(
    engine: EngineConfig, model: ModelConfig, device: DeviceFacts, dtype: str, max_model_len: int
) -> int:
    """Block size for the TPU kernel. ValueError for what it cannot be used for."""
    if device.platform != "tpu":
        raise ValueError(
            f"attention_backend='pallas_tpu' needs a TPU, but this is {device.kind} ({device.platform}); use 'auto'"
        )
    if not _fills_lanes(model):
        raise ValueError(
            f"attention_backend='pallas_tpu' needs num_kv_heads × head_dim to be a multiple of 64, but the model has "
            f"{model.num_kv_heads} × {model.head_dim}; use 'auto' or 'xla'"
        )
    if dtype == "float16":
        raise ValueError(
            "attention_backend='pallas_tpu', which 'auto' takes on a TPU, knows no float16; use dtype='bfloat16' or "
            "'float32', or attention_backend='xla'"
        )
    fitting = _TPU_LEAST_BLOCK_SIZE
    while engine.max_num_seqs * -(-max_model_len // fitting) * 4 > _TPU_PAGE_TABLE_BYTES:
        fitting *= 2
    given = fitting if engine.block_size == "auto" else engine.block_size
    if given < fitting or given & (given - 1):
        raise ValueError(
            f"block_size={given}: attention_backend='pallas_tpu' needs a power of two, {_TPU_LEAST_BLOCK_SIZE} or "
            f"more, and {fitting} or more for the page table of max_num_seqs={engine.max_num_seqs} requests of "
            f"max_model_len={max_model_len} to fit {_TPU_PAGE_TABLE_BYTES // 1024} KiB of scalar memory"
        )
    return given


def _stretches(model: ModelConfig) -> bool:
    return model.rope_scaling is not None and model.rope_scaling.kind == "dynamic"


def _check_int(name: str, value: Any, least: int, most: int | None = None):
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a whole number, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value} must be {least} or more")
    if most is not None and value > most:
        raise ValueError(f"{name}={value} must be {most} or less")


def _check_number(name: str, value: Any):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")


def _check_choice(name: str, value: Any, choices: tuple[str | None, ...]):
    if not isinstance(value, str | None) or value not in choices:  # a numpy dtype is equal to its name
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}")
