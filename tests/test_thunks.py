"""What scripts/thunks.py reads from lists of thunks as XLA writes them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from thunks import launches, read_thunks

LOOP_OF_THE_HOST = """\
000: kCommandBuffer [source       | next=003 (1)]
    001: kCopy         [source | sink] kCopy
    002: kCustomKernel [source | sink] start grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
003: kWhile         [prev=000 (1) | sink        ]
condition:
    004: kCustomKernel [source       | next=005 (1)] is_on grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source       | next=116 (1)]
        005: kCustomKernel [source       | sink        ] gather grid: [1, 1, 1] threads: [2, 1, 1]
        006: kCustomKernel [source       | sink        ] attend grid: [1, 1, 1] threads: [2, 1, 1]
        007: kGemm         [prev=006 (1) | sink        ]
        008: kCustomKernel [source       | sink        ] attend grid: [1, 1, 1] threads: [2, 1, 1]
        009: kGemm         [prev=008 (1) | sink        ]
        010: kConditional  [prev=009 (1) | next=012 (1)]
          false_branch:
            011: kCustomKernel [source       | sink        ] draw grid: [1, 1, 1] threads: [64, 1, 1]
    012: kConditional   [prev=000 (1) | sink        ]
      true_branch:
        013: kCopy [source | sink] kCopy
"""


def test_what_is_in_command_buffers_is_told_from_what_the_host_waits_for():
    facts = launches(read_thunks(LOOP_OF_THE_HOST), ("attend",))
    assert facts["command_buffers"] == [2, 6]
    assert facts["waits"] == ["While", "Conditional"]
    assert facts["outside"] == 2  # is_on, and the copy of the last branch


def test_a_layer_goes_from_one_attention_to_the_next():
    assert launches(read_thunks(LOOP_OF_THE_HOST), ("attend",))["layer"] == ["attend", ""]
    assert launches(read_thunks(LOOP_OF_THE_HOST), ("gather",))["layer"] == []


def test_a_loop_in_a_command_buffer_waits_for_nothing():
    lines = ["000: kCommandBuffer [source | sink]", *("    " + line for line in LOOP_OF_THE_HOST.splitlines()[3:6])]
    assert launches(read_thunks("\n".join(lines)), ("attend",)) == {
        "layer": [], "command_buffers": [1], "waits": [], "outside": 0,
    }  # fmt: skip
