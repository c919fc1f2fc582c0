"""What a request's logits become before a draw, written from the formulas, one token after another, in float64."""

import numpy as np

import tiny
from jaxpaged import SamplingParams


def adjusted_logits(
    logits_v, prompt: list[int], output: list[int], params: SamplingParams, *, eos=(), bad_words=()
) -> np.ndarray:
    """Logits [v] after masks, bias and penalties; `bad_words` are token ids, since `params` has text."""
    new_v = np.asarray(logits_v, np.float64).copy()
    for token_id in range(len(new_v)):
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            new_v[token_id] = -np.inf
    for word in bad_words:
        before = list(word[:-1])
        if not before or output[-len(before) :] == before:
            new_v[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token_id in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            new_v[token_id] = -np.inf
    for token_id, bias in params.logit_bias:
        new_v[token_id] += bias
    for token_id in set(prompt) | set(output):
        factor = params.repetition_penalty
        new_v[token_id] = new_v[token_id] / factor if new_v[token_id] > 0 else new_v[token_id] * factor
    for token_id in set(output):
        new_v[token_id] -= params.frequency_penalty * output.count(token_id)
        new_v[token_id] -= params.presence_penalty
    return new_v


def greedy_tokens(prompt: list[int], params: SamplingParams, bad_words=()) -> list[int]:
    """What the small test model yields greedily, everything recomputed for each token; ended by EOS and stop ids."""
    eos, output = tiny.CONFIG.eos_token_ids, []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    while len(output) < params.max_tokens:
        logits_v = tiny.naive_logits(prompt + output)[-1]
        output.append(int(adjusted_logits(logits_v, prompt, output, params, eos=eos, bad_words=bad_words).argmax()))
        if output[-1] in ends:
            break
    return output


def logprobs(logits_v) -> np.ndarray:
    """log softmax [v]; −inf stays."""
    shifted_v = np.asarray(logits_v, np.float64) - np.max(logits_v)
    return shifted_v - np.log(np.exp(shifted_v).sum())
