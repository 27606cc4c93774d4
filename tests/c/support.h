/* Checks, drawn numbers and uneven decompositions for the tests in C. */
#ifndef TESSERA_TESTS_C_SUPPORT_H
#define TESSERA_TESTS_C_SUPPORT_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/c/tessera.h"

extern int failures;

#define OK(call) expect_code((call), TESSERA_OK, #call, __FILE__, __LINE__)
#define CODE(call, code) expect_code((call), (code), #call, __FILE__, __LINE__)
#define TRUE(condition) expect_true((condition), #condition, __FILE__, __LINE__)
#define NEAR(a, b, limit) expect_near((a), (b), (limit), #a, __FILE__, __LINE__)
#define SAYS(words) expect_words((words), __FILE__, __LINE__)

/* Whether it is what was wanted; counts a failure otherwise. */
int expect_code(tessera_result got, tessera_result wanted, const char* what, const char* file,
                int line);
int expect_true(int condition, const char* what, const char* file, int line);
int expect_near(double a, double b, double limit, const char* what, const char* file, int line);
/* That the message of the last error has these words. */
int expect_words(const char* words, const char* file, int line);

/* 0 to n - 1, from a seed that all ranks share. */
unsigned draw(unsigned long long* seed, unsigned n);

/* Uneven parts of two dims over the ranks of a job, as a solver has them. */
typedef struct {
  int rank, ranks;
  int grid[2], at[2];
  int64_t sizes[2][8];
  int64_t whole[2], first[2], own[2];
} parts;

/* p x q ranks, p * q = ranks; parts may be empty. */
parts draw_parts(tessera_job job, unsigned long long* seed, int64_t most);
/* These parts: nx and ny cells over p x (ranks / p). */
parts split(tessera_job job, int p, int64_t nx, int64_t ny);
tessera_mesh mesh_of(tessera_job job, const parts* of);
/* A mesh of this rank alone. */
tessera_mesh mesh_alone(tessera_job job);

void fields(tessera_job job);
void training(tessera_job job, const char* folder);
void packages(tessera_job job, const char* folder);
void misuse(tessera_job job);
void told(tessera_job job);
void drawn_misuse(tessera_job job, unsigned long long seed, int calls);
void after_the_end(tessera_job job);

#endif
