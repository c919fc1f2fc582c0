"""What `Engine.add_request` asked for: a request for each completion, their text so far, and the outputs of them."""

from collections.abc import Iterable
from dataclasses import replace

from jaxpaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxpaged.request import Request
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.scheduler import Scheduler
from jaxpaged.tokenizer import Detokenizer, Tokenizer, decode_token


class Completions:
    """The completions of one prompt: `members` are their requests, in the order of their index.

    Raises ValueError for a prompt that the tokenizer cannot decode. A tokenizer that fails later, or whatever else
    makes the outputs worthless, is an `error`: the outputs say so and hold nothing else.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        output_kind: RequestOutputKind,
        members: list[Request],
        tokenizer: Tokenizer | None,
    ):
        self.request_id = request_id
        self.output_kind = output_kind
        self.members = members
        self.error: str | None = None
        self._prompt, self._params, self._tokenizer = prompt, params, tokenizer
        self._prompt_token_ids = list(members[0].prompt_token_ids)
        """For outputs, which are the user's to change."""
        self._detokenizers = [detokenizer_for(member, tokenizer) for member in members]
        self._num_tokens_told = [0] * len(members)
        self._num_chars_told = [0] * len(members)
        self._is_end_told = [False] * len(members)

    @property
    def is_finished(self) -> bool:
        return all(member.is_finished for member in self.members)

    def take(self, request: Request, num_tokens: int, scheduler: Scheduler) -> int:
        """Adds the text of a member's last `num_tokens`; returns how many of them are kept.

        A stop string ends the request at the token that completes it; a tokenizer that fails ends all members.
        """
        detokenizer = self._detokenizers[request.child]
        if self._tokenizer is None or detokenizer is None or self.error is not None:
            return num_tokens
        num_known = len(request.token_ids)
        if request.num_prompt_logprobs is not None and request.num_output_tokens == num_tokens:
            self._decode_prompt_logprobs(request, scheduler)
            if self.error is not None:
                return num_tokens
        for i in range(num_known - num_tokens, num_known):
            token_ids = request.token_ids[i : i + 1]
            try:
                if request.logprobs:
                    decode_logprobs(request.logprobs[i - request.num_prompt_tokens], self._tokenizer)
                is_end = request.is_ended_by_token and i == num_known - 1
                stop = detokenizer.append(token_ids, ended_by_token=is_end)
            except Exception as error:  # the caller's tokenizer has exceptions of its own; other requests go on
                self.error = f"{type(self._tokenizer).__name__}.decode cannot take {token_ids}: {error}"
                self.abort(scheduler)
                break
            if stop is not None:
                request.stop_at(i + 1, stop)
                if not request.is_finished:
                    scheduler.finish(request)
                break
        return num_tokens - num_known + len(request.token_ids)

    def _decode_prompt_logprobs(self, request: Request, scheduler: Scheduler):
        assert self._tokenizer is not None
        try:
            for entry in request.prompt_logprobs:
                decode_logprobs(entry or {}, self._tokenizer)
        except Exception as error:  # the caller's tokenizer has exceptions of its own; other requests go on
            self.error = f"{type(self._tokenizer).__name__}.decode cannot take a token of the prompt: {error}"
            self.abort(scheduler)

    def abort(self, scheduler: Scheduler):
        """Ends all members that are not at their end."""
        abort(self.members, scheduler)

    def output(self, kind: RequestOutputKind) -> RequestOutput | None:
        """What is to be told now; None for nothing."""
        if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished:
            return None
        first, is_new = self.members[0], kind is not RequestOutputKind.DELTA or not any(self._num_tokens_told)
        completions = [self._completion(i, kind) for i in range(len(self.members))] if self.error is None else []
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion for completion in completions if completion is not None],
            prompt_logprobs=first.prompt_logprobs if is_new and self._params.prompt_logprobs is not None else None,
            finished=self.is_finished,
            error=self.error,
            num_cached_tokens=first.num_cached_tokens,
            metrics=metrics_of(self.members),
        )

    def _completion(self, i: int, kind: RequestOutputKind) -> CompletionOutput | None:
        """One completion: all of it, or with DELTA what was not told yet (None for nothing new)."""
        request, detokenizer = self.members[i], self._detokenizers[i]
        first_token = first_char = 0
        if kind is RequestOutputKind.DELTA:
            first_token, first_char = self._num_tokens_told[i], self._num_chars_told[i]
            is_end_new = request.is_finished and not self._is_end_told[i]
            if first_token == request.num_output_tokens and not is_end_new:
                return None
        text = "" if detokenizer is None else detokenizer.text(request.is_finished, first_char)
        if kind is RequestOutputKind.DELTA:
            self._num_tokens_told[i] = request.num_output_tokens
            self._num_chars_told[i] += len(text)
            self._is_end_told[i] = request.is_finished
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=i,
            text=text,
            token_ids=request.token_ids[request.num_prompt_tokens + first_token :],
            logprobs=request.logprobs[first_token:] if wants_logprobs else None,
            cumulative_logprob=request.cumulative_logprob if wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


def detokenizer_for(request: Request, tokenizer: Tokenizer | None) -> Detokenizer | None:
    """What makes a request's text, None where none is wanted. ValueError where the prompt cannot be decoded."""
    params = request.params
    if tokenizer is None or not params.detokenize:
        return None
    try:
        return Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            stop=params.stop or (),
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            min_tokens=params.min_tokens,
        )
    except Exception as error:  # the caller's tokenizer has exceptions of its own
        raise ValueError(f"{type(tokenizer).__name__}.decode cannot take the prompt: {error}") from error


def decode_logprobs(token_id_to_logprob: dict[int, Logprob], tokenizer: Tokenizer):
    """Puts the text of each token into its entry."""
    for token_id, logprob in token_id_to_logprob.items():
        token_id_to_logprob[token_id] = replace(logprob, decoded_token=decode_token(tokenizer, token_id))


def abort(members: Iterable[Request], scheduler: Scheduler):
    """Ends the requests that are not at their end, and frees their blocks at once."""
    for member in members:
        if not member.is_finished:
            for ended in (member, *member.siblings):
                ended.finish_reason = "abort"
            scheduler.finish(member)


def metrics_of(members: list[Request]) -> RequestMetrics:
    """When things happened to a prompt's requests: the first of each kind, and the last end once all have one."""
    first_token_times = [m.first_token_time for m in members if m.first_token_time is not None]
    ends = [m.finished_time for m in members if m.finished_time is not None]
    return RequestMetrics(
        arrival_time=members[0].arrival_time,
        first_scheduled_time=members[0].first_scheduled_time,
        first_token_time=min(first_token_times, default=None),
        finished_time=max(ends) if len(ends) == len(members) else None,
        num_preemptions=sum(m.num_preemptions for m in members),
    )
