"""Messages between eight H200s for one training gradient on every kind of mesh.

The numbers of a table in docs/guides/parallelism.md, read from programs compiled for described
GPUs.
"""

import dataclasses
import math
import re

import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.models import parameters
from normfuse.models.config import TransformerConfig
from normfuse.models.functional import build
from normfuse.models.sharding import BATCH, Sharding
from normfuse.train.mesh import AXES
from normfuse.train.step import loss_and_gradient

ROWS, SEQ, LAYERS, DIM = 16, 1024, 1, 2048
CONFIG = TransformerConfig(
    vocab_size=16384,
    dim=DIM,
    num_layers=LAYERS,
    num_heads=8,
    num_kv_heads=8,
    head_dim=256,
    mlp_dim=8192,
    max_seq_len=SEQ,
    tie_embeddings=True,
    dtype="bfloat16",
    attention="xla",
)
SHAPES = parameters.shapes(CONFIG)
TABLE = math.prod(SHAPES["embed.embedding"])
KERNELS = sum(math.prod(shape) for name, shape in SHAPES.items() if name.endswith("kernel"))
SCALES = sum(math.prod(shape) for name, shape in SHAPES.items() if name.endswith("scale"))


def gradient(framework, sizes, sharding, **changes):
    """The loss and its gradient, compiled for eight GPUs."""
    mesh = gpu_compiler.mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)
    model = build(framework, dataclasses.replace(CONFIG, **changes), sharding)
    places = model.shardings(model.abstract, mesh)
    on = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    rows = NamedSharding(mesh, P(BATCH, None))
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ + 1), jnp.int32, sharding=rows)
    step = jax.jit(
        lambda params, tokens: loss_and_gradient(model, params, tokens, microbatches=1, mesh=mesh),
        out_shardings=(NamedSharding(mesh, P()), places),
    )
    with jax.set_mesh(mesh):
        params = jax.tree.map(on, model.abstract, places)
        return hlo.text(gpu_compiler.compile(step, params, tokens))


def losses(rows):
    """The loss on a split vocabulary: of every token its maximum, sum and target's logit."""
    return 3 * rows * SEQ


def transposed(program):
    """Shapes that kernels only transpose, without attention's `(batch, seq, heads, width)`."""
    found = re.findall(r"transpose(?:_fusion)?[.\d]* = \w+\[([\d,]+)\]\S* fusion\(", program)
    return [shape for shape in found if shape.count(",") < 3]


def test_replicas_sum_every_gradient_once():
    program = gradient("nnx", (8, 1, 1), Sharding())
    summed = TABLE + KERNELS + SCALES
    assert hlo.communicated(program) == {("all-reduce", "f32"): summed + 1}  # and the loss


def test_fsdp_gathers_bfloat16_and_scatters_gradients():
    program = gradient("nnx", (1, 8, 1), Sharding(), num_layers=2)
    assert hlo.communicated(program) == {
        # Every kernel once for both ways; the table for the look-up and for the logits.
        ("all-gather", "bf16"): 2 * KERNELS + 2 * TABLE,
        ("reduce-scatter", "f32"): (2 * KERNELS + TABLE) // 8,
        ("all-reduce", "f32"): 2 * (SCALES - DIM) + DIM + 1,  # and the last norm's
    }
    gathers = [gemms for kind, gemms in hlo.overlapped(program) if kind == "all-gather"]
    assert min(gathers[3:]) > 0  # but the first ones, each arrives while GEMMs run
    assert not transposed(program)  # kernels and their gradients are cut where they are contiguous


@pytest.mark.parametrize(("framework", "param_dtype"), [("nnx", "float32"), ("eqx", "bfloat16")])
def test_recomputed_blocks_gather_again_over_fsdp(framework, param_dtype):
    options = {"remat": "block", "param_dtype": param_dtype}
    program = gradient(framework, (1, 8, 1), Sharding(), **options)
    expected = {
        ("all-gather", "bf16"): 2 * KERNELS + 2 * TABLE,
        ("reduce-scatter", "f32"): (KERNELS + TABLE) // 8,  # gradients are not rounded
        ("all-reduce", "f32"): SCALES + 1,
    }
    if param_dtype == "bfloat16":  # one table serves both, and has a gradient from each
        expected["all-gather", "bf16"] -= TABLE
        expected["reduce-scatter", "bf16"] = KERNELS // 8
        expected["reduce-scatter", "f32"] = 2 * TABLE // 8  # summed before they are rounded
    assert hlo.communicated(program) == expected
    whole = {shape for name, shape in SHAPES.items() if name.endswith("kernel")}
    whole |= {shape[::-1] for shape in whole}
    widened = re.findall(r"= f32\[(\d+),(\d+)\]\S* (?:convert|fusion)\(%?all-gather", program)
    assert not {tuple(map(int, shape)) for shape in widened} & whole


def test_tensor_parallelism_sums_four_activations_a_layer():
    program = gradient("nnx", (1, 1, 8), Sharding())
    activation = ROWS * SEQ * DIM
    assert hlo.communicated(program) == {
        # A layer: the outputs of attention and MLP, the gradients of their inputs. Beside them the
        # embedding and the gradient of the last norm's output: no logits, no table.
        ("all-reduce", "bf16"): (4 * LAYERS + 2) * activation,
        ("all-reduce", "f32"): losses(ROWS),
    }


