"""The commands `normfuse info` and `normfuse cache`; nothing here needs a GPU."""

import collections
import functools
import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..native import cache, compiler, host_compiler, implementation, registry
from ..native.implementation import Order, Unsupported
from ..native.kernel import Kernel
from ..native.launch import PORTABLE, attached_target, compute_capability, named_target
from .core.arguments import Quantization, check_quantization

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
Example = tuple[Kernel, Any, list[Any]]  # kernel, static parameters, operand types


def info(every_platform: bool = False) -> str:
    """Returns versions, devices, the CUDA compiler, the kernel cache and the implementations.

    It lists this machine's platforms, and all of them with `every_platform`.
    """
    platforms = PLATFORMS if every_platform else _platforms_here()
    lines = ["normfuse " + _version("normfuse"), *_environment(), "", *_cuda(), "", *_cache()]
    lines += ["", "implementations per op, default first:", *_support_table(platforms)]
    lines += ["", 'products with quantization="fp8":', *_fp8_products()]
    lines += ["", "attention:", *_attention()]
    if seen := implementation.fallbacks():
        lines += ["", "served by plain HLO in this process:"]
    return "\n".join(lines + [f"  {op}: {reason}" for op, reason in seen])


def kernels() -> dict[str, dict[str, Example]]:
    """Returns a small example of every kernel, by operation and kernel."""
    import jax
    import jax.numpy as jnp

    from .cross_entropy import softmax
    from .dense import epilogue, pallas
    from .norm import op as norms
    from .quantization import gated, quantize
    from .quantization import norm as quantized_norm

    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

    def by_name(examples: Iterable[Example]) -> dict[str, Example]:
        found: dict[str, Example] = {}
        for example in examples:  # keeps the first of each
            found.setdefault(example[0].name, example)
        return found

    types = 128, "bfloat16", "float32", "bfloat16"
    silu = epilogue.examples(128, "bfloat16", rows=8, activations=["silu"])
    gated_silu = gated.examples(64, "bfloat16", rows=64, function=epilogue.SCALARS["silu"])
    norm = quantized_norm.examples(64, "bfloat16", "float32", rows=64)
    losses = [of(128, "bfloat16", rows=8) for of in (softmax.examples, softmax.code_examples)]
    quantized = *quantize.examples(64, "bfloat16", rows=64), *gated_silu, *norm
    return {
        "rms_norm": by_name(norms.examples(*types, rows=8)),
        "layer_norm": by_name(norms.examples(*types, rows=8, centred=True)),
        "dense": {"dense": (pallas.kernel, pallas.Dense(), [x, x])},
        "activation": by_name(example for example in silu if example[1].has_up),
        "loss": by_name(itertools.chain(*losses)),
        "quantize": {example[0].name: example for example in quantized},
    }


def support(
    platforms: Iterable[str] = PLATFORMS, name: implementation.Name = "native"
) -> dict[tuple[str, str, str], str | None]:
    """Returns (op, kernel, platform) -> None where implementation `name` serves, else why not.

    Each kernel is lowered for each platform with small bfloat16 arrays, as a program's would be.
    """
    import jax

    order = Order((name,), strict=True)
    found: dict[tuple[str, str, str], str | None] = {}
    for op, examples in kernels().items():
        for kernel, spec, structs in examples.values():
            traced = jax.jit(functools.partial(kernel, spec, order=order)).trace(*structs)
            for where in platforms:
                try:
                    traced.lower(lowering_platforms=(where,))
                    found[op, kernel.name, where] = None
                except NotImplementedError as error:
                    found[op, kernel.name, where] = _reason(error)
    return found


