"""scripts/timeline.py on traces of the kind that a GPU gives, and on one of this CPU."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from timeline import KINDS, kinds_of, seconds_by_kind, traced

PROGRAM = """HloModule jit_step, is_scheduled=true

%body (p: (f32[2])) -> (f32[2]) {
  %call.1 = f32[2]{0} custom-call(%p), metadata={op_name="jit(step)/while/body/attention/paged_attention/pallas_call"}
  %gemm = f32[2]{0} fusion(%call.1), kind=kCustom, calls=%f, metadata={op_name="jit(step)/while/body/mlp/dot_general"}
  %draw = s32[2]{0} fusion(%gemm), kind=kLoop, calls=%g, metadata={op_name="jit(step)/while/body/sample/argmax"}
  ROOT %norm = (f32[2]{0}) fusion(%gemm), kind=kLoop, calls=%h
}

ENTRY %main (p: f32[2]) -> f32[2] {
  ROOT %while.2 = (f32[2]{0}) while(%p), condition=%c, body=%body, metadata={op_name="jit(step)/while"}
}
"""


def trace_of(events, line="Stream #20(Compute)", plane="/device:GPU:0", module="jit_step"):
    """`events`: (instruction, start, duration), in µs."""
    names = sorted({name for name, _, _ in events})
    metadata = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "k{i}" }} }}' for i in range(1, len(names) + 1)
    )
    stats = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}' for i, n in ((1, "hlo_op"), (2, "hlo_module"))
    )
    rows = "".join(
        f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 10**6} duration_ps: {duration * 10**6} "
        f'stats {{ metadata_id: 1 str_value: "{name}" }} stats {{ metadata_id: 2 str_value: "{module}" }} }}'
        for name, start, duration in events
    )
    text = f'planes {{ name: "{plane}" lines {{ name: "{line}" timestamp_ns: 1000 {rows} }} {metadata} {stats} }}'
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))


EVENTS = [("call.1", 0, 40), ("gemm", 45, 30), ("draw", 80, 5), ("norm", 85, 2), ("gemm", 90, 10), ("while.2", 0, 200)]


def test_events_are_told_apart_by_what_their_instructions_are_for():
    assert {name: kind for (_, name), kind in kinds_of(PROGRAM).items()} == {
        "call.1": "attention", "gemm": "matmul", "draw": "draw", "norm": "other", "while.2": None,
    }  # fmt: skip
    seconds = seconds_by_kind(trace_of(EVENTS), [PROGRAM])
    assert {name: round(1e6 * value) for name, value in seconds.items()} == {
        "attention": 40, "matmul": 40, "draw": 5, "other": 2, "busy": 87,
    }  # fmt: skip


def test_what_runs_side_by_side_counts_once_in_busy():
    seconds = seconds_by_kind(trace_of([("call.1", 0, 40), ("gemm", 10, 40), ("gemm", 20, 10)]), [PROGRAM])
    assert [round(1e6 * seconds[name]) for name in ("attention", "matmul", "busy")] == [40, 40, 50]


@pytest.mark.parametrize("other", [{"line": "XLA Ops"}, {"module": "jit_other"}])
def test_sums_of_the_same_events_and_other_programs_do_not_count(other):
    with pytest.raises(ValueError, match="no events of the programs"):
        seconds_by_kind(trace_of(EVENTS, **other), [PROGRAM])


def test_a_trace_of_this_device_has_the_work_that_was_done():
    def step(x, w):
        with jax.named_scope("paged_attention"):
            x = jnp.sin(x)
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ w, x)

    x = jnp.ones((64, 256), jnp.float32)
    w = jnp.ones((256, 256), jnp.float32)
    compiled = jax.jit(step).lower(x, w).compile()
    compiled(x, w).block_until_ready()
    seconds = seconds_by_kind(traced(lambda: compiled(x, w).block_until_ready()), [compiled.as_text()])
    assert seconds["attention"] > 0 and seconds["matmul"] > 0 and seconds["draw"] == 0
    assert max(seconds[kind] for kind in KINDS) <= seconds["busy"] <= sum(seconds[kind] for kind in KINDS) + 1e-9
