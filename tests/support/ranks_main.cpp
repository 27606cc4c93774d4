#include "ranks.h"

int main(int argc, char** argv) { return tessera::test::run_ranks(argc, argv); }