def warm(
    features: Sequence[int],
    archs: Sequence[str],
    *,
    dtypes: Sequence[str] = ("bfloat16",),
    scales: Sequence[str] = ("float32",),
    outs: Sequence[str] | None = None,
    scale_offset: float = 0.0,
    activations: Sequence[str] | None = None,
    quantization: Quantization = None,
) -> int:
    """Compiles every kernel for these widths and types into the cache; returns how many.

    Afterwards no op of the library compiles one for such arrays, whatever the number of rows,
    except norms with parameters of each example, and RMSNorms with a bias or several
    heads. The ops' own files list the kernels and their operands.

    Args:
      features: lengths of the rows: of norms and hidden layers, and of logits.
      archs: as `NORMFUSE_CUDA_ARCH` names them.
      dtypes, scales, outs: dtypes of x, scale and y; with None for `outs`, x's.
      scale_offset: only zero or not zero matters.
      activations: of dense layers, by name; None for all.
      quantization: "fp8" for the kernels of quantized layers too.

    Raises:
      CompilerMissing: if NVRTC or CUDA's headers are not installed.
      Refused: if the cache folder cannot be used.
      ValueError: for an unknown architecture or activation.
    """
    import jax

    from .cross_entropy import softmax
    from .dense import epilogue
    from .norm import cuda
    from .norm import op as norms

    for name in activations or ():
        epilogue.resolve(name, "cache warm")
    for dtype in dtypes:
        check_quantization("cache warm", quantization, dtype)
    cache.check(cache.directory())
    before = compiler.compilations()
    for arch, n, x, scale in itertools.product(archs, features, dtypes, scales):
        target = named_target(arch, "archs")
        for out in outs or (x,):
            examples: list[Example] = []  # every kernel in each of its layouts
            with jax.enable_x64("float64" in (x, scale, out)):
                counts = cuda.row_counts(n, target, x, scale, out)
                for rows, centred in itertools.product(counts, (False, True)):
                    options = {"scale_offset": scale_offset, "centred": centred}
                    examples += norms.examples(n, x, scale, out, rows=rows, **options)
                for rows in epilogue.ROW_COUNTS:
                    examples += epilogue.examples(n, x, rows=rows, activations=activations)
                if quantization is not None:
                    examples += _quantized(n, x, scale, scale_offset, activations)
                examples += softmax.examples(n, x, rows=8)
                for kernel, spec, structs in examples:
                    jax.eval_shape(functools.partial(kernel.bodies["cuda"], target, spec), *structs)
    return compiler.compilations() - before


def _quantized(
    n: int, dtype: str, scale: str, scale_offset: float, activations: Sequence[str] | None
) -> Iterator[Example]:
    """Yields the kernels of layers in FP8, of norms, activations and kernels with rows of `n`."""
    import jax

    from .cross_entropy import softmax
    from .dense.epilogue import SCALARS, scalar_of
    from .dense.fp8_mlp import has_slope
    from .quantization import gated, norm, quantize

    for rows in quantize.row_counts(n):
        if norm.serves(*(jax.ShapeDtypeStruct((), of) for of in (dtype, scale))):
            yield from norm.examples(n, dtype, scale, rows=rows, scale_offset=scale_offset)
        yield from softmax.code_examples(n, dtype, rows=rows)
        for of in dict.fromkeys((dtype, "float32")):  # activations, and stored kernels
            yield from quantize.examples(n, of, rows=rows)
        for function in set(map(scalar_of, activations or SCALARS)):
            if function and has_slope(function):
                yield from gated.examples(n, dtype, rows=rows, function=function)


def _platforms_here() -> Sequence[str]:
    """Returns the platforms of this machine's devices, and the CPU, which every machine has."""
    import jax

    device = jax.local_devices()[0]
    gpu = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return list(dict.fromkeys(["cpu", gpu if device.platform == "gpu" else device.platform]))


def _support_table(platforms: Sequence[str]) -> list[str]:
    """A line for each platform and op, and one for each reason why something does not serve."""
    found = {name: support(platforms, name=name) for name in ("native", "pallas")}
    lines: list[str] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for where, (op, examples) in itertools.product(platforms, kernels().items()):
        serves = []
        for name, why in found.items():
            missing: dict[str, list[str]] = {}
            for kernel in examples:
                if reason := why[op, kernel, where]:
                    missing.setdefault(reason, []).append(kernel.removeprefix(f"{op}_"))
            for reason, those in missing.items():
                what = op if len(those) in (1, len(examples)) else ", ".join(those)
                reasons.setdefault((name, reason), []).append(f"{where} {what}")
            serves += [name] * (not missing)
        lines.append(f"  {where:5} {op:10} {', '.join(_in_order(serves, where, op))}")
    return lines + [f"  not {name}: {'; '.join(at)} ({why})" for (name, why), at in reasons.items()]


def _fp8_products() -> list[str]:
    """The products of FP8 codes, their implementations, and why other products are not."""
    import jax

    from .dense.fp8 import CAPABILITY
    from .quantization.quantize import MULTIPLE

    has = lambda found: "has them" if found >= CAPABILITY else "has none: they are of widened codes"
    here = sorted(filter(None, {*map(compute_capability, jax.local_devices())}))
    those = "".join(f"; this GPU, of {found / 10}, {has(found)}" for found in here)
    return [
        f"  cuda  cuBLASLt's FP8 products, from compute capability {CAPABILITY / 10} on{those}",
        "  else  XLA's, of codes that it widens: the same values at the speed of those",
        f"  in the compute dtype: kernels with a dimension that is not a multiple of {MULTIPLE}",
        "  (those of a program are logged when it is lowered, and in normfuse.fallbacks())",
    ]


