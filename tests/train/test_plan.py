"""`normfuse plan`; tests/compiled/test_train_step_gpu.py has one that compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from normfuse.train.cli import main, parse
from normfuse.train.config import preset_config
from normfuse.train.topology import needs


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
        (["--batch-size", "0"], ["--batch-size 0", "at least 1"]),
        (["--seq-len", "9000"], ["--seq-len 9000", "8192"]),
        (["--model.num-heads", "7"], ["--model.num-heads=7", "multiple"]),
        (["--model.num-layers", "2147483647"], ["--model.num-layers 2147483647", "at most 10000"]),
        (["--huggingface", ".", "--model.dim", "64"], ["--model.dim 64", "--huggingface"]),
        (["--huggingface", "/nowhere"], ["--huggingface /nowhere"]),
        (["--confgi", "x"], ["--confgi"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_name_the_flag_and_the_value(argv, parts, capsys):
    assert main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 or "helptext" in error
    assert all(part in error for part in parts), error


def test_a_malformed_hugging_face_folder_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["plan", "--huggingface", str(tmp_path)]) == 2
    assert "model_type=None" in capsys.readouterr().err


def test_collectives_of_loops_are_counted_at_each_turn(eight_devices):
    """They are read from the program."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    turn = lambda x, _: (jax.lax.psum(x, "x") / 8, None)

    def run(x):
        turned = jax.lax.scan(turn, x, length=5)[0]
        return jax.lax.all_gather(turned, "x")

    # With the check, JAX would ask for the type of an all-reduce's result in a loop.
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    found = needs(jax.jit(mapped).lower(jax.ShapeDtypeStruct((16, 3), jnp.float32)).compile())
    assert found.collectives == {
        "all-gather": (1, 16 * 3 * 4),
        "all-reduce": (5, 5 * 2 * 3 * 4),
    }
    assert found.bytes >= 2 * 3 * 4
