"""Runs RMSNorm in a process of its own, for the tests of several processes; prints one JSON line.

python rms_norm_worker.py distributed ADDRESS PROCESS_ID
python rms_norm_worker.py cached [VERSION]
"""

import json
import sys

import hlo
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rms_norm_cases import SPECS, Case

from normfuse.layers.core import op


def mesh_of(kind):
    axis = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis, axis))


def place(mesh, array, spec):
    """A global array of which every process makes its own part."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def operands(case, mesh, spec):
    whole = [P(None)] * (case.scale is not None)
    specs = [*[spec] * (1 + case.has_residual), *whole, *[spec] * len(case.cts)]
    return [place(mesh, a, s) for a, s in zip((*case.args, *case.cts), specs)]


def local(expected, shard):
    """The part of an expectation that a shard holds."""
    return expected.map(lambda a: a[shard.index])


def distributed(address, process):
    """Gradients on a mesh of two processes; each checks the shards that it holds."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    found, case = {}, Case("residual_rms_norm")
    for kind in ("auto", "explicit"):
        mesh = mesh_of(kind)
        for layout in ("rows", "features"):
            with jax.set_mesh(mesh):
                args = operands(case, mesh, SPECS[layout])
                compiled = jax.jit(case.grad).lower(*args).compile()
                grads = compiled(*args)
            for grad, expected in zip(grads, case.gradients()):
                for shard in grad.addressable_shards:
                    case.check([np.asarray(shard.data)], [local(expected, shard)])
            kinds = [c.kind for c in hlo.collectives(compiled)]
            found[f"{kind} {layout}"] = {"calls": hlo.calls(compiled), "collectives": kinds}
    return found


def cached(version=None):
    """Compiles with a persistent cache; counts its hits and misses."""
    if version is not None:
        op.fingerprint = lambda: version
    events, found, case = [], {}, Case("rms_norm")
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

    def run(name, args):
        events.clear()
        case.check(jax.jit(case.grad)(*args), case.gradients())
        count = lambda what: events.count(f"/jax/compilation_cache/cache_{what}")
        found[name] = {"hits": count("hits"), "misses": count("misses")}

    run("one device", [jax.numpy.asarray(a) for a in (*case.args, *case.cts)])
    for kind in ("auto", "explicit"):
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            run(kind, operands(case, mesh, SPECS["rows"]))
    return found


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    print(json.dumps({"distributed": distributed, "cached": cached}[command](*arguments)))
