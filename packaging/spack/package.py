# For spack, as packages/tessera/package.py. `scripts/recipes` fills in version, address and sum;
# a release puts the result beside its files.
#
# CHECKED: it runs with stand-ins for spack's functions (the test build.recipes); all packages and
# variants that it names are in spack-packages of July 2026; what it gives CMake configures the
# release's archive on Debian 12, with that system's libraries and PyPI's libtorch.
# NOT CHECKED: concretizing, building, `spack style`: spack itself was not to be had.

from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Tessera(CMakePackage):
    """Distributed training for libtorch: sharded tensors, from C++, C, Fortran and Python."""

    url = "@ADDRESS@"

    license("Apache-2.0")

    version("@VERSION@", sha256="@SHA256@")

    variant("mpi", default=True, description="Groups over MPI")
    variant("fortran", default=False, description="module tessera")
    variant("fields", default=False, description="Read netCDF and HDF5 files")

    generator("ninja")
    extends("python")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("fortran", type="build", when="+fortran")
    conflicts("%gcc@:11", msg="C++20 as GCC 12 has it")

    depends_on("cmake@3.25:", type="build")
    depends_on("py-pip", type="build")
    depends_on("py-setuptools@77:", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-torch@2.11:", type=("build", "link", "run"))
    depends_on("cli11", type="build")
    depends_on("nlohmann-json@3.10:", type="build")
    depends_on("yaml-cpp@0.6:+shared")
    depends_on("hwloc")
    depends_on("mpi", when="+mpi")
    depends_on("netcdf-c~mpi", when="+fields")
    depends_on("hdf5~mpi", when="+fields")
    depends_on("zlib-api", when="+fields")
    depends_on("zstd", when="+fields")
    depends_on("c-blosc", when="+fields")

    def cmake_args(self):
        platlib = self.spec["python"].package.platlib
        torch = join_path(self.spec["py-torch"].prefix, platlib, "torch")
        args = [self.define("TESSERA_TORCH", torch), self.define("TESSERA_NCCL", "OFF")]
        for part in ("TESTS", "EXAMPLES", "BENCH"):
            args.append(self.define("TESSERA_" + part, False))
        args.append(self.define_from_variant("TESSERA_MPI", "mpi"))
        args.append(self.define_from_variant("TESSERA_FORTRAN", "fortran"))
        # One of the system's is not looked at either.
        without = ["METIS"] if self.spec.satisfies("+fields") else ["METIS", "NETCDF", "HDF5", "ZLIB", "ZSTD", "BLOSC"]
        for part in without:
            args.append(self.define("TESSERA_" + part + "_INCLUDE", False))
        return args

    @run_after("install")
    def install_package(self):
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--prefix=" + self.prefix]
        python("-m", "pip", "install", *options, "-Cbuild=" + self.build_directory, "./python")
