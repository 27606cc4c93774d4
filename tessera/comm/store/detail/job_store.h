#pragma once
// JobStore: the job's store as a c10d::Store.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/store/detail/store_connection.h"

namespace tessera::detail {

/// Calls block up to getTimeout() and then throw c10::DistStoreError. Copies made by clone() share
/// the connection and have a time limit of their own.
class JobStore : public c10d::Store {
 public:
  JobStore(std::shared_ptr<StoreConnection> connection, std::chrono::milliseconds limit)
      : Store(limit), connection_(std::move(connection)) {}

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) override;
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

  /// Makes this store's pending and later calls throw; its clones are not affected.
  void interrupt();

 private:
  std::string call(Frame kind, const std::function<void(Writer&)>& fields,
                   std::chrono::milliseconds limit) const;

  std::shared_ptr<StoreConnection> connection_;
  std::atomic<bool> stop_{false};
};

}  // namespace tessera::detail
