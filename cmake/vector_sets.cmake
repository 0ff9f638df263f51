# csrc/aten/vector/loops.cpp, once for each set of vector instructions; which of them the processor has is asked at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2_flags -mavx2 -mfma)
  set(avx512_flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512)
  foreach(set avx2 avx512)
    add_library(offload_vector_${set} OBJECT csrc/aten/vector/loops.cpp)
    target_link_libraries(offload_vector_${set} PRIVATE offload_options)
    target_compile_definitions(offload_vector_${set} PRIVATE OFFLOAD_VECTOR_SET=${set})
    # Rounded as written, and no loop that stays one for the sake of errno or of floating-point traps.
    target_compile_options(offload_vector_${set} PRIVATE
      -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math ${${set}_flags})
    target_link_libraries(_C PRIVATE offload_vector_${set})
  endforeach()
  target_compile_definitions(_C PRIVATE OFFLOAD_VECTOR_SETS=1)
endif()
