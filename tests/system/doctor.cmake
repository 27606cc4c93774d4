# `tessera doctor` as a user calls it.
if(NOT TARGET tessera_cli OR NOT TARGET tessera_doctor)
  return()
endif()
tessera_test(doctor SOURCES doctor_test.cpp LINK test_process TIMEOUT 300 LABELS system)
target_compile_definitions(test_doctor PRIVATE TESSERA_PROGRAM="$<TARGET_FILE:tessera_cli>")
add_dependencies(test_doctor tessera_cli tessera_doctor)
