# Optional parts. A part that is absent is compiled as a stub whose error says how to get it.

set(TESSERA_HAS_MPI OFF)
if(NOT TESSERA_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI 3.0 QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(TESSERA_HAS_MPI ON)
    # The C interface alone: the C++ bindings that some compiler wrappers link are not used, and gone in newer libraries.
    add_library(tessera_mpi INTERFACE)
    set(_mpi_libraries ${MPI_CXX_LIBRARIES})
    list(FILTER _mpi_libraries EXCLUDE REGEX "lib(mpi_cxx|mpichcxx|mpicxx)\\.")
    target_include_directories(tessera_mpi SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
    target_compile_definitions(tessera_mpi INTERFACE ${MPI_CXX_COMPILE_DEFINITIONS} OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
    target_link_libraries(tessera_mpi INTERFACE ${_mpi_libraries})
    message(STATUS "MPI part: ${_mpi_libraries}")
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