def _attention() -> list[str]:
    """The implementation of attention here, for each option that may change it."""
    import jax

    from .attention import cudnn
    from .attention.spec import Spec, numbers

    capabilities = filter(None, map(compute_capability, jax.local_devices()))
    capability = next(capabilities, None)
    if capability is None:
        return ["  blocks of queries and keys by XLA: cuDNN needs an NVIDIA GPU, and none is here"]
    lines, length, d = [], 2048, numbers(5)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    pairs, ids = of("bool", length, length), of("int32", length)
    notes = {"mask": ", by its causal kernel if the mask turns out causal when the program runs"}
    if capability >= 90:
        notes["segments"] = ", packed if equal ids turn out to be contiguous"
    cases: dict[str, tuple[str, int, dict[str, Any], list[Any]]] = {
        "causal": ("bfloat16", 128, {"causal": True}, []),
        "mask": ("bfloat16", 128, {"mask": (d.length, d.keys)}, [pairs]),
        "segments": ("bfloat16", 128, {"segments": ((d.length,), (d.keys,))}, [ids, ids]),
        "heads of 256": ("bfloat16", 256, {"causal": True}, []),
        "softcap": ("bfloat16", 128, {"softcap": 50.0}, []),
        "float32": ("float32", 128, {"causal": True}, []),
    }
    for name, (dtype, width, options, extras) in cases.items():
        q, k = of(dtype, 1, length, 8, 1, width), of(dtype, 1, length, 8, width)
        why = cudnn.refusal(capability, Spec(scale=1.0, **options), q, k, *extras)
        served = f"blocks by XLA ({why})" if why else f"cuDNN{notes.get(name, '')}"
        lines.append(f"  {name:12}  {served}")
    return lines


def _in_order(serves: list[str], where: str, op: str) -> list[str]:
    """First what serves unasked: a product is XLA's, and Pallas's kernels are for TPUs."""
    unasked = [name for name in serves if op != "dense" and (name == "native" or where == "tpu")]
    asked = [name for name in serves if name not in unasked]
    return [*unasked, "xla", *[f"{a} (interpreted)" if where == "cpu" else a for a in asked]]


def show() -> str:
    """Returns the cache folder, its size, and every kernel in it."""
    from .fuse.report import aligned

    table = []
    for entry in cache.entries():
        features = entry.macros.get("FEATURES", "-")
        types = [entry.macros[k] for k in ("X_TYPE", "SCALE_TYPE", "Y_TYPE") if k in entry.macros]
        kernel = entry.macros.get("KERNEL", entry.source.removesuffix(".cu"))
        # NVRTC's version is only a number; the system's compiler gives its name.
        by = f"NVRTC {entry.compiler}" if entry.compiler[0].isdigit() else entry.compiler
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        size = f"{entry.bytes / 1024:6.1f} KiB"
        row = f"  {kernel}", f"n={features}", "/".join(types), entry.arch, size, by, f"used {used}"
        table.append(row)
    return "\n".join([*_cache(), *aligned(table)])


def _environment() -> list[str]:
    import jax

    compiled, installed = registry.compiled_version(), registry.installed_version()
    lines = [
        f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {_version('jaxlib')}",
        f"XLA FFI: compiled for {_dotted(compiled)}, jaxlib has {_dotted(installed)}",
    ]
    capabilities = [(one, compute_capability(one)) for one in jax.local_devices()]
    kinds = collections.Counter(
        one.device_kind + (f" (compute capability {capability / 10})" if capability else "")
        for one, capability in capabilities
    )
    return [*lines, "devices: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())]


def _cuda() -> list[str]:
    def found(find: Callable[[], str], otherwise: str = "missing") -> str:
        try:
            return find()
        except (compiler.CompilerMissing, Unsupported, ValueError) as error:
            return f"{otherwise}: {error}"

    headers = lambda: f"{_dotted(compiler.version())}, headers in {compiler.include_directory()}"
    host = found(lambda: f"{host_compiler.find()[1]}, for {host_compiler.host()}")
    return [
        f"CUDA kernels are compiled for: {found(attached_arch, 'none')}",
        f"NVRTC: {found(headers)}",
        f"C++ compiler, for element-wise ops on the CPU: {host}",
    ]


def attached_arch() -> str:
    """Returns the architecture of the GPU here, of `NORMFUSE_CUDA_ARCH`, or PTX for any."""
    import jax

    for one in jax.local_devices():
        capability = compute_capability(one)
        if capability is not None:
            return attached_target(one, capability).arch
    return named_target(os.environ.get("NORMFUSE_CUDA_ARCH") or PORTABLE).arch


def _cache() -> list[str]:
    folder, entries = cache.directory(), cache.entries()
    size = sum(entry.bytes for entry in entries) / 2**20
    lines = [f"kernel cache: {folder}, {len(entries)} kernels, {size:.1f} MiB"]
    if folder.exists():
        try:
            cache.check(folder)
        except cache.Refused as error:
            lines.append(f"  not used: {error}")
    return lines


def _reason(error: NotImplementedError) -> str:
    """The cause within a strict refusal's message."""
    text = str(error).split("cannot serve here: ", 1)[-1].split(". Use implementation", 1)[0]
    return text.split(", ", 1)[-1] if text.startswith("on ") else text


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
