"""Functions in C++ that several tests share, so that each is compiled once, and their twins."""

import pathlib

import jax.numpy as jnp
import numpy as np

from normfuse import elementwise

GATED = """
template <class T>
T gated(T x, T g, float limit) {
  return (x < limit ? x : T(limit)) * g;
}
"""
gated = elementwise(
    GATED,
    derivative={"x": "x < limit ? g : T(0)", "g": "if (x < limit) return x; return limit;",
                "limit": "x < limit ? T(0) : g"},
    limit=1.0,
)  # fmt: skip
gcd = elementwise("""
template <class T>
T gcd(T a, T b) {
  while (b != T(0)) {
    const T r = a % b;
    a = b;
    b = r;
  }
  return a;
}
""")
squared = elementwise(
    "template <class T> T squared(T x) { return x > T(0) ? x * x : T(0); }",
    derivative={"x": "x > T(0) ? T(2) * x : T(0)"},
)


def reference(x, g, limit=1.0):
    """`gated` in float64."""
    x, g = np.float64(x), np.float64(g)
    return np.where(x < limit, x, limit) * g


def twin(x, g, limit=1.0):
    """`gated` in plain JAX."""
    return jnp.where(x < limit, x, limit) * g


def _texts():
    """(texts whose last function is g, (text, message) of those whose last nobody can tell)."""
    text = pathlib.Path(__file__).with_name("elementwise_texts.txt").read_text()
    text = text.replace("FFFF", "template <class T> T f(T x) { return x + T(1); }")
    text = text.replace("GGGG", "template <class T> T g(T x) { return x * T(3); }")
    hostile, unreadable = {}, {}
    for part in text.split("\n=== ")[1:]:
        head, body = part.split("\n", 1)
        name, _, message = head.partition(" => ")
        body = {"crlf": body.replace("\n", "\r\n"), "cr": body.replace("\n", "\r")}.get(name, body)
        body = "\ufeff" * (name == "bom") + body
        (unreadable if message else hostile)[name] = (body, message) if message else body
    return hostile, unreadable


HOSTILE, UNREADABLE = _texts()
