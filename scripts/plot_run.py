"""Draws what an engine did, step by step: `python scripts/plot_run.py out.jsonl out.png`.

The input is what `generate.py --stats-file out.jsonl` writes. The picture has three panels over the steps, or with
`--by time` over seconds, where a step that was compiled first takes its true and large share: tokens in each step
(prefill and decode), requests (decoding, prefilling, waiting), and the block pool (used, cached, free). Red marks above
the pool are preemptions.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

COUNTS = (
    *("num_prefill_tokens", "num_decode_tokens", "num_prefill_requests", "num_decode_requests", "num_waiting"),
    *("num_preempted", "blocks_used", "blocks_cached", "blocks_free"),
)
MOST_POINTS = 1000  # more steps than this are averaged in groups: a picture has not many more columns

PREFILL, DECODE, WAITING = "#e8873a", "#3b76b8", "#555555"
USED, CACHED, FREE, PREEMPTED = "#2f855a", "#a7d7bd", "#eeeeee", "#c92a2a"


def read_steps(path: Path) -> dict[str, np.ndarray]:
    """Field → its value in each step, `start` and `end` in seconds. ValueError, with the line, for what is no step."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            records.append([float(record[name]) for name in ("time", "duration_s", *COUNTS)])
        except KeyError as error:
            raise ValueError(
                f"{path}, line {number}, has no {error}; give a file of generate.py --stats-file"
            ) from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no record of a step: {error}") from None
    if not records:
        raise ValueError(f"{path} has no steps; give a file that generate.py --stats-file wrote")
    end, duration, *counts = np.array(records).T
    if (np.diff(end) < 0).any():
        raise ValueError(f"{path} has times that go back, so it is of more than one run; give a file of one")
    return {"start": end - duration, "end": end, **dict(zip(COUNTS, counts, strict=True))}


def thin(steps: dict[str, np.ndarray], most: int = MOST_POINTS) -> dict[str, np.ndarray]:
    """At most `most` points: means over groups of consecutive steps, sums of preemptions, first start and last end."""
    num_steps = len(steps["start"])
    starts = np.arange(0, num_steps, -(-num_steps // most))
    sizes = np.diff(np.append(starts, num_steps))
    thinned = {name: np.add.reduceat(values, starts) / sizes for name, values in steps.items()}
    thinned["num_preempted"] = np.add.reduceat(steps["num_preempted"], starts)
    return thinned | {"start": steps["start"][starts], "end": steps["end"][starts + sizes - 1]}


def stack(axes, edges: np.ndarray, layers: list[tuple[np.ndarray, str, str]]):
    """Steps stacked upon each other: step i covers `edges[i]` to `edges[i + 1]`."""
    bottom = np.zeros(len(edges) - 1)
    for values, color, label in layers:
        axes.stairs(bottom + values, edges, baseline=bottom, fill=True, color=color, label=label, linewidth=0)
        bottom = bottom + values


def draw(steps: dict[str, np.ndarray], name: str, by: str = "step"):
    """A matplotlib figure of the steps over their number or ("time") over seconds, `name` in its title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    title, num_steps = title_of(steps, name), len(steps["start"])
    if by == "step":
        steps = {**steps, "start": np.arange(num_steps), "end": np.arange(num_steps) + 1}
    s = thin(steps)
    edges = np.append(s["start"], s["end"][-1])
    shape = {"sharex": True, "figsize": (11, 8), "layout": "constrained", "height_ratios": (3, 3, 2.5)}
    figure, (tokens, requests, blocks) = plt.subplots(3, **shape)
    figure.suptitle(title)

    tokens.set_ylabel("tokens in a step")
    stack(tokens, edges, [(s["num_decode_tokens"], DECODE, "decode"), (s["num_prefill_tokens"], PREFILL, "prefill")])
    requests.set_ylabel("requests")
    running = [(s["num_decode_requests"], DECODE, "decoding"), (s["num_prefill_requests"], PREFILL, "prefilling")]
    stack(requests, edges, running)
    requests.stairs(s["num_waiting"], edges, color=WAITING, label="waiting", linewidth=1.4, baseline=None)
    blocks.set_ylabel("blocks of the pool")
    blocks.set_xlabel("step" if by == "step" else "seconds since the engine's start")
    pool = [
        (s[f"blocks_{state}"], color, state) for state, color in (("used", USED), ("cached", CACHED), ("free", FREE))
    ]
    stack(blocks, edges, pool)
    if times := list(s["start"][s["num_preempted"] > 0]):
        label = f"preemption\n({s['num_preempted'].sum():,.0f} in all)"
        height = 1.03 * sum(values for values, _, _ in pool).max()
        blocks.plot(times, [height] * len(times), "|", color=PREEMPTED, label=label, markersize=9, clip_on=False)
    for axes in (tokens, requests, blocks):
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def title_of(steps: dict[str, np.ndarray], name: str) -> str:
    num_steps, seconds = len(steps["start"]), steps["end"][-1] - steps["start"][0]
    num_tokens = steps["num_prefill_tokens"].sum() + steps["num_decode_tokens"].sum()
    group = -(-num_steps // MOST_POINTS)
    means = f" (means over {group} steps)" if group > 1 else ""
    return f"{name}: {num_steps:,} steps{means}, {num_tokens:,.0f} tokens, {seconds:,.1f} s"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description="Draw batch composition and block pool over time.")
    parser.add_argument("stats", type=Path, help="JSONL file written by generate.py --stats-file")
    parser.add_argument("picture", type=Path, help="file to write; its suffix says the format (.png, .svg, .pdf)")
    parser.add_argument("--by", choices=("step", "time"), default="step", help="the horizontal axis (default: step)")
    args = parser.parse_args(argv)
    try:
        steps = read_steps(args.stats)
        draw(steps, args.stats.name, args.by).savefig(args.picture, dpi=150)
    except ModuleNotFoundError as error:
        print(f"plot_run.py: error: {error}; pip install 'jaxpaged[plot]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"plot_run.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
