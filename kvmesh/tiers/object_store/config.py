"""What the object tier may be told."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectConfig:
    """The settings of one object tier. Raises ConfigError, which names the field and its value.

    `url` is "s3://bucket/prefix", or another kind that obstore knows (gs, az, file). Credentials and endpoint come from
    the usual environment variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, and
    AWS_ALLOW_HTTP=true for an endpoint without TLS). `identity` is what the blocks belong to beyond what their keys say
    (the layout of the shards); blocks of another identity are never seen.
    """

    url: str
    identity: str
    readers: int = 16  # gets under way
    writers: int = 8  # puts under way
    queue_ops: int = 1024  # waiting gets, and as many puts
    queue_bytes: int = 256 << 20  # of each
    timeout_s: float = 10.0  # of one request
    connect_s: float = 2.0
    retries: int = 3  # by the library, within `timeout_s`

    def __post_init__(self) -> None:
        for name, least, most in (
            ("readers", 1, 256),
            ("writers", 1, 256),
            ("queue_ops", 1, 1 << 30),
            ("queue_bytes", 1, 1 << 50),
            ("timeout_s", 0.01, 3600),
            ("connect_s", 0.01, 3600),
            ("retries", 0, 100),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name}={value!r}: must be in {least}..{most}", field=name)
        if "://" not in self.url:
            raise ConfigError(f"url={self.url!r}: must be like s3://bucket/prefix", field="url")
