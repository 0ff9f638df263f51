"""Which tests run again on the simulated link or on a GPU, and under which settings; see test_sim.py."""

import os

AUTOGRAD = [
    "test_autograd.py",
    "test_autograd_operations.py",
    "test_hooks.py",
    "test_saved_tensors.py",
    "test_saved_activations.py",
    "test_saved_modules.py",
    "test_saved_regions.py",
    "test_saved_slices.py",
    "test_saved_programs.py",
    "test_saved_automatic.py",
    "test_second_order.py",
    "test_custom_functions.py",
    "test_threads_streams.py",
]
EVERYTHING = [
    "test_linear.py",
    "test_conv.py",
    "test_copy.py",
    *AUTOGRAD,
    "test_placement.py",
    "test_placement_zero_dim.py",
    "test_placement_memory.py",
    "test_placement_movements.py",
    "test_placement_births.py",
    "test_views_storage.py",
    "test_factories.py",
    "test_optim.py",
    "test_optim_closures.py",
    "test_modules.py",
    "test_recurrent.py",
    "test_serialization.py",
    "test_checkpointing.py",
    "test_autocast.py",
    "test_autocast_copies.py",
    "test_inference.py",
    "test_functorch.py",
    "test_device_index.py",
    "test_device_module.py",
    "test_random_programs.py",
    "test_scopes.py",
    "test_sparse.py",
    "test_sparse_gradients.py",
    "test_sparse_writes.py",
    "test_flops.py",
]
# What takes the place of PyTorch's own: kernels, subclasses, generators.
REPLACED = [
    "test_bitsandbytes.py",
    "test_composites.py",
    "test_gpu_steps.py",
    "test_host_updates.py",
    "test_jiterator.py",
    "test_layouts.py",
    "test_library.py",
    "test_lookups.py",
    "test_optimizer_steps.py",
    "test_quantized.py",
    "test_random_numbers.py",
    "test_torchao.py",
    "test_triton_launch.py",
]
COMPILED = [
    "test_compile_memory.py",
    "test_compile_moves.py",
    "test_compile_operations.py",
    "test_compile_outputs.py",
    "test_compile_writes.py",
    # The slowest, which asks whether code compiles.
    "--deselect=tests/python/test_compile_operations.py::test_generated_code_may_be_cpp",
]
COMPILED_STEPS = [
    "test_compile_dynamic.py",
    "test_compile_lookups.py",
    "test_compile_optimizers.py",
    "test_saved_compiled.py",
]
COMPILED_FEATURES = [
    "test_compile_device.py",
    "test_compile_export.py",
    "test_compile_higher_order.py",
    "test_compile_kernels.py",
    "test_compile_random_programs.py",
    "test_compile_variants.py",
]
COMPILED_MODELS = [
    "test_compile.py",
    # Processes of their own.
    *[
        f"--deselect=tests/python/test_compile.py::test_another_inductor_is_{what}"
        for what in ("refused", "no_concern_of_others")
    ],
    "--deselect=tests/python/test_compile.py::test_other_partitioners_are_refused",
]
# Files, records and other processes; of the tests that start some, those that a cache could get wrong.
SHARING = ["writes_between_forwards", "writes_of_a_child", "writes_of_a_child_into_a_result", "results_of_a_child"]
OUTSIDE = [
    "test_file_backed.py",
    "test_host_jobs.py",
    "test_load.py",
    "test_load_errors.py",
    "test_load_torch.py",
    "test_load_torch_errors.py",
    "test_memory_snapshot.py",
    "test_pickle.py",
    "test_purposes.py",
    "test_trace.py",
    *[f"test_sharing.py::test_spawned[{scenario}]" for scenario in SHARING],
    "test_sharing.py::test_fork_beside_a_device",
    "test_fork.py",
]
# What needs a cache, and orders and budgets under which most of it happens.
CACHE = ["test_budget.py", "test_changing_order.py", "test_long_runs.py", "test_settings.py"]
VALIDATE = {"TORCH_OFFLOAD_VALIDATE": "1"}
COMPILING = {"TORCH_OFFLOAD_POISON": "1", "OMP_NUM_THREADS": "1"}
# Where the order of copies matters most.
ORDER = [
    "test_random_programs.py",
    *AUTOGRAD,
    "test_modules.py",
    "test_recurrent.py",
    "test_checkpointing.py",
    "test_inference.py",
    "test_views_storage.py",
    "test_sparse_gradients.py",
    "test_sparse_writes.py",
]

