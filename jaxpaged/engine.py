"""The engine: text in, text out. The only file that knows scheduler and runner.

A step: `Scheduler.schedule` says what to compute, `batch.build` makes arrays of it, `Runner.launch` starts it. When it
is done, `Scheduler.update` takes the tokens drawn and detokenizers make text of them, while the next step runs.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.profiler import TraceAnnotation
from tqdm import tqdm

from jaxpaged import batch, memory
from jaxpaged.adjustments import check_processors
from jaxpaged.attention import decode_notice
from jaxpaged.beam_search import BeamSearch, num_candidates
from jaxpaged.checkpoints import ModelSource, load_weights, open_model
from jaxpaged.completions import Completions
from jaxpaged.config import DeviceFacts, EngineConfig, ModelConfig, attention_notice, resolve
from jaxpaged.memory import MemoryReport, PreemptionCosts
from jaxpaged.models.weights import param_specs, weight_bytes
from jaxpaged.outputs import RequestOutput
from jaxpaged.prompts import Prompt, as_list, check_token_ids, needed, text_of, tokenize
from jaxpaged.request import Request
from jaxpaged.runner import Runner, StepCompiler, device_facts, largest_shapes, use_compilation_cache
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.scheduler import Scheduler
from jaxpaged.step_data import NOT_DRAWN, ScheduledStep, StepInputs, StepOutput
from jaxpaged.steps import Computed, Drawn
from jaxpaged.token_choices import TokenChoices
from jaxpaged.tokenizer import GGUFTokenizer, Tokenizer, encode_chat, load_tokenizer

logger = logging.getLogger("jaxpaged")

_WEIGHTS_VERSION = 0

_MAX_IN_FLIGHT = 2
"""Steps launched and not digested: one runs, the next waits for it on the device, the host works on what is around."""


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A step in flight: what was scheduled, what it will have drawn (only computed, while its draws wait for what the
    host makes of the tokens before), and what is known of it for the statistics."""

    scheduled: ScheduledStep
    inputs: StepInputs
    result: Computed | Drawn
    record: dict[str, Any]
    time: float

    @property
    def drawn(self) -> Drawn:
        assert isinstance(self.result, Drawn), "its draws are not started"
        return self.result


@dataclass(frozen=True, slots=True, eq=False)
class _Built:
    """A step that is to be launched next."""

    scheduled: ScheduledStep
    inputs: StepInputs
    seconds: float


