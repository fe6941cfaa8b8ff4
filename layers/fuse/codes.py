"""Codes: a norm's pass writes the FP8 codes that the products after it read.

A program is evaluated again: first to see which products read which norms, then for its results.
What is replaced has derivatives of its own, so that a gradient may be taken of the results, or
within.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ...native.jaxpr import bodies, line_of, name_of, params_of, results_of, value_of
from ..dense import fp8, fp8_norm
from ..norm import op as norms
from ..quantization import norm as quantized_norm
from ..quantization import quantize
from ..quantization.quantize import Quantized
from .program import JIT, REMAT, called, is_inlined, rebuilt
from .report import Row


def with_codes(program: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Row]]:
    """Returns the results of a program, with norms that write codes, and a row for each norm."""
    codes = _Program()
    codes.read(program)
    return codes.evaluate(program, operands), codes.rows()


@dataclasses.dataclass(eq=False)
class _Norm:
    """A norm in a program, and what reads its result."""

    where: str
    op: str
    reason: str  # why it cannot write codes; ""
    with_rstd: bool  # its statistics are read
    products: list["_Product"] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)
    made: Any = None  # its codes, once they are evaluated


@dataclasses.dataclass(eq=False)
class _Product:
    """FP8 products of one input in a program: a linear layer or an MLP; or what makes their codes.

    In the program of a gradient only the latter is there.
    """

    name: str  # the function that the user called
    reason: str  # why it quantizes its input itself; ""
    differentiated: bool


_FOLLOWED = (  # by the same elements in the same order
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
_BODIES = ("scan", "while", "cond", "shard_map", "closed_call", *REMAT, *JIT)
_DTYPES = ("float32", "bfloat16", "float16")
_Path = tuple[Any, ...]  # an equation's place, behind that of the equation around it
_Origins = list[_Norm | None]


class _Program:
    """Reads a program, then evaluates it with the norms that were found to be fused."""

    def __init__(self):
        self.norms: dict[_Path, _Norm] = {}
        self.products: dict[_Path, _Product] = {}
        self.fused: set[_Path] = set()  # the norms and products
        self.within: set[_Path] = set()  # the equations around them
        self.reading = False
        self.scopes: list[str] = []  # the named scopes of the jitted functions it is within

    def read(self, program: Any) -> None:
        """Finds the norms whose results go to FP8 products."""
        self.reading = True
        count = len(program.jaxpr.invars)
        _, origins = self._run(program, [None] * count, [None] * count, ())
        for norm in filter(None, origins):
            norm.others.append("the function's result")
        self.reading = False
        for path, norm in self.norms.items():
            taken = [p for p in norm.products if not p.reason]
            if not norm.reason and norm.with_rstd and not all(p.differentiated for p in taken):
                norm.reason = "its statistics are results too"
            if not norm.reason and not taken:
                norm.reason = _listed("no FP8 product reads it", norm.others)
            if norm.reason:
                for product in taken:
                    product.reason = "its norm writes no codes"
            else:
                found = [path for path, p in self.products.items() if p in taken]
                self.fused |= {path, *found}
        self.within = {path[:i] for path in self.fused for i in range(len(path))}

    def rows(self) -> list[Row]:
        """Returns the rows of the report."""
        rows = []
        for path, norm in self.norms.items():
            served = ""
            if path in self.fused:
                names = collections.Counter(p.name for p in norm.products if not p.reason)
                served = ", ".join(f"{count} × {name}" for name, count in names.items())
                served = _listed(served, norm.others, "; y is written too, for")
            rows.append(Row(norm.where, f"codes of {norm.op}", served, norm.reason))
        return rows

    def evaluate(self, program: Any, operands: Sequence[Any]) -> list[Any]:
        """Returns the program's results; those that are constants may be numbers."""
        return self._run(program, operands, [None] * len(operands), ())[0]

    # -------- one program

    def _run(
        self, program: Any, operands: Sequence[Any], origins: Sequence[Any], path: _Path, why=""
    ) -> tuple[list[Any], _Origins]:
        """Returns a program's results, None when it is read, and the norms that they are of.

        `why` says why nothing in it can be replaced.
        """
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= zip(jaxpr.invars, operands, strict=True)
        of = {v: norm for v, norm in zip(jaxpr.invars, origins, strict=True) if norm}
        origin_of = lambda atom: None if hasattr(atom, "val") else of.get(atom)
        level = _Level(jaxpr, why)
        for i, eqn in enumerate(jaxpr.eqns):
            given = [value_of(v, values) for v in eqn.invars]
            with eqn.ctx.manager, _scope(eqn):
                norms = [*map(origin_of, eqn.invars)]
                results, more = self._step(eqn, given, norms, (*path, i), level)
            values |= zip(eqn.outvars, results, strict=True)
            of |= {v: norm for v, norm in zip(eqn.outvars, more, strict=True) if norm}
        return [value_of(v, values) for v in jaxpr.outvars], [*map(origin_of, jaxpr.outvars)]

    def _step(
        self, eqn: Any, given: list[Any], of: _Origins, path: _Path, level: "_Level"
    ) -> tuple[list[Any], _Origins]:
        """Returns one equation's results, and the norms that they are of."""
        none: _Origins = [None] * len(eqn.outvars)
        if eqn.primitive is norms.forward.primitive:
            return self._norm(eqn, given, of, path, level)
        if of and (norm := of[0]) is not None and _same_elements(eqn):
            if norm.made is None or eqn.primitive.name != "name":
                return self._bind(eqn, given), [norm] * len(eqn.outvars)
            # Codes take the name: y may be dead, and a name would have it computed.
            q, qt = (checkpoint_name(each, eqn.params["name"]) for each in norm.made[:2])
            results = self._bind(eqn, given) if norm.others else given
            return results, [dataclasses.replace(norm, made=norm.made._replace(q=q, qt=qt))]
        if (product := _product_of(eqn)) is not None:
            if of[0] is not None or self.reading:
                return self._product(eqn, product, given, of, path, level), none
        elif is_inlined(eqn) and (self.reading or path in self.within):
            self.scopes.append(_scopes(eqn))
            try:
                return self._run(eqn.params["jaxpr"], given, of, path, level.why)
            finally:
                self.scopes.pop()
        elif self.reading:
            for key, i, body in bodies(eqn):
                count = len(getattr(body, "jaxpr", body).invars)
                why = level.why or ("" if name_of(eqn) in _BODIES else _closed(eqn))
                _, made = self._run(body, [None] * count, [None] * count, (*path, key, i), why)
                for norm in filter(None, made):
                    norm.others.append(f"the result of {name_of(eqn)}")
        elif path in self.within:
            run = lambda at: (
                lambda operands: self._run(
                    at[-1], operands, [None] * len(operands), (*path, *at[:-1])
                )[0]
            )
            places = [at for at in bodies(eqn) if (*path, *at[:-1]) in self.within]
            return rebuilt(eqn, given, {at[:-1]: run(at) for at in places}), none
        if self.reading:
            for norm in filter(None, of):
                norm.others.append(_described(eqn))
        return self._bind(eqn, given), none

    def _where(self, eqn: Any) -> str:
        """Returns the named scopes and the line of an equation."""
        scopes = "/".join(filter(None, [*self.scopes, _scopes(eqn)]))
        return f"{scopes} {line_of(eqn)}".strip()

    def _bind(self, eqn: Any, given: list[Any]) -> list[Any]:
        return [None] * len(eqn.outvars) if self.reading else results_of(eqn, given)

    def _norm(
        self, eqn: Any, given: list[Any], of: _Origins, path: _Path, level: "_Level"
    ) -> tuple[list[Any], _Origins]:
        if self.reading:
            for norm in filter(None, of):
                norm.others.append(_described(eqn))
            statistics = eqn.outvars[1 + eqn.params["spec"].has_residual :]
            reason = level.why or _unserved(eqn)
            with_rstd = any(v in level.used for v in statistics)
            named = f"{eqn.params['spec'].op} {eqn.invars[0].aval.str_short()}"
            found = self.norms[path] = _Norm(self._where(eqn), named, reason, with_rstd)
            return [None] * len(eqn.outvars), [found, *[None] * (len(eqn.outvars) - 1)]
        if path not in self.fused:
            return self._bind(eqn, given), [None] * len(eqn.outvars)
        norm, spec = self.norms[path], eqn.params["spec"]
        options = {"norm": spec, "order": eqn.params["order"]}
        results, norm.made = called(_encode, *given, **options)
        wanted = [spec.with_mean] * spec.centred + [spec.with_rstd]
        results += [a for a, want in zip(norm.made.statistics, wanted) if want]
        return results, [norm, *[None] * (len(results) - 1)]

    def _product(
        self, eqn: Any, product: Any, given: list[Any], of: _Origins, path: _Path, level: "_Level"
    ) -> list[Any]:
        norm = of[0]
        if self.reading:
            reason = level.why or _unserved_product(eqn, product)
            if norm is None:
                reason = "no norm makes its input"
            marked = isinstance(product, fp8.Marked)
            name = (product.spec if marked else product).op
            found = _Product(name, reason, not marked)
            self.products[path] = found
            if norm is not None:
                norm.products.append(found)
                norm.others += [_described(eqn)] * bool(reason)
            for other in filter(None, of[1:]):
                other.others.append(_described(eqn))
            return [None] * len(eqn.outvars)
        if path not in self.fused:
            return self._bind(eqn, given)
        assert norm is not None
        codes = _placed_as(norm.made, given[0])
        if not isinstance(product, fp8.Marked):
            has = product.codes
            return [*[codes.q] * has.has_q, *[codes.qt] * has.has_qt, codes.scale]
        return called(_multiply, given[0], codes, *given[1:], marked=product)


