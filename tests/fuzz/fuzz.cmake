# Fuzz targets: every parser without libtorch that meets what a stranger wrote. They need clang; `make fuzz` builds and runs them.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "TESSERA_FUZZ needs clang with its libFuzzer (Debian: clang libclang-rt-14-dev): cmake --preset fuzz")
endif()
set(folder "${CMAKE_CURRENT_LIST_DIR}")
add_custom_target(fuzzers)

# tessera_fuzz(name rooms ...): the program fuzz_<name> of the source of that name, with the objects of these rooms. (The library of the lower
# rooms is not linked: clang 14 does not compile the reductions of shm.)
function(tessera_fuzz name)
  add_executable(fuzz_${name} "${folder}/${name}.cpp")
  target_link_libraries(fuzz_${name} PRIVATE tessera_flags)
  foreach(room IN LISTS ARGN)
    target_link_libraries(fuzz_${name} PRIVATE tessera_${room})
  endforeach()
  target_include_directories(fuzz_${name} PRIVATE "${folder}" "${PROJECT_SOURCE_DIR}")
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzzers fuzz_${name})
endfunction()

tessera_fuzz(json base files)
tessera_fuzz(safetensors base files)
tessera_fuzz(node_list base launch)
tessera_fuzz(schedule_csv base schedule)
tessera_fuzz(group_config base launch mesh config)
tessera_fuzz(topology base launch mesh config)
tessera_fuzz(traffic base launch mesh config)
tessera_fuzz(rank_file base launch mesh config)
tessera_fuzz(plan_words base launch mesh config)
tessera_fuzz(launch base launch mesh config)
# Two of rooms that need libtorch, from those of their sources that do not.
tessera_fuzz(manifest base files)
target_sources(fuzz_manifest PRIVATE "${PROJECT_SOURCE_DIR}/tessera/checkpoint/storage/detail/manifest.cpp")
tessera_fuzz(store base launch torch)
foreach(
  source
  detail/hmac
  detail/socket
  detail/store_calls
  detail/store_meeting
  detail/store_server
)
  target_sources(fuzz_store PRIVATE "${PROJECT_SOURCE_DIR}/tessera/comm/store/${source}.cpp")
endforeach()
