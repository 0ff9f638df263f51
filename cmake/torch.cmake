# offload_torch: torch's headers and libraries, and Python's headers.
#
# find_package(Torch) is not used: for a CUDA build of torch it demands an installed CUDA toolkit with its compiler, which this
# project does not need, and it adds compile flags of its own.
if(NOT PY_TORCH_DIR)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch")
endif()
if(with_cuda AND NOT PY_TORCH_CUDA)
  message(FATAL_ERROR "OFFLOAD_CUDA is ON, but torch ${PY_TORCH_VERSION} was built without CUDA")
endif()

set(libraries torch_python torch torch_cpu c10)
if(with_cuda)
  list(APPEND libraries torch_cuda c10_cuda)
endif()
list(TRANSFORM libraries REPLACE "(.+)" "${PY_TORCH_DIR}/lib/lib\\1.so")

# An imported target's include folders count as system headers, so our warnings stay out of them.
add_library(offload_torch INTERFACE IMPORTED)
target_include_directories(offload_torch INTERFACE
  ${PY_TORCH_DIR}/include ${PY_TORCH_DIR}/include/torch/csrc/api/include ${PY_INCLUDE_DIR})
target_link_libraries(offload_torch INTERFACE ${libraries})
message(STATUS "torch: ${PY_TORCH_VERSION} in ${PY_TORCH_DIR}")
