import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models import layers


def matrices(num_rows: int, num_outputs: int, dtype: str):
    rng = np.random.default_rng(num_rows)
    x_td, weight_od = rng.standard_normal((num_rows, 24)), rng.standard_normal((num_outputs, 24))
    return jnp.asarray(x_td, dtype), jnp.asarray(weight_od, dtype)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 17, 40])
@pytest.mark.parametrize("num_outputs", [1, 2, 31, 32])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_a_product_is_what_float64_gives_whatever_form_it_takes(num_rows, num_outputs, dtype, tolerance):
    x_td, weight_od = matrices(num_rows, num_outputs, dtype)
    product_to = jax.jit(layers.linear)(x_td, weight_od)
    assert product_to.dtype == dtype
    expected_to = np.asarray(x_td, np.float64) @ np.asarray(weight_od, np.float64).T
    np.testing.assert_allclose(np.asarray(product_to, np.float64), expected_to, atol=tolerance)


@pytest.mark.parametrize(
    ("platform", "num_rows", "is_in_halves"),
    [("cpu", 16, True), ("cpu", 17, False), ("tpu", 16, False), ("cuda", 16, False)],
)
def test_products_of_few_rows_are_in_halves_on_a_cpu_alone(platform, num_rows, is_in_halves):
    x_td, weight_od = matrices(num_rows, 32, "float32")
    text = jax.jit(layers.linear).trace(x_td, weight_od).lower(lowering_platforms=(platform,)).as_text()
    assert ("batching_dims" in text) == is_in_halves and "dot_general" in text
