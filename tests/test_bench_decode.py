"""scripts/bench_decode.py: what it takes as the floor of a step is arithmetic, and it times decodes alone.

That it runs is tested with gpu_check.sh.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import tiny
from jaxpaged import Engine
from jaxpaged.checkpoints import load_weights, open_model

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import bench_decode
from bench_attention import Rates


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_all_weights_but_embeddings_that_are_no_head_and_the_contexts(is_tied):
    source = open_model(tiny.model_directory(), "dummy")
    model = replace(source.config, tie_word_embeddings=is_tied)
    weights = load_weights(replace(source, config=model), "float32")
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    per_token = 2 * model.num_kv_heads * model.head_dim * 4 * model.num_layers
    report = SimpleNamespace(weights=nbytes, bytes_per_token=per_token)
    engine = SimpleNamespace(model_config=model, memory_report=lambda: report)
    head = weights.embed_vd if is_tied else weights.head_vd
    read = sum(leaf.nbytes for leaf in jax.tree.leaves((weights.layers, weights.final_norm_d, head)))
    assert bench_decode.step_bytes(engine, 3, 10) == read + 30 * per_token
    layers = sum(leaf.size for leaf in jax.tree.leaves((weights.layers, weights.final_norm_d)))
    assert bench_decode.num_multiplied(engine) == layers


def test_prompts_are_found_again_but_for_their_last_token():
    prompts = bench_decode.make_prompts(2, context=100, new_tokens=30, block_size=16, vocab_size=50)
    assert [len(prompt) for prompt in prompts] == [65, 65]
    assert prompts[0] != prompts[1] and max(map(max, prompts)) < 50


def test_all_steps_are_compiled_ahead():
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "max_model_len": 58, "num_device_blocks": 25}
    with Engine(tiny.model_directory(), warmup="lazy", block_size=16, swap_space=0, **settings) as engine:
        prompts = bench_decode.make_prompts(5, 57, 24, 16, engine.model_config.vocab_size)
        bench_decode.compile_steps(engine, [2, 5], prompts)
        ahead = [step["shape"] for step in engine.stats()["compiled_steps"]]
        bench_decode.fill(engine, prompts, Rates(copy=1e9, matmul=1e9))
        for num_requests in (2, 5):
            bench_decode.decode(engine, bench_decode.workload(prompts[:num_requests], 24), 1, Rates(copy=1, matmul=1))
        later = [step["shape"] for step in engine.stats()["compiled_steps"]][len(ahead) :]
    assert len(ahead) > 3 and all("Update" in shape for shape in later), later


def test_prompts_that_are_not_found_again_are_an_error_and_not_timed_with_decodes(monkeypatch):
    steps = [
        {"num_prefill_tokens": 2, "num_prefill_requests": 2},
        {"num_prefill_tokens": 65, "num_prefill_requests": 2},
    ]
    monkeypatch.setattr(bench_decode, "replay", lambda engine, work: ({}, steps))
    with pytest.raises(RuntimeError, match="not found in the prefix cache"):
        bench_decode.decode(None, bench_decode.workload([[1] * 65] * 2, 16), 1, Rates(copy=1e9, matmul=1e9))


@pytest.mark.parametrize(("name", "billions"), [("TinyLlama-1.1B", 1.10), ("Llama-3.1-8B", 8.03)])
def test_the_shapes_of_models_are_those_of_their_names(name, billions):
    model = open_model(Path(bench_decode.__file__).parent / "models" / name, "dummy").config
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.005)
