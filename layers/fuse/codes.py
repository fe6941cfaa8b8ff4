"""Codes: a norm's pass writes the FP8 codes that the products after it read.

A domain of its own `Program`, read from the one in which norms and products have been replaced.
What is replaced has derivatives of its own, so that a gradient may be taken of the results, or
within.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ...native.jaxpr import inner, line_of, name_of, params_of
from ..dense import fp8, fp8_norm
from ..norm import op as norms
from ..quantization import norm as quantized_norm
from ..quantization import quantize
from ..quantization.quantize import Quantized
from .program import Equation, Program, inner_programs, is_inlined
from .report import Row
from .sites import Site, SiteFailed, called


def with_codes(closed: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Row]]:
    """Returns the results of a program, with norms that write codes, and a row for each norm."""
    program = CodedProgram(closed)
    rows = [row for each in program.all_programs() for row in _chosen(each)]
    return program.run(operands), rows


class CodedProgram(Program):
    """A program of which norms and FP8 products alone are read."""

    calls = ()

    def __init__(self, *args: Any, **options: Any):
        self._has_parts = functools.cache(_has_parts)  # layers share jitted functions
        super().__init__(*args, **options)

    def inlines(self, eqn: Any) -> bool:
        """Tells if a jitted function has norms or FP8 products; JAX has traced the others once."""
        return is_inlined(eqn) and self._has_parts(eqn.params["jaxpr"].jaxpr)

    def bodies_of(self, eqn: Any, ins: Sequence[int]) -> Iterator[Any]:
        return inner_programs(eqn, ins, differentiated=True)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the results; a site that fails is an error, since others read its codes."""
        env = self.given | dict(zip(self.inputs, operands, strict=True))
        try:
            return self.evaluate(env, self.results, self.sites)
        except SiteFailed as failure:
            raise failure.error from failure


def _has_parts(jaxpr: Any) -> bool:
    is_part = lambda eqn: eqn.primitive is norms.forward.primitive or _product_of(eqn) is not None
    return any(is_part(eqn) or any(map(_has_parts, inner(eqn))) for eqn in jaxpr.eqns)


_SAME_ROWS = (  # equations whose results have the same elements in the same order
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "expand_dims",
    "name",
    "normfuse_shared",
    "pcast",
    "pvary",
    "reshape",
    "sharding_constraint",
    "squeeze",
)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(eq=False)
class Encoding(Site):
    """A norm that writes codes; the last of `outs` stands for these."""

    norm: Equation

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        p = self.norm.params
        spec = p["spec"]
        results, codes = called(_encode, *map(read, self.reads), norm=spec, order=p["order"])
        wanted = [spec.with_mean] * spec.centred + [spec.with_rstd]
        return [*results, *[a for a, want in zip(codes.statistics, wanted) if want], codes]


@dataclasses.dataclass(eq=False)
class Named(Site):
    """Codes under a name that a checkpoint's policy saves.

    With y, which takes none, where nothing else reads it: a name would have it computed.
    """

    name: str

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        codes = read(self.reads[-1])
        q, qt = (checkpoint_name(each, self.name) for each in codes[:2])
        return [*map(read, self.reads[:-1]), codes._replace(q=q, qt=qt)]


@dataclasses.dataclass(eq=False)
class Reading(Site):
    """FP8 products of one input, a linear layer or an MLP, that read its codes; or these codes.

    In the program of a gradient only the latter is there.
    """

    product: Any  # from `_product_of`

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        x, *operands, codes = map(read, self.reads)
        *rows, n = x.shape
        codes = Quantized(codes.q.reshape(x.shape), codes.qt.reshape(n, *rows), codes.scale)
        if isinstance(self.product, fp8.Marked):
            return called(_multiply, x, codes, *operands, marked=self.product)
        has = self.product.codes
        return [*[codes.q] * has.has_q, *[codes.qt] * has.has_qt, codes.scale]


def _encode(*args: jax.Array, norm: Any, order: Any) -> Any:
    return fp8_norm.encode(norm, args, order)


def _multiply(x: jax.Array, codes: Quantized, *operands: jax.Array, marked: fp8.Marked) -> Any:
    return fp8_norm.multiply_encoded(marked, x, codes, operands)


def _chosen(g: Program) -> Iterator[Row]:
    """Chooses the norms of a program that write codes, and yields a row for each."""
    for equation in g.equations:
        if equation.eqn.primitive is norms.forward.primitive:
            yield _choose(g, equation)
        elif equation not in g.bodies and _product_of(equation.eqn) is None:
            reason = f"it is within {equation.name}, which has a derivative or a kernel of its own"
            for eqn in _norms_within(equation.eqn):
                where = f"{equation.scope or ''} {line_of(eqn)}".strip()
                yield Row(where, _what(eqn), "", reason)


