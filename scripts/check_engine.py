"""Compares the engine on an attention kernel with the engine on the XLA form, and prints JSON lines.

    python scripts/check_engine.py                                      SmolLM2, float32: tokens
    python scripts/check_engine.py --model scripts/models/TinyLlama-1.1B --load-format dummy --dtype bfloat16

Each prompt is served on `--backend` ("auto": what the engine takes here), greedily, prompts in chunks beside decodes.
Then the XLA form is given prompts and drawn tokens together, and says how probable it finds each: `largest` and `mean`
are the differences of the log-probabilities, of tokens of prompts and of drawn ones. In float32, with products in full
precision, the XLA form draws as well, and tokens are to be the same; `why` says where a first difference is between two
that differ by less than 1e-4, of which one in 200 requests is allowed. On random weights no tokens are compared: many
are near ties there.

Prompts are those of a file where the model has a tokenizer, else random. `bound`: what `largest` may be. The exit
status is 0 where all is as it should be.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
import numpy as np
from usage import count, usage_errors

from jaxpaged import Engine, RequestOutput, SamplingParams
from same_tokens import LOGPROB_TOLERANCE, assert_same

BOUND = {"float32": LOGPROB_TOLERANCE, "bfloat16": 0.25, "float16": 0.1}
"""Largest difference of a log-probability. In 16 bits three times what there is of SmolLM2 on the XLA form itself, on a
CPU, between drawing tokens one by one and computing them together: 0.083 and 0.035."""
RANDOM_LENGTHS = (40, 7, 200, 120, 16, 1)


def serve(args: argparse.Namespace, backend: str, prompts: list | None, params: SamplingParams):
    """(outputs, what a line says of the run) of an engine of its own. No prompts: the file's, or random ones."""
    settings = {"load_format": args.load_format, "dtype": args.dtype, "warmup": "lazy", "block_size": 16}
    settings |= {"max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 512, "num_device_blocks": 512}
    start = time.perf_counter()
    with usage_errors():
        engine = Engine(args.model, attention_backend=backend, swap_space=0, **settings)
    with engine:
        prompts = prompts or prompts_for(engine, args.prompts)[: args.first]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        facts = {"backend": engine.config.attention_backend, "dtype": engine.config.dtype}
    with usage_errors():
        if errors := [output.error for output in outputs if output.error]:
            raise ValueError(f"a prompt could not be served: {errors[0]}")
    facts |= {"requests": len(outputs), "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}
    return outputs, facts | {"seconds": round(time.perf_counter() - start, 1)}


def prompts_for(engine: Engine, path: Path) -> list:
    """The lines of the file, or random token ids where the model has no tokenizer."""
    with contextlib.suppress(ValueError):
        engine.get_tokenizer()
        return path.read_text().splitlines()
    rng = np.random.default_rng(0)
    return [rng.integers(3, engine.model_config.vocab_size, n).tolist() for n in RANDOM_LENGTHS]


def differences(drawn: list[RequestOutput], forced: list[RequestOutput]) -> tuple[np.ndarray, np.ndarray]:
    """How far the log-probabilities of the tokens are apart: of those of the prompts, and of those that were drawn."""
    prompt, output = [], []
    for a, b in zip(drawn, forced, strict=True):
        n = len(a.prompt_token_ids)
        entries = [*a.prompt_logprobs[1:], *a.outputs[0].logprobs]
        token_ids = [*a.prompt_token_ids, *a.outputs[0].token_ids]
        assert token_ids == b.prompt_token_ids
        found = [
            x[t].logprob - y[t].logprob for x, y, t in zip(entries, b.prompt_logprobs[1:], token_ids[1:], strict=True)
        ]
        prompt += found[: n - 1]
        output += found[n - 1 :]
    return np.abs(prompt), np.abs(output)


def check_forced(args: argparse.Namespace, drawn: list[RequestOutput]) -> bool:
    """Whether the XLA form finds the drawn tokens, and those of the prompts, as probable; prints a line for both."""
    prompts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in drawn]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    forced, facts = serve(args, "xla", prompts, params)
    bound, is_right = BOUND[facts["dtype"]], True
    for name, found in zip(("prompt", "drawn"), differences(drawn, forced), strict=True):
        is_near = bool(np.isfinite(found).all() and found.max() <= bound)
        line = {"logprobs": name, "dtype": facts["dtype"], "tokens": len(found), "largest": float(found.max())}
        print(json.dumps(line | {"mean": float(found.mean()), "bound": bound, "equal": is_near}), flush=True)
        is_right &= is_near
    return is_right


def check_tokens(args: argparse.Namespace, drawn: list[RequestOutput], params: SamplingParams) -> bool:
    """Whether the XLA form draws the same tokens; prints a line."""
    expected, facts = serve(args, "xla", [output.prompt_token_ids for output in drawn], params)
    print(json.dumps(facts), flush=True)
    differing = [i for i, (a, b) in enumerate(zip(drawn, expected, strict=True)) if ids(a) != ids(b)]
    line: dict = {"tokens": sum(len(ids(output)) for output in drawn), "differing": differing, "equal": True}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            assert_same(drawn, expected)
    except AssertionError as error:
        line |= {"equal": False, "why": str(error)}
    print(json.dumps(line), flush=True)
    return line["equal"]


def ids(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.txt")
    parser.add_argument("--first", type=count, metavar="N", help="only so many of them")
    parser.add_argument("--max-tokens", type=count, default=64)
    args = parser.parse_args(argv)
    if not args.prompts.is_file():
        parser.error(f"--prompts {args.prompts} is no file; give a text file with one prompt a line")
    params = SamplingParams(
        temperature=0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=2, prompt_logprobs=1, detokenize=False
    )
    if args.dtype == "float32":  # for all threads: some compile
        jax.config.update("jax_default_matmul_precision", "highest")
    drawn, facts = serve(args, args.backend, None, params)
    print(json.dumps(facts | {"device": jax.devices()[0].device_kind}), flush=True)
    is_right = check_forced(args, drawn)
    if args.dtype == "float32" and args.load_format != "dummy":
        is_right &= check_tokens(args, drawn, params)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
