"""The table of what tpu_check.sh or gpu_check.sh has found so far.

    python scripts/check_table.py gpu_check/results.jsonl

A row for each stage and what it found; a stage without an end was cut off. Lines that are cut short are left out.
"""

import argparse
import json
import sys
from pathlib import Path

from usage import usage_errors


def read(text: str) -> list[dict]:
    """The lines that are whole."""
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def table(lines: list[dict]) -> str:
    """The rows, each stage followed by those of its lines that say something."""
    rows: list[str] = []
    begun: int | None = None
    for line in lines:
        if "limit_s" in line:
            begun = len(rows)
            rows.append(f"{line['stage']:22}has not ended")
        elif "status" in line and begun is not None:
            ended = {0: "right", 124: "cut off"}.get(line["status"], "WRONG")
            rows[begun] = f"{line['stage']:22}{ended} after {line['seconds']} s"
        else:
            rows += [f"    {text}" for text in (found(line),) if text]
    return "\n".join(rows)


def found(line: dict) -> str:
    """A line in a few words; nothing where it is right and there are many of its kind."""
    if "platform" in line and "memory_limit" in line:
        versions = {name: line[name] for name in ("jax", "python") if name in line}
        return f"{line['kind']}, {line['memory_limit'] / 1e9:.0f} GB, " + ", ".join(
            f"{k} {v}" for k, v in versions.items()
        )
    if "equal" in line and "differs" in line:
        return f"{line['equal']} cases equal the oracle, {line['differs']} differ, {line['refused']} refused"
    if line.get("result") in ("differs", "refused"):
        return f"{line['result']}: {line.get('backend')} {line.get('dtype')}: {line.get('why', '')[:80]}"
    if "logprobs" in line:
        return (
            f"logprobs of {line['tokens']} tokens ({line['logprobs']}, {line['dtype']}): off by {line['largest']:.1e}"
            + (f" at most, {line['mean']:.1e} on average" if line["equal"] else f", more than {line['bound']}")
        )
    if "differing" in line:
        why = f": {line['why'][:80]}" if "why" in line else ""
        return f"{line['tokens']} greedy tokens, different in {len(line['differing'])} requests{why}"
    return speed(line)


def speed(line: dict) -> str:
    """What was timed."""
    if "floor_us" in line:
        kind = "decode" if "decode" in line else "prefill"
        rates = f"{line['gb_s']:8.0f} GB/s {line['tflop_s']:7.1f} TFLOP/s"
        return (
            f"{line['backend']:12}{kind} {line[kind]:14}{line['us']:10.1f} µs {line['of_floor']:6.0%} of floor {rates}"
        )
    if "not_timed" in line:
        return "not timed: " + " ".join(line["not_timed"])
    if isinstance(line.get("error"), str):
        return f"{line.get('backend', '')} {line.get('decode') or line.get('prefill')}: {line['error'][:80]}"
    if "timeline_ms" in line:
        return (
            f"{line['requests']:4} requests: "
            + ", ".join(f"{k} {v:.2f}" for k, v in line["timeline_ms"].items())
            + " ms"
        )
    if "floor_ms" in line:
        times = f"{line['step_ms']:8.3f} ms a step, {1 / line['of_floor']:.2f} × the floor"
        host = f"launch {line['launch_ms']:.2f} ms for {line['steps_per_call']:.0f} steps"
        return f"{line['requests']:4} requests: {times}, {line['output_tok_s']:.0f} tok/s, {host}"
    if "prompt_tok_s" in line and "floor_tok_s" in line:
        rate = line["prompt_tok_s"]
        return (
            ""
            if rate is None
            else f"prefill {line['prefill']}: {rate} tok/s, {line['of_floor']:.0%} of the matmul rate"
        )
    if "step_ms" in line:
        return f"step of {line.get('decode') or line.get('prefill')}: {line['step_ms']} ms"
    if "output_tok_s" in line:
        return f"{line.get('workload')}: {line['output_tok_s']:.0f} tok/s"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="results.jsonl")
    args = parser.parse_args()
    with usage_errors():
        text = args.results.read_text()
    print(table(read(text)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
