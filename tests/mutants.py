"""Breaks the package in one place at a time, and sees that a test fails each time.

    python tests/mutants.py                         every mutant
    python tests/mutants.py 7 12-20                 these, by their numbers
    python tests/mutants.py layers/fuse native/cpu  those of these files and folders

Run it in a checkout that is installed editable. A mutant is one text of a file, replaced where it
stands and put back when its test has run; so it refuses files with changes that are not committed.
Killed at the wrong moment (kill -9), it leaves one that `git diff` shows and `git checkout` mends.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A slip, and the smallest test that finds it."""

    file: str
    old: str  # stands in the file exactly once
    new: str
    test: str  # a file or a test in it, as pytest names it


MUTANTS = [
    # ---------------------------------------------------------------- native: C++ on CPUs
    Mutant(  # eps outside the root
        "native/cpu/forward.h",
        "1 / std::sqrt(squared / shape.n + eps)",
        "1 / (std::sqrt(squared / shape.n) + eps)",
        "tests/layers/test_norm_values.py::test_values_and_gradients[eps]",
    ),
    Mutant(  # the variance is not that of the mean
        "native/cpu/forward.h",
        "squared = sums[1] - sums[0] * apart;",
        "squared = sums[1];",
        "tests/native/test_norm_kernels.py"
        "::test_host_matches_its_definition[37x24-bfloat16-float32-bfloat16@0.0-centred-bias]",
    ),
    Mutant(
        "native/cpu/quantize.cc",
        "(rebased + half + (rebased >> shift & 1)) >> shift",
        "(rebased + half + 1) >> shift",
        "tests/layers/test_quantization.py"
        "::test_every_number_is_rounded_as_in_the_reference[float32-float8_e4m3fn]",
    ),
    # ---------------------------------------------------------------- native: CUDA, emulated
    Mutant(
        "native/kernels/norm_forward.cu",
        "inverse_root(inverse.at[r] * (Compute(1) / FEATURES) + eps)",
        "inverse_root(inverse.at[r] * (Compute(1) / FEATURES)) + eps",
        "tests/native/test_norm_kernels.py"
        "::test_cuda_matches_its_definition[37x24-bfloat16-float32-bfloat16@0.0]",
    ),
    Mutant(
        "native/kernels/norm_forward.cu",
        "owner = group / groups;",
        "owner = group % groups;",
        "tests/native/test_norm_kernels.py::test_cuda_examples_match_their_definition",
    ),
    Mutant(  # a layout that was not measured
        "layers/norm/layouts.py",
        "Step(512, chunks=3, blocks=2, hold=True, stages=3),\n    Step(640, chunks=2, slices=2",
        "Step(512, chunks=3, blocks=3, hold=True, stages=3),\n    Step(640, chunks=2, slices=2",
        "tests/native/test_norm_kernels.py::test_measured_layouts_are_those_that_are_launched",
    ),
    Mutant(
        "native/kernels/norm_backward.cu",
        "IF(HAS_RESIDUAL, out.at[k] += wide_dh.at[k]);",
        "",
        "tests/native/test_norm_kernels.py"
        "::test_cuda_matches_its_definition[20x1000-bfloat16-float32-bfloat16+bfloat16@0.5-bias]",
    ),
    Mutant(
        "native/kernels/norm_backward.cu",
        "mean_row = next_mean; next_mean = later_mean",
        "mean_row = later_mean; next_mean = later_mean",
        "tests/native/test_norm_kernels.py"
        "::test_cuda_matches_its_definition[20x1000-bfloat16-float32-bfloat16+bfloat16@0.5-centred-bias]",
    ),
    Mutant(
        "native/kernels/softmax.cu",
        "else if (label < 0 || label >= FEATURES)",
        "else if (label < 0 || label > FEATURES)",
        "tests/native/test_cross_entropy_cuda.py::test_softmax_matches_float64",
    ),
    Mutant(
        "native/kernels/softmax.cuh",
        "out.at[k] -= k == at ? b : Compute(0);",
        "out.at[k] -= k == at ? a : Compute(0);",
        "tests/native/test_cross_entropy_cuda.py::test_codes_are_those_of_the_gradient",
    ),
    Mutant(
        "native/kernels/fp8.cuh",
        "bit_cast<float>((127 - shift) << 23)};",
        "bit_cast<float>((128 - shift) << 23)};",
        "tests/native/test_quantize_cuda.py"
        "::test_cuda_codes_are_those_of_the_reference[(128, 64)-bfloat16-float8_e4m3fn]",
    ),
    Mutant(
        "native/kernels/quantize_amax.cu",
        "const long long rest = head + size - tail;",
        "const long long rest = size - tail;",
        "tests/native/test_quantize_cuda.py::test_cuda_amax_is_found_at_any_place[1]",
    ),
    Mutant(
        "native/kernels/scalar.cuh",
        "fmaf(0.31f, fabsf(x), 1.0f)",
        "fmaf(0.3099f, fabsf(x), 1.0f)",
        "tests/native/test_cuda_epilogue.py::test_gelu_of_16_bits_has_more_digits_than_they_hold",
    ),
    # ---------------------------------------------------------------- native: the engine
    Mutant(
        "native/cache.py",
        "compiling = _in_progress.setdefault(key, threading.Lock())",
        "compiling = threading.Lock()",
        "tests/native/test_cache.py::test_cache_threads_compile_once",
    ),
    Mutant(
        "native/cache.py",
        "for _, size, path in sorted(kept):",
        "for _, size, path in sorted(kept, reverse=True):",
        "tests/native/test_cache.py::test_cache_evicts_what_was_used_longest_ago",
    ),
    Mutant(
        "native/cache.py",
        "{FORMAT} {path.stem} {image.digest}",
        "{FORMAT} {path.stem}",
        "tests/native/test_cache.py::test_cache_damaged_entry_is_compiled_again[cut]",
    ),
    Mutant(
        "native/cache.py",
        "(stat.S_IWGRP | stat.S_IWOTH)",
        "stat.S_IWOTH",
        "tests/native/test_cache.py::test_cache_refuses_folder_that_others_can_write_to[504]",
    ),
    Mutant(
        "native/registry.py",
        "if compiled[0] == installed[0] and compiled <= installed:",
        "if compiled <= installed:",
        "tests/native/test_cpu_registry.py::test_versions_that_load[compiled4-installed4-False]",
    ),
    Mutant(
        "layers/norm/layouts.py",
        "(target.shared_memory + RESERVED_BYTES) // self.min_blocks - RESERVED_BYTES",
        "(target.shared_memory + RESERVED_BYTES) // self.min_blocks",
        "tests/native/test_cuda_lowering.py"
        "::test_blocks_share_a_multiprocessors_memory[1-sm_80-164]",
    ),
    Mutant(
        "native/kernel.py",
        'platform == "cuda" and not order.names and _has_static_shapes(ctx)',
        'platform == "cuda" and _has_static_shapes(ctx)',
        "tests/native/test_cuda_lowering.py"
        "::test_cuda_small_arrays_are_plain_hlo_unless_native_is_asked_for",
    ),
    Mutant(
        "layers/core/arguments.py",
        "strict=plain == len(names)",
        "strict=True",
        "tests/layers/test_errors.py::test_plain_hlo_is_logged_once_and_listed",
    ),
    # ---------------------------------------------------------------- layers: core
    Mutant(
        "layers/core/op.py",
        " == 0 and not taken & set(names)",
        " >= 0 and not taken & set(names)",
        "tests/layers/test_meshes.py"
        "::test_dimension_that_the_mesh_does_not_divide_is_counted_once[(7, 2, 16)]",
    ),
    Mutant(
        "layers/core/op.py",
        "place = lambda dims: sum(d < at for d in dims or ())",
        "place = lambda dims: sum(d <= at for d in dims or ())",
        "tests/layers/test_contexts.py::test_vmap[rms_norm-(2, None)]",
    ),
    Mutant(
        "layers/core/sharding.py",
        'kind = "s" if isinstance(dims, Loose) else "d"',
        'kind = "d"',
        "tests/layers/test_meshes.py"
        "::test_split_features_with_a_replicated_scale_gather_only_its_gradient",
    ),
    Mutant(
        "layers/core/op.py",
        "operand = vary(operand, like.manual_axis_type.varying)",
        "",
        "tests/layers/test_shard_map.py::test_grad_of_full[check_vma]",
    ),
    Mutant(
        "layers/core/derivative.py",
        "summed = [f if f is None or h else jnp.sum(f, 0)",
        "summed = [f if f is None or h else f[0]",
        "tests/layers/test_dense_in_contexts.py::test_gradients_of_each_example[mlp, fp8]",
    ),
    Mutant(
        "layers/core/sharding.py",
        "return axes[::-1]",
        "return axes",
        "tests/layers/test_tiling.py::test_every_spec_on_every_mesh_is_recovered[in order-(2, 4)]",
    ),
    Mutant(
        "layers/core/arguments.py",
        "if number < least:",
        "if number <= least:",
        "tests/layers/test_norm_values.py::test_values_and_gradients[eps]",
    ),
    # ---------------------------------------------------------------- layers: norms
    Mutant(
        "layers/norm/op.py",
        "for t in (dx, dresidual) if moves(t)]",
        "for t in (dx,) if moves(t)]",
        "tests/layers/test_contexts.py::test_one_operand",
    ),
    Mutant(
        "layers/norm/op.py",
        "gradients[0] = along if gradients[0] is None else gradients[0] + along",
        "gradients[0] = along if gradients[0] is None else gradients[0]",
        "tests/layers/test_contexts.py::test_statistics",
    ),
    Mutant(
        "layers/norm/op.py",
        "return [dx, *[None if d is None else split.psum(d, rows) for d in more]]",
        "return [dx, *more]",
        "tests/layers/test_meshes.py::test_layouts[residual_rms_norm-None-auto-rows]",
    ),
    Mutant(
        "layers/norm/op.py",
        "rstd_of(norm, squares, split.count(norm.axes))",
        "rstd_of(norm, squares, h.shape[-1])",
        "tests/layers/test_meshes.py::test_layouts[residual_rms_norm-None-auto-features]",
    ),
    Mutant(
        "layers/dense/matmul.py",
        "cast = lambda x, dy: plain(x.astype(sums), dy.astype(sums))",
        "cast = lambda x, dy: plain(x, dy).astype(sums)",
        "tests/layers/test_dense.py"
        "::test_parameter_gradients_are_not_rounded_to_the_compute_dtype[float32-bfloat16]",
    ),
    Mutant(
        "layers/dense/matmul.py",
        "lambda before, part: part + before",
        "lambda before, part: before + part",
        "tests/layers/test_shared.py::test_sums_grow_on_the_right",
    ),
    Mutant(
        "layers/core/activations.py",
        "return sigmoid_of(u) + x * du * sigmoid_slope(u);",
        "return sigmoid_of(u) + du * sigmoid_slope(u);",
        "tests/native/test_cuda_epilogue.py"
        "::test_every_activation_is_its_jax_function_and_its_derivative",
    ),
    Mutant(
        "layers/dense/fp8.py",
        "return [(jax.lax.psum(y, over) if over else y).astype(spec.dtype)]",
        "return [y.astype(spec.dtype)]",
        "tests/layers/test_fp8_dense.py::test_a_mesh_gives_the_result_of_one_device",
    ),
    Mutant(
        "layers/dense/fp8.py",
        'sums = compute_dtype(spec.dtype) if spec.dtype == "float16" else jnp.dtype(spec.dtype)',
        "sums = jnp.dtype(spec.dtype)",
        "tests/layers/test_fp8_dense.py::test_values_and_gradients_are_those_of_the_recipe",
    ),
    # ---------------------------------------------------------------- layers: FP8 codes
    Mutant(
        "layers/quantization/quantize.py",
        "split.pmax(jax.lax.bitcast_convert_type(maximum, reduced), every)",
        "jax.lax.bitcast_convert_type(maximum, reduced)",
        "tests/layers/test_fp8_dense.py::test_a_mesh_gives_the_result_of_one_device",
    ),
    Mutant(
        "layers/quantization/quantize.py",
        "reduced = jnp.float32 if spec.rows else jnp.int32",
        "reduced = jnp.float32",
        "tests/layers/test_fp8_dense.py::test_a_maximum_is_one_number_to_reduce",
    ),
    Mutant(
        "layers/quantization/quantize.py",
        "largest + 127 - (bits >> 23)",
        "largest + 126 - (bits >> 23)",
        "tests/layers/test_quantization.py"
        "::test_codes_are_those_of_the_reference[float32-float8_e4m3fn]",
    ),
    Mutant(
        "layers/quantization/norm.py",
        "bound = bound + jnp.abs(bias.astype(jnp.float32))",
        "pass",
        "tests/fuse/test_codes.py::test_codes_are_those_of_the_norm_in_float32[layer_norm]",
    ),
    Mutant(
        "layers/quantization/gated.py",
        '"silu": 1.1,',
        '"silu": 1.0,',
        "tests/layers/test_quantization.py::test_no_slope_is_steeper[silu]",
    ),
    Mutant(
        "layers/quantization/gated.py",
        "jnp.clip(h, -largest, largest)",
        "h",
        "tests/layers/test_quantization.py"
        "::test_one_element_is_within_its_limits_whatever_its_code[silu-1]",
    ),
    # ---------------------------------------------------------------- layers: cross-entropy
    Mutant(
        "layers/cross_entropy/op.py",
        "x = jnp.where(softmax.unused(*factors)[..., None], 0, x)",
        "x = jnp.where(softmax.unused(*factors)[..., None] & ~jnp.isfinite(x), 0, x)",
        "tests/layers/test_fp8_cross_entropy.py"
        "::test_a_row_that_does_not_count_may_be_anything[weight-mean]",
    ),
    Mutant(  # a weight of 0 hides a NaN
        "layers/cross_entropy/softmax.py",
        "    return slope / jnp.where(bad, (labels <= IGNORED).astype(total.dtype), total)",
        "    return slope / jnp.where(bad, True, total)",
        "tests/fuse/test_spoiled_losses.py::test_labels_outside_and_weights[take p-weighted]",
    ),
    Mutant(
        "layers/cross_entropy/softmax.py",
        "(halves + random.astype(jnp.uint16) >> 8)",
        "(halves + jnp.uint16(128) >> 8)",
        "tests/layers/test_fp8_cross_entropy.py::test_the_mean_of_codes_is_the_number[0]",
    ),
    Mutant(
        "layers/cross_entropy/softmax.py",
        "(most - picked) + log,",
        "(most + picked) + log,",
        "tests/layers/test_cross_entropy.py::test_forward_mode_and_second_derivatives[none]",
    ),
    Mutant(
        "native/kernels/softmax.cuh",
        "out.at[k] -= b * share;",
        "out.at[k] -= share;",
        "tests/native/test_cross_entropy_cuda.py::test_softmax_matches_float64",
    ),
    Mutant(  # the bias' gradient of a batch of losses
        "layers/cross_entropy/op.py",
        "rows = tuple(range(spec.groups, g.ndim - 1))\n        found",
        "rows = tuple(range(g.ndim - 1))\n        found",
        "tests/layers/test_cross_entropy.py::test_vmap_scan_and_remat[none]",
    ),
    # ---------------------------------------------------------------- layers: attention
    Mutant(
        "layers/attention/blocks.py",
        "parts.append(behind < spec.window)",
        "parts.append(behind <= spec.window)",
        "tests/layers/test_attention_op.py::test_values_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "layers/attention/blocks.py",
        "real = jnp.expand_dims(keys < self.sizes[self.d.keys], range(ndim - 1))",
        "real = jnp.expand_dims(keys <= self.sizes[self.d.keys], range(ndim - 1))",
        "tests/layers/test_attention_op.py::test_lengths[1-50-names0]",
    ),
    Mutant(
        "layers/attention/blocks.py",
        "dp = tiles.kept(tiles.dot(dout, v, -1, -1), i, j) / keep",
        "dp = tiles.dot(dout, v, -1, -1) / keep",
        "tests/layers/test_attention_op.py::test_values_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "layers/attention/cudnn.py",
        "found = [jnp.where(flag, a, b) for a, b in zip(way(), found, strict=True)]",
        "found = [flag * a + ~flag * b for a, b in zip(way(), found, strict=True)]",
        "tests/layers/test_attention_op.py::test_what_kernels_do_not_write_is_not_read[padding]",
    ),
    Mutant(
        "layers/attention/cudnn.py",
        "whole, lse + math.log(keep), dout)",
        "whole, lse, dout)",
        "tests/layers/test_attention_op.py::test_what_kernels_do_not_write_is_not_read"
        "[causal, dropout of all]",
    ),
    Mutant(
        "layers/attention/cudnn.py",
        "operands[i] = jnp.minimum(operands[i], sizes[d.keys])",
        "pass",
        "tests/layers/test_attention_op.py::test_another_row_and_key_of_odd_lengths_change_nothing[lengths]",
    ),
    Mutant(
        "layers/attention/op.py",
        "*[split.psum(b, absent) for b in dbias]",
        "*dbias",
        "tests/layers/test_attention_op.py::test_the_gradient_of_a_bias_is_added_up",
    ),
    # ---------------------------------------------------------------- layers: element-wise
    Mutant(  # both branches
        "layers/elementwise/lexer.py",
        "conditions.append((is_met and not taken, taken))",
        "conditions.append((is_met, taken))",
        "tests/native/test_elementwise_signature.py"
        "::test_the_last_function_of_hostile_text[if 1 else]",
    ),
    Mutant(
        "layers/elementwise/lexer.py",
        "    if depth:\n        raise",
        "    if False:\n        raise",
        "tests/native/test_elementwise_signature.py"
        "::test_text_whose_last_function_nobody_can_tell[missing }]",
    ),
    Mutant(
        "layers/elementwise/lexer.py",
        "while code != before:",
        "while False:",
        "tests/native/test_elementwise_signature.py::test_derivatives_that_are_statements",
    ),
    Mutant(
        "layers/elementwise/op.py",
        "vector = math.gcd(vector, sizes[-1])",
        "pass",
        "tests/native/test_elementwise_cuda.py::test_emulated_mixed_dtypes_and_broadcast_rows",
    ),
    Mutant(
        "layers/elementwise/op.py",
        "        if loop.placed[k] == every\n        else compute",
        "        if True\n        else compute",
        "tests/layers/test_elementwise_derivative.py"
        "::test_a_gradient_that_is_a_sum_is_rounded_once",
    ),
    Mutant(
        "layers/elementwise/op.py",
        "flags = () if rewritten else",
        "flags = () if False else",
        "tests/layers/test_elementwise.py::test_compositions_keep_nan_infinities_and_signed_zeros",
    ),
    Mutant(
        "native/dtypes.py",
        "float(info.smallest_normal)",
        "info.smallest_normal",
        "tests/layers/test_strict.py::test_every_op_under_strict_settings[rms_norm before]",
    ),
    Mutant(  # the last chunk alone has fewer of symbolic rows
        "layers/cross_entropy/chunks.py",
        "lax.fori_loop(0, jnp.asarray(rows // size), following, carry)",
        "lax.fori_loop(0, 0 * jnp.asarray(rows // size), following, carry)",
        "tests/layers/test_symbolic.py::test_export_with_symbolic_dimensions[loss, in chunks]",
    ),
    # ---------------------------------------------------------------- layers: accumulation
    Mutant(
        "layers/dense/matmul.py",
        "return (None, dmain) if moves(dmain) else (dkernel, None)",
        "return (dkernel, dmain) if moves(dmain) else (dkernel, None)",
        "tests/layers/test_accumulate.py::test_sums_are_those_of_float32_gradients",
    ),
    Mutant(  # XLA's CPU has no such product in the layouts of ensembles
        "layers/dense/matmul.py",
        "platform_dependent(x, dy, cpu=cast, default=wide)",
        "platform_dependent(x, dy, default=wide)",
        "tests/layers/test_dense_in_contexts.py::test_gradients_of_nested_batches_in_bfloat16",
    ),
    Mutant(
        "layers/dense/matmul.py",
        "ad.primitive_transposes[kernel_p] = lambda cts, *_: list(cts)",
        "",
        "tests/layers/test_dense_in_contexts.py::test_a_derivative_rule_may_call_it_on_tangents",
    ),
    Mutant(
        "layers/accumulate.py",
        "jnp.issubdtype(a.dtype, jnp.inexact)",
        "jnp.issubdtype(a.dtype, jnp.floating)",
        "tests/layers/test_accumulate.py::test_complex_parameters",
    ),
    Mutant(
        "layers/accumulate.py",
        "if any(isinstance(x, Tracer) for x in held_by_rules(program).values()):",
        "if False:",
        "tests/layers/test_accumulate.py"
        "::test_own_derivatives_that_close_over_values_of_the_loss[jit-custom_vjp]",
    ),
    Mutant(
        "layers/accumulate.py",
        "return [*kernel]",
        "return [lax.stop_gradient(kernel.value), kernel.zeros]",
        "tests/layers/test_accumulate.py::test_losses_may_differentiate_their_layers[nnx-]",
    ),
    Mutant(
        "layers/accumulate.py",
        "g if m is None else g.astype(m.dtype) + m for g, m in zip(own, mains)",
        "g if m is None else m for g, m in zip(own, mains)",
        "tests/layers/test_accumulate.py::test_losses_may_differentiate_their_layers[dense-cond]",
    ),
    # ---------------------------------------------------------------- layers: fuse
    Mutant(
        "layers/fuse/products.py",
        "return _is_returned(g.outer, call.outs[g.results.index(v)])",
        "return False",
        "tests/fuse/test_rows_and_lines.py::test_heads_that_are_returned_from_within_stay[scan]",
    ),
    Mutant(
        "layers/fuse/products.py",
        'if t.kind == "lse"]',
        "]",
        "tests/fuse/test_rows_and_lines.py::test_a_maximum_is_no_softmax",
    ),
    Mutant(
        "layers/fuse/program.py",
        "= [jax.vmap] * len(avals[0].shape)",
        "= []",
        "tests/fuse/test_rows_and_lines.py::test_a_relu_that_is_vmapped_is_one",
    ),
    Mutant(  # a power's factor is taken for one of the sum
        "layers/fuse/algebra.py",
        "Polynomial.of({key: (c**q, ",
        "Polynomial.of({key: (c, ",
        "tests/fuse/test_rows_and_lines.py::test_norms_with_named_statistics_and_late_factors",
    ),
    Mutant(
        "layers/fuse/norms.py",
        '"name": lambda g, made, a: None if a is None or a.has("x") else a',
        '"name": lambda g, made, a: None',
        "tests/fuse/test_rows_and_lines.py::test_norms_with_named_statistics_and_late_factors",
    ),
    Mutant(  # the line of the first norm of this shape
        "layers/fuse/codes.py",
        "line_of(*made.calls, made.eqn)",
        "line_of(made.eqn, *made.calls)",
        "tests/fuse/test_rows_and_lines.py::test_codes_have_the_line_of_their_own_norm",
    ),
    Mutant(  # a comparison of what was rounded
        "layers/fuse/constants.py",
        "if name in _JUMPS and not exact or",
        "if",
        "tests/fuse/test_random_masks.py::test_constant[a comparison of what is near]",
    ),
    Mutant(  # devices that flush subnormal numbers divide by 0
        "layers/fuse/constants.py",
        "if name not in RULES or name not in _MOVES and not all(o.normal for o in operands):",
        "if name not in RULES:",
        "tests/fuse/test_random_masks.py::test_fault[divided by what is 0 on some devices]",
    ),
    Mutant(
        "layers/fuse/constants.py",
        "if along is None or (along.x.astype(np.float64) != np.arange(shape[dim])).any():",
        "if along is None:",
        "tests/fuse/test_random_masks.py::test_constant[iota that wraps]",
    ),
    Mutant(
        "layers/fuse/indices.py",
        "return found if limits.min <= low and high <= limits.max else None",
        "return found",
        "tests/fuse/test_random_masks.py::test_fault[integers that wrap]",
    ),
    Mutant(
        "layers/fuse/program.py",
        "            if effects or missing:",
        "            if missing:",
        "tests/fuse/test_everywhere.py::test_effects_and_their_order",
    ),
    Mutant(
        "layers/fuse/fuse.py",
        "s for s in sites if any(d in live for d in s.dead) and any(v in live for v in s.outs)",
        "s for s in sites if any(d in live for d in s.dead) and not any(v in live for v in s.outs)",
        "tests/fuse/test_lookalikes.py::test_lookalike[attention: something reads probabilities]",
    ),
    Mutant(
        "layers/fuse/norms.py",
        'if made.name in LAYOUT and norms.program.made(made.ins[0])[1] != "dot_general":',
        "if made.name in LAYOUT:",
        "tests/fuse/test_codes.py::test_a_scale_by_an_einsum_is_the_norms",
    ),
    Mutant(  # reads narrow values that are computed anyway
        "layers/fuse/norms.py",
        "if is_narrow and len(g.readers[v]) == 1 else v",
        "if is_narrow else v",
        "tests/fuse/test_rows_and_lines.py::test_a_norm_widens_what_it_adds[read twice]",
    ),
    Mutant(  # a norm whose result another adds is computed twice
        "layers/fuse/norms.py",
        "        wanted.update(site.reads)\n",
        "",
        "tests/fuse/test_rows_and_lines.py::test_a_norm_widens_what_it_adds[a norm's]",
    ),
    Mutant(
        "layers/fuse/algebra.py",
        "abs(c[0] - want[0]) <= c[1] + want[1] + ARITHMETIC * abs(want[0])",
        "abs(c[0] - want[0]) <= 4e-3 * abs(want[0])",
        "tests/fuse/test_exact.py::test_a_mean_is_one[one of 512 less]",
    ),
    Mutant(  # two roundings of 16 bits count as one
        "layers/fuse/constants.py",
        "    if found.bits > 16:",
        "    if True:",
        "tests/fuse/test_exact.py::test_a_constant_stands_for_what_its_dtype_rounds_to_it[1.0-float16]",
    ),
    Mutant(  # a factor of the operands that the logits' dtype does not need to round
        "layers/fuse/losses.py",
        "if math.frexp(factor)[0] != 0.5 and dtype.itemsize < logits.itemsize:",
        "if False:",
        "tests/fuse/test_exact.py::test_a_factor_that_operands_would_round_stays[0.7]",
    ),
    Mutant(
        "layers/fuse/algebra.py",
        "abs(c[0] - want[0]) <= c[1] + want[1] + ARITHMETIC * abs(want[0])",
        "abs(c[0] - want[0]) <= 0.02 * abs(want[0])",
        "tests/fuse/test_exact.py::test_an_activation_is_one[1.001 silu]",
    ),
    Mutant(  # a row of positions stands for one of them
        "layers/fuse/program.py",
        "        if name not in _BROADCASTING:",
        "        if True:",
        "tests/fuse/test_exact.py::test_positions_of_one_element_are_for_all[from one on]",
    ),
    Mutant(  # a teacher of NumPy arrays is data
        "layers/fuse/closure.py",
        "key_of = lambda x: x.ctypes.data if isinstance(x, np.ndarray) else id(x)",
        "key_of = id",
        "tests/fuse/test_idioms.py::test_what_is_a_parameter",
    ),
    Mutant(  # keywords are leaves in another order
        "layers/fuse/closure.py",
        "*sorted(kwargs.items())",
        "*kwargs.items()",
        "tests/fuse/test_idioms.py::test_idioms_in_fp8[partial-nnx]",
    ),
    Mutant(
        "layers/fuse/norms.py",
        'if not form.p.stands_for(y if bias is None else y.plus(atom("vector", bias))):',
        "if False:",
        "tests/fuse/test_lookalikes.py::test_lookalike[norm: centred, of squares]",
    ),
    Mutant(
        "layers/fuse/norms.py",
        "if g.avals[v].dtype.itemsize < 4:",
        "if g.avals[v].dtype.itemsize < 2:",
        "tests/fuse/test_extremes.py::test_one_plus_w_is_added_in_its_dtype",
    ),
    Mutant(  # words that a mask replaces are read
        "layers/fuse/losses.py",
        "        return jnp.where(hidden, 0, kernel)",
        "        return kernel",
        "tests/fuse/test_spoiled_losses.py::test_words_that_a_mask_replaces[tail--1000000000.0-mean]",
    ),
    Mutant(  # and have a gradient of 0 where it is 0 times NaN
        "layers/fuse/losses.py",
        "jnp.where(jnp.expand_dims(hidden, 1 - words), kernel, 0)",
        "jnp.where(jnp.expand_dims(~hidden, 1 - words), kernel, 0)",
        "tests/fuse/test_spoiled_losses.py::test_words_that_a_mask_replaces[tail--1000000000.0-mean]",
    ),
    Mutant(  # a label outside has a gradient of NaN
        "layers/fuse/losses.py",
        'return (base if self.outside == "all nan" else alone) + nan',
        "return alone + nan",
        "tests/fuse/test_spoiled_losses.py::test_labels_outside_and_weights[take p-mean]",
    ),
    Mutant(  # rows without a part in a total have NaN where the cotangent is
        "layers/cross_entropy/linear.py",
        "    if total.selects and along:",
        "    if False:",
        "tests/fuse/test_losses.py::test_a_cotangent_that_is_not_finite_reaches_rows_with_a_part",
    ),
    Mutant(  # a slope of a total with the wrong sign
        "layers/cross_entropy/op.py",
        "return softmax.divided(of_lse + b, found[1], labels), b",
        "return softmax.divided(of_lse - b, found[1], labels), b",
        "tests/fuse/test_losses.py::test_totals[focal]",
    ),
    Mutant(  # gradients of the arrays that a total reads beside
        "layers/cross_entropy/linear.py",
        "    if any(map(moves, of_data)):",
        "    if False:",
        "tests/fuse/test_losses.py::test_totals[weights]",
    ),
    Mutant(  # the texts of functions within each other
        "layers/fuse/program.py",
        'if names != {"max"} and not names >= {"exp", "div"}:',
        "if False:",
        "tests/fuse/test_cost.py::test_rules_within_rules_cost_what_their_program_is_long",
    ),
    Mutant(  # gradients at once of several totals
        "layers/fuse/search.py",
        'if self.program.avals[one].shape or self.program.avals[one].dtype.kind == "c":',
        'if self.program.avals[one].dtype.kind == "c":',
        "tests/fuse/test_rows.py::test_gradients_come_with_the_loss[of_several_totals]",
    ),
    Mutant(  # a complex total is two numbers
        "layers/fuse/search.py",
        'if self.program.avals[one].shape or self.program.avals[one].dtype.kind == "c":',
        "if self.program.avals[one].shape:",
        "tests/fuse/test_rows.py::test_kinds_of_numbers_and_of_rules[of_a_complex_total]",
    ),
    Mutant(  # complex numbers have derivatives
        "layers/fuse/region.py",
        "moved = tuple([jnp.issubdtype(p.aval.dtype, jnp.inexact) for p in region.ends])",
        "moved = tuple([jnp.issubdtype(p.aval.dtype, jnp.floating) for p in region.ends])",
        "tests/fuse/test_rows.py::test_kinds_of_numbers_and_of_rules[of_complex_logits]",
    ),
    Mutant(  # so they have in rules of derivatives
        "layers/fuse/plan.py",
        "return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]",
        "return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.floating)]",
        "tests/fuse/test_rows.py::test_kinds_of_numbers_and_of_rules[of_a_complex_rule]",
    ),
    Mutant(  # what a function computes on other devices
        "layers/fuse/plan.py",
        'e.params.get("branches_platforms") == (("mosaic",), None)',
        'e.params.get("branches_platforms")',
        "tests/fuse/test_rows.py::test_kinds_of_numbers_and_of_rules[on_platforms]",
    ),
    Mutant(  # rules that ask what gradients are taken by
        "layers/fuse/plan.py",
        ' or e.name == "custom_vjp_call" and e.params["symbolic_zeros"]:',
        ":",
        "tests/fuse/test_rows.py::test_kinds_of_numbers_and_of_rules[of_an_asking_rule]",
    ),
    Mutant(  # the derivative of what a rule returns
        "layers/fuse/plan.py",
        "return rule()([*given, *zeros], chunk)[: len(e.made)], given",
        "return primal(given, chunk), given",
        "tests/fuse/test_rows.py::test_second_derivatives_are_those_of_rules[rows]",
    ),
    Mutant(  # indices that count some of the rows
        "layers/fuse/plan.py",
        "rows[at[c]] and given[0][at[c]] == given[1][d]",
        "rows[at[c]]",
        "tests/fuse/test_rows.py::test_what_stays[next_words]",
    ),
    Mutant(  # rows that an equation combines
        "layers/fuse/rows.py",
        "    if summed and e.name not in SUMS:",
        "    if False:",
        "tests/fuse/test_rows.py::test_what_stays[normalised]",
    ),
    Mutant(  # indices count the rows of all chunks
        "layers/fuse/rows.py",
        "            given[1] = given[1].at[..., column].set(rows)",
        "            given[1] = given[1]",
        "tests/fuse/test_rows.py::test_losses_are_their_own_equations[poly]",
    ),
    Mutant(  # sums of words over devices
        "layers/fuse/words.py",
        "lambda x, axes: lax.psum(x, axes)",
        "lambda x, axes: x",
        "tests/fuse/test_rows.py::test_devices_share_words[kl-Auto-(2,)]",
    ),
    Mutant(  # gradients of what all devices have
        "layers/fuse/words.py",
        "lambda ct, x, axes: [_sum.bind(ct, axes=axes)]",
        "lambda ct, x, axes: [ct]",
        "tests/fuse/test_rows.py::test_devices_share_words[kl-Auto-(2,)]",
    ),
    Mutant(  # pairs of words
        "layers/fuse/rows.py",
        "    rest += [l for i, l in enumerate(out) if words_of([l]) and l in out[:i]]",
        "    rest += []",
        "tests/fuse/test_rows.py::test_devices_have_no_part_of_pairs_of_words",
    ),
    Mutant(  # a device's first word
        "layers/fuse/region.py",
        "lax.axis_index(axes[l]) * n if axes.get(l) else 0",
        "0",
        "tests/fuse/test_rows.py::test_devices_share_words[poly-Auto-(2,)]",
    ),
    Mutant(  # the rows that no whole chunk has
        "layers/fuse/region.py",
        "    for d in map(int, np.flatnonzero(rest)):  # one at most",
        "    for d in ():",
        "tests/fuse/test_rows.py::test_losses_are_their_own_equations[kl]",
    ),
    Mutant(  # losses without exponentials
        "layers/fuse/search.py",
        "return bool(is_loss or self.names & _OF_HINGES and self.serves)",
        "return bool(is_loss)",
        "tests/fuse/test_user_losses.py::test_losses[hinge_by_optax]",
    ),
    Mutant(  # a total of which the loss is no sum over chunks
        "layers/fuse/plan.py",
        "if summed and not self.is_linear(made, self.sums):",
        "if False:",
        "tests/fuse/test_rows.py::test_gradients_come_with_the_loss[of_two_means]",
    ),
    Mutant(  # a number known at run time divides each chunk
        "layers/fuse/plan.py",
        "if constants or any(not program.number(u) for u in made.ins if u != v):",
        "if constants:",
        "tests/fuse/test_losses.py::test_chunks_are_added_up_before_0_divides_them",
    ),
    Mutant(  # gradients of a total alone, whose factors may be 0 / 0
        "layers/fuse/search.py",
        "if numbers & (plan.rows.keys() | plan.lost.keys()):",
        "if True:",
        "tests/fuse/test_rows.py::test_means_of_no_rows[select-square]",
    ),
    Mutant(  # the gradients of what is returned beside a loss
        "layers/fuse/region.py",
        "    if any(later):",
        "    if False:",
        "tests/fuse/test_rows.py::test_gradients_of_what_is_returned_beside",
    ),
    Mutant(  # chunks' gradients of a kernel, rounded
        "layers/fuse/rows.py",
        'e.params["precision"], zeros.dtype)',
        'e.params["precision"], ct.dtype).astype(zeros.dtype)',
        "tests/fuse/test_rows.py::test_products_sum_gradients_of_kernels",
    ),
    Mutant(  # an argmax without a loss beside it
        "layers/fuse/losses.py",
        "return [s for s in sites if not s.what.endswith(_ARGMAX) or s.dead in lost]",
        "return [*sites]",
        "tests/fuse/test_statistics.py::test_other_statistics_keep_the_logits[no loss]",
    ),
    Mutant(  # an entropy whose probabilities have no gradient
        "layers/fuse/scores.py",
        "and p.base == form.base and p.stopped == form.stopped",
        "and p.base == form.base",
        "tests/fuse/test_statistics.py::test_entropies_need_no_logits[p stopped]",
    ),
    Mutant(
        "layers/fuse/scores.py",
        "(form.exp or form.terms or form.hot or form.stopped)",
        "(form.exp or form.terms or form.hot)",
        "tests/fuse/test_statistics.py::test_entropies_need_no_logits[a bias added to stopped]",
    ),
    Mutant(  # an entropy's part of another maximum
        "layers/cross_entropy/op.py",
        "share * (s + moved * total)",
        "share * s",
        "tests/layers/test_cross_entropy_sharding.py::test_words_that_no_row_has_change_nothing",
    ),
    Mutant(  # the last of equal words, where devices have parts of the vocabulary
        "layers/cross_entropy/op.py",
        "return [lax.pmin(word, part.axes)], []",
        "return [lax.pmax(jnp.where(chosen, word, -1), part.axes)], []",
        "tests/fuse/test_statistics.py::test_a_split_vocabulary_has_the_first_of_the_best",
    ),
    Mutant(
        "layers/fuse/losses.py",
        "if base.inner is not None and (base.biases or base.masks):",
        "if base.inner is not None and base.masks:",
        "tests/fuse/test_lookalikes.py::test_lookalike[loss: a soft cap and then a bias]",
    ),
    Mutant(  # writes that take turns leave the last element
        "layers/fuse/indexing.py",
        "if n * (count := own.count[axis]) == own.shape[axis]:",
        "if n * (count := own.count[axis]) >= own.shape[axis] - 1:",
        "tests/fuse/test_indexing.py::test_it_stays[all but the last]",
    ),
    Mutant(
        "layers/fuse/indexing.py",
        "if first < 0 or first + step * (count - 1) >= length:",
        "if first < 0 or first + step * (count - 1) > length:",
        "tests/fuse/test_indexing.py::test_it_stays[the last one outside]",
    ),
    Mutant(
        "layers/fuse/indices.py",
        '-1 if made.name in ("gt", "lt") else 0',
        "0",
        "tests/fuse/test_lookalikes.py::test_lookalike[attention: causal, one less, by positions]",
    ),
    Mutant(
        "layers/fuse/attention.py",
        "int(min(high, t - 1)) + 1",
        "int(min(high, t - 1))",
        "tests/fuse/test_spellings.py::test_spelling[attention: mask, window]",
    ),
    Mutant(
        "layers/fuse/attention.py",
        "if m.fill + reach > MASKED:",
        "if m.fill > 0:",
        "tests/fuse/test_lookalikes.py::test_lookalike[attention: a small number]",
    ),
    Mutant(
        "layers/fuse/scores.py",
        'frozenset([(replace(t, kind="stopped"), f)])',
        "frozenset([(t, f)])",
        "tests/fuse/test_lookalikes.py::test_lookalike[attention: one maximum stopped]",
    ),
    Mutant(
        "layers/fuse/attention.py",
        "jnp.where(nothing, jnp.nan, 1)",
        "jnp.where(nothing, 0, 1)",
        "tests/fuse/test_extremes.py::test_a_bias_that_hides_rows[no mask]",
    ),
    Mutant(  # attention of any size is cut along its queries
        "layers/fuse/search.py",
        'aval.size * aval.dtype.itemsize > LARGEST_SCORES["cpu" if on_cpu() else "others"]',
        "scores.size > 0",
        "tests/fuse/test_queries.py::test_small_scores_stay",
    ),
    Mutant(  # readers after the values' product are none of the region
        "layers/fuse/search.py",
        "push(() if last else made.outs)",
        "push(made.outs)",
        "tests/fuse/test_queries.py::test_attention_is_its_own_equations[two layers]",
    ),
    Mutant(  # rows that see nothing are read without their gradients
        "layers/fuse/unseen.py",
        "for name, x in got.items():",
        "for name, x in [(-1, got[-1])]:",
        "tests/fuse/test_extremes.py::test_rows_that_see_nothing[-inf added-False]",
    ),
    Mutant(  # and all of them for the one mask that hides all keys
        "layers/fuse/unseen.py",
        "            if len(whole) > 1:\n",
        "            if False:\n",
        "tests/fuse/test_extremes.py::test_rows_that_see_nothing[-1e9, then causal -2e9-True]",
    ),
    Mutant(  # for scores about 0 alone
        "layers/fuse/unseen.py",
        "x + centre * (v == self._scores)",
        "x",
        "tests/fuse/test_extremes.py::test_rows_that_see_nothing[-1e9, other maximum-False]",
    ),
    Mutant(  # scores that a mask has replaced get a gradient
        "layers/fuse/attention.py",
        "q, k = jnp.zeros_like(q), jnp.zeros_like(k)",
        "pass",
        "tests/fuse/test_extremes.py::"
        "test_gradients_of_rows_whose_keys_are_all_hidden[1e9 written-36-True]",
    ),
    Mutant(  # a factor of two numbers, neither of them 0
        "layers/fuse/scores.py",
        "    if two.numbers.count(0) != 1:",
        "    if False:",
        "tests/fuse/test_dropout.py::"
        "test_another_factor_of_probabilities_stays[two values, neither 0]",
    ),
    Mutant(
        "layers/fuse/attention.py",
        'options["dropout_rate"] = 1 - 1 / c',
        'options["dropout_rate"] = 0.0',
        "tests/fuse/test_dropout.py::test_a_factor_of_two_values_is_dropout[one mask]",
    ),
    Mutant(  # positions up to a length, that one included
        "layers/fuse/attention.py",
        '(order == "le") - at.constant',
        "-at.constant",
        "tests/fuse/test_lengths.py::test_a_mask_is_given_as_what_it_is_made_of[position <= last]",
    ),
    Mutant(  # ids of two arrays, by which a query may not see the key at its place
        "layers/fuse/attention.py",
        "itself = len(ids) == 1 and",
        "itself = len(ids) >= 1 and",
        "tests/fuse/test_lengths.py"
        "::test_a_mask_is_given_as_what_it_is_made_of[ids of the transposed]",
    ),
    Mutant(  # a branch in the place of an attention without keys
        "layers/fuse/attention.py",
        "y = jnp.where(some, y, jax.checkpoint(rest)(q, k, v, every))",
        "y = lax.cond(jnp.all(some), lambda: y, lambda: jnp.where(some, y, rest(q, k, v, every)))",
        "tests/compiled/test_conditionals_gpu.py::test_no_mask_makes_the_host_wait[1-None-False]",
    ),
    Mutant(  # scores that a number has rounded away have no gradient
        "layers/fuse/attention.py",
        "jnp.where(where, tangents[0] / FAINT, tangents[0])",
        "jnp.where(where, 0 * tangents[0], tangents[0])",
        "tests/fuse/test_extremes.py::test_sequences_that_see_nothing_need_no_second_attention",
    ),
    Mutant(
        "layers/fuse/scores.py",
        'elif name == ("and" if keep else "or") and split:',
        'elif name in ("and", "or") and split:',
        "tests/fuse/test_spellings.py::test_spelling[attention: mask, a constant pattern]",
    ),
    Mutant(
        "layers/fuse/scores.py",
        "if v in self.made or (form := self.of.get(v)) is not None and form.is_attention:",
        "if (form := self.of.get(v)) is not None and form.is_attention:",
        "tests/fuse/test_spellings.py::test_spelling[norm: that a loss reads]",
    ),
    Mutant(
        "layers/fuse/products.py",
        "if self.transposed and not self.apart:",
        "if not self.transposed and not self.apart:",
        "tests/fuse/test_spellings.py::test_products[matmul]",
    ),
    Mutant(  # a gate and an up of one input's features in two orders
        "layers/fuse/products.py",
        "return same and first.turned == other.turned",
        "return same",
        "tests/fuse/test_lookalikes.py::test_fp8_has_one_input_of_gate_and_up_in_one_order",
    ),
    Mutant(  # logits that have their words in another order than the kernel
        "layers/fuse/losses.py",
        "if labels is not None and expand(labels[2]) != logits.of.axis:",
        "if False:",
        "tests/fuse/test_lookalikes.py::test_lookalike[loss: words in another order]",
    ),
    Mutant(  # casts to 8 bits, as to 16, are mere roundings
        "layers/fuse/program.py",
        "v.aval.dtype.itemsize == 1",
        "v.aval.dtype.itemsize == 0",
        "tests/fuse/test_lookalikes.py::test_lookalike[norm: statistics of 8 bits]",
    ),
    Mutant(  # bfloat16 that the function multiplies in float32
        "layers/fuse/attention.py",
        "wide = [result] if result.itemsize > 2 else []",
        "wide = []",
        "tests/fuse/test_lookalikes.py::"
        "test_lookalike[attention: bfloat16 that is multiplied in float32]",
    ),
    Mutant(
        "layers/fuse/products.py",
        "if is_precise(made):",
        "if False:",
        "tests/fuse/test_lookalikes.py::test_fp8_leaves[HIGHEST]",
    ),
    Mutant(  # calls that compute with a chosen value are followed
        "layers/fuse/choices.py",
        "yield from _around(g, equation, outs)",
        "yield from ()",
        "tests/fuse/test_choices.py::test_a_choice_keeps_the_product[while]",
    ),
    Mutant(  # every comparison chooses
        "layers/fuse/choices.py",
        "if name in COMPARED and (ins[0] == ins[1] or any(map(is_infinite, ins))):",
        "if name in COMPARED:",
        "tests/fuse/test_choices.py::test_a_choice_keeps_the_product[threshold]",
    ),
    Mutant(  # a product of ours is read as no product
        "layers/fuse/program.py",
        'return closed, "product"',
        'return closed, "border"',
        "tests/fuse/test_choices.py::test_ours_is_what_theirs_is[a loss-None]",
    ),
    Mutant(
        "layers/fuse/losses.py",
        "loss = jnp.where(next(given), lse - self.logits.hidden[1], loss)",
        "next(given)",
        "tests/fuse/test_spellings.py::test_spelling[loss: labels that a mask hides, of each row]",
    ),
    Mutant(
        "layers/fuse/scores.py",
        "fa, fb = (fa, None) if sizes[0] >= sizes[1] else (None, fb)",
        "fa, fb = (fa, None)",
        "tests/fuse/test_spellings.py::test_spelling"
        "[attention: a mask and a bias that is a product given]",
    ),
    Mutant(
        "layers/fuse/indexing.py",
        "rows(tangents[0].astype(jnp.float32), primals[1], 0)",
        "rows(tangents[0].astype(dtype), primals[1], 0)",
        "tests/fuse/test_lookups.py"
        "::test_a_gradient_is_exact_where_theirs_is_rounded[a cast and an index]",
    ),
    Mutant(  # a table that is computed
        "layers/fuse/indexing.py",
        "if maker is not None or program.known(root) is not None:",
        "if program.known(root) is not None:",
        "tests/fuse/test_lookups.py"
        "::test_what_is_no_lookup_of_a_parameter_stays[a table that is computed]",
    ),
    Mutant(
        "layers/fuse/products.py",
        'if self.made.params.get("out_sharding") is None:',
        "if True:",
        "tests/fuse/test_everywhere.py::test_products_keep_the_sharding_that_they_are_given[rows]",
    ),
    Mutant(
        "layers/fuse/activations.py",
        'if made.name == "max" and made not in g.shadowing:',
        'if made.name == "min":',
        "tests/fuse/test_lookalikes.py::test_lookalike[mlp: plain, a relu of maximum]",
    ),
    Mutant(
        "layers/fuse/codes.py",
        'or eqn.params.get("dimensions") is not None  # a reshape\'s, which transposes first',
        "",
        "tests/fuse/test_codes.py::test_a_reshape_that_transposes_is_not_followed",
    ),
    Mutant(
        "layers/fuse/codes.py",
        "if norm.heads and not norms.are_examples(norm):",
        "if False:",
        "tests/fuse/test_codes.py::test_the_report_says_why_not_and_the_results_stay[heads]",
    ),
    Mutant(
        "layers/fuse/losses.py",
        "    if mesh.manual_axes and len(mesh.manual_axes) < len(mesh.axis_names):",
        "    if False:",
        "tests/fuse/test_everywhere.py::test_rows_of_losses_say_what_is_compiled[partly manual]",
    ),
    Mutant(
        "layers/compare.py",
        "same = (y == exact) | np.isnan(y) & np.isnan(exact)",
        "same = (y == exact) | np.isnan(y) | np.isnan(exact)",
        "tests/layers/test_compare.py::test_results_that_are_not_finite",
    ),
    Mutant(
        "layers/fuse/closure.py",
        "alone = Origin(name, True, _matrices(leaves), True)",
        "alone = Origin(name, False, _matrices(leaves), True)",
        "tests/fuse/test_idioms.py::test_what_is_a_parameter[activations and a table-False]",
    ),
    Mutant(  # a tuple that holds an array of the trace stays
        "layers/fuse/leaks.py",
        "if id(x) in self._tuples and id(x) not in known:",
        "if False:",
        "tests/fuse/test_front.py::test_what_objects_keep_is_there_afterwards[a named tuple]",
    ),
    Mutant(  # rules of derivatives get values of a trace that has ended
        "layers/fuse/call.py",
        "self.is_lost = self._leaks.in_rules and not raised",
        "self.is_lost = False",
        "tests/fuse/test_front.py"
        "::test_rules_of_derivatives_that_hold_values_of_the_loss[within remat]",
    ),
    Mutant(  # all objects are looked at for each rule
        "layers/fuse/leaks.py",
        "if not self.in_rules and not _is_held_elsewhere(trace(), rules):",
        "if False:",
        "tests/fuse/test_front.py::test_rules_of_derivatives_cost_no_collection_of_garbage",
    ),
    Mutant(
        "layers/fuse/leaks.py",
        "            if frozen:",
        "            if False:",
        "tests/fuse/test_front.py::test_objects_that_a_server_has_frozen_stay_so",
    ),
    Mutant(
        "layers/fuse/leaks.py",
        "gc.unfreeze()",
        "pass",
        "tests/fuse/test_front.py::"
        "test_what_cannot_be_given_back_is_refused_before_anything_runs[the generator squares]",
    ),
    Mutant(  # an error leaves tracers behind
        "layers/fuse/call.py",
        "            self.leave(effects=True)\n",
        "",
        "tests/fuse/test_front.py"
        "::test_after_an_error_objects_are_as_the_plain_function_leaves_them[KeyboardInterrupt]",
    ),
    Mutant(  # an argument that is a result goes through the program
        "layers/fuse/call.py",
        "id(x) not in own and",
        "",
        "tests/fuse/test_front.py::test_results_that_nothing_touches_are_the_objects_themselves[0]",
    ),
    Mutant(  # words are walked one by one
        "layers/fuse/closure.py",
        "items = () if _is_plain(value) else [x for x in items if not _is_plain(x)]",
        "",
        "tests/fuse/test_front.py::test_words_in_a_closure_cost_nothing",
    ),
    Mutant(
        "layers/fuse/sites.py",
        "while sum(widths) > room and",
        "while False and",
        "tests/fuse/test_front.py::test_rows_fit_the_terminal",
    ),
    Mutant(  # what is wrong in ours alone counts as zero
        "layers/compare.py",
        "and size <= least",
        "",
        "tests/fuse/test_front.py::test_a_large_error_is_no_zero",
    ),
    Mutant(  # fuse falls back in silence: tests of it are loud
        "layers/fuse/fuse.py",
        "rows = plan(graph, options.quantization, options.skip)",
        "rows = plan(graph, options.nothing, options.skip)",
        "tests/fuse/test_everywhere.py::test_float64",
    ),
    Mutant(
        "layers/fuse/fuse.py",
        'left += [(value, "loss", why, (value,)) for value, why in others]',
        "pass",
        "tests/fuse/test_front.py::test_the_last_line_says_that_logits_have_no_loss",
    ),
    Mutant(
        "layers/fuse/fuse.py",
        "if left or not own:",
        "if not own:",
        "tests/fuse/test_front.py::test_what_is_required_is_served_or_an_error",
    ),
    Mutant(
        "layers/fuse/parameters.py",
        "looks_less and strength(own) <= strongest:",
        "looks_less and strength(own) < strongest:",
        "tests/fuse/test_idioms.py::test_what_is_a_parameter[a hypernetwork of arrays-False]",
    ),
    Mutant(  # a kernel has fewer dimensions than rows, whatever is differentiated
        "layers/fuse/parameters.py",
        "evidence = lambda i: (origins[i].differentiated, origins[i].matrices)",
        "evidence = lambda i: (origins[i].matrices,)",
        "tests/fuse/test_idioms.py::test_a_kernel_may_have_more_dimensions_than_rows"
        "[differentiated, beside a batch of more]",
    ),
    Mutant(
        "layers/fuse/parameters.py",
        "return bool(own) and own[0] in contract and own[-1] not in contract",
        "return False",
        "tests/fuse/test_idioms.py::test_a_kernel_may_have_more_dimensions_than_rows[arrays]",
    ),
    Mutant(  # a codebook is a head
        "layers/fuse/parameters.py",
        "and not _is_codebook(g, made, root):",
        "and True:",
        "tests/fuse/test_choices.py::test_a_choice_keeps_the_product[a codebook, by cosines]",
    ),
    Mutant(  # x and its mean are multiplied by different scales
        "layers/fuse/algebra.py",
        "and p == power and _stand_for(t, inner)",
        "and p == power",
        "tests/fuse/test_lookalikes.py::test_lookalike[norm: folded, of another scale]",
    ),
    Mutant(
        "layers/fuse/norms.py",
        "if power != -0.5:",
        "if False:",
        "tests/fuse/test_lookalikes.py::test_lookalike[norm: by the mean of squares]",
    ),
    Mutant(  # columns that devices share are joined
        "layers/fuse/products.py",
        "return bool(explicit) and len(self.columns) > 1",
        "return False",
        "tests/fuse/test_batched_kernels.py::test_kernels_of_heads_on_explicit_axes[cndh]",
    ),
    Mutant(  # values of an attention are experts
        "layers/fuse/parameters.py",
        "if not own.differentiated and own.matrices < max(",
        "if not own.differentiated and own.matrices < 0 * max(",
        "tests/fuse/test_batched_kernels.py::test_what_attends_is_no_kernel[values of a batch]",
    ),
    Mutant(  # experts in another order than the first product has them
        "layers/fuse/products.py",
        "and of(first.batch) == m.batch else None",
        "else None",
        "tests/fuse/test_batched_kernels.py::test_batches_in_two_orders_are_two_products",
    ),
    Mutant(  # any array with a tangent is a parameter
        "layers/fuse/closure.py",
        "return False  # it is computed from such an array",
        "return True",
        "tests/fuse/test_idioms.py::test_what_is_computed_from_parameters_is_none",
    ),
    Mutant(
        "layers/fuse/program.py",
        "self.made_of[v] = frozenset([self.origins[v]])",
        "self.made_of[v] = frozenset()",
        "tests/fuse/test_idioms.py::test_idioms_in_fp8[closed_over_as_arrays-equinox]",
    ),
    Mutant(
        "layers/fuse/call.py",
        "held = {id(x) for x in before} | returned",
        "held = {id(x) for x in before}",
        "tests/fuse/test_attacked.py::"
        "test_changes_of_objects_are_an_error_unless_they_are_returned",
    ),
    # ---------------------------------------------------------------- layers: modules
    Mutant(
        "layers/nnx.py",
        "arrays = {key: rounded(p.reshape(shape), dtype) for key, p in arrays.items()}",
        "arrays = {key: p.reshape(shape) for key, p in arrays.items()}",
        "tests/layers/test_modules.py::test_when_a_norm_casts[nnx]",
    ),
    Mutant(
        "layers/core/arguments.py",
        '"a precision": layer.precision is not None,',
        "",
        "tests/layers/test_modules.py::test_options_that_the_framework_serves[linen]",
    ),
    Mutant(
        "layers/eqx.py",
        "bias = self.bias if self.use_bias else None",
        "bias = None",
        "tests/layers/test_modules.py"
        "::test_values_and_gradients_are_as_exact_as_the_frameworks[LayerNorm-eqx]",
    ),
    # ---------------------------------------------------------------- models
    Mutant(
        "models/attention.py",
        "turned = (first * cos - second * sin, second * cos + first * sin)",
        "turned = (first * cos - second * sin, second * cos - first * sin)",
        "tests/models/test_attention.py::test_rotation_keeps_lengths_and_depends_on_distance_only",
    ),
    Mutant(
        "models/attention.py",
        "seen &= keys > positions - window",
        "seen &= keys >= positions - window",
        "tests/models/test_attention.py::test_attention_grows_with_a_cache[{'window': 4}]",
    ),
    Mutant(
        "models/generate.py",
        "token = _draw(logits, key, temperature, top_p, top_k)",
        "token = _draw(logits, jax.random.key(0), temperature, top_p, top_k)",
        "tests/models/test_generate.py::test_seed_decides_the_text[nnx]",
    ),
    Mutant(
        "models/generate.py",
        "cache = cache._replace(length=filled)",
        "",
        "tests/models/test_generate.py"
        "::test_greedy_text_is_that_of_the_whole_model_again_and_again[nnx-equal]",
    ),
    Mutant(
        "models/huggingface.py",
        'turned = name.endswith(".kernel") != transposed  # theirs are (out, in)',
        'turned = name.endswith(".kernel")',
        "tests/models/test_huggingface.py::test_logits_are_those_recorded[llama-eqx]",
    ),
    Mutant(
        "models/sharding.py",
        "return P(*reversed(spec)) if transposed else spec",
        "return spec",
        "tests/models/test_sharding.py::test_shardings_follow_the_layout_of_each_framework",
    ),
    Mutant(
        "models/sharding.py",
        "return axes_of((stored(split, mesh) if rows < words else split)[0])",
        "return axes_of(split[0])",
        "tests/models/test_sharding.py::test_a_look_up_moves_the_fewer_of_rows_and_words[4]",
    ),
    Mutant(
        "models/parameters.py",
        "own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))",
        "own_key = key",
        "tests/models/test_parameters.py::test_initial_matrices_differ_from_each_other",
    ),
    # ---------------------------------------------------------------- train
    Mutant(
        "train/data.py",
        "wanted = passes.slice(slice(first * batch_size, steps * batch_size)).batch(batch_size)",
        "wanted = passes.slice(slice(first, steps * batch_size)).batch(batch_size)",
        "tests/train/test_data.py::test_batch_depends_on_seed_and_step_only",
    ),
    Mutant(
        "train/data.py",
        ".seed(seed).shuffle().repeat()",
        ".seed(seed).shuffle().repeat(reseed_each_epoch=False)",
        "tests/train/test_data.py::test_every_pass_reads_every_window_once_in_its_own_order",
    ),
    Mutant(
        "train/tokenizer.py",
        "1 + max([-1, *self._tokenizer.get_vocab().values(), *encoding.ids])",
        "self._tokenizer.get_vocab_size()",
        "tests/train/test_tokenizer.py::test_the_vocabulary_reaches_to_the_largest_token",
    ),
    Mutant(
        "train/tokenizer.py",
        "if self._template == (self.opening(), []):",
        "if True:",
        "tests/train/test_generation.py::test_train_generate_and_export_feed_the_same_tokens",
    ),
    Mutant(
        "train/files.py",
        "os.replace(beside, path)",
        "path.write_bytes(content)",
        "tests/train/test_files.py::test_every_file_of_a_run_is_written_beside_its_place",
    ),
    Mutant(
        "train/checks.py",
        "if name not in chosen and value != before[name]",
        "if False",
        "tests/train/test_pretrained.py::test_other_models_are_refused",
    ),
    Mutant(
        "train/checkpoint.py",
        "for step in sorted({*complete, *self._numbered()}, reverse=True):",
        "for step in sorted({*complete, *self._numbered()}):",
        "tests/train/test_checkpoint.py::test_restores_the_newest_exactly",
    ),
    Mutant(
        "train/checkpoint.py",
        'if restored.get("step") != step:',
        "if False:",
        "tests/train/test_checkpoint_damage.py::test_checkpoint_under_another_steps_name_is_damage",
    ),
    Mutant(
        "train/checkpoint.py",
        "_mix(words ^ _mix(position))",
        "_mix(words)",
        "tests/train/test_mesh.py::test_checksum_shows_every_single_bit_and_every_move",
    ),
    Mutant(
        "train/step.py",
        "& ~state.halted",
        "",
        "tests/train/test_step.py::test_bad_step_halts_before_the_update",
    ),
    Mutant(
        "train/step.py",
        "lambda p: p.ndim > 1",
        "lambda p: p.ndim > 0",
        "tests/train/test_step.py::test_clipping_and_decay_follow_the_configuration",
    ),
    Mutant(
        "train/lock.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "tests/train/test_lock.py::test_second_run_in_a_folder_is_refused",
    ),
    Mutant(
        "train/metrics.py",
        'return entry["step"] <= from_step',
        'return entry["step"] <= from_step + 1',
        "tests/train/test_metrics.py::test_resume_drops_later_steps_and_a_torn_line",
    ),
    Mutant(
        "train/evaluate.py",
        "weights[: len(indices)] = 1",
        "weights[:] = 1",
        "tests/train/test_step.py::test_a_validation_is_the_mean_over_its_windows",
    ),
    Mutant(
        "train/config.py",
        'flags = [*_file_flags(expanded(path, "--config")), *flags]',
        'flags = [*flags, *_file_flags(expanded(path, "--config"))]',
        "tests/train/test_config.py::test_flags_override_the_file_and_the_file_the_preset",
    ),
    Mutant(
        "train/checks.py",
        'fixed = group == "text" or not',
        "fixed = not",
        "tests/train/test_resume.py::test_other_text_is_not_continued",
    ),
    Mutant(
        "train/distributed.py",
        "if config.coordinator is None and (address",
        "if (address",
        "tests/train/test_distributed.py::test_environment_is_read_and_flags_come_first",
    ),
    Mutant(
        "train/distributed.py",
        'while len(client.key_value_dir_get(f"{_MET}{where}/")) < jax.process_count():',
        "while False:",
        "tests/train/test_distributed.py::test_processes_wait_for_the_last_one",
    ),
    Mutant(  # bytes of an image among those of the text
        "train/documents.py",
        'if b"\\0" in content:',
        "if kind in _NO_TEXT:",
        "tests/train/test_data.py::test_files_without_texts_are_refused",
    ),
    Mutant(  # several files of JSON are their bytes
        "train/text.py",
        '{file.suffix.lower() for file in files} == {".json"}',
        'len(files) == 1 and files[0].suffix == ".json"',
        "tests/train/test_data.py::test_documents_are_lines_of_json_rows_and_files",
    ),
    Mutant(  # a full disk names no file
        "train/files.py",
        "error.filename = os.fspath(path)",
        "pass",
        "tests/train/test_files.py::test_a_full_disk_leaves_the_file_as_it_was",
    ),
    Mutant(  # modules are taken apart before it is known if they may change
        "layers/fuse_nnx.py",
        "node.set_raw_value(node.get_raw_value())",
        "node.get_raw_value()",
        "tests/fuse/test_attacked.py::test_modules_of_another_trace_stay_whole",
    ),
    Mutant(
        "train/loop.py",
        "seconds = now - max(started, self._finished)",
        "seconds = now - started",
        "tests/train/test_loop.py::test_the_times_of_steps_do_not_overlap",
    ),
    # ---------------------------------------------------------------- tests that were once weak
    # Each of these passed where only one side, the words or the forward were looked at.
    Mutant(  # each element is clipped, not the norm
        "train/step.py",
        "optax.clip_by_global_norm(config.clip)",
        "optax.clip(config.clip)",
        "tests/train/test_step.py::test_step_equals_adamw_by_hand",
    ),
    Mutant(  # one more reduction
        "layers/accumulate.py",
        "[s.sum(0) for s in sums]",
        "[s.sum(0) + 0 * s.max(0) for s in sums]",
        "tests/train/test_mesh.py::test_replicas_reduce_once_however_many_microbatches",
    ),
    Mutant(  # the log is not read
        "native/compiler.py",
        'log = log.rstrip(b"\\0 \\n").decode(errors="replace")',
        'log = ""',
        "tests/native/test_cuda_epilogue.py::test_epilogue_compiles_without_spilling[sm_80]",
    ),
    Mutant(  # the headers are not read
        "native/registry.py",
        'return int(numbers["MAJOR"]), int(numbers["MINOR"])',
        "return compiled_version()",
        "tests/native/test_cpu_registry.py::test_installed_version_is_read_from_the_headers",
    ),
    Mutant(  # axes are swapped
        "models/sharding.py",
        'column: P = P("fsdp", "tensor")',
        'column: P = P("tensor", "fsdp")',
        "tests/models/test_sharding.py::test_every_parameter_has_a_spec[tiny]",
    ),
    Mutant(  # x of ones would stay as it is
        "layers/norm/spec.py",
        "y = scaled(norm, wide, centred * jnp.expand_dims(rstd, norm.axes), h.dtype)",
        "y = scaled(norm, wide, centred, h.dtype)",
        "tests/layers/test_errors.py::test_implementation_is_what_runs[xla-calls2]",
    ),
    Mutant(  # the row of the report stays right
        "layers/fuse/products.py",
        "called(finish_gated, *[*map(read, reads), None][:2], **options)",
        "called(finish_gated, *[*map(read, reads[::-1]), None][:2], **options)",
        "tests/fuse/test_dropout.py"
        "::test_a_gated_activation_before_dropout_is_one_pass[silu, gated, the other way round]",
    ),
    Mutant(
        "layers/dense/fp8_norm.py",
        "reads[3] = False",
        "pass",
        "tests/fuse/test_codes.py::test_a_forward_alone_writes_one_layout",
    ),
    Mutant(  # the forward is right
        "layers/modules.py",
        "hidden = finish(gate, None, mlp.activation, gate.dtype, *up)",
        "hidden = finish(jax.lax.stop_gradient(gate), None, mlp.activation, gate.dtype, *up)",
        "tests/layers/test_fused_modules.py::test_what_has_taken_a_place_is_called[down]",
    ),
    Mutant(  # arrays stay where they are placed
        "layers/dense/fp8_mlp.py",
        "self.hidden_sharding) for w in codes]",
        "self.hidden_sharding) for w in codes[:1] * len(codes)]",
        "tests/fuse/test_everywhere.py"
        "::test_hidden_arrays_stay_where_constraints_place_them[gate and up-fp8]",
    ),
    Mutant(  # the result is rounded once more
        "layers/nnx.py",
        "return self._norm(narrowed(x, dtype), **arrays, dtype=dtype, **options)",
        'return self._norm(narrowed(x, dtype), **arrays, dtype="float16", **options).astype(dtype)',
        "tests/layers/test_modules.py::test_when_a_norm_casts[nnx]",
    ),
    Mutant(  # on one device as on many
        "layers/dense/fp8_norm.py",
        "quantized_norm.quantize(spec, *jax.lax.stop_gradient(tuple(args)), order=order)",
        "quantized_norm.quantize(spec, *jax.lax.stop_gradient(tuple(args[:3])), order=order)",
        "tests/fuse/test_codes.py::test_other_norms_on_a_mesh[layer_norm-P('d',)-AxisType.Auto]",
    ),
]


