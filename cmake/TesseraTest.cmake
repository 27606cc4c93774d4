# What runs a test program: the test reads as skipped where GoogleTest skipped a case and the program ended well. scripts/skipped prints the reasons.
set(TESSERA_RUN_TEST bash "${PROJECT_SOURCE_DIR}/tests/run")

# tessera_test_settings(target [TORCH]): how a program of GoogleTest is compiled.
function(tessera_test_settings target)
  target_link_libraries(${target} PRIVATE tessera_flags GTest::gtest)
  tessera_unity(${target} 10)
  if("TORCH" IN_LIST ARGN)
    target_link_libraries(${target} PRIVATE Tessera::tessera)
    tessera_use_full_pch(${target})
  else()
    target_link_libraries(${target} PRIVATE Tessera::base)
  endif()
endfunction()

# tessera_test_path(variable target): where a test program lies, be it a link to those of its room.
function(tessera_test_path variable target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "UTILITY")
    set(${variable} "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${target}" PARENT_SCOPE)
  else()
    set(${variable} $<TARGET_FILE:${target}> PARENT_SCOPE)
  endif()
endfunction()

# tessera_test_part(NAME room SOURCES a.cpp ... LINK target ...): test_NAME as a part of tests_<room>, or by itself without TESSERA_UNITY. The room's main.cpp,
# where it has one, is the main() of both.
function(tessera_test_part name room)
  cmake_parse_arguments(TEST "" "" "SOURCES;LINK" ${ARGN})
  set(main "${PROJECT_SOURCE_DIR}/tests/support/parts_main.cpp")
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/main.cpp")
    set(main main.cpp)
  endif()
  set(program test_${name})
  if(TESSERA_UNITY)
    set(program tests_${room})
    add_custom_target(test_${name})
    add_dependencies(test_${name} ${program})
  endif()
  if(NOT TARGET ${program})
    set(names "${CMAKE_CURRENT_BINARY_DIR}/${program}")
    add_executable(${program} ${main})
    tessera_test_settings(${program} TORCH)
    target_include_directories(${program} PRIVATE "${names}")
    # NAME=a.cpp,b.cpp of each
    file(GENERATE OUTPUT "${names}/programs.h" CONTENT "#define TESSERA_TEST_PROGRAMS \"$<JOIN:$<TARGET_PROPERTY:${program},TESSERA_PROGRAMS>, >\"\n")
  endif()
  target_sources(${program} PRIVATE ${TEST_SOURCES})
  target_link_libraries(${program} PRIVATE ${TEST_LINK})
  list(JOIN TEST_SOURCES "," files)
  set_property(TARGET ${program} APPEND PROPERTY TESSERA_PROGRAMS "test_${name}=${files}")
  if(TESSERA_UNITY)
    add_custom_command(
      TARGET ${program}
      POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE_NAME:${program}> "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/test_${name}"
      VERBATIM
    )
  endif()
endfunction()

# tessera_test(NAME SOURCES a.cpp ... [TORCH] [LINK target ...] [RANKS 1 2 4] [TIMEOUT seconds] [LABELS ...] [SHARDS n] [TOGETHER room] [GLOO 2] [SHM 3] [MPI 3] [CASES filter])
# A GoogleTest program. Without RANKS it runs once; with RANKS it runs once for each number, every rank a process of its own under the project's launcher,
# which kills and reports a rank that hangs. The folder's name is a label, so that `ctest -L comm` runs the tests of a room. The sources of a program are
# compiled in batches (tessera_unity), so that their names are unique in the program. The programs of a room that say TOGETHER are, where TESSERA_UNITY is
# on, links to one executable, tests_<room>, whose cases are chosen by the name it is started by (support/ranks.h). SHARDS runs the cases in that many
# processes side by side, for programs that mostly wait. GLOO, SHM, MPI: the cases again over so many ranks that are processes (tessera_process_tests); with
# CASES those alone that GoogleTest's filter says.
function(tessera_test name)
  cmake_parse_arguments(TEST "TORCH" "TIMEOUT;SHARDS;CASES;TOGETHER" "SOURCES;LINK;RANKS;LABELS;GLOO;SHM;MPI" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 120)
  endif()
  if(TESSERA_SANITIZE)
    math(EXPR TEST_TIMEOUT "${TEST_TIMEOUT} * 4")
  endif()
  get_filename_component(folder "${CMAKE_CURRENT_SOURCE_DIR}" NAME)
  list(APPEND TEST_LABELS ${folder})
  if(TEST_TOGETHER)
    tessera_test_part(${name} ${TEST_TOGETHER} SOURCES ${TEST_SOURCES} LINK ${TEST_LINK})
  else()
    if(TEST_GLOO OR TEST_SHM OR TEST_MPI)
      list(APPEND TEST_SOURCES "${PROJECT_SOURCE_DIR}/tests/support/ranks_main.cpp")
    endif()
    add_executable(test_${name} ${TEST_SOURCES})
    if(TEST_TORCH)
      tessera_test_settings(test_${name} TORCH)
    else()
      tessera_test_settings(test_${name})
    endif()
    target_link_libraries(test_${name} PRIVATE ${TEST_LINK})
    if(NOT (TEST_RANKS OR TEST_GLOO OR TEST_SHM OR TEST_MPI))
      target_link_libraries(test_${name} PRIVATE GTest::gtest_main)
    endif()
  endif()
  tessera_test_path(program test_${name})
  if(TEST_GLOO OR TEST_SHM OR TEST_MPI)
    set(filter "")
    if(TEST_CASES)
      set(filter ARGUMENTS --gtest_filter=${TEST_CASES})
    endif()
    tessera_process_tests(${name} GLOO ${TEST_GLOO} SHM ${TEST_SHM} MPI ${TEST_MPI} ${filter})
  endif()
  if(TEST_RANKS AND NOT TARGET tessera_cli)
    return() # nothing starts ranks
  endif()
  if(TEST_RANKS)
    math(EXPR kill_after "${TEST_TIMEOUT} - 10")
    foreach(ranks IN LISTS TEST_RANKS)
      add_test(
        NAME ${name}.${ranks}
        COMMAND ${TESSERA_RUN_TEST} $<TARGET_FILE:tessera_cli> run -n ${ranks} --timeout ${kill_after} -- "${program}"
      )
      set_tests_properties(
        ${name}.${ranks}
        PROPERTIES TIMEOUT ${TEST_TIMEOUT} PROCESSORS ${ranks} SKIP_RETURN_CODE 77 LABELS "${TEST_LABELS};ranks"
      )
    endforeach()
  else()
    set(shards "")
    if(TEST_SHARDS)
      set(shards --shards ${TEST_SHARDS})
    endif()
    add_test(NAME ${name} COMMAND ${TESSERA_RUN_TEST} ${shards} "${program}")
    set_tests_properties(
      ${name}
      PROPERTIES TIMEOUT ${TEST_TIMEOUT} SKIP_RETURN_CODE 77 LABELS "${TEST_LABELS}"
    )
  endif()
