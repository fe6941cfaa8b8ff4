"""The parts of `swap` that frameworks share: served subclasses, a user's rules, and the report."""

import collections
import contextlib
import dataclasses
import dis
import functools
import importlib
import inspect
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..native.dtypes import FLOATING, narrowed, rounded
from ..native.implementation import Implementation
from . import modules, recognize, recognize_mlp
from .recognize import Candidate, Casts, Different, Formula
from .recognize_mlp import GatedCandidate, GatedFormula
from .rms_norm import rms_norm

Rule = Callable[..., Any]
Rules = Mapping[type, Rule | None]


# ---------------------------------------------------------------- the report


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one module.

    Attributes:
      path: of the module in the model.
      layer: its class, as it was.
      served: what computes it now; "" where it stays as it was.
      reason: why it stays; "" where it is served.
      error: the largest relative difference to the formula, by dtype of x; "" where the class is
        the framework's own, or stays.
    """

    path: str
    layer: str
    served: str = ""
    reason: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `swap` did; its printed form is a table, in which `*` stands for several numbers.

    Attributes:
      rows: one for each module that is served, or has parameters, or was probed.
    """

    rows: tuple[Row, ...]

    @property
    def swapped(self) -> tuple[Row, ...]:
        """The modules that normfuse serves."""
        return tuple(row for row in self.rows if row.served)

    @property
    def left(self) -> tuple[Row, ...]:
        """The modules that stay as they were."""
        return tuple(row for row in self.rows if not row.served)

    def __str__(self) -> str:
        groups = collections.Counter(
            dataclasses.replace(row, path=re.sub(r"\d+", "*", row.path)) for row in self.rows
        )
        first = {}
        for row in self.rows:
            first.setdefault(dataclasses.replace(row, path=re.sub(r"\d+", "*", row.path)), row.path)
        table = [("module", "class", "served by, or why not", "verified error")]
        for row, count in groups.items():
            path = f"{row.path} ({count})" if count > 1 else first[row]
            table.append((path, row.layer, row.served or f"not: {row.reason}", row.error))
        count = f"{len(self.swapped)} of {len(self.rows)} modules are served by normfuse"
        return "\n".join([*aligned(table), count])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose columns begin one below the other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]


def conclude(
    rows: Sequence[Row], report: Callable[[Report], Any] | None, model: str, warn: bool
) -> None:
    """Hands the report over, and warns where a swap did nothing, or could not look."""
    if report is not None:
        report(Report(tuple(rows)))
    traced = [row for row in rows if row.reason == TRACED]
    if traced:
        name = traced[0].path or traced[0].layer
        warnings.warn(f"swap: {name} stays as it is: {TRACED}", stacklevel=3)
    elif warn and rows and not any(row.served for row in rows):
        reasons = collections.Counter(f"{row.layer}: {row.reason}" for row in rows)
        most = "; ".join(reason for reason, _ in reasons.most_common(3))
        warnings.warn(
            f"swap: nothing in {model} is served by normfuse ({most}); "
            "swap(model, report=print) lists every module",
            stacklevel=3,
        )


TRACED = (
    "its arrays are traced: call swap outside of jit, grad, vmap and other transformations, where "
    "modules can be probed"
)


# ---------------------------------------------------------------- served subclasses


def _found_once(known: dict[Any, Any], key: Any, find: Callable[[], Any]) -> Any:
    """Returns what `find` returned the first time for a key, or why it raised Different."""
    if key not in known:
        try:
            known[key] = find()
        except Different as different:
            known[key] = str(different)
    return known[key]


def _array(module: Any, x: Any) -> tuple[Any, int, Callable[[Any], Any]]:
    return x, -1, lambda y: y


