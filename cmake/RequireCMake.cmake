# cmake -P RequireCMake.cmake: fails where this CMake is too old for the project (scripts/bootstrap then fetches another).
cmake_minimum_required(VERSION 3.25)
