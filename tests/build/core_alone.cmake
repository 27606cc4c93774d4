# Configures SOURCE into WORK with every folder hidden in which CMake would find a library, and builds the room base. What the other rooms of the
# core include is checked by rooms.py on the compile commands.
file(REMOVE_RECURSE "${WORK}")
# All programs that there are: the two that a compiler starts.
foreach(tool IN ITEMS as ld)
  find_program(${tool}_program ${tool} REQUIRED)
  file(MAKE_DIRECTORY "${WORK}/programs")
  file(CREATE_LINK "${${tool}_program}" "${WORK}/programs/${tool}" SYMBOLIC)
endforeach()
set(
  alone
  ${CMAKE_COMMAND}
  -E
  env
  --unset=CMAKE_PREFIX_PATH
  --unset=PKG_CONFIG_PATH
  PATH=${WORK}/programs
)
execute_process(
  COMMAND
    ${alone} ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER}
    -DTESSERA_TORCH=${TORCH} -DTESSERA_TESTS=OFF -DTESSERA_APPS=OFF -DTESSERA_EXAMPLES=OFF -DTESSERA_BENCH=OFF
    "-DCMAKE_IGNORE_PREFIX_PATH=/usr;/usr/local;/usr/local/cuda;/" -DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF
  OUTPUT_VARIABLE output
  ERROR_VARIABLE output
  RESULT_VARIABLE result
)
if(result)
  message(FATAL_ERROR "the core does not configure alone:\n${output}")
endif()
if(output MATCHES "(MPI|NCCL) part:")
  message(FATAL_ERROR "the test hides nothing:\n${output}")
endif()
file(READ "${WORK}/build.ninja" build)
foreach(room IN LISTS ROOMS)
  if(EXISTS "${SOURCE}/tessera/${room}/CMakeLists.txt" AND NOT build MATCHES "tessera_${room}")
    message(FATAL_ERROR "the core alone lacks the room ${room}:\n${output}")
  endif()
endforeach()
execute_process(
  COMMAND ${alone} ${CMAKE_COMMAND} --build ${WORK} --target tessera_base
  COMMAND_ERROR_IS_FATAL ANY
  OUTPUT_QUIET
)