class Engine:
    """An inference engine for one model on this process's first device.

    `model`: a directory (Hugging Face safetensors, or Orbax), a `.gguf` file, a Hugging Face repo id, or the built-in
    name "smollm2-135m-instruct". `tokenizer`: the caller's own (Hugging Face's `encode` and `decode`), a directory to
    load one from, or None for the model's; a model without one takes and returns token ids only.
    The other settings are the fields of `EngineConfig`. Settings that are wrong or not supported raise ValueError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        **settings: Any,
    ):
        known = [f.name for f in fields(EngineConfig)]
        unknown = sorted(settings.keys() - set(known))
        if unknown:
            raise ValueError(f"unknown settings {', '.join(unknown)}; there are tokenizer, {', '.join(known)}")
        given = EngineConfig(**settings)
        use_compilation_cache()
        facts = device_facts()
        source = open_model(model, given.load_format)
        self.model_config: ModelConfig = source.config
        config = resolve(given, source.config, facts)
        check_processors(config.logits_processors, source.config.vocab_size, has_counts=config.logits_processor_counts)
        host_warning = memory.check_host_memory(config, facts.host_memory)
        notices = (attention_notice(given, source.config, facts), decode_notice(config, source.config))
        for warning in (host_warning, *notices):
            if warning:
                logger.warning(warning)
        self._tokenizer = _load_tokenizer(tokenizer, source)
        self._choices = TokenChoices(self._tokenizer, source.config)
        self.config = self._size_pool(given, config, facts)
        weights = load_weights(source, config.dtype, config.quantization, seed=config.seed)
        self._facts = facts
        self._buckets = batch.make_buckets(self.config)
        num_host_blocks = memory.decide_num_host_blocks(self.config, source.config)
        self._runner: Runner | None = Runner(self.config, source.config, weights, self._buckets, num_host_blocks)
        digest_context = repr((_WEIGHTS_VERSION, None, None)).encode()
        self._scheduler = Scheduler(self.config, digest_context, num_host_blocks)

        self._groups: dict[str, Completions | BeamSearch] = {}
        self._ids = itertools.count()
        self._arrivals = itertools.count()
        self._seeds = np.random.default_rng(self.config.seed % 2**64)
        self._undelivered: dict[str, list[RequestOutput]] = {}
        self._request_to_news: dict[str, asyncio.Future[None]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._start_time = time.monotonic()
        self._totals = dict.fromkeys(
            ("num_steps", "num_prompt_tokens", "num_generated_tokens", "num_finished", "num_scheduled_tokens",
             "num_padded_tokens", "peak_blocks_used"), 0,
        )  # fmt: skip
        self._built: _Built | None = None
        self._in_flight: deque[_Launched] = deque()
        self._seconds_per_token: deque[float] = deque(maxlen=16)
        """Of the latest steps that were mostly prompt."""
        self._num_draws = 1 if self.config.num_decode_steps == "auto" else self.config.num_decode_steps
        self._last_digest_time = 0.0
        self._last_step: dict[str, Any] = {}
        logger.info(
            "%s in %s on %s (%s, %d cores, jax %s)\n%s",
            source.name, self._weights_in_words(), facts.kind, facts.platform, facts.num_cores, facts.jax_version,
            self.memory_report(),
        )  # fmt: skip

    # ---- offline use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes all prompts, batched; outputs in the order of the prompts.

        A prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"messages": conversation}. One
        `SamplingParams` for all, or one for each; None: `SamplingParams()`. A prompt that cannot be served gives an
        output with `error` in its place, and the others are served. ValueError for wrong parameters, before anything
        is queued.
        """
        prompts = as_list(prompts)
        all_params = self._params_for(prompts, sampling_params)
        for params in all_params:
            self._check_params(params)
        adds = [functools.partial(self._add, params=p, output_kind=RequestOutputKind.FINAL_ONLY) for p in all_params]
        return self._serve(prompts, adds, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        width: int,
        *,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The `width` best completions of each prompt that a beam of that width finds, the best one first.

        In each step the `width` most probable unfinished hypotheses go on (see `BeamSearch`). A completion's score is
        its `cumulative_logprob` ÷ (number of its tokens, end of sequence included) ^ length_penalty; `logprobs` hold
        those of its own tokens. Fewer than `width` completions come where no more exist. Prompts as in `generate`;
        ValueError for wrong parameters. `width` + the model's end-of-sequence tokens must be within `max_logprobs`.

        Differences from vLLM, on purpose: only generated tokens count as length, not the prompt's; a completion ends
        the search of others early where its score is out of their reach; all end-of-sequence tokens of the model end
        a completion.
        """
        prompts = as_list(prompts)
        params = self._beam_params(width, max_tokens, length_penalty, ignore_eos)
        add = functools.partial(self._add_beam_search, params=params, width=width, length_penalty=length_penalty)
        return self._serve(prompts, [add] * len(prompts), use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """`generate` on conversations in the model's chat template.

        `messages`: one conversation ([{"role": …, "content": …}, …]), or a list of them.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
            raise ValueError(f"messages={messages!r} must be a conversation, or a list of them")
        messages = list(messages)
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([{"messages": c} for c in conversations], sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Outputs of one prompt as they grow, cumulative unless `output_kind` says otherwise.

        ValueError at once for what cannot be served. Other requests go on meanwhile; a stream that is closed early
        is aborted.
        """
        stream = self._stream(self.add_request(prompt, sampling_params))
        next(stream)  # enters its `try`: a stream that is never read is aborted, too
        return stream  # pyright: ignore[reportReturnType]

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for asyncio: `async for output in engine.stream_async(prompt, params)`, many at once.

        The prompt is queued when the first output is asked for, where ValueError is raised for what cannot be served.
        A stream that is closed early, or whose task is cancelled, is aborted and its blocks are free at once. The
        event loop is left to others while the device computes, not while a step is compiled: see `warmup`. All
        streams of an engine belong to one event loop, in whose thread alone the engine may be used meanwhile.
        """
        request_id = self.add_request(prompt, sampling_params)
        try:
            while True:
                for output in self._undelivered.pop(request_id, ()):
                    yield output
                if request_id not in self._groups:  # finished, aborted, or given out by `step`
                    return
                await self._news_of(request_id)
        finally:
            self.abort(request_id)

    # ---- step by step

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queues a prompt and returns its id. ValueError, and nothing queued, when it cannot be served."""
        params = SamplingParams() if sampling_params is None else sampling_params
        self._check_params(params)
        if request_id is None:
            request_id = self._new_id()
        elif not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r} must be a string")
        elif self._is_in_use(request_id):
            raise ValueError(f"request_id={request_id!r} is in use by a request that is not done with; give another")
        self._add(request_id, prompt, params, params.output_kind)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Waits for a step; one output for each request that got tokens or finished. Empty when there is nothing to do.

        The next step runs already when this returns: what ends a request early (a stop token or string, an abort) is
        seen one step late, and what was drawn beyond it is dropped.
        """
        self._step()
        undelivered, self._undelivered = self._undelivered, {}
        self._wake(undelivered)
        return [output for outputs in undelivered.values() for output in outputs]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give."""
        return bool(self._groups or self._undelivered)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its blocks at once; returns what it had, None when it is not (any longer) there.

        Of one that has ended already that is its last output, unless somebody has taken it.
        """
        undelivered = self._undelivered.pop(request_id, [None])
        self._wake([request_id])
        group = self._groups.get(request_id)
        if group is None:
            return undelivered[-1]
        group.abort(self._scheduler)
        return self._output(group, RequestOutputKind.CUMULATIVE)

    # ---- what there is to know

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the model's chat template. ValueError when there is none."""
        return encode_chat(self.get_tokenizer(), messages, add_generation_prompt=add_generation_prompt)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use, a Hugging Face tokenizer unless the caller gave another. ValueError for none."""
        tokenizer = needed(self._tokenizer)
        return tokenizer.hugging_face if isinstance(tokenizer, GGUFTokenizer) else tokenizer

    def stats(self) -> dict[str, Any]:
        """Counters since the engine's start, the state of queues and blocks, and the ledger of compiled steps."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        padded = self._totals["num_padded_tokens"]
        return {
            **self._totals,
            "num_preemptions": scheduler.num_preemptions,
            "num_blocks_swapped_out": scheduler.num_swapped_out,
            "num_blocks_swapped_in": scheduler.num_swapped_in,
            "num_blocks_offloaded": scheduler.num_offloaded,
            "host_blocks_used": scheduler.swap_space.host.num_used,
            "host_blocks_cached": scheduler.swap_space.host.num_cached,
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "num_blocks": pool.num_blocks,
            "blocks_used": pool.num_used,
            "blocks_cached": pool.num_cached,
            "blocks_free": pool.num_blocks - pool.num_used - pool.num_cached,
            "prefix_hit_rate": scheduler.num_prefix_hits / max(scheduler.num_prefix_queries, 1),
            "num_prefix_hit_tokens": scheduler.num_prefix_hits,
            "num_host_hit_tokens": scheduler.num_host_hits,
            "padding_waste": 1 - self._totals["num_scheduled_tokens"] / padded if padded else 0.0,
            "compiled_steps": [
                {"shape": r.shape, "seconds": r.seconds, "temporaries": r.temporaries}
                for r in self._live_runner.compiler.ledger
            ],
        }

    def last_step_stats(self) -> dict[str, Any]:
        """One flat record of the latest step: times in seconds, requests and tokens by kind, blocks by state."""
        return dict(self._last_step)

    def memory_report(self) -> MemoryReport:
        """Where the device's memory goes, in bytes, with the largest step compiled so far."""
        config, runner = self.config, self._live_runner
        assert config.num_device_blocks is not None and config.max_model_len is not None
        assert isinstance(config.block_size, int)
        per_block = memory.block_bytes(self.model_config, config.block_size, config.dtype)
        return MemoryReport(
            limit=self._facts.memory_limit,
            total=self._facts.total_memory if self._facts.platform != "cpu" else self._facts.memory_limit,
            weights=weight_bytes(param_specs(self.model_config, config.dtype, config.quantization)),
            kv_pool=runner.kv_bytes,
            temporaries=runner.compiler.temporaries,
            state=runner.compiler.state_bytes,
            adjustments=runner.compiler.adjustments_bytes,
            staging=memory.swap_staging_bytes(config, self._facts.platform, per_block),
            other=self._facts.memory_in_use,
            block_size=config.block_size,
            bytes_per_block=per_block,
            num_device_blocks=config.num_device_blocks,
            num_host_blocks=self._scheduler.swap_space.host.num_blocks,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def check(self):
        """RuntimeError unless blocks, rows and queues agree."""
        self._scheduler.check()

    def close(self):
        """Ends all requests and gives the device's memory back. The engine cannot be used afterwards."""
        if self._runner is not None:
            for request_id in list(self._groups):
                self.abort(request_id)
            self._forget_steps()
            self._runner.close()
            self._runner = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_):
        self.close()

    # ---- parts of the above

    def _weights_in_words(self) -> str:
        dtype, quantization = self.config.dtype, self.config.quantization
        return dtype if quantization is None else f"{quantization} weights and {dtype}"

    @property
    def _live_runner(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the engine is closed; make a new one")
        return self._runner

    def _size_pool(self, given: EngineConfig, config: EngineConfig, facts: DeviceFacts) -> EngineConfig:
        """The config with the number of device blocks and a max_model_len that they can hold."""
        temporaries, state = 0, 0
        is_measured = config.num_device_blocks is None and config.kv_cache_memory_bytes is None
        if is_measured and facts.platform != "cpu":
            buckets = batch.make_buckets(config)
            compiler = StepCompiler(config, self.model_config, buckets, num_blocks=1)
            compiler.compile_all(largest_shapes(buckets))
            temporaries, state = compiler.temporaries, compiler.state_bytes + compiler.adjustments_bytes
        num_blocks = memory.decide_num_device_blocks(
            config,
            self.model_config,
            facts,
            weights=weight_bytes(param_specs(self.model_config, config.dtype, config.quantization)),
            temporaries=temporaries,
            state=state,
        )
        assert config.max_model_len is not None and isinstance(config.block_size, int)
        fitted = memory.fit_max_model_len(given.max_model_len, config.max_model_len, num_blocks, config.block_size)
        if fitted < config.max_model_len:
            logger.warning(
                "max_model_len is lowered from %d to %d: the KV pool has %d blocks of %d tokens",
                config.max_model_len, fitted, num_blocks, config.block_size,
            )  # fmt: skip
        return replace(config, num_device_blocks=num_blocks, kv_cache_memory_bytes=None, max_model_len=fitted)

    def _params_for(self, prompts, sampling_params) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * len(prompts)
        if not isinstance(sampling_params, (list, tuple)):
            raise ValueError(f"sampling_params must be SamplingParams, or a list of them, not {sampling_params!r}")
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts; give one for all, or one for each"
            )
        return list(sampling_params)

    def _check_params(self, params: SamplingParams):
        """ValueError for parameters that this engine or model cannot honour."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        self._choices.check(params)
        vocab_size, most = self.model_config.vocab_size, self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            num_logprobs = getattr(params, name)
            if num_logprobs is not None and (vocab_size if num_logprobs == -1 else num_logprobs) > most:
                raise ValueError(
                    f"{name}={num_logprobs}, but max_logprobs={most}; ask for fewer or raise the engine's "
                    "max_logprobs (-1: the whole vocabulary)"
                )
        if params.n > self.config.max_num_seqs:
            raise ValueError(
                f"n={params.n} completions run side by side, but max_num_seqs={self.config.max_num_seqs}; "
                "lower n or raise max_num_seqs"
            )

    def _beam_params(self, width: Any, max_tokens: Any, length_penalty: Any, ignore_eos: Any) -> SamplingParams:
        """What each hypothesis is sampled with. ValueError for what is wrong."""
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= self.config.max_num_seqs:
            raise ValueError(
                f"width={width!r} must be a whole number in [1, max_num_seqs={self.config.max_num_seqs}]: that many "
                "hypotheses run side by side"
            )
        is_number = isinstance(length_penalty, (int, float)) and not isinstance(length_penalty, bool)
        if not is_number or not math.isfinite(length_penalty):
            raise ValueError(f"length_penalty={length_penalty!r} must be a finite number")
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        num_stop_ids = 0 if ignore_eos else len(self.model_config.eos_token_ids)
        wanted = num_candidates(width, num_stop_ids, self.model_config.vocab_size)
        if wanted > self.config.max_logprobs:
            raise ValueError(
                f"width={width} takes the {wanted} most probable tokens of each hypothesis ({num_stop_ids} may end "
                f"it), but max_logprobs={self.config.max_logprobs}; lower width or raise the engine's max_logprobs"
            )
        return replace(params, logprobs=wanted)

    def _serve(self, prompts: list[Any], adds: list[Callable[..., None]], use_tqdm: bool) -> list[RequestOutput]:
        """Has each prompt added by its function of (request id, prompt), and steps until all are finished."""
        outputs: dict[str, RequestOutput] = {}
        ids = []
        try:
            for prompt, add in zip(prompts, adds, strict=True):
                request_id = self._new_id()
                ids.append(request_id)
                try:
                    add(request_id, prompt)
                except ValueError as error:
                    outputs[request_id] = RequestOutput(
                        request_id=request_id,
                        prompt=text_of(prompt),
                        prompt_token_ids=None,
                        finished=True,
                        error=str(error),
                    )
            self._run_until_finished(ids, outputs, use_tqdm)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return [outputs[request_id] for request_id in ids]

    def _new_id(self) -> str:
        return next(request_id for request_id in map(str, self._ids) if not self._is_in_use(request_id))

    def _is_in_use(self, request_id: str) -> bool:
        """Whether a request has this id that is unfinished, or whose last output nobody has taken yet."""
        return request_id in self._groups or request_id in self._undelivered

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, output_kind: RequestOutputKind):
        token_ids, max_tokens = self._servable(prompt, params)
        seed = None if params.seed is None else params.seed % 2**64
        members = [
            Request(
                id=member_id,
                parent_id=None if params.n == 1 else request_id,
                prompt_token_ids=token_ids,
                params=params,
                arrival=next(self._arrivals),
                max_tokens=max_tokens,
                seed=seed or 0,
                child=child,
                eos_token_ids=frozenset(self.model_config.eos_token_ids),
                bad_words=self._choices.bad_words(params),
                grammar=self._choices.grammar(params),
            )
            for child, member_id in enumerate(self._member_ids(request_id, params.n))
        ]
        members[0].siblings = members[1:]
        group = Completions(request_id, text_of(prompt), params, output_kind, members, self._tokenizer)
        self._scheduler.add(members[0])
        if seed is None:
            seed = int(self._seeds.integers(2**64, dtype=np.uint64))
            for member in members:
                member.seed = seed
        self._groups[request_id] = group
        self._totals["num_prompt_tokens"] += len(token_ids)

    def _member_ids(self, request_id: str, n: int) -> list[str]:
        """Ids of the requests that a prompt's n completions are, apart from those that users have given."""
        ids = (f"{request_id}/{number}" for number in itertools.count())
        free_ids = (member_id for member_id in ids if member_id not in self._scheduler.requests)
        return [request_id] if n == 1 else list(itertools.islice(free_ids, n))

    def _add_beam_search(
        self, request_id: str, prompt: Prompt, params: SamplingParams, width: int, length_penalty: float
    ):
        token_ids, max_tokens = self._servable(prompt, params)
        root = Request(
            id=request_id,
            parent_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival=next(self._arrivals),
            max_tokens=max_tokens,
            seed=0,
            eos_token_ids=frozenset(self.model_config.eos_token_ids),
            is_steered=True,
        )
        group = BeamSearch(request_id, text_of(prompt), root, width, length_penalty, self._tokenizer)
        self._scheduler.add(root)
        self._groups[request_id] = group
        self._totals["num_prompt_tokens"] += len(token_ids)

    def _servable(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], int]:
        """(token ids, most new tokens) of a prompt. ValueError for one that cannot be served."""
        _ = self._live_runner
        max_model_len = self.config.max_model_len
        assert max_model_len is not None
        token_ids = tokenize(prompt, self._tokenizer)
        check_token_ids(token_ids, max_model_len, self.model_config.vocab_size)
        room = max_model_len - len(token_ids)
        return token_ids, room if params.max_tokens is None else min(params.max_tokens, room)

    def _step(self):
        """Keeps steps in flight, waits for the oldest, and leaves what there is to tell of it in `_undelivered`."""
        launched = self._oldest_in_flight()
        if launched is None:
            return
        start = time.perf_counter()
        with self._rewound_when_it_fails(), TraceAnnotation("wait"):
            output = self._live_runner.wait(launched.drawn)
        self._digest(launched, output, time.perf_counter() - start)

    async def _step_async(self):
        """`_step`, whose wait leaves the event loop to others. All but the wait happens in the loop's own thread."""
        launched = self._oldest_in_flight()
        if launched is None:
            return
        start = time.perf_counter()
        try:
            output = await asyncio.to_thread(self._live_runner.wait, launched.drawn)
        except Exception:
            self._rewind()
            raise
        if self._in_flight and self._in_flight[0] is launched:  # no call of `step` or `generate` was faster
            self._digest(launched, output, time.perf_counter() - start)

    def _oldest_in_flight(self) -> _Launched | None:
        """Launches what may be in flight, and returns the step that will be done first; None when there is none."""
        runner = self._live_runner
        with self._rewound_when_it_fails():
            while self._draw_oldest(runner) or (len(self._in_flight) < _MAX_IN_FLIGHT and self._launch(runner)):
                pass
        return self._in_flight[0] if self._in_flight else None

    def _digest(self, launched: _Launched, output: StepOutput, wait_s: float):
        """Takes what the oldest step in flight has drawn, which took `wait_s` seconds to wait for."""
        start = time.perf_counter()
        with self._rewound_when_it_fails(), TraceAnnotation("update"):
            self._in_flight.popleft()
            self._live_runner.land_swaps()
            updated = self._scheduler.update(launched.scheduled, output)
            self._draw_oldest(self._live_runner)
        digested = time.perf_counter()
        with TraceAnnotation("detokenize"):
            request_to_num_tokens = self._tell_of(updated)
        end = time.perf_counter()
        times = {"wait_s": wait_s, "update_s": digested - start, "detokenize_s": end - digested}
        self._count(launched, output, request_to_num_tokens, times, end)

    @contextlib.contextmanager
    def _rewound_when_it_fails(self):
        """After a failure, Ctrl-C too, nobody knows what the device has written: all is computed again."""
        try:
            yield
        except BaseException:
            self._rewind()
            raise

    def _rewind(self):
        self._forget_steps()
        self._scheduler.rewind()
        self._live_runner.reset()

    def _launch(self, runner: Runner) -> bool:
        """Starts the next step. False when there is none, or none before the steps in flight are done.

        A step needs what the one before it draws. One that is yet to be compiled waits for all, so that their tokens
        do not wait for it.
        """
        if self._in_flight and isinstance(self._in_flight[-1].result, Computed):
            return False
        if self._built is None:
            self._built = self._build(runner)
        if self._built is None or (self._in_flight and not runner.is_compiled(self._built.inputs)):
            return False
        built, self._built, start = self._built, None, time.perf_counter()
        with TraceAnnotation("launch"):
            result = runner.launch(built.inputs)
        times = {"schedule_s": built.seconds, "launch_s": time.perf_counter() - start}
        record = self._record(built.scheduled, len(built.inputs.token_t)) | times
        self._in_flight.append(_Launched(built.scheduled, built.inputs, result, record, start))
        return True

    def _draw_oldest(self, runner: Runner) -> bool:
        """Starts the draws of the oldest step in flight, if they waited for what the host makes of all tokens before.

        Its masks are computed while the device computes its tokens.
        """
        launched = self._in_flight[0] if self._in_flight else None
        if launched is None or not isinstance(launched.result, Computed):
            return False
        with TraceAnnotation("mask"):
            mask_bw = self._masks(launched)
        drawn = runner.draw(launched.inputs, launched.result, mask_bw)
        self._in_flight[0] = replace(launched, result=drawn)
        return True

    def _masks(self, launched: _Launched) -> np.ndarray:
        """What each request of a step may draw, packed [b, words]; what one that has ended draws is dropped."""
        row_and_grammar = []
        for i, scheduled in enumerate(launched.scheduled.requests):
            request = self._scheduler.requests.get(scheduled.request_id)
            if request is not None and request.grammar is not None and scheduled.num_draws:
                request.grammar.follow(request.output_token_ids)
                row_and_grammar.append((i, request.grammar))
        return self._choices.masks(len(launched.inputs.row_b), row_and_grammar)

    def _build(self, runner: Runner) -> _Built | None:
        """The next step, None when there is none."""
        start = time.perf_counter()
        with TraceAnnotation("schedule"):
            scheduled = self._scheduler.schedule(self._num_draws)
            if scheduled is None:
                return None
            inputs = batch.build(scheduled, self._buckets, runner.scratch_block)
        return _Built(scheduled, inputs, time.perf_counter() - start)

    def _forget_steps(self):
        """Whatever is in flight or to be launched is not waited for."""
        self._built = None
        self._in_flight.clear()

    def _record(self, scheduled: ScheduledStep, num_padded: int) -> dict[str, Any]:
        """What is known of a step when it is launched."""
        prefills = [r for r in scheduled.requests if r.is_prefill]
        num_prefill_tokens = sum(r.num_scheduled_tokens for r in prefills)
        pool = self._scheduler.pool
        return {
            "num_requests": len(scheduled.requests),
            "num_prefill_requests": len(prefills),
            "num_decode_requests": len(scheduled.requests) - len(prefills),
            "num_prefill_tokens": num_prefill_tokens,
            "num_decode_tokens": scheduled.num_scheduled_tokens - num_prefill_tokens,
            "padded_tokens": num_padded,
            "num_waiting": len(self._scheduler.waiting),
            "num_running": len(self._scheduler.running),
            "num_preempted": scheduled.num_preempted,
            "blocks_used": pool.num_used,
            "blocks_cached": pool.num_cached,
            "blocks_free": pool.num_blocks - pool.num_used - pool.num_cached,
        }

    def _count(
        self, launched: _Launched, output: StepOutput, request_to_num_tokens: dict[Request, int], times, end: float
    ):
        """Enters a digested step into the counters, and chooses how many decode steps the next calls take.

        Padded tokens are those of all decode steps that ran; tokens drawn beyond a request's end are waste as well.
        """
        record, scheduled = launched.record, launched.scheduled
        num_new_tokens = sum(request_to_num_tokens.values())
        num_drawing = sum(r.num_draws > 0 for r in scheduled.requests)
        num_draws = max(int((output.token_id_ib != NOT_DRAWN).any(axis=1).sum()), 1)
        self._totals["num_steps"] += 1
        self._totals["num_generated_tokens"] += num_new_tokens
        self._totals["num_scheduled_tokens"] += scheduled.num_scheduled_tokens - num_drawing + num_new_tokens
        self._totals["num_padded_tokens"] += record["padded_tokens"] * num_draws
        self._totals["peak_blocks_used"] = max(self._totals["peak_blocks_used"], record["blocks_used"])
        self._last_step = (
            record
            | times
            | {
                "step": self._totals["num_steps"],
                "num_decode_steps": num_draws,
                "num_finished": sum(request.is_finished for request in request_to_num_tokens),
                "time": time.monotonic() - self._start_time,
                "duration_s": end - max(self._last_digest_time, launched.time),
            }
        )
        self._last_digest_time = end
        self._learn_costs(self._last_step)
        if self.config.num_decode_steps == "auto":
            self._pace(self._last_step)

    def _learn_costs(self, step: dict[str, Any]):
        """Tells the scheduler what a token costs that is computed again, and a block that is swapped."""
        num_tokens = step["num_prefill_tokens"] + step["num_decode_tokens"]
        if 2 * step["num_prefill_tokens"] > num_tokens:
            self._seconds_per_token.append(step["duration_s"] / num_tokens)
        seconds_per_swap = self._live_runner.seconds_per_swap
        if self._seconds_per_token and seconds_per_swap is not None:
            # The least: a step may have waited for a compilation, and a short one costs more a token.
            self._scheduler.costs = PreemptionCosts(min(self._seconds_per_token), seconds_per_swap)

    def _pace(self, step: dict[str, Any]):
        """More decode steps a call where the device waits for the host, fewer where the host has time to spare."""
        host_s = step["schedule_s"] + step["launch_s"] + step["update_s"] + step["detokenize_s"]
        if step["wait_s"] < host_s / 4:
            self._num_draws = min(2 * self._num_draws, batch.MOST_DRAWS)
        elif step["wait_s"] > 4 * host_s:
            self._num_draws = max(self._num_draws // 2, 1)

    def _group_of(self, request: Request) -> Completions | BeamSearch:
        return self._groups[request.id if request.parent_id is None else request.parent_id]

    def _tell_of(self, updated: list[tuple[Request, int]]) -> dict[Request, int]:
        """Makes text of new tokens, keeps what is to be told of their requests, returns how many tokens each keeps."""
        groups = dict.fromkeys(self._group_of(request) for request, _ in updated)
        kept = {
            request: self._group_of(request).take(request, num_tokens, self._scheduler)
            for request, num_tokens in updated
        }
        for group in groups:
            self._tell(group)
        return kept

    def _tell(self, group: Completions | BeamSearch):
        """Keeps what is to be told of a group for whoever asks next; a cumulative output replaces the one before."""
        output = self._output(group, group.output_kind)
        if output is not None:
            kept = self._undelivered.setdefault(group.request_id, [])
            if group.output_kind is not RequestOutputKind.DELTA:
                kept.clear()
            kept.append(output)

    def _output(self, group: Completions | BeamSearch, kind: RequestOutputKind) -> RequestOutput | None:
        """What is to be told of a group now, None for nothing; a finished group is forgotten."""
        if group.is_finished:
            del self._groups[group.request_id]
            self._totals["num_finished"] += 1
        return group.output(kind)

    def _run_until_finished(self, ids: list[str], outputs: dict[str, RequestOutput], use_tqdm: bool):
        """Steps until all of `ids` have an output; outputs of other requests are kept for `step`."""
        wanted = set(ids)
        num_in = num_out = 0
        with tqdm(total=len(ids), initial=len(outputs), desc="Processed prompts", disable=not use_tqdm) as bar:
            while len(outputs) < len(ids):
                self._step()
                for request_id in [i for i in self._undelivered if i in wanted]:
                    output = self._undelivered.pop(request_id)[-1]
                    outputs[request_id] = output
                    num_in += len(output.prompt_token_ids or ())
                    num_out += sum(len(completion.token_ids) for completion in output.outputs)
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(
                        f"input {num_in / seconds:.1f} tok/s, output {num_out / seconds:.1f} tok/s", refresh=False
                    )
                    bar.update()

    def _stream(self, request_id: str) -> Iterator[RequestOutput | None]:
        try:
            yield None
            while True:
                yield from self._undelivered.pop(request_id, ())
                if request_id not in self._groups:  # finished, aborted, or given out by `step`
                    return
                self._step()
        finally:
            self.abort(request_id)

    async def _news_of(self, request_id: str):
        """Waits until there is an output of the request, or it has ended."""
        loop = asyncio.get_running_loop()
        self._request_to_news[request_id] = news = loop.create_future()
        if self._stepping is None or self._stepping.done() or self._stepping.get_loop() is not loop:
            self._stepping = loop.create_task(self._step_for_news())
        try:
            await news
        finally:
            self._request_to_news.pop(request_id, None)

    async def _step_for_news(self):
        """Steps while anybody waits for news; what goes wrong is told to all who wait."""
        try:
            while self._request_to_news:
                await self._step_async()
                self._wake(self._undelivered.keys() & self._request_to_news.keys())
        except Exception as error:
            for news in self._request_to_news.values():
                if not news.done():
                    news.set_exception(error)
            self._request_to_news.clear()

    def _wake(self, request_ids: Iterable[str]):
        """Tells streams that wait for news of these requests to look for them."""
        for request_id in request_ids:
            news = self._request_to_news.pop(request_id, None)
            if news is not None and not news.done():
                news.set_result(None)


def _load_tokenizer(tokenizer: Any, source: ModelSource) -> Tokenizer | None:
    if tokenizer is None:
        return source.load_tokenizer()
    if isinstance(tokenizer, (str, os.PathLike)):
        loaded = load_tokenizer(Path(tokenizer))
        if loaded is None:
            raise ValueError(f"tokenizer={str(tokenizer)!r} is no directory with tokenizer files")
        return loaded
    if not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        raise ValueError(f"tokenizer={tokenizer!r} must be a directory, or an object with encode and decode")
    return tokenizer
