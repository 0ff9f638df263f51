# offload_cudart: CUDA's runtime headers and library, from the wheels that torch depends on, else from an installed toolkit.
set(toolkit_includes $ENV{CUDA_HOME}/include /usr/local/cuda/include)

# cuda_runtime_api.h needs headers that are a wheel of their own, nvidia-cuda-crt, which torch does not ask for.
find_path(runtime_include cuda_runtime_api.h PATHS ${PY_CUDA_INCLUDE_DIRS} ${toolkit_includes} NO_DEFAULT_PATH NO_CACHE)
find_path(crt_include crt/host_defines.h PATHS ${PY_CUDA_INCLUDE_DIRS} ${toolkit_includes} NO_DEFAULT_PATH NO_CACHE)
list(APPEND PY_CUDART $ENV{CUDA_HOME}/lib64/libcudart.so /usr/local/cuda/lib64/libcudart.so)
foreach(candidate ${PY_CUDART})
  if(EXISTS ${candidate})
    set(cudart ${candidate})
    break()
  endif()
endforeach()
if(NOT (runtime_include AND crt_include AND cudart))
  message(FATAL_ERROR
    "CUDA's headers or runtime library are missing (cuda_runtime_api.h: ${runtime_include}, crt/host_defines.h: ${crt_include}, "
    "libcudart: ${cudart}). Install them with `pip install 'cuda-toolkit[cudart,crt,cccl]'`, or set CUDA_HOME to a toolkit, "
    "or build without CUDA by -DOFFLOAD_CUDA=OFF.")
endif()

set(includes ${PY_CUDA_INCLUDE_DIRS} ${runtime_include} ${crt_include})
# nv/target, which CUDA's half-precision headers include, has a folder of its own since CUDA 13.
foreach(dir ${includes})
  if(EXISTS ${dir}/cccl)
    list(APPEND includes ${dir}/cccl)
  endif()
endforeach()
list(REMOVE_DUPLICATES includes)

add_library(offload_cudart SHARED IMPORTED)
set_target_properties(offload_cudart PROPERTIES IMPORTED_LOCATION ${cudart} INTERFACE_INCLUDE_DIRECTORIES "${includes}")
message(STATUS "CUDA runtime: ${cudart}")
