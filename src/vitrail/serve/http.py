"""HTTP/1.1 with one client. h11 knows the grammar; time, size and leaving are looked after here.

Every wait has an end, nothing is kept that nobody asked for, and whoever can still listen gets an answer.
"""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from socket import SO_ERROR, SOL_SOCKET

import h11

from vitrail.serve.messages import HEAD, Client, Refusal, Request, Response, busy, malformed, slow, too_large
from vitrail.serve.settings import ServeConfig

CHUNKS = 2**14  # of one body
AHEAD = 2**16  # bytes that may come before anybody wants them
LINGER = 2.0  # seconds for a client that is still sending to read why nobody listens
GRACE = 0.5  # seconds for requests that are on their way when the server is told to stop
DOUBT = 0.5  # seconds after which we ask whether a client that has sent its last byte is still there

SECURITY = [
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),
]
SINGLE = (b"host", b"authorization", b"origin", b"content-type")  # what we decide by
CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")


class Site:
    """The server as its connections see it."""

    def __init__(self, settings: ServeConfig) -> None:
        self.settings = settings
        self.connections: set[Connection] = set()
        self.stopping = False
        self.held = 0  # bytes of bodies, of all connections

    async def answer(self, request: Request) -> Response:
        """What the client gets; it may raise a Refusal instead."""
        raise NotImplementedError

    def failed(self, error: Exception) -> Refusal:
        """What a client is told of a mistake of ours."""
        raise NotImplementedError

    def done(self, request: Request | None, status: int, seconds: float) -> None:
        """Told of every answer. Status 499: the client left before it. None: it was no request."""