def _norms_within(eqn: Any) -> Iterator[Any]:
    for body in inner(eqn):
        for each in body.eqns:
            if each.primitive is norms.forward.primitive:
                yield each
            yield from _norms_within(each)


def _what(eqn: Any) -> str:
    return f"codes of {eqn.params['spec'].op} {eqn.invars[0].aval.str_short()}"


def _choose(g: Program, norm: Equation) -> Row:
    """Adds the sites of a norm whose result goes to FP8 products."""
    y, reason = norm.outs[0], _unserved(norm.eqn)
    others: list[str] = []  # all else that reads y
    products: list[tuple[Equation, int]] = []  # and the codes that they read
    names: list[Named] = []
    code_of = {y: _value(g, norm)}
    follow = [y]
    for v in follow:
        if v in g.results:
            others.append(f"the result of {g.within.split()[-1]}" if g.within else _RESULT)
        for reader in g.readers.get(v, ()):
            product = _product_of(reader.eqn)
            if reader.ins[0] == v and _same_elements(reader.eqn):
                code = code_of[v]
                if reader.name == "name":
                    code = _value(g, reader)
                    outs, name = (reader.outs[0], code), reader.params["name"]
                    names.append(Named(outs, (v, code_of[v]), (), "codes", "", name))
                code_of |= dict.fromkeys(reader.outs, code)
                follow += [u for u in reader.outs if u not in follow]
            elif product is None or v in reader.ins[1:] or _unserved_product(reader.eqn, product):
                others.append(g.described(reader))
            else:
                products.append((reader, code_of[v]))
    is_read = lambda v: v in g.results or v in g.readers
    if not reason and not products:
        reason = _listed("no FP8 product reads it", others)
    statistics = norm.outs[1 + norm.params["spec"].has_residual : -1]
    marked = any(isinstance(_product_of(p.eqn), fp8.Marked) for p, _ in products)
    if not reason and marked and any(map(is_read, statistics)):
        reason = "its statistics are results too"
    if reason:
        for equation in (norm, *(g.maker[site.outs[0]] for site in names)):
            del equation.outs[-1]
        return Row(g.line(y), _what(norm.eqn), "", reason)
    sites: list[Site] = [Encoding((*norm.outs,), (*norm.operands,), (), "codes", "", norm)]
    for site in names:
        if others:  # y is read, under its name
            site = dataclasses.replace(site, outs=site.outs[1:], reads=site.reads[1:])
        sites.append(site)
    for equation, code in products:
        product, reads = _product_of(equation.eqn), (*equation.operands, code)
        sites.append(Reading((*equation.outs,), reads, (), "codes", "", product))
    for site in sites:
        g.sites |= dict.fromkeys(site.outs, site)
    ops = [_op_of(_product_of(equation.eqn)) for equation, _ in products]
    served = ", ".join(f"{count} × {op}" for op, count in collections.Counter(ops).items())
    return Row(g.line(y), _what(norm.eqn), _listed(served, others, "; y is written too, for"))


_RESULT = "the function's result"


def _value(g: Program, maker: Equation) -> int:
    """Returns a new value that an equation makes besides its own: codes, which have no type."""
    g.avals.append(None)
    v = len(g.avals) - 1
    g.maker[v] = maker
    maker.outs.append(v)
    return v


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


def _product_of(eqn: Any) -> Any:
    """Returns what is known of FP8 products (`Marked`) or of codes (`Quantize`); None of others."""
    if eqn.primitive is quantize.op.primitive and eqn.params["spec"].rows:
        return eqn.params["spec"]
    if name_of(eqn) != "custom_jvp_call":
        return None
    body = params_of(eqn)["call_jaxpr"].jaxpr.eqns
    return next((e.params["marked"] for e in body if e.primitive is fp8.input_p), None)


def _op_of(product: Any) -> str:
    """Returns the name of the function that the user called."""
    return (product.spec if isinstance(product, fp8.Marked) else product).op


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
    if norm.has_residual and eqn.outvars[1].aval.dtype != _sum_dtype(eqn):
        return "residual_dtype rounds the sum"
    return ""


def _sum_dtype(eqn: Any) -> Any:
    return jax.numpy.promote_types(*(v.aval.dtype for v in eqn.invars[:2]))


def _unserved_product(eqn: Any, product: Any) -> str:
    """Returns why products cannot read a norm's codes, or ""."""
    x = eqn.invars[0].aval
    if not isinstance(product, fp8.Marked):
        fits = product.split == x.ndim - 1 and product.codes.dtype == fp8.FORMAT
        return "" if fits else "it quantizes rows of another length, or to another format"
    ndims = tuple(v.aval.ndim for v in eqn.invars)
    if product.batched or ndims != product.ndims:
        return "it is vmapped over kernels, or over another axis than the first"
    return ""


def _listed(text: str, others: Sequence[str], link: str = "; its readers:") -> str:
    names = list(dict.fromkeys(others))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{text}{link} {shown}" if names else text
