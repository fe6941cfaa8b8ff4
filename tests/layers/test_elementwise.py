"""Element-wise ops from C++: values in every dtype, broadcasting, scalars, caches and mistakes."""

import copy
import pickle
import subprocess
import sys

import elementwise_cases as cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from elementwise_cases import gated, gcd, reference, squared, twin

from normfuse import CompileError, elementwise
from normfuse.native import cache, host_compiler, implementation

IDENTITY = "template <class T> T same(T x) { return x; }"


def close(actual, expected, dtype=None):
    # a multiplication in float32 (float64) and a rounding to dtype: half a unit each, where the
    # smallest numbers have the unit of the smallest normal one
    info = jnp.finfo(dtype or actual.dtype)
    eps, atol = float(info.eps), float(info.eps) * float(info.tiny)
    np.testing.assert_allclose(np.float64(actual), expected, rtol=eps, atol=atol)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_values_in_every_floating_dtype(dtype, rng):
    with jax.enable_x64(True):
        x, g = (jnp.asarray(rng.normal(size=(37, 1001)), dtype) for _ in range(2))
        y = gated(x, g, limit=0.25)
        assert y.dtype == dtype
        close(y, reference(x, g, 0.25))


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_values_in_every_integer_dtype(dtype, rng):
    with jax.enable_x64(True):
        a, b = rng.integers(0, 120, (2, 300)).astype(dtype)
        result = gcd(a, b)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, np.gcd(a, b))


def test_conversions_of_half_precision_round_to_even():
    same = elementwise(IDENTITY, dtype=jnp.bfloat16)
    half = elementwise(IDENTITY, dtype=jnp.float16)
    x = np.array(
        [
            6e-8,
            1e-7,
            6.1e-5,
            2.0**-24,
            2.0**-25,
            65520.0,
            1.00390625,
            1.01171875,
            3.4e38,
            1e-40,
            np.inf,
            -np.inf,
            np.nan,
            -0.0,
            65519.0,
        ]
    )
    x = np.concatenate([x, np.linspace(-3, 3, 999)]).astype(np.float32)
    for op, dtype in ((same, ml_dtypes.bfloat16), (half, np.float16)):
        with np.errstate(over="ignore"):
            expected = x.astype(dtype)
        actual = np.asarray(op(x))
        np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(x) | np.signbit(expected))
    with jax.enable_x64(True):  # just above the middle of two: rounding to float32 loses that
        x = np.array([1.00390625 + 2.0**-40, 1.00048828125 + 2.0**-40])
        assert same(x)[0] == np.float64(1.0078125) and half(x)[1] == np.float64(1.0009765625)


_SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 2.5, -2.5, 1e30, -1e30]
_COMPOSED = {  # of functions that a compiler may know to be each other's inverse
    **{f"{f}({g}(x))": (f, g) for g in ("asin", "acos", "atan") for f in ("sin", "cos", "tan")},
    **{f"{f}({g}(x))": (f, g) for g in ("asinh", "atanh") for f in ("sinh", "cosh", "tanh")},
    **{f"{f}({g}(x))": (f, g) for f, g in (("exp", "log"), ("log", "exp"), ("expm1", "log1p"))},
    "sqrt(x * x)": lambda x: np.sqrt(x * x),
    "sqrt(x) * sqrt(x)": lambda x: np.sqrt(x) * np.sqrt(x),
    "pow(x, T(0.5))": lambda x: np.where(x == 0, 0, np.where(np.isinf(x), np.inf, np.sqrt(x))),
    "pow(x, T(2))": lambda x: x * x,
    "x - x": lambda x: x - x,
    "x * T(0)": lambda x: x * 0,
    "x + T(0)": lambda x: x + 0,
    "x / x": lambda x: x / x,
    "x > T(0) ? x * x : T(0)": lambda x: np.where(x > 0, x * x, 0),
    "x < T(0) ? -x : x": lambda x: np.where(x < 0, -x, x),
    "x == x ? T(1) : T(0)": lambda x: np.where(np.isnan(x), 0, 1),
    "T(1) / (T(1) / x)": lambda x: 1 / (1 / x),
    "copysign(T(1), x)": lambda x: np.copysign(1, x),
}


def _in_numpy(function, x):
    if callable(function):
        return function(x)
    names = {"a": "arc"}  # NumPy's arcsin is C's asin
    outer, inner = (getattr(np, n.replace("a", names["a"], n[0] == "a")) for n in function)
    return outer(inner(x))  # rounded to float32 between


