"""What is to be computed: frozen, hashable, validated once, and knowing nothing of who computes it.

Shapes, by layout (`num_heads` differs between q and k/v under grouped-query attention):

============ ============================ ============================ =========================
layout       q, k, v                      sequence arrays (int32)      lse (float32)
============ ============================ ============================ =========================
``dense``    [batch, seq, heads, dim]     none                         [batch, heads, seq_q]
``segments`` [batch, seq, heads, dim]     segment_ids [batch, seq]     [batch, heads, seq_q]
``varlen``   [total, heads, dim]          cu_seqlens_q, cu_seqlens_k   [heads, total_q]
                                          [num_seqs + 1]; if `padded`
                                          also seqlens_q, seqlens_k
                                          [num_seqs]
============ ============================ ============================ =========================
"""

import dataclasses
from typing import Literal

DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """How sequences lie in the arrays.

    Attributes:
      kind: see the table in this module's docstring.
      batch: rows (dense, segments) or sequences (varlen).
      seqlen_q, seqlen_k: tokens a row (dense, segments) or in all (varlen).
      max_seqlen_q, max_seqlen_k: no sequence is longer.
      padded: varlen only: `cu_seqlens` are physical offsets and the arrays `seqlens_*` hold each
        sequence's real length, which may be less.
      max_segments: segments only: documents a row that providers working on `cu_seqlens` reserve
        room for. A batch with more is still computed correctly, only slower.
    """

    kind: Literal["dense", "varlen", "segments"]
    batch: int
    seqlen_q: int
    seqlen_k: int
    max_seqlen_q: int
    max_seqlen_k: int
    padded: bool = False
    max_segments: int = 0

    @property
    def num_sequence_arrays(self) -> int:
        return {"dense": 0, "segments": 1, "varlen": 4 if self.padded else 2}[self.kind]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One attention: softmax(scale · q kᵀ + mask) v.

    A query at position i of its sequence sees the keys j with
    i + (len_k - len_q) - window[0] <= j <= i + (len_k - len_q) + window[1] (aligned bottom-right, as
    AITER and flash-attention do); -1 is unbounded, so causal is window[1] == 0.
    """

    dtype: str
    num_heads_q: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    layout: SequenceLayout
    scale: float
    window: tuple[int, int] = (-1, -1)

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise TypeError(f"q, k, v are {self.dtype}; supported are {', '.join(DTYPES)}")
        if self.num_heads_kv == 0 or self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"{self.num_heads_q} query heads are not a multiple of {self.num_heads_kv} key/value heads"
            )
        # A bound that no pair can exceed is none: providers then see the simplest equal mask.
        left, right = self.window
        if left >= self.layout.max_seqlen_k - 1:
            left = -1
        if right >= max(self.layout.max_seqlen_q, 2) - 1:
            right = -1
        object.__setattr__(self, "window", (left, right))

    @property
    def causal(self) -> bool:
        return self.window[1] == 0

    @property
    def lse_shape(self) -> tuple[int, ...]:
        layout = self.layout
        if layout.kind == "varlen":
            return (self.num_heads_q, layout.seqlen_q)
        return (layout.batch, self.num_heads_q, layout.seqlen_q)

    @property
    def out_shape(self) -> tuple[int, ...]:
        layout = self.layout
        rows = () if layout.kind == "varlen" else (layout.batch,)
        return (*rows, layout.seqlen_q, self.num_heads_q, self.head_dim_v)
