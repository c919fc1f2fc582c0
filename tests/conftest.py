"""Strict numerics for all tests: no silent promotion of dtypes or ranks, products in full float32.

Compiled steps are shared between the engines of a run through a cache folder of its own, and LLVM is told not to
optimize: compiling is most of what the tests do, and the matrix products are library calls all the same.
"""

import os
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of XLA's pool for CPUs, two at least: the interpreter of TPU kernels, called from one, waits for a copy that
# another one makes.
os.environ.setdefault("NPROC", str(max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)))
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
import pytest

from jaxpaged import runner

# A shell ignores interrupts for what it starts in the background, and every process started from there inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(prefix="jaxpaged-test-cache-"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


LONGEST = ("test_smollm2.py", "test_invariance.py", "test_swapping.py", "test_async_loop.py", "test_device_checks.py")
"""Files that take minutes come first, so that workers end at about the same time."""


def pytest_addoption(parser):
    parser.addoption("--every-mode", action="store_true", help="laws in every mode, kernels in all pairs of modes")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("every_mode"):
        config.hook.pytest_deselected(items=[item for item in items if "every_mode" in item.keywords])
        items[:] = [item for item in items if "every_mode" not in item.keywords]
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True, scope="session")
def float32_unless_told_otherwise():
    """dtype="auto" means the same on every machine that runs these tests; before any engine that a module shares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "cpu_has_native_bf16", lambda: False)
        yield
