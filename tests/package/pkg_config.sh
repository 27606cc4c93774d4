#!/usr/bin/env bash
# pkg_config.sh COMPILER FOLDER_OF_PC_FILES WORK: builds and runs the two programs with what pkg-config says.
set -euo pipefail
export PKG_CONFIG_PATH=$2
here=$(dirname "$0")
mkdir -p "$3"
# shellcheck disable=SC2046
"$1" -std=c++20 "$here/consumer/base.cpp" $(pkg-config --cflags --libs tessera-base) -o "$3/base"
# shellcheck disable=SC2046
"$1" -std=c++20 "$here/consumer/main.cpp" $(pkg-config --cflags --libs tessera) -o "$3/main"
"$3/base"
"$3/main"
