# `tessera run` from outside, and the launchers of others as our programs see them.
if(NOT TARGET tessera_cli)
  return()
endif()

# GCC 12 warns falsely about "text" + std::string (its bug 105651).
set(quiet_gcc_12 $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)

add_executable(launcher_helper launcher_helper.cpp)
target_link_libraries(launcher_helper PRIVATE tessera_flags Tessera::base)
target_compile_options(launcher_helper PRIVATE ${quiet_gcc_12})

add_library(test_process STATIC process.cpp)
target_link_libraries(test_process PRIVATE tessera_flags)

tessera_test(launcher SOURCES launcher_test.cpp launcher_end_test.cpp LINK test_process TIMEOUT 300 LABELS system)
target_compile_definitions(test_launcher PRIVATE TESSERA_PROGRAM="$<TARGET_FILE:tessera_cli>" TESSERA_HELPER="$<TARGET_FILE:launcher_helper>")
target_compile_options(test_launcher PRIVATE ${quiet_gcc_12})
add_dependencies(test_launcher tessera_cli launcher_helper)

find_program(TESSERA_MPIRUN mpirun)
find_program(
  TESSERA_TORCHRUN
  torchrun
  HINTS "${PROJECT_SOURCE_DIR}/.env-python/bin" "${PROJECT_SOURCE_DIR}/.env/bin"
  DOC "torchrun of a Python environment that has torch with its dependencies"
)
set(other_launchers)
set(rank_file_test)
if(TESSERA_MPIRUN)
  execute_process(COMMAND "${TESSERA_MPIRUN}" --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(version MATCHES "Open MPI")
    list(APPEND other_launchers TESSERA_MPIRUN="${TESSERA_MPIRUN}")
    set(rank_file_test rank_file_test.cpp)
  endif()
endif()
if(TESSERA_TORCHRUN)
  # Where torch is there without what its Python part needs, this fails. A success is remembered: it takes seconds.
  if(NOT TESSERA_TORCHRUN_WORKS STREQUAL TESSERA_TORCHRUN)
    execute_process(COMMAND "${TESSERA_TORCHRUN}" --help RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(NOT failed)
      set(TESSERA_TORCHRUN_WORKS "${TESSERA_TORCHRUN}" CACHE INTERNAL "The torchrun that was seen to run")
    endif()
  endif()
  if(TESSERA_TORCHRUN_WORKS STREQUAL TESSERA_TORCHRUN)
    list(APPEND other_launchers TESSERA_TORCHRUN="${TESSERA_TORCHRUN}")
  endif()
endif()
if(other_launchers)
  tessera_test(other_launchers SOURCES other_launchers_test.cpp ${rank_file_test} LINK test_process TIMEOUT 300 LABELS system)
  target_compile_definitions(
    test_other_launchers
    PRIVATE TESSERA_PROGRAM="$<TARGET_FILE:tessera_cli>" TESSERA_HELPER="$<TARGET_FILE:launcher_helper>" ${other_launchers}
  )
  target_compile_options(test_other_launchers PRIVATE ${quiet_gcc_12})
  add_dependencies(test_other_launchers tessera_cli launcher_helper)
endif()
