#pragma once
// Svg: pictures of rectangles and text, for the rooms that draw what they plan.
//
//   Svg svg(200, 80, 12);
//   svg.rect(20, 40, 100, 20, "fill=\"#eee\"", "rank 0: rows 0 to 5");
//   svg.text(70, 54, "a < b", "text-anchor=\"middle\"");
//   write(path, svg.finish());

#include <string>

#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera::detail {

/// A white picture of width x height pixels that shrinks to the place it is put in. Texts and
/// titles are escaped; `style` is attributes as they stand in the file.
class Svg {
 public:
  Svg(double width, double height, int font_size) {
    const std::string w = number(width), h = number(height);
    out_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << w << "\" height=\"" << h
         << "\" viewBox=\"0 0 " << w << ' ' << h << "\" font-family=\"sans-serif\" font-size=\""
         << font_size << "\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  }
  /// `title` is shown while the pointer rests on the rectangle.
  void rect(double x, double y, double width, double height, const std::string& style,
            const std::string& title = "") {
    out_ << "<rect x=\"" << number(x) << "\" y=\"" << number(y) << "\" width=\"" << number(width)
         << "\" height=\"" << number(height) << "\" " << style;
    if (title.empty()) {
      out_ << "/>\n";
    } else {
      out_ << "><title>" << markup_text(title) << "</title></rect>\n";
    }
  }
  void text(double x, double y, const std::string& text, const std::string& style = "") {
    out_ << "<text x=\"" << number(x) << "\" y=\"" << number(y) << '"' << (style.empty() ? "" : " ")
         << style << '>' << markup_text(text) << "</text>\n";
  }
  /// An element as it stands in the file.
  void element(const std::string& markup) { out_ << markup << '\n'; }
  std::string finish() {
    out_ << "</svg>\n";
    return std::move(out_).str();
  }

 private:
  static std::string number(double value) { return significant(value, 6); }
  TextStream out_;
};

}  // namespace tessera::detail
