# The target tessera_mpi: the MPI library that CMake finds, if there is one. The C interface alone: the C++ bindings that some compiler wrappers link are
# not used, and gone in newer libraries.
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI 3.0 QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND)
  add_library(tessera_mpi INTERFACE)
  set(_mpi_libraries ${MPI_CXX_LIBRARIES})
  list(FILTER _mpi_libraries EXCLUDE REGEX "lib(mpi_cxx|mpichcxx|mpicxx)\\.")
  target_include_directories(tessera_mpi SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
  target_compile_definitions(tessera_mpi INTERFACE ${MPI_CXX_COMPILE_DEFINITIONS} OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(tessera_mpi INTERFACE ${_mpi_libraries})
  message(STATUS "MPI part: ${_mpi_libraries}")
endif()
