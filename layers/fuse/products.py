"""Products with parameters, and the MLPs that activations before them make.

A product of an activation with a parameter is `dense` in FP8, however its kernel is stored. One of
activation(gate) · up, or of an activation, is the second half of an MLP: `gated_product`, which
computes the hidden array again in the backward.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..core.sharding import whole
from ..dense.dense import apply
from ..dense.epilogue import finish_gated
from ..dense.gated import apply_product, mlp
from ..dense.matmul import kernel_p
from ..quantization.quantize import fits
from .activations import Activations
from .choices import chosen
from .indices import two_valued
from .labels import MOVED, UNCHANGED, Dims, Label, arrange, atoms, expand, fresh, peel, size
from .parameters import kernel_side
from .program import Equation, Program, is_precise
from .scores import ScoreForms
from .sites import Left, Read, Site, called, of_equations

FEW = 16
"""Products of fewer rows than these, or of a sixteenth of the rows that others have, are not
quantized: the passes over their kernels take longer than they save."""


def unfit(made: Equation, dtype: Any, features: int, columns: int) -> str:
    """Returns why the product of an equation cannot have FP8 operands, or ""."""
    if is_precise(made):
        return "it asks for a higher precision"
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"its operands are {dtype}"
    if not fits(features, columns):
        return f"{features if features % 16 else columns} is no multiple of 16"
    return ""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A product of rows with a parameter: `(*rows, features) · (features, *columns)`.

    Attributes:
      given: the value that it multiplies by the parameter.
      x, kernel: (value, labels) of the operands, as far back as they are laid out anew or cast.
      batch: labels of both operands and of the result: of experts, or of vmapped layers.
      rows, features, columns: labels.
      transposed: the kernel is stored (columns, features).
      dtype: of the operands as they are multiplied.
    """

    made: Equation
    value: int
    given: int
    x: tuple[int, Dims]
    kernel: tuple[int, Dims]
    batch: tuple[Label, ...]
    rows: tuple[Label, ...]
    features: tuple[Label, ...]
    columns: tuple[Label, ...]
    transposed: bool
    dtype: Any
    dims: Dims

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns the numbers of rows, features and columns that each kernel multiplies."""
        return size(self.rows), size(self.features), size(self.columns)

    @property
    def described(self) -> str:
        """Returns the sizes for the report."""
        rows, features, columns = self.sizes
        batch = f"{size(self.batch)} of " if self.batch else ""
        return f"{batch}{rows} x {features} -> {columns}"

    @property
    def leading(self) -> list[tuple[Label, ...]]:
        """Returns the batch as one dimension, where there is one."""
        return [self.batch] if self.batch else []

    @property
    def turned(self) -> list[tuple[int, int]]:
        """Returns the places and sizes of x's features, unless x has them in the kernel's order."""
        have = [l for l in atoms(self.x[1]) if l in self.features]
        places = [(self.features.index(l), l.size) for l in have]
        return [] if places == sorted(places) else places

    def operand(self, read: Callable[[int], Any], v: int, dims: Dims) -> Any:
        """Returns an array of x's labels as `(*rows, features)`, behind the batch."""
        return arrange(read(v), dims, [*self.leading, *[(l,) for l in self.rows], self.features])

    def options(self, quantization: Any) -> dict[str, Any]:
        """Returns what all operations with this product are told."""
        options = {"dtype": self.dtype, "implementation": None, "quantization": quantization}
        return options | {"contract": int(self.transposed and not self.apart)}

    @property
    def apart(self) -> bool:
        """Tells if columns stay several dimensions: JAX joins none that Explicit axes split."""
        explicit = self.made.eqn.outvars[0].aval.sharding.mesh.explicit_axes
        return bool(explicit) and len(self.columns) > 1

    @property
    def outs(self) -> list[tuple[Label, ...]]:
        """Returns the columns, as one dimension but where they are apart."""
        return [(l,) for l in self.columns] if self.apart else [self.columns]

    def weight(self, read: Callable[[int], Any]) -> Any:
        order = [self.features, *self.outs]
        if self.transposed and not self.apart:
            order.reverse()
        return arrange(read(self.kernel[0]), self.kernel[1], [*self.leading, *order])

    def called(self, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Calls an operation of ours, for each of the batch."""
        if self.batch:
            options, function = options | {"of_one": function}, _each
        return called(function, *operands, **options)

    @property
    def sharding(self) -> NamedSharding | None:
        """The function's own sharding of the product on Explicit axes, `(*rows, *outs)`; or None.

        It has to where the features of both operands are split.
        """
        if self.made.params.get("out_sharding") is None:
            return None
        placed = self.made.eqn.outvars[0].aval.sharding
        entries = zip(map(expand, self.dims), whole(placed.spec, len(self.dims)))
        of = {labels[0]: entry for labels, entry in entries if labels}
        firsts = (*self.rows, *[labels[0] for labels in self.outs])
        return NamedSharding(placed.mesh, P(*map(of.get, firsts)))

    def result(self, y: Any) -> Any:
        labels = (*self.leading, *[(l,) for l in self.rows], *self.outs)
        return arrange(y, labels, self.dims).astype(self.dtype)


def _each(*operands: Any, of_one: Callable[..., Any], **options: Any) -> Any:
    return jax.vmap(functools.partial(of_one, **options))(*operands)


def _dims_of(g: Program, made: Equation) -> tuple[list[Dims], Dims]:
    """Returns the labels of a product's operands, and of its result."""
    contract, batch = made.params["dimension_numbers"]
    lhs, rhs = (fresh(g.avals[v].shape) for v in made.ins)
    shared = dict(zip((*contract[1], *batch[1]), (*contract[0], *batch[0])))
    rhs = tuple(lhs[shared[i]] if i in shared else d for i, d in enumerate(rhs))
    of_lhs = [lhs[i] for i in batch[0]]
    of_lhs += [d for i, d in enumerate(lhs) if i not in (*contract[0], *batch[0])]
    return [lhs, rhs], (*of_lhs, *[d for i, d in enumerate(rhs) if i not in shared])


class Products:
    """The products of a program with parameters."""

    def __init__(
        self, program: Program, scores: ScoreForms, activations: Activations, made: set[int]
    ):
        self.program, self.activations = program, activations
        self.made = made  # computed by sites of other domains
        self.narrowed: dict[int, Matrix] = {}  # by the value that a site replaces
        softmaxed = [t.base.dot for f in scores.of.values() for t, _ in f.terms if t.kind == "lse"]
        self.softmaxed = set(softmaxed)  # products whose results a softmax or a loss reads
        self.matrices: list[Matrix] = []
        self.left: list[tuple[int, str]] = []
        for equation in program.equations:
            if equation.name != "dot_general" or program.is_within(equation.outs[0]):
                continue  # products within other calls are not evaluated
            try:
                self.matrices.append(self._matrix(equation))
            except Left as reason:
                if str(reason):
                    self.left.append((equation.outs[0], str(reason)))
        for m in self.matrices:
            with contextlib.suppress(Left):
                self.narrowed[_narrowed(program, m)] = m
        counted = [m for m in self.matrices if not self._is_one_hot(m.x[0])]
        self.most = max((m.sizes[0] for m in counted), default=0)

    def _matrix(self, made: Equation) -> Matrix:
        """Raises Left of what is no product of an activation with a parameter."""
        g = self.program
        dtypes = [v.aval.dtype for v in made.eqn.invars]
        if not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
            raise Left("")
        which = kernel_side(g, made)
        x_side = 1 - which
        dims, out_dims = _dims_of(g, made)
        x = self.peeled(made.ins[x_side], dims[x_side])
        kernel = self.peeled(made.ins[which], dims[which], casts=True)
        have, labels, out = (atoms(d) for d in (kernel[1], x[1], out_dims))
        # In the order that the kernel has them.
        features = tuple(l for l in have if l not in out)
        columns = tuple(l for l in have if l in out and l not in labels)
        batch = tuple(l for l in have if l in out and l in labels)
        rows = tuple(l for l in labels if l not in have)
        complete = {*features, *batch, *rows} == {*labels} and {*batch, *rows, *columns} == {*out}
        if not complete or len(have) != len({*have}) or not features or not columns:
            raise Left("")
        if batch and made.eqn.outvars[0].aval.sharding.mesh.explicit_axes:
            raise Left("its kernels have a batch dimension, on a mesh of Explicit axes")
        return Matrix(
            made,
            made.outs[0],
            given=made.ins[x_side],
            x=x,
            kernel=kernel,
            batch=batch,
            rows=rows,
            features=features,
            columns=columns,
            transposed=tuple(l for l in have if l not in batch) == (*columns, *features),
            dtype=jnp.promote_types(*dtypes),
            dims=out_dims,
        )

    def peeled(
        self, v: int, dims: Dims, casts: bool = False, repeated: bool = False, names: bool = True
    ) -> tuple[int, Dims]:
        """Goes back to a product, or through all that only lays an array out anew.

        With `casts` also through casts, with `repeated` through what repeats it; without `names`
        not through what remat's policies keep.
        """
        g = self.program

        def behind(v: int, made: Equation) -> int | None:
            given = g.avals[made.ins[0]]
            if made.name == "name":
                ends = not names
            elif made.name == "convert_element_type":
                ends = not casts or not jnp.issubdtype(given.dtype, jnp.floating)
            else:
                repeats = made.name == "broadcast_in_dim" and given.size != g.avals[v].size
                ends = repeats and not repeated
            return None if ends or v in self.made or v in self.narrowed else made.ins[0]

        return peel(g, v, dims, behind, kernel_p.name)

    def unquantized(self, m: Matrix) -> str:
        """Returns why a product is not computed in FP8, or ""."""
        if m.made in self.softmaxed:
            return "a softmax or a loss reads its result"
        if self.has_few_rows(m):
            rows, few = m.sizes[0], f"less than {FEW}"
            return f"few rows: {rows}, " + (few if rows < FEW else f"where others have {self.most}")
        if why := unfit(m.made, m.dtype, *m.sizes[1:]):
            return why
        if self._is_one_hot(m.x[0]):
            return "its rows are made of integers, as of a one-hot embedding"
        if why := chosen(self.program).get(m.value):
            return why
        if _is_returned(self.program, m.value):
            return "it is the function's result"
        return ""

    def has_few_rows(self, m: Matrix) -> bool:
        return m.sizes[0] < FEW or m.sizes[0] * 16 <= self.most

    def _is_one_hot(self, v: int) -> bool:
        made, name = self.program.made(v)
        is_cast = name == "convert_element_type"
        is_floating = is_cast and jnp.issubdtype(
            self.program.avals[made.ins[0]].dtype, jnp.floating
        )
        return is_cast and not is_floating or two_valued(self.program, v) is not None


_PASSED = *MOVED, "convert_element_type", "copy", "stop_gradient"


def _is_returned(g: Program, v: int) -> bool:
    """Tells if a value is the function's result, laid out anew or cast: logits, it may be."""
    stack, seen = [v], set()
    while stack:
        v = stack.pop()
        if v in g.results:
            if g.outer is None:
                return True
            call = next(e for e, bodies in g.outer.bodies.items() if g in bodies.values())
            return _is_returned(g.outer, call.outs[g.results.index(v)])
        for reader in g.readers.get(v, ()):
            size = g.avals[reader.outs[0]].size
            if reader.name in _PASSED and size == g.avals[v].size and not {*reader.outs} & seen:
                seen.update(reader.outs)
                stack += reader.outs
    return False


def _narrowed(g: Program, m: Matrix) -> int:
    """The value to replace: a product's result, or the cast after it where it is wider than its
    operands."""
    dtype = g.avals[m.value].dtype
    if dtype == m.dtype:
        return m.value
    readers = g.readers.get(m.value, [])
    if len(readers) == 1 and m.value not in g.results and readers[0].name == "convert_element_type":
        if g.avals[out := readers[0].outs[0]].dtype == m.dtype:
            return out
    raise Left(f"its result is {dtype.name}, wider than its operands")


def found(products: Products, quantization: Any) -> Iterator[Site | tuple[int, str]]:
    """Yields the sites of MLPs and FP8 products; a value and the reason where one is left.

    A gated activation that dropout follows is a site, too.
    """
    g = products.program
    if quantization is not None:
        yield from products.left
    for m in products.matrices:
        try:
            value = _narrowed(g, m)
            why = products.unquantized(m) if quantization is not None else ""
            quantized = None if why else quantization
            # The first serves, unless something else reads what it would not make.
            yield from _mlps(products, m, value, quantized)
            if quantized:
                yield _dense(g, m, value, quantized)
            if why:
                raise Left(why)
        except Left as reason:
            if quantization is not None:
                yield m.value, str(reason)
    yield from of_equations(g, functools.partial(_dropped, products.activations), "select_n")


def _dense(g: Program, m: Matrix, value: int, quantization: Any) -> Site:
    """Returns a quantized product; its row names the variable that a closed-over kernel is in."""
    own = g.origin(m.kernel[0])
    by = f", by {own.name}" if own is not None and own.closed_over else ""

    def compute(read: Read) -> Sequence[Any]:
        options = m.options(quantization) | {"activation": None, "op": "dense"}
        operands = m.operand(read, *m.x), m.weight(read), None
        return [m.result(m.called(apply, *operands, out_sharding=m.sharding, **options))]

    return Site(
        outs=(value,),
        reads=(m.x[0], m.kernel[0]),
        what=f"product {m.described}, {m.dtype.name}{by}",
        served=f"dense, {quantization}",
        shares=m.x[0],
        compute=compute,
    )


def _whole(products: Products, half: Site, m: Matrix, hidden: Any, options: Any) -> Site | None:
    """Returns the MLP with the products of its gate and up, where these have one input.

    Args:
      products: theirs.
      half: its second half.
      m: the product of that.
      hidden: the values of its gate and up, and their labels.
      options: what the MLP is told.
    """
    placed = [options["hidden_sharding"], *[_sharding_of(products.program, v) for v in hidden[0]]]
    shardings = {sharding for sharding in placed if sharding is not None}
    most = 0 if m.batch else 1  # they have the batch, too
    firsts = None if m.sharding is not None else _first_products(products, m, hidden)
    if firsts is None or len(shardings) > most:
        return None
    inner, biases, dims = firsts
    if any(each.apart for each in (*inner, m)):
        return None
    first = inner[0]
    if not all(_is_like(first, each) and each.transposed == m.transposed for each in inner):
        return None
    if (to := _hidden_labels(first, m, dims)) is None:
        return None
    options = options | {"hidden_sharding": next(iter(shardings), None)}
    result_dims = (*m.leading, *[(to[l],) for l in first.rows], tuple(m.columns))

    def compute(read: Read) -> Sequence[Any]:
        x, to = first.operand(read, *first.x), [*m.leading, m.features]
        kernels = {name: each.weight(read) for name, each in zip(_HIDDEN, inner)}
        kernels |= {"down": m.weight(read)}
        added = {name: arrange(read(v), d, to) for name, (v, d) in zip(_HIDDEN, biases)}
        y = m.called(mlp, x, kernels, added, **options)
        return [arrange(y, result_dims, m.dims).astype(m.dtype)]

    kernels = [each.kernel[0] for each in (*inner, m)]
    return dataclasses.replace(
        half,
        reads=tuple(dict.fromkeys([first.x[0], *kernels, *[v for v, _ in biases]])),
        dead=(*half.dead, *[i.value for i in inner]),
        served=f"GatedMLP, {options['quantization']}",
        compute=compute,
    )


_Value = tuple[int, Dims]


def _first_products(
    products: Products, m: Matrix, hidden: tuple[Sequence[int], Dims]
) -> tuple[list[Matrix], list[_Value], Dims] | None:
    """Returns an MLP's products before its activation, what is added to each, and their labels.

    They are all in FP8, and all have a vector added to them or none has; else None.
    """
    found, biases = [], []
    for v in hidden[0]:
        value = products.peeled(v, hidden[1], names=False)
        if value[0] not in products.narrowed and (split := _biased(products, *value)) is not None:
            value, bias = split
            biases.append(bias)
        found.append(value)
    (_, dims), inner = found[0], [products.narrowed.get(v) for v, _ in found]
    inner = [each for each in inner if each and each.dtype == m.dtype]
    if len(inner) < len(found) or any(other != dims for _, other in found):
        return None
    vectors = m.features, (*m.batch, *m.features)
    if len(biases) not in (0, len(inner)) or any(atoms(d) not in vectors for _, d in biases):
        return None
    return None if any(map(products.unquantized, inner)) else (inner, biases, dims)


def _is_like(first: Matrix, other: Matrix) -> bool:
    """Tells if two products have one input, laid out alike."""
    place = lambda each: [
        [labels.index(l) for l in group if l in labels]
        for labels in each.x[1]
        for group in (each.batch, each.rows)
    ]
    same = first.x[0] == other.x[0] and place(first) == place(other)
    return same and first.turned == other.turned


def _hidden_labels(first: Matrix, m: Matrix, dims: Dims) -> dict[Label, Label] | None:
    """Returns the second product's labels of the hidden array by those of the first's result.

    None unless the first's columns are the second's features, and their batches are one, in order.

    Args:
      dims: the second's labels of the first's result.
    """
    each = [zip(expand(d), expand(e), strict=True) for d, e in zip(first.dims, dims)]
    pairs = [pair for some in each for pair in some]
    to, own = dict(pairs), (*m.batch, *m.rows, *m.features)
    if {*to.values()} != {*own} or len(pairs) != len(own):
        return None
    of = lambda labels: tuple(to[l] for l in labels)
    return to if of(first.columns) == m.features and of(first.batch) == m.batch else None


_HIDDEN = "gate", "up"


def _biased(products: Products, v: int, dims: Dims) -> Any:
    """Returns a product and what is added to it, with their labels, where a value is their sum."""
    g = products.program
    made, name = g.made(v)
    for one, other in (made.ins, made.ins[::-1]) if name == "add" else ():
        shape = g.avals[v].shape  # that the other one is repeated to
        if g.avals[one].shape != shape or g.avals[other].ndim != len(shape):
            continue
        product = products.peeled(one, dims, names=False)
        if product[0] in products.narrowed:
            return product, products.peeled(other, dims, casts=True, repeated=True)
    return None


def _sharding_of(program: Program, v: int) -> Any:
    """Returns the sharding that a value is constrained to, whole, in its own layout; or None."""
    while (made := program.maker.get(v)) is not None and made.name in UNCHANGED:
        if made.name == "sharding_constraint" and not made.params["unconstrained_dims"]:
            return made.params["sharding"]
        v = made.ins[0]
    return None


def _mlps(products: Products, m: Matrix, value: int, quantization: Any) -> Iterator[Site]:
    """Yields the MLP that ends with a product, and its second half, where its rows make it one."""
    g, (hidden, dims) = products.program, m.x
    gated = None if hidden in products.made else products.activations.gated(hidden)
    if gated is None or products.has_few_rows(m) or is_precise(m.made, wide=True):
        return
    activation, *parts = gated
    if quantization is None and g.is_within(hidden):
        return  # it is `gated_product` already
    parts = [v for v in parts if v is not None]
    same = [g.avals[v] for v in parts]
    if any(a.shape != g.avals[hidden].shape or a.dtype.itemsize > 4 for a in same):
        return
    if any(jnp.promote_types(a.dtype, m.dtype) != m.dtype for a in same):
        return  # computed in more than the product's dtype
    laid_out = dims == (*[(l,) for l in m.rows], m.features)
    options = m.options(quantization) | {"activation": activation}
    options |= {"hidden_sharding": _sharding_of(g, m.given) if laid_out else None}

    def compute(read: Read) -> Sequence[Any]:
        gate, up = [*[m.operand(read, v, dims) for v in parts], None][:2]
        operands = gate, up, m.weight(read), None
        y = m.called(apply_product, *operands, out_sharding=m.sharding, **options)
        return [m.result(y)]

    half = Site(
        outs=(value,),
        reads=(*parts, m.kernel[0]),
        dead=(hidden,) if len(parts) > 1 else (),
        what=f"mlp {m.described}, {activation}, {m.dtype.name}",
        served="gated_product" + (f", {quantization}" if quantization else ""),
        compute=compute,
    )
    if quantization and (whole := _whole(products, half, m, (parts, dims), options)) is not None:
        yield whole
    yield half


# ---------------------------------------------------------------- before dropout
# No product can take a gated activation that dropout follows. Alone, `activation(gate) · up` is one
# pass each way, and keeps gate and up for its backward in place of what each equation's derivative
# reads.


def _dropped(activations: Activations, program: Program, equation: Equation) -> Site | None:
    pred, no, *yes = equation.ins
    if len(yes) != 1 or program.number(no) != 0:
        return None
    is_cast = lambda made: made.name == "convert_element_type"
    hidden = program.root(yes[0], lambda made: program.is_scaled(made) or is_cast(made))
    if (parts := activations.gated(hidden)) is None or not program.is_random(pred):
        return None
    activation, *reads = parts
    reads, out = tuple(v for v in reads if v is not None), program.avals[hidden]
    given = [program.avals[v] for v in reads]
    if out.ndim < 2 or out.dtype.itemsize > 4:
        return None
    if any(a.shape != out.shape or a.dtype != out.dtype for a in given):
        return None
    rows = out.size // out.shape[-1]
    options = {"op": "gated_product", "activation": activation, "dtype": out.dtype}
    options |= {"implementation": None}
    compute = lambda read: [called(finish_gated, *[*map(read, reads), None][:2], **options)]
    return Site(
        outs=(hidden,),
        reads=reads,
        what=f"mlp {rows} x {out.shape[-1]}, {activation}, {out.dtype.name}",
        served="activation(gate) · up alone: dropout comes before the product",
        compute=compute,
    )
