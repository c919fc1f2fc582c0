"""scripts/compile_for_tpu.py or compile_for_gpu.py, as the first argument says, with a fault, which the second names.

pool: the decoder reads the old pool after writing the new one, so that it must be copied. weights: XLA is not told to
leave weights as they are on a TPU 7x.
"""

import importlib
import sys


def read_the_old_pool():
    # Not before the script, which says in the environment what JAX is to be.
    import jax
    import jax.numpy as jnp

    from jaxpaged.models import decoder

    forward = decoder.forward

    def forward_with_copy(config, weights, tokens, kv, **options):
        hidden_td, new_kv = forward(config, weights, tokens, kv, **options)
        pairs = zip(jax.tree.leaves(new_kv), jax.tree.leaves(kv), strict=True)
        changed = jnp.max(jnp.stack([jnp.max(jnp.abs(new - old)) for new, old in pairs]))
        return jnp.where(changed > 1e30, jnp.zeros_like(hidden_td), hidden_td), new_kv

    decoder.forward = forward_with_copy


script = importlib.import_module(sys.argv.pop(1))
match sys.argv.pop(1):
    case "pool":
        read_the_old_pool()
    case "weights":
        script.compiler_options = lambda device: None
sys.exit(script.main())
