"""Sampling parameters: a parameter is implemented or refused, never ignored."""

import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

NAN, INF = float("nan"), float("inf")

UNSUPPORTED = {
    "flat_logprobs": (False, [True]),
    "logprob_token_ids": (None, [[1]]),
    "prompt_logprob_token_ids": (None, [[[1]]]),
    "prompt_logprob_start": (None, [0]),
    "stream_interval": (None, [1]),
    "extra_args": (None, [{}]),
    "skip_reading_prefix_cache": (None, [False, True]),
    "thinking_token_budget": (None, [10]),
    "repetition_detection": (None, [{"min_count": 3}]),
    "routed_experts_prompt_start": (None, [0]),
    "trace_decode_token_ids": (None, [[1]]),
    "watermarking": (None, [{}]),
}

WRONG = [
    ("n", [0, -1, 16385], r"\[1, 16384\]"),
    ("n", [1.0, "2", None, True], "whole number"),
    ("temperature", [-0.1, 2.1, NAN, INF], r"\[0, 2\]"),
    ("temperature", ["hot", None, True], "must be a number"),
    ("top_p", [0, 0.0, -0.1, 1.1, NAN], r"\(0, 1\]"),
    ("top_p", ["most", None, True], "must be a number"),
    ("top_k", [-2, 2**31], r"\[0, 2147483647\]; 0 or -1 turns it off"),
    ("top_k", [1.5, None, True], "whole number"),
    ("min_p", [-0.1, 1.1, NAN], r"\[0, 1\]"),
    ("min_p", [None, "0"], "must be a number"),
    ("seed", [-(2**63) - 1, 2**64], rf"\[{-(2**63)}, {2**64 - 1}\]"),
    ("seed", [0.5, "1", True], "whole number"),
    ("stop", [[1], 5, ["a", None], {"a": 1}], "a string or a list of strings"),
    ("stop", ["", ["a", ""]], "empty string"),
    ("stop_token_ids", [[-1], [2**31]], r"\[0, 2147483647\]"),
    ("stop_token_ids", [["a"], [1.0], [True], [[1]], [None]], "whole number"),
    ("stop_token_ids", [5, "12"], "a list of token ids"),
    ("include_stop_str_in_output", [1, None, "yes"], "True or False"),
    ("ignore_eos", [0, None], "True or False"),
    ("max_tokens", [0, -1, 2**31], r"\[1, 2147483647\]"),
    ("max_tokens", [1.0, "16", True], "whole number"),
    ("logprobs", [-2, 2**31], r"\[-1, 2147483647\]"),
    ("logprobs", [False, 1.0, "all"], "whole number"),
    ("prompt_logprobs", [-2, 2**31], r"\[-1, 2147483647\]"),
    ("prompt_logprobs", [False, 1.0, "all"], "whole number"),
    ("presence_penalty", [-2.1, 2.1, NAN, INF], r"\[-2, 2\]"),
    ("presence_penalty", ["a lot", None, True], "must be a number"),
    ("frequency_penalty", [-2.1, 2.1, NAN, -INF], r"\[-2, 2\]"),
    ("frequency_penalty", ["a lot", None, True], "must be a number"),
    ("repetition_penalty", [0, -1.0, NAN, INF, 1e-4, 1001], r"\[0.001, 1000\]"),
    ("repetition_penalty", ["a lot", None, True], "must be a number"),
    ("min_tokens", [-1, 2**31], r"\[0, 2147483647\]"),
    ("min_tokens", [1.0, None, True], "whole number"),
    ("min_tokens", [17], "at most max_tokens=16"),
    ("bad_words", [[1], 5, "word", ["a", None]], "a list of strings"),
    ("bad_words", [[""], ["a", " "]], "empty string"),
    ("logit_bias", [5, [[1, 2.0]], "12", ((1,),)], "a dictionary from token ids to numbers"),
    ("logit_bias", [{-1: 1.0}, {2**31: 1.0}], r"\[0, 2147483647\]"),
    ("logit_bias", [{"a": 1.0}, {1.5: 1.0}, {True: 1.0}, {"-1": 1.0}], "whole number"),
    ("logit_bias", [{5: NAN}, {5: INF}, {5: -INF}, {5: 1e7}], r"of token 5=.*\[-1000000.0, 1000000.0\]"),
    ("logit_bias", [{5: None}, {5: "1"}, {5: True}], "of token 5=.* must be a number"),
    ("allowed_token_ids", [5, "12", {1: 2}], "a list of token ids"),
    ("allowed_token_ids", [[]], "allows no token"),
    ("allowed_token_ids", [[-1], [2**31]], r"\[0, 2147483647\]"),
    ("allowed_token_ids", [["a"], [1.0], [True]], "whole number"),
    ("structured_outputs", ["json", 5, [{"regex": "a"}]], "StructuredOutputsParams, or a dictionary of one of json, "),
    ("detokenize", [1, None], "True or False"),
    ("skip_special_tokens", [0, None], "True or False"),
    ("spaces_between_special_tokens", [1, None], "True or False"),
    ("output_kind", ["DELTA", 1, None], "RequestOutputKind.CUMULATIVE"),
]


