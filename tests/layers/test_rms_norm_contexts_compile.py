"""Compilation: ahead of time, export, other platforms, partitioners."""

import pickle
import re

import hlo
import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.oldest

BOTH = {"backward": 1, "forward": 1}
ROWS = P(("data", "model"))
ALLOWED = [
    export.DisabledSafetyCheck.custom_call(f"normfuse_{name}")
    for name in ("norm_forward", "norm_backward", "launch")
]


def place(case, mesh, spec=ROWS):
    """The operands and cotangents, rows split over `mesh`."""
    put = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    *big, scale = case.args
    whole = jax.device_put(scale, NamedSharding(mesh, P()))
    return [*map(put, big), whole, *map(put, case.cts)]


def through_bytes(exported):
    return export.deserialize(exported.serialize())


def test_eval_shape(case, serve):
    """`eval_shape`"""
    values = jax.eval_shape(case, *case.args)
    grads = jax.eval_shape(case.grad, *case.args)
    assert [v.shape for v in values] == [ct.shape for ct in case.cts]
    assert [(g.shape, g.dtype) for g in grads] == [(a.shape, a.dtype) for a in case.args]
    serve.record("native")


def test_ahead_of_time_from_shapes(case, serve):
    """`lower` and `compile` from `ShapeDtypeStruct`s"""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*case.args, *case.cts)]
    compiled = jax.jit(case.grad).lower(*structs).compile()
    case.check(compiled(*case.args, *case.cts), case.gradients())
    assert hlo.calls(compiled) == BOTH
    serve.record("native")


def test_ahead_of_time_on_a_mesh(case, serve, auto_mesh):
    """`lower` and `compile` for a mesh from `ShapeDtypeStruct`s"""
    args = place(case, auto_mesh)
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in args]
    compiled = jax.jit(case.grad).lower(*structs).compile()
    case.check(compiled(*args), case.gradients())
    assert hlo.calls(compiled) == BOTH
    serve.record("native")


def test_serialized_executable(case, serve):
    """a compiled function, pickled"""
    compiled = jax.jit(case.grad).lower(*case.args).compile()
    payload = pickle.loads(pickle.dumps(serialize_executable.serialize(compiled)))
    device = {"execution_devices": jax.devices()[:1]}
    again = serialize_executable.deserialize_and_load(*payload, **device)
    case.check(again(*case.args), case.gradients())
    serve.record("native")


def test_serialized_executable_explicit(case, serve, explicit_mesh):
    """a compiled function, pickled, on Explicit axes"""
    with jax.set_mesh(explicit_mesh):
        args = place(case, explicit_mesh)
        compiled = jax.jit(case.grad).lower(*args).compile()
        payload = pickle.loads(pickle.dumps(serialize_executable.serialize(compiled)))
        again = serialize_executable.deserialize_and_load(*payload)
        case.check(again(*args), case.gradients())
    serve.record("native")


def test_serialized_executable_auto(case, serve, auto_mesh):
    """a compiled function, pickled, on Auto axes"""
    compiled = jax.jit(case.grad).lower(*place(case, auto_mesh)).compile()
    note = (
        "JAX pickles the partitioning callback with the program and fails with its own "
        "`AttributeError: Can't pickle local object`. Use Explicit axes or `shard_map`, or the "
        "persistent compilation cache."
    )
    with serve.refused((AttributeError, pickle.PicklingError), "pickle|local object", note):
        serialize_executable.serialize(compiled)


# ---------------------------------------------------------------- export


def test_export(case, serve):
    """`export` for one device"""
    exported = export.export(jax.jit(case.grad), disabled_checks=ALLOWED)(*case.args, *case.cts)
    fn = through_bytes(exported).call
    note = "`export` needs `disabled_checks` for each `normfuse_` target, as for any custom call."
    args = (*case.args, *case.cts)
    serve(case, fn, *args, expected=case.gradients(), calls=BOTH, note=note)


def test_export_without_disabled_checks(case, serve):
    """`export` without `disabled_checks`"""
    note = "JAX refuses custom calls of unknown stability; name the targets in `disabled_checks`."
    with serve.refused(ValueError, "@normfuse_", note):
        export.export(jax.jit(case))(*case.args)


def test_export_of_symbolic_shapes(case, serve):
    """`export` of symbolic shapes"""
    rows = export.symbolic_shape("b, 2, 16")
    structs = [jax.ShapeDtypeStruct(rows, jnp.float32)] * (len(case.args) - 1)
    structs.append(jax.ShapeDtypeStruct((16,), jnp.float32))
    exported = export.export(jax.jit(case), disabled_checks=ALLOWED)(*structs)
    # A C++ kernel takes any shape; a CUDA kernel is compiled for one.
    calls = {} if jax.default_backend() == "gpu" else {"forward": 1}
    serve(case, through_bytes(exported).call, *case.args, expected=case.values(), calls=calls)


def test_export_for_eight_devices_explicit(case, serve, explicit_mesh):
    """`export` for eight devices, Explicit axes"""
    with jax.set_mesh(explicit_mesh):
        args = place(case, explicit_mesh)
        exported = export.export(jax.jit(case.grad), disabled_checks=ALLOWED)(*args)
        assert exported.nr_devices == 8
        fn = through_bytes(exported).call
        serve(case, fn, *args, expected=case.gradients(), calls=BOTH)


