# A part that comes after the first configure is found by the next, and one that goes is not linked with: configures a project of TesseraParts alone in WORK.
file(REMOVE_RECURSE "${WORK}")
file(
  WRITE "${WORK}/CMakeLists.txt"
  "cmake_minimum_required(VERSION 3.25)
project(parts CXX)
set(TESSERA_MPI OFF)
set(TESSERA_NCCL OFF)
include(${SOURCE}/cmake/TesseraParts.cmake)
tessera_part(late HEADER tessera_late.h LIBRARY tessera_late DEBIAN liblate-dev)
message(STATUS \"late: has \${TESSERA_HAS_LATE} links \${TESSERA_LATE_TARGET}.\")
"
)
function(configured expected)
  execute_process(
    COMMAND
      ${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER}
      -DCMAKE_PREFIX_PATH=${WORK}/prefix ${ARGN}
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
    RESULT_VARIABLE result
  )
  if(result OR NOT output MATCHES "late: has ${expected}\\.")
    message(FATAL_ERROR "expected '${expected}':\n${output}")
  endif()
endfunction()
configured("OFF links ")
file(WRITE "${WORK}/prefix/include/tessera_late.h" "")
file(WRITE "${WORK}/prefix/lib/libtessera_late.so" "")
configured("ON links tessera_late")
file(REMOVE "${WORK}/prefix/lib/libtessera_late.so")
configured("OFF links ")
configured("ON links tessera_late" "-DTESSERA_LATE_LIBRARY=${WORK}/mine.so")
