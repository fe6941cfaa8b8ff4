"""Runs dense layers in a process of its own, for the tests of several; prints one JSON line.

python mlp_worker.py distributed ADDRESS PROCESS_ID
python mlp_worker.py cached [VERSION]
"""

import json
import sys

import hlo
import jax
import mlp_case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.layers.core import sharding


def mesh_of(kind):
    axis = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis, axis))


def place(mesh, array, spec):
    """A global array of which every process makes its own part."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def operands(mesh, layout):
    x, scale, up, down = mlp_case.SPECS[layout]
    specs = x, scale, up, up, down
    return [place(mesh, a, s) for a, s in zip(mlp_case.draw(), specs)]


def options(kind, layout):
    """On Explicit axes the last product's sum over devices must be asked for."""
    needed = kind == "explicit" and layout == "tensor"
    return {"out_sharding": P("data", None, None)} if needed else {}


def compiled_on(kind, layout):
    """The gradients' program on a mesh of eight devices, and its operands."""
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        args, given = operands(mesh, layout), options(kind, layout)
        run = jax.jit(lambda *args: mlp_case.gradients(*args, **given))
        return run.lower(*args).compile(), args


def distributed(address, process):
    """Gradients on a mesh of two processes; each checks the shards that it holds."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    mlp_case.expected.cache_clear()
    found = {}
    for kind in ("auto", "explicit"):
        for layout in mlp_case.SPECS:
            program, args = compiled_on(kind, layout)
            mlp_case.check(program(*args))
            kinds = sorted({c.kind for c in hlo.collectives(program)})
            found[f"{kind} {layout}"] = {"calls": hlo.calls(program), "collectives": kinds}
    return found


def cached(version=None):
    """Compiles with a persistent cache; counts its hits and misses."""
    if version is not None:
        sharding.fingerprint = lambda: version
    events, found = [], {}
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    for kind in ("one device", "auto", "explicit"):
        if kind == "one device":
            args = [jax.numpy.asarray(a) for a in mlp_case.draw()]
            events.clear()
            program = jax.jit(mlp_case.gradients).lower(*args).compile()
        else:
            events.clear()
            program, args = compiled_on(kind, "tensor")
        count = lambda what: events.count(f"/jax/compilation_cache/cache_{what}")
        found[kind] = {"hits": count("hits"), "misses": count("misses")}
        mlp_case.check(program(*args))
    return found


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    print(json.dumps({"distributed": distributed, "cached": cached}[command](*arguments)))
