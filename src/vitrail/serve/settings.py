"""How a server behaves: its address, and the limit to everything a client can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from vitrail.errors import ConfigError
from vitrail.fields import Config, declare, number, show, switch, whole

SHORTEST_TOKEN = 16  # letters; below that it can be guessed


def words(doc: str, default: str | None) -> Any:
    """Some text without spaces or control characters."""

    def check(name: str, value: Any, hint: Any) -> str:
        if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value:
            must = f"{name} must be ASCII text without spaces."
            raise ConfigError(must, f"{name} of another kind", f"Set {name} to such a text.")
        return value

    return declare(doc, check, default)


def seconds(doc: str, default: float) -> Any:
    return number(doc, "a number of seconds above 0", lambda x: x > 0, default)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """Everything a server is, besides its model. A request beyond a limit gets an answer that says so."""

    host: str = words("The address that is listened on", "127.0.0.1")
    port: int = whole("The port; 0 takes a free one", least=0, default=8000)
    token: str | None = words("What clients must send as Authorization: Bearer; nothing when not given", None)
    public: bool = switch("Whether whoever reaches it may ask, by any name, with no token", default=False)

    # ---- work
    queue: int = whole("Pictures inside at once: being decoded, waiting, or in the model", default=64)
    batch: int = whole("The most pictures that go through the model at once", default=16)
    deadline: float = seconds("From the end of a request to its answer; afterwards it is dropped", 10.0)
    decoders: int = whole("Processes that decode images", default=2)
    decode_time: float = seconds("Processor time for decoding one image", 3.0)
    decode_memory: int = whole("Bytes that each decoder may use for an image", default=512 * 2**20)

    # ---- requests
    body: int = whole("Bytes of one request", default=16 * 2**20)
    bodies: int = whole("Bytes of all requests together", default=256 * 2**20)
    pixels: int = whole("Pixels of one picture, as its header has them", default=25_000_000)
    side: int = whole("Pixels that an image may be wide or high", default=2**15)
    files: int = whole("Pictures in one request", default=32)
    connections: int = whole("Clients connected at once", default=512)

    # ---- patience
    header_time: float = seconds("For the head of a request", 10.0)
    body_time: float = seconds("For the whole of its body, and for a client to take its answer", 30.0)
    idle_time: float = seconds("Between two requests of one connection", 60.0)
    drain: float = seconds("For requests that are inside when the server is told to stop", 30.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set("files", min(self.files, self.queue))  # more could never be let in
        if self.port > 65535:
            raise ConfigError("port must be from 0 to 65535.", f"port={show(self.port)}", "Such as 8000.")
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            do = 'Make one: python -c "import secrets; print(secrets.token_urlsafe())".'
            raise ConfigError(f"A token must have {SHORTEST_TOKEN} letters or more.", "a shorter one", do)

    def __repr__(self) -> str:
        """Without the token, wherever this may be printed."""
        return f"ServeConfig(host={self.host!r}, port={self.port})"

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def knows(self, host: str) -> bool:
        """Whether a client that asked for this host, of which HTTP tells us, was sent here by nobody else.

        A web page may have its own name lead to this machine, and would then count as the server's. It
        cannot do that with an address, nor with localhost.
        """
        if not self.local or self.token or self.public:
            return True
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            return bool(ip_address(name))
        except ValueError:
            return name == "localhost" or name.endswith(".localhost")
