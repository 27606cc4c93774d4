#pragma once
// The job's secret as one end of a connection to the store knows it, and the proofs of the two
// ends.

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/comm/store/detail/hmac.h"
#include "tessera/comm/store/detail/wire.h"
#include "tessera/launch/internal/secret.h"

namespace tessera::detail {

/// `name` says where it comes from: "given" (Launch::secret), "agent" (torchrun's store), the name
/// of a secret file, "none" (there is none), or empty: still unknown.
struct Secret {
  std::string name, value;

  static Secret none() { return {std::string(kNoSecret), {}}; }
  static Secret given(std::string value) { return {"given", std::move(value)}; }
};

/// The fields by which a rank introduces itself, as its proof, which follows them, covers them.
inline Writer hello_fields(std::int32_t rank, std::int32_t world, std::int64_t limit,
                           std::string_view who, std::string_view job, std::string_view nonce) {
  return Writer(Frame::hello)
      .number(rank)
      .number(world)
      .number(limit)
      .text(who)
      .text(job)
      .text(nonce);
}

/// The rank's proof, over its hello and the store's nonce, so that it cannot be used a second time.
inline std::string rank_proof(const Secret& secret, std::string_view store_nonce,
                              std::string_view fields) {
  return hmac_sha256(secret.value, std::string("tessera rank ").append(store_nonce).append(fields));
}
/// The store's proof, made for that rank.
inline std::string store_proof(const Secret& secret, std::string_view store_nonce,
                               std::string_view fields) {
  return hmac_sha256(secret.value,
                     std::string("tessera store ").append(store_nonce).append(fields));
}

}  // namespace tessera::detail
