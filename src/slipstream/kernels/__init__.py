"""The compiled core and its numpy twin behind plain functions; `native.core is None` decides which serves."""

from slipstream.kernels.measure import choose_threads, read_bandwidth
from slipstream.kernels.native import info, set_threads
from slipstream.kernels.pack import Packed, from_panels, linear, pack, pack_stacked, unpack_rows

__all__ = [
    "Packed",
    "choose_threads",
    "from_panels",
    "info",
    "linear",
    "pack",
    "pack_stacked",
    "read_bandwidth",
    "set_threads",
    "unpack_rows",
]
