"""What would fit on a device, without the device and without the weights:

    python scripts/plan.py --model DIR|ID|config.json --device t4 --max-model-len 2048

Prints where the device's memory would go, how many blocks and requests it would hold, and the least that a step could
take: a decode step reads all weights and the K and V of its requests once (bytes ÷ bandwidth), a prefill step computes
2 operations a weight and token (÷ peak). `--json` prints the same for programs, `--plot FILE` draws it.

Temporaries of the largest step are what the compiler says: for `--device cpu`; for TPUs where libtpu is installed; for
one GPU where the plugin for CUDA 12 is (see compile_for_tpu.py, compile_for_gpu.py). It takes up to some minutes.
Elsewhere, and with `--estimate`, they are an estimate, marked as such: the largest activations of a step, its logits.
`--device cpu` is this machine, its memory, its measured bandwidth and products; others stand in a table, by their
makers' figures.

With `--num-devices N` weights and K and V are split over N devices by heads and widths ("tensor parallel"), and what is
printed is one device's part; exchanging activations is not in the floors. The engine itself uses one device so far.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from generate import add_flags
from tqdm import tqdm
from usage import count

from jaxpaged import batch, memory
from jaxpaged.checkpoints import open_model
from jaxpaged.config import GIB, DeviceFacts, EngineConfig, ModelConfig, resolve
from jaxpaged.memory import MemoryReport
from jaxpaged.models.weights import Weights, param_specs, weight_bytes
from jaxpaged.runner import Shape, StepCompiler, device_facts, largest_shapes, temporaries_of


@dataclass(frozen=True, slots=True)
class Device:
    """Memory in bytes, of which the runtime hands out `usable`; GB/s; 10¹² operations a second in 16 bit, dense."""

    platform: str
    memory: int
    usable: float
    bandwidth_gb_s: float
    peak_tflop_s: float
    has_native_bf16: bool = True


DEVICES = {
    "t4": Device("gpu", 16 * GIB, 0.92, 320, 65, has_native_bf16=False),
    "a100": Device("gpu", 80 * GIB, 0.98, 2039, 312),
    "l4": Device("gpu", 24 * GIB, 0.92, 300, 121),
    "h100": Device("gpu", 80 * GIB, 0.98, 3350, 989),
    "h200": Device("gpu", 141 * 10**9, 0.98, 4800, 989),
    "b200": Device("gpu", 180 * 10**9, 0.98, 8000, 2250),
    "v5e": Device("tpu", 16 * GIB, 0.98, 819, 197),
    "v6e": Device("tpu", 32 * GIB, 0.98, 1640, 918),
    "v5p": Device("tpu", 95 * GIB, 0.98, 2765, 459),
    "tpu7x": Device("tpu", 96 * GIB, 0.98, 3690, 1153),
}
"""One JAX device of each kind: of a tpu7x chip, which has two, one half."""

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
"""What libtpu calls four chips of a kind."""

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
SETTINGS = (
    *("dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_device_blocks", "swap_space", "preemption_mode"),
    *("kv_offloading_size", "max_logprobs"),
)


def facts_of(name: str) -> DeviceFacts:
    """What an engine would find out on the device, with nothing else running there."""
    if name == "cpu":
        return device_facts()
    device = DEVICES[name]
    return DeviceFacts(
        platform=device.platform, kind=name, num_cores=1, total_memory=device.memory,
        memory_limit=int(device.memory * device.usable), memory_in_use=0, host_memory=device.memory, jax_version="",
        has_native_bf16=device.has_native_bf16, compute_capability=0,
    )  # fmt: skip


def estimated_temporaries(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes: of a step of the whole token budget, its residual, the widest activations going in and out of a product in
    float32, and three copies of the logits; or of the blocks that are swapped at once."""
    tokens, heads = config.max_num_batched_tokens, model.num_heads + 2 * model.num_kv_heads
    widest = max(3 * model.intermediate_size, 2 * heads * model.head_dim)
    rows = min(config.max_num_seqs, tokens)
    step = 4 * (tokens * (2 * model.hidden_size + widest) + 3 * rows * model.vocab_size)
    assert isinstance(config.block_size, int)
    per_block = memory.block_bytes(model, config.block_size, config.dtype)
    return max(step, max(memory.swap_sizes(config), default=0) * per_block)


