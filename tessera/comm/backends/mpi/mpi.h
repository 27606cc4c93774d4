#pragma once
// MPI as a backend of groups: any MPI 3 library that CMake found. Needs no <mpi.h>; programs that
// hold a communicator of their own include mpi_interop.h.
//
//   auto mpi = MpiWorld::initialize();  // under mpirun or srun; initialises MPI unless somebody
//     has
//   auto backend = make_mpi_backend(mpi, {0, 2, 3});  // called by ranks 0, 2 and 3 alone
//
// What waits, and how long: a call that is started (asyncOp = true) is nonblocking MPI, progressed
// inside MPI calls of this process, and its wait() has a deadline. A blocking call (asyncOp =
// false) first meets the other ranks with a deadline, and then makes MPI's blocking call, which is
// up to twice as fast. If a rank dies or stops inside that short second part, MPI cannot be
// interrupted: a watchdog says so after the time limit, names the rank it runs on, and ends the
// job. After a TimeoutError the backend refuses further calls, and MPI is not finalised: the
// launcher then ends what is left of the job.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Backend;
}

namespace tessera {

struct Launch;

namespace detail {
class MpiContext;
}

/// What MPI lets the threads of a process do. At `single` and `funneled`, calls on MPI groups come
/// from the thread that initialised MPI; at `serialized` from any thread, and the program keeps its
/// own MPI calls apart from ours; at `multiple` from any thread at any time.
enum class MpiThreadLevel : unsigned char { single, funneled, serialized, multiple };
const char* to_string(MpiThreadLevel level);

/// True if this build contains the MPI part. Without it, every call below throws NotAvailable.
bool has_mpi();

/// The ranks from which groups are made, and the life of MPI in this process. A value; copies share
/// one state. Whoever calls MPI_Init calls MPI_Finalize: the last copy of a world that initialised
/// MPI finalises it, unless an exception is in flight or a call timed out (then other ranks may
/// wait for this one for ever; not finalising makes the launcher end the job). MPI cannot be
/// initialised twice, so the last copy belongs at the end of main().
class MpiWorld {
 public:
  /// All ranks of MPI_COMM_WORLD. Calls MPI_Init_thread if nobody did. If somebody else has
  /// initialised MPI, its level stands, and MPI_COMM_WORLD is duplicated, so that all its ranks
  /// must come here; for fewer ranks use mpi_world() of mpi_interop.h. Throws CommError if the
  /// library grants less than `wanted` to an initialisation of ours and `wanted` is above funneled,
  /// or MPI is finalised already.
  static MpiWorld initialize(MpiThreadLevel wanted = MpiThreadLevel::funneled);
  explicit MpiWorld(std::shared_ptr<detail::MpiContext> context);

  int rank() const;
  int size() const;
  MpiThreadLevel thread_level() const;
  /// First line of MPI_Get_library_version: "Open MPI v4.1.4, ...".
  std::string library() const;
  /// MPI_Get_processor_name.
  std::string host() const;
  /// Who this process is among these ranks, as MPI knows it. Collective over them.
  Launch launch() const;

  /// Ends the whole job: prints rank, host and reason to standard error, then MPI_Abort with exit
  /// status 1.
  [[noreturn]] void fatal(const std::string& reason) const;

  const std::shared_ptr<detail::MpiContext>& context() const { return context_; }

 private:
  std::shared_ptr<detail::MpiContext> context_;
};

struct MpiBackendOptions {
  /// Of the group, for messages.
  std::string name = "mpi";
  /// Of calls that give none, and of making the backend.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Elements of one MPI message at most; more travel in pieces. MPI 3 counts with `int`; tests set
  /// less.
  std::int64_t max_count = std::numeric_limits<int>::max();
};

/// The backend of the group of these ranks of `world`, in this order. Called by its members alone,
/// all with the same list; each group made once at a time. Throws InvalidArgument for a bad list,
/// TimeoutError naming the ranks of `world` that did not come.
///
/// The result is also a detail::UnevenBackend and a detail::ReducingBackend. CPU tensors of any
/// dtype move; sum, product, min, max of all numeric dtypes and bool (or, and, and, or), band, bor,
/// bxor of integers and bool, avg and premultiplied of floating and complex ones reduce. half and
/// bfloat16 are summed in float32.
c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const MpiWorld& world,
                                                   const std::vector<int>& ranks,
                                                   const MpiBackendOptions& options = {});

}  // namespace tessera
