"""RMSNorm on one device: kernels over arrays viewed as (outer, n, inner), normalised over n.

`forward` and `backward` do the whole work where a device holds whole rows. Where the rows are
split over several devices, `row_sums` then `apply`, and `row_dots` then `backward_apply`, do it
around one sum over the devices. `pullback` is the backward of a layer that wants its input again.
"""

import functools

import jax
import numpy as np

from . import cuda_rms_norm as cuda
from . import registry
from . import rms_norm_definition as definition
from .kernel import Kernel, result_types

_ATTRIBUTES = {  # params passed on to the C++ handlers, by the type they are declared with
    "eps": np.float64,
    "scale_offset": np.float64,
    "count": np.float64,
    "has_residual": bool,
    "has_scale": bool,
    "with_rstd": bool,
    "with_dscale": bool,
}


# Elements of x up to which XLA's forward is left alone on a GPU, where no derivative asks for rstd
# and there is more than a row: as fast as ours, it is free to join the product that follows. A
# chain of 24 × (norm + product) on 64 rows of 1024 took 125 µs, and 159 with our launches
# (docs/kernels.md).
PLAIN_ELEMENTS = 1 << 16


def _plain_forward_on_cuda(x, *_, with_rstd, **params) -> bool:
    return not with_rstd and x.shape[0] > 1 and x.size <= PLAIN_ELEMENTS


def _call_on_cpu(name, *operands, aliases=None, **params):
    """Calls a C++ handler."""
    types = result_types(
        getattr(definition, name),
        tuple((a.shape, a.dtype) for a in operands),
        tuple(params.items()),
    )
    attributes = {k: _ATTRIBUTES[k](v) for k, v in params.items() if k in _ATTRIBUTES}
    call = jax.ffi.ffi_call(f"normfuse_rms_norm_{name}", types, input_output_aliases=aliases)
    return call(*operands, **attributes)


def _pullback_on_cpu(dy, x, *rest, with_dscale, with_value, **flags):
    """x is normalised again by a call of its own, and dx has the place of dy."""
    value = _call_on_cpu("apply", x, *rest, out_dtype=dy.dtype, **flags) if with_value else []
    flags |= {"has_residual": False, "with_dscale": with_dscale}
    aliases = {0: 0} if dy.dtype == x.dtype else None
    return [*_call_on_cpu("backward", dy, x, *rest, aliases=aliases, **flags), *value]


def _kernel(name: str, cpu=None, **more) -> Kernel:
    def pallas(target, *operands, **params):
        from .pallas import rms_norm as kernels  # imported when it is first used

        return kernels.serve(name, target, *operands, **params)

    cpu = cpu or functools.partial(_call_on_cpu, name)
    defined, gpu = getattr(definition, name), getattr(cuda, name)
    return Kernel(f"rms_norm_{name}", defined, cpu=cpu, cuda=gpu, pallas=pallas, **more)


registry.register()
forward = _kernel("forward", plain_on_cuda=_plain_forward_on_cuda)
row_sums = _kernel("row_sums")
apply = _kernel("apply")
backward = _kernel("backward")
row_dots = _kernel("row_dots")
backward_apply = _kernel("backward_apply")
pullback = _kernel("pullback", cpu=_pullback_on_cpu)
