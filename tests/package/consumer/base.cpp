// The part without torch: no header of it needs one.
#include <tessera/mesh/mesh.h>
#include <tessera/version.h>

#include <cstdio>
#include <vector>

#ifdef TORCH_VERSION_MAJOR
#error "Tessera::base must not bring torch"
#endif

int main() {
  const tessera::Mesh mesh({{"data", 2}, {"domain", 3}});
  if (mesh.group("domain", 4) != std::vector<int>{3, 4, 5}) return 1;
  std::printf("Tessera %s: %d ranks\n", TESSERA_VERSION, mesh.size());
}
