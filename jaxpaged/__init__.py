"""LLM inference in JAX: a paged KV cache, continuous batching, chunked prefill, prefix caching."""

from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

LLM = Engine
"""`Engine` under the name that vLLM's users type."""

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
