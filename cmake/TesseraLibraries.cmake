# The rooms as the libraries that users link:
#   Tessera::base     the torch-free rooms (C++ standard library only)
#   Tessera::tessera  everything that needs libtorch and nothing else

set(TESSERA_BASE_ROOMS base cluster layout partition)
set(TESSERA_TORCH_ROOMS comm gradient tensor ops nn)

function(tessera_library name)
  cmake_parse_arguments(LIB "" "" "ROOMS;LINK" ${ARGN})
  add_library(${name} SHARED)
  set_target_properties(${name} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
  foreach(room IN LISTS LIB_ROOMS)
    if(TARGET tessera_${room})
      target_link_libraries(${name} PUBLIC $<BUILD_INTERFACE:tessera_${room}>)
      target_sources(${name} PRIVATE $<TARGET_OBJECTS:tessera_${room}>)
    endif()
  endforeach()
  target_link_libraries(${name} PUBLIC ${LIB_LINK})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

tessera_library(tessera_base_library ROOMS ${TESSERA_BASE_ROOMS})
set_target_properties(tessera_base_library PROPERTIES OUTPUT_NAME tessera_base EXPORT_NAME base)
add_library(Tessera::base ALIAS tessera_base_library)

tessera_library(tessera_library ROOMS ${TESSERA_TORCH_ROOMS} LINK tessera_base_library)
set_target_properties(tessera_library PROPERTIES OUTPUT_NAME tessera EXPORT_NAME tessera)
add_library(Tessera::tessera ALIAS tessera_library)
