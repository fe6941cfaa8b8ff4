"""Runs dense layers in a process of its own, with a persistent cache; prints one JSON line.

python mlp_worker.py [VERSION]
"""

import json
import sys

import jax
import mlp_case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.layers.core import sharding

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def compiled_on(kind):
    """The gradients' program on a mesh of eight devices, and its operands."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)
    # On Explicit axes the last product's sum over devices must be asked for.
    given = {"out_sharding": P("data", None, None)} if kind == "explicit" else {}
    with jax.set_mesh(mesh):
        places = [NamedSharding(mesh, spec) for spec in mlp_case.SPECS]
        args = [jax.device_put(*pair) for pair in zip(mlp_case.draw(), places, strict=True)]
        run = jax.jit(lambda *args: mlp_case.gradients(*args, **given))
        return run.lower(*args).compile(), args


def cached():
    """Compiles with a persistent cache; counts its hits and misses."""
    events, found = [], {}
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    for kind in ("one device", "auto", "explicit"):
        if kind == "one device":
            args = [jax.numpy.asarray(a) for a in mlp_case.draw()]
            events.clear()
            program = jax.jit(mlp_case.gradients).lower(*args).compile()
        else:
            events.clear()
            program, args = compiled_on(kind)
        count = lambda what: events.count(f"/jax/compilation_cache/cache_{what}")
        found[kind] = {"hits": count("hits"), "misses": count("misses")}
        mlp_case.check(program(*args))
    return found


if __name__ == "__main__":
    if version := " ".join(sys.argv[1:]):
        sharding.fingerprint = lambda: version
    print(json.dumps(cached()))
