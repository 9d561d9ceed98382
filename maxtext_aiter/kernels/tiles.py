"""What the attention kernels share: tiles in head-dim chunks, scores, masks and dropout.

Triton's tiles have power-of-two sides. A head dim that is no power of two is cut into chunks that are
(192 = 128 + 64), and a tile is the tuple of its chunks.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def width(chunks, c):
    return chunks[c]


@triton.constexpr_function
def start(chunks, c):
    return sum(chunks[:c])


@triton.constexpr_function
def to_log2(scale, soft_cap):
    """What takes a score, which is scaled already if it is capped, to powers of two."""
    return 1.4426950408889634 * (1.0 if soft_cap else scale)


@triton.jit
def zeros(rows: tl.constexpr, chunks: tl.constexpr):
    tile = ()
    for c in tl.static_range(len(chunks)):
        tile = tile + (tl.zeros([rows, width(chunks, c)], tl.float32),)
    return tile


@triton.jit
def load(base, offsets, inside, MASKED: tl.constexpr, DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """Rows at `base + offsets`; where MASKED, rows that are not `inside` are zeros."""
    tile = ()
    for c in tl.static_range(len(CHUNKS)):
        column = start(CHUNKS, c) + tl.arange(0, width(CHUNKS, c))
        pointers = base + offsets[:, None] + column[None, :]
        if start(CHUNKS, c) + width(CHUNKS, c) > DIM:
            in_dim = column[None, :] < DIM
            if MASKED:
                in_dim = in_dim & inside[:, None]
            part = tl.load(pointers, mask=in_dim, other=0.0)
        elif MASKED:
            part = tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            part = tl.load(pointers)
        tile = tile + (part,)
    return tile


@triton.jit
def store(base, offsets, inside, tile, factor, DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """Stores `tile` times `factor` (a column); a factor of 0 stores zeros whatever the tile holds."""
    for c in tl.static_range(len(CHUNKS)):
        column = start(CHUNKS, c) + tl.arange(0, width(CHUNKS, c))
        value = tl.where(factor[:, None] == 0.0, 0.0, tile[c] * factor[:, None])
        mask = inside[:, None]
        if start(CHUNKS, c) + width(CHUNKS, c) > DIM:
            mask = mask & (column[None, :] < DIM)
        tl.store(base + offsets[:, None] + column[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def times_transposed(a, b, CHUNKS: tl.constexpr):
    """a bᵀ, the contraction running over the chunks; float32 stays float32 (no tf32)."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    for c in tl.static_range(1, len(CHUNKS)):
        product = tl.dot(a[c], tl.trans(b[c]), product, input_precision="ieee")
    return product


@triton.jit
def add_times(tile, a, b, CHUNKS: tl.constexpr):
    """tile + a b, chunk by chunk."""
    total = ()
    for c in tl.static_range(len(CHUNKS)):
        total = total + (tl.dot(a.to(b[c].dtype), b[c], tile[c], input_precision="ieee"),)
    return total


@triton.jit
def scale_rows(tile, factor, CHUNKS: tl.constexpr):
    scaled = ()
    for c in tl.static_range(len(CHUNKS)):
        scaled = scaled + (tile[c] * factor[:, None],)
    return scaled


@triton.jit
def soft_cap(scores, SCALE: tl.constexpr, CAP: tl.constexpr):
    """cap · tanh(scale · scores / cap)."""
    return CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E * SCALE / CAP)) + 1.0))


@triton.constexpr_function
def threshold(rate):
    return round(rate * 2**32)


@triton.jit
def kept(dropout_key, head, query, key, RATE: tl.constexpr):
    """Which probabilities dropout keeps: Philox at the counter (key, query, head), so that the backward
    kernels, whatever their tiles, see the mask of the forward kernel."""
    seed = tl.load(dropout_key + 1).to(tl.uint64) << 32 | tl.load(dropout_key).to(tl.uint64)
    random, _, _, _ = tl.philox(seed, key, query, head, tl.zeros_like(key))
    return random >= threshold(RATE)