TWO_DEVICES = [
    "test_two_devices.py",
    "test_two_devices_current.py",
    "test_two_devices_files.py",
    "test_random_programs.py",
    "test_saved_automatic.py",
]

RUNS = {
    "budgets and orders": (CACHE, {"TORCH_OFFLOAD_SEED": "9", "TORCH_OFFLOAD_POISON": "1", **VALIDATE}),
    "late copies": (AUTOGRAD, {"TORCH_OFFLOAD_SEED": "10", "TORCH_OFFLOAD_COPY_DELAY_US": "100", **VALIDATE}),
    "everything": (EVERYTHING, {"TORCH_OFFLOAD_SEED": "1", "TORCH_OFFLOAD_POISON": "1"}),
    "what is replaced": (REPLACED, {"TORCH_OFFLOAD_SEED": "12", "TORCH_OFFLOAD_POISON": "1", "OMP_NUM_THREADS": "1"}),
    "compiled": (COMPILED, {"TORCH_OFFLOAD_SEED": "17", **COMPILING}),
    "compiled steps": (COMPILED_STEPS, {"TORCH_OFFLOAD_SEED": "12", **COMPILING}),
    "compiled features": (COMPILED_FEATURES, {"TORCH_OFFLOAD_SEED": "19", **COMPILING}),
    "compiled models": (COMPILED_MODELS, {"TORCH_OFFLOAD_SEED": "18", **COMPILING}),
    "files and processes": (OUTSIDE, {"TORCH_OFFLOAD_SEED": "15", "TORCH_OFFLOAD_POISON": "1", "OMP_NUM_THREADS": "1"}),
    "evict at once": (
        [*ORDER, "test_optim.py"],
        {
            **VALIDATE,
            "TORCH_OFFLOAD_SEED": "2",
            "TORCH_OFFLOAD_POISON": "1",
            "TORCH_OFFLOAD_EVICT": "1",
            "TORCH_OFFLOAD_BUDGET": "0",
        },
    ),
    "ring of 512 bytes": (
        ORDER,
        {
            **VALIDATE,
            "TORCH_OFFLOAD_SEED": "3",
            "TORCH_OFFLOAD_POISON": "1",
            "TORCH_OFFLOAD_RING_BYTES": "512",
            "TORCH_OFFLOAD_BUDGET": "0",
        },
    ),
    "memory that is not pinned": (
        ORDER,
        {"TORCH_OFFLOAD_SEED": "8", "TORCH_OFFLOAD_POISON": "1", "TORCH_OFFLOAD_PINNED_LIMIT": "0", **VALIDATE},
    ),
    "another order": (
        ORDER,
        {**VALIDATE, "TORCH_OFFLOAD_SEED": "4", "TORCH_OFFLOAD_RING_BYTES": "4096", "TORCH_OFFLOAD_BUDGET": "2048"},
    ),
    "a third order": (ORDER, {"TORCH_OFFLOAD_SEED": "5", "TORCH_OFFLOAD_EVICT": "1", "TORCH_OFFLOAD_BUDGET": "512"}),
    "host work by a thread": (
        [
            "test_autocast_copies.py",
            "test_host_jobs.py",
            "test_host_updates.py",
            "test_optim.py",
            "test_optimizer_steps.py",
            "test_budget.py",
            "test_trace.py",
        ],
        {
            "TORCH_OFFLOAD_SEED": "16",
            "TORCH_OFFLOAD_HOST_JOBS": "soon",
            "TORCH_OFFLOAD_COPY_DELAY_US": "100",
            **VALIDATE,
        },
    ),
    "two devices": (
        TWO_DEVICES,
        {**VALIDATE, "TORCH_OFFLOAD_SEED": "12", "TORCH_OFFLOAD_SIM_DEVICES": "2", "TORCH_OFFLOAD_POISON": "1"},
    ),
    "three devices, late copies": (
        TWO_DEVICES,
        {"TORCH_OFFLOAD_SEED": "13", "TORCH_OFFLOAD_SIM_DEVICES": "3", "TORCH_OFFLOAD_COPY_DELAY_US": "100"},
    ),
    "two devices, memory that is not pinned": (
        TWO_DEVICES,
        {"TORCH_OFFLOAD_SEED": "14", "TORCH_OFFLOAD_SIM_DEVICES": "2", "TORCH_OFFLOAD_PINNED_LIMIT": "0", **VALIDATE},
    ),
    "nothing ahead": (ORDER, {**VALIDATE, "TORCH_OFFLOAD_SEED": "11", "TORCH_OFFLOAD_PREFETCH": "0"}),
    "a fourth order": (ORDER, {"TORCH_OFFLOAD_SEED": "6", "TORCH_OFFLOAD_POISON": "1", "TORCH_OFFLOAD_BUDGET": "0"}),
    "a seed from outside": (ORDER, {"TORCH_OFFLOAD_SEED": os.environ.get("TORCH_OFFLOAD_SEED", "7")}),
}
# With the newest torch, too: first what depends most on torch, and what else does where there is time.
EACH_TORCH = {"everything", "what is replaced", "compiled steps", "compiled models"}
LATER = {"compiled", "compiled features", "files and processes", "evict at once", "two devices"}
# Other seeds, and other settings, for what the others run; and what takes long.
EXTRA = {
    "compiled features",
    "a third order",
    "a fourth order",
    "a seed from outside",
    "three devices, late copies",
    "two devices, memory that is not pinned",
}
# Files that compile as much without a link, in minutes, though there is neither a cache nor a copy that could be wrong.
WITHOUT_A_LINK = [*COMPILED, *COMPILED_STEPS, *COMPILED_FEATURES, *COMPILED_MODELS]

