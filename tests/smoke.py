"""The fast subset, `pytest -m smoke`: of each feature one test in eager code and one compiled, in under 90 seconds.

A line is a file (all of its tests) or a test, relative to this folder.
"""

SMOKE = (
    "unit/test_config.py",
    "unit/test_plan.py",
    "unit/test_rooms.py",
    "dist/training/test_parity.py::test_sgd_equals_ddp[eager-1-2-1]",
    "dist/training/test_parity.py::test_sgd_equals_ddp[eager-3-2-1]",
    "dist/training/test_parity.py::test_sgd_equals_ddp[aot_eager-1-2-1]",
    "dist/training/test_parity.py::test_sgd_equals_ddp[aot_eager-3-2-1]",
    "dist/window/test_coalesce.py::test_window_reduces_once[eager-1]",
    "dist/window/test_coalesce.py::test_window_reduces_once[aot_eager-3]",
    "dist/training/test_graph_breaks.py::test_frame[plain]",
    "dist/training/test_graph_breaks.py::test_frame[graph break]",
    "dist/checkpoint/test_checkpoint.py::test_resume_equals_an_uninterrupted_run[1-options0-32-true]",
    "dist/checkpoint/test_checkpoint.py::test_resume_equals_an_uninterrupted_run[3-options1-32-true]",
    "dist/optim/test_failed_steps.py::test_a_step_that_raises[raw-1]",
    "dist/optim/test_failed_steps.py::test_a_step_that_raises[through lightning-3]",
    "dist/optim/test_in_backward.py::test_units_are_updated_beside_the_backward[3-blocks]",
    "dist/optim/test_in_backward.py::test_a_backward_that_raises_half_way[1]",
    "dist/training/test_full_parameters.py::test_what_is_written_inside",
    "dist/user_code/test_after_fit.py::test_parameters_have_their_dtypes_again[1-False]",
    "dist/user_code/test_after_fit.py::test_parameters_have_their_dtypes_again[3-blocks]",
    "dist/failure/test_teardown.py::test_one_process_is_whole_after_an_exception[3]",
)


def is_smoke(node: str) -> bool:
    """Whether the subset has the test with this id, such as ``tests/unit/test_config.py::test_defaults``."""
    inside = node.partition("tests/")[2]
    return inside in SMOKE or inside.partition("::")[0] in SMOKE
