"""What a CUDA lowering contains, and which GPU it is for; no GPU is needed."""

import functools
import importlib
import logging
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import export
from norm_kernels import KERNELS, norm_of

import normfuse
from normfuse.layers.nnx import GatedMLP
from normfuse.layers.norm.layouts import RowLayout
from normfuse.native import cache, implementation, launch
from normfuse.native.implementation import BEST, NATIVE, Order, Unsupported
from normfuse.native.launch import Target, named_target, target_for

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

SHAPE = (300, 4096)
FORWARD = {
    "eps": 1e-6,
    "scale_offset": 0.0,
    "out_dtype": jnp.dtype("bfloat16"),
    "with_rstd": True,
}
BACKWARD = {
    "scale_offset": 0.0,
    "with_dscale": True,
}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def no_arch(monkeypatch):
    monkeypatch.delenv("NORMFUSE_CUDA_ARCH", raising=False)


def structs(dtype="bfloat16", rows=SHAPE[0]):
    x = jax.ShapeDtypeStruct((rows, SHAPE[1]), jnp.dtype(dtype))
    return x, jax.ShapeDtypeStruct(SHAPE[1:2], jnp.float32)


def forward(strict=True):
    order = NATIVE if strict else Order(("native",), strict=False)
    return jax.jit(functools.partial(scaled, norm_of(FORWARD), order=order))


def scaled(norm, x, scale, order):
    """The forward's results that there are."""
    found = KERNELS["forward"](norm, x, None, scale, order=order)
    return [result for result in found if result is not None]


def lowered(fn, *operands):
    jax.clear_caches()  # the architecture is no part of JAX's keys
    return fn.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def launches(text):
    """The attributes of each launch but for its image."""
    calls = re.findall(r"@normfuse_launch\(.*", text)
    return [re.sub(r'dense<"0x[0-9A-F]*">', "IMAGE", call) for call in calls]


def test_cuda_lowering_names_target_kernel_digest_and_grid(monkeypatch):
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    (call,) = launches(lowered(forward(), *structs()))
    assert 'kernel = "rms_norm_forward"' in call
    assert "grid = dense<[300, 1, 1]> : tensor<3xi64>" in call
    assert "image = IMAGE" in call and "floats = dense<[9.99999997E-7, 0.000000e+00]>" in call
    (digest,) = re.findall(r'digest = "([0-9a-f]{64})"', call)
    assert digest in {image.digest for image in cache._memory.values()}


@pytest.mark.parametrize(
    ("rows", "kernels"), [(300, ["rms_norm_backward"]), (9000, ["rms_norm_backward", "column_sum"])]
)
def test_cuda_lowering_of_backward_launches_twice_for_many_rows(monkeypatch, rows, kernels):
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    x, scale = structs(rows=rows)
    rstd = jax.ShapeDtypeStruct((rows,), jnp.float32)
    run = functools.partial(KERNELS["backward"], norm_of(BACKWARD), order=NATIVE)
    found = launches(lowered(jax.jit(run), x, x, scale, None, rstd))
    assert [re.search(r'kernel = "(\w+)"', call)[1] for call in found] == kernels


def test_cuda_small_arrays_are_plain_hlo_unless_native_is_asked_for():
    small = structs(rows=8)  # no more than `PLAIN_ELEMENTS`
    norm = norm_of(FORWARD | {"with_rstd": False})
    run = lambda order: jax.jit(functools.partial(scaled, norm, order=order))
    assert len(launches(lowered(run(NATIVE), *small))) == 1
    assert launches(lowered(run(BEST), *small)) == []


def test_cuda_call_sites_share_one_image():
    def chain(x, scale):
        for _ in range(12):
            x = scaled(norm_of(FORWARD), x, scale, NATIVE)[0]
        return x

    before = cache.compilations()
    text = lowered(jax.jit(chain), *structs())
    assert cache.compilations() <= before + 1
    assert len(set(re.findall(r'digest = "(\w+)"', text))) == 1


def test_cuda_lowering_without_a_gpu_is_portable():
    assert b".target sm_80".hex().upper() in lowered(forward(), *structs())


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]], ids="+".join)
def test_cuda_export_is_portable_and_holds_every_target(platforms):
    names = ["normfuse_launch", "normfuse_norm_forward"]
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = export.export(forward(), platforms=platforms, disabled_checks=checks)(*structs())
    text = export.deserialize(exported.serialize()).mlir_module()
    assert b".target sm_80".hex().upper() in text
    for platform, name in zip(["cuda", "cpu"], names, strict=True):
        assert (f"@{name}(" in text) == (platform in platforms)


# ---------------------------------------------------------------- architecture


def gpu(capability="9.0", cores=132, platform="gpu"):
    return types.SimpleNamespace(
        platform=platform, compute_capability=capability, core_count=cores, device_kind="NVIDIA X"
    )


def context(*devices, for_export=False):
    """As much of JAX's LoweringRuleContext as the rule looks at."""
    module = types.SimpleNamespace(
        lowering_parameters=types.SimpleNamespace(for_export=for_export),
        axis_context=types.SimpleNamespace(device_assignment=devices),
        backend=None,
    )
    return types.SimpleNamespace(module_context=module)


def test_target_is_the_attached_device(monkeypatch):
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_80")
    assert target_for(context(gpu())) == Target("sm_90", 132, "NVIDIA X")
    several = context(gpu("12.0", 170), gpu("9.0"))
    assert target_for(several) == Target("sm_120", 170, "NVIDIA X")


def test_target_is_the_named_one_without_a_device(monkeypatch):
    cpu = types.SimpleNamespace(platform="cpu")
    amd = gpu("gfx942")
    for devices in ((), (cpu,), (amd,)):
        assert target_for(context(*devices)).arch == "compute_80"
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_100")
    assert target_for(context(cpu)) == Target("sm_100", 148)


