"""From a user's C++ text and derivatives to the functions of ops, or to one clear error."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..native import elementwise_signature
from ..native.elementwise_signature import Signature
from ..native.scalar import Scalar
from .elementwise_function import Primal, called, key_of


def build(
    source: str,
    name: str | None,
    scalars: Sequence[str],
    derivative: Any,
    definition: Callable[..., Any] | None,
    most: int,
) -> tuple[Signature, Primal]:
    """The signature and the function, or one clear error."""
    signature = elementwise_signature.find(source, name)
    operands = [p for p in signature.parameters if not p.output]
    _check_parameters(signature, operands, scalars, most)
    if definition is not None and not callable(definition):
        raise TypeError(
            f"{signature.name}: definition must be a function in plain JAX, got {definition!r}"
        )
    plain = definition and _positional(definition, signature, scalars)
    differentiable, partials = None, ()
    if isinstance(derivative, Mapping):
        partials = tuple(_partials(signature, operands, scalars, source, derivative, plain))
    elif derivative is None:
        differentiable = plain
    elif callable(derivative):
        differentiable = _positional(derivative, signature, scalars)
    else:
        raise TypeError(
            f"{signature.name}: derivative must be a mapping from parameters to derivatives, or a "
            f"function in plain JAX; got {derivative!r}"
        )
    functions = [definition, derivative if callable(derivative) else None]
    functions += [one for _, one in partials if callable(one)]
    texts = [source, signature.name, tuple(scalars)]
    texts += [[p.key for p in one] for _, one in partials if isinstance(one, tuple)]
    return signature, _primal(
        signature,
        ((f"<elementwise {signature.name}>", source),),
        operands,
        plain,
        key_of(texts, *functions),
        partials,
        differentiable,
    )


def scalar_of(signature, function: Primal, source: str, scalars, operation) -> Scalar | None:
    """The function as a `Scalar`, whose parameters are the run-time scalars' defaults; None where
    it is not `template <class T> T name(T x, scalars)`."""
    takes = signature.parameters
    inputs = [p for p in takes if not p.output and p.name not in scalars]
    kinds = {p.type for p in inputs} | {signature.result}
    if len(inputs) != 1 or takes[0] != inputs[0] or kinds != set(signature.template):
        return None
    partial = dict(function.partials).get(0)
    text, name = "", f"{signature.name}_derivative"
    if isinstance(partial, tuple):
        *before, (_, source_of) = [p for p in partial[0].pieces if p[0] != "<normfuse>"]
        if before:  # an expression, between a head and an end
            own = "\n".join(piece for _, piece in partial[0].pieces[1:])
            text = _device(own).replace(partial[0].name, name, 1)
        else:
            declared = ", ".join(f"{p.type} {p.name}" for p in takes)
            gives = ", ".join(p.name for p in takes)
            text = (
                f"{_device(source_of)}\ntemplate <class {inputs[0].type}> __device__ inline "
                f"{signature.result} {name}({declared}) {{ return {partial[0].name}({gives}); }}"
            )
    return Scalar(
        signature.name,
        _device(source),
        text,
        operation,
        tuple((p.name, float(scalars[p.name])) for p in takes[1:]),
    )


def _device(source: str) -> str:
    """Every function of the text as one of the device's."""
    for one in reversed(list(elementwise_signature.functions(source))):
        source = f"{source[: one.head]} __device__ inline{source[one.head :]}"
    return source


def _check_parameters(signature, operands, scalars, most):
    where, names = f"elementwise: {signature}", [p.name for p in operands]
    for scalar in scalars:
        if scalar not in names:
            raise TypeError(f"{where} has no parameter called {scalar!r}, which is given a default")
    inputs = [p for p in operands if p.name not in scalars]
    outputs = [p for p in signature.parameters if p.output]
    if not 1 <= len(inputs) <= most or len(outputs) > most:
        raise ValueError(
            f"{where} has {len(inputs)} inputs and {len(outputs) or 1} outputs; from 1 to {most} "
            "of each are possible"
        )
    for parameter in inputs:
        if "<" in parameter.type and signature.template:
            if elementwise_signature.resolve(parameter.type, {}) is None:
                raise ValueError(
                    f"{where}: input {parameter.name} has type `{parameter.type}`, from which "
                    f"{signature.template[0]} does not follow; declare it `{signature.template[0]}`"
                )
    for type_ in signature.template:
        if type_ not in {p.type for p in inputs}:
            raise ValueError(f"{where}: no input has type {type_}, so what it is does not follow")


