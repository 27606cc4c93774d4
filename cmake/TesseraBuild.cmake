# Flags, sanitizers, compiler cache, and tessera_room(): one CMake target a room, which sees the headers of the rooms it names and no others.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET default)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
  # Installed programs find the libraries beside them, wherever the tree is moved.
  set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  find_program(TESSERA_CCACHE ccache)
  if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # The base folder lets two build folders share results; the sloppiness is what precompiled headers need.
    set(
      CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND}
      -E
      env
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
      CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${TESSERA_CCACHE}
    )
  endif()
endif()

add_library(tessera_flags INTERFACE)
target_compile_options(tessera_flags INTERFACE $<BUILD_INTERFACE:-Wall -Wextra -Wno-unknown-pragmas $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>>)
if(TESSERA_CCACHE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(tessera_flags INTERFACE $<BUILD_INTERFACE:-fpch-preprocess>)
endif()
# GCC collects its garbage while it compiles; beside half a gigabyte of precompiled headers that takes a tenth of its time.
cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND PROJECT_IS_TOP_LEVEL AND memory GREATER 7000)
  target_compile_options(tessera_flags INTERFACE $<BUILD_INTERFACE:--param=ggc-min-heapsize=1000000>)
endif()
if(TESSERA_SANITIZE)
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
  if(TESSERA_SANITIZE MATCHES "undefined")
    # vptr would want the type information that libtorch keeps to itself.
    add_compile_options(-fno-sanitize=vptr -fno-sanitize-recover=undefined)
  endif()
endif()

# tessera_room(NAME [TORCH] SOURCES a.cpp ... NEEDS lower_room ... [OPENS_TO higher_room ...] [LIBRARIES target ...])
# OPENS_TO names the rooms that may include this one's `internal/` headers; the test build.rooms enforces it.
# The room's headers are reachable as <tessera/NAME/...> through a folder that holds this room alone, so that including a
# room that is not named in NEEDS does not compile.
function(tessera_room name)
  cmake_parse_arguments(ROOM "TORCH" "" "SOURCES;NEEDS;OPENS_TO;LIBRARIES" ${ARGN})
  set(window "${PROJECT_BINARY_DIR}/include/${name}")
  file(MAKE_DIRECTORY "${window}/tessera")
  file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}" "${window}/tessera/${name}" SYMBOLIC)
  add_library(tessera_${name} OBJECT ${ROOM_SOURCES})
  target_include_directories(tessera_${name} PUBLIC $<BUILD_INTERFACE:${window}>)
  target_link_libraries(tessera_${name} PRIVATE tessera_flags)
  set_target_properties(tessera_${name} PROPERTIES TESSERA_NEEDS "${ROOM_NEEDS}" TESSERA_OPENS_TO "${ROOM_OPENS_TO}")
  foreach(lower IN LISTS ROOM_NEEDS)
    target_link_libraries(tessera_${name} PUBLIC tessera_${lower})
  endforeach()
  target_link_libraries(tessera_${name} PUBLIC ${ROOM_LIBRARIES})
  if(ROOM_TORCH)
    target_link_libraries(tessera_${name} PUBLIC tessera_torch)
    tessera_use_pch(tessera_${name})
  endif()
  # Every source pays anew for the templates that libtorch's headers use: 32 together cost a third less than four batches of eight.
  tessera_unity(tessera_${name} 32)
endfunction()

# tessera_install_part(target): a library that libtessera.so loads from beside it, in a project around this one too.
function(tessera_install_part target)
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "$<TARGET_FILE_DIR:tessera_library>")
  if(PROJECT_IS_TOP_LEVEL OR TESSERA_INSTALL)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;${TESSERA_TORCH_PREFIX}/lib")
    install(TARGETS ${target} LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT tessera)
  endif()
endfunction()

# tessera_unity(target size): compiles the target's sources in batches of `size` files, in their order, where TESSERA_UNITY
# says so. Names of one room's sources must therefore be unique in the room, in anonymous namespaces too. A source that
# includes other headers than its neighbours keeps out of it by SKIP_UNITY_BUILD_INCLUSION.
function(tessera_unity target size)
  if(NOT TESSERA_UNITY)
    return()
  endif()
  set_target_properties(
    ${target}
    PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE BATCH UNITY_BUILD_BATCH_SIZE ${size}
  )
endfunction()

# tessera_use_pch(target): the shared precompiled header of the code that includes libtorch.
function(tessera_use_pch target)
  if(TESSERA_PCH)
    target_precompile_headers(${target} REUSE_FROM tessera_pch)
  endif()
endfunction()
