"""Where a step's time goes on the device, by kind of work, from a trace of JAX's profiler.

An event of a device names the instruction that it is of; what that is for, its `op_name` in the compiled program says:

  attention    paged attention, new K and V written
  matmul       products with weights, those of the logits too
  draw         what follows the logits: sampling, log-probabilities, adjustments
  other        norms, rotary embeddings, activations, residuals, gathers

Traces of GPUs and CPUs have these names. XLA takes no command buffers (CUDA graphs) while it is traced: gaps are what a
step that is not traced takes beyond its work, not what lies between the events of a trace.
"""

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
from jax.profiler import ProfileData

KINDS = ("attention", "matmul", "draw", "other")
_HOLDS_OTHERS = re.compile(r" (?:while|conditional|call)\(")
"""Instructions whose events last as long as those of what they call, which count on their own."""

Span = tuple[float, float]
"""Start and end in nanoseconds."""


def kinds_of(hlo: str) -> dict[tuple[str, str], str | None]:
    """(program, instruction) → its kind; None for those that hold others. `hlo`: a compiled program's text."""
    module = re.match(r"HloModule ([\w.\-]+)", hlo)
    if module is None:
        raise ValueError(f"this is no text of a compiled program: {hlo[:80]!r}")
    kinds: dict[tuple[str, str], str | None] = {}
    for line in hlo.splitlines():
        if match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line):
            op_name = re.search(r'op_name="([^"]*)"', line)
            kind = None if _HOLDS_OTHERS.search(line) else _kind(op_name[1] if op_name else "")
            kinds[module[1], match[1]] = kind
    return kinds


def _kind(op_name: str) -> str:
    scopes = op_name.split("/")
    if "paged_attention" in scopes:
        return "attention"
    if scopes[-1] == "dot_general":
        return "matmul"
    return "draw" if {"sample", "logprobs", "adjust"} & set(scopes) else "other"


def seconds_by_kind(data: ProfileData, programs: Iterable[str]) -> dict[str, float]:
    """Seconds in which the device did work of each kind, and `busy`: any. What runs side by side counts once.

    `programs`: texts of the compiled programs in the trace. ValueError where it has none of their instructions.
    """
    kinds = {name: kind for hlo in programs for name, kind in kinds_of(hlo).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib's own types, which are made as they are used
        events = list(_events(data))
    spans: dict[str, list[Span]] = defaultdict(list)
    for name, span in events:
        if (kind := kinds.get(name)) is not None:
            spans[kind].append(span)
            spans["busy"].append(span)
    if not spans:
        raise ValueError(
            "the trace has no events of the programs; on a GPU, may this process use its counters (CUPTI)?"
        )
    return {name: _covered(spans[name]) / 1e9 for name in (*KINDS, "busy")}


def _events(data: ProfileData) -> Iterator[tuple[tuple[str, str], Span]]:
    """((program, instruction), span) of what devices did: streams of GPUs, threads of CPUs."""
    for plane in data.planes:
        is_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if is_gpu and not (line.name or "").startswith("Stream"):
                continue  # sums of the same events
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    module = str(stats.get("hlo_module")).partition("(")[0]
                    yield (module, str(stats["hlo_op"])), (event.start_ns, event.start_ns + event.duration_ns)


def _covered(spans: list[Span]) -> float:
    """Nanoseconds in at least one of them."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def traced(run: Callable[[], object]) -> ProfileData:
    """The trace of a call."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxpaged-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return ProfileData.from_file(str(file))
