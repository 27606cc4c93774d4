#ifndef TESSERA_C_MPI_H
#define TESSERA_C_MPI_H
/* tessera_start_mpi(): for programs in C that use MPI themselves. Compiled with the caller's own
 * MPI, so that no type of it crosses the library. */

#include <mpi.h>

#include "tessera/c/tessera.h"

/* tessera_start_fortran() for a communicator of C. Collective over the communicator. */
static inline tessera_result tessera_start_mpi(MPI_Comm communicator, const char* backend,
                                               double timeout, tessera_job* job) {
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  /* Otherwise MPI ends the process at the next line; the call refuses. */
  const int usable = initialised && !finalised;
  return tessera_start_fortran(usable ? (int)MPI_Comm_c2f(communicator) : 0, backend, timeout, job);
}

#endif
