# The rooms as the libraries that users link:
#   Tessera::base     the torch-free rooms (C++ standard library only, and METIS where it is found)
#   Tessera::config   files and machines into the structs of the torch-free rooms (JSON, YAML, Slurm, hwloc)
#   Tessera::tessera  everything that needs libtorch and nothing else
#   Tessera::data     sources of data: libtorch, and netCDF where it is found
#   Tessera::train    strategies, the trainer, callbacks and loggers
#   Tessera::c        what C and Fortran call; nothing of C++ reaches who links it
#   Tessera::fortran  `module tessera` on it, where there is a compiler of Fortran

set(
  TESSERA_BASE_ROOMS
  base
  files
  launch
  mesh
  partition
  sampling
  schedule
  shm
)
set(
  TESSERA_TORCH_ROOMS
  comm
  gradient
  tensor
  ops
  nn
  pipeline
  checkpoint
)

# A library is the objects of its rooms. The rooms stay inside: users see headers and what LINK names, never a room's target.
function(tessera_library name)
  cmake_parse_arguments(LIB "" "" "ROOMS;LINK" ${ARGN})
  add_library(${name} SHARED)
  # Before 1.0 a minor version may break its users: a program keeps to the one that it was linked with.
  set_target_properties(
    ${name}
    PROPERTIES
      VERSION ${PROJECT_VERSION}
      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
      LINKER_LANGUAGE CXX
      BUILD_RPATH "$ORIGIN;${CMAKE_BUILD_RPATH}"
  )
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include/common> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(room IN LISTS LIB_ROOMS)
    if(TARGET tessera_${room})
      target_link_libraries(${name} PRIVATE tessera_${room})
      target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include/${room}>)
    endif()
  endforeach()
  target_link_libraries(${name} PUBLIC ${LIB_LINK})
endfunction()

tessera_library(tessera_base_library ROOMS ${TESSERA_BASE_ROOMS})
set_target_properties(tessera_base_library PROPERTIES OUTPUT_NAME tessera_base EXPORT_NAME base)
target_link_libraries(tessera_base_library PRIVATE $<TARGET_NAME_IF_EXISTS:tessera_metis>)
add_library(Tessera::base ALIAS tessera_base_library)

if(TARGET tessera_config)
  tessera_library(tessera_config_library ROOMS config LINK tessera_base_library)
  set_target_properties(tessera_config_library PROPERTIES OUTPUT_NAME tessera_config EXPORT_NAME config)
  add_library(Tessera::config ALIAS tessera_config_library)
endif()

if(NOT TARGET tessera_comm)
  return() # TESSERA_UP_TO names a room without libtorch
endif()
tessera_library(tessera_library ROOMS ${TESSERA_TORCH_ROOMS} LINK tessera_base_library tessera_torch)
set_target_properties(tessera_library PROPERTIES OUTPUT_NAME tessera EXPORT_NAME tessera)
add_library(Tessera::tessera ALIAS tessera_library)

if(NOT TARGET tessera_data)
  return()
endif()
tessera_library(tessera_data_library ROOMS data LINK tessera_library)
set_target_properties(tessera_data_library PROPERTIES OUTPUT_NAME tessera_data EXPORT_NAME data)
add_library(Tessera::data ALIAS tessera_data_library)

if(NOT TARGET tessera_train)
  return()
endif()
tessera_library(tessera_train_library ROOMS train LINK tessera_data_library)
set_target_properties(tessera_train_library PROPERTIES OUTPUT_NAME tessera_train EXPORT_NAME train)
add_library(Tessera::train ALIAS tessera_train_library)

if(NOT TARGET tessera_c)
  return()
endif()
tessera_library(tessera_c_library ROOMS c)
target_link_libraries(tessera_c_library PRIVATE tessera_train_library)
target_link_options(tessera_c_library INTERFACE -Wl,--allow-shlib-undefined)
# Programs in C alone have no compiler of C++ that could know the feature.
set_target_properties(
  tessera_c_library
  PROPERTIES OUTPUT_NAME tessera_c EXPORT_NAME c INTERFACE_COMPILE_FEATURES ""
)
add_library(Tessera::c ALIAS tessera_c_library)

# C, for its tests and for what Fortran calls through; Fortran by GNU's compiler or any with Fortran 2018's descriptors.
include(CheckLanguage)
check_language(C)
if(NOT CMAKE_C_COMPILER)
  message(STATUS "C: no compiler found, the tests in C and Fortran's module are left out")
  return()
endif()
enable_language(C)
if(TESSERA_FORTRAN STREQUAL "OFF")
  return()
endif()
check_language(Fortran)
if(CMAKE_Fortran_COMPILER)
  enable_language(Fortran)
  if(TESSERA_HAS_MPI)
    find_package(MPI 3.0 QUIET COMPONENTS CXX Fortran)
  endif()
  message(STATUS "Fortran: ${CMAKE_Fortran_COMPILER}, mpi_f08: ${MPI_Fortran_HAVE_F08_MODULE}")
  add_subdirectory(tessera/c/fortran)
elseif(TESSERA_FORTRAN STREQUAL "ON")
  message(FATAL_ERROR "TESSERA_FORTRAN=ON, but no compiler of Fortran was found (Debian: gfortran)")
else()
  message(STATUS "Fortran: no compiler found, `module tessera` is left out (Debian: gfortran)")
endif()
