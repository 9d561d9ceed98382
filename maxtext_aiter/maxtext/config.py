"""The configuration keys that this package adds to MaxText's, for `maxtext-aiter train`."""

from maxtext.configs.types import MaxTextConfig
from pydantic import Field

from maxtext_aiter.maxtext import compat


class AiterConfig(MaxTextConfig):
    aiter_attention_provider: str = Field(
        "auto", description="Who computes attention=aiter_flash: auto, or the name of one provider."
    )


def install() -> None:
    compat.use_config_class(AiterConfig)
