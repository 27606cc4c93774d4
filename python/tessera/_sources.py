"""Sources: named arrays in files, of which a rank reads its own part."""

import os
from dataclasses import dataclass

import torch

from tessera._data import Dataset
from tessera._library import ops


class Source:
    """Named arrays in a file, read by hyperslab, so that a rank reads its own shard and nothing else. `kind`: "netcdf", "hdf5", "zarr" or "safetensors".

    Raises FileError for a file that cannot be opened, NotAvailable for a kind that this build lacks.

    >>> ts.save({"wind": torch.ones(12, 3, 4)}, mesh, "winds.safetensors")
    >>> winds = ts.Source("safetensors", "winds.safetensors")
    >>> winds.variables, winds.shape("wind"), winds.dims("wind")
    (['wind'], (12, 3, 4), ('dim0', 'dim1', 'dim2'))
    >>> winds.read("wind", start=[5], count=[1]).shape  # month 5, all of the other dims
    torch.Size([1, 3, 4])
    """

    def __init__(self, kind, path):
        self._handle = ops.source(kind, os.fspath(path))

    @property
    def variables(self):
        """Names, in the file's order."""
        return list(self._handle.variables())

    def dims(self, variable):
        """Names of the dims, outermost first. Raises VariableError, with the names that there are."""
        return tuple(self._handle.dims(variable))

    def shape(self, variable):
        """Sizes of the dims. Raises VariableError, with the names that there are."""
        return tuple(self._handle.shape(variable))

    def read(self, variable, start=(), count=(), stride=(), *, dtype=torch.float32, decode=True, missing=float("nan")):
        """Indices start, start + stride, ... (count of them) per dim; dims that are left out at the end are read completely.

        `decode`: scale, offset and missing values as the file's conventions say; `missing`: what a missing value becomes.
        Raises VariableError for an unknown variable, RangeError for indices that it does not have.
        """
        return self._handle.read(variable, list(start), list(count), list(stride), dtype, decode, float(missing))

    def __repr__(self):
        return f"Source({self._handle.name()}: {', '.join(self.variables)})"


def NetcdfSource(path):
    """The numeric variables of a netCDF file. Raises FileError, or NotAvailable without the netCDF library.

    >>> def winds_of(month):                             # of a file that there is
    ...     return ts.NetcdfSource("winds.nc").read("UWND", start=[month], count=[1])
    """
    return Source("netcdf", path)


def Hdf5Source(path):
    """The numeric datasets of an HDF5 file. Raises FileError, or NotAvailable without the HDF5 library.

    >>> def snapshot(step):                              # of a file that there is
    ...     return ts.Hdf5Source("run.h5").read("fields/density", start=[step], count=[1])
    """
    return Source("hdf5", path)


def ZarrSource(path):
    """The numeric arrays of a Zarr group, or one array, of formats 2 and 3. Raises FileError; a read raises NotAvailable for compressors but zlib and gzip.

    >>> def temperature(hour):                           # of a folder that there is
    ...     return ts.ZarrSource("era5.zarr").read("t2m", start=[hour], count=[1])
    """
    return Source("zarr", path)


def SafetensorsSource(path):
    """The tensors of a safetensors file. Raises FileError.

    >>> ts.save({"wind": torch.ones(12, 3)}, mesh, "winds.safetensors")
    >>> ts.SafetensorsSource("winds.safetensors").read("wind", [2], [4]).shape
    torch.Size([4, 3])
    """
    return Source("safetensors", path)


@dataclass(frozen=True)
class SourceField:
    """One tensor of a sample: a variable, or a box of it. Dim 0 is the samples'.

    >>> rows = ts.SourceField("wind", start=(0, 1), count=(12, 2))      # of each sample the elements 1 and 2
    """

    variable: str
    start: tuple = ()
    count: tuple = ()
    stride: tuple = ()
    decode: bool = True


def SourceDataset(source, fields):
    """Samples out of a source, each a hyperslab; `fields`: names of variables, or `SourceField`s.

    Raises VariableError and RangeError for what the source does not have, InvalidArgument for no fields.

    >>> ts.save({"wind": torch.ones(12, 3), "month": torch.arange(12.0)}, mesh, "winds.safetensors")
    >>> source = ts.SafetensorsSource("winds.safetensors")
    >>> data = ts.SourceDataset(source, ["month", ts.SourceField("wind", start=(0, 1), count=(12, 2))])
    >>> data[3]
    (tensor(3.), tensor([1., 1.]))
    """
    fields = [SourceField(f) if isinstance(f, str) else f for f in fields]
    return Dataset(ops.source_dataset(source._handle, [(f.variable, list(f.start), list(f.count), list(f.stride), f.decode) for f in fields]), keep=source)
