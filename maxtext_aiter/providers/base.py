"""What a provider is: somebody who can compute an `AttentionSpec`."""

import abc

import jax

from maxtext_aiter.spec import AttentionSpec


class Provider(abc.ABC):
    """Computes attention for the specs it supports.

    `sequence` holds the layout's arrays (see `maxtext_aiter.spec`): none for dense, segment ids, or
    cumulative sequence lengths.
    """

    name: str

    @abc.abstractmethod
    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        """None if `spec` can be computed on `platform` ("cpu", "cuda", "rocm"), else why not, in words."""

    @abc.abstractmethod
    def forward(
        self, spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *sequence: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (out in q's dtype, lse in float32); a row that sees no key gives zeros and -inf."""

    @abc.abstractmethod
    def backward(
        self,
        spec: AttentionSpec,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out: jax.Array,
        lse: jax.Array,
        dout: jax.Array,
        dlse: jax.Array | None,
        *sequence: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (dq, dk, dv) in the dtype and shape of q, k, v; `dlse` None stands for zeros."""
