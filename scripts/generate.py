"""Generates text for every line of a file of prompts: `python scripts/generate.py --prompts file.txt`.

Lines go to the engine as room becomes free, so the file may be larger than memory. Each result is written the moment
it is finished, one row in one write: a kill at any moment loses only what was still running.
Nothing here imports jax before the arguments are known to be right.
"""

import argparse
import ast
import contextlib
import hashlib
import inspect
import json
import os
import sys
import textwrap
import time
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from usage import usage_errors

from jaxpaged.config import EngineConfig
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
NOT_FLAGS = ("logits_processors", "logits_processor_counts")
"""Settings of the engine that only a program can make: functions, and what they are given."""
SAMPLING_NAMES = tuple(f.name for f in fields(SamplingParams) if f.name != "output_kind")

EPILOG = """
prompts: a text file has one prompt a line. A file named *.jsonl has one object a line with either "prompt" (text),
  "prompt_token_ids" or "messages" ([{"role": ..., "content": ...}], put through the chat template), and sampling
  parameters for that line alone, named with underscores: {"prompt": "Hi", "max_tokens": 5}

rows of --output, one JSON object a line, in the order in which they finish:
  index: line number in the file of prompts, from 1      seed: the one used
  prompt: the text as given; null where "prompt_token_ids" or "messages" were given, which then follow it
  text, token_ids, finish_reason, stop_reason: the completion; with n > 1 the first one, and all of them in "outputs"
  cumulative_logprob, logprobs, prompt_logprobs: where asked for; their last digits can change with the batch
  num_prompt_tokens, num_generated_tokens: the latter of all completions
  metrics: what changes from run to run: queue_s, first_token_s and total_s in seconds since the engine got the line,
    num_cached_tokens, num_preemptions
  A line that cannot be served has index, prompt (where readable) and "error" instead.
  Settings and a digest of the prompts are kept in OUTPUT.meta.json, for --resume.

exit status: 0 all lines served, 1 some became error rows, 2 wrong usage, 130 interrupted
"""


def field_docs(cls: type) -> dict[str, str]:
    """Field name → the string literal below the field in the class's source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }


def value_parser(kinds: tuple, metavar: str) -> Callable[[str], typing.Any]:
    """A parser of a flag's text into the first of `kinds` that takes it: None, int, float, a Literal or str."""

    def parse(text: str):
        if type(None) in kinds and text == "none":
            return None
        for kind in kinds:
            if kind in (int, float, str):
                with contextlib.suppress(ValueError):
                    return kind(text)
            elif typing.get_origin(kind) is dict:
                with contextlib.suppress(ValueError):
                    return json.loads(text)
            elif text in typing.get_args(kind):
                return text
        raise argparse.ArgumentTypeError(f"{text!r} must be {metavar}")

    return parse


def name_of(kind) -> str:
    """What a flag's value may be, for its help: the choices of a Literal, JSON for a dictionary, else the type."""
    return "JSON" if typing.get_origin(kind) is dict else "|".join(typing.get_args(kind)) or kind.__name__


