# Optional parts. A part that is absent is compiled as a stub whose error says how to get it.

# tessera_part(name HEADER file LIBRARY name... [FOLDERS folder...] DEBIAN package): TESSERA_HAS_<NAME>, and TESSERA_<NAME>_TARGET to link with (empty
# where it is absent). A portable build has none: it links what every machine with libtorch has.
function(tessera_part name)
  cmake_parse_arguments(PART "" "HEADER;DEBIAN" "LIBRARY;FOLDERS" ${ARGN})
  string(TOUPPER ${name} upper)
  # Looked for anew at each configure, unless given by -D: what was found may be gone, or another one by now.
  find_path(TESSERA_${upper}_INCLUDE ${PART_HEADER} PATH_SUFFIXES ${PART_FOLDERS} NO_CACHE)
  find_library(TESSERA_${upper}_LIBRARY NAMES ${PART_LIBRARY} PATH_SUFFIXES ${PART_FOLDERS} NO_CACHE)
  set(TESSERA_HAS_${upper} OFF PARENT_SCOPE)
  set(TESSERA_${upper}_TARGET "" PARENT_SCOPE)
  if(TESSERA_PORTABLE)
    message(STATUS "${name}: left out of a portable build")
  elseif(TESSERA_${upper}_INCLUDE AND TESSERA_${upper}_LIBRARY)
    message(STATUS "${name}: ${TESSERA_${upper}_LIBRARY}")
    add_library(tessera_${name} INTERFACE)
    target_include_directories(tessera_${name} SYSTEM INTERFACE ${TESSERA_${upper}_INCLUDE})
    target_link_libraries(tessera_${name} INTERFACE ${TESSERA_${upper}_LIBRARY})
    target_compile_definitions(tessera_${name} INTERFACE TESSERA_HAS_${upper})
    set(TESSERA_HAS_${upper} ON PARENT_SCOPE)
    set(TESSERA_${upper}_TARGET tessera_${name} PARENT_SCOPE)
    set(TESSERA_${upper}_INCLUDE ${TESSERA_${upper}_INCLUDE} PARENT_SCOPE)
  else()
    message(STATUS "${name}: not found, what needs it will refuse (${PART_DEBIAN} brings it)")
  endif()
endfunction()

set(TESSERA_HAS_MPI OFF)
include("${CMAKE_CURRENT_LIST_DIR}/TesseraMpi.cmake")
if(NOT TESSERA_MPI STREQUAL "OFF" AND NOT TESSERA_PORTABLE)
  tessera_find_mpi()
  if(TARGET tessera_mpi)
    set(TESSERA_HAS_MPI ON)
  elseif(TESSERA_MPI STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_MPI=ON, but CMake found no MPI 3 library (set MPI_HOME, or TESSERA_MPI=OFF)")
  endif()
endif()

set(TESSERA_HAS_NCCL OFF)
if(NOT TESSERA_NCCL STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  # The header must be that of the NCCL that libtorch was built with: a structure of it is part of c10d's. The wheel's lies beside torch; libtessera_nccl.so
  # compares the sizes when it is loaded.
  # Looked for anew at each configure: the wheel's may arrive after a toolkit's was found.
  unset(TESSERA_NCCL_HEADER CACHE)
  find_path(TESSERA_NCCL_HEADER nccl.h HINTS "${TESSERA_TORCH_PREFIX}/../nvidia/nccl/include" NO_DEFAULT_PATH NO_CACHE)
  find_path(TESSERA_NCCL_HEADER nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS /usr/local/cuda/include NO_CACHE)
  if(CUDAToolkit_FOUND AND TESSERA_NCCL_HEADER AND EXISTS "${TESSERA_TORCH_PREFIX}/lib/libtorch_cuda.so")
    set(TESSERA_HAS_NCCL ON)
    message(STATUS "NCCL part: ${TESSERA_NCCL_HEADER}/nccl.h, CUDA ${CUDAToolkit_VERSION}")
  elseif(TESSERA_NCCL STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_NCCL=ON needs a CUDA toolkit, nccl.h, and a libtorch with libtorch_cuda.so")
  endif()
endif()

# Kernels for GPUs (libtessera_cuda.so) go with it, where the toolkit's compiler is and takes this one's headers.
set(TESSERA_NVCC "")
if(TESSERA_HAS_NCCL AND CUDAToolkit_NVCC_EXECUTABLE)
  file(WRITE "${PROJECT_BINARY_DIR}/cuda/probe.cu" "#include <cmath>\n")
  execute_process(
    COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" -std=c++20 -ccbin "${CMAKE_CXX_COMPILER}" -E "${PROJECT_BINARY_DIR}/cuda/probe.cu"
    RESULT_VARIABLE failed
    OUTPUT_QUIET
    ERROR_VARIABLE why
  )
  if(failed)
    message(STATUS "CUDA kernels: left out, ${CUDAToolkit_NVCC_EXECUTABLE} does not take ${CMAKE_CXX_COMPILER}: ${why}")
  else()
    set(TESSERA_NVCC "${CUDAToolkit_NVCC_EXECUTABLE}")
    message(STATUS "CUDA kernels: ${TESSERA_NVCC}")
  endif()
endif()
