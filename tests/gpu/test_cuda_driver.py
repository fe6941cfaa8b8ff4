"""The CUDA kernels through the driver alone: unaligned arrays, and allocations without slack.

JAX stays on the CPU here: `JAX_PLATFORMS=cpu compute-sanitizer python -m pytest <this file>`.
"""

import cuda_driver
import jax
import pytest
from norm_kernels import CUDA, Case, check, many_rows

from normfuse.layers.norm import cuda
from normfuse.native.launch import Target

CAPABILITY = cuda_driver.capability()
pytestmark = pytest.mark.skipif(CAPABILITY is None, reason="needs an NVIDIA GPU")

CASES = [
    Case((37, 24)),
    Case((300, 1000), residual=True),
    Case((9, 2056), "float16", "bfloat16", "float32", offset=1.0),
    Case((9, 257), "float32", "float64", "float16"),
    Case((300, 4360), residual=True),
    Case((40, 12288)),
    Case((5, 32768)),
    Case((3, 98312)),
    Case((3, 20, 40), "bfloat16", "float32", "float32", residual=True, offset=0.5),
]


@pytest.fixture(params=[0, 1], ids=["aligned", "unaligned"])
def run(request, monkeypatch):
    driver = cuda_driver.Driver(request.param)
    monkeypatch.setattr(cuda, "launch", driver.launch)
    target = Target(f"sm_{CAPABILITY}", multiprocessors=4)

    def call(kernel, norm, operands):
        return CUDA[kernel](target, norm, *map(jax.numpy.asarray, operands))

    with jax.enable_x64(True):
        yield call


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_kernels_match_their_definition(run, case, monkeypatch):
    check(run, case)
    many_rows(monkeypatch)
    check(run, case, ["backward"])
