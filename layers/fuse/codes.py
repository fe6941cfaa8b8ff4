"""Codes: a norm's pass writes the FP8 codes that the products after it read.

A domain of its own `Program`, read from the one in which norms and products have been replaced.
What is replaced has derivatives of its own, so that a gradient may be taken of the results.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...native.jaxpr import inner, line_of
from ..dense import fp8, fp8_norm
from ..norm import op as norms
from ..quantization import norm as quantized_norm
from ..quantization.quantize import Quantized
from .program import Equation, Program
from .sites import Read, Row, Site, called


def with_codes(closed: Any) -> tuple[Callable[[Sequence[Any]], list[Any]], list[Row]]:
    """Returns how to run a program with norms that write codes, and a row for each norm."""
    program = CodedProgram(closed)
    norms_of = lambda g: [e for e in g.equations if e.eqn.primitive is norms.forward.primitive]
    rows = [_choose(each, norm) for each in program.all_programs() for norm in norms_of(each)]
    return program.run, rows


class CodedProgram(Program):
    """A program of which norms and FP8 products alone are read."""

    calls = ()

    def __init__(self, *args: Any, **options: Any):
        self._has_parts = functools.cache(_has_parts)  # layers share jitted functions
        super().__init__(*args, **options)

    def inlines(self, eqn: Any) -> bool:
        """Tells if a jitted function has norms or FP8 products; JAX has traced the others once."""
        return super().inlines(eqn) and self._has_parts(eqn.params["jaxpr"].jaxpr)

    def line(self, v: int) -> str:
        """Returns the line of a call: JAX traces norms of equal shapes once, for the first."""
        made = self.maker[v]
        return f"{made.scope or ''} {line_of(*made.calls, made.eqn)}".strip()

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the results; a site that fails is an error, since others read its codes."""
        env = self.given | dict(zip(self.inputs, operands, strict=True))
        return self.evaluate(env, self.results, self.sites)


def _has_parts(jaxpr: Any) -> bool:
    is_part = lambda eqn: eqn.primitive is norms.forward.primitive or _product_of(eqn) is not None
    return any(is_part(eqn) or any(map(_has_parts, inner(eqn))) for eqn in jaxpr.eqns)


_SAME_ROWS = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p expand_dims name normfuse_shared pcast "
    "pvary reshape sharding_constraint squeeze".split()
)
"""Equations whose results have the same elements in the same order."""
_DTYPES = ("float32", "bfloat16", "float16")


def _encode(*args: jax.Array, norm: Any, order: Any, tree: Any) -> Any:
    return fp8_norm.encode(norm, tree.unflatten(args), order)


def _multiply(x: jax.Array, codes: Quantized, *operands: jax.Array, marked: fp8.Marked) -> Any:
    return fp8_norm.multiply_encoded(marked, x, codes, operands)


