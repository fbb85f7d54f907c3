"""Families of tests that take long together: `make test` runs some of their cases, `make test-all` all of them.

A family is a parametrized test. Of each family named here, one case in n stays fast, evenly over the order of
collection. Of other large ones that test a package, about a third of the cases do. The rest are marked as slow. The
same cases run every time. Whoever adds an entry to a table runs all cases of it once, with ``pytest -k NAME``.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable

import pytest

# Family -> one case in so many is fast.
EVERY = {
    "accidents/test_modes.py::test_a_model_with_its_parameters_restored_works_again": 3,
    "accidents/test_modes.py::test_a_query_changes_neither_the_model_nor_the_state_of_torch": 3,
    "accidents/test_modes.py::test_autocast_within_a_model_is_off_for_its_posterior": 5,
    "accidents/test_modes.py::test_inputs_and_models_of_inference_mode_are_accepted": 3,
    "accidents/test_modes.py::test_no_mode_of_torch_or_of_the_model_changes_a_prediction": 6,
    "accidents/test_modes.py::test_parametrizations_are_not_those_of_an_earlier_call": 3,
    "baselines/test_contract.py::test_every_score_is_one_number_per_input": 3,
    "baselines/test_contract.py::test_predictions_have_one_shape": 3,
    "baselines/test_inputs.py::test_inputs_that_the_network_cannot_take_are_compared_with_the_training_inputs": 3,
    "baselines/test_surroundings.py::test_the_batch_size_does_not_matter": 3,
    "baselines/test_surroundings.py::test_the_seed_determines_the_samples": 3,
    "benchmarks/test_cases.py::test_published_algorithm_tends_to_the_exact_projection": 2,
    "compatibility/test_models.py::test_a_default_fit_keeps_the_promise": 8,
    "compatibility/test_models.py::test_route_is_the_one_in_the_table": 3,
    "compatibility/test_models.py::test_rows_and_predictions_are_those_of_slow_derivatives": 5,
    "compatibility/test_models.py::test_scores_are_positive_files_reload_and_the_model_is_unchanged": 6,
    "decisions/test_answers.py::test_a_set_holds_the_labels_that_are_probable_enough": 2,
    "decisions/test_calibrate.py::test_calibrating_with_the_data_that_tuned_warns": 4,
    "decisions/test_held_out.py::test_the_size_of_batches_does_not_matter": 2,
    "decisions/test_methods.py::test_a_file_and_a_copy_decide_alike": 6,
    "decisions/test_methods.py::test_an_altered_calibration_is_refused": 6,
    "decisions/test_methods.py::test_every_method_can_be_calibrated_by_the_combined_score": 6,
    "decisions/test_methods.py::test_every_method_decides": 5,
    "decisions/test_methods.py::test_every_method_has_label_sets_or_says_why_not": 5,
    "decisions/test_weights.py::test_weights_are_those_of_another_method": 3,
    "jacobian/test_finite.py::test_a_fit_names_the_batch_and_the_example_with_nan_derivatives": 4,
    "jacobian/test_rows.py::test_gram_matrix_by_products_does_not_depend_on_how_much_is_held": 2,
    "jacobian/test_rows.py::test_loss_rows_are_the_gradients_of_the_losses": 5,
    "jacobian/test_rows.py::test_output_rows_are_the_derivatives_of_the_outputs": 5,
    "jacobian/test_rows.py::test_rows_do_not_depend_on_how_much_is_formed_at_a_time": 3,
    "jacobian/test_rows.py::test_the_model_is_left_as_it_was": 5,
    "linalg/test_held.py::test_block_formed_in_parts_is_the_block": 5,
    "posteriors/test_extend_out_of_memory.py::test_a_failed_extension_keeps_the_earlier_samples": 2,
    "posteriors/test_extend_out_of_memory.py::test_extend_recovers_from_a_failed_allocation": 2,
    "posteriors/test_memory.py::test_fit_keeps_to_its_limit_and_to_its_plan": 2,
    "posteriors/test_out_of_memory.py::test_allocations_that_fail_do_not_end_a_fit": 3,
    "posteriors/test_out_of_memory.py::test_predictions_continue_with_half_of_the_inputs": 2,
    "posteriors/test_out_of_memory.py::test_rows_are_formed_in_halves_where_memory_runs_out": 2,
    "posteriors/test_out_of_memory.py::test_too_little_memory_gives_a_smaller_fit_or_an_error_with_advice": 5,
    "posteriors/test_promise.py::test_a_default_fit_predicts_its_training_data_as_the_network_does": 6,
    "posteriors/test_resume.py::test_a_killed_fit_resumes_bit_for_bit": 8,
    "posteriors/test_tuning.py::test_a_tuned_posterior_comes_back_from_a_file": 3,
    "posteriors/test_tuning.py::test_the_temperature_may_be_set": 3,
    "posteriors/test_tuning.py::test_tuned_predictions_are_no_worse_than_temperature_scaling": 7,
    "posteriors/test_variances.py::test_exact_variances_match_the_map_that_the_samples_went_through": 2,
    "projectors/test_contract.py::test_a_batch_of_samples_gives_what_a_loop_gives": 3,
    "projectors/test_contract.py::test_projections_have_the_right_shapes_and_dtypes": 4,
    "projectors/test_contract.py::test_state_can_be_reused_and_nothing_is_overwritten": 3,
    "projectors/test_convergence.py::test_krylov_beyond_convergence_does_not_change_the_part_in_the_null_space": 4,
    "projectors/test_convergence.py::test_larger_blocks_need_fewer_sweeps": 5,
    "projectors/test_precisions.py::test_float32_residuals_are_honest": 3,
    "projectors/test_precisions.py::test_many_rows_with_few_directions_leave_the_null_space_as_it_is": 4,
    "projectors/test_properties.py::test_length_of_rows_does_not_matter": 2,
    "projectors/test_resume.py::test_resuming_after_every_interruption_gives_the_same_result": 6,
    "projectors/test_traces.py::test_estimate_of_the_trace_is_unbiased_and_never_above_the_size": 5,
    "test_default_device.py::test_posterior_is_on_the_device_of_its_model": 3,
    "test_default_device.py::test_rows_are_on_the_device_of_their_model": 6,
    "test_tutorials.py::test_a_tutorial_runs_and_decides": 6,
}


# Cases are counted by this share of a turn, not one by one: every third case of a table of six tasks would have the
# same two tasks for all methods, and the others would never run.
TURN = (5**0.5 - 1) / 2
LARGE = 20  # cases of a family from which on a third of them are fast


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves out."""
    families = [(item, item.nodeid.partition("[")[0].removeprefix("tests/")) for item in items]
    sizes, seen = Counter(family for _, family in families), Counter[str]()
    for item, family in families:
        if family in EVERY:
            left_out = seen[family] * TURN % 1.0 >= 1.0 / EVERY[family]
            seen[family] += 1
        else:  # by their names, because every other one might have the same parameter
            large = sizes[family] >= LARGE and "/" in family
            left_out = large and bool(zlib.crc32(item.nodeid.encode()) % 3)
        if left_out:
            item.add_marker(pytest.mark.slow)