def selected(chosen: list[str]) -> list[int]:
    """Returns the numbers of the mutants that are asked for, all where none is."""
    found: list[int] = []
    for word in chosen or ["1-"]:
        first, dash, last = word.partition("-")
        if first.isdecimal():
            end = int(last or len(MUTANTS)) if dash else int(first)
            found += range(int(first), end + 1)
        else:
            found += [i for i, mutant in enumerate(MUTANTS, 1) if mutant.file.startswith(word)]
    return found


def pytest(tests: Iterable[str], cache: str) -> subprocess.CompletedProcess[str]:
    """Runs tests until one fails. No byte code, and no kernel, of a mutant is kept."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "NORMFUSE_CACHE_DIR": cache}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def fate(mutant: Mutant, cache: str) -> str:
    """Applies a mutant, runs its test, and returns what became of it."""
    path = ROOT / mutant.file
    if subprocess.run(["git", "diff", "--quiet", "--", path], cwd=ROOT).returncode:
        return "not run: the file has changes"
    source = path.read_text()
    try:
        path.write_text(source.replace(mutant.old, mutant.new))
        done = pytest([mutant.test], cache)
    finally:
        path.write_text(source)
    if done.returncode == 1 or done.returncode < 0:  # the kernel may have ended the process
        return "killed"
    if done.returncode:  # it does not compile, or cannot be imported: no test has seen it
        return f"not run: {(done.stdout or done.stderr).strip().splitlines()[-1]}"
    return "SURVIVED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chosen", nargs="*", help="numbers (7), ranges (12-20), files or folders")
    numbers = selected(parser.parse_args().chosen)
    if not numbers or not 1 <= min(numbers) <= max(numbers) <= len(MUTANTS):
        parser.error(f"there are mutants 1 to {len(MUTANTS)}, of files in native, layers, …")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the file is put back
    killed = 0
    with tempfile.TemporaryDirectory() as cache:
        before = pytest(dict.fromkeys(MUTANTS[i - 1].test for i in numbers), cache)
        if before.returncode:
            print(f"{before.stdout}\nThese tests have to pass before anything is broken.")
            return 2
        for i in numbers:
            mutant, began = MUTANTS[i - 1], time.monotonic()
            found = fate(mutant, cache)
            killed += found == "killed"
            print(f"{i:3} {time.monotonic() - began:6.1f} s  {found:8}  {mutant.file}", flush=True)
    print(f"{killed} of {len(numbers)} killed")
    return int(killed < len(numbers))


if __name__ == "__main__":
    sys.exit(main())