def test_compositions_keep_nan_infinities_and_signed_zeros():
    """A compiler's flags for speed may rewrite them so that NaN becomes a number."""
    body = " ".join(f"if (which == {i}) return {text};" for i, text in enumerate(_COMPOSED))
    op = elementwise(
        f"template <class T> T composed(T x, int which) {{ {body} return x; }}", which=0
    )
    x = np.float32(_SPECIAL * 5)  # vectors, and what is left of them
    for which, text in enumerate(_COMPOSED):
        y = op(x, which=which)
        # XLA lets processors take subnormal numbers for 0.
        flushed = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x)
        with np.errstate(all="ignore"):
            wants = [np.float32(_in_numpy(_COMPOSED[text], given)) for given in (x, flushed)]
        same = [
            # Some units of float32, which the outer function may enlarge near its end.
            np.isclose(y, want, rtol=1e-5, atol=1e-6, equal_nan=True)
            & ((np.signbit(y) == np.signbit(want)) | (y != 0) | (x == x) & (flushed != x))
            for want in wants
        ]
        assert np.all(same[0] | same[1]), (text, y[:13], wants[0][:13])


def test_bool_and_a_concrete_type():
    choose = elementwise(
        "template <class T> T choose(bool take, T a, T b) { return take ? a : b; }"
    )
    x = jnp.arange(6.0)
    np.testing.assert_array_equal(choose(x > 2, x, -1), jnp.where(x > 2, x, -1))
    less = elementwise("template <class T> bool less(T a, T b) { return a < b; }")
    assert less(x, 3).dtype == bool and less(x, 3).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [((6, 1, 5), (4, 5)), ((3,), ()), ((4, 1), (1, 300)), ((2, 3, 4), (3, 1)), ((), ())]
    + [((0, 4), (4,)), ((1, 5), (4, 1))],
    ids=str,
)
def test_broadcasting(one, other, rng):
    x, g = (np.asarray(rng.normal(size=shape), np.float32) for shape in (one, other))
    y = gated(x, g)
    assert y.shape == np.broadcast_shapes(one, other)
    close(y, reference(x, g))


def test_promotion_is_that_of_jax(rng):
    x = jnp.asarray(rng.normal(size=8), jnp.bfloat16)
    for other in (2, 2.5, jnp.float32(2), jnp.ones(8, jnp.float16), jnp.ones(8, jnp.int8)):
        assert gated(x, other).dtype == (x * other).dtype
    assert elementwise(cases.GATED, limit=1.0, dtype=jnp.float32)(x, x).dtype == jnp.float32


def test_large_scalars_of_floating_types():
    assert gated(jnp.float32(3), 1.0, limit=2**31) == 3 and gated(2.0**41, 1.0, limit=-(2**40)) < 0
    with jax.enable_x64(True):
        op = elementwise("long f(int x, long n) { return n; }", n=2**40)
        assert op(1) == 2**40


def test_scalars_change_without_compiling(rng):
    x, g = rng.normal(size=(2, 40)).astype(np.float32)
    jitted = jax.jit(lambda limit: gated(x, g, limit=limit))
    jitted(0.5), gated(x, g)
    before, programs = cache.compilations(), jitted._cache_size()
    for limit in (-1.0, 0.0, 2.0):
        close(jitted(limit), reference(x, g, np.float32(limit)))
        close(gated(x, g, limit=limit), reference(x, g, np.float32(limit)))
    assert cache.compilations() == before and jitted._cache_size() == programs


def test_another_process_compiles_nothing(tmp_path):
    program = """
import jax, jax.numpy as jnp, normfuse
from normfuse.native import cache
op = normfuse.elementwise("template <class T> T twice(T x) { return x + x; }",
                          derivative={"x": "T(2)"})
assert jax.value_and_grad(op)(3.0) == (6, 2) and op(jnp.arange(3)).tolist() == [0, 2, 4]
print(cache.compilations())
"""
    environment = {"NORMFUSE_CACHE_DIR": str(tmp_path / "kernels"), "PATH": "/usr/bin:/bin"}
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout))
    assert counts == [3, 0]  # the value in float32 and in int32, the gradient


def test_large_arrays_are_done_by_every_thread(rng):
    x = rng.normal(size=(1 << 20) + 3).astype(np.float32)
    np.testing.assert_array_equal(squared(x), np.where(x > 0, x * x, 0))


def plain_gated(x, g, limit):
    return twin(x, g, limit)


