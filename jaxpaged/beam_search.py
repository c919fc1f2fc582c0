"""Beam search: the most probable completions of a prompt, looked for side by side.

A hypothesis is a steered request. When all hypotheses of a prompt have drawn, the best extensions among all candidates
go on: the first of a request's in its place, the others forked from it, and a request without one ends. So a step
computes one token for each hypothesis, and what hypotheses have in common is stored once.
"""

import itertools

from jaxpaged.completions import abort, decode_logprobs, detokenizer_for
from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxpaged.request import Request
from jaxpaged.sampling_params import RequestOutputKind
from jaxpaged.scheduler import Scheduler
from jaxpaged.tokenizer import Tokenizer


class BeamSearch:
    """The search of one prompt: `members` are the hypotheses that go on; one that ends is kept if it is good enough.

    Of the extensions of all hypotheses by one token, the `width` most probable ones that end by no stop token go on,
    and those that do and are more probable than the last of these have ended. The score of what has ended is its
    log-probability ÷ (number of its tokens, stop token included) ^ length_penalty. The search is over when all have
    `width` tokens of `max_tokens`, or when none that goes on can reach the score of the worst of `width` ended ones.
    """

    output_kind = RequestOutputKind.FINAL_ONLY

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        root: Request,
        width: int,
        length_penalty: float,
        tokenizer: Tokenizer | None,
    ):
        self.request_id = request_id
        self.members = [root]
        self._prompt, self._root, self._tokenizer = prompt, root, tokenizer
        self._width, self._length_penalty = width, length_penalty
        self._ended: list[Request] = []
        self._error: str | None = None
        self._num_preemptions = 0
        self._numbers = itertools.count(1)
        detokenizer_for(root, tokenizer)  # ValueError for a prompt that cannot be decoded

    @property
    def is_finished(self) -> bool:
        return all(member.is_finished for member in self.members)

    def take(self, request: Request, num_tokens: int, scheduler: Scheduler) -> int:
        """Goes on when all hypotheses have drawn; returns 1, for the token that `request` has drawn."""
        assert num_tokens == 0, f"hypothesis {request.id} has a token that was not chosen"
        if request in self.members and request.is_finished and request.candidates is None:
            self._error = f"a hypothesis could not go on: {request.stop_reason}"
            self.abort(scheduler)
        if all(member.candidates is not None and not member.is_finished for member in self.members):
            self._advance(scheduler)
        return 1

    def abort(self, scheduler: Scheduler):
        """Ends the search."""
        abort(self.members, scheduler)

    def output(self, kind: RequestOutputKind) -> RequestOutput | None:
        """The hypotheses that have ended, the best one first; None before the search is over, whatever the kind."""
        if not self.is_finished:
            return None
        completions, root = [], self._root
        try:
            completions = [self._completion(index, hypothesis) for index, hypothesis in enumerate(self._ended)]
        except Exception as error:  # the caller's tokenizer has exceptions of its own
            self._error = f"{type(self._tokenizer).__name__}.decode cannot take a hypothesis: {error}"
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=root.prompt_token_ids,
            outputs=completions if self._error is None else [],
            finished=True,
            error=self._error,
            num_cached_tokens=root.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=root.arrival_time,
                first_scheduled_time=root.first_scheduled_time,
                first_token_time=self._ended[0].first_token_time if self._ended else None,
                finished_time=max(m.finished_time for m in self.members if m.finished_time is not None),
                num_preemptions=self._num_preemptions + sum(m.num_preemptions for m in self.members),
            ),
        )

    def _advance(self, scheduler: Scheduler):
        """Has the best extensions chosen, and ends the search when none that goes on could change its outcome."""
        ended, going = self._best_extensions()
        if self.members[0].num_output_tokens + 1 == self._root.max_tokens:
            ended, going = ended + going, []
        best = [*self._ended, *(_extended(parent, token_id) for parent, token_id in ended)]
        self._ended = sorted(best, key=self._score, reverse=True)[: self._width]
        if going and self._is_decided(*going[0]):
            going = []
        parent_to_token_ids: dict[Request, list[int]] = {}
        for parent, token_id in going:
            parent_to_token_ids.setdefault(parent, []).append(token_id)
        for member in self.members:
            if member not in parent_to_token_ids:
                scheduler.finish(member)
                self._num_preemptions += member.num_preemptions
        if going:
            self.members = [m for each in parent_to_token_ids.items() for m in self._choose(*each, scheduler)]

    def _best_extensions(self) -> tuple[list[tuple[Request, int]], list[tuple[Request, int]]]:
        """(those that end, those that go on) as (hypothesis, token id), the most probable ones first."""
        extensions = [
            (member.cumulative_logprob + logprob.logprob, member, token_id)
            for member in self.members
            for token_id, logprob in (member.candidates or {}).items()
        ]
        extensions.sort(key=lambda extension: -extension[0])
        ended, going = [], []
        for _, parent, token_id in extensions:
            if len(going) == self._width:
                break
            (ended if token_id in parent.stop_ids else going).append((parent, token_id))
        return ended, going

    def _choose(self, parent: Request, token_ids: list[int], scheduler: Scheduler) -> list[Request]:
        """The hypotheses that extend one by each of the tokens: itself and, forked from it, the others."""
        branches = [parent.branch(self._new_id(scheduler)) for _ in token_ids[1:]]
        for hypothesis, token_id in zip([parent, *branches], token_ids, strict=True):
            hypothesis.choose(token_id)
        scheduler.fork(parent, branches)
        return [parent, *branches]

    def _new_id(self, scheduler: Scheduler) -> str:
        ids = (f"{self.request_id}/{number}" for number in self._numbers)
        return next(request_id for request_id in ids if request_id not in scheduler.requests)

    def _score(self, hypothesis: Request) -> float:
        return hypothesis.cumulative_logprob / hypothesis.num_output_tokens**self._length_penalty

    def _is_decided(self, parent: Request, token_id: int) -> bool:
        """Whether the most probable extension, however it goes on, reaches no score above the worst that is kept.

        It can only lose probability; what its length does to the score is most at one of the ends.
        """
        if len(self._ended) < self._width:
            return False
        assert parent.candidates is not None
        most = parent.cumulative_logprob + parent.candidates[token_id].logprob
        lengths = parent.num_output_tokens + 2, self._root.max_tokens
        return max(most / length**self._length_penalty for length in lengths) <= self._score(self._ended[-1])

    def _completion(self, index: int, hypothesis: Request) -> CompletionOutput:
        text, detokenizer = "", detokenizer_for(hypothesis, self._tokenizer)
        if self._tokenizer is not None and detokenizer is not None:
            detokenizer.append(hypothesis.output_token_ids, ended_by_token=hypothesis.is_ended_by_token)
            text = detokenizer.text(finished=True)
            for entry in hypothesis.logprobs:
                decode_logprobs(entry, self._tokenizer)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=hypothesis.output_token_ids,
            logprobs=hypothesis.logprobs,
            cumulative_logprob=hypothesis.cumulative_logprob,
            finish_reason=hypothesis.finish_reason,
            stop_reason=hypothesis.stop_reason,
        )


def num_candidates(width: int, num_stop_ids: int, vocab_size: int) -> int:
    """How many candidates of each hypothesis the best `width` extensions that go on can be among."""
    return min(width + num_stop_ids, vocab_size)


def _extended(parent: Request, token_id: int) -> Request:
    """A hypothesis that has ended with this token; it holds nothing but its tokens."""
    hypothesis = parent.branch(parent.id)
    hypothesis.choose(token_id)
    return hypothesis
