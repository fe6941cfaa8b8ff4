"""RMSNorm over random shapes, dtypes, layouts, transformations and meshes.

Every case is held to the float64 reference by the tolerance that its dtypes and length give. Each
is one small program, most of it compiled: without jit a case would be several.
"""

import contextlib
import functools

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rms_norm_cases import Batch, Case, stack

pytestmark = pytest.mark.optimized

SHAPES = [  # with axis
    ((6, 16), -1),
    ((16, 8), -1),
    ((2, 3, 7), -1),
    ((8, 4, 16), -1),
    ((8, 4, 16), (-2, -1)),
    ((5, 8, 3), 1),
    ((8, 5), 0),
    ((4, 3, 8), (0, 2)),
    ((33,), -1),
    ((3, 1), -1),
    ((2, 260), -1),
    ((0, 5), -1),
]
DTYPES = [  # x, residual, scale, dtype
    ("float32", "float32", "float32", None),
    ("bfloat16", "bfloat16", "float32", None),
    ("bfloat16", "float32", "bfloat16", "float32"),
    ("float16", "float32", None, None),
    ("float32", "bfloat16", "float16", "bfloat16"),
    ("float64", "float32", "float32", None),
    ("float32", "float32", "float64", "float16"),
]
OPTIONS = [{}, {"scale_offset": 1.0}, {"eps": 1e-3}]


# ---------------------------------------------------------------- layouts: a view and its inverse

LAYOUTS = {
    "as it is": (lambda a: a, lambda a: a),
    "transposed": (lambda a: a.T, lambda a: np.ascontiguousarray(a.T)),
    "reversed": (lambda a: a[::-1], lambda a: a[::-1].copy()),
    "part of a larger one": (lambda a: a[1:-1], lambda a: np.concatenate([a[:1], a, a[:1]])),
    "every other": (lambda a: a[..., ::2], lambda a: np.repeat(a, 2, -1)),
}


def laid_out(fn, layout, args):
    """`fn` of views, and the arrays that they are views of."""
    view, inverse = LAYOUTS[layout]
    of = lambda change, args: tuple(change(a) if a.size and a.ndim else a for a in args)
    return lambda *args: fn(*of(view, args)), of(inverse, args)


# ---------------------------------------------------------------- transformations


def values(case, **options):
    return functools.partial(case, **options), case.args, case.values()


def gradients(case, **options):
    fn = functools.partial(case.grad, **options)
    return fn, (*case.args, *case.cts), case.gradients()


def tangents(case, **options):
    n = len(case.args)
    norm = functools.partial(case, **options)
    fn = lambda *args: jax.jvp(norm, args[:n], args[n:])[1]
    return fn, (*case.args, *case.tangents), case.pushed()


def rematerialised(case, **options):
    fn, args, expected = gradients(case, **options)
    loss = functools.partial(case.loss, **options)
    return jax.grad(jax.checkpoint(loss), case.argnums), args, expected


def scanned(case, **options):
    fn, args, expected = gradients(case, **options)
    loop = lambda *args: jax.lax.scan(lambda _, a: (None, fn(*a)), None, args)[1]
    return loop, tuple(a[None] for a in args), [stack([e]) for e in expected]


def conditional(case, **options):
    fn, args, expected = values(case, **options)
    return lambda *args: jax.lax.cond(args[0].size >= 0, fn, fn, *args), args, expected


def batched(case, in_axes, method, **options):
    """`vmap` over some operands, of values or gradients."""
    n = len(case.args)
    batch = Batch.of([case, case.replace(args=case.tangents)], in_axes[:n])
    if method == "values":
        fn = jax.vmap(functools.partial(case, **options), in_axes[:n])
        return fn, batch.args, batch.each("values")
    fn = jax.vmap(functools.partial(case.grad, **options), (*in_axes[:n], *[0] * len(case.cts)))
    return fn, (*batch.args, *batch.cts), batch.each("gradients")


TRANSFORMS = {
    "values": values,
    "gradients": gradients,
    "tangents": tangents,
    "rematerialised": rematerialised,
    "scanned": scanned,
    "conditional": conditional,
    "vmap": functools.partial(batched, in_axes=(0, 0, None), method="values"),
    "vmap over everything": functools.partial(batched, in_axes=(0, 0, 0), method="values"),
    "vmap of grad": functools.partial(batched, in_axes=(0, 0, None), method="gradients"),
    "vmap of grad over everything": functools.partial(
        batched, in_axes=(0, 0, 0), method="gradients"
    ),
}

# ---------------------------------------------------------------- meshes


@functools.cache
def mesh_of(kind):
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis, axis))


ENTRIES = [None, "data", "model", ("data", "model")]


@st.composite
def places(draw, shape):
    """A kind of mesh, and a spec that divides `shape`; None for one device."""
    kinds = [None, None, None, "auto", "explicit"] if len(jax.devices()) >= 8 else [None]
    kind = draw(st.sampled_from(kinds))
    free, entries, sizes = {"data", "model"}, [], {"data": 4, "model": 2}
    for n in shape:
        entry = draw(st.sampled_from(ENTRIES))
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        fits = n and n % int(np.prod([sizes[a] for a in names])) == 0 and set(names) <= free
        entries.append(entry if fits else None)
        free -= set(names) if fits else set()
    return (kind, P(*entries)) if kind else (None, P())


def run(case, transform, layout, kind, spec, eager):
    """Compares one case; on a mesh, everything of x's shape is split as `spec` says."""
    fn, args, expected = TRANSFORMS[transform](case)
    if kind is None:
        fn, args = laid_out(fn, layout, args)
        case.check((fn if eager else jax.jit(fn))(*args), expected)
        return
    mesh, shape = mesh_of(kind), case.h.shape
    most = max(a.ndim for a in args)  # a batch of scales may have the shape of x

    def place(a):
        extra = a.ndim - len(shape)  # the dimensions of a batch or a loop are in front
        like_x = a.ndim == most and a.shape[extra:] == shape
        own = P(*[None] * extra, *spec) if like_x else P()
        return jax.device_put(a, NamedSharding(mesh, own))

    with jax.set_mesh(mesh):
        case.check(jax.jit(fn)(*map(place, args)), expected)


@st.composite
def examples(draw):
    op = draw(st.sampled_from(["rms_norm", "residual_rms_norm", "rms_norm_with_rstd"]))
    shape, axis = draw(st.sampled_from(SHAPES))
    x, residual, scale, dtype = draw(st.sampled_from(DTYPES))
    options = draw(st.sampled_from(OPTIONS))
    transform = draw(st.sampled_from(sorted(TRANSFORMS)))
    layout = draw(st.sampled_from(["as it is"] * 4 + sorted(LAYOUTS)))
    place, eager = draw(places(shape)), draw(st.integers(0, 15)) == 0
    build = {"shape": shape, "axis": axis, "x": x, "residual": residual, "scale": scale}
    return {"op": op, "dtype": dtype, **build, **options}, transform, layout, place, eager


def check(example):
    built, transform, layout, (kind, spec), eager = example
    wide = "float64" in (built["x"], built["residual"], built["scale"], built["dtype"])
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        run(Case(**built), transform, layout, kind, spec, eager)


common = functools.partial(
    settings,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.newest
@common(max_examples=150, derandomize=True)
@given(example=examples())
def test_random_cases(example):
    check(example)


@pytest.mark.slow
def test_many_random_cases(pytestconfig):
    run = seed(20261121)(given(example=examples())(check))
    common(max_examples=pytestconfig.getoption("--cases"))(run)()