def test_copies_are_equal():
    """By their texts and options, so that a copied model compiles nothing and has its structure."""
    options = {"derivative": {"x": "T(1)"}, "definition": plain_gated, "dtype": "float32"}
    make = lambda limit=1.0, **changed: elementwise(cases.GATED, limit=limit, **options | changed)
    op, x = make(), jnp.ones(3)
    for same in (make(), copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert same == op and hash(same) == hash(op) and same is not op
    for other in (
        make(limit=2.0),
        make(derivative={"x": "T(2)"}),
        make(definition=lambda x, g, limit: x),
        make(dtype="float16"),
        make(implementation="native"),
        elementwise(cases.GATED.replace("x < limit", "x <= limit"), limit=1.0, **options),
    ):
        assert other != op
    assert op != 3 and make(limit=float("nan")) == make(limit=float("nan"))
    run = jax.jit(lambda op, x: jax.grad(lambda x: op(x, 2.0).sum())(x), static_argnums=0)
    for one in (op, copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        np.testing.assert_array_equal(run(one, x), 1)
    assert run._cache_size() == 1


def test_helpers_are_any_cplusplus():
    """Templates over numbers before the function, and headers that declare things in std."""
    op = elementwise("""
    #include <algorithm>
    #include <array>
      #include <vector>
    #include <limits>
    template <int N> float power(float x) { return N == 0 ? 1 : x * power<(N > 0 ? N - 1 : 0)>(x); }
    template <class T>
    T middle(T a, T b, T c) {
      std::array<T, 3> three = {a, b, c};
      std::vector<T> sorted(three.begin(), three.end());
      std::sort(sorted.begin(), sorted.end());
      return std::numeric_limits<T>::is_iec559 ? T(power<2>(float(sorted[1]))) : sorted[1];
    }
    """)
    assert op(jnp.array([1.0, 5.0]), 3.0, 2.0).tolist() == [4, 9]
    assert op(4, 6, 5) == 5


# One function of each kind that the compiler reads otherwise than the reader of its signature.
COMPILED = "raw string", "heads in branches", "guard", "bom", "crlf", "nodiscard", "cstdio"


@pytest.mark.parametrize("name", [*COMPILED, "if 0 unbalanced", "digraphs", "backslash end"])
def test_hostile_text_computes_its_last_function(name):
    assert elementwise(cases.HOSTILE[name])(2.0) == 6


def test_derivatives_beside_include_guards_and_words_that_look_like_return():
    """The text is read once for all derivatives; each is an expression here."""
    source = "#ifndef GUARD\n#define GUARD\n" + cases.GATED + "#endif\n"
    slopes = {"x": "x < limit ? g : T(0) // return", "g": "x < limit ? x : T(limit) /* return */"}
    op = elementwise(source, derivative=slopes, limit=1.0)
    x, g = jnp.float32([0.5, 2.0]), jnp.float32([3.0, 4.0])
    for a, b in zip(jax.grad(lambda x, g: op(x, g).sum(), (0, 1))(x, g), ([3, 0], [0.5, 1])):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"derivative\['x'\]: line 2 has a } without its {"):
        elementwise(cases.GATED, derivative={"x": "T(1);\n} T other() { return T(2)"}, limit=1.0)


# ---------------------------------------------------------------- unserved contexts


def no_compiler(monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("about CPUs")
    monkeypatch.setattr(host_compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(host_compiler, "_find", host_compiler._find.__wrapped__)


def test_without_a_compiler_the_definition_serves(monkeypatch):
    no_compiler(monkeypatch)
    jax.clear_caches()  # another test may have lowered the same call
    monkeypatch.setattr(implementation, "_plain", {})
    op = elementwise(cases.GATED, definition=twin, limit=1.0)
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(op(x, x, limit=2.0), twin(x, x, 2.0))
    ((name, reason),) = implementation.fallbacks()
    assert name == "gated" and "no C++ compiler" in reason
    strict = elementwise(cases.GATED, definition=twin, implementation="native", limit=1.0)
    with pytest.raises(NotImplementedError, match=r"cannot serve here: on cpu, no C\+\+ compiler"):
        strict(x, x)


def test_without_compiler_and_definition_there_is_one_clear_error(monkeypatch):
    no_compiler(monkeypatch)
    op = elementwise(IDENTITY)
    with pytest.raises(NotImplementedError, match=r"same: no C\+\+ compiler .* Pass definition="):
        op(jnp.arange(4.0))


def test_platforms_without_cplusplus_take_the_definition():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    lower = lambda op: jax.jit(op).trace(x, x).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.select" in lower(elementwise(cases.GATED, definition=twin, limit=1.0))
    with pytest.raises(NotImplementedError, match="gated: .* not for this platform. Pass de"):
        lower(gated)


def test_implementation_xla_is_the_definition(rng):
    x, g = (jnp.asarray(rng.normal(size=9), jnp.bfloat16) for _ in range(2))
    op = elementwise(cases.GATED, definition=twin, implementation="xla", limit=1.0)
    before = cache.compilations()
    close(op(x, g), reference(x, g))  # computed in float32 there too
    assert cache.compilations() == before
    with pytest.raises(NotImplementedError, match="gated has no 'xla' implementation"):
        elementwise(cases.GATED, implementation="xla", limit=1.0)(x, g)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("jit", [False, True])
def test_a_compile_error_names_the_users_line(jit):
    bad = elementwise("template <class T>\nT bad(T x) {\n  T y = x;\n  return cube_of(y);\n}")
    run = jax.jit(bad) if jit else bad
    with pytest.raises(CompileError, match=r"(?s)<elementwise bad>[:(]4.*cube_of"):
        run(jnp.arange(4.0))


def test_a_compile_error_on_a_mesh_is_the_same_exception(eight_devices):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, jax.P("data")))
    bad = elementwise("template <class T> T bad(T x) { return cube_of(x); }")
    with pytest.raises(CompileError, match="cube_of"):
        jax.jit(bad)(x)


def test_a_mistake_in_a_derivative_names_its_line():
    op = elementwise(IDENTITY, derivative={"x": "T(1) +\n  nothing"})
    with pytest.raises(CompileError, match=r"(?s)<derivative of same .* x>[:(]2.*nothing"):
        jax.grad(op)(1.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gated(1.0), TypeError, r"gated takes 2 inputs \(x, g\), got 1"),
        (lambda: gated(1.0, 2.0, limt=3.0), TypeError, "no scalar 'limt'; it has limit"),
        (lambda: gated(1.0, 2.0, limit="a"), TypeError, "scalar limit must be a number, got 'a'"),
        (lambda: gated("text", 2.0), TypeError, "x must be an array, got 'text'"),
        (
            lambda: gated(jnp.ones(2, jnp.float8_e4m3fn), 2.0),
            TypeError,
            r"x must have one of the dtypes .*; got float8_e4m3fn; cast it first",
        ),
        (
            lambda: gated(jnp.ones(2), jnp.ones(3)),
            ValueError,
            r"inputs do not broadcast: x \(2,\), g \(3,\)",
        ),
        (
            lambda: elementwise("int f(int n) { return n; }")(1.5),
            TypeError,
            "f: n is declared int, got float32; cast it first",
        ),
        (
            lambda: elementwise("float f(float x, long n) { return x + n; }", n=0)(
                1.5, n=np.int64(2**31)
            ),
            OverflowError,
            "f: scalar n is declared long, here int32; got np.int64.2147483648. .64 bits need",
        ),
        (lambda: gated(1j, 2.0), TypeError, "x must have one of the dtypes .*; got complex64"),
        (lambda: elementwise(IDENTITY, cap=1.0), TypeError, "no parameter called 'cap'"),
        (
            lambda: elementwise(IDENTITY, dtype="float8_e4m3fn"),
            TypeError,
            "dtype must be None or one",
        ),
        (lambda: elementwise(IDENTITY, definition=3), TypeError, "definition must be a function"),
        (lambda: elementwise(IDENTITY, derivative=3), TypeError, "derivative must be a mapping"),
        (
            lambda: elementwise(IDENTITY, derivative={"y": "1"}),
            ValueError,
            r"derivative has 'y', which is no parameter of same\(x\)",
        ),
        (
            lambda: elementwise(IDENTITY, derivative={"x": ("1", "2")}),
            TypeError,
            r"derivative\['x'\] must be C\+\+ text, got \('1', '2'\)",
        ),
        (
            lambda: elementwise(IDENTITY, derivative={"x": gcd}),
            TypeError,
            r"derivative\['x'\] must be C\+\+ text, got <elementwise gcd.*derivative=, the whole",
        ),
        (
            lambda: elementwise("template <class T, class U> U f(T x) { return x; }"),
            ValueError,
            "no input has type U, so what it is does not follow",
        ),
        (
            lambda: elementwise("float f(float x) { return x; } // \ud800"),
            ValueError,
            r"source has '\\ud800' at 34, which is no character",
        ),
        (
            lambda: elementwise(
                "float f(" + ", ".join(f"float a{i}" for i in range(9)) + ") { return a0; }"
            ),
            ValueError,
            "has 9 inputs; from 1 to 8 are possible",
        ),
    ],
)
def test_mistakes_are_one_clear_error(call, error, message):
    before = cache.compilations()
    with pytest.raises(error, match=message):
        call()
    assert cache.compilations() == before  # before anything is compiled or launched
