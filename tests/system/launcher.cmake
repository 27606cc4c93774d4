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
  TESSERA_TORCHRUN torchrun
  HINTS "${PROJECT_SOURCE_DIR}/.env-python/bin"
  DOC "torchrun of a Python environment that has torch with its dependencies")
set(other_launchers)
foreach(name IN ITEMS MPIRUN TORCHRUN)
  if(TESSERA_${name})
    execute_process(
      COMMAND "${TESSERA_${name}}" --version
      RESULT_VARIABLE failed
      OUTPUT_VARIABLE version
      ERROR_QUIET)
    # torchrun has no --version, but prints its help; without torch it cannot.
    if(name STREQUAL "TORCHRUN")
      execute_process(
        COMMAND "${TESSERA_TORCHRUN}" --help
        RESULT_VARIABLE failed
        OUTPUT_QUIET ERROR_QUIET)
    elseif(NOT version MATCHES "Open MPI")
      set(failed 1)
    endif()
    if(NOT failed)
      list(APPEND other_launchers TESSERA_${name}="${TESSERA_${name}}")
    endif()
  endif()
endforeach()
if(other_launchers)
  tessera_test(other_launchers SOURCES other_launchers_test.cpp LINK test_process TIMEOUT 300 LABELS system)
  target_compile_definitions(test_other_launchers PRIVATE TESSERA_PROGRAM="$<TARGET_FILE:tessera_cli>"
                                                          TESSERA_HELPER="$<TARGET_FILE:launcher_helper>" ${other_launchers})
  target_compile_options(test_other_launchers PRIVATE ${quiet_gcc_12})
  add_dependencies(test_other_launchers tessera_cli launcher_helper)
endif()