# The same files on a GPU, where copies can be late and free memory can be poisoned as well.
GPU_RUNS = {
    "every call is followed by a walk of all invariants": ([*ORDER, *CACHE], VALIDATE),
    "late copies": (ORDER, {"TORCH_OFFLOAD_COPY_DELAY_US": "2000", "TORCH_OFFLOAD_POISON": "1"}),
    "late copies without a budget": (
        ORDER,
        {"TORCH_OFFLOAD_COPY_DELAY_US": "2000", "TORCH_OFFLOAD_POISON": "1", "TORCH_OFFLOAD_BUDGET": "0"},
    ),
    "evict at once": ([*ORDER, "test_optim.py"], {"TORCH_OFFLOAD_POISON": "1", "TORCH_OFFLOAD_EVICT": "1"}),
    "ring of 512 bytes": (
        ORDER,
        {"TORCH_OFFLOAD_POISON": "1", "TORCH_OFFLOAD_RING_BYTES": "512", "TORCH_OFFLOAD_BUDGET": "1024"},
    ),
    "memory that is not pinned": (ORDER, {"TORCH_OFFLOAD_POISON": "1", "TORCH_OFFLOAD_PINNED_LIMIT": "0"}),
    "graphs, late copies": (
        ["test_graphs.py", "test_compile_graphs.py"],
        {"TORCH_OFFLOAD_COPY_DELAY_US": "300", "TORCH_OFFLOAD_POISON": "1"},
    ),
}
