"""What users are promised, the tests that hold each promise, and the figures of both.

A figure is read from the source of a test or from a file in docs/data. docs/build/render.py writes
the promises into docs/promises.md; tests/docs/test_promises.py checks that the tests exist.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

CLI = "tests/sagesim/cli/test_cli.py"
EMULATOR = "tests/sagesim/emulator"
FILES_TESTS = "tests/sagesim/test_files.py"
KERNELS = "tests/sagesim_kernels"
INTEGRATIONS = f"{KERNELS}/integrations"
MODELS = "tests/sagesim/models"
PRETRAIN = "tests/sagesim/experiments/pretrain"
SWEEP = "tests/sagesim/experiments/test_spec_sweep.py"
THEORY = "tests/theory"


@dataclass(frozen=True)
class Promise:
    """One promise.

    text: a sentence.
    tests: what holds it, each "path::name" or "path::Class::name".
    figure: how much was tried or measured, in words; empty if there is no number.
    """

    text: str
    tests: tuple[str, ...]
    figure: Callable[[], str] = str


# --- reading sources of tests ------------------------------------------------------------------


@cache
def _module(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def find(test: str) -> ast.ClassDef | ast.FunctionDef:
    """The definition of a test or a class of tests.

    Raises:
        LookupError: if there is none.
    """
    path, *names = test.split("::")
    if not names or not (ROOT / path).exists():
        raise LookupError(f"{test} names no test; path::name needed, of a file that exists")
    node: ast.Module | ast.ClassDef | ast.FunctionDef = _module(path)
    for name in names:
        inside = [x for x in node.body if isinstance(x, ast.ClassDef | ast.FunctionDef)]
        matches = [x for x in inside if x.name == name]
        if not matches:
            raise LookupError(f"{test} is not in {path}: there is no {name!r}")
        node = matches[0]
    assert not isinstance(node, ast.Module)
    return node


def constant(path: str, name: str) -> Any:
    """The value of a module's constant that is written as a literal.

    Raises:
        LookupError: if there is none.
    """
    for node in _module(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name and node.value is not None:
                return ast.literal_eval(node.value)
    raise LookupError(f"{path} has no constant {name!r}")


def examples(test: str) -> int:
    """The number of drawn examples of a property test: its `@examples(number)`.

    Raises:
        LookupError: if it has none.
    """
    for node in ast.walk(find(test)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "examples":
            return int(ast.literal_eval(node.args[0]))
    raise LookupError(f"{test} has no @examples")


def devices(test: str) -> set[str]:
    """Where a test runs: "CPU", "GPU", or both.

    A module's or test's mark `gpu` means a GPU, and so do the marks `ON_HOPPER` of Hopper's tests,
    which contain it. The kernels' mark `HERE` means both: Triton's interpreter runs them on a CPU.
    """
    path, *names = test.split("::")
    marks = [
        ast.unparse(node.value)
        for node in _module(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    for depth in range(1, len(names) + 1):
        owner = find("::".join([path, *names[:depth]]))
        marks += [ast.unparse(decorator) for decorator in owner.decorator_list]
    if any("mark.gpu" in mark or "ON_HOPPER" in mark for mark in marks):
        return {"GPU"}
    return {"CPU", "GPU"} if any("HERE" in mark for mark in marks) else {"CPU"}


def _data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text())
    return found


# --- figures -----------------------------------------------------------------------------------

FUZZ = f"{KERNELS}/test_fuzz.py"
COMPILED = f"{KERNELS}/test_gpu_code.py"


def _fuzz_cases() -> str:
    cases = constant(FUZZ, "CASES")
    return (
        f"{cases['fast']} drawn cases in CI, {cases['long']:,} with `make fuzz`, "
        f"{cases['cuda']:,} on a GPU"
    )


def _planted() -> str:
    data = _data("mutations")
    return f"`scripts/mutate.py` planted {len(data['bugs'])} bugs, {data['caught']} were caught"


def _influence() -> str:
    largest = max(row["dq"] for row in _data("causality")["rows"].values())
    return f"Under the other presets, a row of dQ changes by up to {largest:.2g} of the RMS of dQ"


def _drawn(*tests: str) -> Callable[[], str]:
    return lambda: f"{sum(map(examples, tests)):,} drawn cases"


def _head_sizes() -> str:
    largest = constant("sagesim_kernels/support.py", "LARGEST_HEAD")
    return f"The kernels take 1 to {largest}; the emulator has no limit"


def _spills() -> str:
    test = find(f"{COMPILED}::test_the_loop_spills_nothing")
    (share,) = {
        x.value
        for x in ast.walk(test)
        if isinstance(x, ast.Constant) and isinstance(x.value, float)
    }
    return f"At most {share:.0%} of the instructions that a loop issues move a spilled register"


def _repeats() -> str:
    test = f"{KERNELS}/test_invariance.py::TestRuns::test_repeat"
    for node in ast.walk(find(test)):
        if isinstance(node, ast.IfExp) and ast.unparse(node.test) == "ON_CPU":
            cpu, gpu = (ast.literal_eval(x) for x in (node.body, node.orelse))
            return f"{cpu[0]} runs on a CPU, {gpu[0]:,} on a GPU"
    raise LookupError(f"{test} does not choose the number of runs by ON_CPU")


def _capabilities() -> str:
    names = ", ".join(f"sm{x}" for x in constant(COMPILED, "CAPABILITIES"))
    oldest = (ROOT / "Makefile").read_text().split("OLDEST_TRITON := ")[1].split()[0]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    newest = next(line for line in constraints if line.startswith("triton==")).split("==")[1]
    return f"{names}, with Triton {oldest} and {newest}"


# --- the promises ------------------------------------------------------------------------------

NUMBERS = (
    Promise(
        "Kernels and emulator agree: codes and scales of Q, K, V and dO are equal bit for bit, and "
        "every later stage is within the rounding error of float32.",
        (f"{FUZZ}::test_kernels_meet_the_contract",),
        _fuzz_cases,
    ),
    Promise(
        "Codes of P and dS rarely differ from the emulator's, given the same O.",
        (f"{FUZZ}::test_kernels_meet_the_contract",),
        lambda: f"At most {constant(FUZZ, 'MOST_DIFFERING'):.1%} of the codes",
    ),
    Promise(
        "The comparison of kernels and emulator fails if a kernel has a bug.",
        (f"{KERNELS}/test_contract.py::test_a_planted_bug_is_found_at_its_stage",),
        _planted,
    ),
    Promise(
        "A spec that rounds nothing is attention: its gradients pass gradcheck in float64.",
        (f"{EMULATOR}/test_attention.py::TestGradients::test_gradcheck_on_200_shapes",),
        _drawn(f"{EMULATOR}/test_attention.py::TestGradients::test_gradcheck_on_200_shapes"),
    ),
    Promise(
        "In 16 bit, the error of the kernels is at most twice SDPA's in the output and three times "
        "SDPA's in the gradients.",
        (
            f"{KERNELS}/test_attention.py::TestUnquantized::test_error_is_at_most_that_of_sdpa",
            f"{KERNELS}/test_gpu.py::TestUnquantized::test_error_is_at_most_that_of_sdpa",
        ),
        lambda: "At small shapes, the dtype's unit roundoff is added",
    ),
    Promise(
        "`sagesim.exact` is PyTorch's attention and its autograd in float64.",
        (f"{EMULATOR}/test_exact.py::test_is_what_autograd_makes_of_pytorchs_attention",),
    ),
    Promise(
        "`sagesim.exact_backward` is autograd of the forward's P, straight through its rounding.",
        (f"{EMULATOR}/test_exact_backward.py::test_is_what_autograd_makes_of_the_forwards_logits",),
    ),
    Promise(
        "The emulator gives the codes and scales of the paper's Algorithms 1 and 2.",
        (
            f"{EMULATOR}/test_forward.py::TestThePapersAlgorithms"
            "::test_codes_and_scales_of_tokens_are_the_same_bytes",
            f"{EMULATOR}/test_forward.py::TestThePapersAlgorithms"
            "::test_codes_of_maps_differ_by_1_in_at_most_a_thousandth",
        ),
    ),
    Promise(
        "The errors of emulator and kernels stay within `theory.attention_bound`.",
        (
            f"{THEORY}/test_attention_bound.py::test_the_emulator_stays_within_the_bound",
            f"{THEORY}/test_attention_bound.py::test_the_kernels_stay_within_the_bound",
        ),
        _drawn(
            f"{THEORY}/test_attention_bound.py::test_the_emulator_stays_within_the_bound",
            f"{THEORY}/test_attention_bound.py::test_the_kernels_stay_within_the_bound",
        ),
    ),
    Promise(
        "`theory.error_budget` predicts the errors that the emulator measures.",
        (f"{THEORY}/test_budget.py::test_predicted_errors_are_within_25_percent",),
        lambda: f"Within {constant('theory/checks/budget.py', 'WITHIN'):.0%}",
    ),
    Promise(
        "`sagesim.attribute` finds the product that makes the error.",
        (
            "tests/sagesim/analysis/test_attribution.py::test_the_only_int8_product_has_the_whole_share",
            "tests/sagesim/analysis/test_attribution.py"
            "::test_a_product_has_a_share_of_exactly_the_tensors_that_it_reaches",
        ),
    ),
    Promise(
        "If V or dO is multiplied by a signed power of two, the results that are linear in it are "
        "multiplied by the same factor, and no other bit changes.",
        (
            f"{KERNELS}/test_invariance.py::TestSymmetries::test_of_v",
            f"{KERNELS}/test_invariance.py::TestSymmetries::test_of_do",
        ),
    ),
    Promise(
        "If Q is multiplied and K divided by a signed power of two, no bit of O changes.",
        (f"{KERNELS}/test_invariance.py::TestSymmetries::test_of_q_against_k",),
    ),
    Promise(
        "Under a causal mask, later tokens change no bit of earlier rows of O and dQ, if the spec "
        "is unquantized or `CAUSAL_SAFE`.",
        (
            f"{EMULATOR}/test_backward.py::TestCausality"
            "::test_later_tokens_have_exactly_no_influence",
            f"{KERNELS}/test_attention.py::TestCausality::test_of_later_tokens_on_earlier_rows",
        ),
        _influence,
    ),
)

INPUTS = (
    Promise(
        "INT8 specs that round QK alike in both passes give finite results for finite inputs whose "
        "sums stay below [a limit](numerics.md#nan-infinity-and-overflow): regions of zeros, "
        "subnormal numbers, outliers of 6e4, constant keys, rows that attend to nothing.",
        (
            f"{EMULATOR}/test_attention.py::TestNumbers"
            "::test_finite_inputs_of_int8_specs_give_finite_outputs",
            f"{KERNELS}/test_attention.py::TestFinite::test_hard_inputs",
            f"{KERNELS}/test_gpu.py::test_half_precision_inputs_of_6e4_stay_finite",
        ),
        _drawn(
            f"{EMULATOR}/test_attention.py::TestNumbers"
            "::test_finite_inputs_of_int8_specs_give_finite_outputs",
            f"{KERNELS}/test_attention.py::TestFinite::test_hard_inputs",
        ),
    ),
    Promise(
        "A NaN or an infinity in an input reaches the output; no code hides it.",
        (
            f"{EMULATOR}/test_attention.py::TestNumbers::test_nan_and_infinity_reach_the_output",
            f"{KERNELS}/test_attention.py::TestFinite::test_what_is_not_finite_reaches_the_output",
        ),
    ),
    Promise(
        "Emulator and kernels agree where results are finite: a masked entry carries no NaN beyond "
        "its tile, and no scale overflows if the result does not.",
        (
            f"{EMULATOR}/test_attention.py::TestNumbers::test_a_masked_entry_carries_no_nan",
            f"{EMULATOR}/test_attention.py::TestNumbers"
            "::test_large_finite_inputs_give_finite_outputs",
            f"{KERNELS}/test_attention.py::TestFinite"
            "::test_results_are_finite_where_those_of_the_emulator_are",
        ),
    ),
    Promise(
        "Any number of tokens, 0 and 1 included, and different numbers of queries and keys.",
        (
            f"{KERNELS}/test_attention.py::TestShapes::test_lengths",
            f"{KERNELS}/test_attention.py::TestShapes::test_short_and_empty_sequences",
            f"{EMULATOR}/test_attention.py::TestShapes::test_short_and_empty_sequences",
        ),
    ),
    Promise(
        "Head sizes need not be a power of two, and that of V may differ from that of Q and K.",
        (f"{KERNELS}/test_attention.py::TestShapes::test_head_sizes",),
        _head_sizes,
    ),
    Promise(
        "Any other input raises an error that names the value, and no kernel is launched, except "
        "that numbers in tensors on a GPU are not read on the host: `cu_seqlens` that do not fit "
        "end in an assertion on the device, and a larger `seqused_k` counts as the number of keys.",
        (
            f"{KERNELS}/test_support.py::TestRefusals::test_shapes",
            f"{KERNELS}/test_support.py::TestRefusals::test_specs",
            f"{KERNELS}/test_support.py::TestRefusals::test_head_sizes",
            f"{KERNELS}/test_varlen.py::TestRefusals::test_other_shapes",
        ),
    ),
    Promise(
        "A mask as a tensor, dropout or an unknown argument raises; kernels ignore none of them.",
        (
            f"{KERNELS}/test_support.py::TestRefusals::test_masks_and_dropout",
            f"{KERNELS}/test_support.py::TestRefusals::test_unknown_arguments",
        ),
    ),
    Promise(
        "Transposed, sliced, expanded and packed inputs give the bytes of contiguous ones.",
        (
            f"{KERNELS}/test_attention.py::TestStrides::test_of_all_tensors",
            f"{KERNELS}/test_attention.py::TestStrides::test_of_packed_qkv",
            f"{KERNELS}/test_varlen.py::test_strides",
            f"{EMULATOR}/test_attention.py::TestInvariance::test_strides_change_no_byte",
        ),
    ),
    Promise(
        "Strides may exceed 2^31 elements.",
        (
            f"{KERNELS}/test_invariance.py::test_strides_beyond_int32",
            f"{KERNELS}/test_gpu.py::TestBeyondInt32::test_offsets_of_few_tokens",
        ),
    ),
    Promise(
        "Tensors may have more than 2^31 elements.",
        (
            f"{KERNELS}/test_gpu.py::TestBeyondInt32::test_many_heads",
            f"{KERNELS}/test_gpu.py::TestBeyondInt32::test_many_tokens_in_one_packed_batch",
        ),
    ),
    Promise(
        "Inputs are never modified.",
        (
            f"{KERNELS}/test_attention.py::test_inputs_are_never_changed",
            f"{EMULATOR}/test_attention.py::TestInvariance::test_inputs_are_never_changed",
        ),
    ),
    Promise(
        "Padding changes nothing, even if it holds NaN: memory around the tensors, keys that no "
        "query attends to, and queries that attend to no key.",
        (
            f"{KERNELS}/test_attention.py::TestPadding::test_memory_around_the_tokens_is_not_read",
            f"{KERNELS}/test_attention.py::TestPadding::test_keys_beyond_the_last_query",
            f"{KERNELS}/test_attention.py::TestPadding::test_queries_that_attend_to_nothing",
            f"{KERNELS}/hopper/test_in_16_bit.py::test_padded_keys_have_no_influence",
            f"{EMULATOR}/test_padding.py::test_values_in_padding_change_no_byte",
            f"{EMULATOR}/test_options.py::test_nothing_of_padding_reaches_a_result",
        ),
    ),
    Promise(
        "Windows, padded keys, sinks and softcaps are what their definitions say, in every "
        "combination.",
        (
            f"{EMULATOR}/test_options.py::test_emulator_and_exact_meet_the_definition",
            f"{KERNELS}/test_fuzz.py::test_kernels_meet_the_contract",
        ),
    ),
    Promise(
        "The kernels for wide heads on Hopper compute every block with a key that a query attends "
        "to, mask every block with a masked entry, and without a key mask compute no other block; "
        "the tests are of the functions that choose the blocks, as the loops need a GPU.",
        (
            f"{KERNELS}/hopper/test_walks.py"
            "::test_every_visible_entry_is_visited_and_every_other_one_masked",
            f"{KERNELS}/hopper/test_walks.py::test_the_time_is_linear_in_the_window",
        ),
    ),
    Promise(
        "A head gives the same bytes alone and in a batch, except that the last bits of dK and dV "
        "of grouped queries may depend on the number of heads.",
        (
            f"{KERNELS}/test_invariance.py::TestHeads::test_run_alone",
            f"{EMULATOR}/test_attention.py::TestInvariance::test_a_head_alone_gives_the_same_bytes",
        ),
    ),
    Promise(
        "Grouped queries give the O and dQ of repeated keys and values, bit by bit.",
        (
            f"{KERNELS}/test_invariance.py::TestHeads::test_grouped_are_repeated",
            f"{EMULATOR}/test_attention.py::TestInvariance::test_grouped_heads_are_repeated_heads",
        ),
    ),
    Promise(
        "Packed sequences give the bytes that each sequence gives alone.",
        (
            f"{KERNELS}/test_varlen.py::test_is_a_loop_over_sequences",
            f"{KERNELS}/test_varlen.py::test_tiles_of_unequal_sequences_follow_each_other",
            f"{FUZZ}::test_packed_sequences_are_computed_one_by_one",
        ),
    ),
)

GRADIENTS = (
    Promise(
        "Gradients of any subset of q, k and v are those of all three.",
        (
            f"{KERNELS}/test_attention.py::TestGradients::test_of_some_inputs_alone",
            f"{EMULATOR}/test_attention.py::TestGradients::test_gradients_of_some_inputs_alone",
        ),
    ),
    Promise(
        "Gradients flow through the logsumexp.",
        (
            f"{KERNELS}/test_attention.py::TestGradients::test_through_lse",
            f"{KERNELS}/test_attention.py::TestGradients::test_through_lse_alone",
        ),
    ),
    Promise(
        "A second derivative raises instead of dropping a term.",
        (
            f"{KERNELS}/test_attention.py::TestGradients::test_twice_raises",
            f"{EMULATOR}/test_attention.py::TestGradients"
            "::test_differentiating_twice_raises_and_never_drops_a_term",
        ),
    ),
    Promise(
        "A tensor as `scale` raises, because it would get no gradient.",
        (
            f"{KERNELS}/test_support.py::TestRefusals::test_a_scale_that_would_get_no_gradient",
            f"{EMULATOR}/test_attention.py::TestInvalidArguments::test_a_tensor_as_scale",
        ),
    ),
    Promise(
        "Memory kept for the backward is linear in the number of tokens: no map, codes or copies.",
        (
            f"{KERNELS}/test_attention.py::TestGradients"
            "::test_memory_saved_for_the_backward_is_linear_in_the_tokens",
        ),
    ),
)

DETERMINISM = (
    Promise(
        "A call that repeats recorded launches gives the bytes of one that is recorded.",
        (
            f"{KERNELS}/launching/test_plans.py::test_a_repeated_call_computes_what_a_recorded_one_does",
            f"{KERNELS}/launching/test_plans.py::test_slices_of_one_tensor",
        ),
    ),
    Promise(
        "Every run gives the same bytes, backward included.",
        (
            f"{KERNELS}/test_invariance.py::TestRuns::test_repeat",
            f"{KERNELS}/hopper/test_in_16_bit.py::test_repeated_runs_give_the_same_bits",
            f"{KERNELS}/hopper/test_codes.py::test_repeated_runs_give_the_same_bits",
            f"{EMULATOR}/test_attention.py::TestInvariance::test_two_runs_give_the_same_bytes",
        ),
        _repeats,
    ),
    Promise(
        "Every process gives the same bytes.",
        (f"{KERNELS}/test_invariance.py::TestRuns::test_fresh_processes_agree",),
    ),
    Promise(
        "The rows that a portable kernel's program owns, a choice for speed, change no bit.",
        (f"{KERNELS}/test_invariance.py::TestTiles::test_change_nothing",),
    ),
    Promise(
        "Uninitialized memory reaches no result: it is filled with NaN, and no bit changes.",
        (
            f"{KERNELS}/test_invariance.py::TestRuns::test_memory_is_written_before_it_is_read",
            f"{KERNELS}/hopper/test_in_16_bit.py::test_memory_is_written_before_it_is_read",
        ),
    ),
    Promise(
        "Stochastic rounding depends on the seed, the tensor and the element's position only.",
        (
            f"{EMULATOR}/test_rounding.py::TestRandomNumbers"
            "::test_an_elements_number_depends_on_its_position_only",
            f"{KERNELS}/test_invariance.py::TestHeads::test_draw_the_same_random_numbers",
        ),
    ),
    Promise(
        "A pretraining run that is interrupted and resumed gives the bits of an uninterrupted one.",
        (
            f"{PRETRAIN}/training/test_trainer.py::test_resuming_gives_the_same_bits",
            f"{PRETRAIN}/training/test_gpu.py::test_resuming_gives_the_same_bits",
        ),
    ),
)

FRAMEWORKS = (
    Promise(
        "In transformers, `attn_implementation` gives the results of eager attention if the spec "
        "rounds nothing: dense, padded on either side, packed, with windows, and cached.",
        (
            f"{INTEGRATIONS}/test_transformers.py::test_dense",
            f"{INTEGRATIONS}/test_transformers.py::test_padding",
            f"{INTEGRATIONS}/test_transformers.py::test_packed_positions",
            f"{INTEGRATIONS}/test_transformers.py::test_packed_cu_seq_lens",
            f"{INTEGRATIONS}/test_transformers.py::test_cached_decoding",
        ),
    ),
    Promise(
        "In transformers, PyTorch, diffusers and torchtitan, each argument of an attention is "
        "computed or refused by name.",
        (
            f"{INTEGRATIONS}/test_transformers_arguments.py::test_the_tables_name_every_argument",
            f"{INTEGRATIONS}/test_torch.py::test_every_option_is_honoured_or_refused",
            f"{INTEGRATIONS}/test_diffusers.py::test_every_argument_is_honoured_or_refused",
            f"{INTEGRATIONS}/test_torchtitan.py::test_every_argument_is_honoured_or_refused",
        ),
    ),
    Promise(
        "A hub kernel computes each argument that transformers passes to it, or refuses it by "
        "name. transformers drops some before that, such as `output_attentions`.",
        ("tests/test_hub_kernel.py::test_it_declares_every_argument_that_transformers_passes",),
    ),
    Promise(
        "The attention of a pretrained SmolLM2-135M has the errors that `theory.error_budget` "
        "predicts, and the model learns a text as it does with SDPA.",
        (
            f"{INTEGRATIONS}/test_smollm2.py::test_errors_of_the_attention_are_the_error_budget",
            f"{INTEGRATIONS}/test_smollm2.py::test_it_learns_a_text_by_heart_as_with_sdpa",
        ),
    ),
    Promise(
        "DDP and FSDP2 on two processes give the gradients of one process, bit by bit.",
        (
            f"{INTEGRATIONS}/test_two_processes.py"
            "::test_gradients_of_a_batch_in_two_parts_are_their_mean",
            f"{INTEGRATIONS}/test_two_processes.py"
            "::test_adapters_of_a_sharded_flux_get_their_gradients",
        ),
    ),
    Promise(
        "In diffusers, Ulysses on two processes gives the attention of one process, bit by bit.",
        (f"{INTEGRATIONS}/test_two_processes.py::test_ulysses_computes_each_head_of_all_tokens",),
    ),
    Promise(
        "An integration registers nothing when it is imported, and takes back what it registers.",
        (
            f"{INTEGRATIONS}/test_transformers.py"
            "::test_importing_registers_nothing_and_needs_no_triton",
            f"{INTEGRATIONS}/test_transformers.py::test_unregister_puts_back_what_was",
            f"{INTEGRATIONS}/test_diffusers.py::test_unregister_puts_back_what_was",
            f"{INTEGRATIONS}/test_torch.py"
            "::test_apply_changes_the_chosen_modules_alone_and_remove_puts_back",
        ),
    ),
    Promise(
        "A copy of a PyTorch model whose attention is replaced, by deepcopy or `torch.save`, "
        "computes with its own weights.",
        (f"{INTEGRATIONS}/test_torch.py::test_a_copy_computes_with_its_own_weights",),
    ),
    Promise(
        "Ring attention over parts of the keys is as accurate as attention of all keys.",
        (
            f"{INTEGRATIONS}/test_torch_flash.py::test_ring_attention",
            f"{INTEGRATIONS}/test_two_processes.py"
            "::test_ring_attention_is_as_accurate_as_that_of_one_process",
        ),
    ),
    Promise(
        "Selective checkpointing by the names of operators computes the forward once.",
        (
            f"{KERNELS}/test_torch_compile.py"
            "::test_selective_checkpointing_computes_the_forward_once",
        ),
    ),
    Promise(
        "In diffusers, a model's backend leaves other models alone.",
        (f"{INTEGRATIONS}/test_diffusers.py::test_other_models_keep_their_attention",),
    ),
    Promise(
        "`torch.compile(fullgraph=True)` gives the bytes of eager mode.",
        (
            f"{KERNELS}/test_torch_compile.py::TestCompiled::test_whole_graphs_give_the_bytes_of_eager",
        ),
    ),
    Promise(
        "Ten lengths take at most two compilations; so do ten batches of packed sequences.",
        (
            f"{KERNELS}/test_torch_compile.py::TestCompiled::test_at_most_two_compilations_for_ten_lengths",
            f"{KERNELS}/test_torch_compile.py::TestCompiled"
            "::test_at_most_two_compilations_for_ten_batches_of_packed_sequences",
        ),
    ),
    Promise(
        "The operators pass all four tests of `torch.library.opcheck`.",
        (
            f"{KERNELS}/test_torch_compile.py::TestOperators::test_forward",
            f"{KERNELS}/test_torch_compile.py::TestOperators::test_backward",
        ),
    ),
    Promise(
        "Under autocast the kernels cast as SDPA does.",
        (
            f"{KERNELS}/test_torch_compile.py::TestAutocast::test_casts_as_sdpa_does",
            f"{EMULATOR}/test_attention.py::TestCallersSettings::test_autocast_casts_as_sdpa_does",
        ),
    ),
    Promise(
        "Activation checkpointing changes no bit.",
        (
            f"{KERNELS}/test_torch_compile.py::test_checkpointing_is_bit_equal",
            f"{KERNELS}/test_gpu.py::test_checkpointing_under_autocast_is_bit_equal",
        ),
    ),
    Promise(
        "The replay of a CUDA graph gives the bytes of eager mode on new inputs.",
        (f"{KERNELS}/test_gpu.py::TestGraphs::test_a_replay_is_eager_on_new_inputs",),
    ),
    Promise(
        "Kernels run on the caller's stream and on the device of the inputs, and never wait for "
        "the device.",
        (
            f"{KERNELS}/test_gpu.py::TestGraphs::test_a_side_stream",
            f"{KERNELS}/test_gpu.py::TestGraphs::test_a_device_that_is_not_the_current_one",
            f"{KERNELS}/test_gpu.py::TestGraphs::test_nothing_waits_for_the_device",
        ),
    ),
    Promise(
        "A model under `sagesim.emulate` computes what it would with calls of `sagesim.attention`.",
        (
            f"{MODELS}/test_emulate.py::test_a_model_computes_what_it_would_with_sagesim_attention",
            f"{MODELS}/test_emulate.py::TestTransformers::test_a_transformers_model_gives_the_same_bytes",
        ),
    ),
    Promise(
        "A model under `sagesim.capture` computes the bytes that it computes without.",
        (f"{MODELS}/test_capture.py::test_a_model_computes_the_same_bytes",),
    ),
    Promise(
        "Pretraining on two processes, with DDP or FSDP2, gives the losses of one process.",
        (f"{PRETRAIN}/training/test_distributed.py::test_two_processes_train_as_one",),
    ),
)

GPUS = (
    Promise(
        "The kernels compile for these GPUs, each with the oldest or the newest supported Triton, "
        "and the products that a spec sets to INT8 are INT8 instructions.",
        (f"{COMPILED}::test_int8_products_are_int8_instructions",),
        _capabilities,
    ),
    Promise(
        "On Hopper, the main loops spill few registers at head sizes 64 and 128.",
        (f"{COMPILED}::test_the_loop_spills_nothing",),
        _spills,
    ),
    Promise(
        "On Hopper, the main loops for head sizes above 128 spill no register, and their products "
        "have the formats of the spec.",
        (f"{COMPILED}::test_kernels_of_wide_heads_multiply_as_declared",),
    ),
    Promise(
        "Results of the kernels for Hopper and for `mma.sync` are as exact as the emulator's.",
        (
            f"{KERNELS}/hopper/test_on_cpu.py::test_results_are_as_exact_as_the_emulators",
            f"{KERNELS}/hopper/test_on_cpu.py::test_masks_and_sinks",
            f"{KERNELS}/ampere/test_on_cpu.py::test_results_are_as_exact_as_the_emulators",
            f"{KERNELS}/ampere/test_on_cpu.py::test_masks_and_sinks",
        ),
    ),
    Promise(
        "Hopper's own kernels meet the same contract as the portable ones.",
        (
            f"{KERNELS}/hopper/test_in_16_bit.py::test_kernels_meet_the_contract",
            f"{KERNELS}/hopper/test_in_16_bit.py::test_any_problem_meets_the_contract",
            f"{KERNELS}/hopper/test_in_16_bit.py::test_any_extras_meet_the_contract",
            f"{KERNELS}/hopper/test_in_16_bit.py::test_sinks_meet_the_contract",
            f"{KERNELS}/hopper/test_in_16_bit.py::test_unequal_head_sizes_meet_the_contract",
            f"{KERNELS}/hopper/test_codes.py::test_gradients_meet_the_contract",
            f"{KERNELS}/hopper/test_codes.py::test_any_problem_meets_the_contract",
        ),
    ),
    Promise(
        "The emulator gives the same codes and scales on a GPU and on a CPU.",
        ("tests/sagesim/test_gpu.py::test_codes_and_scales_agree_with_the_cpu",),
    ),
)

INSTALLATION = (
    Promise(
        "Importing `sagesim_kernels` changes no setting, no environment variable and no random "
        "generator, and does not initialize CUDA.",
        (f"{KERNELS}/test_invariance.py::test_importing_touches_nothing",),
    ),
    Promise(
        "An optional package that is missing is a message of one line with the `pip` command.",
        ("tests/sagesim/cli/test_cli.py::test_a_missing_package_prints_one_line",),
    ),
    Promise(
        "`sagesim capture` does not unpickle weights.",
        ("tests/sagesim/cli/test_cli.py::test_capture_refuses_pickled_weights",),
    ),
    Promise(
        "A report loads nothing from outside its file and runs no script.",
        ("tests/sagesim/analysis/test_report.py::test_nothing_is_loaded_from_outside",),
    ),
)

FILES = (
    Promise(
        "A write that fails, as on a full disk, leaves the earlier file and no other.",
        (
            f"{FILES_TESTS}::test_a_full_disk_leaves_the_earlier_file_and_no_other",
            f"{CLI}::test_a_full_disk_ends_every_command_with_one_line",
            f"{PRETRAIN}/test_command.py::test_a_full_disk_ends_every_command_with_one_line",
            f"{MODELS}/test_capture.py::TestFile::test_a_failed_save_leaves_the_old_file",
        ),
    ),
    Promise(
        "A process that is killed leaves the earlier file, and the next write removes its remains.",
        (
            f"{FILES_TESTS}::test_a_killed_process_leaves_the_earlier_file_and_blocks_nothing",
            f"{PRETRAIN}/training/test_trainer.py"
            "::test_a_process_killed_while_writing_a_checkpoint_resumes",
        ),
    ),
    Promise(
        "A file can be read while another process replaces it.",
        (f"{SWEEP}::test_a_file_can_be_read_while_it_is_replaced",),
    ),
    Promise(
        "Sweeps that write to one file at the same time all keep their rows.",
        (
            f"{SWEEP}::test_sweeps_into_one_file_at_the_same_time_keep_all_rows",
            f"{SWEEP}::test_two_processes_sweep_into_one_file",
        ),
    ),
    Promise(
        "An output that is an input of the command is refused, also by another name.",
        (
            f"{CLI}::test_an_output_that_is_an_input_is_refused",
            f"{PRETRAIN}/test_command.py::test_an_output_that_is_an_input_is_refused",
        ),
    ),
    Promise(
        "After Ctrl-C a pretraining run finishes its step and saves it, in all its processes.",
        (
            f"{PRETRAIN}/test_command.py"
            "::test_ctrl_c_finishes_the_step_and_the_same_command_resumes",
            f"{PRETRAIN}/training/test_distributed.py"
            "::test_all_processes_stop_at_the_same_step_if_one_is_interrupted",
        ),
    ),
    Promise(
        "If a machine of a cluster is killed, each run of a plan still ends once, with the losses "
        "of a run that nobody killed.",
        (
            f"{PRETRAIN}/plan/test_cluster.py"
            "::test_a_run_of_a_killed_node_continues_from_its_checkpoint",
        ),
    ),
    Promise(
        "If a machine of a cluster is killed, a sweep still has each of its rows once, and only "
        "the row that the machine was computing is computed again.",
        (
            f"{PRETRAIN}/plan/test_cluster.py"
            "::test_a_sweep_whose_node_is_killed_has_the_rows_of_one_without_a_cluster",
        ),
    ),
)

GROUPS = {
    "promises_numbers": NUMBERS,
    "promises_inputs": INPUTS,
    "promises_gradients": GRADIENTS,
    "promises_determinism": DETERMINISM,
    "promises_files": FILES,
    "promises_frameworks": FRAMEWORKS,
    "promises_gpus": GPUS,
    "promises_installation": INSTALLATION,
}
"""The promises by the mark in docs/promises.md."""


def every() -> Iterator[Promise]:
    """All promises."""
    for promises in GROUPS.values():
        yield from promises


def listed(promises: tuple[Promise, ...]) -> str:
    """The promises as a list in Markdown, each with its tests, where they run, and its figure."""
    return "\n".join(map(_item, promises))


def _item(promise: Promise) -> str:
    where = sorted(set[str]().union(*map(devices, promise.tests)))
    place = "**only on a GPU**" if where == ["GPU"] else " and ".join(f"on a {x}" for x in where)
    figure = promise.figure()
    tests = ", ".join(f"`{test}`" for test in promise.tests)
    return f"- **{promise.text}**{f' {figure}.' if figure else ''}\n  Checked {place} by {tests}."
