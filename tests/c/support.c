#include "support.h"

int failures = 0;

int expect_code(tessera_result got, tessera_result wanted, const char* what, const char* file,
                int line) {
  if (got == wanted) return 1;
  ++failures;
  fprintf(stderr, "%s:%d: %s gives %s, not %s: %s\n", file, line, what, tessera_result_name(got),
          tessera_result_name(wanted), got ? tessera_message() : "");
  return 0;
}

int expect_true(int condition, const char* what, const char* file, int line) {
  if (condition) return 1;
  ++failures;
  fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
  return 0;
}

int expect_near(double a, double b, double limit, const char* what, const char* file, int line) {
  if (fabs(a - b) <= limit * (1 + fabs(b))) return 1;
  ++failures;
  fprintf(stderr, "%s:%d: %s is %.17g, not %.17g\n", file, line, what, a, b);
  return 0;
}

int expect_words(const char* words, const char* file, int line) {
  if (strstr(tessera_message(), words)) return 1;
  ++failures;
  fprintf(stderr, "%s:%d: '%s' lacks '%s'\n", file, line, tessera_message(), words);
  return 0;
}

unsigned draw(unsigned long long* seed, unsigned n) {
  *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(*seed >> 33) % n;
}

static void place(parts* p) {
  p->at[0] = p->rank / p->grid[1];
  p->at[1] = p->rank % p->grid[1];
  for (int d = 0; d < 2; ++d) {
    p->whole[d] = p->first[d] = 0;
    for (int c = 0; c < p->grid[d]; ++c) {
      if (c == p->at[d]) p->first[d] = p->whole[d];
      p->whole[d] += p->sizes[d][c];
    }
    p->own[d] = p->sizes[d][p->at[d]];
  }
}

parts draw_parts(tessera_job job, unsigned long long* seed, int64_t most) {
  parts p;
  OK(tessera_rank(job, &p.rank, &p.ranks));
  do p.grid[0] = 1 + (int)draw(seed, (unsigned)p.ranks);
  while (p.ranks % p.grid[0]);
  p.grid[1] = p.ranks / p.grid[0];
  for (int d = 0; d < 2; ++d)
    for (int c = 0; c < p.grid[d]; ++c)
      p.sizes[d][c] = (int64_t)draw(seed, (unsigned)most) + (c == 0 ? 1 : 0);
  place(&p);
  return p;
}

parts split(tessera_job job, int p0, int64_t nx, int64_t ny) {
  parts p;
  OK(tessera_rank(job, &p.rank, &p.ranks));
  p.grid[0] = p0;
  p.grid[1] = p.ranks / p0;
  const int64_t whole[2] = {nx, ny};
  for (int d = 0; d < 2; ++d) {
    /* The first ones have two cells more than the last. */
    int64_t left = whole[d];
    for (int c = p.grid[d] - 1; c >= 0; --c) {
      const int64_t even = left / (c + 1);
      p.sizes[d][c] = c == 0 ? left : (even > 1 ? even - 1 : even);
      left -= p.sizes[d][c];
    }
  }
  place(&p);
  return p;
}

tessera_mesh mesh_of(tessera_job job, const parts* of) {
  tessera_mesh mesh = NULL;
  const char* names[] = {"x", "y"};
  OK(tessera_mesh_create(job, 2, names, of->grid, NULL, &mesh));
  int at[2] = {-1, -1};
  OK(tessera_mesh_coordinate(mesh, at));
  TRUE(at[0] == of->at[0] && at[1] == of->at[1]);
  return mesh;
}

tessera_mesh mesh_alone(tessera_job job) {
  tessera_mesh mesh = NULL;
  const char* names[] = {"x", "y"};
  const int one[] = {1, 1};
  int rank = 0;
  OK(tessera_rank(job, &rank, NULL));
  OK(tessera_mesh_create(job, 2, names, one, &rank, &mesh));
  return mesh;
}
