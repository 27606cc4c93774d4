#pragma once
// What libtessera_mpi.so gives libtessera.so. It alone knows <mpi.h>, so that one libtessera.so
// serves every MPI library.

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/backends/mpi/mpi_attempt.h"

namespace tessera::detail {

/// The ranks of an MpiWorld: a communicator that groups are made from.
class MpiRanks : public std::enable_shared_from_this<MpiRanks>, Pinned {
 public:
  virtual ~MpiRanks() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual MpiThreadLevel thread_level() const = 0;
  virtual std::string host() const = 0;
  virtual Launch launch(std::chrono::milliseconds limit) = 0;
  [[noreturn]] virtual void fatal(const std::string& reason) const = 0;
  virtual std::shared_ptr<Transport> make_transport(const std::vector<int>& ranks,
                                                    const MpiBackendOptions& options,
                                                    const MpiAttempt& attempt) = 0;

 protected:
  int rank_ = 0;
  int size_ = 1;
};

/// The entry point of the library, found by name: its functions, which throw the library's errors.
struct MpiPart {
  /// The versions of Tessera, libtorch and this interface that it was compiled for.
  const char* made_for;
  /// Compiled with Open MPI's <mpi.h>; false: with that of MPICH and its kin.
  bool of_open_mpi;
  std::string (*library)();
  std::shared_ptr<MpiRanks> (*initialize)(MpiThreadLevel wanted);
  std::shared_ptr<MpiRanks> (*of_communicator)(int handle, std::chrono::milliseconds limit);
};
using MpiPartEntry = const MpiPart* (*)();
inline constexpr const char* kMpiPartEntry = "tessera_mpi_part";
extern "C" const MpiPart* tessera_mpi_part();

}  // namespace tessera::detail
