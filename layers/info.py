"""The commands `normfuse info` and `normfuse cache`; nothing here needs a GPU."""

import collections
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Callable, Sequence

from ..native import cache, compiler, host_compiler, implementation, registry
from ..native.implementation import Unsupported
from ..native.kernel import Kernel
from ..native.launch import PORTABLE, attached_target, compute_capability, named_target


def info() -> str:
    """Returns versions, devices, the CUDA compiler, the kernel cache and the implementations."""
    lines = ["normfuse " + _version("normfuse"), *_environment(), "", *_cuda(), "", *cached()]
    lines += ["", "implementations per op, default first:", *_implementations(_platforms_here())]
    if seen := implementation.fallbacks():
        lines += ["", "served by plain HLO in this process:"]
    return "\n".join(lines + [f"  {op}: {reason}" for op, reason in seen])


def kernels() -> dict[str, list[Kernel]]:
    """Returns the kernels of each operation."""
    from .cross_entropy import softmax
    from .dense import epilogue
    from .norm import kernels as norms
    from .quantization import gated, norm, quantize

    return {
        "norms": [norms.forward_kernel, norms.backward_kernel],
        "activation": [epilogue.forward_kernel, epilogue.backward_kernel],
        "loss": [softmax.statistics, softmax.gradient, softmax.both, softmax.codes],
        "quantize": [
            *(quantize.amax_kernel, quantize.cast_kernel, quantize.quantize_kernel),
            *(gated.amax_kernel, gated.forward_kernel, gated.gradient_kernel, norm.codes_kernel),
        ],
    }


def _implementations(platforms: Sequence[str]) -> list[str]:
    """Returns a line for each platform and op: what serves unasked, XLA, what serves on request."""
    lines = []
    for where, (op, those) in itertools.product(platforms, kernels().items()):
        have = set.intersection(*[{*kernel.bodies} for kernel in those])
        serves = ["native"] * (where in have)
        if "pallas" in have and where in ("cpu", "tpu"):
            pallas = "pallas (interpreted)" if where == "cpu" else "pallas"
            serves = [pallas, "xla"] if where == "tpu" else [*serves, "xla", pallas]
        else:
            serves.append("xla")
        lines.append(f"  {where:5} {op:10} {', '.join(serves)}")
    by_cudnn = lambda where: "cudnn, " if where == "cuda" else ""
    lines += [f"  {where:5} attention  {by_cudnn(where)}xla (blocks)" for where in platforms]
    return lines


def _platforms_here() -> Sequence[str]:
    """Returns the platforms of this machine's devices, and the CPU, which every machine has."""
    import jax

    device = jax.local_devices()[0]
    gpu = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return list(dict.fromkeys(["cpu", gpu if device.platform == "gpu" else device.platform]))


def cached() -> list[str]:
    """Returns the cache folder, its kernels and their size, or why it is not used."""
    folder, sizes = cache.directory(), cache.sizes()
    total = sum(sizes) / 2**20
    lines = [f"kernel cache: {folder}, {len(sizes)} kernels, {total:.1f} MiB"]
    if folder.exists():
        try:
            cache.check(folder)
        except cache.Refused as error:
            lines.append(f"  not used: {error}")
    return lines


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
    import jax

    def arch() -> str:
        """Returns the architecture of the GPU here, of `NORMFUSE_CUDA_ARCH`, or PTX for any."""
        for one in jax.local_devices():
            if (capability := compute_capability(one)) is not None:
                return attached_target(one, capability).arch
        return named_target(os.environ.get("NORMFUSE_CUDA_ARCH") or PORTABLE).arch

    def found(find: Callable[[], str], otherwise: str = "missing") -> str:
        try:
            return find()
        except (compiler.CompilerMissing, Unsupported, ValueError) as error:
            return f"{otherwise}: {error}"

    headers = lambda: f"{_dotted(compiler.version())}, headers in {compiler.include_directory()}"
    host = found(lambda: f"{host_compiler.find()[1]}, for {host_compiler.host()}")
    return [
        f"CUDA kernels are compiled for: {found(arch, 'none')}",
        f"NVRTC: {found(headers)}",
        f"C++ compiler, for element-wise ops on the CPU: {host}",
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
