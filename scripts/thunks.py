"""How a program is launched on a GPU, read from the list that XLA dumps of it: thunk_sequence_after_thunk_passes.txt.

A thunk is what the host starts: a kernel, a copy, a loop, or a command buffer (a CUDA graph) with many of these in it.
Loops and branches outside of command buffers are the host's: it waits for the device until it knows their conditions.
"""

import re
from typing import NamedTuple

CONTROL = ("While", "Conditional")
"""Kinds of thunks that decide what comes next."""


class Thunk(NamedTuple):
    """One line of the list. `depth`: how far it is indented, more than what it is in. `name`: of a kernel."""

    depth: int
    kind: str
    name: str


def read_thunks(text: str) -> list[Thunk]:
    """In the order of the lines."""
    pattern = re.compile(r"^( *)\d+: k(\w+) +\[[^]]*\] *(\S*)", re.MULTILINE)
    return [Thunk(len(indent), kind, name) for indent, kind, name in pattern.findall(text)]


def launches(thunks: list[Thunk], attention: tuple[str, ...]) -> dict:
    """`layer`: the kernels of a layer, from one of these names to the next such; empty where there are no two.
    `command_buffers`: of each, how many kernels are in it. `waits`: loops and branches that are in none. `outside`: how
    many kernels are in none, in all branches together.
    """
    sizes: list[int] = []
    waits, num_outside = [], 0
    buffer_depth = None
    for thunk in thunks:
        if buffer_depth is not None and thunk.depth > buffer_depth:
            sizes[-1] += thunk.kind not in CONTROL
            continue
        buffer_depth = None
        if thunk.kind == "CommandBuffer":
            buffer_depth = thunk.depth
            sizes.append(0)
        elif thunk.kind in CONTROL:
            waits.append(thunk.kind)
        else:
            num_outside += 1
    names = [thunk.name for thunk in thunks]
    starts = [i for i, name in enumerate(names) if name in attention]
    layer = names[starts[0] : starts[1]] if len(starts) > 1 else []
    return {"layer": layer, "command_buffers": sizes, "waits": waits, "outside": num_outside}
