"""The attention problems on which every provider is tested."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from maxtext_aiter.spec import AttentionSpec, SequenceLayout

HEAD_DIMS = ((32, 32), (40, 40), (59, 59), (64, 64), (96, 96), (128, 128), (160, 160), (192, 192), (256, 256), (192, 128))
SEQUENCE_PAIRS = ((113, 203), (1, 147), (147, 1), (256, 512), (512, 256), (1023, 1024), (2048, 2048))
DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: `seq` holds (seq_q, seq_k) for dense, (len_q, len_k) for each varlen sequence, or
    segment ids for each row."""

    name: str
    seq: tuple
    kind: str = "dense"
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    window: tuple[int, int] = (-1, -1)
    batch: int = 2
    gaps: bool = False  # varlen: physical sequences longer than the logical ones, and a tail after them

    def __str__(self):
        return self.name

    def spec(self, dtype: str) -> AttentionSpec:
        if self.kind == "dense":
            layout = SequenceLayout("dense", self.batch, *self.seq, *self.seq)
        elif self.kind == "segments":
            rows, length = np.shape(self.seq)
            layout = SequenceLayout("segments", rows, length, length, length, length, max_segments=4)
        else:
            (_, _), physical, tail = self._lengths()
            totals = physical.sum(1) + tail
            longest = np.asarray(self.seq).max(0)
            layout = SequenceLayout("varlen", len(self.seq), *map(int, totals), *map(int, longest), padded=self.gaps)
        (heads_q, heads_kv), (dim_qk, dim_v) = self.heads, self.dims
        return AttentionSpec(dtype, heads_q, heads_kv, dim_qk, dim_v, layout, dim_qk**-0.5, self.window)

    def _lengths(self):
        logical = np.asarray(self.seq, np.int32).T
        return logical, logical + (3 if self.gaps else 0), 5 if self.gaps else 0

    def sequence(self):
        """The layout's sequence arrays."""
        if self.kind == "dense":
            return ()
        if self.kind == "segments":
            return (jnp.asarray(self.seq, jnp.int32),)
        logical, physical, _ = self._lengths()
        cu = [jnp.asarray(np.concatenate([[0], np.cumsum(x)]), jnp.int32) for x in physical]
        return (*cu, *map(jnp.asarray, logical)) if self.gaps else tuple(cu)

    def arrays(self, dtype: str, rng):
        """q, k, v, dout in `dtype` and dlse in float32, standard normal."""
        spec = self.spec(dtype)
        layout = spec.layout
        rows = () if layout.kind == "varlen" else (layout.batch,)
        shape = lambda seq, heads, dim: (*rows, seq, heads, dim)
        shapes = (
            shape(layout.seqlen_q, spec.num_heads_q, spec.head_dim_qk),
            shape(layout.seqlen_k, spec.num_heads_kv, spec.head_dim_qk),
            shape(layout.seqlen_k, spec.num_heads_kv, spec.head_dim_v),
            spec.out_shape,
        )
        arrays = [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]
        return *arrays, jnp.asarray(rng.standard_normal(spec.lse_shape), jnp.float32)

    def blocks(self):
        """(rows of q, rows of k) of each sequence or batch row, to compare one by one.

        Index arrays [..] into the leading axis of varlen arrays, or into the batch.
        """
        if self.kind != "varlen":
            rows = self.batch if self.kind == "dense" else len(self.seq)
            return [(slice(i, i + 1),) * 2 for i in range(rows)]
        logical, physical, _ = self._lengths()
        starts = np.cumsum(physical, axis=1) - physical
        return [
            tuple(slice(s[i], s[i] + n[i]) for s, n in zip(starts, logical)) for i in range(len(self.seq))
        ]


CAUSAL = (-1, 0)
_RUNS = ((1,) * 30 + (2,) * 1 + (3,) * 60 + (0,) * 9, (1,) * 100)
_SCATTERED = ((1, 2, 1, 3) * 20, (2, 0, -1, 1) * 20)
_MANY = (tuple(np.repeat(np.arange(1, 21), 4)), (1,) * 80)

CASES = (
    *(Case(f"dims{a}-{b}", (113, 203), dims=(a, b), window=CAUSAL) for a, b in HEAD_DIMS),
    *(Case(f"seq{a}x{b}", (a, b), batch=1) for a, b in SEQUENCE_PAIRS),
    *(Case(f"seq{a}x{b}-causal", (a, b), batch=1, window=CAUSAL) for a, b in SEQUENCE_PAIRS),
    *(Case(f"group{g}", (130, 130), heads=(8, 8 // g), dims=(32, 32), window=CAUSAL) for g in (2, 8)),
    *(
        Case(f"window{left}_{right}", (200, 170), window=(left, right))
        for left, right in ((0, 0), (16, 0), (100, 30), (-1, 7), (0, -1))
    ),
    Case("varlen", ((64, 64), (1, 1), (130, 130), (77, 77)), "varlen", heads=(4, 2), window=CAUSAL),
    Case("varlen-cross", ((113, 203), (1, 147), (147, 1)), "varlen", window=CAUSAL),
    Case("varlen-full", ((30, 70), (65, 64)), "varlen", dims=(40, 24)),
    Case("varlen-empty", ((0, 5), (64, 64), (7, 0), (0, 0), (33, 33)), "varlen", heads=(4, 2), window=CAUSAL),
    Case("varlen-window", ((100, 100), (200, 200)), "varlen", window=(17, 0)),
    Case("varlen-gaps", ((64, 64), (0, 9), (100, 50)), "varlen", heads=(2, 1), window=CAUSAL, gaps=True),
    Case("segments", _RUNS, "segments", heads=(4, 2), window=CAUSAL),
    Case("segments-full", _RUNS, "segments"),
    Case("segments-window", _RUNS, "segments", window=(9, 0)),
    Case("segments-scattered", _SCATTERED, "segments", window=CAUSAL),
    Case("segments-many", _MANY, "segments", window=CAUSAL),
)