def add_flags(group, cls: type, skip: tuple[str, ...] = ()):
    """One flag for each supported field of `cls`, with the field's type, default and docstring."""
    kinds, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in fields(cls):
        if field.name in skip or field.metadata.get("unsupported"):
            continue
        kind = kinds[field.name]
        members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
        items = [typing.get_args(member) for member in members if typing.get_origin(member) is list]
        members = items[0] if items else members
        members = tuple(m for m in members if m is not StructuredOutputsParams and typing.get_origin(m) is not tuple)
        names = ("none" if m is type(None) else name_of(m) for m in members)
        metavar = "|".join(names)
        options = {"type": value_parser(members, metavar), "metavar": metavar}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif items:
            options |= {"action": "extend", "nargs": "+"}
        help_text = f"{docs.get(field.name, '')} (default: {field.default})".strip().replace("%", "%%")
        group.add_argument("--" + field.name.replace("_", "-"), default=field.default, help=help_text, **options)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s --prompts FILE [--output FILE] [options]",
        description="Generate text for every line of a file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--prompts", required=True, type=Path, metavar="FILE", help="text, one prompt a line; or .jsonl (see below)")
    add("--model", default="smollm2-135m-instruct", help="directory, .gguf file, Hugging Face repo id or built-in name")
    add("--tokenizer", help="directory of the tokenizer (default: the model's own)")
    add(
        "--output", type=Path, metavar="FILE", help="write JSONL rows here (default: readable text to stdout, in order)"
    )
    add("--chat", action="store_true", help="make each text prompt a user message, put through the chat template")
    add("--resume", action="store_true", help="go on with the rows that --output already has")
    add("--overwrite", action="store_true", help="replace the rows that --output already has")
    add("--stats-file", type=Path, metavar="FILE", help="write one JSON record a step here, anew in each run")
    add(
        "--profile", type=Path, metavar="DIR",
        help="trace the run into this folder, for https://ui.perfetto.dev or xprof; give few prompts",
    )  # fmt: skip
    add("--quiet", action="store_true", help="no memory report, progress bar or summary on stderr")
    sampling = parser.add_argument_group("sampling", "A line without a seed gets one made of --seed and its index.")
    add_flags(sampling, SamplingParams, skip=("seed", "output_kind"))
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip=NOT_FLAGS)
    return parser


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one line of the file of prompts asks for, or why it cannot be served.

    `given` has the line's prompt under the key it came with; `params` is None only where `error` is set.
    """

    index: int
    given: dict
    params: SamplingParams | None = None
    error: str | None = None


def derive_seed(seed: int, index: int) -> int:
    """The seed of a line that has none: 63 bits that depend on the run's seed and the line number alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "little") >> 1


def read_record(raw: bytes, jsonl: bool) -> dict:
    """The line as a dict of prompt and sampling overrides. Raises ValueError when it is not readable."""
    try:
        text = raw.decode("utf-8")
        if not text.strip():
            raise ValueError("the line is empty; a prompt needs at least one character")
        record = json.loads(text) if jsonl else {"prompt": text}
        to_json(record).encode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"the line is not UTF-8: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the line is broken JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"the line is a JSON {type(record).__name__}; it must be an object with one of {PROMPT_KEYS}")
    return record


def check_record(given: dict, overrides: dict):
    """Raises ValueError unless there is one prompt of the right type and every other key is a sampling parameter."""
    if len(given) != 1:
        raise ValueError(f"the line has {' and '.join(given) or 'no prompt'}; give exactly one of {PROMPT_KEYS}")
    if unknown := sorted(overrides.keys() - set(SAMPLING_NAMES)):
        raise ValueError(f"unknown keys {unknown}; beside the prompt only sampling parameters may be given")
    if "prompt" in given and not (isinstance(given["prompt"], str) and given["prompt"].strip()):
        raise ValueError(f"prompt={given['prompt']!r} must be a text that is not empty")
    token_ids = given.get("prompt_token_ids", [])
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        raise ValueError("prompt_token_ids must be a list of whole numbers")


def parse_line(raw: bytes, index: int, *, jsonl: bool, sampling: dict, seed: int) -> Line:
    """The line, with `sampling` where it says nothing else. Never raises for what a line holds."""
    given = {}
    try:
        record = read_record(raw, jsonl)
        given = {key: record.pop(key) for key in PROMPT_KEYS if key in record}
        check_record(given, record)
        params = SamplingParams(**{**sampling, **record}, output_kind=RequestOutputKind.FINAL_ONLY)
    except (ValueError, TypeError) as error:
        return Line(index=index, given=given, error=str(error))
    if params.seed is None:
        params = replace(params, seed=derive_seed(seed, index))
    return Line(index=index, given=given, params=params)


def read_lines(args: argparse.Namespace, sampling: dict, skip: typing.Container[int]) -> Iterator[Line]:
    """The lines whose index is not in `skip`; \\r\\n ends a line too, and a byte order mark is no part of the first."""
    with args.prompts.open("rb") as file:
        for index, raw in enumerate(file, 1):
            if index not in skip:
                raw = raw.removesuffix(b"\n").removesuffix(b"\r").removeprefix(b"\xef\xbb\xbf" if index == 1 else b"")
                yield parse_line(raw, index, jsonl=args.prompts.suffix == ".jsonl", sampling=sampling, seed=args.seed)


