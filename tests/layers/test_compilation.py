"""Compilation: ahead of time, export, other platforms, partitioners"""

import functools
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


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_ahead_of_time_on_a_mesh(case, serve, request, kind):
    """`lower` and `compile` for a mesh from `ShapeDtypeStruct`s, pickled on Explicit axes"""
    mesh = request.getfixturevalue(f"{kind}_mesh")
    with jax.set_mesh(mesh):
        args = place(case, mesh)
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in args]
        compiled = jax.jit(case.grad).lower(*structs).compile()
        case.check(compiled(*args), case.gradients())
        assert hlo.calls(compiled) == BOTH
        if kind == "auto":
            with pytest.raises((AttributeError, pickle.PicklingError), match="pickle|local object"):
                serialize_executable.serialize(compiled)
            note = (
                "JAX cannot pickle the partitioning callback of a program on Auto axes: use "
                "Explicit axes or `shard_map`, or the persistent compilation cache."
            )
        else:
            payload = pickle.loads(pickle.dumps(serialize_executable.serialize(compiled)))
            again = serialize_executable.deserialize_and_load(*payload)
            case.check(again(*args), case.gradients())
            note = ""
    serve.record("native", note)


# ---------------------------------------------------------------- export


def test_export(case, serve):
    """`export` for one device, and for several platforms at once"""
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    exporter = export.export(jax.jit(case.grad), platforms=[here, "tpu"], disabled_checks=ALLOWED)
    fn = through_bytes(exporter(*case.args, *case.cts)).call
    args = (*case.args, *case.cts)
    serve(case, fn, *args, expected=case.gradients(), calls=BOTH)
    note = "JAX refuses custom calls of unknown stability; name the targets in `disabled_checks`."
    with serve.refused(ValueError, "@normfuse_", note):
        export.export(jax.jit(case))(*case.args)
    serve.record("native", note)


def test_export_of_symbolic_shapes(case, serve):
    """`export` of symbolic shapes"""
    rows = export.symbolic_shape("b, 2, 16")
    structs = [jax.ShapeDtypeStruct(rows, jnp.float32)] * (len(case.args) - 1)
    structs.append(jax.ShapeDtypeStruct((16,), jnp.float32))
    exported = export.export(jax.jit(case), disabled_checks=ALLOWED)(*structs)
    # A C++ kernel takes any shape; a CUDA kernel is compiled for one.
    calls = {} if jax.default_backend() == "gpu" else {"forward": 1}
    serve(case, through_bytes(exported).call, *case.args, expected=case.values(), calls=calls)


def test_export_for_eight_devices(case, serve, explicit_mesh):
    """`export` for eight devices, Explicit axes or `shard_map`"""
    with jax.set_mesh(explicit_mesh):
        args = place(case, explicit_mesh)
        exported = export.export(jax.jit(case.grad), disabled_checks=ALLOWED)(*args)
        assert exported.nr_devices == 8
        fn = through_bytes(exported).call
        serve(case, fn, *args, expected=case.gradients(), calls=BOTH)


def test_export_for_eight_devices_auto(case, serve, auto_mesh):
    """`export` for eight devices, Auto axes"""
    args = place(case, auto_mesh)
    exported = export.export(jax.jit(case.grad))(*args)
    assert exported.nr_devices == 8
    note = (
        "an exported program cannot carry the callback that partitions a custom call; "
        '`implementation="native"` raises `NotImplementedError`. Export with Explicit axes or '
        "under `shard_map`."
    )
    fn = through_bytes(exported).call
    serve(case, fn, *args, expected=case.gradients(), calls={}, note=note)
    strict = functools.partial(case.grad, implementation="native")
    with pytest.raises(NotImplementedError) as caught:
        export.export(jax.jit(strict))(*args)
    for word in ("rms_norm: ", "'native'", "export", "Auto", "Explicit", "shard_map", "None"):
        assert word in str(caught.value)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_text_for_other_platforms(case, serve, monkeypatch, platform):
    if platform == "cuda":
        pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "90")
    exporter = export.export(jax.jit(case.grad), platforms=[platform], disabled_checks=ALLOWED)
    text = exporter(*case.args).mlir_module()
    targets = re.findall(r"custom_call @normfuse_([a-z_]+)", text)
    assert set(targets) == ({"launch"} if platform == "cuda" else set())
    assert text.count("custom_call @tpu_custom_call") == 2 * (platform == "tpu")
    outcome = {"cuda": "native", "tpu": "pallas", "rocm": "plain HLO"}[platform]
    serve.record(outcome, title=f"`export` for {platform} from a machine without it")
    if platform != "cuda":
        strict = functools.partial(case, implementation="native")
        with pytest.raises(NotImplementedError, match=f"on {platform}, this platform has no kern"):
            export.export(jax.jit(strict), platforms=[platform])(*case.args)


# ---------------------------------------------------------------- partitioners


@pytest.fixture
def gspmd():
    """The partitioner before JAX's, which `infer` in layers/core/op.py serves."""
    name = "jax_use_shardy_partitioner"
    if name not in jax.config.values:
        pytest.skip("this JAX has Shardy alone")
    jax.config.update(name, False)
    yield
    jax.config.update(name, True)


@pytest.mark.parametrize("spec", [ROWS, P("data", None, "model")], ids=str)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_gspmd(case, serve, request, gspmd, kind, spec):
    """Shardy off (GSPMD)"""
    calls = BOTH if spec == ROWS else {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}
    mesh = request.getfixturevalue(f"{kind}_mesh")
    with jax.set_mesh(mesh):
        args = place(case, mesh, spec)
        # shardings are attributes of the dialect that the partitioner reads
        text = jax.jit(case.grad).lower(*args).as_text()
        assert "mhlo.sharding" in text and "sdy.sharding" not in text
        serve(case, case.grad, *args, expected=case.gradients(), calls=calls)
