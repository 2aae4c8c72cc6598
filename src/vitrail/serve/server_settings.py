"""The settings of a server: its address, and a limit for everything that a client can request."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.base.fields import Config, boolean, declare, documented, integer, number, short_repr

MIN_TOKEN = 16  # characters; a shorter one could be guessed


def _text(doc: str, default: str | None) -> Any:
    """ASCII text without spaces or control characters."""

    def check(name: str, value: Any, hint: Any) -> str:
        if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value:
            raise ConfigError(f"{name} must be ASCII text without spaces or control characters.")
        return value

    return declare(doc, check, default)


def _seconds(doc: str, default: float) -> Any:
    return number(doc, "a positive number of seconds", lambda x: x > 0, default)


@documented
@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """The settings of a server. A request beyond a limit gets an error that names the limit."""

    host: str = _text("The address to listen on", "127.0.0.1")
    port: int = integer("The port; 0 chooses a free one", least=0, default=8000)
    token: str | None = _text("The bearer token that clients must send; None for no authentication", None)
    public: bool = boolean(
        "Whether to allow other machines and any Host header without a token", default=False
    )

    # ---- work
    queue: int = integer(
        "The number of images in progress at once: decoding, waiting, or in the model", default=64
    )
    batch: int = integer("The maximum batch size", default=16)
    deadline: float = _seconds("Seconds from receiving a request to its response; later it is dropped", 10.0)
    decoders: int = integer("The number of processes that decode images", default=2)
    decode_time: float = _seconds("CPU seconds for decoding one image", 3.0)
    decode_memory: int = integer(
        "Bytes of memory that each decoder may use for an image", default=512 * 2**20
    )

    model_memory: int | None = integer(
        "Bytes of memory for each model: its weights and a batch, which is made smaller to fit", default=None
    )

    # ---- requests
    body: int = integer("The maximum bytes of a request body", default=16 * 2**20)
    bodies: int = integer("The maximum bytes of all request bodies in memory", default=256 * 2**20)
    pixels: int = integer(
        "The maximum number of pixels of an image, read from its header", default=25_000_000
    )
    side: int = integer("The maximum width or height of an image, in pixels", default=2**15)
    files: int = integer("The maximum number of images in a request", default=32)
    connections: int = integer("The maximum number of open connections", default=512)

    # ---- timeouts
    header_time: float = _seconds("Seconds to receive the head of a request", 10.0)
    body_time: float = _seconds(
        "Seconds to receive a request body, and for a client to receive its response", 30.0
    )
    idle_time: float = _seconds("Seconds that a connection may be idle between two requests", 60.0)
    drain: float = _seconds("Seconds to finish the requests in progress when the server stops", 30.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("files", min(self.files, self.queue))  # more could never be accepted
        if self.port > 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {short_repr(self.port)}.")
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise ConfigError(
                f"token must have at least {MIN_TOKEN} characters; create one with "
                'python -c "import secrets; print(secrets.token_urlsafe())".'
            )

    def __repr__(self) -> str:
        """Without the token, so that it is never printed."""
        return f"ServeConfig(host={self.host!r}, port={self.port})"

    @property
    def local(self) -> bool:
        """Whether the server is reachable only from this machine."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def accepts_host(self, host: str) -> bool:
        """Whether a request with this Host header is accepted: the protection against DNS rebinding.

        A web page can point its own domain name at this machine and would then have the server's origin. It
        cannot do that with an IP address or with localhost.
        """
        if not self.local or self.token or self.public:
            return True
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            return bool(ip_address(name))
        except ValueError:
            return name == "localhost" or name.endswith(".localhost")
