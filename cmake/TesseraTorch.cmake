# libtorch: from TESSERA_TORCH (a folder with include/ and lib/: a wheel's torch/, or an unpacked libtorch archive), or from this project's own
# environment. libtorch_cpu and libc10 are linked, nothing else, so that a CPU build needs no CUDA toolkit whatever the wheel was built with.

set(TESSERA_TORCH "" CACHE PATH "Folder of libtorch (holds include/ and lib/); empty: the project's own environment")
set(_tessera_torch "${TESSERA_TORCH}")
if(NOT _tessera_torch)
  file(GLOB _found "${PROJECT_SOURCE_DIR}/.env/lib/python3*/site-packages/torch")
  list(APPEND _found ${Torch_ROOT} $ENV{Torch_ROOT} ${CMAKE_PREFIX_PATH})
  foreach(candidate IN LISTS _found)
    if(EXISTS "${candidate}/include/torch/headeronly/version.h" AND EXISTS "${candidate}/lib/libtorch_cpu.so")
      set(_tessera_torch "${candidate}")
      break()
    endif()
  endforeach()
endif()
if(NOT EXISTS "${_tessera_torch}/lib/libtorch_cpu.so")
  message(
    FATAL_ERROR
    "libtorch was not found. Run scripts/bootstrap, or give -DTESSERA_TORCH=<folder with include/ and lib/>. Looked in: ${_tessera_torch} ${_found}"
  )
endif()
file(STRINGS "${_tessera_torch}/include/torch/headeronly/version.h" _version_lines REGEX "define TORCH_VERSION_")
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "TORCH_VERSION_${part} ([0-9]+)" _ "${_version_lines}")
  set(TESSERA_TORCH_${part} "${CMAKE_MATCH_1}")
endforeach()
set(TESSERA_TORCH_VERSION "${TESSERA_TORCH_MAJOR}.${TESSERA_TORCH_MINOR}.${TESSERA_TORCH_PATCH}")
if(TESSERA_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "libtorch ${TESSERA_TORCH_VERSION} in ${_tessera_torch} is too old: Tessera needs 2.11 or newer")
endif()
set(TESSERA_TORCH_PREFIX "${_tessera_torch}")
message(STATUS "libtorch ${TESSERA_TORCH_VERSION}: ${_tessera_torch}")

find_package(Threads REQUIRED)
add_library(tessera_torch INTERFACE)
target_include_directories(
  tessera_torch
  SYSTEM
  INTERFACE $<BUILD_INTERFACE:${_tessera_torch}/include> $<BUILD_INTERFACE:${_tessera_torch}/include/torch/csrc/api/include>
)
# Older headers of c10d name their header-only parts by these switches; the wheel's library has them on.
target_compile_definitions(tessera_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
target_link_libraries(
  tessera_torch
  INTERFACE $<BUILD_INTERFACE:${_tessera_torch}/lib/libtorch_cpu.so> $<BUILD_INTERFACE:${_tessera_torch}/lib/libc10.so> Threads::Threads
)
target_link_options(tessera_torch INTERFACE -Wl,--disable-new-dtags -Wl,--allow-shlib-undefined)
set(CMAKE_BUILD_RPATH "${_tessera_torch}/lib")

if(TESSERA_PCH)
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/pch/pch.cpp" CONTENT "")
  add_library(tessera_pch OBJECT "${PROJECT_BINARY_DIR}/pch/pch.cpp")
  target_link_libraries(tessera_pch PRIVATE tessera_flags PUBLIC tessera_torch)
  target_precompile_headers(
    tessera_pch
    PRIVATE
      <algorithm>
      <chrono>
      <functional>
      <map>
      <memory>
      <optional>
      <span>
      <string>
      <vector>
      <ATen/ATen.h>
      <torch/csrc/autograd/custom_function.h>
      <torch/csrc/distributed/c10d/ProcessGroup.hpp>
      <torch/library.h>
  )
  # The code that uses torch::nn (tests, examples, benchmarks) has a larger one.
  add_library(tessera_pch_full OBJECT "${PROJECT_BINARY_DIR}/pch/pch.cpp")
  target_link_libraries(tessera_pch_full PRIVATE tessera_flags PUBLIC tessera_torch)
  # What programs are compiled with; gcc takes no precompiled header that was made with -fPIC there.
  target_compile_options(tessera_pch_full PRIVATE -fPIE)
  target_precompile_headers(tessera_pch_full PRIVATE <torch/torch.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>)
endif()

# tessera_use_full_pch(target): for programs that include torch/torch.h.
function(tessera_use_full_pch target)
  if(TESSERA_PCH)
    target_link_libraries(${target} PRIVATE tessera_flags)
    target_precompile_headers(${target} REUSE_FROM tessera_pch_full)
  endif()
endfunction()

# tessera_programs(NAME PREFIX example_ UNITS 2 SOURCES a.cpp ... LIBRARIES target ...): the programs example_a, ... of one source each. Where TESSERA_UNITY
# says so, and there is Python to join them, they are links to one executable, NAME, which is compiled in so many units.
function(tessera_programs name)
  cmake_parse_arguments(ARG "" "PREFIX;UNITS" "SOURCES;LIBRARIES" ${ARGN})
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(NOT TESSERA_UNITY OR NOT Python3_Interpreter_FOUND)
    foreach(source IN LISTS ARG_SOURCES)
      get_filename_component(program "${source}" NAME_WE)
      add_executable(${ARG_PREFIX}${program} "${source}")
      target_link_libraries(${ARG_PREFIX}${program} PRIVATE ${ARG_LIBRARIES})
      tessera_use_full_pch(${ARG_PREFIX}${program})
    endforeach()
    return()
  endif()
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/${name}")
  set(units "")
  math(EXPR last "${ARG_UNITS} - 1")
  foreach(unit RANGE ${last})
    list(APPEND units "${folder}/unit_${unit}.cpp")
  endforeach()
  set(together "${PROJECT_SOURCE_DIR}/cmake/together.py")
  add_custom_command(
    OUTPUT ${units} "${folder}/main.cpp"
    COMMAND ${Python3_EXECUTABLE} "${together}" "${folder}" ${ARG_PREFIX} ${ARG_UNITS} ${ARG_SOURCES}
    DEPENDS ${ARG_SOURCES} "${together}"
    VERBATIM
  )
  add_executable(${name} ${units} "${folder}/main.cpp")
  set_source_files_properties("${folder}/main.cpp" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  target_link_libraries(${name} PRIVATE ${ARG_LIBRARIES})
  tessera_use_full_pch(${name})
  foreach(source IN LISTS ARG_SOURCES)
    get_filename_component(program "${source}" NAME_WE)
    add_custom_command(
      TARGET ${name}
      POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE_NAME:${name}> "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${ARG_PREFIX}${program}"
      VERBATIM
    )
    add_custom_target(${ARG_PREFIX}${program})
    add_dependencies(${ARG_PREFIX}${program} ${name})
  endforeach()
endfunction()

# tessera_showcase(targets ...): the libraries and programs of a showcase that is built in this tree.
function(tessera_showcase)
  foreach(target IN LISTS ARGN)
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "STATIC_LIBRARY")
      target_compile_options(${target} PRIVATE -fPIE) # as programs are compiled, so that all share one precompiled header
    endif()
    target_link_libraries(${target} PRIVATE tessera_flags)
    tessera_unity(${target} 4)
    tessera_use_full_pch(${target})
  endforeach()
endfunction()
