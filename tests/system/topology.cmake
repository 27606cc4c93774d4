# `tessera bench topology` in a job, and what `tessera plan` makes of its file. On two hosts it needs root, as netns.cmake does.
if(NOT TARGET tessera_cli OR NOT TARGET tessera_bench_topology)
  return()
endif()
tessera_test(topology SOURCES topology_test.cpp LINK test_process Tessera::config TIMEOUT 300 LABELS system)
target_compile_definitions(test_topology PRIVATE TESSERA_PROGRAM="$<TARGET_FILE:tessera_cli>")
add_dependencies(test_topology tessera_cli tessera_bench_topology)
