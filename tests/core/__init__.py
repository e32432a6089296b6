"""The ranks of a world, tested as users see them: by what a program does, along every path that its bytes can take.

What parts promise to each other is tested in `tests/runtime`, and what differs in virtual time in `tests/virtual`.
"""

# Where to look first for the tests of a file of overlap/runtime or overlap/remote.
TESTS = {
    "runtime/any_source": "core/test_any_source",
    "runtime/arguments": "core/test_bad_input core/test_misuse",
    "runtime/backend": "core/test_virtual_clock virtual/test_one_truth",
    "runtime/calls": "core/test_collectives core/test_uneven core/test_bad_input core/test_point_to_point",
    "runtime/communicator": "core/test_mismatch core/test_leaving core/test_culprits",
    "runtime/compute": "core/test_compute core/test_lent_arguments",
    "runtime/context": "core/test_culprits core/test_failure",
    "runtime/ending": "core/test_failure core/test_leaving",
    "runtime/engine/cc_core": "core/test_streams core/test_cancellation collectives/test_program",
    "runtime/engine/compiler": "plan/test_compiler",
    "runtime/engine/program_runner": "core/test_collectives core/test_streams",
    "runtime/engine/real_engine": "core/test_collectives core/test_culprits",
    "runtime/engine/shared_memory": "core/test_collectives core/test_bits",
    "runtime/engine/workers": "runtime/test_workers runtime/test_narrow",
    "runtime/future": "core/test_futures core/test_threads",
    "runtime/group": "core/test_groups",
    "runtime/interpreter": "runtime/test_interpreter",
    "runtime/issuing": "core/test_bad_input core/test_threads",
    "runtime/match": "core/test_mismatch core/test_any_source",
    "runtime/memory/buffer_locks": "runtime/test_buffer_locks core/test_arrays_in_flight",
    "runtime/memory/buffer_pool": "runtime/test_buffer_pool core/test_memory",
    "runtime/memory/foreign": "core/test_foreign_arrays core/test_tensors",
    "runtime/memory/lent_arguments": "runtime/test_lent_arguments core/test_lent_arguments",
    "runtime/mesh": "core/test_groups",
    "runtime/operation": "core/test_arrays_in_flight core/test_cancellation core/test_futures",
    "runtime/outstanding": "core/test_failure core/test_futures",
    "runtime/rank": "core/test_compute core/test_memory core/test_bad_input",
    "runtime/shapes": "virtual/test_world_shapes",
    "runtime/stream": "core/test_streams",
    "runtime/world": "core/test_failure core/test_leaving core/test_stall core/test_traces",
    "remote/call_codec": "core/test_uneven core/test_remote",
    "remote/communicators": "core/test_any_source core/test_remote",
    "remote/control_plane": "core/test_remote core/test_stall",
    "remote/spanning": "core/test_remote core/test_fan_out",
}