def to_json(record: typing.Any) -> str:
    """JSON on one line, also for readers that end lines where Unicode does."""
    text = json.dumps(record, ensure_ascii=False)
    return text.translate({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})


def completion_fields(completion: CompletionOutput) -> dict:
    row = {name: getattr(completion, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")}
    if completion.logprobs is not None:
        row["cumulative_logprob"] = completion.cumulative_logprob
        row["logprobs"] = [candidates_list(candidates) for candidates in completion.logprobs]
    return row


def candidates_list(candidates: dict) -> list[dict]:
    """Tokens and their log-probabilities, the token that is there first."""
    return [{"token_id": token_id, **asdict(logprob)} for token_id, logprob in candidates.items()]


def result_row(line: Line, output: RequestOutput) -> dict:
    row = {"index": line.index, "prompt": None, **line.given, **completion_fields(output.outputs[0])}
    if len(output.outputs) > 1:
        row["outputs"] = [{"index": one.index, **completion_fields(one)} for one in output.outputs]
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [entry and candidates_list(entry) for entry in output.prompt_logprobs]
    row["num_prompt_tokens"] = len(output.prompt_token_ids)
    row["num_generated_tokens"] = sum(len(one.token_ids) for one in output.outputs)
    row["seed"] = line.params.seed
    at = output.metrics
    moments = {"queue_s": at.first_scheduled_time, "first_token_s": at.first_token_time, "total_s": at.finished_time}
    row["metrics"] = {name: None if t is None else round(t - at.arrival_time, 6) for name, t in moments.items()}
    row["metrics"] |= {"num_cached_tokens": output.num_cached_tokens, "num_preemptions": at.num_preemptions}
    return row


def error_row(line: Line, error: str) -> dict:
    return {"index": line.index, "prompt": None, **line.given, "error": error}


def readable(row: dict) -> str:
    """The row for a person: number and prompt on one line, the completions below."""
    prompt = row["prompt"] or row.get("messages") or row.get("prompt_token_ids") or ""
    head = textwrap.shorten(prompt if isinstance(prompt, str) else to_json(prompt), 100, placeholder=" …")
    if "error" in row:
        texts = [f"error: {row['error']}"]
    else:
        texts = [f"({one['index']}) {one['text']}" for one in row["outputs"]] if "outputs" in row else [row["text"]]
    return "\n".join([f"[{row['index']}] {head}", *texts, ""])


def print_in_order(write: Callable[[str], None]) -> Callable[[dict], None]:
    """A taker of rows that writes each as soon as the rows of all lines before it are written."""
    index_to_row, next_index = {}, 1

    def put(row: dict):
        nonlocal next_index
        index_to_row[row["index"]] = row
        while next_index in index_to_row:
            write(readable(index_to_row.pop(next_index)))
            sys.stdout.flush()
            next_index += 1

    return put


def fingerprint(args: argparse.Namespace, sampling: dict, settings: dict, digest: str) -> dict:
    """Everything that rows depend on, flat, as JSON gives it back."""
    record = {"prompts (sha256)": digest, "jsonl": args.prompts.suffix == ".jsonl"}
    record |= {name: getattr(args, name) for name in ("model", "tokenizer", "chat")} | sampling | settings
    return json.loads(json.dumps(record))


def rows_to_keep(args: argparse.Namespace, expected: dict) -> tuple[int, dict[int, bool]]:
    """Bytes of --output to keep, and for each index in them whether it is an error row.

    Raises ValueError when rows are there that this run must not touch or cannot continue.
    """
    output, meta = args.output, Path(f"{args.output}.meta.json")
    if args.overwrite or not output.exists() or output.stat().st_size == 0:
        return 0, {}
    if not args.resume:
        raise ValueError(f"{output} has rows already; continue it (--resume), replace it (--overwrite) or name another")
    if not meta.exists():
        raise ValueError(f"{meta} is missing, so nothing says which run {output} is of; start again with --overwrite")
    try:
        before = dict(json.loads(meta.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{meta} is broken ({error}); repair it, or start again with --overwrite") from None
    names = [name for name in {**before, **expected} if before.get(name) != expected.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)!r}, is now {expected.get(name)!r}" for name in names)
        raise ValueError(f"--resume cannot continue {output}, which is of another run: {changes}")
    return read_rows(output)


def read_rows(output: Path) -> tuple[int, dict[int, bool]]:
    """Bytes of the whole rows, and index → whether it is an error row. A torn last row does not count."""
    size, index_to_is_error = 0, {}
    with output.open("rb") as file:
        for raw in file:
            try:
                row = json.loads(raw if raw.endswith(b"\n") else b"")
                index_to_is_error[row["index"]] = "error" in row
            except (ValueError, TypeError, KeyError):
                if next(file, None) is not None:
                    raise ValueError(f"{output} has a broken row in its middle, at byte {size}: {raw[:80]!r}") from None
                break
            size += len(raw)
    return size, index_to_is_error


def submit(engine, line: Line, *, chat: bool):
    """Gives the line to the engine under its index. Raises ValueError when it cannot be served."""
    if line.error is not None:
        raise ValueError(line.error)
    [(key, prompt)] = line.given.items()
    if key == "messages":
        prompt = engine.encode_chat(prompt)
    elif key == "prompt" and chat:
        prompt = engine.encode_chat([{"role": "user", "content": prompt}])
    engine.add_request(prompt, line.params, request_id=str(line.index))


def serve(engine, lines: Iterator[Line], *, chat: bool, most_running: int) -> Iterator[dict | None]:
    """Rows as their lines finish, and None after each step.

    Twice as many completions as run at once are kept in the engine: enough that a batch is never short of requests.
    """
    request_id_to_line, room = {}, 2 * most_running
    while True:
        while room > 0 and (line := next(lines, None)) is not None:
            try:
                submit(engine, line, chat=chat)
            except ValueError as error:
                yield error_row(line, str(error))
            else:
                request_id_to_line[str(line.index)] = line
                room -= line.params.n
        if not request_id_to_line:
            return
        if not engine.has_unfinished_requests():
            raise RuntimeError(f"the engine is done, but never answered lines {', '.join(request_id_to_line)}")
        for output in engine.step():
            if output.finished:
                line = request_id_to_line.pop(output.request_id)
                room += line.params.n
                yield error_row(line, output.error) if output.error else result_row(line, output)
        yield None


def run(engine, lines: Iterator[Line], args: argparse.Namespace, put: Callable[[dict], None], bar) -> Counter:
    """Serves the lines and gives their rows to `put`. Returns counts of what this run did; stops early on Ctrl-C."""
    counts, start = Counter(), time.monotonic()
    with open(args.stats_file or os.devnull, "w", buffering=1) as stats_file:
        try:
            for row in serve(engine, lines, chat=args.chat, most_running=args.max_num_seqs):
                if row is not None:
                    put(row)
                    counts.update(requests=1, errors=int("error" in row), tokens_in=row.get("num_prompt_tokens", 0))
                    counts.update(tokens_out=row.get("num_generated_tokens", 0))
                    bar.update()
                    continue
                stats_file.write(to_json(engine.last_step_stats()) + "\n")
                if not bar.disable:
                    rate = engine.stats()["num_generated_tokens"] / (time.monotonic() - start)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        except KeyboardInterrupt:
            counts["interrupted"] = 1
    counts["seconds"] = time.monotonic() - start
    return counts


def summary(counts: Counter, stats: dict) -> str:
    return (
        f"{counts['requests']} requests, {counts['errors']} errors; {counts['tokens_in']} tokens in, "
        f"{counts['tokens_out']} tokens out in {counts['seconds']:.1f} s "
        f"({counts['tokens_out'] / counts['seconds']:.1f} tokens/s); "
        f"peak {stats['peak_blocks_used']} of {stats['num_blocks']} blocks used; "
        f"prefix-hit rate {stats['prefix_hit_rate']:.1%}"
    )


def make_engine(model: str, **settings):
    """An `Engine`. jax is first imported here, after being told to leave little of a GPU's memory unused."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    from jaxpaged import Engine

    return Engine(model, **settings)


@contextlib.contextmanager
def profile(directory: Path | None) -> Iterator[None]:
    """Traces what host and device do, with the names of the parts of a step, into `directory` if there is one."""
    if directory is None:
        yield
        return
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call: nothing else would be seen
    with jax.profiler.trace(directory, create_perfetto_trace=True, profiler_options=options):
        yield


def check_files(args: argparse.Namespace) -> tuple[str, int]:
    """sha256 of the file of prompts, and its number of lines. Raises ValueError or OSError for unusable files."""
    if (args.resume or args.overwrite) and (args.output is None or args.resume == args.overwrite):
        raise ValueError("give --resume or --overwrite, not both, and together with --output")
    paths = [path for path in (args.prompts, args.output, args.stats_file) if path is not None]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("--prompts, --output and --stats-file must be different files")
    if args.prompts.exists() and not args.prompts.is_file():
        raise ValueError(f"--prompts {args.prompts} is no regular file; it is read twice, so save it as a file first")
    digest, num_lines = hashlib.sha256(), 0
    with args.prompts.open("rb") as file:
        for raw in file:
            digest.update(raw)
            num_lines += 1
    for path in paths[1:]:
        path.open("ab").close()
    return digest.hexdigest(), num_lines


@contextlib.contextmanager
def row_file(output: Path, size: int, expected: dict) -> Iterator[Callable[[dict], None]]:
    """A taker of rows that appends each to the first `size` bytes of `output`, with the fingerprint beside it."""
    with output.open("ab") as file:
        file.truncate(size)
        new = Path(f"{output}.meta.json.new")
        new.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
        os.replace(new, f"{output}.meta.json")  # whole, or not there at all
        yield lambda row: (file.write(to_json(row).encode("utf-8") + b"\n"), file.flush())


def generate(args: argparse.Namespace, engine_factory: Callable) -> int:
    """Serves the lines that have no row yet. Returns the exit status. No file changes before all could be checked."""
    settings = {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name not in NOT_FLAGS}
    sampling = {name: getattr(args, name) for name in SAMPLING_NAMES if hasattr(args, name) and name != "seed"}
    with usage_errors():
        EngineConfig(**settings)
        SamplingParams(**sampling)
        digest, num_lines = check_files(args)
        expected = fingerprint(args, sampling, settings, digest)
        size, done = rows_to_keep(args, expected) if args.output else (0, {})
    if len(done) == num_lines:
        print(f"nothing to do: {num_lines} lines, each with its row", file=sys.stderr)
        return 1 if any(done.values()) else 0
    with usage_errors():
        engine = engine_factory(args.model, tokenizer=args.tokenizer, **settings)
    with contextlib.closing(engine):
        if not args.quiet:
            print(engine.memory_report(), file=sys.stderr)
        from tqdm import tqdm

        hidden = args.quiet or not sys.stderr.isatty()
        rows = (
            row_file(args.output, size, expected) if args.output else contextlib.nullcontext(print_in_order(tqdm.write))
        )
        bar = tqdm(total=num_lines, initial=len(done), unit="prompt", disable=hidden)
        with profile(args.profile), bar, rows as put:
            counts = run(engine, read_lines(args, sampling, done), args, put, bar)
        if not args.quiet:
            print(summary(counts, engine.stats()), file=sys.stderr)
    if counts["interrupted"]:
        return 130
    return 1 if counts["errors"] or any(done.values()) else 0


def main(argv: list[str] | None = None, engine_factory: Callable = make_engine) -> int:
    """Returns the exit status (see EPILOG); raises SystemExit for wrong usage."""
    try:
        return generate(build_parser().parse_args(argv), engine_factory)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
