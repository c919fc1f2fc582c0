"""What config.json says becomes the right `ModelConfig`, or an error that names the key and the value."""

import pytest

from jaxpaged.config import ModelConfig, RopeScaling
from jaxpaged.models import FAMILIES, family_of
from jaxpaged.models.llama import model_config

LLAMA2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA31_8B = LLAMA3_8B | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LLAMA32_1B = LLAMA31_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA31_8B["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.35.0",
    "use_cache": True,
    "vocab_size": 32000,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_llama_2_is_read():
    assert model_config(LLAMA2_7B) == ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        dtype="float16",
        eos_token_ids=(2,),
    )


def test_llama_3_2_is_read():
    assert model_config(LLAMA32_1B) == ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            kind="llama3",
            factor=32.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(128001, 128008, 128009),
    )


@pytest.mark.parametrize(
    ("hf", "parameters"),
    [
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA31_8B, 8_030_261_248),
        (LLAMA32_1B, 1_235_814_400),
        (TINYLLAMA, 1_100_048_384),
        (SMOLLM2_135M, 134_515_008),
    ],
    ids=["llama-2-7b", "llama-3-8b", "llama-3.1-8b", "llama-3.2-1b", "tinyllama", "smollm2"],
)
def test_a_published_config_gives_the_published_number_of_parameters(hf, parameters):
    assert model_config(hf).num_parameters == parameters


def test_head_dim_and_kv_heads_have_defaults():
    config = model_config(TINYLLAMA | {"num_key_value_heads": None, "head_dim": None})
    assert (config.num_kv_heads, config.head_dim) == (32, 64)
    absent = {key: value for key, value in TINYLLAMA.items() if key != "num_key_value_heads"}
    assert model_config(absent) == config


def test_eos_is_an_id_a_list_or_nothing():
    assert model_config(TINYLLAMA | {"eos_token_id": 7}).eos_token_ids == (7,)
    assert model_config(TINYLLAMA | {"eos_token_id": [7, 3, 7]}).eos_token_ids == (7, 3)
    assert model_config(TINYLLAMA | {"eos_token_id": None}).eos_token_ids == ()
    assert model_config(TINYLLAMA | {"eos_token_id": [2, 32_000]}).eos_token_ids == (2,), "of 32,000 tokens"
    with pytest.raises(ValueError, match="eos_token_id='</s>'"):
        model_config(TINYLLAMA | {"eos_token_id": "</s>"})


def test_biases_are_read():
    config = model_config(TINYLLAMA | {"attention_bias": True, "mlp_bias": True})
    assert config.attention_bias and config.mlp_bias


def scaling(rope, **changes):
    return model_config(TINYLLAMA | {"rope_scaling": rope} | changes).rope_scaling


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_rope_type_are_read(key):
    assert scaling({key: "linear", "factor": 4}) == RopeScaling(kind="linear", factor=4.0)
    assert scaling({key: "dynamic", "factor": 2.0}) == RopeScaling(kind="dynamic", factor=2.0)
    assert scaling({key: "default"}) is None


def test_rope_parameters_of_transformers_5_say_the_same_as_rope_scaling():
    old = LLAMA31_8B
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    new |= {"rope_parameters": old["rope_scaling"] | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert model_config(new) == model_config(old)


def test_yarn_has_the_defaults_of_transformers():
    rope = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True}
    expected = RopeScaling(
        kind="yarn", factor=16.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0
    )
    assert scaling(rope) == expected
    assert scaling(rope | {"factor": None}, max_position_embeddings=65536) == expected
    assert scaling({"type": "yarn", "factor": 16.0}, max_position_embeddings=4096) == expected
    assert scaling({"type": "yarn", "factor": 16.0}, original_max_position_embeddings=4096) == expected


def test_every_parameter_of_yarn_is_read():
    parameters = {
        "attention_factor": 1.5,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
        "original_max_position_embeddings": 1024,
        "factor": 2.0,
    }
    assert scaling({"rope_type": "yarn"} | parameters) == RopeScaling(kind="yarn", **parameters)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config={'quant_method': 'gptq'}"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast=3"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor=0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor=None"),
        (
            {"rope_scaling": LLAMA31_8B["rope_scaling"] | {"high_freq_factor": 1.0}},
            "high_freq_factor=1.0 must be greater than low_freq_factor=1.0",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention="),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"num_hidden_layers": "22"}, "num_hidden_layers='22'"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1.0 must be 0 or more"),
        ({"rope_theta": 0}, "rope_theta=0.0 must be more than 0"),
        ({"rope_scaling": 5}, "rope_scaling=5 must be an object"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "rope_type=['x'] is not supported"),
        ({"mlp_bias": "no"}, "mlp_bias='no'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ({"num_attention_heads": 30}, "hidden_size=2048 is no multiple of num_attention_heads=30"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5"),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(changes, message):
    with pytest.raises(ValueError) as error:
        model_config(TINYLLAMA | changes)
    assert message in str(error.value)


def test_the_architecture_decides_the_family():
    assert family_of(TINYLLAMA) is FAMILIES["LlamaForCausalLM"]
    assert family_of({"model_type": "llama"}) is FAMILIES["LlamaForCausalLM"]


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'LlamaForSequenceClassification'.*known are LlamaForCausalLM, llama"):
        family_of({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"})
    for names in (5, [["LlamaForCausalLM"]]):
        with pytest.raises(ValueError, match="no model family reads"):
            family_of({"architectures": names})
    with pytest.raises(ValueError, match="None; known are"):
        family_of({})