def test_export_for_eight_devices_shard_map(case, serve, auto_mesh):
    """`export` for eight devices, `shard_map`"""
    specs = (*[ROWS] * (len(case.args) - 1), P(), *[ROWS] * len(case.cts))
    out = specs[: len(case.args)]
    mapped = jax.shard_map(case.grad, mesh=auto_mesh, in_specs=specs, out_specs=out)
    args = place(case, auto_mesh)
    exported = export.export(jax.jit(mapped), disabled_checks=ALLOWED)(*args)
    fn = through_bytes(exported).call
    serve(case, fn, *args, expected=case.gradients(), calls=BOTH)


def test_export_for_eight_devices_auto(case, serve, auto_mesh):
    """`export` for eight devices, Auto axes"""
    args = place(case, auto_mesh)
    exported = export.export(jax.jit(case.grad))(*args)
    assert exported.nr_devices == 8
    fn = through_bytes(exported).call
    note = (
        "an exported program cannot carry the callback that partitions a custom call; "
        '`implementation="native"` raises `NotImplementedError`. Export with Explicit axes or '
        "under `shard_map`."
    )
    serve(case, fn, *args, expected=case.gradients(), calls={}, note=note)


# ---------------------------------------------------------------- platforms that are not here


def calls_for(case, platforms):
    """The targets that the gradient calls when it is exported for `platforms`, and the text."""
    exporter = export.export(jax.jit(case.grad), platforms=platforms, disabled_checks=ALLOWED)
    text = exporter(*case.args).mlir_module()
    return re.findall(r"custom_call @normfuse_([a-z_]+)", text), text


def test_cuda_text(case, serve, monkeypatch):
    """`export` for CUDA from a machine without it"""
    pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "90")
    targets, _ = calls_for(case, ["cuda"])
    assert set(targets) == {"launch"} and len(targets) >= 2
    serve.record("native")


def refuses_native(case, platform):
    strict = lambda *args: case(*args, implementation="native")
    with pytest.raises(NotImplementedError, match=f"on {platform}, this platform has no kernel"):
        export.export(jax.jit(strict), platforms=[platform])(*case.args)


def test_tpu_text(case, serve):
    """`export` for TPU"""
    targets, text = calls_for(case, ["tpu"])
    assert targets == [] and text.count("custom_call @tpu_custom_call") == 2
    refuses_native(case, "tpu")
    serve.record("pallas")


def test_rocm_text(case, serve):
    """`export` for ROCm"""
    targets, text = calls_for(case, ["rocm"])
    assert targets == [] and "custom_call" not in text
    refuses_native(case, "rocm")
    serve.record("plain HLO", "there is no kernel.")


def test_several_platforms(case, serve):
    """`export` for several platforms at once"""
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    exporter = export.export(jax.jit(case.grad), platforms=[here, "tpu"], disabled_checks=ALLOWED)
    exported = through_bytes(exporter(*case.args, *case.cts))
    args = (*case.args, *case.cts)
    serve(case, exported.call, *args, expected=case.gradients(), calls=BOTH)


# ---------------------------------------------------------------- partitioners and flags


@pytest.fixture(params=["Shardy", "GSPMD"])
def partitioner(request):
    """JAX's partitioner, or the one before it, which `infer` in layers/core/op.py serves."""
    name, shardy = "jax_use_shardy_partitioner", request.param == "Shardy"
    if not shardy and name not in jax.config.values:
        pytest.skip("this JAX has Shardy alone")
    if shardy:
        yield request.param
        return
    jax.config.update(name, False)
    yield request.param
    jax.config.update(name, True)


def check_partitioner(name, fn, *args):
    """Shardings are attributes of the dialect that the partitioner reads."""
    text = jax.jit(fn).lower(*args).as_text()
    dialects = {"sdy.sharding": "Shardy", "mhlo.sharding": "GSPMD"}
    assert [reader for key, reader in dialects.items() if key in text] == [name]


@pytest.mark.parametrize("spec", [ROWS, P("data", None, "model")], ids=str)
def test_partitioners(case, serve, auto_mesh, partitioner, spec):
    """Shardy, and Shardy off (GSPMD), Auto axes"""
    calls = BOTH if spec == ROWS else {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}
    args = place(case, auto_mesh, spec)
    check_partitioner(partitioner, case.grad, *args)
    serve(case, case.grad, *args, expected=case.gradients(), calls=calls)


def test_partitioners_explicit(case, serve, explicit_mesh, partitioner):
    """Shardy, and Shardy off (GSPMD), Explicit axes"""
    with jax.set_mesh(explicit_mesh):
        args = place(case, explicit_mesh)
        check_partitioner(partitioner, case.grad, *args)
        serve(case, case.grad, *args, expected=case.gradients(), calls=BOTH)


def test_compiler_options(case, serve):
    """`compiler_options`"""
    options = {"xla_cpu_enable_fast_math": False}
    serve(case, case, *case.args, expected=case.values(), compiler_options=options)


def test_inline_jit_and_keep_unused(case, serve):
    """nested `jit`, inlined, and `keep_unused`"""
    inner = jax.jit(case, inline=True)
    fn = lambda unused, *args: inner(*args)
    serve(case, fn, jnp.zeros(3), *case.args, expected=case.values(), keep_unused=True)
