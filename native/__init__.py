"""Kernels of one device, in C++ and CUDA, behind JAX primitives."""

import functools


@functools.cache
def fingerprint() -> str:
    """A digest of the kernels' and ops' sources: no other version's programs may be reused."""
    import hashlib
    import pathlib

    package = pathlib.Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob("native/kernels/*"), *package.glob("[nl]a*/**/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