endfunction()

# tessera_process_tests(NAME [GLOO 2 ...] [SHM 3 ...] [MPI 3 ...] [ARGUMENTS ...])
# The program test_NAME over so many ranks that are processes, by --backend=gloo and so on (tests/support/ranks.h), as NAME_gloo.2, NAME_shm.3, NAME_mpi.3.
# Cases for other numbers of ranks do nothing there.
function(tessera_process_tests name)
  cmake_parse_arguments(TEST "" "" "GLOO;SHM;MPI;ARGUMENTS" ${ARGN})
  set(limit 180)
  if(TESSERA_SANITIZE)
    math(EXPR limit "${limit} * 4")
  endif()
  math(EXPR kill_after "${limit} - 10")
  get_filename_component(folder "${CMAKE_CURRENT_SOURCE_DIR}" NAME)
  tessera_test_path(program test_${name})
  foreach(backend IN ITEMS gloo shm)
    string(TOUPPER ${backend} ranks_of)
    if(NOT TARGET tessera_cli)
      set(TEST_${ranks_of} "") # nothing starts ranks
    endif()
    foreach(ranks IN LISTS TEST_${ranks_of})
      set(test ${name}_${backend}.${ranks})
      add_test(
        NAME ${test}
        COMMAND
          ${TESSERA_RUN_TEST} $<TARGET_FILE:tessera_cli> run -n ${ranks} --timeout ${kill_after} -- "${program}" --backend=${backend}
          ${TEST_ARGUMENTS}
      )
      set_tests_properties(
        ${test}
        PROPERTIES TIMEOUT ${limit} PROCESSORS ${ranks} SKIP_RETURN_CODE 77 LABELS "${folder};ranks"
      )
    endforeach()
  endforeach()
  if(TESSERA_HAS_MPI AND TEST_MPI)
    tessera_mpi_test(${name}_mpi TARGET test_${name} RANKS ${TEST_MPI} ARGUMENTS --backend=mpi ${TEST_ARGUMENTS} TIMEOUT ${limit})
  endif()
endfunction()

# tessera_mpi_test(NAME TARGET program RANKS 1 2 4 [ARGUMENTS ...] [TIMEOUT seconds] [PRINTS regex [CLEAN]])
# Runs a program once for each number of ranks under the MPI library's own launcher. With PRINTS the output decides, and that no rank crashed, for jobs that
# must end badly; with CLEAN the exit status as well. The environment lets Open MPI run as root and with more ranks than cores; other libraries do not look
# at it.
function(tessera_mpi_test name)
  cmake_parse_arguments(TEST "CLEAN" "TARGET;TIMEOUT;PRINTS" "RANKS;ARGUMENTS" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 120)
  endif()
  tessera_test_path(program ${TEST_TARGET})
  if(TARGET tessera_mpi_part)
    add_dependencies(${TEST_TARGET} tessera_mpi_part)
  endif()
  set(judge "")
  if(TEST_PRINTS)
    set(
      judge
      ${CMAKE_COMMAND}
      "-DPRINTS=${TEST_PRINTS}"
      -DCLEAN=${TEST_CLEAN}
      -P
      ${PROJECT_SOURCE_DIR}/cmake/judge_output.cmake
      --
    )
  endif()
  foreach(ranks IN LISTS TEST_RANKS)
    add_test(
      NAME ${name}.${ranks}
      COMMAND ${TESSERA_RUN_TEST} ${judge} ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} "${program}" ${TEST_ARGUMENTS}
    )
    set_tests_properties(
      ${name}.${ranks}
      PROPERTIES
        TIMEOUT ${TEST_TIMEOUT}
        PROCESSORS ${ranks}
        SKIP_RETURN_CODE 77
        LABELS "ranks;mpi"
        ENVIRONMENT
          "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1;OMPI_MCA_hwloc_base_binding_policy=none;PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"
    )
  endforeach()
endfunction()
