#include "image.h"

#include <cstdint>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace pictures {

namespace {

std::string base64(const std::string& bytes) {
  static constexpr char digits[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 3; ++k)
      group = group << 8 | (i + k < bytes.size() ? static_cast<std::uint8_t>(bytes[i + k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k)
      text += i + k > bytes.size() ? '=' : digits[group >> (18 - 6 * k) & 63];
  }
  return text;
}

}  // namespace

std::string image_uri(const at::Tensor& rgb) {
  if (rgb.dim() != 3 || rgb.size(2) != 3 || rgb.scalar_type() != at::kByte)
    throw tessera::InvalidArgument(
        tessera::concat("an image is bytes [height, width, 3], not ", rgb.sizes()));
  // In the file: blue, green, red, rows from the bottom, each padded to four bytes.
  const at::Tensor pixels = rgb.flip({0, 2}).contiguous();
  const std::int64_t height = pixels.size(0), width = pixels.size(1), row = (3 * width + 3) / 4 * 4;
  std::string bytes = "BM";
  const auto number = [&](std::int64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i) & 255);
  };
  constexpr std::int64_t start = 14 + 40;
  number(start + row * height, 4), number(0, 4), number(start, 4);
  number(40, 4), number(width, 4), number(height, 4), number(1, 2), number(24, 2);
  number(0, 4), number(row * height, 4), number(2835, 4), number(2835, 4), number(0, 4),
      number(0, 4);
  const auto* data = pixels.const_data_ptr<std::uint8_t>();
  for (std::int64_t y = 0; y < height; ++y) {
    bytes.append(reinterpret_cast<const char*>(data + 3 * y * width),
                 static_cast<std::size_t>(3 * width));
    bytes.append(static_cast<std::size_t>(row - 3 * width), '\0');
  }
  return "data:image/bmp;base64," + base64(bytes);
}

}  // namespace pictures
