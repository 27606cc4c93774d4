# What users get: headers, the two libraries, find_package(Tessera) from an install tree and from this build tree, and pkg-config.

include(CMakePackageConfigHelpers)

# Headers that are no room's: the version, and the one that includes what users need.
configure_file("${PROJECT_SOURCE_DIR}/cmake/version.h.in" "${PROJECT_BINARY_DIR}/include/common/tessera/version.h" @ONLY)
file(CREATE_LINK "${PROJECT_SOURCE_DIR}/tessera/tessera.h" "${PROJECT_BINARY_DIR}/include/common/tessera/tessera.h" SYMBOLIC)

set(libraries "")
foreach(
  library
  IN
  ITEMS tessera_base_library tessera_library tessera_config_library tessera_data_library tessera_train_library tessera_c_library
)
  if(TARGET ${library})
    list(APPEND libraries ${library})
  endif()
endforeach()

# The build tree's package reads the same file as the installed one.
set(TESSERA_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/Tessera")
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/TesseraConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/install/TesseraConfig.cmake"
  INSTALL_DESTINATION "${TESSERA_CMAKE_DIR}"
)
configure_file("${PROJECT_BINARY_DIR}/install/TesseraConfig.cmake" "${PROJECT_BINARY_DIR}/TesseraConfig.cmake" COPYONLY)
# Before 1.0 a minor version may break its users.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
export(TARGETS ${libraries} tessera_torch NAMESPACE Tessera:: FILE "${PROJECT_BINARY_DIR}/TesseraTargets.cmake")

if(NOT PROJECT_IS_TOP_LEVEL AND NOT TESSERA_INSTALL)
  return()
endif()

set_target_properties(tessera_torch PROPERTIES EXPORT_NAME torch)
set_target_properties(${libraries} PROPERTIES INSTALL_RPATH "$ORIGIN;${TESSERA_TORCH_PREFIX}/lib" INSTALL_RPATH_USE_LINK_PATH ON)
install(
  TARGETS ${libraries} tessera_torch
  EXPORT TesseraTargets
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT tessera
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT tessera NAMELINK_COMPONENT tessera
)
install(EXPORT TesseraTargets NAMESPACE Tessera:: DESTINATION "${TESSERA_CMAKE_DIR}" COMPONENT tessera)
install(
  FILES "${PROJECT_BINARY_DIR}/install/TesseraConfig.cmake" "${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake"
  DESTINATION "${TESSERA_CMAKE_DIR}"
  COMPONENT tessera
)
install(
  FILES "${PROJECT_SOURCE_DIR}/tessera/tessera.h" "${PROJECT_BINARY_DIR}/include/common/tessera/version.h"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tessera"
  COMPONENT tessera
)
foreach(room IN LISTS TESSERA_ROOMS)
  if(TARGET tessera_${room})
    install(
      DIRECTORY "${PROJECT_SOURCE_DIR}/tessera/${room}"
      DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tessera"
      COMPONENT tessera
      FILES_MATCHING
      PATTERN "*.h"
      PATTERN "detail" EXCLUDE
      PATTERN "internal" EXCLUDE
      PATTERN "backends" EXCLUDE
    )
  endif()
endforeach()
# The one header of a back end that users name: a program's own MPI communicator.
install(
  FILES "${PROJECT_SOURCE_DIR}/tessera/comm/backends/mpi/mpi.h"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tessera/comm/backends/mpi"
  COMPONENT tessera
)
# The MPI part as sources, with what they read of the library besides: they are compiled with the MPI library of a machine.
set(mpi "${PROJECT_SOURCE_DIR}/tessera/comm/backends/mpi")
file(GLOB mpi_sources "${mpi}/*.cpp")
list(FILTER mpi_sources EXCLUDE REGEX "/mpi\\.cpp$")
install(
  FILES ${mpi_sources} "${mpi}/CMakeLists.txt" "${PROJECT_SOURCE_DIR}/cmake/TesseraMpi.cmake"
  DESTINATION "${CMAKE_INSTALL_DATADIR}/tessera/mpi"
  COMPONENT tessera
)
file(GLOB mpi_headers RELATIVE "${PROJECT_SOURCE_DIR}/tessera" "${mpi}/mpi_*.h")
foreach(
  header
  IN
  LISTS mpi_headers
  ITEMS
    base/internal/vector.h
    comm/backends/flat.h
    comm/backends/own_work.h
    comm/backends/transport.h
    comm/backends/transport_call.h
    comm/group/detail/abilities.h
    comm/group/detail/call_card.h
    comm/group/internal/call_origin.h
)
  cmake_path(GET header PARENT_PATH folder)
  install(
    FILES "${PROJECT_SOURCE_DIR}/tessera/${header}"
    DESTINATION "${CMAKE_INSTALL_DATADIR}/tessera/mpi/include/tessera/${folder}"
    COMPONENT tessera
  )
endforeach()
# Fortran's module as sources, for the compilers of a machine.
install(DIRECTORY "${PROJECT_SOURCE_DIR}/tessera/c/fortran" DESTINATION "${CMAKE_INSTALL_DATADIR}/tessera" COMPONENT tessera)
install(
  FILES "${PROJECT_SOURCE_DIR}/tessera/c/detail/refuse.h"
  DESTINATION "${CMAKE_INSTALL_DATADIR}/tessera/fortran/include/tessera/c/detail"
  COMPONENT tessera
)
file(RELATIVE_PATH TESSERA_PC_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" TESSERA_PC_PREFIX "${TESSERA_PC_PREFIX}")
set(packages tessera tessera-base)
if(TARGET tessera_c_library)
  list(APPEND packages tessera-c)
endif()
if(TARGET tessera_fortran_library)
  list(APPEND packages tessera-fortran)
endif()
foreach(name IN LISTS packages)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/${name}.pc.in" "${PROJECT_BINARY_DIR}/install/${name}.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/install/${name}.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT tessera)
endforeach()
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT tessera)
