#pragma once
// Bitmaps inside a page.

#include <torch/torch.h>

#include <string>

namespace pictures {

/// "data:image/bmp;base64,..." of bytes [height, width, 3], red, green, blue, rows from the top:
/// the simplest image that every browser shows.
std::string image_uri(const at::Tensor& rgb);

}  // namespace pictures
