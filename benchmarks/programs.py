"""Reads what a compiled program calls: our kernels, and products of FP8 codes."""

import collections
import re

import jax


def our_kernels(text: str) -> dict[str, int]:
    """Native kernels in a program's text; all CUDA kernels have one target."""
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        if target := re.search(r'custom_call_target="normfuse_(\w+)', line):
            kernel = re.search(r'\bkernel = "(\w+)"', line)
            found[kernel[1] if kernel else target[1]] += 1
    return dict(sorted(found.items()))


def fp8_products(text: str) -> int:
    """cuBLAS's products of FP8 codes; on CPUs, whose products have none, the arrays of codes."""
    if "__cublas" in text or jax.default_backend() == "gpu":
        return text.count('"__cublas$lt$matmul$f8"')
    return len(re.findall(r"= f8e4m3fn\[\S+ ", text))


def other_products(text: str) -> int:
    """cuBLAS's and XLA's own products of other numbers; on CPUs none is counted."""
    if "__cublas" in text or jax.default_backend() == "gpu":
        calls = re.findall(r'custom_call_target="(__cublas[^"]*)"', text)
        own = len(re.findall(r" dot\(|__triton_(?:nested_)?gemm", text))
        return own + sum(call != "__cublas$lt$matmul$f8" for call in calls)
    return 0