@pytest.mark.parametrize(
    ("name", "value", "legal"), [(name, v, legal) for name, values, legal in WRONG for v in values]
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_legal(name, value, legal):
    with pytest.raises(ValueError, match=rf"^{name}\b.*{legal}") as error:
        SamplingParams(**{name: value})
    shown = value[-1] if isinstance(value, list) and value else value
    if isinstance(value, dict) and name == "logit_bias":
        [(token_id, bias)] = value.items()
        shown = token_id if "token_id" in str(error.value) or bias == 1.0 else bias
    assert str(shown) in str(error.value)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_parameter_that_is_not_supported_yet_is_accepted_at_its_default_only(name):
    default, others = UNSUPPORTED[name]
    assert getattr(SamplingParams(**{name: default}), name) == default
    for value in others:
        with pytest.raises(ValueError, match=f"^{name}=.* is not supported yet; leave it at its default"):
            SamplingParams(**{name: value})


def test_the_parameters_not_supported_yet_are_those_tested_here_and_the_others_have_wrong_values_here():
    unsupported = {f.name for f in fields(SamplingParams) if f.metadata.get("unsupported")}
    assert unsupported == UNSUPPORTED.keys()
    assert {f.name for f in fields(SamplingParams)} - unsupported == {name for name, _, _ in WRONG}


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "guided_decoding", "temprature"])
def test_an_unknown_name_is_a_type_error(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: None})


def test_the_defaults_are_those_vllm_users_know():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.max_tokens) == (None, (), (), 16)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.detokenize) == (False, False, True)
    assert (params.logprobs, params.prompt_logprobs, params.skip_special_tokens) == (None, None, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.min_tokens, params.bad_words, params.logit_bias, params.allowed_token_ids) == (0, (), (), None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_the_ends_of_each_range_are_legal():
    SamplingParams(n=16384, temperature=2, top_p=1, top_k=2**31 - 1, min_p=1, seed=2**64 - 1, max_tokens=2**31 - 1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1000, min_tokens=16, prompt_logprobs=-1)
    SamplingParams(presence_penalty=2, frequency_penalty=-2, repetition_penalty=0.001, logit_bias={0: -1e6, 1: 1e6})
    SamplingParams(n=1, temperature=0, top_p=1e-9, top_k=0, min_p=0, seed=-(2**63), max_tokens=1, logprobs=0)
    SamplingParams(max_tokens=None, logprobs=-1, seed=0, stop_token_ids=[0, 2**31 - 1])


def test_other_spellings_of_a_value_become_one():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(logprobs=True, prompt_logprobs=True).logprobs == 1
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
    assert SamplingParams(bad_words=["a"]).bad_words == ("a",)
    assert SamplingParams(allowed_token_ids={3}).allowed_token_ids == (3,)
    assert SamplingParams(logit_bias={"7": 1, 8: -2.5}).logit_bias == ((7, 1.0), (8, -2.5))
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == (3, 1)
    assert SamplingParams(stop_token_ids={3}).stop_token_ids == (3,)


def test_a_temperature_close_to_zero_is_used_as_given():
    assert SamplingParams(temperature=1e-6).temperature == 1e-6


def test_greedy_sampling_of_several_completions_is_refused():
    with pytest.raises(ValueError, match=r"^n must be 1 when sampling greedily.*got n=2"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2, temperature=0.01).n == 2


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match=r"stop=\['a'\] needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop_token_ids == (1,)


def test_the_callers_lists_are_neither_changed_nor_kept():
    stop, stop_token_ids, logit_bias = ["a"], [1, 1], {5: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, logit_bias=logit_bias)
    stop.append("b")
    logit_bias[6] = 1.0
    assert (params.stop, stop_token_ids, params.logit_bias) == (("a",), [1, 1], ((5, 1.0),))


def test_parameters_are_frozen_and_equal_when_their_values_are():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2
    changed = SamplingParams(logit_bias={5: 1.0}, bad_words=["a"], allowed_token_ids=[5])
    assert replace(changed, n=1) == changed and hash(replace(changed, n=1)) == hash(changed)
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"])
    assert hash(SamplingParams(stop="a")) == hash(SamplingParams(stop=["a"]))


def test_the_readme_says_of_every_parameter_what_it_does_here():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    table = readme.split("| parameter | what it does here |")[1].split("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    names = {name: text for cell, text in rows for name in re.findall("`([^`]+)`", cell)}
    assert names.keys() == {f.name for f in fields(SamplingParams)}
    assert {name for name, text in names.items() if "not supported yet" in text} == UNSUPPORTED.keys()
