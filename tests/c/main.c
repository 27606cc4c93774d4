/* The C interface from C: c_interface_test FOLDER [mpi]; or fuzz SEED CALLS; or packages FOLDER, of
 * packages.py. */
#ifdef TESSERA_TEST_MPI
#include "tessera/c/mpi.h"
#endif
#include "models.h"
#include "support.h"

static int fuzz(unsigned long long seed, int calls) {
  tessera_job job = NULL;
  OK(tessera_start(NULL, 30, &job));
  OK(tessera_set_threads(1));
  drawn_misuse(job, seed, calls);
  after_the_end(job);
  return failures != 0;
}

static int run_packages(const char* folder) {
  tessera_job job = NULL;
  OK(tessera_start(NULL, 60, &job));
  OK(tessera_set_threads(1));
  packages(job, folder);
  OK(tessera_end(job));
  return failures != 0;
}

static tessera_job start(int mpi) {
  tessera_job job = NULL;
  tessera_tensor none = NULL;
  CODE(tessera_clone(NULL, &none), TESSERA_ERROR_NO_JOB);
  CODE(tessera_start("no such back end", 0, &job), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_start(NULL, -1, &job), TESSERA_ERROR_ARGUMENT);
  CODE(tessera_start(NULL, 0, NULL), TESSERA_ERROR_ARGUMENT);
#ifdef TESSERA_TEST_MPI
  if (mpi) {
    CODE(tessera_start_fortran(0, NULL, 60, &job), TESSERA_ERROR_ARGUMENT);
    SAYS("MPI_Init comes first");
    MPI_Init(NULL, NULL);
    CODE(tessera_start_mpi(MPI_COMM_NULL, NULL, 60, &job), TESSERA_ERROR_ARGUMENT);
    OK(tessera_start_mpi(MPI_COMM_WORLD, NULL, 60, &job));
    return job;
  }
#else
  (void)mpi;
#endif
  OK(tessera_start(NULL, 60, &job));
  return job;
}

int main(int argc, char** argv) {
  test_models();
  if (argc == 4 && strcmp(argv[1], "fuzz") == 0)
    return fuzz(strtoull(argv[2], NULL, 10), atoi(argv[3]));
  if (argc == 3 && strcmp(argv[1], "packages") == 0) return run_packages(argv[2]);
  if (argc < 2) return 2;
  const int mpi = argc > 2 && strcmp(argv[2], "mpi") == 0;
  tessera_job job = start(mpi);
  if (failures) return 1;
  OK(tessera_set_threads(1));
  fields(job);
  training(job, argv[1]);
  misuse(job);
  told(job);
  after_the_end(job);
#ifdef TESSERA_TEST_MPI
  if (mpi) {
    MPI_Finalize();
    CODE(tessera_start_mpi(MPI_COMM_WORLD, NULL, 60, &job), TESSERA_ERROR_ARGUMENT);
    SAYS("MPI is finalised");
  }
#endif
  if (failures == 0) printf("all as it should be\n");
  return failures != 0;
}
