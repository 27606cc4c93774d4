# tessera_stand_in: the stand-in device. Its objects are linked as they are, since they register themselves.
set(device "${CMAKE_CURRENT_LIST_DIR}")
add_library(
  tessera_stand_in
  OBJECT
  "${device}/calls.cpp"
  "${device}/device.cpp"
  "${device}/memory.cpp"
  "${device}/operators.cpp"
  "${device}/transport.cpp"
)
tessera_unity(tessera_stand_in 5)
target_link_libraries(tessera_stand_in PRIVATE tessera_flags PUBLIC Tessera::tessera)
# As programs are compiled, so that the precompiled header serves.
set_target_properties(tessera_stand_in PROPERTIES POSITION_INDEPENDENT_CODE OFF)
tessera_use_full_pch(tessera_stand_in)
target_include_directories(tessera_stand_in INTERFACE "${device}" "${PROJECT_SOURCE_DIR}/tests/tensor")
