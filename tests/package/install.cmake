# Installs BUILD into FIRST, and moves the result to MOVED: an install tree must not know where it was.
foreach(folder IN ITEMS "${FIRST}" "${MOVED}")
  file(REMOVE_RECURSE "${folder}")
endforeach()
execute_process(
  COMMAND ${CMAKE_COMMAND} --install "${BUILD}" --prefix "${FIRST}"
  OUTPUT_QUIET
  COMMAND_ERROR_IS_FATAL ANY
)
file(RENAME "${FIRST}" "${MOVED}")

# No header of it includes one that is not there, and no file of the package names a room's target or this build tree.
file(GLOB_RECURSE headers RELATIVE "${MOVED}/include" "${MOVED}/include/*.h")
list(LENGTH headers count)
if(count LESS 10)
  message(FATAL_ERROR "only ${count} headers were installed")
endif()
foreach(header IN LISTS headers)
  file(STRINGS "${MOVED}/include/${header}" lines REGEX "^#include \"")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" included "${line}")
    if(NOT EXISTS "${MOVED}/include/${included}")
      message(FATAL_ERROR "${header} includes ${included}, which is not installed")
    endif()
  endforeach()
endforeach()
file(GLOB_RECURSE package "${MOVED}/*.cmake" "${MOVED}/*.pc")
foreach(file IN LISTS package)
  file(
    STRINGS "${file}"
    leaks
    REGEX "tessera_(base|launch|mesh|partition|sampling|schedule|shm|comm|gradient|tensor|ops|nn|pipeline|checkpoint|flags|pch)[^_a-z]|${BUILD}/"
  )
  list(FILTER leaks EXCLUDE REGEX "libtessera_base|-ltessera_base")
  if(leaks)
    message(FATAL_ERROR "${file} leaks: ${leaks}")
  endif()
endforeach()
message(STATUS "${count} headers installed")
if(EXISTS "${MOVED}/bin/tessera")
  execute_process(COMMAND "${MOVED}/bin/tessera" --help OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endif()
