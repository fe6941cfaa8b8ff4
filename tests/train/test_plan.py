"""`normfuse plan`; tests/compiled/test_train_step_gpu.py has one that compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from normfuse.train.cli import main, parse
from normfuse.train.config import preset_config
from normfuse.train.plan import collectives


def test_it_takes_the_flags_of_a_run():
    command = parse("plan --gpu H100 --preset 8b --mesh.fsdp 8 --optim.mu-dtype bfloat16".split())
    assert (command.gpu, command.gpus, command.mesh.fsdp) == ("H100", 8, 8)
    assert command.model == preset_config("8b").model and command.optim.mu_dtype == "bfloat16"
    assert parse(["plan"]).preset == "1b"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--gpu", "A100"], ["--gpu 'A100'", "H200, H100"]),
        (["--gpus", "0"], ["--gpus 0", "1 to 1024"]),
        (["--gpus", "1025"], ["--gpus 1025", "1 to 1024"]),
        (["--gpus", "12"], ["--gpus 12", "8 or 16"]),
        (["--batch-size", "0"], ["--batch-size 0", "from 1 to"]),
        (["--model.num-heads", "7"], ["--model.num-heads=7", "multiple"]),
        (["--confgi", "x"], ["--confgi"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_name_the_flag_and_the_value(argv, parts, capsys):
    assert main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 or "helptext" in error
    assert all(part in error for part in parts), error


def test_collectives_are_read_from_the_program(eight_devices):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def run(x):
        return jax.lax.all_gather(jax.lax.psum(x, "x"), "x")

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    program = jax.jit(mapped).lower(jax.ShapeDtypeStruct((16, 3), jnp.float32)).compile()
    sizes = {"all-gather": [16 * 3 * 4], "all-reduce": [2 * 3 * 4]}
    assert collectives(program.as_text()) == sizes
