"""What `normfuse info` says and what `normfuse cache` does; nothing here needs a GPU."""

import functools
import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Iterable, Sequence

from . import cache, compiler, device, fallback, host_compiler, registry
from .device import Target
from .fallback import Order, Unsupported

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
KERNELS = ("forward", "row_sums", "apply", "backward", "row_dots", "backward_apply")


def info() -> str:
    """Versions, devices, the CUDA compiler, the kernel cache, and what would serve each kernel."""
    lines = ["normfuse " + _version("normfuse"), *_environment(), "", *_cuda(), "", *_cache(), ""]
    lines += ["which implementation serves, first the one that nothing asked for:"]
    lines += _support_table()
    seen = fallback.fallbacks()
    lines += ["", "served by plain HLO in this process:"] if seen else []
    return "\n".join(lines + [f"  {op}: {reason}" for op, reason in seen])


def support(
    platforms: Iterable[str] = PLATFORMS, implementation: str = "native"
) -> dict[tuple[str, str], str | None]:
    """(kernel, platform) -> None where `implementation` serves, else the reason why it does not.

    Each kernel is lowered for each platform with small bfloat16 arrays, as a program's would be.
    """
    import jax

    from . import dense, epilogue, rms_norm
    from .scalar import SCALARS

    order = Order((implementation,), strict=True)
    kernels = {
        f"rms_norm_{name}": (getattr(rms_norm, name), *call)
        for name, call in calls(128, "bfloat16", "float32", "bfloat16").items()
    }
    product = {"function": None, "precision": None, "keep": False}
    kernels["dense"] = (dense.forward, [((64, 64), "bfloat16")] * 2, product)
    gated = {"function": SCALARS["silu"], "has_up": True, "has_bias": False}
    gradients = gated | {"with_dbias": False, "with_value": False}
    kernels["activation"] = (epilogue.backward, [((8, 128), "bfloat16")] * 3, gradients)
    found: dict[tuple[str, str], str | None] = {}
    for name, (kernel, operands, params) in kernels.items():
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
        traced = jax.jit(functools.partial(kernel, strict=order, **params)).trace(*structs)
        for where in platforms:
            try:
                traced.lower(lowering_platforms=(where,))
                found[name, where] = None
            except NotImplementedError as error:
                found[name, where] = _reason(error)
    return found


def warm(
    features: Sequence[int],
    archs: Sequence[str],
    *,
    dtypes: Sequence[str] = ("bfloat16",),
    scales: Sequence[str] = ("float32",),
    outs: Sequence[str] | None = None,
    scale_offset: float = 0.0,
) -> int:
    """Compiles the RMSNorm kernels of these sizes and types into the cache; returns how many.

    Args:
      features: lengths of the rows.
      archs: as `NORMFUSE_CUDA_ARCH` names them.
      dtypes, scales, outs: of x, scale and y; `outs` None for that of x.
      scale_offset: whether it is zero matters, its value does not.

    Raises:
      CompilerMissing: if NVRTC or CUDA's headers are not installed.
      Refused: if the cache folder cannot be used.
      ValueError: for an unknown architecture.
    """
    cache.check(cache.directory())
    before = compiler.compilations()
    for arch, n, x, scale in itertools.product(archs, features, dtypes, scales):
        for out, residual, rows in itertools.product(outs or (x,), (False, True), (8, 1 << 16)):
            given = calls(n, x, scale, out, residual, scale_offset, outer=rows)
            _warm(device.named_target(arch), given)  # few rows have layouts of their own
    return compiler.compilations() - before


def calls(n, x, scale, out, residual=False, scale_offset=0.0, outer=8):
    """kernel -> ([(shape, dtype) of each operand], params), for contiguous rows of n."""
    compute = "float64" if "float64" in (x, scale, out) else "float32"
    large, dy, w, row = (
        ((outer, n, 1), x),
        ((outer, n, 1), out),
        ((n,), scale),
        ((outer, 1), compute),
    )
    plain = {"scale_offset": scale_offset, "has_scale": True}
    flags = plain | {"has_residual": residual}
    to = {"out_dtype": _dtype(out)}
    more = [large] * residual
    last = {"with_dscale": True, "count": float(n)}
    return {
        "forward": ([large, *more, w], flags | to | {"eps": 1e-6, "with_rstd": True}),
        "row_sums": ([large], {}),
        "apply": ([large, w, row], plain | to),
        "backward": ([dy, large, w, row, *more], flags | {"with_dscale": True}),
        "row_dots": ([dy, large, w], plain),
        "backward_apply": ([dy, large, w, row, *more, row], flags | last),
    }