def _encode(*args: jax.Array, norm: Any, order: Any) -> Any:
    return fp8_norm.encode(norm, args, order)


def _multiply(x: jax.Array, codes: Quantized, *operands: jax.Array, marked: fp8.Marked) -> Any:
    return fp8_norm.multiply_encoded(marked, x, codes, operands)


def _scope(eqn: Any) -> Any:
    """Returns the named scope of an equation, so that what stands for it is found in profiles."""
    scopes = _scopes(eqn)
    return jax.named_scope(scopes) if scopes else contextlib.nullcontext()


def _scopes(eqn: Any) -> str:
    return str(getattr(eqn.source_info, "name_stack", ""))


def _same_elements(eqn: Any) -> bool:
    """Whether an equation's results have its operand's elements, in rows of the same length."""
    if eqn.primitive.name not in _FOLLOWED:
        return False
    out, given = eqn.outvars[0], eqn.invars[0]
    a, b = given.aval, out.aval
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


def _placed_as(made: Any, x: jax.Array) -> Quantized:
    """Returns codes with the dimensions of x, whose elements they are of."""
    *rows, n = x.shape
    return Quantized(made.q.reshape(x.shape), made.qt.reshape(n, *rows), made.scale)


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


def _closed(eqn: Any) -> str:
    return f"it is within {name_of(eqn)}, which has a derivative or a kernel of its own"


class _Level:
    """What messages and conditions have to know of a program that is walked through."""

    def __init__(self, jaxpr: Any, why: str):
        self.jaxpr, self.why = jaxpr, why

    @functools.cached_property
    def used(self) -> set[Any]:
        """The variables that are read."""
        atoms = [v for eqn in self.jaxpr.eqns for v in eqn.invars] + [*self.jaxpr.outvars]
        return {v for v in atoms if not hasattr(v, "val")}


def _listed(text: str, others: Sequence[str], link: str = "; its readers:") -> str:
    names = list(dict.fromkeys(others))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{text}{link} {shown}" if names else text


def _described(eqn: Any) -> str:
    called = name_of(eqn) in (*JIT, "custom_jvp_call")
    return f"{called and params_of(eqn).get('name') or name_of(eqn)} at {line_of(eqn)}"
