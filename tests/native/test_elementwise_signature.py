"""A user's C++ text gives the function's signature, and nothing that is not there."""

import elementwise_cases as cases
import pytest

from normfuse.layers.elementwise.code import collapse
from normfuse.layers.elementwise.lexer import returns
from normfuse.layers.elementwise.signature import find, resolve


def described(source, name=None):
    f = find(source, name)
    return f.name, f.template, f.parameters, f.result


def test_signature_of_a_template():
    source = "template <class T>\nstatic inline T gated(const T& x, T g, float limit) { return x; }"
    assert described(source) == ("gated", ("T",), {"x": "T", "g": "T", "limit": "float"}, "T")


def test_the_last_function_counts_and_others_may_be_anything():
    source = """
    #define BRACE {            // a brace }
    struct Pair { int a, b; };
    /* int hidden(int x) { */
    static float helper(const float* p, int n = 2) { if (n) { return p[0]; } return 0; }
    template <int N, class... T> int many(T... all) { return N; }
    template <typename T, typename U> T last(T x, unsigned  int n, U y) { return x * T(y); }
    """
    takes = {"x": "T", "n": "unsigned int", "y": "U"}
    assert described(source) == ("last", ("T", "U"), takes, "T")
    with pytest.raises(ValueError, match=r"parameter `const float\* p` of helper"):
        find(source, "helper")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "source defines no function; write `template"),
        ("int f(int x);", "source defines no function"),
        ("int f(int* x) { return *x; }", r"cannot read parameter `int\* x` of f"),
        ("int f(int x = 2) { return x; }", r"defaults are keywords of elementwise"),
        ("template <int N> int f(int x) { return x; }", "template parameter `int N`"),
        ("auto f(int x) { return x; }", r"f\(x\): its result has type `auto`"),
        ("template <class T> T f(T x, quad y) { return x; }", "y has type `quad`"),
        ("void f(int x) {}", "returns nothing; return its one result"),
        ("int f(int x, int& y) { return x; }", "f writes to its parameter `int& y`"),
        ("complex<float> f(float x) { return x; }", "its result has type `complex<float>`"),
    ],
)
def test_signatures_that_say_too_little(source, message):
    with pytest.raises(ValueError, match=message):
        find(source)


@pytest.mark.parametrize("name", cases.HOSTILE)
def test_the_last_function_of_hostile_text(name):
    assert find(cases.HOSTILE[name]).name == "g"


@pytest.mark.parametrize("name", cases.UNREADABLE)
def test_text_whose_last_function_nobody_can_tell(name):
    source, message = cases.UNREADABLE[name]
    with pytest.raises(ValueError, match=message):
        find(source)


def test_a_name_chooses_among_branches():
    source, _ = cases.UNREADABLE["conditional last"]
    assert find(source, "f").name == "f" and find(source, "g").name == "g"


@pytest.mark.parametrize(
    ("text", "is_so"),
    [
        ("return x;", True),
        ("if (x > T(0)) { return x; } else { return T(0); }", True),
        ("if (a[0]) { return x; }", True),
        ("x // return", False),
        ("x /* return */ * T(2)", False),
        ("returned * T(2)", False),
        ("x * T('{' == 'a') + T(\"return\"[0])", False),
        ("[&] { return x; }()", False),
        ("[&](T y) -> T { if (y > x) { return y; } return x; }(x)", False),
        ("auto h = [](T y) { return y; }; return h(x);", True),
        ("return T(1); \\", True),
    ],
)
def test_derivatives_that_are_statements(text, is_so):
    assert returns(text) == is_so


def test_function_that_is_not_there():
    with pytest.raises(ValueError, match="no function 'g'; it defines f"):
        find("int f(int x) { return x; }", "g")
    with pytest.raises(TypeError, match="must be C.. text, got int"):
        find(3)


@pytest.mark.parametrize(
    ("type_", "dtype"), [("T", "bfloat16"), ("unsigned long", "uint64"), ("U", None)]
)
def test_types_are_dtypes(type_, dtype):
    assert resolve(type_, {"T": "bfloat16"}) == dtype


@pytest.mark.parametrize(
    ("shape", "dims", "sizes", "masks"),
    [
        ((4, 5, 6), [(0, 1, 2), (0, 1, 2)], (120,), (1, 1)),
        ((4, 5, 6), [(0, 1, 2), ()], (120,), (1, 0)),
        ((4, 5, 6), [(0, 1, 2), (2,)], (20, 6), (3, 1)),
        ((4, 5, 6), [(0, 1, 2), (0,)], (4, 30), (3, 2)),
        ((4, 5, 6), [(0, 1, 2), (1,)], (4, 5, 6), (7, 2)),
        ((4, 1, 6), [(0, 1, 2), (0, 2)], (24,), (1, 1)),
        ((1, 1), [(0, 1), ()], (1,), (1, 0)),
        ((), [(), ()], (1,), (1, 1)),
        ((2, 3), [(0,), (1,)], (2, 3), (2, 1)),
    ],
)
def test_dimensions_that_the_same_operands_have_are_one(shape, dims, sizes, masks):
    assert collapse(shape, dims) == (sizes, masks)