def test_target_of_an_export_ignores_the_attached_device():
    assert target_for(context(gpu(), for_export=True)).portable


@pytest.mark.parametrize("capability", ["7.5", "6.1"])
def test_target_refuses_older_devices(capability):
    with pytest.raises(Unsupported, match=rf"NVIDIA X.*capability {capability}.*8\.0 or newer"):
        target_for(context(gpu(capability)))


@pytest.mark.parametrize(
    ("name", "arch"),
    [("sm_90", "sm_90"), ("90", "sm_90"), ("9.0", "sm_90"), ("sm_90a", "sm_90a")]
    + [("12.0", "sm_120"), ("compute_90", "compute_90"), ("sm_100f", "sm_100f")],
)
def test_target_names(name, arch):
    target = named_target(name)
    assert target.arch == arch
    assert target.portable == arch.startswith("compute")
    assert target.clusters


@pytest.mark.parametrize("name", ["hopper", "sm90", "sm_9", "9.0.1", "compute_"])
def test_target_rejects_what_is_no_name(name):
    with pytest.raises(ValueError, match=f"NORMFUSE_CUDA_ARCH='{name}'"):
        named_target(name)


def test_target_shared_memory_is_what_every_device_has():
    assert named_target("sm_90").shared_memory == 227 << 10
    assert named_target("compute_80").shared_memory == 99 << 10  # sm_86 runs it as well
    assert not named_target("sm_89").clusters


@pytest.mark.parametrize("arch, multiprocessor", [("sm_80", 164), ("sm_86", 100), ("sm_90", 228)])
@pytest.mark.parametrize("blocks", [1, 2, 3, 16])
def test_blocks_share_a_multiprocessors_memory(arch, multiprocessor, blocks):
    """CUDA takes 1 KiB of it from each; the sizes are those of the programming guide."""
    target, whole = named_target(arch), multiprocessor << 10
    each = RowLayout(8, 8, 1, 1, min_blocks=blocks).memory(target)
    assert blocks * (each + 1024) <= whole < blocks * (each + 1 + 1024)
    assert target.blocks_with(each) == blocks > target.blocks_with(each + 1)


# ---------------------------------------------------------------- unserved contexts


def test_cuda_missing_compiler_is_one_clear_error_or_plain_hlo(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NotImplementedError, match=r"on cuda.*normfuse\[cuda13\]"):
        lowered(forward(), *structs())
    monkeypatch.setattr(implementation, "_plain", {})
    with caplog.at_level(logging.INFO, "normfuse"):
        text = lowered(forward(strict=False), *structs())
    assert "custom_call" not in text and "stablehlo.rsqrt" in text
    assert [r.message for r in caplog.records if "cuda-bindings is not installed" in r.message]


def test_cuda_old_gpu_is_one_clear_error_or_plain_hlo(monkeypatch):
    def old(ctx):
        return launch.attached_target(gpu("7.5"), 75)

    monkeypatch.setattr(launch, "target_for", old)
    with pytest.raises(NotImplementedError, match="capability 7.5"):
        lowered(forward(), *structs())
    assert "stablehlo.rsqrt" in lowered(forward(strict=False), *structs())


def test_kernels_take_the_parameters_that_they_are_given(arch, monkeypatch):
    """The driver reads as many addresses as a kernel has parameters; the handler compares them."""
    arch("compute_90")
    sizes = {"u64": 8, "u32": 4, "f32": 4, "f64": 8}
    kernels = set()

    def call_host(target, operands, results, *, image, dtypes, elements, kernel, **given):
        entry = re.search(rf"\.entry\s+{kernel}\s*\((.*?)\)", bytes(image).decode(), re.DOTALL)
        found = [sizes[one] for one in re.findall(r"\.param\s+\.(\w+)", entry[1])]
        arrays = [*operands, *results]
        scalars = [given[name] for name in ("ints", "floats", "doubles")]
        assert found == [8] * len(arrays) + [n.itemsize for some in scalars for n in some], kernel
        assert dtypes == launch.signature(*([a.dtype.name for a in s] for s in (operands, results)))
        assert elements.tolist() == [math.prod(a.shape) for a in arrays]
        kernels.add(kernel)
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    scaled = normfuse.elementwise(
        "template <class T> T scaled(T x, float by) { return x * by; }",
        derivative={"x": "by"},
        by=1,
    )
    importlib.import_module("normfuse.layers.quantization.quantize")  # or it would keep the name
    monkeypatch.setattr(launch, "call_host", call_host)
    total = lambda *results: sum(r.astype(jnp.float32).sum() for r in results)
    mlp = lambda x, k: GatedMLP(64, 64, quantization="fp8", rngs=nnx.Rngs(0))(x) @ k

    def every(x, kernel, scale):
        y = normfuse.rms_norm(x, scale) + normfuse.rms_norm(x, axis=0)
        y = normfuse.dense(y, kernel, activation="gelu", quantization="fp8")
        labels = jnp.zeros(x.shape[0], jnp.int32)
        return total(normfuse.linear_cross_entropy(mlp(scaled(y), kernel), kernel, labels))

    bfloat16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    operands = bfloat16(256, 64), bfloat16(64, 64), bfloat16(64)
    jax.jit(jax.value_and_grad(every, (0, 1, 2))).trace(*operands).lower(
        lowering_platforms=("cuda",)
    )
    assert kernels >= {"rms_norm_forward", "rms_norm_backward", "epilogue_backward"}
    assert kernels >= {"quantize_amax", "quantize_gated", "elementwise_scaled"}
    assert any("softmax" in kernel for kernel in kernels), kernels