def test_sequence_parallelism_gathers_and_scatters_instead():
    program = gradient("eqx", (1, 1, 8), Sharding.sequence_parallel())
    activation, times = ROWS * SEQ * DIM, 4 * LAYERS + 2
    assert hlo.communicated(program) == {
        ("all-gather", "bf16"): times * activation,
        ("reduce-scatter", "bf16"): times * activation // 8,
        ("all-reduce", "f32"): losses(ROWS) + SCALES,
    }
    count = lambda kind: sum(c.kind == kind for c in hlo.collectives(program))
    assert count("all-gather") == count("reduce-scatter") == times  # each waits for the one before


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_fp8_products_are_summed_in_bfloat16_and_as_often_as_others(sequence):
    """Parts are scaled before they are summed, so that XLA sums those of one input at once."""
    sharding = Sharding.sequence_parallel() if sequence else Sharding()
    program = gradient("nnx", (1, 1, 8), sharding, quantization="fp8")
    activation, found = ROWS * SEQ * DIM, hlo.communicated(program)
    assert found.pop(("all-reduce", "f32")) < losses(ROWS) + SCALES + 100  # and maxima
    assert found.pop(("all-reduce", "s32")) == 7  # those of kernels
    if not sequence:
        assert found == {("all-reduce", "bf16"): 6 * activation}
        return
    codes = sum(found.pop(("all-gather", dtype), 0) for dtype in ("u8", "s8", "f8e4m3fn"))
    # The inputs of attention and of the MLP, each for both ways; output gradients.
    assert codes == 4 * activation
    assert found == {
        ("all-gather", "bf16"): 2 * activation,  # outside the layer
        ("reduce-scatter", "bf16"): 6 * activation // 8,
    }
    # Gathered arrays are transposed on arrival, once for all products that read them so: inputs and
    # output gradients for products with kernels, inputs for gradients of kernels.
    arrived = re.findall(r"= f8e4m3fn\[([\d,]+)\]\S* fusion\(", program)
    assert arrived.count(f"{ROWS},{SEQ},{DIM}") == 4
    assert arrived.count(f"{DIM},{ROWS},{SEQ}") == 2


def test_fsdp_gathers_one_byte_an_element_of_kernels_in_fp8():
    """Codes are transposed on arrival, not gathered in two orders: bfloat16 takes as many messages.

    Maxima of all kernels are reduced at once, so none waits for an activation.
    """
    options = {"quantization": "fp8", "remat": "block", "num_layers": 2}
    program = gradient("eqx", (1, 8, 1), Sharding(), **options)
    found = hlo.communicated(program)
    codes = sum(found.pop(("all-gather", dtype), 0) for dtype in ("u8", "s8", "f8e4m3fn"))
    assert codes == 2 * 2 * KERNELS
    assert found.pop(("all-reduce", "f32")) < 2 * SCALES + 100  # and maxima
    assert found.pop(("all-reduce", "s32")) == 2 * 7
    assert found == {
        ("all-gather", "bf16"): 2 * TABLE,
        ("reduce-scatter", "f32"): (2 * KERNELS + TABLE) // 8,
    }
    reductions = [c.bytes for c in hlo.collectives(program) if c.kind == "all-reduce"]
    assert reductions.count(2 * 7 * 4) == 1
    assert len(reductions) == 2 * 6 + 2  # of what o and down read, and of gradients; of scales


def test_fsdp_moves_rows_where_a_table_has_more():
    """Looked up in each device's part of the words; in the backward their gradients are gathered.

    The table is gathered for the logits alone, and only their part of its gradient is scattered.
    """
    program = gradient("nnx", (1, 8, 1), Sharding(), vocab_size=2 * ROWS * SEQ)
    assert hlo.communicated(program) == {
        ("all-gather", "s32"): ROWS * SEQ,
        ("reduce-scatter", "bf16"): ROWS * SEQ * DIM // 8,
        ("all-gather", "bf16"): KERNELS + 2 * TABLE + ROWS * SEQ * DIM,
        ("reduce-scatter", "f32"): (KERNELS + 2 * TABLE) // 8,
        ("all-reduce", "f32"): SCALES + 1,
    }


def test_all_three_axes_together():
    program = gradient("nnx", (2, 2, 2), Sharding.sequence_parallel())
    activation, times = ROWS // 4 * SEQ * DIM, 4 * LAYERS + 2
    kernels, table = KERNELS // 2, TABLE // 2  # a device's part over "tensor"
    # JAX 0.10's XLA adds the table's two gradients, sums that over "fsdp", and then takes a part.
    scattered, summed = (0, table // 2) if jax.__version_info__ < (0, 11) else (2, 0)
    found = hlo.communicated(program)
    gathered = found.pop(("all-gather", "bf16")) - times * activation - 3 * table
    assert kernels <= gathered <= 2 * kernels  # XLA gathers some again for the backward
    assert found == {
        ("reduce-scatter", "bf16"): times * activation // 2,
        ("reduce-scatter", "f32"): (kernels + scattered * table) // 2,  # over "fsdp"
        ("all-reduce", "f32"): (kernels + table) // 2 + summed + SCALES + losses(ROWS // 4) + 1,
    }
