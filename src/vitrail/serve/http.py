"""An HTTP/1.1 connection: h11 parses; timeouts, size limits and disconnects are handled here.

Every wait has a timeout, unread data is bounded, and every client that can still receive gets a response.
"""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from socket import SO_ERROR, SOL_SOCKET

import h11

from vitrail.serve.messages import (
    MAX_HEAD,
    Client,
    HTTPError,
    Request,
    Response,
    busy,
    malformed,
    timed_out,
    too_large,
)
from vitrail.serve.server_settings import ServeConfig

MAX_CHUNKS = 2**14  # chunks of one body
MAX_UNREAD = 2**16  # bytes that may arrive before they are needed
LINGER = 2.0  # seconds for a client that is still sending to read an early error response
GRACE = 0.5  # seconds for requests that are on their way when the server stops
PROBE = 0.5  # seconds between checks whether a half-closed client is still there

SECURITY = [
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),
]
SINGLE = (b"host", b"authorization", b"origin", b"content-type")  # must not be repeated
CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")


class Application:
    """The interface between the connections and the routes."""

    def __init__(self, settings: ServeConfig) -> None:
        self.settings = settings
        self.connections: set[Connection] = set()
        self.stopping = False
        self.body_bytes = 0  # in memory, of all connections

    async def respond(self, request: Request) -> Response:
        """Handle a request; may raise HTTPError."""
        raise NotImplementedError

    def internal_error(self, error: Exception) -> HTTPError:
        """The response to an unexpected exception."""
        raise NotImplementedError

    def record_response(self, request: Request | None, status: int, seconds: float) -> None:
        """Called after every response. Status 499: the client left first. None: not a valid request."""


class BodyCount:
    """The bytes of a request body in memory, within the limits of a request and of all requests."""

    def __init__(self, app: Application) -> None:
        self.app, self.bytes = app, 0

    def check(self, more: int) -> None:
        """Raise an error if so many more bytes are too many."""
        settings = self.app.settings
        if self.bytes + more > settings.body:
            raise too_large(settings.body)
        if self.app.body_bytes + more > settings.bodies:
            raise busy("The server has no memory left for request bodies")

    def add(self, count: int) -> None:
        self.check(count)
        self.bytes += count
        self.app.body_bytes += count

    def release(self) -> None:
        self.app.body_bytes -= self.bytes
        self.bytes = 0


