"""Block sizes, warps and pipeline stages: a small table for each architecture."""

from typing import NamedTuple


class BlockSizes(NamedTuple):
    """`block_m` query rows by `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class KernelSizes(NamedTuple):
    forward: BlockSizes
    dq: BlockSizes
    dkdv: BlockSizes


# By the larger head dim, up to the one given.
_TABLES = {
    "sm_90": {
        64: KernelSizes(BlockSizes(128, 64, 4, 3), BlockSizes(128, 64, 4, 3), BlockSizes(64, 128, 4, 3)),
        128: KernelSizes(BlockSizes(128, 64, 8, 3), BlockSizes(128, 64, 8, 3), BlockSizes(64, 128, 8, 3)),
        256: KernelSizes(BlockSizes(128, 32, 8, 3), BlockSizes(64, 64, 8, 2), BlockSizes(32, 64, 8, 2)),
    },
}


def kernel_sizes(spec, arch: str) -> KernelSizes:
    """The sizes for `spec` on `arch`."""
    if arch == "interpreter":
        small = BlockSizes(32, 32, 4, 1)
        return KernelSizes(small, small, small)
    table = _TABLES.get(arch, _TABLES["sm_90"])
    dim = max(spec.head_dim_qk, spec.head_dim_v)
    return next(sizes for limit, sizes in table.items() if dim <= limit)