def part_of(model: ModelConfig, num_devices: int) -> ModelConfig:
    """What one of the devices has of a model. ValueError where heads or widths cannot be split evenly."""
    names = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    if odd := [f"{name}={getattr(model, name)}" for name in names if getattr(model, name) % num_devices]:
        raise ValueError(f"--num-devices {num_devices} does not divide {', '.join(odd)} of the model")
    return dataclasses.replace(model, **{name: getattr(model, name) // num_devices for name in names})


def compiled_temporaries(
    compiler: StepCompiler, shapes: list[Shape], device: str, num_devices: int, specs: Weights
) -> int | None:
    """Bytes on one device of the temporaries and outputs of the largest step; None where no compiler for such devices
    is installed."""
    is_tpu = device in TOPOLOGIES
    package, most_devices = ("libtpu", 4) if is_tpu else ("jax_cuda12_plugin", 1)
    if importlib.util.find_spec(package) is None or num_devices > most_devices:
        return None
    import compile_for_gpu
    import compile_for_tpu

    target = compile_for_tpu.Target(TOPOLOGIES[device], num_devices) if is_tpu else compile_for_gpu.Target(device)
    compile_for_tpu.place(compiler, target, specs)
    lowers = [functools.partial(compiler.lower, shape) for shape in shapes]
    return max(temporaries_of(target.compile(lower)) for lower in tqdm(lowers, desc="Compiling steps", disable=None))


def partition(
    model: ModelConfig, given: EngineConfig, facts: DeviceFacts, num_devices: int = 1, *, is_estimate: bool = False
) -> tuple[MemoryReport, bool]:
    """The memory report that an engine would give, of one of the devices; and whether its temporaries are an estimate,
    as asked for or for want of a compiler. ValueError for what does not fit."""
    config, part = resolve(given, model, facts), part_of(model, num_devices)
    buckets = batch.make_buckets(config)
    compiler, shapes = StepCompiler(config, model, buckets, num_blocks=1), largest_shapes(buckets)
    temporaries = None
    if facts.platform == "cpu" and not is_estimate:
        compiler.compile_all(shapes)
        temporaries = compiler.temporaries
    elif not is_estimate:
        specs = param_specs(model, config.dtype, config.quantization)
        temporaries = compiled_temporaries(compiler, shapes, facts.kind, num_devices, specs)
    is_estimate = temporaries is None
    if temporaries is None:
        temporaries = estimated_temporaries(dataclasses.replace(part, vocab_size=model.vocab_size), config)
    sizes = {"weights": weight_bytes(param_specs(part, config.dtype, config.quantization)), "temporaries": temporaries}
    state = compiler.state_bytes + compiler.adjustments_bytes
    num_blocks = memory.decide_num_device_blocks(config, part, facts, **sizes, state=state)
    assert isinstance(config.block_size, int) and config.max_model_len is not None
    fitted = memory.fit_max_model_len(given.max_model_len, config.max_model_len, num_blocks, config.block_size)
    config = dataclasses.replace(config, max_model_len=fitted)
    per_block = memory.block_bytes(part, config.block_size, config.dtype)
    report = MemoryReport(
        limit=facts.memory_limit, total=facts.memory_limit, **sizes, kv_pool=(num_blocks + 1) * per_block,
        state=compiler.state_bytes, adjustments=compiler.adjustments_bytes,
        staging=memory.swap_staging_bytes(config, facts.platform, per_block),
        other=facts.memory_in_use, block_size=config.block_size,
        bytes_per_block=per_block, num_device_blocks=num_blocks,
        num_host_blocks=memory.decide_num_host_blocks(config, part), max_model_len=fitted,
        max_num_seqs=config.max_num_seqs,
    )  # fmt: skip
    return report, is_estimate


def decode_floors(report: MemoryReport, context: int, gb_s: float) -> list[dict[str, float]]:
    """For each batch that the pool holds: milliseconds of a step, tokens a second, and the part that reads K and V."""
    floors = []
    for batch_size in (b for b in BATCH_SIZES if b <= report.max_num_seqs):
        kv = batch_size * context * report.bytes_per_token
        if kv > report.num_device_blocks * report.bytes_per_block:
            break
        seconds = (report.weights + kv) / gb_s / 1e9
        part = kv / (report.weights + kv)
        floors.append({"batch": batch_size, "ms": 1e3 * seconds, "tok_s": batch_size / seconds, "kv_part": part})
    return floors


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """All that is printed, as data."""
    source = open_model(args.model, "dummy")
    facts = facts_of(args.device)
    given = EngineConfig(**{name: getattr(args, name) for name in SETTINGS})
    config = resolve(given, source.config, facts)
    if args.device == "cpu" and args.num_devices > 1:
        raise ValueError("--device cpu is one device: leave --num-devices at 1")
    report, is_estimate = partition(source.config, given, facts, args.num_devices, is_estimate=args.estimate)
    context = args.context or report.max_model_len // 2
    if args.device == "cpu":
        from bench_step import bandwidth_gb_s, peak_gflop_s

        gb_s, tflop_s = bandwidth_gb_s(), peak_gflop_s(config) / 1e3
    else:
        gb_s, tflop_s = DEVICES[args.device].bandwidth_gb_s, DEVICES[args.device].peak_tflop_s
    operations = 2 * source.config.num_parameters
    return {
        "model": source.name,
        "device": args.device,
        "num_devices": args.num_devices,
        "dtype": config.dtype,
        "report": report,
        "are_temporaries_estimated": is_estimate,
        "bandwidth_gb_s": gb_s,
        "context": context,
        "decode_floors": decode_floors(report, context, gb_s),
        "prefill_tok_s": args.num_devices * tflop_s * 1e12 / operations,
    }


def as_data(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan for `--json`: the report's fields and what it derives from them."""
    report: MemoryReport = plan["report"]
    derived = {name: getattr(report, name) for name in ("free", "bytes_per_token", "max_concurrency")}
    return plan | {"report": dataclasses.asdict(report) | derived}


def in_words(plan: dict[str, Any]) -> str:
    devices = plan["device"] if plan["num_devices"] == 1 else f"each of {plan['num_devices']} {plan['device']}"
    return f"{plan['model']} in {plan['dtype']} on {devices}"


def as_text(plan: dict[str, Any]) -> str:
    mark = " (temporaries are an estimate)" if plan["are_temporaries_estimated"] else ""
    lines = [f"{in_words(plan)}{mark}", str(plan["report"])]
    lines.append(f"Floors at {plan['context']:,} tokens of context, {plan['bandwidth_gb_s']:,.0f} GB/s")
    lines.append("  decode of   ms a step    tokens a second    weights   K and V")
    for f in plan["decode_floors"]:
        lines.append(
            f"  {f['batch']:>9} {f['ms']:>11.2f} {f['tok_s']:>18,.0f} {1 - f['kv_part']:>10.0%} {f['kv_part']:>9.0%}"
        )
    lines.append(f"  prefill: at most {plan['prefill_tok_s']:,.0f} tokens a second")
    return "\n".join(lines)


def draw(plan: dict[str, Any]) -> Any:
    """A figure: the partition as one bar, the floor of a decode step by batch in weights and K and V."""
    from matplotlib.figure import Figure

    report: MemoryReport = plan["report"]
    figure = Figure(figsize=(9, 4), layout="constrained")
    bar, floors = figure.subplots(1, 2, width_ratios=(1, 2))
    figure.suptitle(in_words(plan))
    parts = {"weights": report.weights, "KV pool": report.kv_pool, "temporaries": report.temporaries}
    parts |= {"step state": report.state, "counts and masks": report.adjustments, "staging": report.staging}
    parts |= {"other": report.other, "free": report.free}
    colors = ("#3b76b8", "#2f855a", "#e8873a", "#c92a2a", "#8e6bb0", "#2b8a9e", "#555555", "#eeeeee")
    bottom = 0.0
    for (name, size), color in zip(parts.items(), colors, strict=True):
        bar.bar(0, max(size, 0) / GIB, bottom=bottom, color=color, label=f"{name} {size / GIB:.2f}")
        bottom += max(size, 0) / GIB
    bar.set(ylabel="GiB", xticks=[], xlim=(-0.5, 0.5))
    bar.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    batches = [str(f["batch"]) for f in plan["decode_floors"]]
    kv = [f["ms"] * f["kv_part"] for f in plan["decode_floors"]]
    rest = [f["ms"] - k for f, k in zip(plan["decode_floors"], kv, strict=True)]
    floors.bar(batches, rest, color=colors[0], label="weights")
    floors.bar(batches, kv, bottom=rest, color=colors[1], label="K and V")
    floors.set(xlabel=f"requests of {plan['context']:,} tokens", ylabel="ms, least for a decode step")
    floors.legend(frameon=False)
    for axes in (bar, floors):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory, config.json, .gguf file, repo id or built-in name")
    parser.add_argument("--device", required=True, choices=[*DEVICES, "cpu"])
    parser.add_argument("--num-devices", type=count, default=1, metavar="N", help="devices that share the model (1)")
    parser.add_argument("--estimate", action="store_true", help="estimate temporaries, whatever compiler is installed")
    parser.add_argument(
        "--context", type=count, help="tokens of each request in the floors (default: half of the most)"
    )
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip=tuple(names - set(SETTINGS)))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it; the suffix says the format")
    args = parser.parse_args(argv)
    try:
        plan = make_plan(args)
        if args.plot is not None:
            draw(plan).savefig(args.plot, dpi=150)
    except ModuleNotFoundError as error:
        print(f"plan.py: error: {error}; pip install 'jaxpaged[plot]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"plan.py: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_data(plan)) if args.json else as_text(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