def _primal(signature, pieces, operands, plain, key, partials=(), differentiable=None) -> Primal:
    results = [p for p in signature.parameters if p.output]
    variables = {p.name: f"normfuse_a{i}" for i, p in enumerate(operands)}
    if signature.result:
        types = [signature.result]
        values = [variables[p.name] for p in operands]
        body = f"normfuse_y0 = {called(signature.name, signature.template, values)};"
    else:
        types = [p.type for p in results]
        variables |= {p.name: f"normfuse_y{i}" for i, p in enumerate(results)}
        values = [variables[p.name] for p in signature.parameters]
        body = f"{called(signature.name, signature.template, values)};"
    return Primal(
        signature.name,
        pieces,
        tuple((p.type, variables[p.name]) for p in operands),
        tuple((type_, f"normfuse_y{i}") for i, type_ in enumerate(types)),
        signature.template,
        body,
        plain,
        key,
        tuple(p.name for p in operands),
        partials,
        differentiable,
    )


def _partials(signature, operands, scalars, source, derivative, plain):
    names = [p.name for p in operands]
    outputs = [p for p in signature.parameters if p.output]
    types = [p.type for p in outputs] or [signature.result]
    for name, given in derivative.items():
        if name not in names:
            raise ValueError(
                f"{signature.name}: derivative has {name!r}, which is no parameter of {signature}"
            )
        k = names.index(name)
        if callable(given) and not hasattr(given, "_function"):
            yield k, _positional(given, signature, scalars)
            continue
        several = given if isinstance(given, (tuple, list)) else (given,)
        if len(several) != len(types):
            raise ValueError(
                f"{signature.name}: derivative[{name!r}] must have one entry for each of "
                f"{len(types)} results, got {len(several)}"
            )
        yield (
            k,
            tuple(
                _partial(signature, operands, source, name, k, j, one, type_, plain)
                for j, (one, type_) in enumerate(zip(several, types, strict=True))
            ),
        )


def _partial(signature, operands, source, name, k, j, given, type_, plain) -> Primal:
    """The derivative of result j with respect to operand k."""
    if hasattr(given, "_function"):
        other = given._function
        same = (other.names, [t for t, _ in other.operands], other.template)
        if same != (
            tuple(p.name for p in operands),
            [p.type for p in operands],
            signature.template,
        ):
            raise ValueError(
                f"{signature.name}: derivative[{name!r}] must take the same parameters, "
                f"({', '.join(p.name for p in operands)}); got {given!r}"
            )
        return other
    if not isinstance(given, str):
        raise TypeError(
            f"{signature.name}: derivative[{name!r}] must be C++ text, an elementwise op or a "
            f"function in plain JAX; got {given!r}"
        )
    template = ", ".join(f"class {t}" for t in signature.template)
    own = f"{signature.name}_d_{name}" + (f"_{j}" if j else "")
    takes = ", ".join(f"{p.type} {p.name}" for p in operands)
    head = f"template <{template}> " * bool(template) + f"{type_} {own}({takes}) {{"
    words = given if "return" in given else f"return\n{given}\n;"
    file = f"<derivative of {signature.name} with respect to {name}>"
    pieces = [(f"<elementwise {signature.name}>", source), ("<normfuse>", head)]
    if words is not given:
        pieces.append(("<normfuse>", "return"))
    pieces += [(file, given), ("<normfuse>", "}" if words is given else ";}")]
    slope = plain and functools.partial(_slope, plain, k, j)
    made = Signature(own, signature.template, tuple(operands), type_, 0, 0, 0)
    key = key_of([source, own, given], plain)
    return _primal(made, tuple(pieces), operands, slope, key, (), slope)


def _slope(plain, k, j, *operands):
    """The derivative of the definition, by JAX."""
    import jax
    import jax.numpy as jnp

    shape = jnp.broadcast_shapes(*(a.shape for a in operands))
    x = jnp.broadcast_to(operands[k], shape)
    of = lambda x: plain(*operands[:k], x, *operands[k + 1 :])[j]
    return [jax.jvp(of, (x,), (jnp.ones_like(x),))[1]]


def _positional(function, signature, scalars):
    """The user's function of inputs and keyword scalars as one of all operands in order."""
    operands = [p.name for p in signature.parameters if not p.output]
    single = bool(signature.result)

    @functools.wraps(function)
    def plain(*arrays):
        found = dict(zip(operands, arrays, strict=True))
        inputs = [found[name] for name in operands if name not in scalars]
        results = function(*inputs, **{name: found[name] for name in scalars})
        return [results] if single else list(results)

    return plain