class Connection(asyncio.Protocol):
    """One client connection."""

    transport: asyncio.Transport
    client: Client

    def __init__(self, app: Application) -> None:
        self.app = app
        self.parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self.task: asyncio.Task[None] | None = None
        self.data_arrived, self.ended, self.flushed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle = self.discarding = False
        self.unread = 0  # bytes since the parser last needed data
        self.body = BodyCount(app)

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.client = Client(client_network(transport.get_extra_info("peername")))
        transport.set_write_buffer_limits(0)  # so that `flushed` means that the kernel has everything
        self.flushed.set()
        if len(self.app.connections) >= 2 * self.app.settings.connections:
            transport.abort()  # not even an error response
        else:
            self.app.connections.add(self)
            self.task = asyncio.get_running_loop().create_task(self.run())

    def data_received(self, data: bytes) -> None:
        self.unread += len(data)
        if not self.discarding:
            self.parser.receive_data(data)
            if self.unread > MAX_UNREAD:
                self.transport.pause_reading()
        self.data_arrived.set()

    def eof_received(self) -> bool:
        """The client has finished sending but may still wait for its response: keep our side open."""
        if not self.ended.is_set() and not self.discarding:
            self.parser.receive_data(b"")
        self.ended.set()
        self.data_arrived.set()
        return True

    def pause_writing(self) -> None:
        self.flushed.clear()

    def resume_writing(self) -> None:
        self.flushed.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The client has disconnected: cancel the work for it."""
        self.app.connections.discard(self)
        if self.task is not None:
            self.task.cancel()

    # ---- connection ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve requests until either side closes the connection."""
        try:
            if len(self.app.connections) > self.app.settings.connections:
                limit = f"The server accepts at most {self.app.settings.connections} connections"
                await self.send(busy(limit).response())
                self.app.record_response(None, 503, 0.0)
            else:
                while await self.serve_one():
                    self.parser.start_next_cycle()
            await self.close()
        except TimeoutError:  # the client does not read its response
            pass
        finally:
            self.transport.abort()

    async def serve_one(self) -> bool:
        """Serve one request; return whether another may follow."""
        clock = asyncio.get_running_loop().time
        request, start = None, clock()
        try:
            try:
                if not await self.wait_for_request():
                    return False
                start = clock()
                request = await self.read_head()
                response = await self.respond(request)
            except h11.RemoteProtocolError as error:
                response = malformed(error.error_status_hint).response()
            except HTTPError as error:
                response = error.response()
            except Exception as error:
                response = self.app.internal_error(error).response()
            await self.send(response, with_body=request is None or request.method != "HEAD")
            self.app.record_response(request, response.status, clock() - start)
        except (asyncio.CancelledError, TimeoutError):
            if request is not None:
                self.app.record_response(request, 499, clock() - start)
            raise
        finally:
            self.body.release()
        return self.parser.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}

    async def respond(self, request: Request) -> Response:
        """The response of the app, unless the client disconnects first."""
        watch = asyncio.get_running_loop().create_task(self.watch_for_disconnect())
        try:
            return await self.app.respond(request)
        finally:
            watch.cancel()

    async def watch_for_disconnect(self) -> None:
        """Find out whether a client that has closed its sending side still waits for its response.

        A disconnected client looks the same until something is sent to it. 100 Continue is harmless, since
        clients skip it; if the client is gone, its system replies with a reset.
        """
        await self.ended.wait()
        await asyncio.sleep(PROBE)
        if self.parser.their_http_version == b"1.1":
            self.write(CONTINUE)
        socket = self.transport.get_extra_info("socket")
        while not socket.getsockopt(SOL_SOCKET, SO_ERROR):
            await asyncio.sleep(PROBE)
        self.transport.abort()

    async def close(self) -> None:
        """Close our side and wait a little for the client to close its own.

        Closing while the client still sends would reset the connection before it has read the response.
        """
        self.discarding, self.unread = True, 0
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self.transport.resume_reading()
        try:
            async with asyncio.timeout(LINGER):
                while not self.ended.is_set() and self.unread <= self.app.settings.body:
                    self.data_arrived.clear()
                    await self.data_arrived.wait()
        except TimeoutError:
            pass

    def close_if_idle_soon(self) -> None:
        """The server is stopping: close the connection unless a request arrives within a moment."""
        asyncio.get_running_loop().call_later(GRACE, self.close_if_idle)

    def close_if_idle(self) -> None:
        if self.idle:
            self.transport.abort()

    # ---- reading ----------------------------------------------------------------------------

    async def next_event(self) -> h11.Event | type[h11.PAUSED]:
        """The next event of the parser."""
        await asyncio.sleep(0)  # one client must not block the loop, however much it has sent
        while (event := self.parser.next_event()) is h11.NEED_DATA:
            await self.wait_for_data()
        return event  # type: ignore[return-value]

    async def wait_for_data(self) -> None:
        self.unread = 0
        self.data_arrived.clear()
        if not self.ended.is_set():
            self.transport.resume_reading()
        await self.data_arrived.wait()

    async def wait_for_request(self) -> bool:
        """Whether a request arrives; a connection without one is closed silently."""
        settings, first = self.app.settings, self.parser.their_http_version is None
        timeout = settings.header_time if first else settings.idle_time
        self.idle = True
        try:
            async with asyncio.timeout(GRACE if self.app.stopping else timeout):
                while not any(self.parser.trailing_data):
                    await self.wait_for_data()
        except TimeoutError:
            return False
        finally:
            self.idle = False
        return self.parser.trailing_data != (b"", True)  # only the end of the stream

    async def read_head(self) -> Request:
        timeout = self.app.settings.header_time
        try:
            async with asyncio.timeout(timeout):
                event = await self.next_event()
        except TimeoutError:
            raise timed_out("head", timeout) from None
        if not isinstance(event, h11.Request) or not event.http_version.startswith(b"1."):
            raise malformed(400)
        target = event.target.decode("ascii")
        if not target.startswith("/") and "://" in target:  # the absolute form, as proxies send it
            target = "/" + target.partition("://")[2].partition("/")[2]
        path, _, query = target.partition("?")
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        check_headers([name for name, _ in event.headers], headers)
        if sum(len(name) + len(value) for name, value in event.headers) + len(target) > MAX_HEAD:
            raise malformed(431)
        if {"content-length", "transfer-encoding"} <= headers.keys():  # request smuggling
            raise malformed(400)
        length = int(headers.get("content-length", 0))
        if not length and "transfer-encoding" not in headers:
            await self.next_event()  # the end of a request without a body
        method = event.method.decode("ascii")
        return Request(method, path, query, headers, lambda: self.read_body(length), self.client)

    async def read_body(self, length: int) -> bytes:
        """Read the body, counting its bytes: Content-Length may be wrong, and chunks have none."""
        settings = self.app.settings
        if self.parser.their_state is not h11.SEND_BODY:
            return b""
        self.body.check(length)
        if self.parser.they_are_waiting_for_100_continue:
            self.write(CONTINUE)
        parts: list[bytes] = []
        chunks = 0
        try:
            async with asyncio.timeout(settings.body_time):
                while isinstance(event := await self.next_event(), h11.Data):
                    parts.append(bytes(event.data))
                    chunks += event.chunk_start
                    self.body.add(len(event.data))
                    if chunks > MAX_CHUNKS:
                        message = f"A body may have at most {MAX_CHUNKS:,} chunks; send larger ones."
                        raise HTTPError(413, "too_many_chunks", message)
        except TimeoutError:
            raise timed_out("body", settings.body_time) from None
        self.unread = len(self.parser.trailing_data[0])
        if self.unread <= MAX_UNREAD and not self.ended.is_set():
            self.transport.resume_reading()  # otherwise a disconnect would go unnoticed
        return b"".join(parts)

    # ---- writing ----------------------------------------------------------------------------

    def write(self, *events: h11.Event) -> None:
        self.transport.write(b"".join(self.parser.send(event) or b"" for event in events))

    async def send(self, response: Response, with_body: bool = True) -> None:
        """Send a response, without its body for HEAD."""
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", response.kind),
            ("Content-Length", str(len(response.body))),
            *SECURITY,
            *response.headers,
        ]
        if (
            self.app.stopping or self.parser.their_state is not h11.DONE
        ):  # no further request, or the body was not read
            headers.append(("Connection", "close"))
        body = [h11.Data(data=response.body)] if with_body else []
        reason = HTTPStatus(response.status).phrase.encode()
        head = h11.Response(status_code=response.status, headers=headers, reason=reason)
        self.write(head, *body, h11.EndOfMessage())
        async with asyncio.timeout(self.app.settings.body_time):
            await self.flushed.wait()


def check_headers(names: list[bytes], headers: dict[str, str]) -> None:
    """Refuse a repeated or empty header that proxies and servers may interpret differently."""
    for name in SINGLE:
        if names.count(name) > 1:
            message = f"The header {name.decode().title()} appears more than once; send it once."
            raise HTTPError(400, "repeated_header", message)
    if not headers.get("host", "-").strip():
        raise HTTPError(400, "no_host", "The Host header is empty; send the name of the server.")


def client_network(peer: tuple[str, int] | None) -> str:
    """The address of a client; of IPv6 the first 64 bits, since a client can choose the rest."""
    if not peer:
        return ""  # it has disconnected already
    address = ip_address(peer[0].partition("%")[0])
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or address.exploded[:19])
    return str(address)
