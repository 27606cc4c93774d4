# NCCL on this machine's GPUs: built wherever the part is, run where a GPU is seen. It links libtorch_cuda.so so that CUDA is there from the start.

add_executable(nccl_test "${CMAKE_CURRENT_LIST_DIR}/nccl_test.cpp")
target_link_libraries(
  nccl_test
  PRIVATE Tessera::tessera -Wl,--no-as-needed "${TESSERA_TORCH_PREFIX}/lib/libtorch_cuda.so" "${TESSERA_TORCH_PREFIX}/lib/libc10_cuda.so"
)
tessera_use_full_pch(nccl_test)
add_dependencies(nccl_test tessera_nccl)
if(EXISTS "/dev/nvidiactl")
  add_test(NAME nccl COMMAND nccl_test)
  set_tests_properties(
    nccl
    PROPERTIES TIMEOUT 600 LABELS "comm;gpu" SKIP_RETURN_CODE 77
  )
endif()
