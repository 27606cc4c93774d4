#include "tessera/comm/backends/shm/shm.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm_transport.h"
#include "tessera/shm/group.h"

namespace tessera {

shm::Directory directory_at(const c10::intrusive_ptr<c10d::Store>& store) {
  shm::Directory directory;
  directory.put = [store](const std::string& key, const std::string& bytes) {
    store->set(key, std::vector<std::uint8_t>(bytes.begin(), bytes.end()));
  };
  directory.get = [store](const std::string& key, std::chrono::milliseconds limit) {
    // For some stores a limit of zero means no limit.
    store->wait({key}, std::max(limit, std::chrono::milliseconds(1)));
    const auto bytes = store->get(key);
    return std::string(bytes.begin(), bytes.end());
  };
  directory.erase = [store](const std::string& key) { store->deleteKey(key); };
  return directory;
}

std::shared_ptr<detail::Transport> make_shm_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      const ShmOptions& options) {
  return make_shm_transport(directory_at(store), rank, size, options);
}

std::shared_ptr<detail::Transport> make_shm_transport(const shm::Directory& directory, int rank,
                                                      int size, const ShmOptions& options) {
  shm::Options meeting;
  meeting.name = options.name;
  meeting.timeout = bounded_limit(options.timeout);
  auto ranks = options.ranks;
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  const Deadline deadline = deadline_after(meeting.timeout);
  try {
    auto link = std::make_shared<detail::ShmLink>(shm::Group::meet(rank, size, directory, meeting),
                                                  std::move(ranks), options.watch);
    return std::make_shared<detail::ShmTransport>(std::move(link), meeting.timeout);
  } catch (const shm::SetupError& error) {
    // The group's watch derives from the text which rank is missing or gone.
    if (error.cause() == shm::Cause::absent)
      throw std::runtime_error(concat(
          time_left(deadline).count() == 0 ? "timed out: " : "connection closed: ", error.what()));
    throw NotAvailable(concat("group '", options.name, "' over shm: ", error.what(),
                              "; choose another backend for it (gloo, mpi)"));
  } catch (const shm::TimeoutError& error) {
    throw std::runtime_error(concat("timed out: ", error.what()));
  } catch (const shm::PeerLostError& error) {
    throw std::runtime_error(concat("connection closed: ", error.what()));
  }
}

}  // namespace tessera
