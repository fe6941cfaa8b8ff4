"""The CUDA kernels through the driver alone: unaligned arrays, and allocations without slack.

JAX stays on the CPU here: `JAX_PLATFORMS=cpu compute-sanitizer python -m pytest <this file>`.
"""

import cuda_driver
import jax
import numpy as np
import pytest
from cuda_cases import Case, check_backward, check_forward, check_halves, many_rows
from norm_kernels import CUDA, norm_of

from normfuse.layers.norm import cuda
from normfuse.native.launch import Target

CAPABILITY = cuda_driver.capability()
pytestmark = pytest.mark.skipif(CAPABILITY is None, reason="needs an NVIDIA GPU")

CASES = [
    Case((37, 24, 1)),
    Case((300, 1000, 1), residual=True),
    Case((9, 2056, 1), "float16", "bfloat16", "float32", offset=1.0),
    Case((9, 257, 1), "float32", "float64", "float16"),
    Case((300, 4360, 1), residual=True),
    Case((40, 12288, 1)),
    Case((5, 32768, 1)),
    Case((3, 98312, 1)),
    Case((9, 20, 40), "bfloat16", "float32", "float32", residual=True, offset=0.5),
]


@pytest.fixture(params=[0, 1], ids=["aligned", "unaligned"])
def run(request, monkeypatch):
    driver = cuda_driver.Driver(request.param)
    monkeypatch.setattr(cuda, "launch", driver.launch)
    target = Target(f"sm_{CAPABILITY}", multiprocessors=4)

    def call(kernel, operands, params):
        operands = [jax.numpy.asarray(a) for a in operands]
        return [np.asarray(r) for r in CUDA[kernel](target, norm_of(params), *operands)]

    with jax.enable_x64(True):
        yield call


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", [check_forward, check_backward, check_halves])
def test_cuda_kernels_match_reference(run, check, case, monkeypatch):
    check(run, case)
    if check is check_backward:
        many_rows(monkeypatch)
        check(run, case)