@dataclasses.dataclass(frozen=True)
class Framework:
    """What `swap` needs to know of a framework."""

    home: str  # the module that defines it, as FRAMEWORK
    read: Callable[[Any, str], Any]  # returns the array that a module holds by a name
    # Returns what a module holds by a name, of which only the dtype is read.
    held: Callable[[Any, str], Any]
    # Returns a Candidate for a module, called as an object of another class.
    candidate: Callable[[Any, type], Candidate]
    # Returns the array in a module's input, the dimension that a norm is over, and a function that
    # makes the module's result of an array.
    unwrap: Callable[[Any, Any], tuple[Any, int, Callable[[Any], Any]]] = _array
    ranks: tuple[int, ...] = (2, 3)  # of the x that its modules are called with, the usual first
    # Returns all of a module but its arrays, as a key.
    configuration: Callable[[Any], tuple[Any, ...]] = lambda module: configuration(vars(module))
    options: Callable[[type], dict[str, Any]] = lambda base: {}  # the class arguments of a subclass
    # Returns a module's linear layers, by attribute.
    linears: Callable[[Any], dict[str, Any]] = lambda module: {}
    # Returns a GatedCandidate for a module, called as an object of another class.
    mlp: Callable[[Any, type], GatedCandidate] | None = None
    # Computes a module by a GatedFormula for (formula, module, x).
    apply_mlp: Callable[[GatedFormula, Any, Any], Any] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Service:
    """How modules of a class are served: by a formula that was recognised, or by a user's rule."""

    base: type
    how: Formula | GatedFormula | Rule
    implementation: Implementation
    framework: Framework
    verified: dict[Any, Casts | str] = dataclasses.field(default_factory=dict)
    shapes: dict[Any, str | None] = dataclasses.field(default_factory=dict)  # why not, by shape

    @property
    def name(self) -> str:
        """What serves, for the report."""
        if isinstance(self.how, GatedFormula):
            return f"gated_product, {self.how.activation}"
        if isinstance(self.how, Formula):
            return "rms_norm"
        name = getattr(self.how, "__name__", type(self.how).__name__)
        return getattr(self.how, "served", "") or f"rule {name}"

    def error(self, module: Any) -> str:
        """The largest verified error of modules like one, for each dtype of x, for the report."""
        errors: dict[str, float] = {}
        like = self._like(module)
        for key, casts in self.verified.items():
            if isinstance(casts, Casts) and key[3:] == like:
                errors[key[2]] = max(casts.error, errors.get(key[2], 0.0))
        return ", ".join(f"{dtype} {error:.1g}" for dtype, error in errors.items())

    def _identity(self, module: Any) -> tuple[Any, ...]:
        # Whether a class places its arrays on a mesh may depend on the mesh at hand.
        mesh = jax.sharding.get_abstract_mesh()
        return self.framework.configuration(module), _code(self.base), mesh

    def _like(self, module: Any) -> tuple[Any, ...]:
        """What is verified once for modules, as the end of a key of `verified`."""
        if isinstance(self.how, GatedFormula):
            return (_mlp_key(module, self.framework),)
        scale = self.how.scale if isinstance(self.how, Formula) else None
        held = None if scale is None else self.framework.held(module, scale)
        dtype = getattr(held, "dtype", np.dtype("float32"))  # in an optimizer's state, of anything
        return dtype.name, self._identity(module)

    def casts(
        self,
        how: Formula,
        module: Any,
        rank: int,
        size: int,
        x_dtype: str,
        dtype: str,
        rows: tuple[Any, ...] | None = None,
    ) -> Casts | str:
        """Returns the casts of a module for an x and a dtype of scale, or why it is not served.

        `rows` is what is known of x's shape but the features: a class may branch on it.
        """
        like = x_dtype, dtype, self._identity(module)
        candidate = lambda: self.framework.candidate(module, self.base)
        find = lambda: recognize.casts(candidate(), how, rank, size, x_dtype, dtype)
        casts = _found_once(self.verified, (rank, size, *like), find)
        check = lambda rows: recognize.check_shape(candidate(), (*rows, size), x_dtype, dtype)
        return self._of_rows(casts, rows, (size, *like), check)

    def _of_rows(
        self,
        casts: Casts | str,
        rows: tuple[Any, ...] | None,
        like: tuple[Any, ...],
        check: Callable[[tuple[int, ...]], None],
    ) -> Casts | str:
        """Returns the casts, or why an x of so many rows is not served; symbolic rows are taken."""
        if isinstance(casts, str) or rows is None or not all(isinstance(n, int) for n in rows):
            return casts
        return _found_once(self.shapes, (rows, *like), lambda: check(rows)) or casts

    def compute(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Callable[[], Any]
    ) -> Any:
        """Returns what a call of a module does; `own` calls the class's own code."""
        if isinstance(how := self.how, GatedFormula):
            x = self._mlp_input(how, module, args, kwargs)
            if isinstance(x, str):
                return modules.by_framework(self.base.__name__, x, self, own)
            assert self.framework.apply_mlp is not None
            return self.framework.apply_mlp(how, module, x)
        if not isinstance(how, Formula):
            return how(module, *args, **kwargs)
        served = self._operands(how, module, args, kwargs)
        if isinstance(served, str):
            return modules.by_framework(self.base.__name__, served, self, own)
        x, scale, eps, casts, axis, result = served
        if casts.x is not None:
            x = narrowed(x, casts.x)
        if scale is not None and casts.scale is not None:
            scale = rounded(scale, casts.scale)
        y = rms_norm(
            x,
            scale,
            eps=eps,
            axis=axis,
            scale_offset=how.scale_offset,
            cast=casts.cast,
            dtype=casts.out,
            implementation=self.implementation,
        )
        return result(y)

    def _without_defaults(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call's arguments, without those that are None as they would be if not given."""
        if len(args) == 1 and not kwargs:
            return args, kwargs
        parameters = [*inspect.signature(self.base.__call__).parameters.values()][1:]
        optional = [parameter.default is None for parameter in parameters]
        while 1 < len(args) <= len(parameters) and args[-1] is None and optional[len(args) - 1]:
            args = args[:-1]
        names = {parameter.name for parameter, is_none in zip(parameters, optional) if is_none}
        return args, {n: v for n, v in kwargs.items() if v is not None or n not in names}

    def _input(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns `framework.unwrap` of x, or why the class's own code computes a call."""
        args, given = self._without_defaults(args, kwargs)
        if not args and len(given) == 1:
            (name,) = given
            args, given = (given[name],), {}
            if [name] != [*inspect.signature(self.base.__call__).parameters][1:2]:
                return f"the argument {name}"
        if len(args) != 1 or given:
            return (
                f"other arguments than x: {len(args)} positional, {', '.join(given) or 'no'} named"
            )
        x, axis, result = self.framework.unwrap(module, args[0])
        if not isinstance(x, jax.Array | np.ndarray) or x.dtype.name not in FLOATING or not x.ndim:
            return f"x of type {type(x).__name__}, {getattr(x, 'dtype', None)}"
        return x, axis, result

    def _mlp_input(
        self, how: GatedFormula, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns x, or why the class's own code computes a call."""
        given = self._input(module, args, kwargs)
        if isinstance(given, str):
            return given
        x = given[0]
        dtype, traced = x.dtype.name, isinstance(x, Tracer)
        casts = self.mlp_casts(how, module, x.ndim, dtype, traced=traced, rows=x.shape[:-1])
        return casts if isinstance(casts, str) else jnp.asarray(x)

    def mlp_casts(
        self,
        how: GatedFormula,
        module: Any,
        rank: int,
        x_dtype: str,
        *,
        traced: bool = False,
        rows: tuple[Any, ...] | None = None,
    ) -> Casts | str:
        """Returns the dtypes of an MLP for an x, or why it is not served; `rows` as for `casts`."""
        like = x_dtype, _mlp_key(module, self.framework)
        key = rank, 0, *like
        assert self.framework.mlp is not None
        candidate = functools.partial(self.framework.mlp, module, self.base)
        if key not in self.verified or traced:
            try:  # whether hidden arrays are placed on a mesh depends on the mesh at hand
                recognize_mlp.traced(candidate(), rank, x_dtype)
            except Different as different:
                return str(different)
        find = lambda: recognize_mlp.casts(candidate(), how, rank, x_dtype)
        casts = _found_once(self.verified, key, find)
        check = lambda rows: recognize_mlp.check_rows(candidate(), rows, x_dtype)
        return self._of_rows(casts, rows, like, check)

    def _operands(
        self, how: Formula, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns (x, scale, eps, casts, axis, result), or why the class's own code computes."""
        given = self._input(module, args, kwargs)
        if isinstance(given, str):
            return given
        x, axis, result = given
        scale, eps = None, how.eps_of(module)
        if isinstance(eps, jax.Array):
            return "an eps that is an array"
        if how.scale is not None:
            scale = self.framework.read(module, how.scale)
            if not isinstance(scale, jax.Array | np.ndarray) or scale.dtype.name not in FLOATING:
                return f"a parameter of type {type(scale).__name__}"
            if scale.shape != (x.shape[axis],):
                return f"x of shape {x.shape} and a parameter of shape {scale.shape}"
        dtype = "float32" if scale is None else scale.dtype.name
        rows, size = list(x.shape), x.shape[axis]
        del rows[axis]
        casts = self.casts(how, module, x.ndim, size, x.dtype.name, dtype, tuple(rows))
        if isinstance(casts, str):
            return casts
        return jnp.asarray(x), scale, float(eps), casts, axis, result


def base_of(module: Any) -> type:
    """Returns the class that a module has, or had before it was served."""
    return SERVED[type(module)].base if type(module) in SERVED else type(module)


_services: dict[Any, Service] = {}


def service_of(
    base: type,
    how: Formula | GatedFormula | Rule,
    implementation: Implementation,
    framework: Framework,
) -> Service:
    """Returns the Service of these parts, always the same one."""
    key = base, how, implementation
    return _services.setdefault(key, Service(base, how, implementation, framework))


SERVED: dict[type, Service] = {}
"""Each served subclass, and how it is served."""
_subclassing = threading.RLock()


def subclass(service: Service) -> type:
    """Returns the subclass of `service.base` that `service` serves, always the same one.

    Raises:
      Different: if the class cannot have a subclass.
    """
    with _subclassing:
        known = next((cls for cls, made in SERVED.items() if made is service), None)
        return known or _new_subclass(service)


def _new_subclass(service: Service) -> type:
    base = service.base

    def call(self, *args, **kwargs):
        own = lambda: base.__call__(self, *args, **kwargs)
        return service.compute(self, args, kwargs, own)

    def reduce(self, protocol):
        function, args, *rest = super(cls, self).__reduce_ex__(protocol)
        args = tuple(base if arg is type(self) else arg for arg in args)
        options = service.how, service.implementation
        return _restore, (service.framework.home, base, *options, function, args), *rest

    call.__name__, call.__qualname__ = "__call__", f"{base.__qualname__}.__call__"
    call.__doc__ = base.__call__.__doc__
    call.__signature__ = inspect.signature(base.__call__)
    body = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": f"{base.__qualname__}[normfuse]",
        "__doc__": base.__doc__,
    }
    try:
        meta: Any = type(base)
        cls: Any = meta(base.__name__, (base,), body, **service.framework.options(base))
    except Exception as error:
        raise Different(f"its class cannot have a subclass: {error}") from None
    SERVED[cls] = service
    return cls


def _restore(
    home: str,
    base: type,
    how: Formula | GatedFormula | Rule,
    implementation: Implementation,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Makes a served module again from its pickle."""
    module = function(*args)
    framework = importlib.import_module(home).FRAMEWORK
    cls = subclass(service_of(base, how, implementation, framework))
    object.__setattr__(module, "__class__", cls)
    return module


def configuration(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the attributes that are no arrays, as a key that is another once any has changed.

    What they hold counts as well, if it is a container, a dataclass or an object that is hashed by
    identity, as a model's configuration may be.
    """
    items = []
    for name, value in sorted(attributes.items()):
        if not _is_array(value) and not name.startswith("_pytree__"):  # Flax's notes
            items.append((name, _hashable(value)))
    return tuple(items)


def functions_of(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yields the functions of a class and of those it derives from, as far as they are a user's."""
    for base in cls.__mro__:
        if base is object or base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(base).items():
            for wrapped in ("method", "fget", "__func__"):  # of Equinox, of properties and others
                value = getattr(value, wrapped, value)
            if isinstance(function := inspect.unwrap(value), types.FunctionType):
                yield name, function


_LIBRARIES = {"normfuse", "flax", "equinox", "haliax"}
_OTHERS = {*_LIBRARIES, *sys.stdlib_module_names, "jax", "jaxlib", "numpy", "jaxtyping"}


def _code(cls: type) -> tuple[Any, ...]:
    """Returns the code of a user's classes, and the numbers and names in them, as a key.

    A notebook may define a class's methods again, and leave its objects as they are; or a function
    that they call, or a number that they read.
    """
    seen: dict[int, Any] = {}
    code = [(name, _read_by(function, seen)) for name, function in functions_of(cls)]
    plain = lambda name, value: not name.startswith("__") and isinstance(value, int | float | str)
    held = {n: v for base in reversed(cls.__mro__) for n, v in vars(base).items() if plain(n, v)}
    return (*code, *((name, type(value), value) for name, value in sorted(held.items())))


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of those that are defined within it."""
    yield code
    for held in code.co_consts:
        if isinstance(held, types.CodeType):
            yield from codes_of(held)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Returns the names that code reads and does not set: of globals, and of attributes."""
    names = set()
    for each in codes_of(code):
        stored = {i.argval for i in dis.get_instructions(each) if i.opname == "STORE_GLOBAL"}
        names |= {*each.co_names, *each.co_freevars} - stored
    return frozenset(names)


def _read_by(function: types.FunctionType, seen: dict[int, Any]) -> tuple[Any, ...]:
    """Returns a user's function and what it reads from outside, as a key.

    `seen` has what is in the key already, by identity.
    """
    code = function.__code__
    if id(function) in seen or len(seen) >= _MOST:
        return (code,)
    seen[id(function)] = function
    names = _names(code)
    held = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # of a name that is not set yet
            held[name] = cell.cell_contents
    held |= {"": (*(function.__defaults__ or ()), function.__kwdefaults__)}
    return code, tuple((n, _outer(value, names, seen)) for n, value in sorted(held.items()))


def _outer(value: Any, names: frozenset[str], seen: dict[int, Any]) -> Any:
    """A key for what a user's function reads, of whose attributes it reads `names`.

    Arrays, lists and other large things count as the objects that they are.
    """
    key_of = functools.partial(_outer, names=names, seen=seen)
    if isinstance(value, int | float | str | bytes | np.generic | np.dtype | None):
        return type(value), value  # True is not 1
    if isinstance(value, tuple):
        return tuple(map(key_of, value))
    made_of = inspect.unwrap(value) if callable(value) else value
    home = value.__name__ if isinstance(value, types.ModuleType) else _home(made_of)
    is_users = home.partition(".")[0] not in _OTHERS
    if isinstance(made_of, types.FunctionType) and is_users:
        return _read_by(made_of, seen)
    is_table = isinstance(value, Mapping) and len(value) < 64
    if not (is_table or is_users) or _is_array(value) or id(value) in seen or len(seen) >= _MOST:
        return type(value), id(value)
    seen[id(value)] = value
    attributes = getattr(value, "__dict__", {})
    read = {name: attributes[name] for name in sorted(names & attributes.keys())}
    held: Any = value if is_table else read
    return type(value), id(value), tuple((name, key_of(of)) for name, of in held.items())


def _home(value: Any) -> str:
    """Returns the module that defines a class or function, or an object's class."""
    of = value if isinstance(value, type | types.FunctionType) else type(value)
    return str(of.__module__)


_DEEPEST = 8  # objects within objects that are looked at
_MOST = 256  # functions and objects of which it counts what they hold


def _is_array(value: Any) -> bool:
    is_number = isinstance(value, type | np.generic)  # or a dtype, as np.float32
    return hasattr(value, "shape") and hasattr(value, "dtype") and not is_number


def _hashable(value: Any, within: tuple[int, ...] = ()) -> Any:
    """A key for a value that the objects `within` hold."""
    if id(value) in within or len(within) > _DEEPEST:
        return type(value)
    key_of = functools.partial(_hashable, within=(*within, id(value)))
    if _is_array(value):  # of numbers, if it is NumPy's, for JAX's may be large, or traced
        numbers = value.tobytes() if isinstance(value, np.ndarray) else None
        return value.shape, str(value.dtype), numbers
    if isinstance(value, Mapping):
        return type(value), tuple((key_of(name), key_of(held)) for name, held in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(key_of, value))
    try:
        hash(value)
        hashable = True
    except TypeError:  # by what it holds
        hashable = False
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        held = {name: getattr(value, name, None) for name in names}
    elif not hashable or _is_configuration(value):
        held = getattr(value, "__dict__", {})
        if not held and not hashable:
            return repr(value)
    else:
        return type(value), value  # True is not 1
    kept = sorted((n, v) for n, v in held.items() if not n.startswith("_pytree__"))
    known = value if hashable else None
    return type(value), known, tuple((name, key_of(of)) for name, of in kept)


def _is_configuration(value: Any) -> bool:
    """Whether an object may change while its hash does not: of nobody's standard library."""
    if type(value).__hash__ is not object.__hash__ or callable(value):
        return False
    return type(value).__module__.partition(".")[0] not in sys.stdlib_module_names


_HOMES = {"flax.nnx": "nnx", "flax.linen": "linen", "equinox": "eqx"}


def check_model(model: Any, own: str, function: str = "swap") -> None:
    """Raises TypeError for a class, and for a module of another framework than `own`."""
    if isinstance(model, type):
        raise TypeError(
            f"{function}: model must be a module, got the class {model.__name__}; call it"
        )
    within = lambda cls, home: f"{cls.__module__}.".startswith(f"{home}.")
    homes = [home for home in _HOMES for cls in type(model).__mro__ if within(cls, home)]
    if homes and own not in map(_HOMES.get, homes):  # Flax's bridges are of both
        raise TypeError(
            f"{function}: model is a {type(model).__name__}, a module of {homes[0]}; use "
            f"normfuse.layers.{_HOMES[homes[0]]}.{function}"
        )


def check_concrete(arrays: Iterable[Any]) -> None:
    """Raises Different if one of the arrays is traced."""
    if any(isinstance(array, Tracer) for array in arrays):
        raise Different(TRACED)


def parameter_of(
    names: Iterable[str], arrays: Sequence[Any]
) -> tuple[str | None, tuple[int, ...], str]:
    """Returns the attribute of a module's only parameter, its shape and its dtype.

    Raises:
      Different: if there are several, or it is no floating vector.
    """
    names = list(names)
    if not names:
        return None, (), "float32"
    if len(names) > 1:
        raise Different(f"it has {len(names)} arrays: {', '.join(sorted(names))}")
    (name,), (array,) = names, arrays
    dtype = getattr(getattr(array, "dtype", None), "name", "unknown")
    if dtype not in FLOATING:
        raise Different(f"its array {name} is {dtype}")
    if array.ndim == 0:
        raise Different(f"its parameter {name} is a scalar")
    return name, tuple(array.shape), dtype


# ---------------------------------------------------------------- recognition, once a configuration

_recognised: dict[Any, tuple[Formula, int, int] | str] = {}


def recognised(
    module: Any,
    base: type,
    candidate: Candidate,
    implementation: Implementation,
    framework: Framework,
) -> Service:
    """Returns how a module whose class is or was `base` is served.

    Raises:
      Different: if it is not an RMSNorm.
    """
    like = framework.configuration(module), _code(base)
    key = base, candidate.scale, candidate.shape, candidate.dtype, like
    found = _found_once(_recognised, key, lambda: recognize.formula(candidate))
    if isinstance(found, str):
        raise Different(found)
    how, rank, size = found
    service = service_of(base, how, implementation, framework)
    for dtype in ("float32", "bfloat16"):
        casts = service.casts(how, module, rank, size, dtype, candidate.dtype)
        if isinstance(casts, str) and dtype == "float32":
            raise Different(casts)
    return service


def recognised_mlp(module: Any, base: type, framework: Framework) -> Service | None:
    """Returns how a module that may be a gated MLP is served; None if it has no such layers.

    Raises:
      Different: if it has, and is not a gated MLP.
    """
    linears = framework.linears(module)
    sizes = {name: (linear.in_features, linear.out_features) for name, linear in linears.items()}
    if framework.mlp is None or not callable(module) or not recognize_mlp.roles(sizes):
        return None
    key = base, _mlp_key(module, framework)
    candidate = framework.mlp(module, base)
    found = _found_once(_recognised_mlps, key, lambda: recognize_mlp.gated(candidate))
    if isinstance(found, str):
        raise Different(found)
    how, rank = found
    service = service_of(base, how, None, framework)  # as for its linear layers
    dtypes = "float32", "bfloat16"
    refused = [service.mlp_casts(how, module, rank, dtype) for dtype in dtypes]
    if all(isinstance(reason, str) for reason in refused):
        raise Different(str(refused[0]))
    return service


_recognised_mlps: dict[Any, tuple[GatedFormula, int] | str] = {}


def _mlp_key(module: Any, framework: Framework) -> tuple[Any, ...]:
    """Returns all of a module and its linear layers but the values of arrays."""
    linears = framework.linears(module)
    own = {name: value for name, value in vars(module).items() if name not in linears}
    dtypes = lambda layer: [
        (name, str(value.dtype))
        for name, value in sorted(vars(layer).items())
        if hasattr(value, "shape") and hasattr(value, "dtype")
    ]
    layers = [
        (name, type(layer), configuration(vars(layer)), *dtypes(layer))
        for name, layer in sorted(linears.items())
    ]
    return configuration(own), tuple(layers), _code(base_of(module))


# ---------------------------------------------------------------- rules


def check_rules(rules: Rules | None, report: Any) -> Rules:
    """Returns the rules.

    Raises:
      TypeError: unless they map classes to functions of (module, x), or to None; or if the report
        cannot be called.
    """
    if report is not None and not callable(report):
        raise TypeError(f"swap: report must be a function of a Report, as print, got {report!r}")
    if rules is None:
        return {}
    if not isinstance(rules, Mapping):
        raise TypeError(f"swap: rules must map classes to functions, got {rules!r}")
    for cls, rule in rules.items():
        if not isinstance(cls, type) or not (rule is None or callable(rule)):
            raise TypeError(
                "swap: rules must map classes to functions of (module, x), or to None for modules "
                f"to leave alone, got {cls!r}: {rule!r}"
            )
    return rules


def rule_of(rules: Rules, base: type) -> tuple[bool, Rule | None]:
    """Returns whether a class has a rule, and the rule: its own, or its nearest base class's."""
    for cls in base.__mro__:
        if cls in rules:
            return True, rules[cls]
    return False, None


def check_rule(
    path: str,
    module: Any,
    rule: Rule,
    parameters: Sequence[Any],
    call: Callable[[Callable[..., Any], list[Any], Any], Any],
    ranks: tuple[int, ...],
) -> str:
    """Returns the largest relative difference of a rule to the class's own call, for the report.

    Args:
      path, module: the module, named in errors.
      rule: the user's.
      ranks: of the x to compare them for, until the class's call takes one.
      parameters: the module's arrays: only their shapes and dtypes are used.
      call: computes a copy of the module for (function of (module, x), parameters, x).

    Raises:
      ValueError: if the rule fails, or returns anything else than the class.
    """
    if any(jnp.issubdtype(p.dtype, jax.dtypes.prng_key) for p in parameters):
        return "not verified: it holds keys of random numbers"
    base = base_of(module)
    name = f"the rule for {base.__name__} does not fit {path or 'the model'}"
    rng = np.random.default_rng(0)
    values = [
        (0.5 + rng.random(p.shape)).astype(p.dtype)
        if p.dtype.name in FLOATING
        else np.zeros_like(p)
        for p in parameters
    ]
    sizes = [p.shape[-1] for p in parameters if p.ndim == 1] or [64]
    errors, own_failure = [], ""
    for dtype in ("float32", "bfloat16"):
        for shape in ((2, 3, sizes[0])[-rank:] for rank in ranks):
            x = jax.ShapeDtypeStruct(shape, dtype)
            try:
                own = recognize.trace(lambda p, x: call(base.__call__, p, x), values, x)
            except Different as different:
                own_failure = own_failure or str(different)
                continue
            try:
                ours = recognize.trace(lambda p, x: call(rule, p, x), values, x)
            except Different as different:
                raise ValueError(f"swap: {name}: {different}") from None
            (want,), (got,) = own.out_avals, ours.out_avals
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise ValueError(
                    f"swap: {name}: for x {dtype}{list(shape)} it returns {got.str_short()}, the "
                    f"class {want.str_short()}"
                )
            at = (rng.standard_normal(shape) * 2 + 0.5).astype(dtype)
            y, exact = (recognize.evaluate(t, *values, at).astype(np.float64) for t in (ours, own))
            size = float(np.max(np.abs(exact), initial=0)) or 1.0
            error = float(np.max(np.abs(y - exact), initial=0)) / size
            rounding = float(jnp.finfo(want.dtype).eps)
            allowed = recognize.tolerance_of(own, sizes[0]) + rounding
            if not error <= allowed:
                raise ValueError(
                    f"swap: {name}: for x {dtype}{list(shape)} it differs from the class by "
                    f"{error:.2g} of the largest value, where rounding explains {allowed:.2g}"
                )
            errors.append(f"{dtype} {error:.1g}")
            break
    return ", ".join(errors) or f"not verified: {own_failure}"
