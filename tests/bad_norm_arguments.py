"""Arguments that a norm refuses, for the tests of every norm."""

import jax.numpy as jnp
import numpy as np

# what is given, x being (4, 6, 8) if it is not; the exception; what its message must contain:
# argument, value, rule or remedy
BAD = {
    "scale of another length": ({"scale": jnp.ones(7)}, ValueError, ["scale", "(8,)", "(7,)"]),
    "scale broadcastable": ({"scale": jnp.ones(1)}, ValueError, ["scale", "(8,)", "(1,)"]),
    "scale scalar": ({"scale": 2.0}, ValueError, ["scale", "(8,)", "()"]),
    "scale of other axes": (
        {"scale": jnp.ones(8), "axis": (1, 2)},
        ValueError,
        ["scale", "(6, 8)", "axis=(1, 2)", "(8,)"],
    ),
    "scale in the order axis was given": (
        {"scale": jnp.ones((8, 6)), "axis": (2, 1)},
        ValueError,
        ["scale", "(6, 8)", "(8, 6)"],
    ),
    "scale integer": ({"scale": jnp.ones(8, int)}, TypeError, ["scale", "int32", "scale.astype"]),
    "scale complex": ({"scale": jnp.ones(8, complex)}, TypeError, ["scale", "complex64"]),
    "scale string": ({"scale": "ones"}, TypeError, ["scale", "'ones'", "array"]),
    "x integer": ({"x": jnp.ones((4, 8), int)}, TypeError, ["x", "int32", "x.astype"]),
    "x boolean": ({"x": jnp.ones((4, 8), bool)}, TypeError, ["x", "bool", "x.astype"]),
    "x complex": ({"x": jnp.ones((4, 8), complex)}, TypeError, ["x", "complex64", "float32"]),
    "x float8": ({"x": jnp.ones((4, 8), jnp.float8_e4m3fn)}, TypeError, ["x", "float8_e4m3fn"]),
    "x list of integers": ({"x": [[1, 2]]}, TypeError, ["x", "int32"]),
    "x None": ({"x": None}, TypeError, ["x", "None", "array"]),
    "x scalar": ({"x": 3.0}, ValueError, ["x", "axis", "scalar"]),
    "eps nan": ({"eps": float("nan")}, ValueError, ["eps", "finite", "nan"]),
    "eps infinite": ({"eps": np.inf}, ValueError, ["eps", "finite", "inf"]),
    "eps negative": ({"eps": -1e-6}, ValueError, ["eps", "at least 0", "-1e-06"]),
    "eps string": ({"eps": "1e-6"}, TypeError, ["eps", "number", "'1e-6'"]),
    "eps None": ({"eps": None}, TypeError, ["eps", "number", "None"]),
    "eps larger than float32's": ({"eps": 1e39}, ValueError, ["eps", "3.40282e+38", "1e+39"]),
    "eps of hundreds of digits": ({"eps": 10**400}, ValueError, ["eps", "finite"]),
    "eps boolean": ({"eps": True}, TypeError, ["eps", "number", "True"]),
    "eps of one element": ({"eps": np.ones(1)}, TypeError, ["eps", "number", "array([1.])"]),
    "eps complex": ({"eps": 1j}, TypeError, ["eps", "number", "1j"]),
    "scale_offset nan": ({"scale_offset": float("nan")}, ValueError, ["scale_offset", "finite"]),
    "scale_offset array": (
        {"scale_offset": np.ones(2)},
        TypeError,
        ["scale_offset", "number", "array([1., 1.])"],
    ),
    "axis too large": ({"axis": 3}, ValueError, ["axis", "-3", "2", "(4, 6, 8)", "got 3"]),
    "axis too small": ({"axis": -4}, ValueError, ["axis", "-3", "got -4"]),
    "axis one of several": ({"axis": (0, 5)}, ValueError, ["axis", "(0, 5)", "(4, 6, 8)"]),
    "axis twice": ({"axis": (2, -1)}, ValueError, ["axis", "twice", "(2, -1)"]),
    "axis empty": ({"axis": ()}, ValueError, ["axis", "got ()"]),
    "axis float": ({"axis": 1.0}, TypeError, ["axis", "int", "1.0"]),
    "axis None": ({"axis": None}, TypeError, ["axis", "int", "None"]),
    "dtype integer": ({"dtype": jnp.int32}, TypeError, ["dtype", "float32", "int32"]),
    "dtype unknown": ({"dtype": "float31"}, TypeError, ["dtype", "bfloat16", "'float31'"]),
    "dtype no text": ({"dtype": "\ud800"}, TypeError, ["dtype", "'\\ud800'"]),
    "implementation unknown": (
        {"implementation": "cuda"},
        ValueError,
        ["implementation", "'native', 'pallas', 'xla'", "'cuda'"],
    ),
    "implementation one of several unknown": (
        {"implementation": ("native", "fast")},
        ValueError,
        ["implementation", "'native'", "('native', 'fast')"],
    ),
    "implementation empty": ({"implementation": ()}, ValueError, ["implementation", "()", "None"]),
    "implementation number": ({"implementation": 3}, TypeError, ["implementation", "None", "3"]),
    "implementation of numbers": ({"implementation": [1]}, TypeError, ["implementation", "[1]"]),
}
