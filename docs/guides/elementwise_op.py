"""Write an element-wise operation in C++.

Run it: `python docs/guides/elementwise_op.py`. The function is compiled on first use: by the
system's C++ compiler here, by NVRTC on an NVIDIA GPU. CI checks every statement below.

The operation is GPT-OSS's gated activation, y = x · σ(αx) · (g + 1) with x and g clamped at a
limit. It is one kernel forward and one backward, with or without `jit`.
"""

import os
import tempfile

os.environ.setdefault("NORMFUSE_CACHE_DIR", tempfile.mkdtemp())  # this guide's kernels only

import jax
import jax.numpy as jnp
import numpy as np

import normfuse

# 1. The function, once for all types: for bfloat16 and float16, T is float and the result is
#    rounded once. `limit` and `alpha` have defaults, so they are run-time scalars; the others are
#    arrays. The derivatives are C++ with the same names: one kernel computes both.
gated = normfuse.elementwise(
    """
    template <class T> T sigmoid(T x) { return 1 / (1 + exp(-x)); }

    template <class T> T gated(T x, T g, float limit, float alpha) {
      x = fmin(x, T(limit));
      g = fmax(fmin(g, T(limit)), T(-limit));
      return x * sigmoid(alpha * x) * (g + 1);
    }
    """,
    derivative={
        "x": """
            if (x > limit) return 0;
            const T s = 1 / (1 + exp(-alpha * x));
            const T h = fmax(fmin(g, T(limit)), T(-limit)) + 1;
            return h * s * (1 + alpha * x * (1 - s));
        """,
        "g": """
            if (fabs(g) > limit) return 0;
            const T c = fmin(x, T(limit));
            return c / (1 + exp(-alpha * c));
        """,
    },
    limit=7.0,
    alpha=1.702,
)


# 2. The reference in plain JAX. With `definition=reference` it would serve where nothing can be
#    compiled (TPUs), and be differentiated where no derivative is given.
def reference(x, g, limit=7.0, alpha=1.702):
    x, g = jnp.minimum(x, limit), jnp.clip(g, -limit, limit)
    return x * jax.nn.sigmoid(alpha * x) * (g + 1)


keys = jax.random.split(jax.random.key(0), 2)
x, g = (5 * jax.random.normal(key, (64, 96)) for key in keys)
np.testing.assert_allclose(gated(x, g), reference(x, g), rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(gated(x, g, limit=2.0), reference(x, g, 2.0), rtol=1e-5, atol=1e-5)

# 3. It broadcasts and promotes as jnp does.
assert gated(x, g[0]).shape == (64, 96)
assert gated(x.astype("bfloat16"), g).dtype == "float32"
assert gated(x.astype("bfloat16"), g.astype("bfloat16")).dtype == "bfloat16"


# 4. Its gradient, and JAX's other transformations.
def gradients(op):
    return jax.jit(jax.grad(lambda x, g: jnp.sum(op(x, g) ** 2), (0, 1)))


for found, expected in zip(gradients(gated)(x, g), gradients(reference)(x, g), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
np.testing.assert_allclose(jax.vmap(gated)(x, g), gated(x, g), rtol=1e-6)

# 5. Scalars may be traced: a learned or scheduled limit compiles nothing.
schedule = jax.jit(lambda limit: gated(x, g, limit=limit).max())
assert schedule(1.0) < schedule(5.0)

# 6. A mistake raises one error with the compiler's message and the line of your text.
try:
    normfuse.elementwise("template <class T> T wrong(T x) { return square(x); }")(x)
except normfuse.CompileError as error:
    assert "square" in str(error)
else:
    raise AssertionError("C++ has no function `square`")
print("gated: right here, with its gradient")