def _support_table() -> list[str]:
    """A line for each platform and op, and one for each reason why something does not serve."""
    found = {name: support(implementation=name) for name in ("native", "pallas")}
    lines, reasons = [], {}
    for where, op in itertools.product(PLATFORMS, ("rms_norm", "dense", "activation")):
        serves = []
        for name, kernels in found.items():
            missing = [(k, why) for (k, at), why in kernels.items() if at == where and why]
            missing = [(k, why) for k, why in missing if k.startswith(op)]
            for why in dict.fromkeys(why for _, why in missing):
                those = [k.removeprefix("rms_norm_") for k, other in missing if other == why]
                what = op if len(those) in (1, len(KERNELS)) else ", ".join(those)
                reasons.setdefault((name, why), []).append(f"{where} {what}")
            if not missing:
                serves.append(name)
        lines.append(f"  {where:5} {op:10} {', '.join(_in_order(serves, where, op))}")
    return lines + [
        f"  not {name}: {'; '.join(those)} ({why})" for (name, why), those in reasons.items()
    ]


def _in_order(serves: list[str], where: str, op: str) -> list[str]:
    """First what serves unasked: a product is XLA's, and Pallas is not interpreted unasked."""
    if where == "cpu":
        asked = ["pallas (interpreted)"] * ("pallas" in serves)
        return [*[name for name in serves if name == "native"], "xla", *asked]
    return ["xla", *serves] if op == "dense" else [*serves, "xla"]


def show() -> str:
    """The cache folder, its size, and every kernel in it."""
    lines = _cache()
    for entry in cache.entries():
        features = entry.macros.get("FEATURES", "-")
        types = [entry.macros[k] for k in ("X_TYPE", "SCALE_TYPE", "Y_TYPE") if k in entry.macros]
        kernel = entry.macros.get("KERNEL", entry.source.removesuffix(".cu"))
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        lines.append(
            f"  {kernel:24} n={features:8} {'/'.join(types):36} {entry.arch:11} "
            f"{entry.bytes / 1024:6.1f} KiB  {_compiler(entry.compiler)}  used {used}"
        )
    return "\n".join(lines)


def _compiler(version: str) -> str:
    """NVRTC's version is a number alone; the system's compiler says its name."""
    return f"NVRTC {version}" if version[0].isdigit() else version


def _warm(target: Target, kernels) -> None:
    import jax

    from . import cuda_rms_norm

    wide = any(dtype == "float64" for operands, _ in kernels.values() for _, dtype in operands)
    with jax.enable_x64(wide):
        for name, (operands, params) in kernels.items():
            structs = [jax.ShapeDtypeStruct(shape, _dtype(dtype)) for shape, dtype in operands]
            variants = [params]
            if name == "forward":
                variants.append(params | {"with_rstd": False})  # outside a gradient
            for variant in variants:
                call = functools.partial(getattr(cuda_rms_norm, name), target, **variant)
                jax.eval_shape(call, *structs)


def _environment() -> list[str]:
    import jax

    compiled, installed = registry._ext.ffi_api_version, registry.installed_version()
    lines = [
        f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {_version('jaxlib')}",
        f"XLA FFI: compiled for {_dotted(compiled)}, jaxlib has {_dotted(installed)}",
    ]
    kinds: dict[str, int] = {}
    for one in jax.local_devices():
        capability = device.compute_capability(one)
        kind = one.device_kind + (f" (compute capability {capability / 10})" if capability else "")
        kinds[kind] = kinds.get(kind, 0) + 1
    return [*lines, "devices: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())]


def _cuda() -> list[str]:
    try:
        arch = attached_arch()
    except (Unsupported, ValueError) as error:
        arch = f"none: {error}"
    try:
        found = f"{_dotted(compiler.version())}, headers in {compiler.include_directory()}"
    except compiler.CompilerMissing as error:
        found = f"missing: {error}"
    try:
        version = f"{host_compiler.find()[1]}, for {host_compiler.host()}"
    except compiler.CompilerMissing as error:
        version = f"missing: {error}"
    lines = [f"CUDA kernels are compiled for: {arch}", f"NVRTC: {found}"]
    return [*lines, f"C++ compiler, for element-wise ops on the CPU: {version}"]


def attached_arch() -> str:
    """Returns the architecture that kernels are compiled for here."""
    import jax

    for one in jax.local_devices():
        capability = device.compute_capability(one)
        if capability is not None:
            return device.attached_target(one, capability).arch
    return device.named_target(os.environ.get("NORMFUSE_CUDA_ARCH") or device.PORTABLE).arch


def _cache() -> list[str]:
    folder = cache.directory()
    entries = cache.entries()
    size = sum(entry.bytes for entry in entries) / 2**20
    lines = [f"kernel cache: {folder}, {len(entries)} kernels, {size:.1f} MiB"]
    if folder.exists():
        try:
            cache.check(folder)
        except cache.Refused as error:
            lines.append(f"  not used: {error}")
    return lines


def _reason(error: NotImplementedError) -> str:
    """What a strict refusal says of its cause."""
    text = str(error).split("cannot serve here: ", 1)[-1].split(". Use implementation", 1)[0]
    return text.split(", ", 1)[-1] if text.startswith("on ") else text


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _dtype(name: str):
    import jax.numpy as jnp

    return jnp.dtype(name)