class Connection(asyncio.Protocol):
    """One client, from its first byte to its last."""

    transport: asyncio.Transport
    client: Client

    def __init__(self, site: Site) -> None:
        self.site = site
        self.parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)
        self.task: asyncio.Task[None] | None = None
        self.news, self.ended, self.flushed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle = self.deaf = False
        self.unread = 0  # bytes since the parser asked for more
        self.held = 0  # bytes of the body

    # ---- what asyncio calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.client = Client(network_of(transport.get_extra_info("peername")))
        transport.set_write_buffer_limits(0)  # `flushed` then means that the system has taken everything
        self.flushed.set()
        if len(self.site.connections) >= 2 * self.site.settings.connections:
            transport.abort()  # there is not even room to say no
        else:
            self.site.connections.add(self)
            self.task = asyncio.get_running_loop().create_task(self.run())

    def data_received(self, data: bytes) -> None:
        self.unread += len(data)
        if not self.deaf:
            self.parser.receive_data(data)
            if self.unread > AHEAD:
                self.transport.pause_reading()
        self.news.set()

    def eof_received(self) -> bool:
        """The client sends no more, and may wait for its answer all the same: keep our side open."""
        if not self.ended.is_set() and not self.deaf:
            self.parser.receive_data(b"")
        self.ended.set()
        self.news.set()
        return True

    def pause_writing(self) -> None:
        self.flushed.clear()

    def resume_writing(self) -> None:
        self.flushed.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The client has gone: whatever is under way for it ends."""
        self.site.connections.discard(self)
        if self.task is not None:
            self.task.cancel()

    # ---- its life ---------------------------------------------------------------------------

    async def run(self) -> None:
        """One request after the other, until one of the two has had enough."""
        try:
            if len(self.site.connections) > self.site.settings.connections:
                most = f"At most {self.site.settings.connections} clients may be connected."
                await self.send(busy(most, "one more").response())
                self.site.done(None, 503, 0.0)
            else:
                while await self.serve_one():
                    self.parser.start_next_cycle()
            await self.close()
        except TimeoutError:  # the client does not take its answer
            pass
        finally:
            self.transport.abort()

    async def serve_one(self) -> bool:
        """Answer one request. Whether another may follow."""
        clock = asyncio.get_running_loop().time
        request, start = None, clock()
        try:
            try:
                if not await self.begins():
                    return False
                start = clock()
                request = await self.read_head()
                response = await self.answer(request)
            except h11.RemoteProtocolError as error:
                response = malformed(error.error_status_hint).response()
            except Refusal as refusal:
                response = refusal.response()
            except Exception as error:
                response = self.site.failed(error).response()
            await self.send(response, whole=request is None or request.method != "HEAD")
            self.site.done(request, response.status, clock() - start)
        except (asyncio.CancelledError, TimeoutError):
            if request is not None:
                self.site.done(request, 499, clock() - start)
            raise
        finally:
            self.site.held -= self.held
            self.held = 0
        return self.parser.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}

    async def answer(self, request: Request) -> Response:
        """The site's answer, unless the client leaves before there is one."""
        watch = asyncio.get_running_loop().create_task(self.watch())
        try:
            return await self.site.answer(request)
        finally:
            watch.cancel()

    async def watch(self) -> None:
        """Find out whether a client that has sent its last byte waits for its answer, or has gone.

        Both look the same until something is sent to it. HTTP has something that means nothing: 100
        Continue, which clients skip. Where nobody is left to skip it, the other system says so.
        """
        await self.ended.wait()
        await asyncio.sleep(DOUBT)
        if self.parser.their_http_version == b"1.1":
            self.write(CONTINUE)
        socket = self.transport.get_extra_info("socket")
        while not socket.getsockopt(SOL_SOCKET, SO_ERROR):
            await asyncio.sleep(DOUBT)
        self.transport.abort()

    async def close(self) -> None:
        """Say that this was all, and wait a little for the client to close.

        To close while it still sends would take the answer from it before it is read.
        """
        self.deaf, self.unread = True, 0
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self.transport.resume_reading()
        try:
            async with asyncio.timeout(LINGER):
                while not self.ended.is_set() and self.unread <= self.site.settings.body:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            pass

    def hurry(self) -> None:
        """The server stops. Who asks nothing within a moment has to go."""
        asyncio.get_running_loop().call_later(GRACE, self.leave)

    def leave(self) -> None:
        if self.idle:
            self.transport.abort()

    # ---- reading ----------------------------------------------------------------------------

    async def next_event(self) -> h11.Event | type[h11.PAUSED]:
        """What the client says next."""
        await asyncio.sleep(0)  # nobody keeps the loop to himself, however much he has sent at once
        while (event := self.parser.next_event()) is h11.NEED_DATA:
            await self.more()
        return event  # type: ignore[return-value]

    async def more(self) -> None:
        self.unread = 0
        self.news.clear()
        if not self.ended.is_set():
            self.transport.resume_reading()
        await self.news.wait()

    async def begins(self) -> bool:
        """Whether a request comes; a connection without any is closed without a word."""
        settings, first = self.site.settings, self.parser.their_http_version is None
        patience = settings.header_time if first else settings.idle_time
        self.idle = True
        try:
            async with asyncio.timeout(GRACE if self.site.stopping else patience):
                while not any(self.parser.trailing_data):
                    await self.more()
        except TimeoutError:
            return False
        finally:
            self.idle = False
        return self.parser.trailing_data != (b"", True)  # its end alone

    async def read_head(self) -> Request:
        patience = self.site.settings.header_time
        try:
            async with asyncio.timeout(patience):
                event = await self.next_event()
        except TimeoutError:
            raise slow("head", patience) from None
        if not isinstance(event, h11.Request) or not event.http_version.startswith(b"1."):
            raise malformed(400)
        target = event.target.decode("ascii")
        if not target.startswith("/") and "://" in target:  # as proxies write it
            target = "/" + target.partition("://")[2].partition("/")[2]
        path, _, query = target.partition("?")
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        self.check_headers([name for name, _ in event.headers], headers)
        if sum(len(name) + len(value) for name, value in event.headers) + len(target) > HEAD:
            raise malformed(431)
        if {"content-length", "transfer-encoding"} <= headers.keys():  # which one counts is not ours to guess
            raise malformed(400)
        length = int(headers.get("content-length", 0))
        if not length and "transfer-encoding" not in headers:
            await self.next_event()  # the end of a request without a body
        method = event.method.decode("ascii")
        return Request(method, path, query, headers, lambda: self.read_body(length), self.client)

    def check_headers(self, names: list[bytes], headers: dict[str, str]) -> None:
        """Where a header that decides something came twice, or empty, whoever reads it first decides."""
        for name in SINGLE:
            if names.count(name) > 1:
                message = f"The header {name.decode().title()} came more than once; send it once."
                raise Refusal(400, "repeated_header", message)
        if not headers.get("host", "-").strip():
            raise Refusal(400, "no_host", "The header Host is empty; send the server's name in it.")

    async def read_body(self, length: int) -> bytes:
        """All of it, counted as it comes: a length is a promise, and chunks have none."""
        settings = self.site.settings
        if self.parser.their_state is not h11.SEND_BODY:
            return b""
        if length > settings.body:
            raise too_large(settings.body)
        if self.site.held + length > settings.bodies:
            raise no_room()
        if self.parser.they_are_waiting_for_100_continue:
            self.write(CONTINUE)
        parts: list[bytes] = []
        chunks = 0
        try:
            async with asyncio.timeout(settings.body_time):
                while isinstance(event := await self.next_event(), h11.Data):
                    parts.append(bytes(event.data))
                    chunks += event.chunk_start
                    self.held += len(event.data)
                    self.site.held += len(event.data)
                    if self.held > settings.body:
                        raise too_large(settings.body)
                    if self.site.held > settings.bodies:
                        raise no_room()
                    if chunks > CHUNKS:
                        must = f"A body may come in {CHUNKS:,} chunks."
                        raise Refusal(413, "too_many_chunks", must, "more", "Send larger ones.")
        except TimeoutError:
            raise slow("body", settings.body_time) from None
        self.unread = len(self.parser.trailing_data[0])
        if self.unread <= AHEAD and not self.ended.is_set():
            self.transport.resume_reading()  # or nobody would notice that the client leaves
        return b"".join(parts)

    # ---- writing ----------------------------------------------------------------------------

    def write(self, *events: h11.Event) -> None:
        self.transport.write(b"".join(self.parser.send(event) or b"" for event in events))

    async def send(self, response: Response, whole: bool = True) -> None:
        """An answer, with its body unless only its head was asked for."""
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", response.kind),
            ("Content-Length", str(len(response.body))),
            *SECURITY,
            *response.headers,
        ]
        if self.site.stopping or self.parser.their_state is not h11.DONE:  # no next one, or in mid-body
            headers.append(("Connection", "close"))
        body = [h11.Data(data=response.body)] if whole else []
        reason = HTTPStatus(response.status).phrase.encode()
        head = h11.Response(status_code=response.status, headers=headers, reason=reason)
        self.write(head, *body, h11.EndOfMessage())
        async with asyncio.timeout(self.site.settings.body_time):
            await self.flushed.wait()


def network_of(peer: tuple[str, int] | None) -> str:
    """A client's address. Of IPv6 the first half: the rest is each customer's own to choose from."""
    if not peer:
        return ""  # it has gone already
    found = ip_address(peer[0].partition("%")[0])
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or found.exploded[:19])
    return str(found)


def no_room() -> Refusal:
    return busy("There must be room for the request.", "too many others at once")
