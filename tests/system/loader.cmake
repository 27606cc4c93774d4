# Loading in a training loop of real processes that are killed and go on with another number of ranks.
if(NOT TARGET tessera_cli OR NOT TARGET Tessera::data)
  return()
endif()
add_executable(loader_trainer loader_trainer.cpp)
target_link_libraries(loader_trainer PRIVATE tessera_flags Tessera::data)
tessera_use_full_pch(loader_trainer)

tessera_test(loader_resume TORCH SOURCES loader_resume_test.cpp LINK Tessera::data test_process TIMEOUT 300 LABELS system)
target_compile_definitions(test_loader_resume PRIVATE TESSERA_PROGRAM="$<TARGET_FILE:tessera_cli>" TESSERA_HELPER="$<TARGET_FILE:loader_trainer>")
add_dependencies(test_loader_resume tessera_cli loader_trainer)
