#include "tessera/launch/internal/secret.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {

std::string new_secret() {
  unsigned char bytes[16];
  if (::getentropy(bytes, sizeof bytes) != 0)
    throw Error(std::string("the system gives no random bytes for the job's secret: ") +
                std::strerror(errno));
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

}  // namespace tessera
