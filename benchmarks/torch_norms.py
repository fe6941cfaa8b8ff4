"""Device times of torch's norms and Liger's, as JSON, for benchmarks.rms_norm.

    python -m benchmarks.torch_norms NORM       # rms_norm or layer_norm

A LayerNorm's weight is its bias too. Reads [[rows, features, dtype, mode], ...] and prints [[the
same, {library: microseconds}], ...].
"""

import itertools
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

EPS = 1e-6


def libraries(norm: str):
    """Functions of x and a weight; a LayerNorm's bias is the weight too."""
    if norm == "layer_norm":
        return _layer_norms()
    found = {"torch": lambda x, w: F.rms_norm(x, (x.shape[-1],), w.to(x.dtype), EPS)}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return found
    found["Liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    return found


def _layer_norms():
    found = {"torch": lambda x, w: F.layer_norm(x, (x.shape[-1],), w, w, EPS)}
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    except ImportError:
        return found
    found["Liger"] = lambda x, w: LigerLayerNormFunction.apply(x, w, w, EPS)
    return found


def microseconds(run, sets, runs=11) -> float:
    """Median over calls of the sum of a call's kernels."""
    for arrays in sets:
        run(*arrays)
    torch.cuda.synchronize()
    times = []
    for arrays in itertools.islice(itertools.cycle(sets), runs):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run(*arrays)
            torch.cuda.synchronize()
        events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        times.append(sum(e.device_time for e in events))
    return statistics.median(times)


def measure(which, rows, n, dtype, mode):
    dtype = getattr(torch, dtype)
    times = {}
    for name, norm in libraries(which).items():
        sets = []
        for _ in range(2):
            x = torch.randn(rows, n, device="cuda", dtype=dtype, requires_grad=True)
            w = torch.ones(n, device="cuda", dtype=dtype, requires_grad=True)
            sets.append((x, w, torch.randn_like(x)))
        try:
            if mode == "forward":
                with torch.no_grad():
                    times[name] = microseconds(lambda x, w, dy, norm=norm: norm(x, w), sets)
            else:
                graphs = [(norm(x, w), x, w, dy) for x, w, dy in sets]

                def run(y, x, w, dy):
                    torch.autograd.grad(y, (x, w), dy, retain_graph=True)

                times[name] = microseconds(run, graphs)
        except Exception as error:
            print(f"{name}: {str(error)[:100]}", file=sys.stderr)
        del sets
    torch.cuda.empty_cache()
    return times


if __name__ == "__main__":
    which = sys.argv[1] if len(sys.argv) > 1 else "rms_norm"
    print(json.dumps([[work, measure(which, *work)] for work in json.load(sys.stdin)]))
