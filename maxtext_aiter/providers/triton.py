"""`triton`: our own flash attention on any GPU that Triton compiles for."""

from maxtext_aiter.providers.base import Provider
from maxtext_aiter.spec import AttentionSpec


class TritonProvider(Provider):
    name = "triton"

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        from maxtext_aiter.kernels import launch

        if reason := launch.why_missing(platform):
            return reason
        if max(spec.head_dim_qk, spec.head_dim_v) > 256:
            return f"head_dim {max(spec.head_dim_qk, spec.head_dim_v)} is over 256"
        if spec.scale <= 0:
            return f"scale {spec.scale} is not positive"
        return None

    def forward(self, spec, q, k, v, *sequence):
        from maxtext_aiter.kernels import attention

        return attention.forward(spec, q, k, v, *sequence)

    def backward(self, spec, q, k, v, out, lse, dout, dlse, *sequence):
        from maxtext_aiter.kernels import attention

        return attention.backward(spec, q, k, v, out, lse, dout, dlse, *sequence)
