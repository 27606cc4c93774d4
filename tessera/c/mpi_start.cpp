#include <mpi.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>

#include "tessera/c/detail/call.h"
#include "tessera/c/detail/mpi_start.h"
#include "tessera/comm/job/mpi_interop.h"

namespace tessera::c {

namespace {

// A port that is free now.
int free_port() {
  const int s = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s < 0) throw CommError("no socket for the job's store");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  const bool got = ::bind(s, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                   ::getsockname(s, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  ::close(s);
  if (!got) throw CommError("no free port for the job's store");
  return ntohs(address.sin_port);
}

std::string random_secret() {
  std::random_device device;
  TextStream out;
  for (int i = 0; i < 8; ++i) out << std::hex << device();
  return out.str();
}

struct Meeting {
  int port = 0;  // -1: the first rank could not give one
  char secret[80] = {};
  char host[MPI_MAX_PROCESSOR_NAME] = {};
};

Meeting meeting_of_first(const MpiWorld& world, MPI_Comm communicator) {
  Meeting meeting;
  if (world.rank() == 0) {
    try {
      meeting.port = free_port();
    } catch (const std::exception&) {
      meeting.port = -1;
    }
    random_secret().copy(meeting.secret, sizeof meeting.secret - 1);
    world.host().copy(meeting.host, sizeof meeting.host - 1);
  }
  MPI_Bcast(&meeting, sizeof meeting, MPI_BYTE, 0, communicator);
  if (meeting.port < 0) throw CommError("the first rank got no port for the job's store");
  return meeting;
}

}  // namespace

void join_mpi(int communicator, ManagerOptions& options) {
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (!initialised || finalised)
    refuse(initialised ? "MPI is finalised: the job comes before MPI_Finalize"
                       : "MPI is not initialised: MPI_Init comes first");
  const MPI_Comm given = MPI_Comm_f2c(static_cast<MPI_Fint>(communicator));
  options.mpi = mpi_world(given);
  if (options.backend.empty()) options.backend = "mpi";
  if (options.mpi->size() == 1) return;
  Launch launch = options.mpi->launch();
  const Meeting meeting = meeting_of_first(*options.mpi, given);
  launch.address = launch.local_size == launch.world_size ? "127.0.0.1" : meeting.host;
  launch.port = meeting.port;
  launch.secret = meeting.secret;
  options.launch = launch;
}

}  // namespace tessera::c
