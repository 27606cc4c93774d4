#pragma once
// MPI as a backend of groups: any MPI 3 library, through libtessera_mpi.so, which is compiled with
// it and loaded when it is asked for. This header needs no <mpi.h>; programs that have a
// communicator of their own include mpi_interop.h.
//
//   // under mpirun or srun; initialises MPI unless the program has
//   auto mpi = MpiWorld::initialize();
//   auto backend = make_mpi_backend(mpi, {0, 2, 3});  // called by ranks 0, 2 and 3 alone
//
// Waits and their limits: a call that is started (asyncOp = true) is nonblocking MPI, and its
// wait() has a deadline. The ranks first compare it; its data is issued, in the order of the calls,
// by the next wait, test or call of this process on any group, and then progresses inside MPI calls
// of this process. So finish it, or test it, before waiting elsewhere for a rank that waits for it.
// A blocking call (asyncOp = false) first meets the other ranks with a deadline, and then makes
// MPI's blocking call, which is up to twice as fast. If a rank dies or stops inside that short
// second part, MPI cannot be interrupted: a watchdog reports it after the time limit, names the
// rank it runs on, and ends the job. After a TimeoutError the backend refuses further calls, and
// MPI is not finalised: the launcher then ends the rest of the job.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"

namespace c10d {
class Backend;
}

namespace tessera {

struct Launch;

namespace detail {
class MpiRanks;
}

/// Which threads of a process may call MPI. At `single` and `funneled`, calls on MPI groups come
/// from the thread that initialised MPI; at `serialized` from any thread, and the program must not
/// make MPI calls of its own at the same time; at `multiple` from any thread at any time.
enum class MpiThreadLevel : unsigned char { single, funneled, serialized, multiple };
const char* to_string(MpiThreadLevel level);

/// True if the MPI part is there and loads. Otherwise every call below throws NotAvailable, which
/// says what lacks.
bool has_mpi();
/// First line of MPI_Get_library_version: "Open MPI v4.1.4, ...". May be asked before MPI_Init.
std::string mpi_library();

/// The ranks from which groups are made, and the lifetime of MPI in this process. A value; copies
/// share one state. Whoever calls MPI_Init calls MPI_Finalize: the last copy of a world that
/// initialised MPI finalises it, unless an exception is being thrown or a call timed out (other
/// ranks may then wait for this one for ever; without finalising, the launcher ends the job). MPI
/// cannot be initialised twice, so keep the last copy until the end of main().
class MpiWorld {
 public:
  /// All ranks of MPI_COMM_WORLD. Calls MPI_Init_thread unless MPI is initialised. If the program
  /// has initialised it, its thread level is kept, and MPI_COMM_WORLD is duplicated, so that all
  /// its ranks must make this call; for fewer ranks use mpi_world() of mpi_interop.h. Throws
  /// CommError if MPI is finalised already, or if the library grants less than `wanted` when
  /// initialised here and `wanted` is above funneled.
  static MpiWorld initialize(MpiThreadLevel wanted = MpiThreadLevel::funneled);
  /// The ranks of a communicator of the program, by its handle in Fortran (MPI_Comm_c2f, or py2f()
  /// of mpi4py). Does and throws what mpi_world() of mpi_interop.h does.
  static MpiWorld of_communicator(int handle, std::chrono::milliseconds limit = kDefaultLimit);
  explicit MpiWorld(std::shared_ptr<detail::MpiRanks> ranks);

  int rank() const;
  int size() const;
  MpiThreadLevel thread_level() const;
  /// What MPI_Get_processor_name returns.
  std::string host() const;
  /// This process' rank, world size, local rank and host as MPI knows them. Collective over the
  /// world.
  Launch launch() const;
  /// launch(), and an address and port of the first rank where the ranks can meet: a manager with
  /// it has a store, by which ranks learn of each other's mistakes. Collective over the world.
  /// Throws CommError if the first rank gets no port.
  Launch launch_with_store(std::chrono::milliseconds limit) const;
  /// The first rank's text, on all ranks; below 1024 bytes. Collective over the world.
  std::string first(const std::string& text, std::chrono::milliseconds limit) const;

  /// Ends the whole job: prints rank, host and reason to standard error, then calls MPI_Abort with
  /// exit status 1.
  [[noreturn]] void fatal(const std::string& reason) const;

  const std::shared_ptr<detail::MpiRanks>& ranks() const { return ranks_; }

 private:
  std::shared_ptr<detail::MpiRanks> ranks_;
};

struct MpiBackendOptions {
  /// Name of the group, for messages.
  std::string name = "mpi";
  /// Time limit of calls that give none, and of making the backend.
  std::chrono::milliseconds timeout = kDefaultLimit;
  /// Largest number of elements in one MPI message; more travel in several. MPI 3 counts with
  /// `int`; tests set less.
  std::int64_t max_count = std::numeric_limits<int>::max();
};

/// Makes the backend of a group of these ranks of `world`, in this order. Called by its members
/// alone, all with the same list, one group after the other. Throws InvalidArgument for a bad list,
/// and TimeoutError naming the ranks of `world` that did not come.
///
/// The result moves CPU tensors of any dtype, with any counts. It reduces by
/// sum, product, min and max all numeric dtypes and bool (as or, and, and, or), by band, bor and
/// bxor integers and bool, and by avg and premultiplied floating and complex ones. half and
/// bfloat16 are summed in float32.
c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const MpiWorld& world,
                                                   const std::vector<int>& ranks,
                                                   const MpiBackendOptions& options = {});

}  // namespace tessera