def _choose(g: Program, norm: Equation) -> Row:
    """Adds the sites of a norm whose result goes to FP8 products."""
    y, reason = norm.outs[0], _unserved(norm.eqn)
    what = f"codes of {norm.params['spec'].op} {norm.eqn.invars[0].aval.str_short()}"
    others: list[str] = []  # all else that reads y
    products: dict[Equation, fp8.Marked] = {}
    follow = [y]
    for v in follow:
        if v in g.results:
            place = g.within.split()[-1:]  # the innermost equation that it is a body of
            others.append(f"the result of {place[0]}" if place else "the function's result")
        for reader in g.readers.get(v, ()):
            product, ndims = _product_of(reader.eqn), tuple(u.aval.ndim for u in reader.eqn.invars)
            if reader.ins[0] == v and _same_elements(reader.eqn):
                follow += [u for u in reader.outs if u not in follow]
            elif product is None or v in reader.ins[1:]:
                others.append(g.described(reader))
            elif product.batched or ndims != product.ndims:  # vmapped over kernels, or another axis
                others.append(g.described(reader))
            else:
                products[reader] = product
    is_read = lambda v: v in g.results or v in g.readers
    _, residual, *_ = norm.params["tree"].unflatten(norm.operands)
    statistics = norm.outs[1 + (residual is not None) :]
    if not reason and not products:
        reason = _listed("no FP8 product reads it", others)
    if not reason and any(map(is_read, statistics)):
        reason = "its statistics are results too"
    if reason:
        return Row(g.line(y), what, "", reason)
    g.avals.append(None)  # codes have no type
    g.maker[code := len(g.avals) - 1] = norm
    options = {"norm": norm.params["spec"]} | {k: norm.params[k] for k in ("order", "tree")}

    def encode(read: Read) -> Sequence[Any]:
        results, codes = called(_encode, *map(read, norm.operands), **options)
        asked = options["norm"].with_mean, options["norm"].with_rstd
        known = [a for a, want in zip((codes.mean, codes.rstd), asked) if want and a is not None]
        return [*results, *known, codes]

    def multiply(product: fp8.Marked, operands: Sequence[int], read: Read) -> Sequence[Any]:
        x, *others = map(read, operands)
        codes, (*rows, n) = read(code), x.shape
        codes = Quantized(codes.q.reshape(x.shape), codes.qt.reshape(n, *rows), codes.scale)
        return called(_multiply, x, codes, *others, marked=product)

    sites = [Site((*norm.outs, code), (*norm.operands,), "codes", "", compute=encode)]
    for equation, product in products.items():
        compute = functools.partial(multiply, product, equation.operands)
        reads = (*equation.operands, code)
        sites.append(Site((*equation.outs,), reads, "codes", "", compute=compute))
    for site in sites:
        g.sites |= dict.fromkeys(site.outs, site)
    ops = collections.Counter(product.spec.op for product in products.values())
    served = ", ".join(f"{count} × {op}" for op, count in ops.items())
    return Row(g.line(y), what, _listed(served, others, "; y is written too, for"))


def _same_elements(eqn: Any) -> bool:
    """Tells if an equation's results have its operand's elements, in rows of the same length."""
    if eqn.primitive.name not in _SAME_ROWS:
        return False
    a, b = eqn.invars[0].aval, eqn.outvars[0].aval
    if (
        b.dtype.name not in _DTYPES
        or not b.shape
        or a.size != b.size
        or a.shape[-1:] != b.shape[-1:]
        or eqn.params.get("dimensions") is not None  # a reshape's, which transposes first
    ):
        return False
    return a.shape == b.shape or not b.sharding.mesh.explicit_axes


def _product_of(eqn: Any) -> fp8.Marked | None:
    """Returns what is known of FP8 products; None of others."""
    if eqn.primitive.name != "custom_jvp_call":
        return None
    body = eqn.params["call_jaxpr"].jaxpr.eqns
    return next((e.params["marked"] for e in body if e.primitive is fp8.input_p), None)


# ---------------------------------------------------------------- why not


def _unserved(eqn: Any) -> str:
    """Returns why a norm's pass cannot write codes, or ""."""
    norm, order, x = eqn.params["spec"], eqn.params["order"], eqn.invars[0].aval
    if norm.axes != (x.ndim - 1,):
        return f"it normalises axes {norm.axes} of {x.ndim}, not the last one alone"
    if norm.heads and not norms.are_examples(norm):
        return "its scale differs between heads"
    if not quantized_norm.shares_rows(norm, x.shape):
        return "its examples have a number of rows that is no multiple of 16"
    if not quantized_norm.serves(*(v.aval for v in eqn.invars)):
        return "it is computed in float64"
    if "pallas" in order.names:
        return "implementation='pallas' has no kernel that writes codes"
    return ""


def _listed(text: str, others: Sequence[str], link: str = "; its readers:") -> str:
    names = list(dict.fromkeys(others))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{text}{link} {shown}" if names else text
