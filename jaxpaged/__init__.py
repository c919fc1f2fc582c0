"""LLM inference in JAX: a paged KV cache, continuous batching, chunked prefill, prefix caching."""

from typing import TYPE_CHECKING

from jaxpaged.config import EngineConfig
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from jaxpaged.engine import Engine

    LLM = Engine

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str):
    """`Engine`, also as `LLM`, the name that vLLM's users type. Imported when first asked for: until then
    `import jaxpaged` is quick, and what must be set before jax is imported can still be set."""
    if name in ("Engine", "LLM"):
        from jaxpaged.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
